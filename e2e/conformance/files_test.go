package conformance

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"net/textproto"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

// fileCase is one statement of the protocol about files. Section is the one of e2b-protocol.md that makes it.
type fileCase struct {
	section, name string
	do            func(f *fileTest)
}

// fileTest is a case that runs: a directory of its own in the shared sandbox, which setup has filled.
type fileTest struct {
	*guest
	dir string
}

func (f *fileTest) at(name string) string { return f.dir + "/" + name }

func (f *fileTest) stat(path string) wire.EntryInfo {
	f.t.Helper()
	e, err := f.entry(wire.MethodFileStat, wire.PathRequest{Path: path})
	if err != nil {
		f.t.Fatalf("stat %s: %v", path, err)
	}
	return e
}

func (f *fileTest) entry(method string, req any) (wire.EntryInfo, error) {
	f.t.Helper()
	var r wire.EntryReply
	err := f.unary(method, req, &r)
	return r.Entry, err
}

// refused checks the code of a call.
func (f *fileTest) refused(want, method string, req any) {
	f.t.Helper()
	if got := code(f.unary(method, req, nil)); got != want {
		f.t.Errorf("%s %+v: %q, want %q", method, req, got, want)
	}
}

func (f *fileTest) list(path string, depth uint32) []wire.EntryInfo {
	f.t.Helper()
	var r wire.EntriesReply
	if err := f.unary(wire.MethodFileList, wire.ListDirRequest{Path: path, Depth: depth}, &r); err != nil {
		f.t.Fatalf("list %s: %v", path, err)
	}
	return r.Entries
}

func names(entries []wire.EntryInfo, below string) string {
	var list []string
	for _, e := range entries {
		list = append(list, strings.TrimPrefix(e.Path, below+"/"))
	}
	slices.Sort(list)
	return strings.Join(list, " ")
}

func (f *fileTest) equal(what string, got, want any) {
	f.t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		f.t.Errorf("%s is %v, want %v", what, got, want)
	}
}

// answer is a reply, whose body the end of the test closes.
type answer struct {
	Status        string
	StatusCode    int
	Header        http.Header
	ContentLength int64
	Body          io.Reader
}

// http is the daemon's HTTP, without the compression and following that net/http would add.
func (f *fileTest) http(method, route string, body io.Reader, header ...string) *answer {
	f.t.Helper()
	r, err := http.NewRequestWithContext(f.ctx, method, "http://forkd/v1/sandboxes/"+f.id+"/files"+route, body)
	if err != nil {
		f.t.Fatal(err)
	}
	r.Header.Set("Accept-Encoding", "identity")
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(home(), "forkd.sock"))
	}}
	resp, err := transport.RoundTrip(r)
	if err != nil {
		f.t.Fatalf("%s %s: %v", method, route, err)
	}
	f.t.Cleanup(func() { _ = resp.Body.Close() })
	return &answer{resp.Status, resp.StatusCode, resp.Header, resp.ContentLength, resp.Body}
}

func query(path string) string { return "?path=" + url.QueryEscape(path) }

func (f *fileTest) get(path string, header ...string) (*answer, string) {
	f.t.Helper()
	resp := f.http(http.MethodGet, query(path), nil, header...)
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Fatalf("GET %s: %v", path, err)
	}
	return resp, string(b)
}

// put uploads and returns the status and the error or files of the reply.
func (f *fileTest) put(route string, body io.Reader, header ...string) (int, *api.Error, []api.File) {
	f.t.Helper()
	resp := f.http(http.MethodPost, route, body, append([]string{"Content-Type", "application/octet-stream"}, header...)...)
	var files []api.File
	e := &api.Error{}
	var err error
	if resp.StatusCode == http.StatusOK {
		err = json.NewDecoder(resp.Body).Decode(&files)
	} else {
		err = json.NewDecoder(resp.Body).Decode(e)
	}
	if err != nil {
		f.t.Errorf("reply to an upload, %s: %v", resp.Status, err)
	}
	return resp.StatusCode, e, files
}

func (f *fileTest) cat(path string) string {
	f.t.Helper()
	return f.sh("cat '" + path + "'")
}

func formOf(parts ...[3]string) (string, io.Reader) {
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for _, p := range parts {
		part, _ := w.CreatePart(textproto.MIMEHeader{"Content-Disposition": {fmt.Sprintf("form-data; name=%q; filename=%q", p[0], p[1])}})
		_, _ = io.WriteString(part, p[2])
	}
	_ = w.Close()
	return w.FormDataContentType(), &b
}

func gzipped(text string) io.Reader {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = io.WriteString(z, text)
	_ = z.Close()
	return &b
}

// watch is a stream of WatchDir that has started.
func (f *fileTest) watch(req wire.WatchRequest) *wire.Stream {
	f.t.Helper()
	s := f.open(wire.MethodWatch, req)
	var e wire.WatchEvent
	if err := s.RecvMessage(&e); err != nil || e.Start == nil {
		f.t.Fatalf("the first message is %+v, %v, want start", e, err)
	}
	return s
}

