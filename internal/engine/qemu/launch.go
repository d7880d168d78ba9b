package qemu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/qemu/qmp"
	"forkd.dev/forkd/internal/proc"
	"forkd.dev/forkd/internal/undo"
)

// Names in a machine's directory.
const (
	controlSocket = "control.sock"
	qmpSocket     = "qmp.sock"
	consoleSocket = "console.sock"
)

// maxOutput is room for what QEMU says at the end of ten thousand live captures, and then some; see sweep.
const maxOutput = 1 << 20

// maxFiles is far more descriptors than a machine of ours opens.
const maxFiles = 256

// launch starts the VM process with ram as its memory and connects to its monitor. The machine owns nothing of the
// caller's. On failure the error says what QEMU said.
func (e *Engine) launch(ctx context.Context, host *host, spec *engine.Spec, m mode, ram *os.File) (*machine, error) {
	args, err := argv(&host.platform, spec, m)
	if err != nil {
		return nil, err
	}
	var undoes undo.Stack
	defer undoes.Run()
	dir, err := os.Open(spec.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }()
	files, err := launchFiles(dir, ram, spec.Link, spec.Peer)
	if err != nil {
		return nil, err
	}
	defer files.closeChildEnds()
	undoes.Add(func() { _ = files.state.Close() })
	// Connected before the process is there, so that nothing the guest prints is missed. A later daemon connects as well:
	// a socket pair would end with this one.
	screen, err := dialUnix(ctx, dir, consoleSocket)
	if err != nil {
		return nil, err
	}
	undoes.Add(func() { _ = screen.Close() })
	jail, done, err := e.newJail(host.jailer)
	if err != nil {
		return nil, err
	}
	defer done()
	if jail != nil && jail.ID != 0 {
		if err := hand(spec, m, jail.ID); err != nil {
			return nil, err
		}
		if jail.Copies, err = copies(spec.Boot); err != nil {
			return nil, err
		}
	}
	process, err := proc.Start(ctx, &proc.Command{
		Path: host.binary,
		Args: args,
		Env:  host.environment(),
		// A later daemon finds the process by it, also one that was never written down.
		Dir:      spec.Dir,
		Files:    files.child(),
		MaxFiles: maxFiles,

		OutputMax: maxOutput,
		Cgroup:    spec.Cgroup,
		Confine:   confinement(host, spec, m),
		Dials:     host.platform.userNetwork,
		Jail:      jail,

		RefuseCalls: true,
		// Under emulation QEMU asks for huge ones for its translations, of which a short-lived child makes 8 MiB.
		SmallPages: host.platform.accelerator == TCG,
	})
	if err != nil {
		return nil, err
	}
	layers, err := started(process, host.jailer)
	if err != nil {
		defer process.Release()
		return nil, errors.Join(err, process.Kill())
	}
	mc := newMachine(host.format(), spec, process, files.state, screen)
	mc.layers = layers
	if jail != nil {
		mc.id = jail.ID
	}
	mc.live = e.liveFor(mc)
	if m == restored {
		mc.habits = e.habitsOf(ram)
	}
	undoes.Keep()
	conn, err := dialUnix(ctx, dir, qmpSocket)
	if err != nil {
		return nil, errors.Join(err, mc.Close())
	}
	mc.monitor = qmp.New(conn)
	go mc.watch()
	return mc, nil
}

// confinement names what the VM process may open. Its memory, sockets and state file need no entry: they are given as
// descriptors.
func confinement(host *host, spec *engine.Spec, m mode) *proc.Confine {
	c := &proc.Confine{ReadOnly: host.programs()}
	c.ReadOnly = append(c.ReadOnly, spec.Disk.Backing...)
	// QEMU opens /dev/null for writing to find out which kind of file lock works.
	c.ReadWrite = append(c.ReadWrite, spec.Disk.Path, os.DevNull)
	if m == restored {
		// Captures switch the disk to another file there, and commits write the older ones; none is made by QEMU.
		c.ReadWrite = append(c.ReadWrite, filepath.Dir(spec.Disk.Path))
	}
	if m == coldBoot {
		c.ReadOnly = append(c.ReadOnly, spec.Boot.Kernel, spec.Boot.Initrd)
	}
	if host.platform.accelerator == KVM {
		c.ReadWrite = append(c.ReadWrite, "/dev/kvm")
	}
	if host.live.device {
		c.ReadWrite = append(c.ReadWrite, userfaultDevice)
	}
	return c
}

