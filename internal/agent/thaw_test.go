package agent

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/guest/wire"
)

// on makes a handler one that is called on a session of that number.
func (m *machine) on(session uint64, method string) wire.Handler {
	return func(ctx context.Context, s *wire.Stream, request []byte) error {
		return m.handlers[method](context.WithValue(ctx, sessionKey{}, session), s, request)
	}
}

func (m *machine) quiesceOn(t *testing.T, session, number uint64) error {
	t.Helper()
	_, err := call(t, m.on(session, wire.MethodQuiesce), wire.QuiesceRequest{Freeze: number})
	return err
}

// thawOn thaws as a host whose clock reads hostTime.
func (m *machine) thawOn(t *testing.T, session, number uint64, sandbox string) (wire.ThawReport, error) {
	t.Helper()
	request := wire.ThawRequest{Freeze: number, SandboxID: sandbox, UnixNano: hostTime.UnixNano()}
	message, err := call(t, m.on(session, wire.MethodThaw), request)
	report := wire.ThawReport{}
	if err == nil {
		if err := json.Unmarshal(message, &report); err != nil {
			t.Fatal(err)
		}
	}
	return report, err
}

func code(err error) string {
	if refusal, ok := errors.AsType[*wire.Error](err); ok {
		return refusal.Code
	}
	return ""
}

func (m *machine) allFrozen() bool { return m.frozen("user/proc") && m.frozen("user/ctx-default") }

// branchable is a machine that was awakened as sb-1 on session 1.
func branchable(t *testing.T) *machine {
	t.Helper()
	m := newMachine(t)
	if _, err := call(t, m.on(1, wire.MethodAwaken), request()); err != nil {
		t.Fatal(err)
	}
	m.log, m.frozenAt = nil, map[string]bool{}
	return m
}

func TestThaw(t *testing.T) {
	m := branchable(t)
	if err := m.quiesceOn(t, 1, 1); err != nil || !m.allFrozen() {
		t.Fatalf("%v, frozen: %v", err, m.allFrozen())
	}
	report, err := m.thawOn(t, 1, 1, "sb-1")
	if err != nil {
		t.Fatal(err)
	}
	if m.frozen("user/proc") || m.frozen("user/ctx-default") {
		t.Error("still frozen")
	}
	// The clock is right before anything runs, and what is asked for comes after that.
	if diff := cmp.Diff([]string{"contexts.quiesce", "clock"}, m.log[:2]); diff != "" {
		t.Error(diff)
	}
	if !m.frozenAt["clock"] {
		t.Error("processes ran with the old time")
	}
	if !report.Thawed || report.FrozenMS <= 0 || report.StepMS <= 0 {
		t.Errorf("got %+v", report)
	}
	if off := m.clock.Sub(hostTime); off < 0 || off > 10*time.Second {
		t.Errorf("the clock was set to %s, the host's was %s", m.clock, hostTime)
	}
	// Idempotent, and useful when nothing is frozen.
	m.clock = time.Time{}
	report, err = m.thawOn(t, 1, 1, "sb-1")
	if err != nil || report.Thawed || m.clock.IsZero() {
		t.Errorf("again: %+v, %v, clock %v", report, err, m.clock)
	}
	// The next one works as well.
	if err := m.quiesceOn(t, 1, 2); err != nil || !m.allFrozen() {
		t.Errorf("%v, frozen: %v", err, m.allFrozen())
	}
}

// TestThawOfACopy: what a copy of a machine must never obey, or its processes run with the original's identity.
func TestThawOfACopy(t *testing.T) {
	m := branchable(t)
	if err := m.quiesceOn(t, 3, 5); err != nil {
		t.Fatal(err)
	}
	for name, thaw := range map[string]struct {
		session, number uint64
		sandbox         string
	}{
		"another freeze of the session": {3, 4, "sb-1"},
		"no number in the session":      {3, 0, "sb-1"},
		"a call of an older session":    {2, 5, "sb-1"},
		"a new session, no name":        {4, 0, ""},
		"a new session, another name":   {4, 0, "sb-2"},
		"its own freeze, another name":  {4, 1, "sb-2"},
	} {
		if _, err := m.thawOn(t, thaw.session, thaw.number, thaw.sandbox); code(err) != wire.CodePrecondition || !m.allFrozen() {
			t.Errorf("%s: %v, frozen: %v", name, err, m.allFrozen())
		}
	}
	// Nor does a new quiesce make it somebody else's.
	if err := m.quiesceOn(t, 4, 2); code(err) != wire.CodePrecondition {
		t.Errorf("quiesced anew: %v", err)
	}
	if _, err := m.thawOn(t, 4, 2, "sb-2"); code(err) != wire.CodePrecondition || !m.allFrozen() {
		t.Errorf("%v, frozen: %v", err, m.allFrozen())
	}
	// It is awakened, and then a sandbox like any other.
	second := request()
	second.SandboxID = "sb-2"
	if _, err := call(t, m.on(4, wire.MethodAwaken), second); err != nil || m.frozen("user/proc") {
		t.Fatalf("%v, frozen: %v", err, m.frozen("user/proc"))
	}
	if err := errors.Join(m.quiesceOn(t, 4, 3), m.quiesceOn(t, 4, 4)); err != nil {
		t.Fatal(err)
	}
	if report, err := m.thawOn(t, 4, 4, "sb-2"); err != nil || !report.Thawed {
		t.Errorf("%+v, %v", report, err)
	}
}

