package httpapi

import (
	"bytes"
	"container/list"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// repliesFile has replies for the next daemon: a JSON line each, appended. It is not synced: it outlives its daemon, and what
// a host that fails loses of it is a key that is free again. Its zero value keeps nothing.
type repliesFile struct {
	path string
	log  *slog.Logger

	size int64 // -1: what is there is not to be appended to
	most int64 // beyond this it is written anew, without what was forgotten
}

const (
	leastRewritten = 4 << 20       // a file that is smaller is not written anew
	maxRepliesFile = 4 * keptBytes // one of ours is never larger
)

// keptLine is a line of it.
type keptLine struct {
	Principal string      `json:"principal"`
	Key       string      `json:"key"`
	Request   []byte      `json:"request"` // digest
	Since     time.Time   `json:"since"`
	Status    int         `json:"status"`
	Header    http.Header `json:"header"`
	Body      []byte      `json:"body"`
}

// read is what it has, the oldest first, but for what is too old. What cannot be read is left out: its keys are free.
func (f *repliesFile) read(now time.Time) []*kept {
	if f.path == "" {
		return nil
	}
	f.size = -1 // so that the first reply cleans up
	text, err := readBounded(f.path, maxRepliesFile)
	if err != nil {
		if !errors.Is(err, os.ErrNotExist) {
			f.log.Warn("read the replies that an earlier daemon has kept", "error", err)
		}
		return nil
	}
	var all []*kept
	for line := range bytes.Lines(text) {
		if entry := parseKept(line); entry != nil && now.Sub(entry.since) <= keptFor && !entry.since.After(now) {
			all = append(all, entry)
		}
	}
	return all
}

// readBounded reads a regular file that is no larger than that.
func readBounded(path string, most int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > most {
		return nil, errors.New("it is no file of ours")
	}
	return io.ReadAll(io.LimitReader(f, most))
}

// parseKept reads a line; nil: it is none.
func parseKept(line []byte) *kept {
	var l keptLine
	if json.Unmarshal(line, &l) != nil || len(l.Request) != sha256.Size || l.Status < 200 || l.Status > 299 ||
		checkKey([]string{l.Key}) != nil || len(l.Body) > keptBytes {
		return nil
	}
	return &kept{
		name: replyKey{l.Principal, l.Key}, request: [sha256.Size]byte(l.Request), since: l.Since, status: l.Status, header: l.Header, body: l.Body,
	}
}

func (k *kept) line() ([]byte, error) {
	text, err := json.Marshal(keptLine{k.name.principal, k.name.key, k.request[:], k.since, k.status, k.header, k.body})
	return append(text, '\n'), err
}

// add writes a reply down, and all if the file has grown too large or what is at its end is not known. A failure is only
// logged: the reply is kept in memory, as long as this daemon runs.
func (f *repliesFile) add(entry *kept, all *list.List) {
	if f.path == "" {
		return
	}
	err := f.append(entry)
	if f.size < 0 || f.size > f.most {
		err = f.rewrite(all)
	}
	if err != nil {
		f.log.Warn("keep a reply for the next daemon", "error", err)
	}
}

func (f *repliesFile) append(entry *kept) error {
	if f.size < 0 {
		return nil
	}
	text, err := entry.line()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(f.path, os.O_WRONLY|os.O_APPEND|unix.O_NOFOLLOW, 0)
	if err == nil {
		_, err = out.Write(text)
		err = errors.Join(err, out.Close())
	}
	if err != nil {
		f.size = -1
		return err
	}
	f.size += int64(len(text))
	return nil
}

func (f *repliesFile) rewrite(all *list.List) error {
	f.size = -1
	var text []byte
	for at := all.Front(); at != nil; at = at.Next() {
		if k := at.Value.(*kept); k.status != 0 {
			line, err := k.line()
			if err != nil {
				return err
			}
			text = append(text, line...)
		}
	}
	tmp := f.path + ".tmp"
	if err := os.WriteFile(tmp, text, 0o600); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	if err := os.Rename(tmp, f.path); err != nil {
		return err
	}
	f.size = int64(len(text))
	f.most = max(leastRewritten, 2*f.size)
	return nil
}

// KeepReplies has the replies to requests with an Idempotency-Key outlive this daemon, in a file. It is called before any is
// served.
func (s *Server) KeepReplies(path string, log *slog.Logger) {
	s.replies.file = repliesFile{path: path, log: log}
}
