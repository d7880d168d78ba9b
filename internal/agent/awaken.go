package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/network"
	"forkd.dev/forkd/internal/agent/quick"
	"forkd.dev/forkd/internal/guest/wire"
)

const (
	minEntropy = 64
	maxEntropy = 512
)

// System is where the agent renews what belongs to the machine. Tests give it another root and fakes.
type System struct {
	Root        string // of the guest's files
	BootIDFile  string // bind-mounted over the kernel's boot_id
	Entropy     func([]byte) error
	SetClock    func(time.Time) error
	SetHostname func(string) error
	Sever       func() (int, error) // connections that leave the machine
	PowerOff    func() error
	Sync        func()
}

// RealSystem is the guest itself.
func RealSystem() System {
	return System{
		Root:        "/",
		BootIDFile:  bootIDFile,
		Entropy:     openGenerator().credit,
		SetClock:    setClock,
		SetHostname: quick.SetHostname,
		Sever:       network.NewSeverer().Sever,
		PowerOff:    func() error { return unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF) },
		Sync:        unix.Sync,
	}
}

func setClock(t time.Time) error {
	ts, err := unix.TimeToTimespec(t)
	if err != nil {
		return err
	}
	return quick.SetRealtime(ts)
}

// awaken serves the call.
func (a *Agent) awaken(ctx context.Context, s *wire.Stream, request []byte) error {
	req := &wire.AwakenRequest{}
	if err := decode(request, req); err != nil {
		return err
	}
	report, err := a.renewAll(ctx, req, nil, asker(s))
	if err != nil {
		return err
	}
	return s.SendMessage(report)
}

// asker asks for the host's clock in a call.
func asker(s *wire.Stream) func() ([]byte, error) {
	return func() ([]byte, error) {
		if err := s.Send(wire.KindData, nil); err != nil {
			return nil, err
		}
		kind, payload, err := s.Recv()
		if err == nil && kind != wire.KindData {
			err = wire.Errorf(wire.CodeInvalid, "an answer of %d bytes in a frame %q is no time", len(payload), byte(kind))
		}
		return payload, err
	}
}

// awakenFirst does the same before the session has begun, with the bytes that follow the preamble: in a fork everything
// runs for the first time, and a session with its calls is a lot to run for one exchange. What cannot be told the host
// is returned; refusals go into the hello.
func (a *Agent) awakenFirst(ctx context.Context, r *wire.Receiver, conn *sessionConn, p *wire.Preamble, hello *wire.Hello) error {
	req, identity, err := wire.ReadAwaken(r, a.room)
	if errors.Is(err, wire.ErrTakeover) || errors.Is(err, wire.ErrLost) {
		return err
	}
	var broken error
	if err == nil {
		err = a.claim(ctx)
	}
	if err == nil {
		err = a.guard(func() (err error) {
			defer func() { <-a.awakening }()
			hello.Awakened, err = a.renewAll(ctx, req, identity, func() ([]byte, error) {
				var answer []byte
				// An answer without a hello asks for the time.
				if _, broken = conn.Write(wire.AppendAnswer(nil, p.Nonce, nil)); broken == nil {
					answer, broken = wire.ReadClock(r)
				}
				return answer, broken
			})
			return err
		})
	}
	if broken != nil {
		return broken
	}
	if err != nil {
		hello.Awakened, hello.Refusal = nil, refusal(err)
	}
	return nil
}

// claimLimit is for a call of the session before, which has been told to end.
const claimLimit = 2 * time.Second

// claim takes the awakening token.
func (a *Agent) claim(ctx context.Context) error {
	select {
	case a.awakening <- struct{}{}:
		return nil
	default:
	}
	limited, cancel := context.WithTimeout(ctx, claimLimit)
	defer cancel()
	select {
	case a.awakening <- struct{}{}:
		return nil
	case <-limited.Done():
		return wire.Errorf(wire.CodePrecondition, "the machine is just being changed by an earlier call; try again")
	}
}