// TestThawOfACopyOfAParent: a parent has no name that a host could know it by.
func TestThawOfACopyOfAParent(t *testing.T) {
	m := newMachine(t)
	if err := m.quiesceOn(t, 1, 1); err != nil {
		t.Fatal(err)
	}
	if _, err := m.thawOn(t, 2, 0, ""); code(err) != wire.CodePrecondition || !m.allFrozen() {
		t.Errorf("%v, frozen: %v", err, m.allFrozen())
	}
}

// TestThawAfterTheDaemonDied: the source does not stay frozen when who froze it is gone.
func TestThawAfterTheDaemonDied(t *testing.T) {
	for _, number := range []uint64{0, 1} {
		m := branchable(t)
		if err := m.quiesceOn(t, 1, 7); err != nil {
			t.Fatal(err)
		}
		if report, err := m.thawOn(t, 2, number, "sb-1"); err != nil || !report.Thawed || m.frozen("user/proc") {
			t.Errorf("%+v, %v", report, err)
		}
	}
}

// TestThawOvertakesQuiesce: a caller that gave up a quiesce and thaws must find nothing frozen afterwards, in whichever
// order the two arrive.
func TestThawOvertakesQuiesce(t *testing.T) {
	m := branchable(t)
	if _, err := m.thawOn(t, 1, 2, "sb-1"); err != nil {
		t.Fatal(err)
	}
	for _, number := range []uint64{1, 2} {
		if err := m.quiesceOn(t, 1, number); code(err) != wire.CodePrecondition || m.frozen("user/proc") {
			t.Errorf("%d: %v, frozen: %v", number, err, m.frozen("user/proc"))
		}
	}
	if err := m.quiesceOn(t, 1, 3); err != nil || !m.allFrozen() {
		t.Errorf("the next: %v", err)
	}
	// The numbers of another connection are its own.
	m.thawAndCheck(t, 1, 3)
	if err := m.quiesceOn(t, 2, 1); err != nil || !m.allFrozen() {
		t.Errorf("another connection's: %v", err)
	}
}

func (m *machine) thawAndCheck(t *testing.T, session, number uint64) {
	t.Helper()
	if report, err := m.thawOn(t, session, number, "sb-1"); err != nil || !report.Thawed || m.frozen("user/proc") {
		t.Fatalf("%+v, %v", report, err)
	}
}

// TestQuiesceForNobody: whose caller is gone is undone.
func TestQuiesceForNobody(t *testing.T) {
	m := branchable(t)
	for _, when := range []string{"before the freeze", "after it"} {
		ctx, cancel := context.WithCancel(t.Context())
		m.contexts.onQuiesce, m.contexts.onPIDs = nil, nil
		if when == "before the freeze" {
			m.contexts.onQuiesce = cancel
		} else {
			procs := filepath.Join(m.groups, "user/proc/cgroup.procs")
			m.contexts.onPIDs = func() {
				if m.frozen("user/proc") {
					cancel()
				} else if err := os.WriteFile(procs, []byte("1\n"), 0o600); err != nil { // a new process: it asks again
					t.Error(err)
				}
			}
		}
		if err := m.handlers[wire.MethodQuiesce](ctx, nil, []byte(`{"freeze":1}`)); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", when, err)
		}
		if m.frozen("user/proc") || m.frozen("user/ctx-default") {
			t.Errorf("%s: frozen for nobody", when)
		}
		cancel()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	// A call that comes after its caller's end does nothing at all.
	m.log = nil
	for range 20 { // there are two ways for it to go wrong
		if err := m.handlers[wire.MethodQuiesce](ctx, nil, []byte(`{"freeze":2}`)); !errors.Is(err, context.Canceled) || len(m.log) > 0 {
			t.Fatalf("%v, did %v", err, m.log)
		}
	}
}

