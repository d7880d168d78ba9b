package httpapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/registry"
)

// Both connect the daemon to a host that the client names, with credentials that are its own if the client shows none: so
// they take scope admin.
func (s *Server) registryOperations() []operation {
	return []operation{
		{"POST /v1/snapshots/{tag}/push", access.Admin, "Bring a snapshot to a registry", s.push},
		{"POST /v1/pulls", access.Admin, "Make snapshots of one in a registry", s.pull},
		{"GET /v2/{$}", access.Pull, "Say that this is a registry", s.registryHello},
		{"GET /v2/snapshots/manifests/{ref}", access.Pull, "A snapshot's manifest, by its tag or by digest", s.registryManifest},
		{"GET /v2/snapshots/blobs/{digest}", access.Pull, "A blob of a snapshot, or a range of it", s.registryBlob},
	}
}

func registryDocuments() map[string]*document {
	return map[string]*document{
		"POST /v1/snapshots/{tag}/push": {
			id: "push", body: api.PushRequest{},
			about:   "Blobs that the registry has are not sent again. The reply is one JSON object a line as it goes; the last has `pushed` or `error`. When the connection ends the push does, and another goes on from there.",
			replies: []response{{status: http.StatusOK, of: api.TransferEvent{}, media: jsonLines}},
		},
		"POST /v1/pulls": {
			id: "pull", body: api.PullRequest{},
			about: "What is here is not fetched again, and what this host cannot run is refused before it is fetched. " +
				"The reply is one JSON object a line as it goes; the last has `pulled`, `verified` or `error`. When the connection ends the pull does, and another goes on from there.",
			replies: []response{{status: http.StatusOK, of: api.TransferEvent{}, media: jsonLines}},
		},
		"GET /v2/{$}": {
			id: "registry", about: "Of the protocol of registries, read only: another forkd pulls HOST:PORT/snapshots:TAG. A token is the password of HTTP's basic authentication, with any name.",
			replies: ok(struct{}{}),
		},
		"GET /v2/snapshots/manifests/{ref}": {
			id: "registryManifest", about: "The blobs that it names can be asked for while the manifest was asked for lately. A digest that this daemon has not answered with yet is looked for in all snapshots, which takes as long as to read them.",
			replies: []response{{status: http.StatusOK, media: "application/vnd.oci.image.manifest.v1+json", about: "The manifest."}},
		},
		"GET /v2/snapshots/blobs/{digest}": {
			id: "registryBlob", replies: []response{
				{status: http.StatusOK, media: bytesType, about: "The blob."},
				{status: http.StatusPartialContent, media: bytesType, about: "The range that was asked for."},
			},
		},
	}
}

// isRegistry reports whether a request is for the daemon as a registry, whose clients show names and passwords.
func isRegistry(r *http.Request) bool {
	return r.URL.Path == "/v2/" || strings.HasPrefix(r.URL.Path, "/v2/snapshots/")
}

// basicToken is the password that a request shows, whatever the name. A bearer is taken as well.
func basicToken(r *http.Request) (string, bool) {
	if _, password, ok := r.BasicAuth(); ok && len(r.Header.Values("Authorization")) == 1 {
		return password, true
	}
	return bearer(r)
}

// challenge says how to show a token.
func challenge(r *http.Request) string {
	if foreignOf(r) == nil && isRegistry(r) {
		return `Basic realm="forkd"`
	}
	return `Bearer realm="forkd"`
}

func (s *Server) registryHello(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Docker-Distribution-API-Version", "registry/2.0")
	return Reply(w, http.StatusOK, struct{}{})
}

func (s *Server) registryManifest(w http.ResponseWriter, r *http.Request) error {
	if s.Shelf == nil {
		return errNoRegistry
	}
	return s.Shelf.ServeManifest(w, r, r.PathValue("ref"))
}

func (s *Server) registryBlob(w http.ResponseWriter, r *http.Request) error {
	if s.Shelf == nil {
		return errNoRegistry
	}
	return s.Shelf.ServeBlob(w, r, r.PathValue("digest"))
}

