package audit

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func open(t *testing.T, change func(*Config)) (*Log, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "audit.log")
	cfg := Config{Path: path, MaxBytes: 1 << 20, Keep: 2, Trouble: func(err error) { t.Errorf("trouble: %v", err) }}
	if change != nil {
		change(&cfg)
	}
	l, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l, path
}

// ids are the request ids in a file, every line of which must be whole.
func ids(t *testing.T, path string) []string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var got []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var e Entry
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Errorf("%s: %q: %v", filepath.Base(path), lines.Text(), err)
			continue
		}
		got = append(got, e.RequestID)
	}
	return got
}

func TestLine(t *testing.T) {
	l, path := open(t, nil)
	e := Entry{
		Time: time.Date(2026, 11, 30, 4, 5, 6, 7000, time.UTC), RequestID: "req-1", Principal: "ci\n{}", Token: "tok", Remote: "unix", Method: "POST",
		Route: "/v1/sandboxes", Argv: []string{"sh", "-c", "echo <&\x1b\xff>\n"}, Status: 201, DurationMS: 1.5,
	}
	e.Touched.Add("snapshot", "py")
	e.Created.Add("sandbox", "sba", "sbb")
	e.Created.Add("snapshot")
	if err := l.Write(e); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"time":"2026-11-30T04:05:06.000007Z","request_id":"req-1","principal":"ci\n{}","token":"tok","remote":"unix","method":"POST",` +
		`"route":"/v1/sandboxes","touched":{"snapshot":["py"]},"created":{"sandbox":["sba","sbb"]},"argv":["sh","-c","echo <&\u001b\ufffd>\n"],` +
		`"status":201,"duration_ms":1.5}` + "\n"
	if diff := cmp.Diff(want, string(text)); diff != "" {
		t.Error(diff)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("others may read it: %v, %v", info.Mode(), err)
	}
}

func TestRotation(t *testing.T) {
	l, path := open(t, func(c *Config) { c.MaxBytes = 500 })
	for i := range 20 {
		if err := l.Write(Entry{RequestID: fmt.Sprint(i), Principal: strings.Repeat("x", 80)}); err != nil {
			t.Fatal(err)
		}
	}
	files, err := filepath.Glob(path + "*")
	if err != nil || len(files) != 3 {
		t.Errorf("files: %v, %v", files, err)
	}
	var all []string
	for _, f := range []string{path + ".2", path + ".1", path} {
		info, err := os.Stat(f)
		if err != nil || info.Size() > 500 {
			t.Errorf("%s: %v, %v", f, info, err)
		}
		all = append(all, ids(t, f)...)
	}
	if len(all) < 4 || all[len(all)-1] != "19" {
		t.Errorf("kept are %v", all)
	}
	for i, id := range all {
		if id != fmt.Sprint(20-len(all)+i) {
			t.Errorf("a line is missing, or twice: %v", all)
		}
	}
}

// TestRotationFails: the line is written all the same, and the trouble told.
func TestRotationFails(t *testing.T) {
	told := 0
	l, path := open(t, func(c *Config) { c.MaxBytes, c.Keep, c.Trouble = 300, 1, func(error) { told++ } })
	for _, dir := range []string{"/x", ""} { // no rename puts a file in the place of a directory
		if err := os.MkdirAll(path+".1"+dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 5 {
		if err := l.Write(Entry{RequestID: fmt.Sprint(i), Principal: strings.Repeat("x", 80)}); err != nil {
			t.Fatal(err)
		}
	}
	if got := ids(t, path); len(got) != 5 || told != 1 {
		t.Errorf("kept are %v, trouble was told %d times", got, told)
	}
}

func TestReopen(t *testing.T) {
	l, path := open(t, nil)
	write := func(id string) {
		t.Helper()
		if err := l.Write(Entry{RequestID: id}); err != nil {
			t.Fatal(err)
		}
	}
	write("a")
	if err := os.Rename(path, path+".moved"); err != nil {
		t.Fatal(err)
	}
	write("b") // nobody has said that it was moved
	if err := l.Reopen(); err != nil {
		t.Fatal(err)
	}
	write("c")
	if diff := cmp.Diff([][]string{{"a", "b"}, {"c"}}, [][]string{ids(t, path+".moved"), ids(t, path)}); diff != "" {
		t.Error(diff)
	}
	if err := os.Rename(filepath.Dir(path), filepath.Dir(path)+".gone"); err != nil {
		t.Fatal(err)
	}
	if err := l.Reopen(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without its directory: %v", err)
	}
	write("d") // into what it had
	if got := ids(t, filepath.Join(filepath.Dir(path)+".gone", "audit.log")); fmt.Sprint(got) != "[c d]" {
		t.Errorf("after that: %v", got)
	}
}

// TestTornLine: what a crash or a full disk has cut off spoils no line after it.
func TestTornLine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	if err := os.WriteFile(path, []byte(`{"request_id":"whole"}`+"\n"+`{"request_`), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := Open(Config{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := l.Write(Entry{RequestID: "next"}); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if lines := strings.Split(string(text), "\n"); len(lines) != 4 || !strings.Contains(lines[2], `"next"`) {
		t.Errorf("%q", lines)
	}
}

