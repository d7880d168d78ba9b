package network

import (
	"container/list"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/network/inspect"
)

func (l Limits) withDefaults() Limits {
	set := func(v *int, def int) {
		if *v == 0 {
			*v = def
		}
	}
	set(&l.Flows, 1024)
	set(&l.FlowsPerSecond, 512)
	set(&l.FramesBuffered, 256)
	set(&l.Kept, 1024)
	return l
}

// flow is a Flow that is open, or about to be.
type flow struct {
	Flow // guarded by flows.mu, apart from ID, Protocol, Guest, To
	// What it was allowed by, so that it can be judged again: where it goes and whether its bytes are looked at, which never
	// change, and what they said last, which flows.mu guards; nil: nothing yet.
	destination egress.Destination
	inspected   bool
	found       *inspect.Finding
	// cut ends it at once: the guest sees a reset. It may be called often, and by anybody.
	cut func()

	sent, received atomic.Int64
}

// snapshot is the flow as it is now; flows.mu is held.
func (f *flow) snapshot() Flow {
	s := f.Flow
	s.Sent, s.Received = f.sent.Load(), f.received.Load()
	return s
}

// refusal is what refusals have in common that are counted on one Flow.
type refusal struct {
	protocol, name, reason string
	to                     netip.AddrPort
}

// maxRefusals are the kinds of refusals told apart at a time; the one not seen for longest makes room.
const maxRefusals = 256

type refused struct {
	key  refusal
	flow Flow
	told time.Time
}

// flows is the record of a Network: what is open, the last that ended, what was refused, and what all of it came to.
type flows struct {
	limits Limits
	events func(Flow)

	// Counters that the path of data touches.
	sent, received, spent                             atomic.Int64
	framesIn, framesOut, framesDropped, framesRefused atomic.Int64
	talked                                            atomic.Bool
	budget                                            atomic.Int64 // 0: none
	broke                                             atomic.Bool  // the budget is spent

	mu       sync.Mutex
	last     uint64
	open     map[uint64]*flow
	ended    []Flow // a ring of limits.Kept
	next     int    // where in ended the next one goes
	refusals map[refusal]*list.Element
	recent   *list.List // of *refused, the latest first
	totals   Totals     // what is counted under mu
	bucket   bucket
}

func newFlows(limits Limits, spent int64, events func(Flow)) *flows {
	f := &flows{
		limits: limits, events: events, open: map[uint64]*flow{}, refusals: map[refusal]*list.Element{}, recent: list.New(),
		bucket: bucket{rate: float64(limits.FlowsPerSecond), burst: float64(limits.FlowsPerSecond)},
	}
	f.spent.Store(spent)
	return f
}

// bucket fills with tokens at a rate, up to a burst.
type bucket struct {
	rate, burst, tokens float64
	at                  time.Time
}

func (b *bucket) take(now time.Time) bool {
	if b.at.IsZero() {
		b.tokens = b.burst
	} else {
		b.tokens = min(b.burst, b.tokens+b.rate*max(0, now.Sub(b.at).Seconds()))
	}
	b.at = now
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}

// begin enters a flow that the policy allows, unless a limit is reached: then it is refused, and nil.
func (f *flows) begin(is Flow, to egress.Destination, inspected bool, cut func()) *flow {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	switch {
	case f.broke.Load():
		is.Reason = f.spentReason()
	case len(f.open) >= f.limits.Flows:
		is.Reason = fmt.Sprintf("%d flows are open, which is the limit", len(f.open))
	case !f.bucket.take(now):
		is.Reason = fmt.Sprintf("more than %d new flows a second", f.limits.FlowsPerSecond)
	}
	if is.Reason != "" {
		is.Rule = ""
		f.refuseLocked(is, now)
		return nil
	}
	f.last++
	is.ID, is.Started, is.Verdict = f.last, now, VerdictAllowed
	open := &flow{Flow: is, destination: to, inspected: inspected, cut: cut}
	f.open[is.ID] = open
	f.totals.Flows++
	f.tell(is)
	return open
}

// ask takes the limits' leave for a question to the name server; empty: it may be asked.
func (f *flows) ask() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.totals.Questions++
	switch {
	case f.broke.Load():
		return f.spentReason()
	case !f.bucket.take(time.Now()):
		return fmt.Sprintf("more than %d new flows a second", f.limits.FlowsPerSecond)
	}
	return ""
}

// asked records a question that was answered.
func (f *flows) asked(is Flow) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sent.Add(is.Sent)
	f.received.Add(is.Received)
	if is.Verdict == VerdictRefused {
		is.Sent, is.Received = 0, 0
		f.refuseLocked(is, time.Now())
		return
	}
	f.last++
	f.totals.Flows++
	is.ID, is.Ended = f.last, time.Now()
	f.keep(is)
	f.tell(is)
}

func (f *flows) spentReason() string {
	return fmt.Sprintf("the budget of %d bytes is spent", f.budget.Load())
}

// refuse records a flow that never was.
func (f *flows) refuse(is Flow) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refuseLocked(is, time.Now())
}

