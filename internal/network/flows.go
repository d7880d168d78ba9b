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
	// shrink has it keep less; nil: it keeps next to nothing. Guarded by flows.mu, as is how much it keeps.
	shrink func(buffer int)
	buffer int

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

const (
	// maxRefusals are the kinds of refusals told apart at a time; the one not seen for longest makes room.
	maxRefusals = 256
	// newRefusals are how many kinds that were not there may be told apart a second, after as many as are told apart: a guest
	// that tries port after port is counted, and not written down attempt by attempt.
	newRefusals = 16
)

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

	mu            sync.Mutex
	last          uint64
	open          map[uint64]*flow
	ended         ring // of limits.Kept
	refusedBefore ring // of maxRefusals, so that what a guest is refused does not push out what it did
	refusals      map[refusal]*list.Element
	recent        *list.List // of *refused, the latest first
	totals        Totals     // what is counted under mu
	bucket        bucket
	news          bucket  // of kinds of refusals
	member        *member // nil: it shares with nobody
}

// ring keeps the last so many.
type ring struct {
	size  int
	flows []Flow
	next  int
}

func (r *ring) keep(is Flow) {
	if len(r.flows) < r.size {
		r.flows = append(r.flows, is)
		return
	}
	r.flows[r.next] = is
	r.next = (r.next + 1) % len(r.flows)
}

func newFlows(limits Limits, spent int64, events func(Flow)) *flows {
	f := &flows{
		limits: limits, events: events, open: map[uint64]*flow{}, refusals: map[refusal]*list.Element{}, recent: list.New(),
		bucket: bucket{rate: float64(limits.FlowsPerSecond), burst: float64(limits.FlowsPerSecond)},
		news:   bucket{rate: newRefusals, burst: maxRefusals},
		ended:  ring{size: limits.Kept}, refusedBefore: ring{size: maxRefusals},
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
		is.Reason = fmt.Sprintf("%d flows are open, which is the limit", f.limits.Flows)
	case !f.bucket.take(now):
		is.Reason = fmt.Sprintf("more than %d new flows a second", f.limits.FlowsPerSecond)
	case f.member != nil:
		is.Reason = f.member.take()
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
	f.ended.keep(is)
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
	if key.reason != tooManyKinds && !f.news.take(now) {
		f.totals.Lost++
		f.totals.Refused-- // It is counted again.
		f.refuseLocked(Flow{Protocol: is.Protocol, Guest: is.Guest, Reason: tooManyKinds}, now)
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

// tooManyKinds is what refusals are counted as together that are not told apart.
const tooManyKinds = "many refusals of ever new kinds, of which each is counted here and not written down"

// forget moves a kind of refusal to what has ended.
func (f *flows) forget(e *list.Element) {
	r := f.recent.Remove(e).(*refused) //nolint:forcetypeassert // the list holds nothing else.
	delete(f.refusals, r.key)
	f.refusedBefore.keep(r.flow)
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
	if f.member != nil {
		f.member.give()
	}
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
	f.ended.keep(is)
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
	all := make([]Flow, 0, len(f.ended.flows)+len(f.refusedBefore.flows)+len(f.refusals)+len(f.open))
	all = append(append(all, f.ended.flows...), f.refusedBefore.flows...)
	for e := f.recent.Back(); e != nil; e = e.Prev() {
		all = append(all, e.Value.(*refused).flow) //nolint:forcetypeassert // the list holds nothing else.
	}
	for _, open := range f.open {
		all = append(all, open.snapshot())
	}
	return all
}

// keeps notes how much a flow keeps each way, and how it is made less. It returns how much that may be.
func (f *flows) keeps(open *flow, shrink func(buffer int)) (buffer int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	buffer = tcpBufferMax
	if len(f.open) > tcpMany {
		buffer = tcpBufferMany
	}
	if f.member != nil {
		buffer = min(buffer, f.member.buffer())
	}
	open.shrink, open.buffer = shrink, buffer
	return buffer
}

// queued is how many bytes of frames may wait for the guest.
func (f *flows) queued() int {
	f.mu.Lock()
	m := f.member
	f.mu.Unlock()
	if m == nil {
		return maxQueuedBytes
	}
	return m.queued()
}

// balance makes room for one more flow, where the others keep more than each may have now.
func (f *flows) balance() {
	f.mu.Lock()
	m := f.member
	f.mu.Unlock()
	if m == nil {
		return
	}
	if buffer := m.buffer(); buffer < tcpBufferMax {
		f.shrink(buffer)
	}
}

// unshare gives the part of what the process has back.
func (f *flows) unshare() {
	f.mu.Lock()
	m := f.member
	f.member = nil
	f.mu.Unlock()
	if m != nil {
		m.leave()
	}
}

// shrink has every flow keep so much at most.
func (f *flows) shrink(buffer int) {
	f.mu.Lock()
	var larger []*flow
	for _, open := range f.open {
		if open.shrink != nil && open.buffer > buffer {
			open.buffer = buffer
			larger = append(larger, open)
		}
	}
	f.mu.Unlock()
	for _, open := range larger {
		open.shrink(buffer)
	}
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