// TestClockFailureThaws: a clock that cannot be set is told, and holds nobody.
func TestClockFailureThaws(t *testing.T) {
	m := branchable(t)
	if err := m.quiesceOn(t, 1, 1); err != nil {
		t.Fatal(err)
	}
	m.fail = "clock"
	if _, err := m.thawOn(t, 1, 1, ""); !errors.Is(err, errStep) || m.frozen("user/proc") {
		t.Errorf("%v, frozen: %v", err, m.frozen("user/proc"))
	}
}

// TestClockIsNotPutBackForLittle: programs that run have seen the time.
func TestClockIsNotPutBackForLittle(t *testing.T) {
	m := newMachine(t)
	for ahead, want := range map[time.Duration]bool{
		-time.Hour: true, -5 * time.Millisecond: true, 10 * time.Millisecond: false, time.Hour: true,
	} {
		m.log = nil
		if err := m.step(time.Now().Add(-ahead), backwards, &wire.ThawReport{}); err != nil || slices.Contains(m.log, "clock") != want {
			t.Errorf("%v ahead: %v, did %v", ahead, err, m.log)
		}
	}
	m.log = nil
	if err := m.step(time.Now().Add(-time.Hour), 0, &wire.ThawReport{}); err != nil || len(m.log) > 0 {
		t.Errorf("by a time of unknown age: %v, did %v", err, m.log)
	}
}

// TestOnlyAParentIsMapped: mapping changes the files, so a branch would prepare them again with processes frozen. Both
// are awakened.
func TestOnlyAParentIsMapped(t *testing.T) {
	for _, last := range []bool{false, true} {
		m := branchable(t)
		if err := m.stop(t.Context(), last); err != nil {
			t.Fatal(err)
		}
		files := m.prepared.files
		for _, s := range []*slot{files.hostname, files.hosts, files.machineID, files.bootID, files.identity} {
			if (s.mem != nil) != last {
				t.Errorf("parent: %v, mapped: %v", last, s.mem != nil)
			}
		}
		r := request()
		r.SandboxID, r.Hostname = "sb-2", "other"
		if _, err := call(t, m.on(2, wire.MethodAwaken), r); err != nil {
			t.Fatal(err)
		}
		if got := m.get(t, "etc/hostname"); got != "other\n" || m.allFrozen() {
			t.Errorf("parent: %v: hostname %q, frozen: %v", last, got, m.allFrozen())
		}
	}
}

// TestNothingSlowWhileFrozen: what a branch's source waits for is the freezing and no more.
func TestNothingSlowWhileFrozen(t *testing.T) {
	m := branchable(t)
	if err := m.quiesceOn(t, 1, 1); err != nil {
		t.Fatal(err)
	}
	if m.frozenAt["contexts.quiesce"] {
		t.Error("contexts were asked while frozen")
	}
	if m.contexts.searched {
		t.Error("the source's interpreters were searched, which makes their heaps its own")
	}
	m.thawAndCheck(t, 1, 1)
	m.fail = "contexts.quiesce" // enough
	if _, err := call(t, m.on(1, wire.MethodQuiesce), wire.QuiesceRequest{Settle: true}); !errors.Is(err, errStep) || !m.contexts.searched {
		t.Errorf("a parent: %v, searched: %v", err, m.contexts.searched)
	}
}

// halfway starts a quiesce and returns when all is prepared and nothing frozen; what it returns lets it go on, and
// returns when it has ended.
func (m *machine) halfway(t *testing.T, session, number uint64) (goOn func() error) {
	t.Helper()
	resume, err := m.cfg.Reaper.Pause(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- m.quiesceOn(t, session, number) }()
	for held := false; !held; {
		select {
		case err := <-done:
			t.Fatalf("ended: %v", err)
		case <-time.After(time.Millisecond):
		}
		m.mu.Lock()
		held = m.held != nil
		m.mu.Unlock()
	}
	return func() error {
		resume()
		return <-done
	}
}

