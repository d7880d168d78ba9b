package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

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
	PowerOff    func() error
}

// RealSystem is the guest itself.
func RealSystem() System {
	return System{
		Root:        "/",
		BootIDFile:  bootIDFile,
		Entropy:     credit,
		SetClock:    setClock,
		SetHostname: func(name string) error { return unix.Sethostname([]byte(name)) },
		PowerOff:    func() error { return unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF) },
	}
}

func setClock(t time.Time) error {
	ts, err := unix.TimeToTimespec(t)
	if err != nil {
		return err
	}
	return unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
}

// awaken makes a fresh fork a machine of its own, before any of its user processes runs: whatever fails, they stay
// frozen, and the host kills the machine.
func (a *Agent) awaken(ctx context.Context, s *wire.Stream, request []byte) error {
	received := time.Now()
	req, err := decodeAwaken(request)
	if err != nil {
		return err
	}
	if a.Phase() != PhaseReady {
		return wire.Errorf(wire.CodePrecondition, "the machine is being built; there is nothing to awaken")
	}
	if !a.frozen() {
		if err := a.freeze(ctx); err != nil {
			return err
		}
	}
	report := &wire.AwakenReport{}
	if err := a.renew(ctx, req, received, report); err != nil {
		return err
	}
	a.cfg.Accounts.SetEnv(req.Env)
	if err := a.renewContexts(ctx, req, report); err != nil {
		return err
	}
	if err := a.listProcesses(report); err != nil {
		return err
	}
	a.runHooks(ctx, req, report)
	if err := a.thaw(); err != nil {
		return fmt.Errorf("thaw processes: %w", err)
	}
	report.MS = float64(time.Since(received).Microseconds()) / 1000
	return s.SendMessage(report)
}

func decodeAwaken(request []byte) (*wire.AwakenRequest, error) {
	req := &wire.AwakenRequest{}
	if err := decode(request, req); err != nil {
		return nil, err
	}
	switch {
	case len(req.Entropy) < minEntropy || len(req.Entropy) > maxEntropy:
		return nil, wire.Errorf(wire.CodeInvalid, "%d bytes of entropy; %d to %d are needed", len(req.Entropy), minEntropy, maxEntropy)
	case !validHostname(req.Hostname):
		return nil, wire.Errorf(wire.CodeInvalid, "hostname %q: letters, digits, - and . are allowed, at most 64", req.Hostname)
	case !onlyHex(req.MachineID, ""), len(req.MachineID) != 32:
		return nil, wire.Errorf(wire.CodeInvalid, "machine id %q: 32 hex digits are needed", req.MachineID)
	case !onlyHex(req.BootID, "-"), len(req.BootID) != 36:
		return nil, wire.Errorf(wire.CodeInvalid, "boot id %q: a UUID is needed", req.BootID)
	case req.WallClock.IsZero():
		return nil, wire.Errorf(wire.CodeInvalid, "no wall clock")
	}
	return req, nil
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

// renew is the machine's own part. The order matters: what is drawn later comes from the reseeded generator, and is
// dated by the new clock.
func (a *Agent) renew(ctx context.Context, req *wire.AwakenRequest, received time.Time, report *wire.AwakenReport) error {
	sys := &a.cfg.System
	if err := sys.Entropy(req.Entropy); err != nil {
		return err
	}
	if err := sys.SetClock(req.WallClock.Add(time.Since(received))); err != nil {
		return fmt.Errorf("set the clock: %w", err)
	}
	if err := sys.SetHostname(req.Hostname); err != nil {
		return fmt.Errorf("set hostname %s: %w", req.Hostname, err)
	}
	report.Renewed = append(report.Renewed, "kernel_entropy", "wall_clock", "hostname")

	root, err := os.OpenRoot(sys.Root)
	if err != nil {
		return fmt.Errorf("open root: %w", err)
	}
	defer root.Close()
	if err := renewFiles(root, req); err != nil {
		return err
	}
	if err := overwrite(sys.BootIDFile, req.BootID+"\n"); err != nil {
		return fmt.Errorf("renew boot id: %w", err)
	}
	if err := a.writeIdentity(root, req); err != nil {
		return err
	}
	report.Renewed = append(report.Renewed, "machine_id", "boot_id", "identity")
	return a.renewHostKeys(ctx, root, report)
}

// renewFiles writes what names the machine below /etc, and removes a seed that every sibling would start from.
func renewFiles(root *os.Root, req *wire.AwakenRequest) error {
	if err := replace(root, "etc/hostname", []byte(req.Hostname+"\n"), 0o644); err != nil {
		return fmt.Errorf("renew hostname: %w", err)
	}
	if err := renewHosts(root, req.Hostname); err != nil {
		return fmt.Errorf("renew /etc/hosts: %w", err)
	}
	if err := replace(root, "etc/machine-id", []byte(req.MachineID+"\n"), 0o444); err != nil {
		return fmt.Errorf("renew machine id: %w", err)
	}
	const dbus = "var/lib/dbus/machine-id"
	if info, err := root.Lstat(dbus); err == nil && info.Mode().IsRegular() {
		if err := replace(root, dbus, []byte(req.MachineID+"\n"), 0o444); err != nil {
			return fmt.Errorf("renew D-Bus machine id: %w", err)
		}
	}
	if err := root.Remove("var/lib/systemd/random-seed"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove random seed: %w", err)
	}
	return nil
}

// renewHosts sets the line that names this machine, after Debian's custom 127.0.1.1.
func renewHosts(root *os.Root, hostname string) error {
	const path, address = "etc/hosts", "127.0.1.1"
	old, err := root.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		old, err = []byte(defaultHosts), nil
	}
	if err != nil {
		return err
	}
	var b strings.Builder
	for line := range strings.Lines(string(old)) {
		if fields := strings.Fields(line); len(fields) > 0 && fields[0] == address {
			continue
		}
		b.WriteString(strings.TrimSuffix(line, "\n"))
		b.WriteByte('\n')
	}
	b.WriteString(address + "\t" + hostname + "\n")
	return replace(root, path, []byte(b.String()), 0o644)
}