// renewAll makes a fresh fork a machine of its own, before any of its user processes runs: whatever fails, they stay
// frozen, and the host kills the machine. Identity is the file of that, if the host has made it; ask brings the host's
// answer to a question for its clock.
func (a *Agent) renewAll(
	ctx context.Context, req *wire.AwakenRequest, identity []byte, ask func() ([]byte, error),
) (*wire.AwakenReport, error) {
	received := time.Now()
	if err := checkAwaken(req); err != nil {
		return nil, err
	}
	if a.Phase() != PhaseReady {
		return nil, wire.Errorf(wire.CodePrecondition, "the machine is being built; there is nothing to awaken")
	}
	if a.prepared == nil {
		if err := a.stop(ctx, false); err != nil {
			return nil, err
		}
	}
	report := &wire.AwakenReport{}
	if err := a.renew(ctx, ask, req, identity, report); err != nil {
		return nil, err
	}
	a.cfg.Accounts.SetEnv(req.Env)
	if err := a.renewContexts(ctx, req, report); err != nil {
		return nil, err
	}
	report.NotRenewed = append(report.NotRenewed, a.prepared.processes...)
	a.runHooks(ctx, req, report)
	if err := a.thaw(); err != nil {
		return nil, fmt.Errorf("thaw processes: %w", err)
	}
	a.sandbox = req.SandboxID
	if a.inner != nil {
		go a.inner.Renamed()
	}
	report.MS = float64(time.Since(received).Microseconds()) / 1000
	return report, nil
}

// sever serves the call: the host knows that nothing has the other ends of this machine's connections any more.
func (a *Agent) sever(_ context.Context, s *wire.Stream, _ []byte) error {
	n, err := a.cfg.System.Sever()
	if err != nil {
		return err
	}
	return s.SendMessage(wire.SeverReply{Severed: n})
}

func checkAwaken(req *wire.AwakenRequest) error {
	switch {
	case len(req.Entropy) < minEntropy || len(req.Entropy) > maxEntropy:
		return wire.Errorf(wire.CodeInvalid, "%d bytes of entropy; %d to %d are needed", len(req.Entropy), minEntropy, maxEntropy)
	case !validHostname(req.Hostname):
		return wire.Errorf(wire.CodeInvalid, "hostname %q: letters, digits, - and . are allowed, at most 64", req.Hostname)
	case !onlyHex(req.MachineID, ""), len(req.MachineID) != 32:
		return wire.Errorf(wire.CodeInvalid, "machine id %q: 32 hex digits are needed", req.MachineID)
	case !onlyHex(req.BootID, "-"), len(req.BootID) != 36:
		return wire.Errorf(wire.CodeInvalid, "boot id %q: a UUID is needed", req.BootID)
	}
	return nil
}

func validHostname(s string) bool {
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '.' {
			return false
		}
	}
	return s != "" && len(s) <= 64 && s[0] != '-' && s[0] != '.'
}

func onlyHex(s, also string) bool {
	for _, c := range []byte(s) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') && !strings.Contains(also, string(rune(c))) {
			return false
		}
	}
	return true
}

