package httpapi

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"net/textproto"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/agenttest"
	agentfiles "forkd.dev/forkd/internal/agent/files"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/testenv"
)

// localGuest serves this machine's files by the agent's own code.
type localGuest struct {
	t        *testing.T
	handlers map[string]wire.Handler
	features []string
}

func (g *localGuest) Hello() wire.Hello { return wire.Hello{Features: g.features} }

func (g *localGuest) Open(_ context.Context, method string, in any) (*wire.Stream, error) {
	return agenttest.Call(g.t, g.handlers[method], in), nil
}

// fileServer is the routes for files over a real listener, and a directory of the "guest".
func fileServer(t *testing.T) (base, dir string, guest *localGuest) {
	t.Helper()
	service := agentfiles.New(account.New("/", account.Defaults{User: strconv.Itoa(os.Getuid())}))
	guest = &localGuest{t: t, handlers: service.Handlers(), features: []string{wire.FeatureFiles}}
	f := &files{guest: func(_ context.Context, id string) (fileGuest, error) {
		if id != "sb" {
			return nil, fmt.Errorf("sandbox %s: %w", id, host.ErrNotFound)
		}
		return guest, nil
	}}
	s := newServer(t)
	server := httptest.NewServer(asOwner(s.router(f.operations())))
	t.Cleanup(server.Close)
	return server.URL + "/v1/sandboxes/sb/files", t.TempDir(), guest
}

// answer is a reply, whose body the end of the test closes.
type answer struct {
	Status        string
	StatusCode    int
	Header        http.Header
	ContentLength int64
	Body          io.Reader
}

func ask(t *testing.T, method, url string, body io.Reader, header ...string) *answer {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Accept-Encoding", "identity")
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	return &answer{resp.Status, resp.StatusCode, resp.Header, resp.ContentLength, resp.Body}
}

func body(t *testing.T, resp *answer) string {
	t.Helper()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func at(base, path string) string { return base + "?path=" + url.QueryEscape(path) }

func TestDownload(t *testing.T) {
	base, dir, _ := fileServer(t)
	name := "grün \"x\".txt"
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte("0123456789"), 0o644); err != nil {
		t.Fatal(err)
	}
	head := ask(t, "HEAD", at(base, path), nil)
	tag, modified := head.Header.Get("Etag"), head.Header.Get("Last-Modified")
	if head.StatusCode != http.StatusOK || head.ContentLength != 10 || tag == "" || modified == "" || body(t, head) != "" {
		t.Errorf("HEAD: %s %v", head.Status, head.Header)
	}
	if got := head.Header.Get("Content-Disposition"); got != `inline; filename*=utf-8''gr%C3%BCn%20%22x%22.txt` {
		t.Errorf("Content-Disposition: %s", got)
	}
	for _, tt := range []struct {
		name   string
		header []string
		status int
		want   string
		field  string // name=value of the reply's header
	}{
		{"whole", nil, 200, "0123456789", "Accept-Ranges=bytes"},
		{"range", []string{"Range", "bytes=2-4"}, 206, "234", "Content-Range=bytes 2-4/10"},
		{"open range", []string{"Range", "bytes=7-"}, 206, "789", "Content-Range=bytes 7-9/10"},
		{"suffix", []string{"Range", "bytes=-3"}, 206, "789", "Content-Range=bytes 7-9/10"},
		{"longer than the file", []string{"Range", "bytes=8-100"}, 206, "89", "Content-Range=bytes 8-9/10"},
		{"outside", []string{"Range", "bytes=10-"}, 416, "", "Content-Range=bytes */10"},
		{"not a range", []string{"Range", "lines=1-2"}, 416, "", ""},
		{"has it, by tag", []string{"If-None-Match", tag}, 304, "", ""},
		{"has another", []string{"If-None-Match", `"x"`}, 200, "0123456789", ""},
		{"has it, by time", []string{"If-Modified-Since", modified}, 304, "", ""},
		{"changed since", []string{"If-Range", `"old"`, "Range", "bytes=2-4"}, 200, "0123456789", ""},
		{"the same still", []string{"If-Range", tag, "Range", "bytes=2-4"}, 206, "234", ""},
		{"must match", []string{"If-Match", `"x"`}, 412, "", ""},
		{"range of gzip", []string{"Accept-Encoding", "gzip", "Range", "bytes=0-0"}, 206, "0", ""},
		{"neither", []string{"Accept-Encoding", "identity;q=0"}, 406, "", ""},
		{"neither, by star", []string{"Accept-Encoding", "br, *;q=0"}, 406, "", ""},
		{"a range, but encoded", []string{"Accept-Encoding", "gzip, identity;q=0", "Range", "bytes=0-0"}, 406, "", ""},
		{"plain rather", []string{"Accept-Encoding", "gzip;q=0.5, identity"}, 200, "0123456789", "Vary=Accept-Encoding"},
	} {
		resp := ask(t, "GET", at(base, path), nil, tt.header...)
		got := body(t, resp)
		if resp.StatusCode != tt.status || resp.StatusCode < 300 && got != tt.want {
			t.Errorf("%s: %s %q", tt.name, resp.Status, got)
		}
		if k, v, _ := strings.Cut(tt.field, "="); resp.Header.Get(k) != v {
			t.Errorf("%s: %s", tt.name, resp.Header.Get(k))
		}
		if resp.StatusCode == http.StatusNotAcceptable || resp.StatusCode == http.StatusRequestedRangeNotSatisfiable {
			var e api.Error
			if err := json.Unmarshal([]byte(got), &e); err != nil || e.Message == "" {
				t.Errorf("%s: %q", tt.name, got)
			}
		}
	}
	multi := ask(t, "GET", at(base, path), nil, "Range", "bytes=0-1,8-9")
	if got := body(t, multi); multi.StatusCode != http.StatusPartialContent || !strings.Contains(got, "bytes 0-1/10") || !strings.Contains(got, "bytes 8-9/10") {
		t.Errorf("%s %q", multi.Status, got)
	}
	for _, accept := range []string{"gzip", "br;q=1, GZIP;q=0.8", "*, identity;q=0"} {
		zipped := ask(t, "GET", at(base, path), nil, "Accept-Encoding", accept)
		z, err := gzip.NewReader(zipped.Body)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(z); err != nil || string(b) != "0123456789" || zipped.Header.Get("Content-Encoding") != "gzip" {
			t.Errorf("%s: %q %v %v", accept, b, zipped.Header, err)
		}
	}
}