const defaultHosts = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"

// replace puts a file in place of whatever has the name, without following a link there: /etc/hostname may be one to
// a place that is not the machine's. Nothing is synced: a fork's disk does not outlive its memory.
func replace(root *os.Root, path string, content []byte, mode fs.FileMode) error {
	tmp := path + ".forkd-new"
	if err := root.WriteFile(tmp, content, mode); err != nil {
		return err
	}
	return root.Rename(tmp, path)
}

// overwrite keeps the inode: it is bind-mounted elsewhere.
func overwrite(path, content string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(content)
	return errors.Join(err, f.Close())
}

// identity is /run/forkd/identity.json.
type identity struct {
	SandboxID   string    `json:"sandboxId"`
	ForkIndex   int       `json:"forkIndex"`
	ForkCount   int       `json:"forkCount"`
	SnapshotTag string    `json:"snapshotTag"`
	Hostname    string    `json:"hostname"`
	Generation  uint64    `json:"generation"`
	CreatedAt   time.Time `json:"createdAt"`
}

func (a *Agent) writeIdentity(root *os.Root, req *wire.AwakenRequest) error {
	b, err := json.Marshal(&identity{
		SandboxID: req.SandboxID, ForkIndex: req.Index, ForkCount: req.Count, SnapshotTag: req.SnapshotTag,
		Hostname: req.Hostname, Generation: a.generation.Load(), CreatedAt: req.WallClock.UTC(),
	})
	if err != nil {
		return fmt.Errorf("encode identity: %w", err)
	}
	if err := root.MkdirAll("run/forkd", 0o755); err != nil {
		return fmt.Errorf("make /run/forkd: %w", err)
	}
	if err := replace(root, "run/forkd/identity.json", append(b, '\n'), 0o644); err != nil {
		return fmt.Errorf("renew identity: %w", err)
	}
	return nil
}

// renewContexts reaches the state of interpreters, which run from here on; other processes do not yet.
func (a *Agent) renewContexts(ctx context.Context, req *wire.AwakenRequest, report *wire.AwakenReport) error {
	renewed, not, err := a.cfg.Contexts.Renew(ctx, req.Env, a.cfg.Cgroups.ThawContext)
	if err != nil {
		return fmt.Errorf("renew contexts: %w", err)
	}
	report.Renewed = append(report.Renewed, renewed...)
	report.NotRenewed = append(report.NotRenewed, not...)
	return nil
}

// listProcesses names every process whose own state nobody renewed.
func (a *Agent) listProcesses(report *wire.AwakenReport) error {
	pids, err := a.cfg.Cgroups.PIDs()
	if err != nil {
		return err
	}
	interpreters := a.cfg.Contexts.PIDs()
	for _, pid := range pids {
		if _, ok := interpreters[pid]; ok {
			continue
		}
		name := commandLine(pid)
		if name == "" {
			continue // ended
		}
		report.NotRenewed = append(report.NotRenewed, wire.NotRenewed{
			What: "process", PID: pid, Name: name,
			Why: "its memory is a copy of the parent's: random state, keys and connections in it are shared with every sibling",
		})
	}
	return nil
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
