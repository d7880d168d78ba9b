package httpapi

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
)

func (s *Server) egressOperations() []operation {
	const one = " /v1/sandboxes/{id}"
	return []operation{
		{"GET" + one + "/egress", access.Read, "What a sandbox may reach, and what it has come to", s.egress},
		{"PUT" + one + "/egress", access.Manage, "Say what a sandbox may reach", s.setEgress},
		{"PATCH" + one + "/egress", access.Manage, "Change what a sandbox may reach", s.changeEgress},
		{"GET" + one + "/flows", access.Read, "What a sandbox has reached and was refused, and what it does", s.flows},
	}
}

func egressDocuments() map[string]*document {
	const one = " /v1/sandboxes/{id}"
	const widen = " More than it may reach now needs scope admin, or manage where the daemon is started with `FORKD_EGRESS_WIDEN=manage`."
	const most = 1<<53 - 1
	return map[string]*document{
		"GET" + one + "/egress": {id: "egress", replies: ok(api.EgressState{})},
		"PUT" + one + "/egress": {
			id: "setEgress", body: api.Egress{}, replies: ok(api.EgressState{}),
			about: "Open flows that it may not have any more are cut." + widen,
		},
		"PATCH" + one + "/egress": {
			id: "changeEgress", body: api.EgressChange{}, replies: ok(api.EgressState{}),
			about: "Open flows that it may not have any more are cut." + widen,
		},
		"GET" + one + "/flows": {
			id: "flows", about: "One JSON object a line, or server-sent events with `Accept: text/event-stream`. Without `follow` those that are known: open ones, " +
				"refused ones, and the last that ended. Followed a flow is told when it begins, and again when it ends.",
			query: []parameter{
				{name: "follow", kind: boolean, about: "Go on with what comes, until the client leaves or the sandbox ends."},
				{name: "since", kind: integer, most: most, about: "Only those after the one of this id."},
				{name: "verdict", repeated: true, oneOf: []string{network.VerdictAllowed, network.VerdictRefused, network.VerdictCut}, about: "Those with this verdict."},
			},
			replies: []response{
				{status: http.StatusOK, of: api.Flow{}, media: jsonLines},
				{status: http.StatusOK, of: api.Flow{}, media: eventStream},
			},
		},
	}
}

// mayWiden says whether who asks may give more than there is.
func (s *Server) mayWiden(r *http.Request) bool {
	need := access.Admin
	if s.ManageWidens {
		need = access.Manage
	}
	return access.FromContext(r.Context()).Scope >= need
}

// policyOf reads a policy; nil: none was given.
func policyOf(e *api.Egress) (*egress.Policy, error) {
	if e == nil {
		return nil, nil //nolint:nilnil // That none was given is no error.
	}
	p := &egress.Policy{Preset: e.Preset, BudgetBytes: e.BudgetBytes}
	var err error
	if p.Allow, err = rulesOf("egress.allow", e.Allow); err != nil {
		return nil, err
	}
	if p.Deny, err = rulesOf("egress.deny", e.Deny); err != nil {
		return nil, err
	}
	return p, nil
}

func rulesOf(field string, texts []string) (rules []egress.Rule, err error) {
	for i, text := range texts {
		rule, err := egress.ParseRule(text)
		if err != nil {
			return nil, fmt.Errorf("%w: %s[%d]: %w", host.ErrInvalid, field, i, err)
		}
		rules = append(rules, rule)
	}
	return rules, nil
}

// egressOf is a policy as the API says it; nil: nothing is allowed.
func egressOf(p egress.Policy) *api.Egress {
	e := &api.Egress{Preset: p.Preset, Allow: texts(p.Allow), Deny: texts(p.Deny), BudgetBytes: p.BudgetBytes}
	if e.Preset == "" && len(e.Allow)+len(e.Deny) == 0 && e.BudgetBytes == 0 {
		return nil
	}
	if e.Preset == "" {
		e.Preset = egress.None
	}
	return e
}

func texts(rules []egress.Rule) []string {
	var list []string
	for _, r := range rules {
		list = append(list, r.String())
	}
	return list
}