// until collects events up to one.
func (f *fileTest) until(s *wire.Stream, kind, name string) (seen []string, last wire.FileEvent) {
	f.t.Helper()
	stop := context.AfterFunc(f.ctx, func() { _ = s.Close() })
	defer stop()
	for {
		var e wire.WatchEvent
		if err := s.RecvMessage(&e); err != nil {
			f.t.Fatalf("waiting for %s of %s, after %q: %v", kind, name, seen, err)
		}
		if e.Filesystem == nil {
			continue
		}
		seen = append(seen, e.Filesystem.Type+" "+e.Filesystem.Name)
		if e.Filesystem.Type == kind && e.Filesystem.Name == name {
			return seen, *e.Filesystem
		}
	}
}

// stranger is a user without an account.
const stranger = "12345"

func fileCases() []fileCase {
	path := func(p string) wire.PathRequest { return wire.PathRequest{Path: p} }
	as := func(p string) wire.PathRequest { return wire.PathRequest{Path: p, User: stranger} }
	return []fileCase{
		// Stat.
		{"5 EntryInfo", "stat a file", func(f *fileTest) {
			e := f.stat(f.at("file"))
			f.equal("entry", []any{e.Name, e.Type, e.Path, e.Size, e.Mode, e.Permissions, e.Owner, e.Group, e.SymlinkTarget},
				[]any{"file", wire.TypeFile, f.at("file"), 5, 0o640, "-rw-r-----", "root", "root", (*string)(nil)})
		}},
		{"5 EntryInfo", "stat a directory", func(f *fileTest) {
			e := f.stat(f.at("d"))
			f.equal("entry", []any{e.Type, e.Permissions}, []any{wire.TypeDirectory, "drwxr-xr-x"})
		}},
		{"5 EntryInfo", "sizes are strings in JSON", func(f *fileTest) {
			var raw struct {
				Entry map[string]any `json:"entry"`
			}
			if err := f.unary(wire.MethodFileStat, path(f.at("file")), &raw); err != nil {
				f.t.Fatal(err)
			}
			f.equal("size", fmt.Sprintf("%T %v", raw.Entry["size"], raw.Entry["size"]), "string 5")
		}},
		{"5 EntryInfo", "modified_time has nanoseconds", func(f *fileTest) {
			f.sh("touch -d '2020-01-02 03:04:05.678901234Z' " + f.at("file"))
			f.equal("time", f.stat(f.at("file")).ModifiedTime.UTC().Format(time.RFC3339Nano), "2020-01-02T03:04:05.678901234Z")
		}},
		{"5 EntryInfo", "special bits", func(f *fileTest) {
			f.sh("chmod 4755 " + f.at("file") + "; chmod 1777 " + f.at("d"))
			f.equal("file", []any{f.stat(f.at("file")).Mode, f.stat(f.at("file")).Permissions}, []any{0o4755, "-rwsr-xr-x"})
			f.equal("directory", f.stat(f.at("d")).Permissions, "drwxrwxrwt")
		}},
		{"5 EntryInfo", "owners without a name are numbers", func(f *fileTest) {
			f.sh("chown 12345:54321 " + f.at("file"))
			e := f.stat(f.at("file"))
			f.equal("owner", e.Owner+":"+e.Group, "12345:54321")
		}},
		{"5 EntryInfo", "a link has its target's type and path", func(f *fileTest) {
			e := f.stat(f.at("link"))
			if e.SymlinkTarget == nil {
				f.t.Fatal("no target")
			}
			f.equal("link", []any{e.Type, e.Mode, *e.SymlinkTarget, e.Permissions[:1]}, []any{wire.TypeFile, 0o640, f.at("file"), "l"})
		}},
		{"5 EntryInfo", "a link to a directory is one", func(f *fileTest) {
			f.equal("type", f.stat(f.at("dirlink")).Type, wire.TypeDirectory)
		}},
		{"5 EntryInfo", "a link to nothing is a link", func(f *fileTest) {
			e := f.stat(f.at("dangling"))
			f.equal("type", e.Type, wire.TypeSymlink)
			if e.SymlinkTarget == nil || *e.SymlinkTarget != "nothing" {
				f.t.Errorf("target %v", e.SymlinkTarget)
			}
		}},
		{"5 EntryInfo", "a link to itself is a link", func(f *fileTest) {
			f.equal("type", f.stat(f.at("loop")).Type, wire.TypeSymlink)
		}},
		{"5 FileType", "a pipe has no type", func(f *fileTest) {
			e := f.stat(f.at("pipe"))
			f.equal("pipe", e.Type+e.Permissions[:1], wire.TypeOther+"p")
		}},
		{"5 FileType", "a device has no type", func(f *fileTest) {
			e := f.stat("/dev/null")
			f.equal("device", e.Type+e.Permissions[:1], wire.TypeOther+"c")
		}},
		{"5 semantics", "stat missing", func(f *fileTest) { f.refused(wire.CodeNotFound, wire.MethodFileStat, path(f.at("no"))) }},
		{"5 semantics", "stat below a file", func(f *fileTest) {
			f.refused(wire.CodeInvalid, wire.MethodFileStat, path(f.at("file/x")))
		}},
		{"5 semantics", "paths are relative to the home", func(f *fileTest) {
			f.sh("touch ~/conformance-home")
			for _, p := range []string{"conformance-home", "~/conformance-home", "./x/../conformance-home"} {
				f.equal(p, f.stat(p).Path, "/root/conformance-home")
			}
			f.equal("~", f.stat("~").Path, "/root")
		}},
		{"5 semantics", "no other user's home", func(f *fileTest) { f.refused(wire.CodeInvalid, wire.MethodFileStat, path("~root/x")) }},
		{"5 semantics", "no path is the working directory", func(f *fileTest) { f.equal("path", f.stat("").Path, "/root") }},
		{"5 semantics", "stat as who may not", func(f *fileTest) {
			f.refused(wire.CodeDenied, wire.MethodFileStat, as(f.at("closed/x")))
		}},
		{"5 semantics", "unknown user", func(f *fileTest) {
			got := code(f.unary(wire.MethodFileStat, wire.PathRequest{Path: "/", User: "nobodyhere"}, nil))
			if got != wire.CodeUnknownUser && got != wire.CodeInvalid {
				f.t.Errorf("%q", got)
			}
		}},
		{"5 semantics", "NUL is no part of a path", func(f *fileTest) { f.refused(wire.CodeInvalid, wire.MethodFileStat, path("/a\x00b")) }},
		{"5 semantics", "a name too long", func(f *fileTest) {
			f.refused(wire.CodeInvalid, wire.MethodFileStat, path(f.at(strings.Repeat("x", 300))))
		}},

		// ListDir.
		{"5 ListDir", "depth 0 is 1", func(f *fileTest) {
			f.equal("names", names(f.list(f.at("d"), 0), f.at("d")), "e up")
		}},
		{"5 ListDir", "depth 2", func(f *fileTest) {
			f.equal("names", names(f.list(f.at("d"), 2), f.at("d")), "e e/f up")
		}},
		{"5 ListDir", "links are not followed below", func(f *fileTest) {
			f.equal("names", names(f.list(f.at("d"), 9), f.at("d")), "e e/f up")
		}},
		{"5 ListDir", "through a link, by the path asked for", func(f *fileTest) {
			f.equal("names", names(f.list(f.at("dirlink"), 1), f.at("dirlink")), "e up")
		}},
		{"5 ListDir", "nothing in it", func(f *fileTest) {
			f.sh("mkdir " + f.at("empty"))
			if got := f.list(f.at("empty"), 1); got == nil || len(got) != 0 {
				f.t.Errorf("%v", got)
			}
		}},
		{"5 ListDir", "missing", func(f *fileTest) {
			f.refused(wire.CodeNotFound, wire.MethodFileList, wire.ListDirRequest{Path: f.at("no")})
		}},
		{"5 ListDir", "a file", func(f *fileTest) {
			f.refused(wire.CodeInvalid, wire.MethodFileList, wire.ListDirRequest{Path: f.at("file")})
		}},
		{"5 ListDir", "a link to nothing", func(f *fileTest) {
			f.refused(wire.CodeNotFound, wire.MethodFileList, wire.ListDirRequest{Path: f.at("dangling")})
		}},
		{"5 ListDir", "a link to itself", func(f *fileTest) {
			f.refused(wire.CodePrecondition, wire.MethodFileList, wire.ListDirRequest{Path: f.at("loop")})
		}},
		{"5 ListDir", "as who may not", func(f *fileTest) {
			f.refused(wire.CodeDenied, wire.MethodFileList, wire.ListDirRequest{Path: f.at("closed"), User: stranger})
		}},
		{"5 ListDir", "names that are not UTF-8", func(f *fileTest) {
			f.sh("mkdir " + f.at("odd") + " && printf x > " + f.at("odd") + `/$'caf\xe9'`)
			list := f.list(f.at("odd"), 1)
			if len(list) != 1 || list[0].Name != "caf\x00e9" {
				f.t.Fatalf("%+v", list)
			}
			f.equal("size", f.stat(list[0].Path).Size, 1)
		}},

		// MakeDir.
		{"5 MakeDir", "with parents", func(f *fileTest) {
			e, err := f.entry(wire.MethodFileMakeDir, path(f.at("new/a/b")))
			f.equal("made", []any{e.Type, e.Permissions, e.Path, err}, []any{wire.TypeDirectory, "drwxr-xr-x", f.at("new/a/b"), nil})
		}},
		{"5 semantics", "make what exists", func(f *fileTest) { f.refused(wire.CodeExists, wire.MethodFileMakeDir, path(f.at("d"))) }},
		{"5 MakeDir", "over a file", func(f *fileTest) { f.refused(wire.CodeInvalid, wire.MethodFileMakeDir, path(f.at("file"))) }},
		{"5 MakeDir", "below a file", func(f *fileTest) {
			f.refused(wire.CodeInvalid, wire.MethodFileMakeDir, path(f.at("file/d")))
		}},
		{"5 MakeDir", "belongs to the user", func(f *fileTest) {
			e, err := f.entry(wire.MethodFileMakeDir, as(f.at("open/mine/too")))
			f.equal("owner", []any{e.Owner, f.stat(f.at("open/mine")).Owner, err}, []any{stranger, stranger, nil})
		}},
		{"5 MakeDir", "as who may not", func(f *fileTest) { f.refused(wire.CodeDenied, wire.MethodFileMakeDir, as(f.at("x"))) }},

		// Move.
		{"5 Move", "a file, into directories that are made", func(f *fileTest) {
			e, err := f.entry(wire.MethodFileMove, wire.MoveRequest{Source: f.at("file"), Destination: f.at("m/n/file")})
			f.equal("moved", []any{e.Path, e.Size, err}, []any{f.at("m/n/file"), 5, nil})
			f.refused(wire.CodeNotFound, wire.MethodFileStat, path(f.at("file")))
		}},
		{"5 Move", "a directory", func(f *fileTest) {
			e, err := f.entry(wire.MethodFileMove, wire.MoveRequest{Source: f.at("d"), Destination: f.at("d2")})
			f.equal("moved", []any{e.Type, err, f.stat(f.at("d2/e/f")).Size}, []any{wire.TypeDirectory, nil, 0})
		}},
		{"5 Move", "over a file", func(f *fileTest) {
			_, err := f.entry(wire.MethodFileMove, wire.MoveRequest{Source: f.at("file"), Destination: f.at("d/e/f")})
			f.equal("size", []any{f.stat(f.at("d/e/f")).Size, err}, []any{5, nil})
		}},
		{"5 Move", "a link itself", func(f *fileTest) {
			e, err := f.entry(wire.MethodFileMove, wire.MoveRequest{Source: f.at("link"), Destination: f.at("link2")})
			f.equal("link", []any{e.Permissions[:1], err, f.stat(f.at("file")).Size}, []any{"l", nil, 5})
		}},
		{"5 Move", "missing", func(f *fileTest) {
			f.refused(wire.CodeNotFound, wire.MethodFileMove, wire.MoveRequest{Source: f.at("no"), Destination: f.at("x/y")})
			f.refused(wire.CodeNotFound, wire.MethodFileStat, path(f.at("x")))
		}},
		{"5 Move", "a directory into itself", func(f *fileTest) {
			f.refused(wire.CodeInvalid, wire.MethodFileMove, wire.MoveRequest{Source: f.at("d"), Destination: f.at("d/e/d")})
		}},
		{"5 Move", "over a full directory", func(f *fileTest) {
			f.refused(wire.CodeExists, wire.MethodFileMove, wire.MoveRequest{Source: f.at("open"), Destination: f.at("d")})
		}},
		{"5 Move", "to another file system", func(f *fileTest) {
			f.refused(wire.CodePrecondition, wire.MethodFileMove, wire.MoveRequest{Source: f.at("file"), Destination: "/dev/shm/conformance"})
		}},
		{"5 Move", "nowhere", func(f *fileTest) {
			f.refused(wire.CodeInvalid, wire.MethodFileMove, wire.MoveRequest{Source: f.at("file")})
		}},

		// Remove.
		{"5 Remove", "a tree", func(f *fileTest) {
			f.refused("", wire.MethodFileRemove, path(f.at("d")))
			f.refused(wire.CodeNotFound, wire.MethodFileStat, path(f.at("d")))
		}},
		{"5 semantics", "remove missing", func(f *fileTest) { f.refused(wire.CodeNotFound, wire.MethodFileRemove, path(f.at("no"))) }},
		{"5 Remove", "a link, not its target", func(f *fileTest) {
			f.refused("", wire.MethodFileRemove, path(f.at("dirlink")))
			f.equal("type", f.stat(f.at("d")).Type, wire.TypeDirectory)
		}},
		{"5 Remove", "not everything", func(f *fileTest) { f.refused(wire.CodeInvalid, wire.MethodFileRemove, path("/")) }},
		{"5 Remove", "not nothing", func(f *fileTest) { f.refused(wire.CodeInvalid, wire.MethodFileRemove, path("")) }},
		{"5 Remove", "as who may not", func(f *fileTest) { f.refused(wire.CodeDenied, wire.MethodFileRemove, as(f.at("file"))) }},

		// Compose.
		{"5 compose", "files become one", func(f *fileTest) {
			f.sh("printf a > " + f.at("1") + "; printf b > " + f.at("2"))
			e, err := f.entry(wire.MethodFileCompose, wire.ComposeRequest{Sources: []string{f.at("1"), f.at("2")}, Destination: f.at("deep/all")})
			f.equal("composed", []any{e.Size, err, f.cat(f.at("deep/all"))}, []any{2, nil, "ab"})
			f.refused(wire.CodeNotFound, wire.MethodFileStat, path(f.at("1")))
		}},
		{"5 compose", "one is missing", func(f *fileTest) {
			f.refused(wire.CodeNotFound, wire.MethodFileCompose, wire.ComposeRequest{Sources: []string{f.at("file"), f.at("no")}, Destination: f.at("all")})
			f.equal("size", f.stat(f.at("file")).Size, 5)
		}},
		{"5 compose", "of itself", func(f *fileTest) {
			f.refused(wire.CodeInvalid, wire.MethodFileCompose, wire.ComposeRequest{Sources: []string{f.at("file")}, Destination: f.at("file")})
		}},

		// Watches.
		{"5 WatchDir", "every type of event, relative names", func(f *fileTest) {
			s := f.watch(wire.WatchRequest{Path: f.at("open")})
			f.sh("cd " + f.at("open") + "; echo x > a; chmod 600 a; mv a b; rm b; mkdir end")
			seen, _ := f.until(s, wire.EventCreate, "end")
			want := []string{
				wire.EventCreate + " a", wire.EventWrite + " a", wire.EventChmod + " a", wire.EventRename + " a",
				wire.EventCreate + " b", wire.EventRemove + " b", wire.EventCreate + " end",
			}
			f.equal("events", seen, want)
		}},
		{"5 WatchDir", "not below, unless asked to", func(f *fileTest) {
			s := f.watch(wire.WatchRequest{Path: f.at("d")})
			f.sh("echo x > " + f.at("d/e/g") + "; mkdir " + f.at("d/end"))
			seen, _ := f.until(s, wire.EventCreate, "end")
			f.equal("events", seen, []string{wire.EventCreate + " end"})
		}},
		{"6 recursive watch", "new directories, too, with nothing missed", func(f *fileTest) {
			s := f.watch(wire.WatchRequest{Path: f.at("d"), Recursive: true})
			f.sh("cd " + f.at("d") + "; mkdir -p n/1/2/3; for i in n n/1 n/1/2 n/1/2/3; do echo x > $i/f; done; mkdir end")
			seen, _ := f.until(s, wire.EventCreate, "end")
			for _, name := range []string{"n", "n/1", "n/1/2", "n/1/2/3", "n/f", "n/1/f", "n/1/2/f", "n/1/2/3/f"} {
				n := 0
				for _, event := range seen {
					if event == wire.EventCreate+" "+name {
						n++
					}
				}
				if n != 1 {
					f.t.Errorf("%s was created %d times: %q", name, n, seen)
				}
			}
		}},
		{"6 watch entry info", "entries", func(f *fileTest) {
			s := f.watch(wire.WatchRequest{Path: f.at("open"), IncludeEntry: true})
			f.sh("cd " + f.at("open") + "; printf 12345 > a; rm a")
			_, e := f.until(s, wire.EventCreate, "a")
			_, gone := f.until(s, wire.EventRemove, "a")
			if e.Entry != nil && e.Entry.Path != f.at("open/a") || gone.Entry != nil {
				f.t.Errorf("%+v, %+v", e, gone)
			}
			f.sh("mkdir " + f.at("open/stays"))
			if _, e := f.until(s, wire.EventCreate, "stays"); e.Entry == nil || e.Entry.Type != wire.TypeDirectory || e.Entry.Path != f.at("open/stays") {
				f.t.Errorf("%+v", e)
			}
		}},
		{"5 WatchDir", "the directory is removed", func(f *fileTest) {
			s := f.watch(wire.WatchRequest{Path: f.at("d")})
			f.sh("rm -r " + f.at("d"))
			f.until(s, wire.EventRemove, ".")
			if _, _, err := s.Recv(); !errors.Is(err, io.EOF) {
				f.t.Errorf("the watch goes on: %v", err)
			}
		}},
		{"5 WatchDir", "missing", func(f *fileTest) {
			f.refused(wire.CodeNotFound, wire.MethodWatch, wire.WatchRequest{Path: f.at("no")})
		}},
		{"5 WatchDir", "a file", func(f *fileTest) {
			f.refused(wire.CodeInvalid, wire.MethodWatch, wire.WatchRequest{Path: f.at("file")})
		}},
		{"5 WatchDir", "as who may not", func(f *fileTest) {
			f.refused(wire.CodeDenied, wire.MethodWatch, wire.WatchRequest{Path: f.at("closed"), User: stranger})
		}},
		{"5 CreateWatcher", "events are kept until they are fetched, once", func(f *fileTest) {
			id := f.watcher(wire.WatchRequest{Path: f.at("open")})
			f.sh("touch " + f.at("open/a"))
			f.equal("events", f.fetch(id, "a")[0].Type, wire.EventCreate)
			var again wire.WatcherEvents
			if err := f.unary(wire.MethodWatcherEvents, wire.WatcherReply{WatcherID: id}, &again); err != nil {
				f.t.Error(err)
			}
			for _, e := range again.Events {
				if e.Type == wire.EventCreate {
					f.t.Errorf("again: %+v", e)
				}
			}
			f.refused("", wire.MethodWatcherRemove, wire.WatcherReply{WatcherID: id})
			f.refused(wire.CodeNotFound, wire.MethodWatcherEvents, wire.WatcherReply{WatcherID: id})
		}},
		{"5 CreateWatcher", "a file", func(f *fileTest) {
			f.refused(wire.CodeInvalid, wire.MethodWatcherNew, wire.WatchRequest{Path: f.at("file")})
		}},
		{"5 RemoveWatcher", "unknown", func(f *fileTest) {
			f.refused(wire.CodeNotFound, wire.MethodWatcherRemove, wire.WatcherReply{WatcherID: "wno"})
		}},

		// GET /files.
		{"5 GET /files", "whole", func(f *fileTest) {
			resp, got := f.get(f.at("file"))
			f.equal("reply", []any{resp.StatusCode, resp.ContentLength, got, resp.Header.Get("Accept-Ranges")}, []any{200, 5, "hello", "bytes"})
		}},
		{"5 GET /files", "HEAD", func(f *fileTest) {
			resp := f.http(http.MethodHead, query(f.at("file")), nil)
			f.equal("reply", []any{resp.StatusCode, resp.ContentLength}, []any{200, 5})
		}},
		{"5 GET /files Range", "from and to", func(f *fileTest) {
			resp, got := f.get(f.at("file"), "Range", "bytes=1-3")
			f.equal("reply", []any{resp.StatusCode, got, resp.Header.Get("Content-Range")}, []any{206, "ell", "bytes 1-3/5"})
		}},
		{"5 GET /files Range", "the end", func(f *fileTest) {
			resp, got := f.get(f.at("file"), "Range", "bytes=-2")
			f.equal("reply", []any{resp.StatusCode, got}, []any{206, "lo"})
		}},
		{"5 GET /files Range", "two", func(f *fileTest) {
			resp, got := f.get(f.at("file"), "Range", "bytes=0-0,4-4")
			f.equal("reply", []any{resp.StatusCode, strings.Count(got, "Content-Range")}, []any{206, 2})
		}},
		{"5 GET /files Range", "outside", func(f *fileTest) {
			resp, _ := f.get(f.at("file"), "Range", "bytes=5-")
			f.equal("reply", []any{resp.StatusCode, resp.Header.Get("Content-Range")}, []any{416, "bytes */5"})
		}},
		{"5 GET /files", "not modified", func(f *fileTest) {
			resp, _ := f.get(f.at("file"))
			again, _ := f.get(f.at("file"), "If-None-Match", resp.Header.Get("Etag"))
			f.equal("by tag", again.StatusCode, 304)
			again, _ = f.get(f.at("file"), "If-Modified-Since", resp.Header.Get("Last-Modified"))
			f.equal("by time", again.StatusCode, 304)
			f.sh("echo changed > " + f.at("file"))
			again, _ = f.get(f.at("file"), "If-None-Match", resp.Header.Get("Etag"))
			f.equal("after a change", again.StatusCode, 200)
		}},
		{"5 GET /files gzip", "asked for", func(f *fileTest) {
			resp, got := f.get(f.at("file"), "Accept-Encoding", "gzip")
			z, err := gzip.NewReader(strings.NewReader(got))
			if err != nil {
				f.t.Fatal(err)
			}
			text, err := io.ReadAll(z)
			f.equal("reply", []any{resp.Header.Get("Content-Encoding"), string(text), err}, []any{"gzip", "hello", nil})
		}},
		{"5 errors 406", "no encoding will do", func(f *fileTest) {
			resp, _ := f.get(f.at("file"), "Accept-Encoding", "br, identity;q=0")
			f.equal("status", resp.StatusCode, 406)
		}},
		{"5 errors 404", "missing", func(f *fileTest) {
			resp, got := f.get(f.at("no"))
			f.equal("reply", []any{resp.StatusCode, strings.Contains(got, f.at("no"))}, []any{404, true})
		}},
		{"5 errors 400", "a directory", func(f *fileTest) {
			resp, _ := f.get(f.at("d"))
			f.equal("status", resp.StatusCode, 400)
		}},
		{"5 errors 400", "a pipe, at once", func(f *fileTest) {
			resp, _ := f.get(f.at("pipe"))
			f.equal("status", resp.StatusCode, 400)
		}},
		{"5 GET /files", "a file of /proc", func(f *fileTest) {
			resp, got := f.get("/proc/version")
			f.equal("reply", []any{resp.StatusCode, strings.HasPrefix(got, "Linux version")}, []any{200, true})
		}},
		{"5 GET /files", "holes are zeros", func(f *fileTest) {
			f.sh("truncate -s 1M " + f.at("sparse"))
			_, got := f.get(f.at("sparse"))
			f.equal("zeros", []any{len(got), strings.Count(got, "\x00")}, []any{1 << 20, 1 << 20})
		}},
		{"5 GET /files", "a name for the client's disk", func(f *fileTest) {
			f.sh("touch '" + f.at("grün.txt") + "'")
			resp, _ := f.get(f.at("grün.txt"))
			f.equal("Content-Disposition", resp.Header.Get("Content-Disposition"), "inline; filename*=utf-8''gr%C3%BCn.txt")
		}},
		{"5 GET /files", "as who may not", func(f *fileTest) {
			resp := f.http(http.MethodGet, query(f.at("closed/x"))+"&user="+stranger, nil)
			f.equal("status", resp.StatusCode, 403)
		}},

		// POST /files.
		{"5 POST /files", "a body, into directories that are made", func(f *fileTest) {
			status, _, files := f.put(query(f.at("p/q/up")), strings.NewReader("body"))
			if status != 200 || len(files) != 1 {
				f.t.Fatalf("%d %+v", status, files)
			}
			f.equal("reply", []any{files[0].Name, files[0].Type, files[0].Path, f.cat(f.at("p/q/up"))}, []any{"up", "file", f.at("p/q/up"), "body"})
		}},
		{"5 POST /files", "a setting of the kernel's", func(f *fileTest) {
			status, _, _ := f.put(query("/proc/sys/vm/swappiness"), strings.NewReader("33\n"))
			f.equal("setting", []any{status, f.cat("/proc/sys/vm/swappiness")}, []any{200, "33\n"})
		}},
		{"5 POST /files", "an empty body", func(f *fileTest) {
			status, _, _ := f.put(query(f.at("file")), http.NoBody)
			f.equal("file", []any{status, f.stat(f.at("file")).Size, f.stat(f.at("file")).Mode}, []any{200, 0, 0o640})
		}},
		{"6 octet-stream upload", "a compressed body", func(f *fileTest) {
			status, _, _ := f.put(query(f.at("z")), gzipped("unzipped"), "Content-Encoding", "gzip")
			f.equal("file", []any{status, f.cat(f.at("z"))}, []any{200, "unzipped"})
		}},
		{"5 errors 400", "a body that is not as compressed as it says", func(f *fileTest) {
			status, _, _ := f.put(query(f.at("z")), strings.NewReader("plain, and long enough for a header"), "Content-Encoding", "gzip")
			f.equal("status", status, 400)
			f.refused(wire.CodeNotFound, wire.MethodFileStat, path(f.at("z")))
		}},
		{"5 errors 400", "an encoding that nobody knows", func(f *fileTest) {
			status, _, _ := f.put(query(f.at("z")), strings.NewReader("x"), "Content-Encoding", "br")
			f.equal("status", status, 400)
		}},
		{"9 POST /files", "a form with one file and a path", func(f *fileTest) {
			kind, body := formOf([3]string{"file", f.at("x.txt"), "1"})
			status, _, _ := f.put(query(f.at("x.txt")), body, "Content-Type", kind)
			f.equal("file", []any{status, f.cat(f.at("x.txt"))}, []any{200, "1"})
		}},
		{"9 POST /files", "a form with two files, no path", func(f *fileTest) {
			kind, body := formOf([3]string{"file", f.at("a"), "1"}, [3]string{"file", f.at("sub/b"), "2"})
			status, _, files := f.put("", body, "Content-Type", kind)
			f.equal("files", []any{status, len(files), f.cat(f.at("a")) + f.cat(f.at("sub/b"))}, []any{200, 2, "12"})
		}},
		{"5 POST /files", "the path beats the file name", func(f *fileTest) {
			kind, body := formOf([3]string{"file", "/tmp/conformance-not", "1"})
			status, _, files := f.put(query(f.at("beats")), body, "Content-Type", kind)
			if status != 200 || len(files) != 1 || files[0].Path != f.at("beats") {
				f.t.Errorf("%d %+v", status, files)
			}
		}},
		{"5 POST /files", "other fields are passed over", func(f *fileTest) {
			kind, body := formOf([3]string{"note", f.at("note"), "x"}, [3]string{"file", f.at("a"), "1"})
			status, _, files := f.put("", body, "Content-Type", kind)
			f.equal("files", []any{status, len(files)}, []any{200, 1})
			f.refused(wire.CodeNotFound, wire.MethodFileStat, path(f.at("note")))
		}},
		{"5 errors 400", "two files for one path", func(f *fileTest) {
			kind, body := formOf([3]string{"file", f.at("a"), "1"}, [3]string{"file", f.at("a"), "2"})
			status, e, _ := f.put("", body, "Content-Type", kind)
			f.equal("reply", []any{status, strings.Contains(e.Message, f.at("a")), f.cat(f.at("a"))}, []any{400, true, "1"})
		}},
		{"5 errors 400", "a body without a path", func(f *fileTest) {
			status, _, _ := f.put("", strings.NewReader("x"))
			f.equal("status", status, 400)
		}},
		{"5 errors 400", "over a directory", func(f *fileTest) {
			status, _, _ := f.put(query(f.at("d")), strings.NewReader("x"))
			f.equal("status", status, 400)
		}},
		{"5 POST /files", "into a pipe, at once", func(f *fileTest) {
			status, _, _ := f.put(query(f.at("pipe")), strings.NewReader("x"))
			f.equal("status", status, 400)
		}},
		{"5 POST /files", "through a link", func(f *fileTest) {
			status, _, _ := f.put(query(f.at("link")), strings.NewReader("new"))
			f.equal("file", []any{status, f.cat(f.at("file")), f.stat(f.at("link")).Permissions[:1]}, []any{200, "new", "l"})
		}},
		{"5 POST /files", "belongs to the user", func(f *fileTest) {
			status, _, files := f.put(query(f.at("open/mine"))+"&user="+stranger, strings.NewReader("x"))
			if status != 200 || files[0].Owner != stranger || files[0].Mode != 0o644 {
				f.t.Errorf("%d %+v", status, files)
			}
		}},
		{"5 POST /files", "as who may not", func(f *fileTest) {
			status, e, _ := f.put(query(f.at("file"))+"&user="+stranger, strings.NewReader("x"))
			f.equal("reply", []any{status, e.Code, f.cat(f.at("file"))}, []any{403, api.CodeDenied, "hello"})
		}},
		{"6 file metadata", "headers become metadata", func(f *fileTest) {
			status, _, files := f.put(query(f.at("m")), strings.NewReader("x"), "X-Metadata-Author", "me")
			f.equal("metadata", []any{status, files[0].Metadata, f.stat(f.at("m")).Metadata}, []any{200, map[string]string{"author": "me"}, map[string]string{"author": "me"}})
		}},
		{"6 file metadata", "an upload replaces all of it", func(f *fileTest) {
			for _, header := range []string{"X-Metadata-Author", "X-Metadata-Other"} {
				if status, e, _ := f.put(query(f.at("m")), strings.NewReader("x"), header, "v"); status != http.StatusOK {
					f.t.Error(e)
				}
			}
			f.equal("metadata", f.stat(f.at("m")).Metadata, map[string]string{"other": "v"})
		}},
		{"6 file metadata", "only printable ASCII", func(f *fileTest) {
			status, _, _ := f.put(query(f.at("m")), strings.NewReader("x"), "X-Metadata-K", "\xe9")
			f.equal("status", status, 400)
		}},
		{"5 errors 507", "a full disk, with the file's name", func(f *fileTest) {
			small := f.at("small")
			f.sh("mkdir " + small + " && mount -t tmpfs -o size=256k none " + small)
			f.t.Cleanup(func() { f.after("umount " + small) })
			status, e, _ := f.put(query(small+"/big"), bytes.NewReader(make([]byte, 1<<20)))
			f.equal("reply", []any{status, e.Code, strings.Contains(e.Message, small+"/big")}, []any{507, api.CodeExhausted, true})
			f.equal("left behind", len(f.list(small, 1)), 0)
		}},
		{"5 POST /files", "a client that leaves", func(f *fileTest) {
			ctx, cancel := context.WithCancel(f.ctx)
			r, w := io.Pipe()
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_, _ = f.c.WriteFile(ctx, f.id, f.at("open/half"), "", r)
			}()
			_, _ = w.Write(make([]byte, 200<<10))
			cancel()
			_ = w.CloseWithError(context.Canceled)
			<-ended
			f.eventually("nothing is left behind", func() bool { return len(f.list(f.at("open"), 1)) == 0 })
		}},

		// The rest of the REST.
		{"5 REST", "list, stat, mkdir, move, remove", func(f *fileTest) {
			ctx := f.ctx
			if _, err := f.c.MakeDir(ctx, f.id, api.FileRequest{Path: f.at("r")}); err != nil {
				f.t.Error(err)
			}
			if _, err := f.c.MoveFile(ctx, f.id, api.MoveRequest{Source: f.at("file"), Destination: f.at("r/g")}); err != nil {
				f.t.Error(err)
			}
			list, err := f.c.Files(ctx, f.id, f.at("r"), 1, "")
			if err != nil || len(list) != 1 || list[0].Name != "g" {
				f.t.Errorf("%+v %v", list, err)
			}
			if err := f.c.RemoveFile(ctx, f.id, api.FileRequest{Path: f.at("r")}); err != nil {
				f.t.Error(err)
			}
			_, err = f.c.File(ctx, f.id, f.at("r"), "")
			if e, ok := errors.AsType[*api.Error](err); !ok || e.Code != api.CodeNotFound {
				f.t.Error(err)
			}
		}},
	}
}

