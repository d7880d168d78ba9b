package e2bapi

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/httpapi"
	"forkd.dev/forkd/internal/lineage"
)

// newSandbox is NewSandbox and NewSandboxV2.
type newSandbox struct {
	Template      string            `json:"templateID"`
	Timeout       *int64            `json:"timeout"`
	AutoPause     bool              `json:"autoPause"`
	PauseMemory   *bool             `json:"autoPauseMemory"`
	AutoResume    *autoResume       `json:"autoResume"`
	Secure        bool              `json:"secure"` // always is
	AllowInternet *bool             `json:"allow_internet_access"`
	Network       *network          `json:"network"`
	Metadata      map[string]string `json:"metadata"`
	Env           map[string]string `json:"envVars"`
	MCP           json.RawMessage   `json:"mcp"`
	IAM           json.RawMessage   `json:"iam"`
	Volumes       []json.RawMessage `json:"volumeMounts"`
}

type autoResume struct {
	Enabled bool `json:"enabled"`
}

// sandboxReply is Sandbox.
type sandboxReply struct {
	Template     string   `json:"templateID"`
	ID           string   `json:"sandboxID"`
	Client       string   `json:"clientID"`
	Envd         string   `json:"envdVersion"`
	Alias        string   `json:"alias,omitempty"`
	EnvdToken    string   `json:"envdAccessToken"`
	TrafficToken string   `json:"trafficAccessToken"`
	Domain       *string  `json:"domain"`
	Network      *network `json:"network,omitempty"` // beyond E2B's: what it may reach, also when the client has said nothing
}

// clientID is required, and says nothing any more.
const clientID = "forkd"

func (s *Server) sandboxReply(v host.View) sandboxReply {
	out := sandboxReply{
		Template: v.SnapshotTag, ID: v.ID, Client: clientID, Envd: envdVersion, Alias: v.SnapshotTag,
		EnvdToken: s.Seed.Token(forEnvd, v.ID), TrafficToken: s.Seed.Token(forTraffic, v.ID),
	}
	if s.Domain != "" {
		out.Domain = &s.Domain
	}
	_, out.Network = describeNetwork(v)
	return out
}

// unsupported refuses what is known and cannot be done; a client must not take silence for consent.
func unsupported(format string, args ...any) error {
	return &api.Error{Code: api.CodeInvalid, Message: fmt.Sprintf(format, args...)}
}

func present(text json.RawMessage) bool {
	t := strings.TrimSpace(string(text))
	return t != "" && t != "null" && t != "{}" && t != "[]"
}

func (n *newSandbox) check() error {
	switch {
	case n.Template == "":
		return invalid("templateID is missing")
	case n.PauseMemory != nil && !*n.PauseMemory && n.AutoPause:
		return unsupported("autoPauseMemory: a sandbox is paused with its memory here, not without")
	case present(n.MCP):
		return unsupported("mcp: there is no MCP gateway in sandboxes here")
	case present(n.IAM):
		return unsupported("iam: there are no workload tokens here")
	case len(n.Volumes) > 0:
		return unsupported("volumeMounts: there are no volumes here")
	}
	return nil
}

// seconds reads a time limit of a request.
func seconds(field string, given *int64, otherwise time.Duration) (time.Duration, error) {
	if given == nil {
		return otherwise, nil
	}
	if *given < 1 || *given > maxSeconds {
		return 0, invalid("%s is %d; give seconds, 1 to %d", field, *given, maxSeconds)
	}
	return time.Duration(*given) * time.Second, nil
}

const maxSeconds = 366 * 24 * 3600