func TestDownloadRefusals(t *testing.T) {
	base, dir, _ := fileServer(t)
	other := strings.Replace(base, "/sb/", "/sbaa/", 1)
	for _, tt := range []struct {
		name, url string
		status    int
		code      api.Code
	}{
		{"missing", at(base, dir+"/no"), 404, api.CodeNotFound},
		{"directory", at(base, dir), 400, api.CodeInvalid},
		{"device", at(base, "/dev/zero"), 400, api.CodeInvalid},
		{"no path", base, 400, api.CodeInvalid},
		{"no such user", at(base, dir) + "&user=nobodyhere", 400, api.CodeInvalid},
		{"unknown parameter", at(base, dir) + "&depth=2", 400, api.CodeInvalid},
		{"bad query", base + "?path=%zz", 400, api.CodeInvalid},
		{"no sandbox", at(other, dir), 404, api.CodeNotFound},
	} {
		resp := ask(t, "GET", tt.url, nil)
		var e api.Error
		if err := json.Unmarshal([]byte(body(t, resp)), &e); err != nil || e.Code != tt.code && tt.name != "no such user" || resp.StatusCode != tt.status && tt.name != "no such user" {
			t.Errorf("%s: %s %+v %v", tt.name, resp.Status, e, err)
		}
	}
}

// TestDownloadProc: a file without a size is sent to its end.
func TestDownloadProc(t *testing.T) {
	base, dir, _ := fileServer(t)
	resp := ask(t, "GET", at(base, "/proc/self/status"), nil)
	if got := body(t, resp); resp.StatusCode != http.StatusOK || !strings.Contains(got, "Pid:") {
		t.Errorf("%s %q", resp.Status, got)
	}
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if resp := ask(t, "GET", at(base, empty), nil); resp.StatusCode != http.StatusOK || body(t, resp) != "" {
		t.Error(resp.Status)
	}
	raw := filepath.Join(dir, "caf\xe9")
	if err := os.WriteFile(raw, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{raw, filepath.Join(dir, "caf\x00e9")} {
		if resp := ask(t, "GET", at(base, path), nil); resp.StatusCode != http.StatusOK || body(t, resp) != "x" {
			t.Errorf("%q: %s", path, resp.Status)
		}
	}
}

// TestDownloadBreaks: a guest that fails in the middle must not look like the end of the file.
func TestDownloadBreaks(t *testing.T) {
	base, _, guest := fileServer(t)
	for _, size := range []int64{0, 1000} {
		guest.handlers[wire.MethodFileRead] = func(_ context.Context, s *wire.Stream, _ []byte) error {
			if err := s.SendMessage(wire.EntryReply{Entry: wire.EntryInfo{Name: "f", Size: size}}); err != nil {
				return err
			}
			if err := s.Send(wire.KindData, []byte("part")); err != nil {
				return err
			}
			return wire.Errorf(wire.CodeInternal, "disk on fire")
		}
		for _, accept := range []string{"identity", "gzip"} {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, at(base, "/f"), nil)
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("Accept-Encoding", accept)
			resp, err := http.DefaultTransport.RoundTrip(r)
			if err != nil {
				continue // before the reply's head was out
			}
			b, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if err == nil {
				t.Errorf("size %d, %s: %q looks whole", size, accept, b)
			}
		}
	}
}