func (s *Server) egress(w http.ResponseWriter, r *http.Request) error {
	v, err := s.Host.Egress(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	return Reply(w, http.StatusOK, egressState(v))
}

func egressState(v host.EgressView) api.EgressState {
	t := v.Totals
	out := api.EgressState{
		Rules: []string{}, SentBytes: t.Sent, ReceivedBytes: t.Received, Flows: t.Flows, FlowsOpen: t.Open, FlowsRefused: t.Refused, FlowsLost: t.Lost,
		FlowsCut: t.Cut, Questions: t.Questions,
	}
	out.Preset = egress.None
	if e := egressOf(v.Policy); e != nil {
		out.Egress = *e
	}
	preset := egress.Policy{Preset: v.Policy.Preset}
	out.Rules = append(out.Rules, texts(preset.Rules())...)
	if v.Policy.BudgetBytes > 0 {
		out.BudgetLeftBytes = new(max(v.Policy.BudgetBytes-t.Sent-t.Received, 0))
	}
	return out
}

func (s *Server) setEgress(w http.ResponseWriter, r *http.Request) error {
	var req api.Egress
	if err := decode(w, r, &req); err != nil {
		return err
	}
	policy, err := policyOf(&req)
	if err != nil {
		return err
	}
	noteEgress(r, &req)
	return s.putEgress(w, r, func(egress.Policy) (egress.Policy, error) { return *policy, nil })
}

func (s *Server) changeEgress(w http.ResponseWriter, r *http.Request) error {
	var req api.EgressChange
	if err := decode(w, r, &req); err != nil {
		return err
	}
	change, err := changeOf(&req)
	if err != nil {
		return err
	}
	if req.Preset != nil {
		noteWords(r, "", *req.Preset)
	}
	noteWords(r, "+", req.Allow...)
	noteWords(r, "-", req.Deny...)
	noteWords(r, "no +", req.RemoveAllow...)
	noteWords(r, "no -", req.RemoveDeny...)
	return s.putEgress(w, r, change)
}

// noteEgress has it written down what somebody asked to be reachable: a preset, "+RULE" for what is allowed, "-RULE" for what is
// denied.
func noteEgress(r *http.Request, e *api.Egress) {
	if e == nil {
		return
	}
	if e.Preset != "" {
		noteWords(r, "", e.Preset)
	}
	noteWords(r, "+", e.Allow...)
	noteWords(r, "-", e.Deny...)
}

// maxNotedRules bounds what is written down of one list.
const maxNotedRules = 50

func noteWords(r *http.Request, before string, words ...string) {
	for i, w := range words {
		if i == maxNotedRules {
			noteTouched(r, "egress", fmt.Sprintf("%s… %d more", before, len(words)-i))
			return
		}
		noteTouched(r, "egress", before+w)
	}
}

func (s *Server) putEgress(w http.ResponseWriter, r *http.Request, change func(egress.Policy) (egress.Policy, error)) error {
	v, err := s.Host.SetEgress(r.Context(), r.PathValue("id"), change, s.mayWiden(r))
	if err != nil {
		return err
	}
	return Reply(w, http.StatusOK, egressState(v))
}

// changeOf is what a request does to a policy.
func changeOf(req *api.EgressChange) (func(egress.Policy) (egress.Policy, error), error) {
	lists := map[string][]egress.Rule{}
	for field, given := range map[string][]string{
		"allow": req.Allow, "deny": req.Deny, "remove_allow": req.RemoveAllow, "remove_deny": req.RemoveDeny,
	} {
		rules, err := rulesOf(field, given)
		if err != nil {
			return nil, err
		}
		lists[field] = rules
	}
	return func(p egress.Policy) (egress.Policy, error) {
		if req.Preset != nil {
			p.Preset = *req.Preset
		}
		if req.BudgetBytes != nil {
			p.BudgetBytes = *req.BudgetBytes
		}
		var err error
		if p.Allow, err = changeRules("allow", p.Allow, lists["remove_allow"], lists["allow"]); err != nil {
			return p, err
		}
		p.Deny, err = changeRules("deny", p.Deny, lists["remove_deny"], lists["deny"])
		return p, err
	}, nil
}

// changeRules removes rules, which must be there, and adds others, which may be.
func changeRules(what string, have, remove, add []egress.Rule) ([]egress.Rule, error) {
	same := func(r egress.Rule) func(egress.Rule) bool {
		return func(other egress.Rule) bool { return other.String() == r.String() }
	}
	for _, r := range remove {
		i := slices.IndexFunc(have, same(r))
		if i < 0 {
			return nil, fmt.Errorf("%w: it has no rule %q under %s", host.ErrInvalid, r, what)
		}
		have = slices.Delete(have, i, i+1)
	}
	for _, r := range add {
		if !slices.ContainsFunc(have, same(r)) {
			have = append(have, r)
		}
	}
	return have, nil
}

// flows tells a sandbox's flows: one JSON object a line, or server-sent events.
func (s *Server) flows(w http.ResponseWriter, r *http.Request) error {
	follow, err := flag(r, "follow")
	if err != nil {
		return err
	}
	since, err := sinceFlow(r)
	if err != nil {
		return err
	}
	verdicts := r.URL.Query()["verdict"]
	wanted := func(f *network.Flow) bool {
		return f.ID > since && (len(verdicts) == 0 || slices.Contains(verdicts, f.Verdict))
	}
	out := &events{w: w, kind: wantsEvents(r)}
	if out.kind == "" {
		out.kind = jsonLines
	}
	var lost int64
	tell := func(f network.Flow) error {
		lost += f.Lost
		if !wanted(&f) {
			return nil
		}
		f.Lost, lost = lost, 0
		return out.write(strconv.FormatUint(f.ID, 10), "flow", flow(&f))
	}
	id := r.PathValue("id")
	if !follow {
		list, err := s.Host.Flows(r.Context(), id)
		if err != nil {
			return err
		}
		return tellAll(out, list, tell)
	}
	return s.followFlows(r, id, out, tell)
}

func tellAll(out *events, list []network.Flow, tell func(network.Flow) error) error {
	if err := out.begin(); err != nil {
		return err
	}
	for _, f := range list {
		if err := tell(f); err != nil {
			return err
		}
	}
	return nil
}

// followFlows tells those that are known and those that come. One may be told twice, with what it has come to.
func (s *Server) followFlows(r *http.Request, id string, out *events, tell func(network.Flow) error) error {
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	// Between flows a reader of server-sent events is told that the line stands; what writes is one goroutine.
	flows, begun := make(chan network.Flow), make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- s.Host.WatchFlows(ctx, id, func() { close(begun) }, func(f network.Flow) error {
			select {
			case flows <- f:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
	}()
	tick := time.NewTicker(keepAlive)
	defer tick.Stop()
	for {
		select {
		case <-begun:
			begun = nil
			list, err := s.Host.Flows(ctx, id)
			if err != nil {
				return err
			}
			if err := tellAll(out, list, tell); err != nil {
				return err
			}
		case f := <-flows:
			if err := tell(f); err != nil {
				return err
			}
		case <-tick.C:
			if err := out.keepAlive(); err != nil {
				return err
			}
		case err := <-ended:
			return followed(r.Context(), err)
		}
	}
}

func sinceFlow(r *http.Request) (uint64, error) {
	text := r.URL.Query().Get("since")
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%w: since is %.40q; give the id of a flow", host.ErrInvalid, text)
	}
	return n, nil
}

func flow(f *network.Flow) api.Flow {
	out := api.Flow{
		ID: f.ID, StartedAt: f.Started.UTC(), Protocol: f.Protocol, Name: f.Name, SentBytes: f.Sent, ReceivedBytes: f.Received,
		Verdict: f.Verdict, Rule: f.Rule, Reason: f.Reason, Attempts: f.Attempts, Lost: f.Lost,
	}
	if !f.Ended.IsZero() {
		out.EndedAt = new(f.Ended.UTC())
	}
	if f.Guest.IsValid() {
		out.From = f.Guest.String()
	}
	if f.To.IsValid() {
		out.To = f.To.String()
	}
	return out
}