func (s *Server) create(usual time.Duration) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		req := newSandbox{}
		if err := body(w, r, &req); err != nil {
			return err
		}
		if err := req.check(); err != nil {
			return err
		}
		ttl, err := seconds("timeout", req.Timeout, usual)
		if err != nil {
			return err
		}
		if err := manyAllowed(r); err != nil {
			return err
		}
		spec := host.ForkSpec{
			Tag: tagOf(req.Template), N: 1, Labels: req.Metadata, Env: envOf(&req), IDIn: idVariable, TTL: ttl,
			Life: host.Life{AutoResume: req.AutoResume != nil && req.AutoResume.Enabled},
		}
		if req.AutoPause {
			spec.Life.OnEnd = host.ActionSuspend
		}
		if err := s.limitNetwork(r, &spec, req.AllowInternet, req.Network); err != nil {
			return err
		}
		httpapi.NoteTouched(r, "snapshot", spec.Tag)
		results, err := s.Host.Fork(r.Context(), spec)
		if errors.Is(err, host.ErrWider) {
			return fmt.Errorf("network: %w", err)
		}
		if err != nil {
			return s.explainTemplate(w, spec.Tag, err)
		}
		if results[0].Err != nil {
			return results[0].Err
		}
		v := results[0].Sandbox
		if r.Context().Err() != nil { // nobody is there to be told the id
			return errors.Join(context.Cause(r.Context()), s.Host.Kill(context.WithoutCancel(r.Context()), v.ID))
		}
		httpapi.NoteCreated(r, "sandbox", v.ID)
		w.Header().Set("Cache-Control", "no-store")
		return httpapi.Reply(w, http.StatusCreated, s.sandboxReply(v))
	}
}

// What tells processes where they are, as E2B's documentation has it. There are no teams here.
const (
	insideVariable   = "E2B_SANDBOX"
	idVariable       = "E2B_SANDBOX_ID"
	templateVariable = "E2B_TEMPLATE_ID"
)

// envOf is the variables of a new sandbox: a client's own go before what it is told.
func envOf(n *newSandbox) map[string]string {
	env := map[string]string{insideVariable: "true", templateVariable: tagOf(n.Template)}
	maps.Copy(env, n.Env)
	return env
}

// manyAllowed refuses to make other sandboxes with a token that opens one alone.
func manyAllowed(r *http.Request) error {
	if who := access.FromContext(r.Context()); who.Sandbox != "" {
		return &api.Error{Code: api.CodeDenied, Message: fmt.Sprintf("the token %s opens sandbox %s alone", who.TokenID, who.Sandbox)}
	}
	return nil
}

// sandboxDetail is ListedSandbox, and SandboxDetail with what is omitted of that.
type sandboxDetail struct {
	Template string            `json:"templateID"`
	Alias    string            `json:"alias,omitempty"`
	ID       string            `json:"sandboxID"`
	Client   string            `json:"clientID"`
	Started  time.Time         `json:"startedAt"`
	End      time.Time         `json:"endAt"`
	CPUs     int               `json:"cpuCount"`
	MemoryMB int64             `json:"memoryMB"`
	DiskMB   int64             `json:"diskSizeMB"`
	State    string            `json:"state"`
	Envd     string            `json:"envdVersion"`
	Metadata map[string]string `json:"metadata,omitempty"`

	EnvdToken     string     `json:"envdAccessToken,omitempty"`
	AllowInternet *bool      `json:"allowInternetAccess,omitempty"`
	Domain        *string    `json:"domain,omitempty"`
	Network       *network   `json:"network,omitempty"`
	Lifecycle     *lifecycle `json:"lifecycle,omitempty"`
}

type lifecycle struct {
	AutoResume bool   `json:"autoResume"`
	OnTimeout  string `json:"onTimeout"`
}

// never is when a sandbox ends that has no end: the field is required.
const never = 100 * 365 * 24 * time.Hour

func (s *Server) describe(v host.View) sandboxDetail {
	d := sandboxDetail{
		Template: v.SnapshotTag, Alias: v.SnapshotTag, ID: v.ID, Client: clientID, Started: v.Created.UTC(), End: v.Expires.UTC(),
		CPUs: v.Format.CPUs, MemoryMB: v.Format.MemoryBytes >> 20, State: state(v), Envd: envdVersion, Metadata: v.Labels,
	}
	if v.Expires.IsZero() {
		d.End = v.Created.Add(never).UTC().Truncate(time.Second)
	}
	if snap, err := s.Host.Snapshot(v.SnapshotTag); err == nil { // it may be gone by now
		d.DiskMB = s.diskMB(snap.Image)
	}
	return d
}

// diskMB is the size of an image's disk.
func (s *Server) diskMB(image string) int64 {
	for _, i := range s.Host.Images() {
		if i.ID == image {
			return i.DiskBytes >> 20
		}
	}
	return 0
}

// one finds the sandbox in a request's path. One whose machine died is not there.
func (s *Server) one(r *http.Request) (host.View, error) {
	id := r.PathValue("id")
	v, err := s.Host.Peek(id)
	if err != nil && httpapi.ToAPI(err).Code != api.CodeInvalid {
		return v, err
	}
	if err != nil || v.ID != id || state(v) == stateGone {
		return v, &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf("sandbox %.80q was not found", id)}
	}
	return v, nil
}