func form(t *testing.T, parts ...string) (string, io.Reader) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for i := 0; i < len(parts); i += 3 {
		h := textproto.MIMEHeader{}
		disposition := `form-data; name="` + parts[i] + `"`
		if parts[i+1] != "" {
			disposition += `; filename="` + parts[i+1] + `"`
		}
		h.Set("Content-Disposition", disposition)
		p, err := w.CreatePart(h)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(p, parts[i+2])
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return w.FormDataContentType(), &b
}

func zip(t *testing.T, text string) io.Reader {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = io.WriteString(z, text)
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

func TestUpload(t *testing.T) {
	base, dir, guest := fileServer(t)
	path := filepath.Join(dir, "new/f")
	content := func(name string) string {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Error(err)
		}
		return string(b)
	}
	resp := ask(t, "PUT", at(base, path)+"&mode=0700", strings.NewReader("raw"), "X-Metadata-Author", "me")
	var got []api.File
	if err := json.Unmarshal([]byte(body(t, resp)), &got); err != nil || resp.StatusCode != http.StatusOK || len(got) != 1 {
		t.Fatalf("%s %+v %v", resp.Status, got, err)
	}
	if got[0].Path != path || got[0].Type != "file" || got[0].Mode != 0o700 || got[0].Size != 3 || content("new/f") != "raw" {
		t.Errorf("%+v", got[0])
	}
	if m := got[0].Metadata; m != nil && m["author"] != "me" {
		t.Errorf("%v", m)
	}
	resp = ask(t, "POST", at(base, path), zip(t, "unzipped"), "Content-Type", "application/octet-stream", "Content-Encoding", "gzip")
	if resp.StatusCode != http.StatusOK || content("new/f") != "unzipped" {
		t.Errorf("%s %s", resp.Status, content("new/f"))
	}
	kind, parts := form(t, "file", dir+"/a/one", "1", "other", "ignored", "x", "file", dir+"/b/two", "2")
	resp = ask(t, "POST", base, parts, "Content-Type", kind)
	if err := json.Unmarshal([]byte(body(t, resp)), &got); err != nil || len(got) != 2 || content("a/one") != "1" || content("b/two") != "2" {
		t.Errorf("%s %+v", resp.Status, got)
	}
	kind, parts = form(t, "file", "ignored", "3")
	resp = ask(t, "POST", at(base, path), parts, "Content-Type", kind)
	if resp.StatusCode != http.StatusOK || content("new/f") != "3" {
		t.Errorf("%s", resp.Status)
	}

	refused := func(name string, resp *answer, status int, code api.Code, says string) {
		t.Helper()
		var e api.Error
		if err := json.Unmarshal([]byte(body(t, resp)), &e); err != nil || resp.StatusCode != status || e.Code != code || !strings.Contains(e.Message, says) {
			t.Errorf("%s: %s %+v %v", name, resp.Status, e, err)
		}
	}
	octets := []string{"Content-Type", "application/octet-stream"}
	refused("no path", ask(t, "POST", base, strings.NewReader("x"), octets...), 400, api.CodeInvalid, "path")
	refused("directory", ask(t, "POST", at(base, dir), strings.NewReader("x"), octets...), 400, api.CodeInvalid, dir)
	refused("encoding", ask(t, "POST", at(base, path), strings.NewReader("x"), "Content-Encoding", "br"), 400, api.CodeInvalid, "br")
	refused("not gzip", ask(t, "POST", at(base, path), strings.NewReader("x, and no gzip"), "Content-Encoding", "gzip"), 400, api.CodeInvalid, "gzip")
	refused("mode", ask(t, "POST", at(base, path)+"&mode=rwx", strings.NewReader("x")), 400, api.CodeInvalid, "mode")
	refused("no boundary", ask(t, "POST", base, strings.NewReader("x"), "Content-Type", "multipart/form-data"), 400, api.CodeInvalid, "boundary")
	refused("metadata", ask(t, "POST", at(base, path), strings.NewReader("x"), "X-Metadata-K", "\xe9"), 400, api.CodeInvalid, "ASCII")
	kind, parts = form(t, "file", path, "first", "file", path, "second")
	refused("twice", ask(t, "POST", base, parts, "Content-Type", kind), 400, api.CodeInvalid, path)
	kind, parts = form(t, "file", "", "x")
	refused("no name", ask(t, "POST", base, parts, "Content-Type", kind), 400, api.CodeInvalid, "filename")
	refused("cut form", ask(t, "POST", base, strings.NewReader("--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\""+dir+"/cut\"\r\n\r\nhalf"), "Content-Type", "multipart/form-data; boundary=b"), 400, api.CodeInvalid, "cut")
	if content("new/f") != "first" {
		t.Errorf("%q", content("new/f"))
	}
	guest.features = nil
	refused("old agent", ask(t, "POST", at(base, path), strings.NewReader("x"), "X-Metadata-K", "v"), 501, api.CodeUnsupported, "metadata")
	guest.handlers[wire.MethodFileWrite] = func(context.Context, *wire.Stream, []byte) error {
		return wire.Errorf(wire.CodeExhausted, "write %s: no space left on device", path)
	}
	refused("full", ask(t, "POST", at(base, path), strings.NewReader("x")), 507, api.CodeExhausted, path)
	refused("full, while much is sent", ask(t, "POST", at(base, path), bytes.NewReader(make([]byte, 64<<20))), 507, api.CodeExhausted, path)
	guest.handlers[wire.MethodFileWrite] = func(context.Context, *wire.Stream, []byte) error {
		return wire.Errorf(wire.CodeDenied, "write %s: permission denied", path)
	}
	refused("denied", ask(t, "POST", at(base, path), strings.NewReader("x")), 403, api.CodeDenied, path)
	if left, _ := filepath.Glob(dir + "/*/.forkd-*"); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// TestUploadBrokenOff: a client that goes leaves nothing in the guest.
func TestUploadBrokenOff(t *testing.T) {
	base, dir, _ := fileServer(t)
	r, w := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, at(base, dir+"/f"), r)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if resp, err := http.DefaultTransport.RoundTrip(req); err == nil {
			_ = resp.Body.Close()
		}
	}()
	if _, err := w.Write(bytes.Repeat([]byte("x"), 300<<10)); err != nil {
		t.Fatal(err)
	}
	until := func(files int) {
		t.Helper()
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		deadline := time.After(testenv.Timeout(10 * time.Second))
		for {
			entries, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			if len(entries) == files {
				return
			}
			select {
			case <-tick.C:
			case <-deadline:
				t.Fatalf("%d files: %v", files, entries)
			}
		}
	}
	until(1)
	cancel()
	_ = w.CloseWithError(context.Canceled) // the transport waits for its reader
	<-ended
	until(0)
}