// TestChangeDuringTheFreeze: what user processes did between the preparation and their freezing counts.
func TestChangeDuringTheFreeze(t *testing.T) {
	for name, change := range map[string]func(*testing.T, *machine){
		"hosts written": func(t *testing.T, m *machine) { m.put(t, "etc/hosts", "10.1.2.3 new\n") },
		"hosts replaced": func(t *testing.T, m *machine) {
			m.put(t, "etc/hosts.new", "10.1.2.3 new\n")
			if err := os.Rename(filepath.Join(m.root, "etc/hosts.new"), filepath.Join(m.root, "etc/hosts")); err != nil {
				t.Fatal(err)
			}
		},
	} {
		for _, old := range []bool{true, false} {
			m := branchable(t)
			if old { // else every change might be one too many for the file system's clock
				<-time.After(2 * fresh)
			}
			goOn := m.halfway(t, 1, 1)
			change(t, m)
			if old {
				<-time.After(2 * fresh)
			}
			if err := goOn(); err != nil {
				t.Fatal(err)
			}
			second := request()
			second.Hostname = "the-copy"
			if _, err := call(t, m.on(2, wire.MethodAwaken), second); err != nil {
				t.Fatal(err)
			}
			got := m.get(t, "etc/hosts")
			if !strings.Contains(got, "10.1.2.3 new") || !strings.Contains(got, "the-copy") {
				t.Errorf("%s: %q", name, got)
			}
		}
	}
}

// TestNewProcessDuringTheFreeze: it is named although it was not there when the list was made.
func TestNewProcessDuringTheFreeze(t *testing.T) {
	m := branchable(t)
	<-time.After(2 * fresh)
	goOn := m.halfway(t, 1, 1)
	procs := filepath.Join(m.groups, "user/proc/cgroup.procs")
	if err := os.WriteFile(procs, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := goOn(); err != nil {
		t.Fatal(err)
	}
	if p := m.prepared.processes; len(p) != 1 || p[0].PID != os.Getpid() || p[0].Name == "" {
		t.Errorf("got %+v", p)
	}
}

// TestCallsWaitWhileFrozen: what would make something run waits for the thaw, and is given up with its caller; all else
// is served.
func TestCallsWaitWhileFrozen(t *testing.T) {
	m := branchable(t)
	var ran []string
	handler := func(method string) wire.Handler {
		return m.whenReady(method, func(context.Context, *wire.Stream, []byte) error {
			if m.frozen("user/proc") && starting[method] {
				t.Errorf("%s ran in a freeze", method)
			}
			ran = append(ran, method)
			return nil
		})
	}
	if err := m.quiesceOn(t, 1, 1); err != nil {
		t.Fatal(err)
	}
	for _, method := range []string{wire.MethodProcessList, wire.MethodFileRead, wire.MethodProcessSendInput} {
		if err := handler(method)(t.Context(), nil, nil); err != nil {
			t.Error(err)
		}
	}
	if len(ran) != 3 {
		t.Fatalf("served %v", ran)
	}
	ran = nil
	for _, method := range []string{wire.MethodProcessStart, wire.MethodContextEval, wire.MethodContextNew} {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 2)
		go func() { done <- handler(method)(ctx, nil, nil) }()
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) || len(ran) > 0 {
			t.Fatalf("for a caller that left: %v, ran %v", err, ran)
		}
	}
	done := make(chan error, 1)
	go func() { done <- handler(wire.MethodProcessStart)(t.Context(), nil, nil) }()
	select {
	case err := <-done:
		t.Errorf("did not wait: %v", err)
	case <-time.After(10 * time.Millisecond):
	}
	m.thawAndCheck(t, 1, 1)
	if err := <-done; err != nil || len(ran) != 1 {
		t.Errorf("%v, ran %v", err, ran)
	}
	// A freeze that fails admits them too.
	if err := os.WriteFile(filepath.Join(m.groups, "user/proc/cgroup.events"), []byte("populated 1\nfrozen 0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := m.quiesceOn(t, 1, 2); code(err) != wire.CodeDeadline {
		t.Fatal(err)
	}
	if err := handler(wire.MethodProcessStart)(t.Context(), nil, nil); err != nil {
		t.Error(err)
	}
}

func TestRecent(t *testing.T) {
	now := time.Now()
	for age, want := range map[time.Duration]bool{0: true, fresh / 2: true, 2 * fresh: false} {
		if got := recent([]mark{{}, {ctime: now.Add(-age).UnixNano()}}, now); got != want {
			t.Errorf("%v old: %v", age, got)
		}
	}
}
