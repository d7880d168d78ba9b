package contexts

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/agent/quick"
	"forkd.dev/forkd/internal/guest/wire"
)

// facts are what an interpreter said of itself before a freeze.
type facts struct {
	threads    int
	children   int
	generators string // "2 × random.Random, 1 × …", empty for none
	hashSeed   bool   // str hashes are random
	searched   bool   // for generators just now; else generators are those of the last search
	others     []fact // what a driver says by itself
}

// Quiesce asks every idle context what a clone could not renew, and remembers it for Renew; one that is busy or slow
// (a quarter of a second, or ctx) has no answer then, which is no error. Call it before freezing. Search is for a
// machine that does not run on: it looks at every object of the interpreters.
func (m *Manager) Quiesce(ctx context.Context, search bool) error {
	limit := branchLimit
	if search {
		limit = quiesceLimit
	}
	deadline := time.Now().Add(limit)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	for _, c := range m.all() {
		f := c.askFacts(deadline, search)
		c.mu.Lock()
		if f != nil && !search && c.facts != nil {
			f.generators = c.facts.generators
		}
		c.facts = f
		c.mu.Unlock()
	}
	return nil
}

func (c *Context) askFacts(deadline time.Time, search bool) *facts {
	if !c.tryTurn() {
		return nil
	}
	defer func() { <-c.turn }()
	if !c.can("facts") {
		return &facts{searched: true}
	}
	n, err := c.request(func(b []byte, n int) []byte { return c.in.dialect.facts(b, n, search) })
	if err != nil {
		return nil
	}
	_ = c.ctl.SetReadDeadline(deadline)
	defer func() { _ = c.ctl.SetReadDeadline(time.Time{}) }()
	reply, err := c.receive(n)
	if err != nil {
		return nil
	}
	f := c.in.dialect.factsOf(reply)
	if f != nil && c.cfg.Language == python {
		f.searched = search
	}
	return f
}

func parseFacts(reply any) *facts {
	fields, ok := reply.(tuple)
	if !ok || len(fields) < 4 {
		return nil
	}
	f := &facts{}
	var ok1, ok2 bool
	f.threads, ok1 = fields[0].(int)
	f.children, ok2 = fields[1].(int)
	found, ok3 := fields[2].(tuple)
	seed, ok4 := fields[3].(int)
	if !ok1 || !ok2 || !ok3 || !ok4 {
		return nil
	}
	f.hashSeed = seed != 0
	const shown = 8
	var names []string
	for i := 0; i+1 < len(found) && len(names) < shown; i += 2 {
		name, _ := found[i].(string)
		count, _ := found[i+1].(int)
		if len(name) > 100 {
			name = name[:100] + "…"
		}
		names = append(names, fmt.Sprintf("%d × %s", count, name))
	}
	slices.Sort(names)
	f.generators = strings.Join(names, ", ")
	return f
}

// tryTurn takes the turn if nobody has it and the interpreter lives.
func (c *Context) tryTurn() bool {
	if !c.alive() {
		return false
	}
	select {
	case c.turn <- struct{}{}:
		return true
	default:
		return false
	}
}

// Renew gives every context of a clone a random state of its own and the sandbox's environment, before any code runs in
// it: the command is in the interpreter's channel when thaw lets its cgroup run. The kernel's generator must have been
// reseeded. It returns what was renewed ("context:default:random"), what could not be, and an error when a context was
// thawed but did not confirm, by the deadline of ctx if it has one: then the clone must not be used. The environment is
// set for later processes too.
//
// OpenSSL seeds its generator again when its seed is old, or of the future, and node gives no other way to make it. So the
// interpreters that want it are renewed first, on a clock that is hours ahead while nothing else runs, and asked again when it
// is right: what they draw ahead is still the same in all copies, what they draw then is not.
//
// It runs where every instruction is emulated for the first time: keep it short.
func (m *Manager) Renew(ctx context.Context, env map[string]string, thaw func(contextID string) error) ([]string, []wire.NotRenewed, error) {
	m.cfg.Accounts.SetEnv(env)
	all := m.all()
	var asked []*Context
	var not []wire.NotRenewed
	defer func() {
		for _, c := range asked {
			<-c.turn
		}
	}()
	for _, c := range all {
		if !c.turnOrLater(env) {
			if c.alive() {
				not = append(not, c.not("context", "it was in the middle of an evaluation when it was frozen; it is renewed before its next"))
			}
			continue
		}
		asked = append(asked, c)
		c.clock = c.ready.Clock && m.cfg.StepClock != nil
		if err := c.askRenewal(env); err != nil {
			return nil, nil, fmt.Errorf("renew context %s: %w", c.id, err)
		}
	}
	deadline, _ := ctx.Deadline()
	var renewed []string
	confirm := func(c *Context, last bool) error {
		done, failed, err := c.confirm(deadline)
		if err != nil {
			return fmt.Errorf("renew context %s: no confirmation: %w", c.id, err)
		}
		renewed = append(renewed, done...)
		not = append(not, failed...)
		if last {
			not = append(not, c.unreachable()...)
		}
		return nil
	}
	rest, first, err := m.renewAhead(asked, thaw, confirm)
	if err != nil {
		return nil, nil, err
	}
	for _, c := range all {
		if !c.alive() || slices.Contains(first, c) {
			continue // its cgroup may be gone; or it runs
		}
		if err := thaw(c.id); err != nil && c.alive() {
			return nil, nil, fmt.Errorf("thaw context %s: %w", c.id, err)
		}
	}
	for _, c := range rest {
		if err := confirm(c, true); err != nil {
			return nil, nil, err
		}
	}
	return renewed, not, nil
}

