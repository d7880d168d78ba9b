package client

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"forkd.dev/forkd/api"
)

// answering is a daemon that always says the same.
type answering struct {
	status int
	body   []byte
}

func (a answering) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		_ = r.Body.Close()
	}
	return &http.Response{
		StatusCode: a.status, Status: http.StatusText(a.status), Header: http.Header{}, Request: r,
		Body: io.NopCloser(iotestOneByte(bytes.NewReader(a.body))),
	}, nil
}

// iotestOneByte cuts a stream where nobody would: a reader must not depend on where.
func iotestOneByte(r io.Reader) io.Reader { return &single{r} }

type single struct{ r io.Reader }

func (s *single) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	return s.r.Read(p[:1])
}

// FuzzReplies: a stream, a reply or an error that was cut off or is none of a daemon's ends with an error or a value, and the
// objects before that are told.
func FuzzReplies(f *testing.F) {
	const event = `{"sequence":1,"type":"sandbox.forked","sandbox":"sb1","time":"2026-11-30T00:00:00Z"}` + "\n"
	for _, seed := range []string{
		"", "\n", event, event + event[:20], event + "null\n", `{"error":{"code":"busy","message":"m"}}`, `{"error":"m","code":"busy","message":"m"}`,
		`{"snapshot":{"tag":"t"}}`, `{"step":"boot"}` + "\n" + `{"error":{}}`, "[]", "[null]", "<html>", "data: {}\n\n", "\xff\xfe",
	} {
		f.Add(200, []byte(seed))
		f.Add(503, []byte(seed))
	}
	f.Fuzz(func(t *testing.T, status int, body []byte) {
		if status < 200 || status > 599 {
			return
		}
		c, err := New("http://127.0.0.1:1")
		if err != nil {
			t.Fatal(err)
		}
		c.http.Transport = answering{status, body}
		told := 0
		err = c.Events(t.Context(), EventOptions{}, func(api.Event) error { told++; return nil })
		if err == nil && told == 0 && len(bytes.TrimSpace(body)) > 0 {
			t.Errorf("%q is no event and no error", body)
		}
		if told > bytes.Count(body, []byte("{"))+bytes.Count(body, []byte("null")) {
			t.Errorf("%d events of %q", told, body)
		}
		stop := errors.New("enough")
		if err := c.Events(t.Context(), EventOptions{}, func(api.Event) error { return stop }); told > 0 && !errors.Is(err, stop) {
			t.Errorf("asked to stop: %v", err)
		}
		err = c.Events(t.Context(), EventOptions{Follow: true}, func(api.Event) error { return nil })
		if err == nil {
			t.Error("a stream that is to go on ended without an error")
		}
		snap, err := c.Build(t.Context(), BuildOptions{}, strings.NewReader(""), func(api.BuildEvent) {})
		if (snap == nil) == (err == nil) {
			t.Errorf("a build: %v, %v", snap, err)
		}
		for _, err := range []error{err, c.WatchFiles(t.Context(), "sb", api.WatchRequest{}, func(api.FileEvent) {})} {
			if err != nil && err.Error() == "" && status >= http.StatusBadRequest {
				t.Errorf("status %d of %q says nothing", status, body)
			}
		}
		_, _ = c.Usages(t.Context(), nil)
		_, _ = c.Usage(t.Context(), "sb")
		_, _ = c.WriteFile(t.Context(), "sb", "/f", "", strings.NewReader(""))
	})
}