func TestFileRoutes(t *testing.T) {
	base, dir, _ := fileServer(t)
	post := func(path string, v any) *answer {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return ask(t, "POST", base+path, bytes.NewReader(b))
	}
	var e api.File
	resp := post("/mkdir", api.FileRequest{Path: dir + "/d"})
	if err := json.Unmarshal([]byte(body(t, resp)), &e); err != nil || e.Type != "dir" || e.Permissions != "drwxr-xr-x" {
		t.Errorf("%s %+v", resp.Status, e)
	}
	if resp := post("/mkdir", api.FileRequest{Path: dir + "/d"}); resp.StatusCode != http.StatusConflict {
		t.Error(resp.Status)
	}
	if err := os.WriteFile(dir+"/d/f", []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	var list []api.File
	resp = ask(t, "GET", base+"/list?depth=2&path="+url.QueryEscape(dir), nil)
	if err := json.Unmarshal([]byte(body(t, resp)), &list); err != nil || len(list) != 2 || list[1].Path != dir+"/d/f" {
		t.Errorf("%s %+v", resp.Status, list)
	}
	if resp := ask(t, "GET", base+"/list?depth=0&path=/", nil); resp.StatusCode != http.StatusBadRequest {
		t.Error(resp.Status)
	}
	resp = post("/move", api.MoveRequest{Source: dir + "/d/f", Destination: dir + "/e/g"})
	if err := json.Unmarshal([]byte(body(t, resp)), &e); err != nil || e.Path != dir+"/e/g" {
		t.Errorf("%s %+v", resp.Status, e)
	}
	resp = ask(t, "GET", base+"/stat?path="+url.QueryEscape(dir+"/e/g"), nil)
	if err := json.Unmarshal([]byte(body(t, resp)), &e); err != nil || e.Size != 1 {
		t.Errorf("%s %+v", resp.Status, e)
	}
	resp = post("/compose", api.ComposeRequest{Sources: []string{dir + "/e/g", dir + "/e/g"}, Destination: dir + "/whole"})
	if err := json.Unmarshal([]byte(body(t, resp)), &e); err != nil || e.Size != 2 {
		t.Errorf("%s %+v", resp.Status, e)
	}
	if resp := post("/remove", api.FileRequest{Path: dir + "/e"}); resp.StatusCode != http.StatusNoContent {
		t.Error(resp.Status)
	}
	if resp := ask(t, "DELETE", at(base, dir+"/d"), nil); resp.StatusCode != http.StatusNoContent {
		t.Error(resp.Status)
	}
	if resp := ask(t, "DELETE", at(base, dir+"/d"), nil); resp.StatusCode != http.StatusNotFound {
		t.Error(resp.Status)
	}
}

func TestWatchRoutes(t *testing.T) {
	base, dir, _ := fileServer(t)
	resp := ask(t, "GET", base+"/watch?entries=true&path="+url.QueryEscape(dir), nil)
	lines := bufio.NewReader(resp.Body)
	next := func() (e api.FileEvent) {
		t.Helper()
		line, err := lines.ReadBytes('\n')
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatal(err)
		}
		return e
	}
	if e := next(); !e.Started {
		t.Fatalf("%+v", e)
	}
	var made api.Watcher
	watcher := ask(t, "POST", base+"/watchers", strings.NewReader(`{"path":"`+dir+`"}`))
	if err := json.Unmarshal([]byte(body(t, watcher)), &made); err != nil || watcher.StatusCode != http.StatusCreated {
		t.Fatalf("%s %v", watcher.Status, err)
	}
	if err := os.WriteFile(dir+"/f", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if e := next(); e.Name != "f" || e.Type != "create" || e.Entry == nil || e.Entry.Path != dir+"/f" {
		t.Errorf("%+v", e)
	}
	deadline := time.Now().Add(testenv.Timeout(10 * time.Second))
	for {
		var got api.FileEvents
		if err := json.Unmarshal([]byte(body(t, ask(t, "GET", base+"/watchers/"+made.ID, nil))), &got); err != nil {
			t.Fatal(err)
		}
		if len(got.Events) == 1 && got.Events[0].Name == "f" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("no event")
		}
	}
	if resp := ask(t, "DELETE", base+"/watchers/"+made.ID, nil); resp.StatusCode != http.StatusNoContent {
		t.Error(resp.Status)
	}
	if resp := ask(t, "GET", base+"/watchers/"+made.ID, nil); resp.StatusCode != http.StatusNotFound {
		t.Error(resp.Status)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	for e := next(); e.Type != "remove" || e.Name != "."; e = next() {
	}
	if _, err := lines.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("the directory is gone, the stream goes on: %v", err)
	}
	if resp := ask(t, "GET", base+"/watch?path=/no/such", nil); resp.StatusCode != http.StatusNotFound {
		t.Error(resp.Status)
	}
}