// watcher makes one that ends with the test.
func (f *fileTest) watcher(req wire.WatchRequest) string {
	f.t.Helper()
	var made wire.WatcherReply
	if err := f.unary(wire.MethodWatcherNew, req, &made); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = f.unaryAfter(wire.MethodWatcherRemove, made) })
	return made.WatcherID
}

// fetch asks a watcher until it tells of a name.
func (f *fileTest) fetch(id, name string) []wire.FileEvent {
	f.t.Helper()
	var got []wire.FileEvent
	f.eventually("an event of "+name, func() bool {
		var more wire.WatcherEvents
		if err := f.unary(wire.MethodWatcherEvents, wire.WatcherReply{WatcherID: id}, &more); err != nil {
			f.t.Fatal(err)
		}
		got = append(got, more.Events...)
		return slices.ContainsFunc(got, func(e wire.FileEvent) bool { return e.Name == name })
	})
	return got
}

func (f *fileTest) eventually(what string, is func() bool) {
	f.t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-f.ctx.Done():
			f.t.Fatalf("in vain: %s", what)
		}
	}
}

// after runs a script when the test's own time is over.
func (f *fileTest) after(script string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(f.t.Context()), testenv.Timeout(10*time.Second))
	defer cancel()
	_, _ = f.Run(ctx, shell(script), nil, output(nil, nil), nil)
}

