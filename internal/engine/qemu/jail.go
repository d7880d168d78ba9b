package qemu

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/proc"
)

// Whether VM processes are put into jails of their own.
const (
	JailAuto = "auto" // where this host can
	JailOn   = "on"   // or an error: never less than was asked for
	JailOff  = "off"
)

// IDs are users that nobody else is, for VM processes of a daemon that is root.
type IDs struct{ First, Last uint32 }

// defaultIDs are far from where users, containers and services have theirs, and enough that two daemons never meet.
var defaultIDs = IDs{3_100_000_000, 3_100_000_000 + 1<<24 - 1}

// OrDefault are the ids that machines get users from, where others are not given.
func (ids IDs) OrDefault() IDs {
	if ids == (IDs{}) {
		return defaultIDs
	}
	return ids
}

// ParseIDs reads FIRST-LAST.
func ParseIDs(text string) (IDs, error) {
	a, b, _ := strings.Cut(text, "-")
	first, err1 := strconv.ParseUint(a, 10, 32)
	last, err2 := strconv.ParseUint(b, 10, 32)
	if err1 != nil || err2 != nil || first == 0 || last < first || last == 1<<32-1 {
		return IDs{}, fmt.Errorf("%q is no range of user ids: give FIRST-LAST, without 0", text)
	}
	return IDs{uint32(first), uint32(last)}, nil
}

// everyJail are the directories that each VM process may read: programs, libraries, firmware.
var everyJail = []string{"/usr", "/lib", "/lib64"}

// probeJail says whether VM processes can have jails here, and if not, why. It tries one.
func (e *Engine) probeJail(ctx context.Context, h *host) error {
	switch e.cfg.Jail {
	case JailOff:
		h.jailReason = "jails are switched off (FORKD_JAIL=off)"
		return nil
	case JailOn, JailAuto:
	}
	jailer, err := proc.NewJailer(everyJail)
	if err == nil {
		err = e.tryJail(ctx, h, jailer)
	}
	if err == nil {
		h.jailer = jailer
		return nil
	}
	if jailer != nil {
		err = errors.Join(err, jailer.Close())
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if e.cfg.Jail == JailOn {
		return fmt.Errorf("%w: VM processes cannot be put into jails here, which FORKD_JAIL=on asks for: %w", engine.ErrUnavailable, err)
	}
	h.jailReason = err.Error()
	if os.Geteuid() != 0 {
		return nil
	}
	// A root that may not mount, in a container, may be let have what other users have.
	if jailer := proc.NewSpacesJailer(); e.tryJail(ctx, h, jailer) == nil {
		h.jailer = jailer
	}
	return nil
}

// tryJail has QEMU say its version in a jail as machines get.
func (e *Engine) tryJail(ctx context.Context, h *host, jailer *proc.Jailer) error {
	jail, done, err := e.newJail(jailer)
	if err != nil {
		return err
	}
	defer done()
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	p, err := proc.Start(ctx, &proc.Command{
		Path: h.binary, Args: []string{"-version"}, Env: h.environment(), Tied: true, Jail: jail, RefuseCalls: true,
		Confine: &proc.Confine{ReadOnly: h.programs(), ReadWrite: []string{os.DevNull}},
	})
	if err != nil {
		return explainJail(err, jailer)
	}
	defer p.Release()
	select {
	case <-p.Done():
	case <-ctx.Done():
		return errors.Join(context.Cause(ctx), p.Kill())
	}
	if err := p.Err(); err != nil {
		return fmt.Errorf("run QEMU in a jail: %w", err)
	}
	// It must be the same program that is found outside.
	v, err := parseVersion(string(p.Output()), h.binary, emulators[h.platform.arch])
	if err != nil {
		return err
	}
	if v != h.version {
		return fmt.Errorf("in a jail QEMU is %s, and %s outside", v, h.version)
	}
	return nil
}

func explainJail(err error, jailer *proc.Jailer) error {
	switch {
	case !jailer.Privileged() && (errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EACCES)):
		return fmt.Errorf("%w (the kernel lets this user make no namespaces: see sysctl user.max_user_namespaces, "+
			"kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns)", err)
	case jailer.Privileged() && errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%w (this daemon may not use the user ids of jails; it is in a user namespace: set FORKD_JAIL_UIDS "+
			"to a range that has a place in /proc/self/uid_map)", err)
	}
	return err
}

// newJail is a jail for one VM process. done gives back its user id, once the process runs, which keeps it, or has failed.
func (e *Engine) newJail(jailer *proc.Jailer) (jail *proc.Jail, done func(), err error) {
	if jailer == nil {
		return nil, func() {}, nil
	}
	if !jailer.Privileged() {
		return &proc.Jail{Jailer: jailer}, func() {}, nil
	}
	id, err := e.takeID()
	if err != nil {
		return nil, nil, err
	}
	return &proc.Jail{Jailer: jailer, ID: id}, func() {
		e.idMu.Lock()
		defer e.idMu.Unlock()
		delete(e.ids, id)
	}, nil
}