func (s *Server) info(w http.ResponseWriter, r *http.Request) error {
	v, err := s.one(r)
	if err != nil {
		return err
	}
	d := s.describe(v)
	d.EnvdToken = s.tokenFor(r, v.ID)
	d.Lifecycle = &lifecycle{AutoResume: v.Life.AutoResume, OnTimeout: "kill"}
	if v.Life.OnEnd == host.ActionSuspend || v.Life.OnEnd == host.ActionPause {
		d.Lifecycle.OnTimeout = "pause"
	}
	if s.Domain != "" {
		d.Domain = &s.Domain
	}
	internet, allowed := describeNetwork(v)
	d.AllowInternet, d.Network = &internet, allowed
	return httpapi.Reply(w, http.StatusOK, d)
}

// tokenFor tells a sandbox's token to those who could do without it.
func (s *Server) tokenFor(r *http.Request, id string) string {
	if access.FromContext(r.Context()).May(access.Use, id) {
		return s.Seed.Token(forEnvd, id)
	}
	return ""
}

func (s *Server) kill(w http.ResponseWriter, r *http.Request) error {
	if _, err := s.one(r); err != nil {
		return err
	}
	if err := s.Host.Kill(r.Context(), r.PathValue("id")); err != nil {
		return err
	}
	s.sweepForks(r.Context())
	return empty(w, http.StatusNoContent)
}

// Lists.

const (
	usualPage = 100
	mostPage  = 100
)

func (s *Server) list(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	keep, err := listFilter(q)
	if err != nil {
		return err
	}
	var views []host.View
	running := 0
	for _, v := range s.Host.Sandboxes(nil) {
		if state(v) == stateRunning {
			running++
		}
		if keep(v) {
			views = append(views, v)
		}
	}
	if q.Get("order") != "asc" {
		slices.Reverse(views) // the newest first
	}
	if strings.HasPrefix(r.URL.Path, "/v2/") {
		w.Header().Set("X-Total-Running", strconv.Itoa(running))
		if views, err = page(w, q, views, func(v host.View) string { return v.ID }); err != nil {
			return err
		}
	}
	out := []sandboxDetail{}
	for _, v := range views {
		out = append(out, s.describe(v))
	}
	return httpapi.Reply(w, http.StatusOK, out)
}

func listFilter(q url.Values) (func(host.View) bool, error) {
	labels, err := metadataFilter(q.Get("metadata"))
	if err != nil {
		return nil, err
	}
	states := []string{stateRunning, statePaused}
	if q.Has("state") {
		states = strings.Split(strings.Join(q["state"], ","), ",")
		for _, st := range states {
			if st != stateRunning && st != statePaused {
				return nil, invalid("state is %.40q; give running, paused or both", st)
			}
		}
	}
	switch q.Get("order") {
	case "", "asc", "desc":
	default:
		return nil, invalid("order is %.40q; give asc or desc", q.Get("order"))
	}
	var after time.Time
	if text := q.Get("startedAfter"); text != "" {
		if after, err = time.Parse(time.RFC3339, text); err != nil {
			return nil, invalid("startedAfter is %.60q; give a time as in RFC 3339", text)
		}
	}
	template := tagOf(q.Get("template"))
	return func(v host.View) bool {
		for k, want := range labels {
			if got, ok := v.Labels[k]; !ok || got != want {
				return false
			}
		}
		return slices.Contains(states, state(v)) && (template == "" || template == v.SnapshotTag) && (after.IsZero() || v.Created.After(after))
	}, nil
}

// metadataFilter reads the filter, which clients encode up to three times: a query in a query, whose parts are escaped once more.
func metadataFilter(text string) (map[string]string, error) {
	if text == "" {
		return nil, nil
	}
	pairs, err := url.ParseQuery(text)
	if err != nil {
		return nil, invalid("metadata is %.200q: %v", text, err)
	}
	out := map[string]string{}
	for k, values := range pairs {
		key, err := url.QueryUnescape(k)
		if err != nil {
			key = k
		}
		value, err := url.QueryUnescape(values[0])
		if err != nil {
			value = values[0]
		}
		out[key] = value
	}
	return out, nil
}