func (f *flows) refuseLocked(is Flow, now time.Time) {
	f.totals.Refused++
	is.Verdict = VerdictRefused
	key := refusal{protocol: is.Protocol, name: is.Name, reason: is.Reason, to: is.To}
	if e, ok := f.refusals[key]; ok {
		f.recent.MoveToFront(e)
		r := e.Value.(*refused) //nolint:forcetypeassert // the list holds nothing else.
		r.flow.Attempts = max(1, r.flow.Attempts) + 1
		r.flow.Ended, r.flow.Guest = now, is.Guest
		if now.Sub(r.told) >= time.Second {
			r.told = now
			f.tell(r.flow)
		}
		return
	}
	for len(f.refusals) >= maxRefusals {
		f.forget(f.recent.Back())
	}
	f.last++
	f.totals.Flows++
	is.ID, is.Started, is.Ended = f.last, now, now
	f.refusals[key] = f.recent.PushFront(&refused{key: key, flow: is, told: now})
	f.tell(is)
}

// forget moves a kind of refusal to what has ended.
func (f *flows) forget(e *list.Element) {
	r := f.recent.Remove(e).(*refused) //nolint:forcetypeassert // the list holds nothing else.
	delete(f.refusals, r.key)
	f.keep(r.flow)
}

func (f *flows) keep(is Flow) {
	if len(f.ended) < f.limits.Kept {
		f.ended = append(f.ended, is)
		return
	}
	f.ended[f.next] = is
	f.next = (f.next + 1) % len(f.ended)
}

func (f *flows) tell(is Flow) {
	if f.events != nil {
		f.events(is)
	}
}

// said notes what a flow's bytes said, and the rule that let it pass.
func (f *flows) said(open *flow, found inspect.Finding, rule string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	open.found = &found
	if found.Name != "" {
		open.Name = found.Name
	}
	if rule != "" {
		open.Rule = rule
	}
}

// end takes a flow out of those that are open. Only the first end of a flow counts. verdict is empty where it was let pass to
// its end.
func (f *flows) end(open *flow, verdict, reason string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.open[open.ID]; !ok {
		return
	}
	delete(f.open, open.ID)
	if verdict != "" {
		open.Verdict = verdict
	}
	if reason != "" {
		open.Reason = reason
	}
	switch open.Verdict {
	case VerdictCut:
		f.totals.Cut++
	case VerdictRefused:
		f.totals.Refused++
		open.Rule = ""
	}
	open.Ended = time.Now()
	is := open.snapshot()
	f.keep(is)
	f.tell(is)
}

// cut ends every open flow for which why has a reason.
func (f *flows) cut(why func(*flow) string) {
	f.mu.Lock()
	found := map[*flow]string{}
	for _, open := range f.open {
		if reason := why(open); reason != "" {
			found[open] = reason
		}
	}
	f.mu.Unlock()
	for open, reason := range found {
		f.end(open, VerdictCut, reason)
		open.cut()
	}
}

// count adds bytes that have passed, and tells whether more may.
func (f *flows) count(open *flow, sent, received int) bool {
	if sent > 0 {
		open.sent.Add(int64(sent))
		f.sent.Add(int64(sent))
	}
	if received > 0 {
		open.received.Add(int64(received))
		f.received.Add(int64(received))
	}
	return f.pay(int64(sent) + int64(received))
}

// pay takes bytes from the budget, and tells whether any is left.
func (f *flows) pay(bytes int64) bool {
	spent := f.spent.Add(bytes)
	budget := f.budget.Load()
	if budget == 0 || spent < budget {
		return true
	}
	if f.breaks() {
		reason := f.spentReason()
		f.cut(func(*flow) string { return reason })
	}
	return false
}

// breaks tells whether the budget, as it is now, is spent, and nobody was told so.
func (f *flows) breaks() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	budget := f.budget.Load()
	return budget != 0 && f.spent.Load() >= budget && f.broke.CompareAndSwap(false, true)
}

// setBudget changes it for what comes; what was spent stays spent.
func (f *flows) setBudget(bytes int64) {
	f.mu.Lock()
	f.budget.Store(bytes)
	f.broke.Store(false)
	f.mu.Unlock()
	f.pay(0)
}

// list is every flow that is known, the oldest first.
func (f *flows) list() []Flow {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := make([]Flow, 0, len(f.ended)+len(f.refusals)+len(f.open))
	all = append(all, f.ended...)
	for e := f.recent.Back(); e != nil; e = e.Prev() {
		all = append(all, e.Value.(*refused).flow) //nolint:forcetypeassert // the list holds nothing else.
	}
	for _, open := range f.open {
		all = append(all, open.snapshot())
	}
	return all
}

// many tells whether more are open than can have large buffers each.
func (f *flows) many() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.open) > tcpMany
}

func (f *flows) sums() Totals {
	f.mu.Lock()
	t := f.totals
	t.Open = len(f.open)
	f.mu.Unlock()
	t.Talked = f.talked.Load()
	t.Sent, t.Received = f.sent.Load(), f.received.Load()
	t.FramesIn, t.FramesOut = f.framesIn.Load(), f.framesOut.Load()
	t.FramesDropped, t.FramesRefused = f.framesDropped.Load(), f.framesRefused.Load()
	t.BudgetLeft, t.BudgetExceeded = -1, f.broke.Load()
	if budget := f.budget.Load(); budget > 0 {
		t.BudgetLeft = max(0, budget-f.spent.Load())
	}
	return t
}
