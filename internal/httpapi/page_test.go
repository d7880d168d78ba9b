package httpapi

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

type thing struct {
	made int64
	name string
}

func thingKey(t *thing) string { return oldestFirst(t.made, t.name) }

// pageOf is a page of list, and the URL of the next.
func pageOf(t *testing.T, list []thing, path string) (names []string, next string) {
	t.Helper()
	w := httptest.NewRecorder()
	got, err := page(w, httptest.NewRequest(http.MethodGet, path, http.NoBody), list, thingKey)
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range got {
		names = append(names, g.name)
	}
	next, _, _ = strings.Cut(strings.TrimPrefix(w.Header().Get("Link"), "<"), ">")
	u, err := url.Parse(next)
	if err != nil {
		t.Fatal(err)
	}
	if c := w.Header().Get(nextCursor); c != u.Query().Get("cursor") {
		t.Errorf("%s is %q, the link %s", nextCursor, c, next)
	}
	return names, next
}

func things() []thing {
	var all []thing
	for i := range 10 {
		all = append(all, thing{int64(100 + i/3), fmt.Sprintf("t%d", i)})
	}
	return all
}

func TestPagesAreTheWhole(t *testing.T) {
	var want []string
	for _, th := range things() {
		want = append(want, th.name)
	}
	for limit := 1; limit <= 11; limit++ {
		var got []string
		next := fmt.Sprintf("/v1/things?label=a%%3Db&limit=%d", limit)
		for next != "" {
			var names []string
			if names, next = pageOf(t, things(), next); len(names) > limit {
				t.Fatalf("limit %d: a page of %d", limit, len(names))
			}
			got = append(got, names...)
			if next != "" && !strings.Contains(next, "label=a%3Db") {
				t.Errorf("%s has lost the filter", next)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("limit %d: %s", limit, diff)
		}
	}
}

func TestPagesWhileThingsChange(t *testing.T) {
	list := things()
	first, next := pageOf(t, slices.Clone(list), "/v1/things?limit=4")
	// The page's last is gone, one before it too, and two have come.
	list = slices.DeleteFunc(list, func(th thing) bool { return th.name == "t3" || th.name == "t0" })
	list = append(list, thing{200, "new"}, thing{1, "old"})
	rest, next := pageOf(t, list, strings.Replace(next, "limit=4", "limit=100", 1))
	want := []string{"t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7", "t8", "t9", "new"}
	if diff := cmp.Diff(want, append(first, rest...)); diff != "" || next != "" {
		t.Error(diff, next)
	}
}

func TestWholeListsStayAsTheyAre(t *testing.T) {
	list := []thing{{3, "c"}, {1, "a"}, {2, "b"}}
	names, next := pageOf(t, list, "/v1/things")
	if diff := cmp.Diff([]string{"c", "a", "b"}, names); diff != "" || next != "" {
		t.Error(diff, next)
	}
}

func TestNewestFirst(t *testing.T) {
	keys := []string{newestFirst(1, "a"), newestFirst(2, "b"), newestFirst(2, "a"), newestFirst(-5, "x")}
	slices.Sort(keys)
	want := []string{newestFirst(2, "a"), newestFirst(2, "b"), newestFirst(1, "a"), newestFirst(0, "x")}
	if diff := cmp.Diff(want, keys); diff != "" {
		t.Error(diff)
	}
}

func TestBadCursors(t *testing.T) {
	h := testServer(t)
	for _, path := range []string{"/v1/snapshots", "/v1/sandboxes", "/v1/images", "/v1/workspaces"} {
		for _, q := range []string{"cursor=", "cursor=!", "cursor=%00", "cursor=6", "cursor=6G", "cursor=AB", "cursor=" + strings.Repeat("a", 802), "limit=0", "limit=1001", "limit=x"} {
			if code, e := turnedDown(t, h, httptest.NewRequest(http.MethodGet, path+"?"+q, http.NoBody)); code != http.StatusBadRequest {
				t.Errorf("%s?%s: %d %s", path, q, code, e.Message)
			}
		}
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, path+"?limit=5&cursor=61", http.NoBody))
		if rec.Code != http.StatusOK || strings.TrimSpace(rec.Body.String()) != "[]" {
			t.Errorf("%s: %d %s", path, rec.Code, rec.Body)
		}
	}
}