// page is the part of a list that a request asks for. Its token names the last one of the page before.
func page[T any](w http.ResponseWriter, q url.Values, list []T, id func(T) string) ([]T, error) {
	limit := usualPage
	if text := q.Get("limit"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > mostPage {
			return nil, invalid("limit is %.40q; give 1 to %d", text, mostPage)
		}
		limit = n
	}
	skipped := 0
	if text := q.Get("nextToken"); text != "" {
		last, err := hex.DecodeString(text)
		if err != nil {
			return nil, invalid("nextToken is %.80q; give one that came with a page", text)
		}
		at, past, _ := strings.Cut(string(last), " ")
		from := slices.IndexFunc(list, func(v T) bool { return id(v) == at })
		if from < 0 { // it is gone: by its place then
			n, _ := strconv.Atoi(past)
			from = min(max(n, 0), len(list)) - 1
		}
		list = list[from+1:]
		skipped = from + 1
	}
	if limit >= len(list) {
		return list, nil
	}
	w.Header().Set("X-Next-Token", hex.EncodeToString(fmt.Appendf(nil, "%s %d", id(list[limit-1]), skipped+limit)))
	return list[:limit], nil
}

// Times to live.

func (s *Server) setTimeout(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Timeout *int64 `json:"timeout"`
	}
	if err := body(w, r, &req); err != nil {
		return err
	}
	if req.Timeout == nil {
		return invalid("timeout is missing")
	}
	v, err := s.one(r)
	if err != nil {
		return err
	}
	ttl := time.Nanosecond // at once
	if *req.Timeout != 0 {
		if ttl, err = seconds("timeout", req.Timeout, 0); err != nil {
			return err
		}
	}
	if _, err := s.Host.SetTTL(v.ID, ttl, false); err != nil {
		return err
	}
	return empty(w, http.StatusNoContent)
}

func (s *Server) refresh(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Duration *int64 `json:"duration"`
	}
	if err := body(w, r, &req); err != nil {
		return err
	}
	ttl, err := seconds("duration", req.Duration, time.Minute)
	if err != nil {
		return err
	}
	if ttl > time.Hour {
		return invalid("duration is %d; at most 3600 seconds", *req.Duration)
	}
	v, err := s.one(r)
	if err != nil {
		return err
	}
	if _, err := s.Host.SetTTL(v.ID, ttl, true); err != nil {
		return err
	}
	return empty(w, http.StatusNoContent)
}

// Pause, resume, connect.

func (s *Server) pause(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Memory  *bool `json:"memory"`
		Healthy bool  `json:"requireHealthyGuest"` // it always is asked to freeze its processes, and must
	}
	if err := body(w, r, &req); err != nil {
		return err
	}
	if req.Memory != nil && !*req.Memory {
		return unsupported("memory: a sandbox is paused with its memory here, not without")
	}
	v, err := s.one(r)
	if err != nil {
		return err
	}
	if state(v) == statePaused {
		return &api.Error{Code: api.CodeWrongState, Message: fmt.Sprintf("sandbox %s is already paused", v.ID)}
	}
	// Its time stands still while it is paused.
	if _, err := s.Host.SetTTL(v.ID, 0, false); err != nil {
		return err
	}
	if _, err := s.Host.Suspend(r.Context(), v.ID); err != nil {
		if !v.Expires.IsZero() {
			_, again := s.Host.SetTTL(v.ID, max(time.Until(v.Expires), time.Nanosecond), false)
			err = errors.Join(err, again)
		}
		return err
	}
	return empty(w, http.StatusNoContent)
}

// connectTimeout bounds the wait for another who pauses or resumes the same sandbox.
const connectTimeout = time.Minute

// goOn lets a sandbox run that is paused, and reports whether it was.
func (s *Server) goOn(ctx context.Context, id string) (resumed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		v, err := s.Host.Peek(id)
		if err != nil {
			return resumed, err
		}
		switch v.State {
		case lineage.Running:
			return resumed, nil
		case lineage.Paused:
			_, err = s.Host.Resume(ctx, id)
		case lineage.Suspended:
			_, err = s.Host.Wake(ctx, id)
		case lineage.Failed:
			return resumed, fmt.Errorf("sandbox %s: %w: it is %s: %s", id, lineage.ErrState, v.State, v.Reason)
		}
		if err == nil {
			resumed = true
			continue
		}
		if !errors.Is(err, lineage.ErrState) {
			return resumed, err
		}
		select { // another is at it
		case <-tick.C:
		case <-ctx.Done():
			return resumed, err
		}
	}
}