// FuzzForm: a form is foreign bytes; whatever is in it, names come out as text that the guest can take.
func FuzzForm(f *testing.F) {
	for _, seed := range []string{
		`form-data; name="file"; filename="/a/b"`, `form-data; name=file; filename*=utf-8''%e9`, `form-data; name="file"; filename="a\"b"`,
		`form-data; name*0="fi"; name*1="le"; filename="../x"`, `form-data; filename="` + "\x00\xff" + `"`, ``,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, disposition string) {
		part := &multipart.Part{Header: textproto.MIMEHeader{"Content-Disposition": {disposition}}}
		_, name, err := partNames(part)
		if err == nil && !strings.Contains(name, "\x00") {
			if got, err := wire.DecodeName(name); err != nil || got != name {
				t.Errorf("%q: %q %v", name, got, err)
			}
		}
	})
}

func TestAcceptable(t *testing.T) {
	for header, want := range map[string]bool{
		"": false, "gzip": true, "identity": false, "gzip;q=0": false, "gzip, deflate, br": true, "*": false, "deflate": false,
		"*;q=0.5, identity;q=0": true, "gzip;q=0.2, identity;q=0.1": true, "gzip;q=0.1, identity;q=0.2": false, "gzip;q=x": true,
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("Accept-Encoding", header)
		if got, err := wantsGzip(r); err != nil || got != want {
			t.Errorf("%q: %v %v", header, got, err)
		}
	}
}