// renew is the machine's own part. The order matters: connections end before anything can be sent on them, what is drawn
// later comes from the reseeded generator, and is dated by the new clock.
func (a *Agent) renew(
	ctx context.Context, ask func() ([]byte, error), req *wire.AwakenRequest, identity []byte, report *wire.AwakenReport,
) error {
	sys := &a.cfg.System
	if req.Sever {
		n, err := sys.Sever()
		if err != nil {
			return err
		}
		report.Severed = n
		report.Renewed = append(report.Renewed, wire.RenewedConnections)
	}
	if err := sys.Entropy(req.Entropy); err != nil {
		return err
	}
	now, at, err := askClock(ask)
	if err != nil {
		return fmt.Errorf("ask for the time: %w", err)
	}
	if err := sys.SetClock(now.Add(time.Since(at))); err != nil {
		return fmt.Errorf("set the clock: %w", err)
	}
	if err := sys.SetHostname(req.Hostname); err != nil {
		return fmt.Errorf("set hostname %s: %w", req.Hostname, err)
	}
	report.Renewed = append(report.Renewed, "kernel_entropy", "wall_clock", "hostname")

	if identity == nil {
		if identity, err = wire.IdentityFile(req, a.generation.Load(), time.Now()); err != nil {
			return fmt.Errorf("encode identity: %w", err)
		}
	}
	if err := a.prepared.files.renew(req, identity); err != nil {
		return err
	}
	report.Renewed = append(report.Renewed, "machine_id", "boot_id", "identity")
	return a.renewHostKeys(ctx, report)
}

const (
	clockQuestions = 5
	goodRoundTrip  = 3 * time.Millisecond
)

// askClock returns the host's time as it was at a moment of our own monotonic clock. The answer is half a round trip old;
// the first takes long, since all code on its way runs for the first time, so the fastest of a few counts.
func askClock(ask func() ([]byte, error)) (now, at time.Time, err error) {
	best := time.Duration(1<<63 - 1)
	for range clockQuestions {
		asked := time.Now()
		answer, err := ask()
		if err != nil {
			return now, at, err
		}
		got := time.Now()
		t, ok := wire.ParseClock(answer)
		if !ok {
			return now, at, wire.Errorf(wire.CodeInvalid, "an answer of %d bytes is no time", len(answer))
		}
		if trip := got.Sub(asked); trip < best {
			best, now, at = trip, t.Add(trip/2), got
		}
		if best < goodRoundTrip {
			break
		}
	}
	return now, at, nil
}

// renewContexts reaches the state of interpreters, which run from here on; other processes do not yet.
func (a *Agent) renewContexts(ctx context.Context, req *wire.AwakenRequest, report *wire.AwakenReport) error {
	renewed, not, err := a.cfg.Contexts.Renew(ctx, req.Env, a.prepared.frozen.ThawContext)
	if err != nil {
		// Those that were let run to renew themselves stop again: nothing runs in a machine without an identity.
		return errors.Join(fmt.Errorf("renew contexts: %w", err), a.prepared.frozen.Refreeze())
	}
	report.Renewed = append(report.Renewed, renewed...)
	report.NotRenewed = append(report.NotRenewed, not...)
	return nil
}

// describe names every process whose own state nobody renews; known ones are not looked at again.
func (a *Agent) describe(pids []int, known []wire.NotRenewed) []wire.NotRenewed {
	interpreters := a.cfg.Contexts.PIDs()
	var list []wire.NotRenewed
	for _, pid := range pids {
		if _, ok := interpreters[pid]; ok {
			continue
		}
		if i := slices.IndexFunc(known, func(n wire.NotRenewed) bool { return n.PID == pid }); i >= 0 {
			list = append(list, known[i])
			continue
		}
		name := commandLine(pid)
		if name == "" {
			continue // ended
		}
		list = append(list, wire.NotRenewed{
			What: "process", PID: pid, Name: name,
			Why: "its memory is a copy of the parent's: random state, keys and connections in it are shared with every sibling",
		})
	}
	return list
}

// commandLine is what a process calls itself, at most 200 bytes.
func commandLine(pid int) string {
	dir := "/proc/" + strconv.Itoa(pid)
	b, err := os.ReadFile(dir + "/cmdline")
	if err != nil {
		return ""
	}
	if len(b) == 0 {
		b, _ = os.ReadFile(dir + "/comm")
	}
	name := strings.Map(func(r rune) rune {
		if r < ' ' {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(string(b), "?"))
	name = strings.TrimSpace(name)
	if len(name) > 200 {
		name = strings.ToValidUTF8(name[:200], "") + "…"
	}
	return name
}