func (f *fileTest) unaryAfter(method string, req any) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(f.t.Context()), testenv.Timeout(10*time.Second))
	defer cancel()
	s, err := f.Open(ctx, method, req)
	if err != nil {
		return err
	}
	defer s.Close()
	_, _, err = s.Recv()
	return err
}

// TestFiles runs every case in a directory of its own. One script makes what all of them begin with.
func TestFiles(t *testing.T) {
	cases := fileCases()
	g := newGuest(t)
	base := g.dir()
	g.sh(fmt.Sprintf(`set -e; cd %s; mkdir template; cd template
		printf hello > file; chmod 640 file; mkdir -p d/e open closed; : > d/e/f; : > closed/x
		ln -s file link; ln -s d dirlink; ln -s nothing dangling; ln -s loop loop; ln -s .. d/up; mkfifo pipe
		chmod 700 closed; chmod 777 open; cd ..
		for i in $(seq 0 %d); do cp -a template $i; done`, base, len(cases)-1))
	seen := map[string]bool{}
	for i, c := range cases {
		name := "§" + c.section + ": " + c.name
		if seen[name] {
			t.Errorf("two cases are called %s", name)
		}
		seen[name] = true
		t.Run(name, func(t *testing.T) {
			own := newGuest(t)
			c.do(&fileTest{guest: own, dir: fmt.Sprintf("%s/%d", base, i)})
		})
	}
	t.Logf("%d cases", len(cases))
}
