package httpapi

import (
	"encoding/hex"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"slices"
	"sort"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/host"
)

// maxPage bounds a page; a list without a limit is whole.
const maxPage = 1000

// nextCursor is the header that has the cursor of the page that follows.
const nextCursor = "X-Next-Cursor"

// paged are the parameters of a list that is given in pages to those who ask for them.
func paged(others ...parameter) []parameter {
	return append(others,
		parameter{name: "limit", kind: integer, least: 1, most: maxPage, about: "At most so many; the header " + nextCursor + " has the cursor of the next page, if there is one."},
		parameter{name: "cursor", pattern: `^([0-9a-f]{2}){1,400}$`, form: "one that came with a page, or none to begin", about: "Go on where the page ended that came with this cursor."},
	)
}

// page is the part of a list that a request asks for: all of it, unless it has a limit or a cursor. Pages are in the order
// of key, which differs for any two: what is there all the time is in one page, whatever comes and goes meanwhile.
func page[T any](w http.ResponseWriter, r *http.Request, list []T, key func(*T) string) ([]T, error) {
	q := r.URL.Query()
	if !q.Has("limit") && !q.Has("cursor") {
		return list, nil
	}
	slices.SortFunc(list, func(a, b T) int { return strings.Compare(key(&a), key(&b)) })
	if text := q.Get("cursor"); text != "" {
		after, err := hex.DecodeString(text)
		if err != nil {
			return nil, fmt.Errorf("%w: cursor is %.40q; give one that came with a page, or none to begin", host.ErrInvalid, text)
		}
		list = list[sort.Search(len(list), func(i int) bool { return key(&list[i]) > string(after) }):]
	}
	limit := len(list)
	if n, err := strconv.Atoi(q.Get("limit")); err == nil { // else none is given; it has been looked at before
		limit = n
	}
	if limit >= len(list) {
		return list, nil
	}
	list = list[:limit]
	next := hex.EncodeToString([]byte(key(&list[limit-1])))
	q.Set("cursor", next)
	w.Header().Set(nextCursor, next)
	w.Header().Set("Link", "<"+(&url.URL{Path: r.URL.Path, RawQuery: q.Encode()}).String()+`>; rel="next"`)
	return list, nil
}

// oldestFirst and newestFirst make keys of the time at which something was made, and of its name.
func oldestFirst(unix int64, name string) string { return fmt.Sprintf("%020d %s", max(0, unix), name) }

func newestFirst(unix int64, name string) string {
	return oldestFirst(math.MaxInt64-max(0, unix), name)
}

// asked reports whether a list's filter lets v through: it is not given, or is v.
func asked(q url.Values, name, v string) bool { return !q.Has(name) || q.Get(name) == v }