func existing(paths []string) []string {
	var found []string
	for _, p := range paths {
		if _, err := os.Stat(p); err == nil {
			found = append(found, p)
		}
	}
	return found
}

// launchSet is what daemon and VM process share.
type launchSet struct {
	ram                          *os.File // the caller's
	control, qmp, console, state *os.File // the child's; all but state listen; state is read by the daemon too
	link                         *os.File // the caller's or, if it gave none, the child's
	nobody                       bool     // it gave none
	peer                         *os.File // the caller's; may be nil
}

func (l *launchSet) child() []*os.File {
	files := []*os.File{fdRAM - 3: l.ram, fdControl - 3: l.control, fdQMP - 3: l.qmp, fdConsole - 3: l.console, fdState - 3: l.state, fdLink - 3: l.link}
	if l.peer != nil {
		files = append(files, l.peer)
	}
	return files
}

func (l *launchSet) closeChildEnds() {
	for _, f := range []*os.File{l.control, l.qmp, l.console} {
		_ = f.Close()
	}
	if l.nobody {
		_ = l.link.Close()
	}
}

func launchFiles(dir, ram, link, peer *os.File) (_ *launchSet, err error) {
	var undoes undo.Stack
	defer undoes.Run()
	l := &launchSet{ram: ram, link: link, peer: peer}
	if link == nil {
		if l.link, err = deadLink(); err != nil {
			return nil, err
		}
		l.nobody = true
		undoes.Add(func() { _ = l.link.Close() })
	}
	for _, s := range []struct {
		name string
		file **os.File
	}{{controlSocket, &l.control}, {qmpSocket, &l.qmp}, {consoleSocket, &l.console}} {
		if *s.file, err = listen(dir, s.name); err != nil {
			return nil, err
		}
		undoes.Add(func() { _ = (*s.file).Close() })
	}
	fd, err := unix.MemfdCreate("forkd-state", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make state file: %w", err)
	}
	l.state = os.NewFile(uintptr(fd), "state")
	undoes.Keep()
	return l, nil
}

// deadLink is a link whose other end is closed: what is sent on it is refused, and nothing comes from it.
func deadLink() (*os.File, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("make a link: %w", err)
	}
	_ = unix.Close(pair[1])
	return os.NewFile(uintptr(pair[0]), "link"), nil
}

// listen makes a listening unix socket in dir. The daemon makes it instead of QEMU so that connecting works at once,
// without waiting for QEMU to come up, and because a confined QEMU may not create files.
func listen(dir *os.File, name string) (*os.File, error) {
	if err := os.Remove(filepath.Join(dir.Name(), name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	// A socket's path has at most 107 bytes; a directory may be deeper.
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: below(dir, name), Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", filepath.Join(dir.Name(), name), err)
	}
	l.SetUnlinkOnClose(false)
	defer func() { _ = l.Close() }()
	return l.File()
}

func dialUnix(ctx context.Context, dir *os.File, name string) (*net.UnixConn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", below(dir, name))
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", filepath.Join(dir.Name(), name), err)
	}
	return conn.(*net.UnixConn), nil
}

func below(dir *os.File, name string) string {
	return "/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + name
}

// sayQEMU makes QEMU's own words readable: without the program's path in front of each line.
func sayQEMU(output []byte) string {
	var lines []string
	for line := range strings.Lines(string(output)) {
		line = strings.TrimSpace(line)
		if name, rest, ok := strings.Cut(line, ": "); ok && strings.HasPrefix(filepath.Base(name), "qemu-system-") {
			line = rest
		}
		if line != "" && !afterSweep(line) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "; ")
}

// socketPair makes a connected pair: a connection for the daemon and a file for a child.
func socketPair() (*net.UnixConn, *os.File, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	file := os.NewFile(uintptr(pair[1]), "peer")
	ours := os.NewFile(uintptr(pair[0]), "ours")
	defer func() { _ = ours.Close() }()
	conn, err := net.FileConn(ours)
	if err != nil {
		_ = file.Close()
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	return conn.(*net.UnixConn), file, nil
}