var errNoRegistry = fmt.Errorf("%w: this daemon is no registry", host.ErrUnsupported)

func login(l *api.RegistryLogin) *registry.Credentials {
	if l == nil {
		return nil
	}
	c := registry.Credentials(*l)
	return &c
}

func (s *Server) push(w http.ResponseWriter, r *http.Request) error {
	var req api.PushRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	tag := r.PathValue("tag")
	noteTouched(r, "registry", req.Ref)
	lines := &transferWriter{w: w, rc: http.NewResponseController(w)}
	to := host.Remote{Ref: req.Ref, Credentials: login(req.Login), Fingerprint: req.Fingerprint}
	opts := host.PackOptions{NoScrub: req.Scrub != nil && !*req.Scrub}
	got, err := s.Host.Push(r.Context(), tag, to, opts, lines.progress)
	if err != nil {
		return lines.fail(err)
	}
	lines.write(api.TransferEvent{Pushed: &api.Pushed{
		Ref: got.Ref, Digest: got.Digest, SentBytes: got.Sent, ThereBytes: got.There, Scrub: scrubReport(got.Scrub),
	}})
	return nil
}

func (s *Server) pull(w http.ResponseWriter, r *http.Request) error {
	var req api.PullRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	noteTouched(r, "registry", req.Ref)
	lines := &transferWriter{w: w, rc: http.NewResponseController(w)}
	from := host.Remote{Ref: req.Ref, Credentials: login(req.Login), Fingerprint: req.Fingerprint}
	if req.Verify {
		got, err := s.Host.VerifyRemote(r.Context(), from, lines.progress)
		if err != nil {
			return lines.fail(err)
		}
		v := &api.RemoteVerified{Ref: got.Ref, Snapshots: []string{}, Members: len(got.Manifest.Members), Bytes: got.Manifest.Bytes()}
		for _, m := range got.Manifest.Snapshots {
			v.Snapshots = append(v.Snapshots, m.Tag)
		}
		lines.write(api.TransferEvent{Verified: v})
		return nil
	}
	opts := host.PullOptions{Rewarm: req.Rewarm, ReceiveOptions: host.ReceiveOptions{Tag: req.Tag, MayWiden: s.mayWiden(r)}}
	got, err := s.Host.Pull(r.Context(), from, opts, lines.progress)
	if err != nil {
		return lines.fail(err)
	}
	noteCreated(r, "snapshot", got.New...)
	lines.write(api.TransferEvent{Pulled: &api.Pulled{Unpacked: unpacked(got.Received), Ref: got.Ref, Rewarm: got.Rewarm}})
	return nil
}

// transferWriter writes one JSON line an event, each at once; of bytes alone not more than a person sees.
type transferWriter struct {
	w  http.ResponseWriter
	rc *http.ResponseController

	mu    sync.Mutex
	begun bool
	last  time.Time
}

const progressEvery = 200 * time.Millisecond

func (t *transferWriter) progress(p host.Transfer) {
	t.mu.Lock()
	skip := p.Message == "" && p.Done < p.Total && time.Since(t.last) < progressEvery
	t.mu.Unlock()
	if !skip {
		t.write(api.TransferEvent{Step: p.Step, Message: p.Message, DoneBytes: p.Done, TotalBytes: p.Total})
	}
}

func (t *transferWriter) write(e api.TransferEvent) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.begun {
		t.begun = true
		t.w.Header().Set("Content-Type", jsonLines)
		t.w.WriteHeader(http.StatusOK)
	}
	t.last = time.Now()
	e.Time = t.last.UTC()
	line, err := json.Marshal(e)
	if err != nil {
		return
	}
	// A client that is gone shows in the request's context, which ends the transfer.
	_, _ = t.w.Write(append(line, '\n'))
	_ = t.rc.Flush()
}

// fail tells an error in the stream, if that has begun.
func (t *transferWriter) fail(err error) error {
	t.mu.Lock()
	begun := t.begun
	t.mu.Unlock()
	if begun {
		e := toAPI(err)
		e.RequestID = t.w.Header().Get("X-Request-Id")
		t.write(api.TransferEvent{Error: e})
	}
	return err
}