func (s *Server) connect(usual time.Duration) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		var req struct {
			Timeout *int64 `json:"timeout"`
			Memory  *bool  `json:"memory"`
		}
		if err := body(w, r, &req); err != nil {
			return err
		}
		return s.resumeFor(w, r, req.Timeout, req.Memory, usual, false)
	}
}

func (s *Server) resume(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Timeout   *int64 `json:"timeout"`
		Memory    *bool  `json:"memory"`
		AutoPause *bool  `json:"autoPause"`
	}
	if err := body(w, r, &req); err != nil {
		return err
	}
	if req.AutoPause != nil {
		v, err := s.one(r)
		if err != nil {
			return err
		}
		if *req.AutoPause != (v.Life.OnEnd == host.ActionSuspend) {
			return unsupported("autoPause: what happens at the end of a sandbox's time is chosen when it is created")
		}
	}
	return s.resumeFor(w, r, req.Timeout, req.Memory, timeoutV1, true)
}

func (s *Server) resumeFor(w http.ResponseWriter, r *http.Request, timeout *int64, memory *bool, usual time.Duration, onlyPaused bool) error {
	ttl, err := seconds("timeout", timeout, usual)
	if err != nil {
		return err
	}
	if memory != nil && !*memory {
		return unsupported("memory: a sandbox is resumed with its memory here, not without")
	}
	v, err := s.one(r)
	if err != nil {
		return err
	}
	if onlyPaused && state(v) == stateRunning {
		return &api.Error{Code: api.CodeWrongState, Message: fmt.Sprintf("sandbox %s is already running", v.ID)}
	}
	resumed, err := s.goOn(r.Context(), v.ID)
	if err != nil {
		return err
	}
	if v, err = s.Host.SetTTL(v.ID, ttl, !resumed); err != nil {
		return err
	}
	status := http.StatusOK
	if resumed {
		status = http.StatusCreated
	}
	w.Header().Set("Cache-Control", "no-store")
	return httpapi.Reply(w, status, s.sandboxReply(v))
}

// Forks and snapshots.

// forkTag begins the names of the snapshots that forks are made of, for those who look at them. A user may give such a name,
// too: what is nobody's is told by its record.
const forkTag = "e2b-fork-"

func (s *Server) fork(usual time.Duration) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		var req struct {
			Timeout *int64 `json:"timeout"`
			Count   *int   `json:"count"`
		}
		if err := body(w, r, &req); err != nil {
			return err
		}
		ttl, err := seconds("timeout", req.Timeout, usual)
		if err != nil {
			return err
		}
		n := 1
		if req.Count != nil {
			n = *req.Count
		}
		if n < 1 || n > 100 {
			return invalid("count is %d; give 1 to 100", n)
		}
		if err := manyAllowed(r); err != nil {
			return err
		}
		v, err := s.one(r)
		if err != nil {
			return err
		}
		if state(v) != stateRunning {
			return &api.Error{Code: api.CodeWrongState, Message: fmt.Sprintf("sandbox %s is paused", v.ID)}
		}
		s.sweepForks(r.Context())
		tag := fmt.Sprintf("%s%s-%d", forkTag, v.ID, time.Now().UnixNano())
		if _, err := s.Host.Branch(r.Context(), v.ID, host.BranchSpec{Tag: tag, NoWait: true, Passing: true}); err != nil {
			return err
		}
		httpapi.NoteCreated(r, "snapshot", tag)
		spec := host.ForkSpec{
			Tag: tag, N: n, Labels: maps.Clone(v.Labels), Env: v.Env, IDIn: idVariable, TTL: ttl, Limits: v.Limits,
			Life: host.Life{OnEnd: v.Life.OnEnd, AutoResume: v.Life.AutoResume},
		}
		results, err := s.Host.Fork(r.Context(), spec)
		if err != nil {
			s.sweepForks(context.WithoutCancel(r.Context()))
			return err
		}
		if r.Context().Err() != nil { // nobody is there to be told the ids
			return errors.Join(context.Cause(r.Context()), s.undo(context.WithoutCancel(r.Context()), results))
		}
		type result struct {
			Sandbox *sandboxReply `json:"sandbox,omitempty"`
			Error   *plainError   `json:"error,omitempty"`
		}
		out := []result{}
		for _, res := range results {
			if res.Err != nil {
				e := httpapi.ToAPI(res.Err)
				out = append(out, result{Error: &plainError{httpapi.Status(e.Code), words(e)}})
				continue
			}
			httpapi.NoteCreated(r, "sandbox", res.Sandbox.ID)
			child := s.sandboxReply(res.Sandbox)
			out = append(out, result{Sandbox: &child})
		}
		w.Header().Set("Cache-Control", "no-store")
		return httpapi.Reply(w, http.StatusCreated, out)
	}
}