// ahead is longer than OpenSSL trusts any seed.
const ahead = 3 * time.Hour

// renewAhead thaws and renews the interpreters that want the clock ahead, the first, and returns them and the others.
func (m *Manager) renewAhead(asked []*Context, thaw func(string) error, confirm func(c *Context, last bool) error) (rest, first []*Context, err error) {
	if !slices.ContainsFunc(asked, func(c *Context) bool { return c.clock }) {
		return asked, nil, nil
	}
	if err := m.cfg.StepClock(ahead); err != nil {
		return nil, nil, err
	}
	back := sync.OnceValue(func() error { return m.cfg.StepClock(-ahead) })
	defer func() { err = errors.Join(err, back()) }()
	for _, c := range asked {
		if !c.clock {
			rest = append(rest, c)
			continue
		}
		first = append(first, c)
		if err := thaw(c.id); err != nil && c.alive() {
			return nil, nil, fmt.Errorf("thaw context %s: %w", c.id, err)
		}
	}
	for _, c := range first {
		if err := confirm(c, false); err != nil {
			return nil, nil, err
		}
	}
	if err := back(); err != nil {
		return nil, nil, err
	}
	for _, c := range first {
		if _, err := c.request(c.in.dialect.again); err != nil {
			return nil, nil, fmt.Errorf("renew context %s: %w", c.id, err)
		}
		if err := confirm(c, true); err != nil {
			return nil, nil, err
		}
	}
	return rest, first, nil
}

// The seed of a context: 32 bytes for random, 32 for OpenSSL, and the 624 words of numpy's Mersenne twister, followed by
// its position, at the end of them: the next number makes the twister turn over all words.
const (
	forRandom  = 32
	forOpenSSL = 32
	words      = 624
	seedBytes  = forRandom + forOpenSSL + 4*words + 4
)

func (c *Context) askRenewal(env map[string]string) error {
	// The interpreter gets random bytes instead of asking the kernel for them: system calls it has not made yet in this
	// machine are slow.
	seed := c.seed[:]
	if err := quick.Random(seed[:seedBytes-4]); err != nil {
		return fmt.Errorf("get %d random bytes: %w", seedBytes-4, err)
	}
	defer clear(seed)
	// What a thread printed before the snapshot is the parent's.
	c.sinkMu.Lock()
	c.kept.Clear()
	c.sinkMu.Unlock()
	binary.NativeEndian.PutUint32(seed[seedBytes-4:], words)
	if !c.can("renew") {
		return nil
	}
	_, err := c.request(func(b []byte, n int) []byte { return c.in.dialect.renew(b, n, seed, env, c.clock) })
	return err
}

// confirm waits for the answer to askRenewal.
func (c *Context) confirm(deadline time.Time) (renewed []string, not []wire.NotRenewed, err error) {
	if !deadline.IsZero() {
		_ = c.ctl.SetReadDeadline(deadline)
		defer func() { _ = c.ctl.SetReadDeadline(time.Time{}) }()
	}
	if !c.can("renew") {
		return nil, []wire.NotRenewed{c.not("context", "its driver cannot renew random state, and has not got the sandbox's environment")}, nil
	}
	reply, err := c.receive(c.sequence)
	if err != nil {
		return nil, nil, err
	}
	done, failed, err := c.in.dialect.renewed(reply)
	if err != nil {
		return nil, nil, err
	}
	for _, name := range done {
		renewed = append(renewed, "context:"+c.id+":"+name)
	}
	for _, f := range failed {
		n := c.not("generator", "reseeding it failed: "+f.why)
		n.Name += ": " + f.name
		not = append(not, n)
	}
	return renewed, not, nil
}

func (c *Context) not(what, why string) wire.NotRenewed {
	return wire.NotRenewed{What: what, PID: c.child.PID(), Name: "context " + c.id, Why: why}
}

// unreachable lists what the interpreter cannot renew itself, from the facts of the last Quiesce.
func (c *Context) unreachable() []wire.NotRenewed {
	c.mu.Lock()
	f := c.facts
	c.mu.Unlock()
	if f == nil {
		return []wire.NotRenewed{c.not("generator", "the interpreter was not asked what it holds before it was frozen, or did not answer in time")}
	}
	var list []wire.NotRenewed
	add := func(what, name, why string) {
		n := c.not(what, why)
		n.Name += ": " + name
		list = append(list, n)
	}
	for _, o := range f.others {
		add(o.What, o.Name, o.Why)
	}
	if f.hashSeed {
		add("hash_seed", "hash()", "an interpreter keeps its hash seed for life; the order of sets is that of the siblings")
	}
	if f.threads > 1 {
		add("threads", fmt.Sprintf("%d threads", f.threads), "other threads of the interpreter may have run before renewal")
	}
	if f.generators != "" {
		add("generator", f.generators, "generators made by user code keep their state; seed them again, or use the module's own functions")
	}
	if !f.searched {
		add("generator", "those made since the fork", "the source of a branch is not searched for generators; seed them again, or use the module's own functions")
	}
	if f.children > 0 {
		add("process", fmt.Sprintf("%d multiprocessing children", f.children), "processes of the interpreter's own have their own random state")
	}
	return list
}
