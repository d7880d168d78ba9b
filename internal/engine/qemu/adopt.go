package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/qemu/qmp"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/proc"
	"forkd.dev/forkd/internal/undo"
)

// adoptLimit is how long a QEMU may take to answer the daemon that adopts it. Milliseconds are usual;
// a busy host must not cost anybody his sandbox.
const adoptLimit = 30 * time.Second

// Adopt implements engine.Adopter. It asks no probe: the machine runs already, whatever this host offers now.
func (e *Engine) Adopt(ctx context.Context, a *engine.Adoption) (engine.Adopted, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, adoptLimit, fmt.Errorf("QEMU does not answer for %s", adoptLimit))
	defer cancel()
	m, disks, err := e.adopt(ctx, a)
	if err != nil {
		return engine.Adopted{}, fmt.Errorf("adopt machine %s: %w", a.Spec.ID, err)
	}
	// A machine that booted has no image, and none can be adopted as one; whoever misses it says so.
	image, err := memory.OpenImage(procFD(a.Ref.PID, fdRAM), a.Spec.MemoryBytes)
	if err != nil {
		image = nil
	}
	return engine.Adopted{Machine: m, Disks: disks, Memory: image, Peer: peerOf(m.process.PID())}, nil
}

func (e *Engine) adopt(ctx context.Context, a *engine.Adoption) (*machine, []string, error) {
	if a.Ref.Engine != Name {
		return nil, nil, fmt.Errorf("it is one of engine %q, this engine is %s", a.Ref.Engine, Name)
	}
	process, err := proc.Adopt(ctx, a.Ref.PID, a.Ref.StartTime, e.programs(a.Format.Arch)...)
	if errors.Is(err, proc.ErrGone) {
		err = fmt.Errorf("%w: %w", engine.ErrDead, err)
	}
	if err != nil {
		return nil, nil, err
	}
	var undoes undo.Stack
	defer undoes.Run()
	undoes.Add(func() {
		process.Detach()
		process.Release()
	})
	m, err := connect(ctx, a, process)
	if err != nil {
		return nil, nil, err
	}
	m.layers = a.Ref.Layers
	if m.id, err = jailOf(process); err != nil {
		return nil, nil, errors.Join(err, m.Detach())
	}
	m.live = e.liveFor(m)
	undoes.Keep()
	disks, err := m.takeUp(ctx, a.Paused)
	if err != nil {
		return nil, nil, errors.Join(m.failed(err), m.Detach())
	}
	return m, disks, nil
}

// programs are the names that the file of a VM process of ours may have.
func (e *Engine) programs(arch string) []string {
	em := emulators[arch]
	names := []string{em.name}
	if path, err := find(e.cfg.Binary, em); err == nil { // It may have been uninstalled meanwhile.
		names = append(names, filepath.Base(path))
	}
	return names
}

// connect makes a machine of a process, with connections as those of the daemon before.
func connect(ctx context.Context, a *engine.Adoption, process *proc.Process) (*machine, error) {
	var undoes undo.Stack
	defer undoes.Run()
	dir, err := os.Open(a.Spec.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }()
	state, err := reopenMemfd(process.PID(), fdState, "forkd-state")
	if err != nil {
		return nil, err
	}
	undoes.Add(func() { _ = state.Close() })
	// Bounded by ctx: QEMU takes the connections when it gets to it.
	screen, err := dialUnix(ctx, dir, consoleSocket)
	if err != nil {
		return nil, err
	}
	undoes.Add(func() { _ = screen.Close() })
	monitor, err := dialUnix(ctx, dir, qmpSocket)
	if err != nil {
		return nil, err
	}
	undoes.Keep()
	m := newMachine(a.Format, a.Spec, process, state, screen)
	m.monitor = qmp.New(monitor)
	go m.watch()
	return m, nil
}

// peerOf is the other end of a machine's link, if its process keeps one that is that. It may show what it likes, but nothing
// comes from a link that is not its own guest's.
func peerOf(pid int) *os.File {
	f, err := proc.CopyFile(pid, fdPeer)
	if err != nil {
		return nil
	}
	raw, err := f.SyscallConn()
	if err != nil {
		_ = f.Close()
		return nil
	}
	kind, domain := 0, 0
	var kindErr, domainErr error
	err = raw.Control(func(fd uintptr) {
		kind, kindErr = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TYPE)
		domain, domainErr = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DOMAIN)
	})
	if errors.Join(err, kindErr, domainErr) != nil || kind != unix.SOCK_SEQPACKET || domain != unix.AF_UNIX {
		_ = f.Close()
		return nil
	}
	return f
}

func procFD(pid, fd int) string {
	return filepath.Join("/proc", strconv.Itoa(pid), "fd", strconv.Itoa(fd))
}

// reopenMemfd opens a memory file that a VM process of ours was given as its descriptor fd.
func reopenMemfd(pid, fd int, name string) (*os.File, error) {
	path := procFD(pid, fd)
	link, err := os.Readlink(path)
	if err != nil {
		return nil, err
	}
	if !strings.HasPrefix(link, "/memfd:"+name) {
		return nil, fmt.Errorf("descriptor %d is %s and not %s: the process is none of ours", fd, link, name)
	}
	return os.OpenFile(path, os.O_RDWR, 0)
}

