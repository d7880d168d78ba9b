package e2bapi

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"net/http"
	"strconv"
	"strings"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/httpapi"
)

// What a sandbox's tokens are for.
const (
	forEnvd    = "envd"
	forTraffic = "traffic"
)

// envd is the routes of the daemon in the guest.
func (s *Server) envd() *http.ServeMux {
	rpc := s.plane(httpapi.Operation{Fail: failConnect, Shown: shownToEnvd, Known: s.envdToken, Sandbox: targetID}, []route{
		{"POST /process.Process/Start", access.Use, streaming(s.startProcess)},
		{"POST /process.Process/Connect", access.Use, streaming(s.connectProcess)},
		{"POST /process.Process/List", access.Use, s.listProcesses},
		{"POST /process.Process/Update", access.Use, s.updateProcess},
		{"POST /process.Process/SendInput", access.Use, s.sendInput},
		{"POST /process.Process/StreamInput", access.Use, streaming(s.streamInput)},
		{"POST /process.Process/SendSignal", access.Use, s.sendSignal},
		{"POST /process.Process/CloseStdin", access.Use, s.closeStdin},
		{"POST /filesystem.Filesystem/Stat", access.Use, s.onPath(wire.MethodFileStat)},
		{"POST /filesystem.Filesystem/MakeDir", access.Use, s.onPath(wire.MethodFileMakeDir)},
		{"POST /filesystem.Filesystem/Remove", access.Use, s.removePath},
		{"POST /filesystem.Filesystem/Move", access.Use, s.move},
		{"POST /filesystem.Filesystem/ListDir", access.Use, s.listDir},
		{"POST /filesystem.Filesystem/WatchDir", access.Use, streaming(s.watchDir)},
		{"POST /filesystem.Filesystem/CreateWatcher", access.Use, s.createWatcher},
		{"POST /filesystem.Filesystem/GetWatcherEvents", access.Use, s.watcherEvents},
		{"POST /filesystem.Filesystem/RemoveWatcher", access.Use, s.removeWatcher},
	})
	plain := s.plane(httpapi.Operation{Fail: failPlain, Shown: shownToEnvd, Known: s.envdToken, Sandbox: targetID}, []route{
		{"GET /health", access.None, s.envdHealth},
		{"GET /metrics", access.Use, s.envdMetrics},
		{"GET /envs", access.Use, s.envs},
		{"POST /files/compose", access.Use, s.compose},
	})
	files := s.plane(httpapi.Operation{Fail: failPlain, Shown: shownForFiles, Known: s.fileToken, Sandbox: targetID}, []route{
		{"GET /files", access.Use, s.download}, // and HEAD
		{"POST /files", access.Use, s.upload},
	})
	mux := http.NewServeMux()
	mux.Handle("POST /process.Process/", rpc)
	mux.Handle("POST /filesystem.Filesystem/", rpc)
	mux.Handle("/", plain)
	mux.Handle("/files", files)
	return mux
}

func targetID(r *http.Request) string { return targetOf(r).id }

// shownToEnvd is the sandbox's token, or one of this daemon. Authorization says as which user of the guest to act.
func shownToEnvd(r *http.Request) (string, bool) {
	if token := r.Header.Get("X-Access-Token"); token != "" {
		return token, true
	}
	return shownKey(r)
}

// shownKey is a token of this daemon.
func shownKey(r *http.Request) (string, bool) {
	if key := r.Header.Get("X-API-KEY"); key != "" {
		return key, true
	}
	scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " ")
	if ok && strings.EqualFold(scheme, "Bearer") {
		return strings.TrimSpace(token), true
	}
	return "", false
}

// envdToken lets the sandbox's own token work inside it.
func (s *Server) envdToken(r *http.Request, shown string) (access.Token, bool) {
	return s.sandboxToken(targetOf(r).id, shown, forEnvd)
}

func (s *Server) sandboxToken(id, shown string, purposes ...string) (access.Token, bool) {
	for _, purpose := range purposes {
		if s.Seed.Is(shown, purpose, id) {
			return access.Token{ID: "e2b-" + id, Name: "e2b-" + purpose, Scope: access.Use, Sandbox: id}, true
		}
	}
	return access.Token{}, false
}

// shownForFiles is a signature, or what any other call shows.
func shownForFiles(r *http.Request) (string, bool) {
	if signature, ok := inAddress(r, "signature"); ok {
		return signature, true
	}
	return shownToEnvd(r)
}

// inAddress is what a URL shows. It is no token of this daemon: those are not taken from addresses, which end up in logs.
func inAddress(r *http.Request, parameter string) (shown string, ok bool) {
	if shown = r.URL.Query().Get(parameter); access.IsForm(shown) {
		return "", true
	}
	return shown, shown != ""
}

func (s *Server) fileToken(r *http.Request, shown string) (access.Token, bool) {
	id := targetOf(r).id
	if r.URL.Query().Get("signature") == "" {
		return s.envdToken(r, shown)
	}
	if sig, ok := signatureOf(r); !ok || !s.signed(sig, id) {
		return access.Token{}, false
	}
	return access.Token{ID: "e2b-" + id, Name: "e2b-signature", Scope: access.Use, Sandbox: id}, true
}

// signature is what a signed URL says: path, what is done, as whom, and until when.
type signature struct{ shown, path, operation, user, until string }