// undo ends the children of a fork, and removes what they were made of.
func (s *Server) undo(ctx context.Context, children []host.ForkResult) error {
	var errs []error
	for _, c := range children {
		if c.Err == nil {
			errs = append(errs, s.Host.Kill(ctx, c.Sandbox.ID))
		}
	}
	s.sweepForks(ctx)
	return errors.Join(errs...)
}

// passing tells the snapshots of forks from those of users.
func passing(v host.SnapshotView) bool { return v.Branch != nil && v.Branch.Passing }

// sweepForks removes the snapshots of forks that nothing stands on any more. What is in use is refused, and stays.
func (s *Server) sweepForks(ctx context.Context) {
	for _, v := range s.Host.Snapshots() {
		if !passing(v) || v.Sandboxes > 0 || len(v.Dependents) > 0 || v.Status == lineage.Writing {
			continue
		}
		if _, err := s.Host.RemoveSnapshot(ctx, v.Tag, host.RemoveOptions{}); err != nil {
			s.Log.Debug("a fork's snapshot stays", "snapshot", v.Tag, "error", err)
		}
	}
}

type snapshotInfo struct {
	ID    string   `json:"snapshotID"`
	Names []string `json:"names"`
}

func (s *Server) snapshot(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Name   string `json:"name"`
		Memory *bool  `json:"memory"`
	}
	if err := body(w, r, &req); err != nil {
		return err
	}
	if req.Memory != nil && !*req.Memory {
		return unsupported("memory: a snapshot has its memory here")
	}
	v, err := s.one(r)
	if err != nil {
		return err
	}
	tag := tagOf(req.Name)
	if tag == "" {
		tag = fmt.Sprintf("snapshot-%s-%d", v.ID, time.Now().UnixMilli())
	}
	snap, err := s.Host.Branch(r.Context(), v.ID, host.BranchSpec{Tag: tag})
	if err != nil {
		return err
	}
	httpapi.NoteCreated(r, "snapshot", snap.Tag)
	return httpapi.Reply(w, http.StatusCreated, snapshotInfo{snap.Tag, []string{snap.Tag}})
}

func (s *Server) snapshots(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	all := []host.SnapshotView{}
	for _, v := range s.Host.Snapshots() {
		if v.Branch == nil || passing(v) || v.Status != lineage.Ready {
			continue
		}
		if id := q.Get("sandboxID"); id != "" && v.Branch.From != id {
			continue
		}
		if name := q.Get("name"); name != "" && tagOf(name) != v.Tag {
			continue
		}
		all = append(all, v)
	}
	slices.SortFunc(all, func(a, b host.SnapshotView) int { return b.CreatedAt.Compare(a.CreatedAt) })
	all, err := page(w, q, all, func(v host.SnapshotView) string { return v.Tag })
	if err != nil {
		return err
	}
	out := []snapshotInfo{}
	for _, v := range all {
		out = append(out, snapshotInfo{v.Tag, []string{v.Tag}})
	}
	return httpapi.Reply(w, http.StatusOK, out)
}

// Metrics and logs.

type metric struct {
	Time      time.Time `json:"timestamp"`
	Unix      int64     `json:"timestampUnix"`
	CPUs      int       `json:"cpuCount"`
	CPUUsed   float64   `json:"cpuUsedPct"`
	MemUsed   int64     `json:"memUsed"`
	MemTotal  int64     `json:"memTotal"`
	MemCache  int64     `json:"memCache"`
	DiskUsed  int64     `json:"diskUsed"`
	DiskTotal int64     `json:"diskTotal"`
}

// measure is how a sandbox is now: nothing is kept of the past. Of one that does not run it is nothing.
func (s *Server) measure(ctx context.Context, v host.View) (*metric, error) {
	if state(v) != stateRunning {
		return nil, nil
	}
	conn, err := s.Host.Look(ctx, v.ID)
	if err != nil {
		return nil, err
	}
	m, err := conn.Metrics(ctx)
	if err != nil {
		return nil, err
	}
	now := time.Now().UTC()
	return &metric{
		now, now.Unix(), m.CPUs, m.CPUPercent, m.MemUsed, m.MemTotal, m.MemCached, m.DiskUsed, m.DiskTotal,
	}, nil
}