// takeID finds a user that no process is of, and reserves it. It is drawn, so that no other daemon of this host chooses
// the same at this moment; afterwards the kernel knows.
func (e *Engine) takeID() (uint32, error) {
	e.idMu.Lock()
	defer e.idMu.Unlock()
	size := uint64(e.cfg.JailIDs.Last) - uint64(e.cfg.JailIDs.First) + 1
	for range 1000 {
		id := e.cfg.JailIDs.First + uint32(rand.Uint64N(size))
		if e.ids[id] {
			continue
		}
		if _, err := unix.Getpriority(unix.PRIO_USER, int(id)); errors.Is(err, unix.ESRCH) {
			e.ids[id] = true
			return id, nil
		}
	}
	return 0, fmt.Errorf("all user ids for VM processes from %d to %d seem to be in use; set FORKD_JAIL_UIDS to a larger range",
		e.cfg.JailIDs.First, e.cfg.JailIDs.Last)
}

// hand makes what a machine may open its user's. What it stands on stays the daemon's and becomes readable: who is to be
// kept from it does not get into the home, which is private.
func hand(spec *engine.Spec, m mode, id uint32) error {
	for _, path := range spec.Disk.Backing {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return &os.PathError{Op: "stat", Path: path, Err: err}
		}
		// A disk may have been the own one of a machine that is gone, whose user another may get some day.
		if st.Uid != uint32(os.Geteuid()) {
			if err := os.Chown(path, os.Geteuid(), os.Getegid()); err != nil {
				return err
			}
		}
		if st.Mode&0o004 == 0 {
			if err := os.Chmod(path, os.FileMode(st.Mode&0o777)|0o004); err != nil {
				return err
			}
		}
	}
	if m == restored {
		// It may look up the disks that captures put there, by name; it may not list or make any.
		dir := filepath.Dir(spec.Disk.Path)
		if err := os.Chown(dir, -1, int(id)); err != nil {
			return err
		}
		if err := os.Chmod(dir, 0o710); err != nil {
			return err
		}
	}
	return give(spec.Disk.Path, id)
}

// copies are the files that a machine boots from which its user may not read. They may be anybody's, so they are left as
// they are.
func copies(boot *engine.Boot) ([]string, error) {
	if boot == nil {
		return nil, nil
	}
	var list []string
	for _, path := range []string{boot.Kernel, boot.Initrd} {
		info, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		if info.Mode()&0o004 == 0 {
			list = append(list, path)
		}
	}
	return list, nil
}

// give makes a file a machine's own.
func give(path string, id uint32) error {
	if id == 0 {
		return nil
	}
	if err := os.Lchown(path, int(id), int(id)); err != nil {
		return fmt.Errorf("give the machine its disk: %w", err)
	}
	return nil
}

// started says how a VM process is confined, and that it lacks nothing of what it was to get.
func started(process *proc.Process, jailer *proc.Jailer) (string, error) {
	layers, err := proc.Observed(process.PID())
	if err != nil {
		return "", err
	}
	for _, want := range promised(jailer) {
		if !slices.Contains(layers, want) {
			return "", fmt.Errorf("the kernel did not confine the VM process as it was asked to: %s is missing of its layers", want)
		}
	}
	if ok, _ := proc.ConfinementAvailable(); ok {
		layers = append(layers, proc.LayerLandlock)
	}
	return strings.Join(layers, ","), nil
}

// promised are the layers that every machine gets, besides Landlock.
func promised(jailer *proc.Jailer) []string {
	layers := []string{proc.LayerCalls, proc.LayerNoNewPriv}
	if jailer != nil {
		layers = append(layers, jailer.Layers()...)
	}
	return layers
}

// Layers implements engine.Confined. What the kernel shows of a process is asked for now; the rest is as it was when the
// process was started.
func (m *machine) Layers() []string {
	layers, err := proc.Observed(m.process.PID())
	if err != nil {
		return nil // It has ended.
	}
	if slices.Contains(strings.Split(m.layers, ","), proc.LayerLandlock) {
		layers = append(layers, proc.LayerLandlock)
	}
	slices.Sort(layers)
	return layers
}

// jailOf is the user of a machine's jail, 0 if it has none.
func jailOf(process *proc.Process) (uint32, error) {
	id, err := proc.Owner(process.PID())
	if err != nil || id == uint32(os.Geteuid()) {
		return 0, err
	}
	return id, nil
}

// LiveReason implements engine.Confined.
func (m *machine) LiveReason(ctx context.Context) (string, error) { return m.live(ctx) }

// liveFor says why a machine cannot be captured live, or "".
func (e *Engine) liveFor(m *machine) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		h, err := e.host(ctx)
		if err != nil {
			return "", err
		}
		if m.id != 0 || strings.Contains(m.layers, proc.LayerUserSpace) {
			return h.live.jailed, nil
		}
		return h.live.free, nil
	}
}