// takeUp ends what the daemon before had begun with the machine, lets it run or stand still as it is meant to, and
// says which files its disk is made of.
func (m *machine) takeUp(ctx context.Context, paused bool) ([]string, error) {
	if err := m.acquire(ctx); err != nil {
		return nil, err
	}
	defer m.release()
	m.paused = paused
	// A QEMU whose capture ended with its reader may hang in the first page fault that nobody serves.
	if err := m.insist(ctx, qmp.Capabilities(), nil); err != nil {
		return nil, err
	}
	var status struct {
		Status string `json:"status"`
	}
	if err := m.insist(ctx, qmp.Command{Name: "query-status"}, &status); err != nil {
		return nil, err
	}
	switch status.Status {
	case "inmigrate", "prelaunch":
		return nil, errors.New("it had not been loaded yet")
	case "shutdown", "internal-error", "guest-panicked":
		return nil, fmt.Errorf("%w: its state is %s", engine.ErrDead, status.Status)
	}
	if status.Status != "running" { // and may be about to
		if err := m.connect(ctx); err != nil {
			return nil, err
		}
	}
	if err := m.settled(ctx); err != nil {
		return nil, fmt.Errorf("end the capture of an earlier daemon: %w", err)
	}
	if err := m.endJobs(ctx); err != nil {
		return nil, fmt.Errorf("end what an earlier daemon did with the disk: %w", err)
	}
	if err := m.dropLeft(ctx); err != nil {
		return nil, err
	}
	return m.diskFiles(ctx)
}

// endJobs cancels what is being done with the disk. What a commit has moved already is where it was, too.
func (m *machine) endJobs(ctx context.Context) error {
	tick := time.NewTicker(settleTick)
	defer tick.Stop()
	for {
		var jobs []struct {
			Device string `json:"device"`
		}
		if err := m.monitor.Do(ctx, qmp.Command{Name: "query-block-jobs"}, &jobs); err != nil {
			return err
		}
		if len(jobs) == 0 {
			return nil
		}
		for _, j := range jobs {
			err := m.monitor.Do(ctx, qmp.Command{Name: "block-job-cancel", Args: map[string]string{"device": j.Device}}, nil)
			if refused(err) != nil { // A job may have ended meanwhile, or be ending.
				return err
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// dropLeft closes what was opened or handed over for the disk and is no part of it: by an earlier daemon for a capture
// that it did not get to, or until a commit moved what it held.
func (m *machine) dropLeft(ctx context.Context) error {
	err := m.monitor.Do(ctx, qmp.Command{Name: "closefd", Args: map[string]string{"fdname": captureFD}}, nil)
	if refused(err) != nil {
		return err
	}
	// Of several that stand on each other only the uppermost can be closed.
	for dropped := true; dropped; {
		if dropped, err = m.dropNodes(ctx); err != nil {
			return err
		}
	}
	return nil
}

// dropNodes closes the nodes of captures that nothing is on. QEMU refuses to close what is in use.
func (m *machine) dropNodes(ctx context.Context) (dropped bool, err error) {
	var nodes []struct {
		Name string `json:"node-name"`
	}
	if err := m.monitor.Do(ctx, qmp.Command{Name: "query-named-block-nodes", Args: map[string]any{"flat": true}}, &nodes); err != nil {
		return false, err
	}
	var cmds []qmp.Command
	for _, n := range nodes {
		if strings.HasPrefix(n.Name, topPrefix) && !strings.HasSuffix(n.Name, "-file") {
			cmds = append(cmds, qmp.Command{Name: "blockdev-del", Args: map[string]string{"node-name": n.Name}})
		}
	}
	for _, err := range m.monitor.Each(ctx, cmds) {
		if refused(err) != nil {
			return false, err
		}
		dropped = dropped || err == nil
	}
	return dropped, nil
}

// refused is err unless QEMU only refused.
func refused(err error) error {
	if _, ok := errors.AsType[*qmp.Error](err); ok {
		return nil
	}
	return err
}

// diskImage is one file of a disk in QEMU's answer to query-block.
type diskImage struct {
	Filename string     `json:"filename"`
	Backing  *diskImage `json:"backing-image"`
}

// diskFiles asks for the files the disk is made of, top first.
func (m *machine) diskFiles(ctx context.Context) ([]string, error) {
	var blocks []struct {
		Inserted *struct {
			Image diskImage `json:"image"`
		} `json:"inserted"`
	}
	if err := m.monitor.Do(ctx, qmp.Command{Name: "query-block"}, &blocks); err != nil {
		return nil, err
	}
	if len(blocks) != 1 || blocks[0].Inserted == nil {
		return nil, fmt.Errorf("QEMU names %d disks, a machine has one", len(blocks))
	}
	var files []string
	for image := &blocks[0].Inserted.Image; image != nil; image = image.Backing {
		name, err := fileName(image.Filename)
		if err != nil {
			return nil, err
		}
		files = append(files, name)
	}
	return files, nil
}

// fileName is the path in a name of QEMU's, which is JSON where a plain path would not say all options.
func fileName(name string) (string, error) {
	text, ok := strings.CutPrefix(name, "json:")
	if !ok {
		return name, nil
	}
	type node struct {
		Filename string `json:"filename"`
	}
	var n struct {
		node
		File node `json:"file"`
	}
	if err := json.Unmarshal([]byte(text), &n); err != nil {
		return "", fmt.Errorf("decode QEMU's name of a disk %q: %w", name, err)
	}
	if n.Filename == "" {
		n.Filename = n.File.Filename
	}
	if n.Filename == "" {
		return "", fmt.Errorf("QEMU's name of a disk %q has no path", name)
	}
	return n.Filename, nil
}

// Detach implements engine.Detacher.
func (m *machine) Detach() error {
	m.mu.Lock()
	m.ended = true
	m.mu.Unlock()
	m.process.Detach()
	// The guest's last words are for the next daemon.
	_ = m.screen.Close()
	return m.Close()
}