func (s *Server) metrics(w http.ResponseWriter, r *http.Request) error {
	v, err := s.one(r)
	if err != nil {
		return err
	}
	bound := map[string]int64{}
	for _, name := range []string{"start", "end"} {
		text := r.URL.Query().Get(name)
		if text == "" {
			continue
		}
		if bound[name], err = strconv.ParseInt(text, 10, 64); err != nil {
			return invalid("%s is %.40q; give seconds since 1970", name, text)
		}
	}
	out := []metric{}
	now := time.Now().Unix()
	if end, ok := bound["end"]; ok && end < now || bound["start"] > now {
		return httpapi.Reply(w, http.StatusOK, out)
	}
	m, err := s.measure(r.Context(), v)
	if err != nil {
		return err
	}
	if m != nil {
		out = append(out, *m)
	}
	return httpapi.Reply(w, http.StatusOK, out)
}

func (s *Server) manyMetrics(w http.ResponseWriter, r *http.Request) error {
	ids := strings.Split(strings.Join(r.URL.Query()["sandbox_ids"], ","), ",")
	if len(ids) > 100 {
		return invalid("sandbox_ids names %d sandboxes; at most 100", len(ids))
	}
	out := map[string]metric{}
	var mu sync.Mutex
	var asked sync.WaitGroup
	for _, id := range ids { // all at once: a guest that does not answer keeps the others from nothing
		asked.Go(func() {
			v, err := s.Host.Peek(id)
			if err != nil || v.ID != id {
				return
			}
			if m, err := s.measure(r.Context(), v); err == nil && m != nil {
				mu.Lock()
				defer mu.Unlock()
				out[id] = *m
			}
		})
	}
	asked.Wait()
	return httpapi.Reply(w, http.StatusOK, map[string]any{"sandboxes": out})
}

type logEntry struct {
	Time    time.Time         `json:"timestamp"`
	Level   string            `json:"level"`
	Message string            `json:"message"`
	Fields  map[string]string `json:"fields"`
}

// console is the guest's console, line by line. The lines have no times of their own: they have that of the sandbox's start.
func (s *Server) console(r *http.Request) ([]logEntry, error) {
	v, err := s.one(r)
	if err != nil {
		return nil, err
	}
	text, err := s.Host.Logs(v.ID)
	if err != nil {
		return nil, err
	}
	list := []logEntry{}
	for line := range strings.Lines(strings.ToValidUTF8(string(text), "\uFFFD")) {
		if line = strings.TrimRight(line, "\r\n"); line != "" {
			list = append(list, logEntry{v.Created.UTC(), "info", line, map[string]string{"logger": "console"}})
		}
	}
	return list, nil
}

func (s *Server) logs(w http.ResponseWriter, r *http.Request) error {
	list, err := s.console(r)
	if err != nil {
		return err
	}
	limit := 1000
	if n, err := strconv.Atoi(r.URL.Query().Get("limit")); err == nil && n >= 0 {
		limit = min(n, limit)
	}
	list = list[max(0, len(list)-limit):]
	type line struct {
		Line string    `json:"line"`
		Time time.Time `json:"timestamp"`
	}
	lines := []line{}
	for _, e := range list {
		lines = append(lines, line{e.Message, e.Time})
	}
	return httpapi.Reply(w, http.StatusOK, map[string]any{"logs": lines, "logEntries": list})
}

func (s *Server) logsV2(w http.ResponseWriter, r *http.Request) error {
	list, err := s.console(r)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	if search := q.Get("search"); search != "" {
		list = slices.DeleteFunc(list, func(e logEntry) bool { return !strings.Contains(e.Message, search) })
	}
	if level := q.Get("level"); level == "warn" || level == "error" {
		list = list[:0]
	}
	if q.Get("direction") == "backward" {
		slices.Reverse(list)
	}
	limit := 1000
	if n, err := strconv.Atoi(q.Get("limit")); err == nil && n >= 0 {
		limit = min(n, limit)
	}
	return httpapi.Reply(w, http.StatusOK, map[string]any{"logs": list[:min(limit, len(list))]})
}