func TestFullDisk(t *testing.T) {
	l, path := open(t, nil)
	// A limit on the size of files fails as a full disk does: a part is written, the rest is not.
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &lim); err != nil {
		t.Fatal(err)
	}
	if err := l.Write(Entry{RequestID: "before"}); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: uint64(info.Size()) + 10, Max: lim.Max}); err != nil {
		t.Fatal(err)
	}
	first, second := l.Write(Entry{RequestID: "cut"}), l.Write(Entry{RequestID: "lost"})
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &lim); err != nil {
		t.Fatal(err)
	}
	if first == nil || second == nil || l.Failed() != 2 {
		t.Errorf("a full disk: %v, %v, %d failed", first, second, l.Failed())
	}
	if err := l.Write(Entry{RequestID: "after"}); err != nil {
		t.Errorf("with room again: %v", err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
	if len(lines) != 3 || !strings.Contains(lines[2], `"after"`) {
		t.Errorf("%q", lines)
	}
}

func TestRefusedPlaces(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"", dir, fifo, filepath.Join(dir, "missing", "log"), "/dev/null"} {
		if l, err := Open(Config{Path: path}); err == nil {
			_ = l.Close()
			t.Errorf("%q was opened", path)
		}
	}
}

func TestArgv(t *testing.T) {
	long := strings.Repeat("y", maxArgv)
	for _, tt := range []struct {
		how   Argv
		argv  []string
		shown []string
		cut   bool
	}{
		{Full, nil, nil, false},
		{None, nil, nil, false},
		{Full, []string{"a", "b"}, []string{"a", "b"}, false},
		{Program, []string{"a", "secret"}, []string{"a"}, true},
		{Program, []string{"a"}, []string{"a"}, false},
		{None, []string{"a", "b"}, nil, true},
		{Full, []string{"ab", long, "c"}, []string{"ab", long[:maxArgv-2]}, true},
	} {
		shown, cut := tt.how.Of(tt.argv)
		if diff := cmp.Diff(tt.shown, shown); diff != "" || cut != tt.cut {
			t.Errorf("%s of %.40q: cut %t, %s", tt.how, tt.argv, cut, diff)
		}
	}
}

func TestConcurrentWriters(t *testing.T) {
	l, path := open(t, func(c *Config) { c.MaxBytes, c.Keep = 10_000, 100 })
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 50 {
				if err := l.Write(Entry{RequestID: fmt.Sprintf("%d-%d", w, i)}); err != nil {
					t.Error(err)
				}
				if i == 25 {
					if err := l.Reopen(); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	files, err := filepath.Glob(path + "*")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, f := range files {
		for _, id := range ids(t, f) {
			seen[id] = true
		}
	}
	if len(seen) != 400 {
		t.Errorf("%d lines of 400", len(seen))
	}
}

func BenchmarkWrite(b *testing.B) {
	l, err := Open(Config{Path: filepath.Join(b.TempDir(), "log"), MaxBytes: 16 << 20, Keep: 1})
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	for b.Loop() {
		if err := l.Write(Entry{RequestID: "req-1", Principal: "owner", Route: "/v1/sandboxes", Argv: []string{"true"}}); err != nil {
			b.Fatal(err)
		}
	}
}