const (
	signatureLength = len("v1_") + 43 // a SHA-256 in base64
	maxSigned       = 4096            // of a path, and of a user's name
)

// signatureOf reads the signature of a request; none that is over, and none that cannot be one: strangers have each tried on
// every sandbox.
func signatureOf(r *http.Request) (signature, bool) {
	q := r.URL.Query()
	sig := signature{q.Get("signature"), q.Get("path"), "write", q.Get("username"), q.Get("signature_expiration")}
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		sig.operation = "read"
	}
	if len(sig.shown) != signatureLength || len(sig.path) > maxSigned || len(sig.user) > maxSigned {
		return sig, false
	}
	if sig.until == "" {
		return sig, true
	}
	at, err := strconv.ParseInt(sig.until, 10, 64)
	return sig, err == nil && len(sig.until) < 20 && time.Now().Unix() <= at
}

// signed reports whether a signature was made with a sandbox's token.
func (s *Server) signed(sig signature, id string) bool {
	text := sig.path + ":" + sig.operation + ":" + sig.user + ":" + s.Seed.Token(forEnvd, id)
	if sig.until != "" {
		text += ":" + sig.until
	}
	sum := sha256.Sum256([]byte(text))
	want := "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
	return subtle.ConstantTimeCompare([]byte(want), []byte(sig.shown)) == 1
}

// signedFor is the sandbox whose signature a URL has, or "".
func (s *Server) signedFor(r *http.Request) string {
	sig, ok := signatureOf(r)
	if !ok {
		return ""
	}
	for _, id := range s.Host.SandboxIDs() {
		if s.signed(sig, id) {
			return id
		}
	}
	return ""
}

// userOf is as which user of the guest to act; "": the image's.
func userOf(r *http.Request) string {
	name, _, _ := r.BasicAuth()
	return name
}

// guest is the way into a request's sandbox.
func (s *Server) guest(ctx context.Context, r *http.Request) (*guest.Conn, error) {
	id := targetOf(r).id
	if err := s.awake(ctx, id); err != nil {
		return nil, reach(id, err)
	}
	conn, err := s.Host.Guest(ctx, id)
	if err != nil {
		return nil, reach(id, err)
	}
	return conn, nil
}

// awakeFor is how long a sandbox runs at least that goes on because somebody calls into it.
const awakeFor = 5 * time.Minute

// awake lets a sandbox run on that is paused and is to resume when it is used.
func (s *Server) awake(ctx context.Context, id string) error {
	v, err := s.Host.Peek(id)
	if err != nil || state(v) != statePaused || !v.Life.AutoResume {
		return err
	}
	if resumed, err := s.goOn(ctx, id); err != nil || !resumed {
		return err
	}
	_, err = s.Host.SetTTL(id, max(v.Life.TTL, awakeFor), true)
	return err
}

// unary makes a call in the guest.
func (s *Server) unary(r *http.Request, method string, in, out any) error {
	ctx, cancel, err := bounded(r)
	if err != nil {
		return err
	}
	defer cancel()
	conn, err := s.guest(ctx, r)
	if err != nil {
		return err
	}
	return call.Unary(ctx, conn, method, in, out)
}

func (s *Server) envdHealth(w http.ResponseWriter, r *http.Request) error {
	id := targetOf(r).id
	v, err := s.Host.Peek(id)
	if err != nil {
		return reach(id, err)
	}
	if state(v) != stateRunning {
		return &edgeError{sandbox: id}
	}
	return empty(w, http.StatusNoContent)
}

func (s *Server) envdMetrics(w http.ResponseWriter, r *http.Request) error {
	id := targetOf(r).id
	conn, err := s.Host.Look(r.Context(), id)
	if err != nil {
		return reach(id, err)
	}
	m, err := conn.Metrics(r.Context())
	if err != nil {
		return err
	}
	return httpapi.Reply(w, http.StatusOK, map[string]any{
		"ts": m.Time.Unix(), "cpu_count": m.CPUs, "cpu_used_pct": m.CPUPercent, "mem_total": m.MemTotal, "mem_used": m.MemUsed,
		"mem_cache": m.MemCached, "disk_total": m.DiskTotal, "disk_used": m.DiskUsed,
	})
}

// envs is the environment that every process of the sandbox begins with.
func (s *Server) envs(w http.ResponseWriter, r *http.Request) error {
	conn, err := s.guest(r.Context(), r)
	if err != nil {
		return err
	}
	var out limitedText
	_, err = call.Run(r.Context(), conn, wire.StartRequest{
		Process: wire.ProcessConfig{Cmd: "/usr/bin/env", Args: []string{"-0"}}, User: userOf(r), TimeoutMS: 10_000,
	}, nil, call.Output{Stdout: &out}, nil)
	if err != nil {
		return err
	}
	vars := map[string]string{}
	for line := range strings.SplitSeq(out.text, "\x00") {
		if name, value, ok := strings.Cut(line, "="); ok {
			vars[name] = value
		}
	}
	return httpapi.Reply(w, http.StatusOK, vars)
}

// limitedText keeps what a guest prints, as far as it is to be believed.
type limitedText struct{ text string }

func (l *limitedText) Write(p []byte) (int, error) {
	if len(l.text)+len(p) > 4<<20 {
		return 0, &api.Error{Code: api.CodeExhausted, Message: "the guest's environment is too large"}
	}
	l.text += string(p)
	return len(p), nil
}
