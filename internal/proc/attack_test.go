package proc

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/testenv"
)

// prey is what is on the host for an attacker to find.
type prey struct {
	parent, sibling int    // processes
	secret          string // a file that everybody may read
	backing         string // may be read, not written
	own             string // its own disk, in a directory where it may make nothing
	tcp             string // address of a service
	abstract, path  string // sockets
	key             int    // of shared memory
	control         bool   // only what is to succeed where nothing keeps it off, and harms nobody
}

func (p *prey) args() string {
	return strings.Join([]string{
		strconv.Itoa(p.parent), strconv.Itoa(p.sibling), p.secret, p.backing, p.own, p.tcp, p.abstract, p.path, strconv.Itoa(p.key), strconv.FormatBool(p.control),
	}, " ")
}

func parsePrey(args []string) *prey {
	p := &prey{secret: args[2], backing: args[3], own: args[4], tcp: args[5], abstract: args[6], path: args[7]}
	p.parent, _ = strconv.Atoi(args[0])
	p.sibling, _ = strconv.Atoi(args[1])
	p.key, _ = strconv.Atoi(args[8])
	p.control = args[9] == "true"
	return p
}

// attempt is one thing that a VM process taken over by its guest might try. do returns nil if it got what it wanted.
type attempt struct {
	name string
	do   func(p *prey) error
	may  bool // it is meant to be possible
	// control: without confinement it succeeds, so that the test would notice an attempt that never could.
	control bool
	// calls: only the filter of calls keeps it off. Nothing is lost if it is the only layer that fails, or the kernel's own
	// rules for users without privileges stand behind it.
	calls bool
}

var errNothing = errors.New("nothing there")

func open(path string, flags int) error {
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

func call(number uintptr, args ...uintptr) error {
	args = append(args, 0, 0, 0, 0, 0, 0)
	if _, _, errno := unix.Syscall6(number, args[0], args[1], args[2], args[3], args[4], args[5]); errno != 0 {
		return errno
	}
	return nil
}

var attempts = []attempt{
	// What a machine needs.
	{name: "read what its disk stands on", do: func(p *prey) error { return open(p.backing, os.O_RDONLY) }, may: true, control: true},
	{name: "write its disk", do: func(p *prey) error { return open(p.own, os.O_RDWR) }, may: true, control: true},
	{name: "throw away", do: func(*prey) error { return open(os.DevNull, os.O_RDWR) }, may: true, control: true},
	{name: "read its libraries", do: func(*prey) error { _, err := os.ReadDir("/usr"); return err }, may: true, control: true},

	// Files.
	{name: "write what its disk stands on", do: func(p *prey) error { return open(p.backing, os.O_RDWR) }, control: true},
	{name: "truncate what its disk stands on", do: func(p *prey) error { return os.Truncate(p.backing, 0) }},
	{name: "read a secret", do: func(p *prey) error { return open(p.secret, os.O_RDONLY) }, control: true},
	{name: "read users", do: func(*prey) error { return open("/etc/passwd", os.O_RDONLY) }, control: true},
	{name: "make a file beside its disk", do: func(p *prey) error { return open(p.own+".new", os.O_RDWR|os.O_CREATE) }, control: true},
	{name: "remove its disk's backing", do: func(p *prey) error { return os.Rename(p.backing, p.own) }},
	{name: "make a link", do: func(p *prey) error { return os.Symlink("/", p.own+".link") }, control: true},
	{name: "make a file at the root", do: func(*prey) error { return os.Mkdir("/new", 0o700) }},
	{name: "make a file among the libraries", do: func(*prey) error { return open("/usr/lib/forkd-new", os.O_RDWR|os.O_CREATE) }},
	{name: "make a device", do: func(p *prey) error { return unix.Mknod(p.own+".dev", unix.S_IFBLK|0o600, 0) }},
	{name: "open a disk", do: func(*prey) error { return anyOf("/dev/vda", "/dev/sda", "/dev/nvme0n1", "/dev/loop0") }},
	{name: "open the host's memory", do: func(*prey) error { return anyOf("/dev/mem", "/dev/kmsg", "/proc/kcore") }},
	{name: "set a sysctl", do: func(*prey) error { return open("/proc/sys/kernel/hostname", os.O_WRONLY) }},
	{name: "look at the hardware", do: func(*prey) error { _, err := os.ReadDir("/sys"); return err }, control: true},
	{name: "look at homes", do: func(*prey) error { _, err := os.ReadDir("/home"); return err }, control: true},
	{name: "find files by number", do: func(*prey) error {
		_, _, err := unix.NameToHandleAt(unix.AT_FDCWD, "/usr", 0)
		return err
	}, calls: true},

	// Other processes.
	{name: "see the daemon", do: func(p *prey) error { return open(fmt.Sprintf("/proc/%d/cmdline", p.parent), os.O_RDONLY) }, control: true},
	{name: "see another machine", do: func(p *prey) error { return open(fmt.Sprintf("/proc/%d/cmdline", p.sibling), os.O_RDONLY) }, control: true},
	{name: "take the daemon's root", do: func(p *prey) error { _, err := os.ReadDir(fmt.Sprintf("/proc/%d/root", p.parent)); return err }},
	{name: "signal the daemon", do: func(p *prey) error { return unix.Kill(p.parent, 0) }, control: true},
	{name: "signal another machine", do: func(p *prey) error { return unix.Kill(p.sibling, 0) }, control: true},
	{name: "debug the daemon", do: func(p *prey) error { return call(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(p.parent)) }},
	{name: "hold the daemon", do: func(p *prey) error { _, err := unix.PidfdOpen(p.parent, 0); return err }, control: true},
	{name: "read the daemon's memory", do: func(p *prey) error {
		var b [8]byte
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", p.parent))
		if err != nil {
			return err
		}
		at, _, _ := strings.Cut(string(text), "-")
		from, _ := strconv.ParseUint(at, 16, 64)
		remote := []unix.RemoteIovec{{Base: uintptr(from), Len: len(b)}}
		_, err = unix.ProcessVMReadv(p.parent, []unix.Iovec{{Base: &b[0], Len: uint64(len(b))}}, remote, 0)
		return err
	}, control: true},

	// The network, and other ways to others.
	{name: "call a service", do: func(p *prey) error { return dial("tcp", p.tcp) }, control: true},
	{name: "call a service on an abstract socket", do: func(p *prey) error { return dial("unix", p.abstract) }, control: true},
	{name: "call a service on a socket", do: func(p *prey) error { return dial("unix", p.path) }, control: true},
	{name: "see interfaces", do: func(*prey) error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, 0)
		_ = unix.Close(fd)
		return err
	}, control: true, calls: true},
	{name: "send raw packets", do: func(*prey) error { return call(unix.SYS_SOCKET, unix.AF_PACKET, unix.SOCK_RAW, 0) }},
	{name: "share memory", do: func(p *prey) error { _, err := unix.SysvShmGet(p.key, 0, 0); return err }, control: true},

	// Privileges, and the kernel.
	{name: "become root", do: func(*prey) error { return call(unix.SYS_SETUID, 0) }},
	{name: "become another user", do: func(*prey) error { return call(unix.SYS_SETRESUID, 1, 1, 1) }},
	{name: "take a group", do: func(*prey) error { return call(unix.SYS_SETGID, 0) }},
	{name: "have a capability", do: func(*prey) error {
		text, err := os.ReadFile("/proc/thread-self/status")
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(text)) {
			name, value, _ := strings.Cut(line, ":")
			if (name == "CapEff" || name == "CapPrm" || name == "CapInh" || name == "CapAmb") && strings.Trim(value, "0\t\n") != "" {
				return nil
			}
		}
		return errNothing
	}},
	{name: "gain by running a program", do: func(*prey) error {
		if n, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0); err == nil && n == 1 {
			return errNothing
		}
		return nil
	}},
	{name: "become root in a namespace", do: func(*prey) error { return call(unix.SYS_UNSHARE, unix.CLONE_NEWUSER) }, calls: true},
	{name: "unshare", do: func(*prey) error { return call(unix.SYS_UNSHARE, unix.CLONE_FS) }, control: true, calls: true},
	{name: "join a namespace", do: func(*prey) error { return call(unix.SYS_SETNS, ^uintptr(0), 0) }, calls: true},
	{name: "mount", do: func(p *prey) error { return unix.Mount("none", filepath.Dir(p.own), "tmpfs", 0, "") }},
	{name: "change the root", do: func(*prey) error { return unix.Chroot("/usr") }},
	{name: "have keys", do: func(*prey) error { _, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_SESSION_KEYRING, true); return err }, calls: true},
	{name: "load a program into the kernel", do: func(*prey) error { return call(unix.SYS_BPF, 0) }, calls: true},
	{name: "watch the kernel", do: func(*prey) error { return call(unix.SYS_PERF_EVENT_OPEN, 0) }},
	{name: "queue calls", do: func(*prey) error {
		var params [120]byte
		fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
		if errno != 0 {
			return errno
		}
		return unix.Close(int(fd))
	}, calls: true},
	{name: "name the host", do: func(*prey) error { return unix.Sethostname([]byte("taken")) }},
	{name: "set the clock", do: func(*prey) error { return call(unix.SYS_CLOCK_SETTIME, 99) }},
	{name: "read the kernel's log", do: func(*prey) error { return call(unix.SYS_SYSLOG, 10) }},
	{name: "have a file left open", do: func(*prey) error {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil { // kept from looking, it can try
			open := 0
			for fd := range 64 {
				if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil {
					open++
				}
			}
			if open <= 3+2 { // Go's poller
				return errNothing
			}
			return foundError(strconv.Itoa(open))
		}
		for _, e := range entries {
			target, err := os.Readlink("/proc/self/fd/" + e.Name())
			if err != nil || strings.HasSuffix(target, os.DevNull) || strings.HasPrefix(target, "/memfd:"+outputName) ||
				strings.HasPrefix(target, "anon_inode:[event") || strings.HasSuffix(target, "/fd") {
				continue
			}
			return foundError(target)
		}
		return errNothing
	}},
}

// foundError is a success that can be read.
type foundError string

func (e foundError) Error() string { return "<nil> " + string(e) }

func anyOf(paths ...string) error {
	for _, path := range paths {
		if open(path, os.O_RDONLY) == nil {
			return nil
		}
	}
	return errNothing
}

func dial(network, address string) error {
	c, err := net.Dial(network, address)
	if err != nil {
		return err
	}
	return c.Close()
}

// attack tries everything, and says of each what came of it.
func attack(out io.Writer, p *prey) {
	root, _ := os.ReadDir("/")
	var names []string
	for _, e := range root {
		names = append(names, e.Name())
	}
	fmt.Fprintf(out, "root=%s pid=%d\n", strings.Join(names, ","), os.Getpid())
	for _, a := range attempts {
		if a.control || !p.control {
			fmt.Fprintf(out, "%s=%v\n", a.name, a.do(p))
		}
	}
}

// newPrey sets everything up that an attacker is to find, or not.
func newPrey(t *testing.T) *prey {
	t.Helper()
	home := t.TempDir() // 0755: that others may not enter it is one layer too many for this test
	testenv.Enterable(t, home)
	p := &prey{
		parent: os.Getpid(), secret: filepath.Join(home, "secret"), backing: filepath.Join(home, "hot", "backing"),
		own: filepath.Join(home, "machine", "disk", "own"), abstract: fmt.Sprintf("@forkd-test-%d", os.Getpid()),
		path: filepath.Join(home, "socket"), key: 0x666f0000 + os.Getpid()&0xffff,
	}
	for _, path := range []string{p.secret, p.backing, p.own} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	listen := func(network, address string) net.Listener {
		l, err := net.Listen(network, address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	p.tcp = listen("tcp", "127.0.0.1:0").Addr().String()
	listen("unix", p.abstract)
	listen("unix", p.path)
	if err := os.Chmod(p.path, 0o777); err != nil {
		t.Fatal(err)
	}
	id, err := unix.SysvShmGet(p.key, 4096, unix.IPC_CREAT|0o666)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = unix.SysvShmCtl(id, unix.IPC_RMID, nil) })
	p.sibling = start1(t, command("wait")).PID()
	return p
}

// TestAttack has a stand-in for a VM process that its guest has taken over try everything, in a jail, with and without
// Landlock, so that neither hides a hole in the other, and with nothing around it, which shows that the attempts are real.
func TestAttack(t *testing.T) {
	j := newJailer(t)
	p := newPrey(t)
	var jail *Jail
	if j.Privileged() {
		jail = &Jail{Jailer: j, ID: 3_100_000_000 + uint32(os.Getpid())}
		// Also what it stands on, which its mount alone keeps it from writing then.
		if err := errors.Join(os.Chown(p.own, int(jail.ID), int(jail.ID)), os.Chown(p.backing, int(jail.ID), int(jail.ID))); err != nil {
			t.Fatal(err)
		}
	} else {
		jail = &Jail{Jailer: j}
	}
	for _, c := range []struct {
		name     string
		jail     *Jail
		landlock bool
		calls    bool
	}{
		{"all", jail, true, true}, {"jail and calls", jail, false, true}, {"jail", jail, false, false}, {"nothing", nil, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.jail != nil && !j.Privileged() && !c.landlock {
				t.Skip("without privileges files are kept by Landlock alone")
			}
			if ok, why := ConfinementAvailable(); c.landlock && !ok {
				testenv.Missing(t, "landlock", why)
			}
			p.control = c.jail == nil
			cmd := command("attack " + p.args())
			cmd.Jail, cmd.RefuseCalls = c.jail, c.calls
			cmd.Dir = filepath.Dir(filepath.Dir(p.own))
			if c.jail != nil {
				cmd.Confine = &Confine{ReadOnly: []string{p.backing}, ReadWrite: []string{filepath.Dir(p.own), p.own, os.DevNull}}
			}
			cmd.withoutLandlock = !c.landlock
			child := start1(t, cmd)
			wait(t, child)
			if err := child.Err(); err != nil {
				t.Fatal(err)
			}
			check(t, j, p, c.jail != nil, c.calls, string(child.Output()))
		})
	}
}

func check(t *testing.T, j *Jailer, p *prey, jailed, calls bool, said string) {
	t.Helper()
	first, rest, _ := strings.Cut(said, "\n")
	if jailed && j.Privileged() {
		root, _, _ := strings.Cut(strings.TrimPrefix(first, "root="), " ")
		for name := range strings.SplitSeq(root, ",") {
			if name != "" && !slices.Contains([]string{"dev", "lib", "lib64", "proc", "usr"}, name) &&
				!strings.HasPrefix(p.own, "/"+name+"/") {
				t.Errorf("%s is in its root", name)
			}
		}
	}
	if jailed && !strings.HasSuffix(first, " pid=1") {
		t.Errorf("it is not the only process of its namespace: %s", first)
	}
	results := map[string]string{}
	for line := range strings.Lines(rest) {
		name, result, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		results[name] = result
	}
	for _, a := range attempts {
		result, ok := results[a.name]
		if !jailed && !a.control || jailed && !calls && a.calls {
			continue
		}
		got := strings.HasPrefix(result, "<nil>")
		switch {
		case !ok:
			t.Errorf("%s: it did not come to that", a.name)
		case jailed && got != a.may:
			t.Errorf("%s: possible is %v, want %v: %s", a.name, got, a.may, result)
		case !jailed && !got && os.Geteuid() == 0:
			t.Errorf("%s: not possible without confinement either, so it proves nothing: %s", a.name, result)
		}
		t.Logf("%-40s %s", a.name, result)
	}
}

// TestJailIsObserved: what a child got is seen from outside.
func TestJailIsObserved(t *testing.T) {
	j := newJailer(t)
	jail := &Jail{Jailer: j}
	if j.Privileged() {
		jail.ID = 3_100_000_000 + uint32(os.Getpid())
	}
	cmd := command("wait")
	cmd.Jail, cmd.RefuseCalls, cmd.Confine = jail, true, &Confine{ReadWrite: []string{os.DevNull}}
	p := start1(t, cmd)
	layers, err := Observed(p.PID())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range append(j.Layers(), LayerNoNewPriv, LayerCalls) {
		if !slices.Contains(layers, want) {
			t.Errorf("%s is not seen; %q are", want, layers)
		}
	}
	owner, err := Owner(p.PID())
	if err != nil || j.Privileged() && owner != jail.ID {
		t.Errorf("it belongs to %d (%v), want %d", owner, err, jail.ID)
	}
	free := start1(t, command("wait"))
	if layers, err = Observed(free.PID()); err != nil || !slices.Equal(layers, []string{LayerNoNewPriv}) {
		t.Errorf("around a child without a jail: %q, %v", layers, err)
	}
}

// TestJailedIsHeld: a child in a jail is ended, adopted and buried as any other.
func TestJailedIsHeld(t *testing.T) {
	j := newJailer(t)
	jail := &Jail{Jailer: j}
	if j.Privileged() {
		jail.ID = 3_100_000_000 + uint32(os.Getpid())
	}
	dir := t.TempDir()
	cmd := command("wait")
	cmd.Jail, cmd.Confine, cmd.Dir, cmd.MaxFiles = jail, &Confine{ReadWrite: []string{os.DevNull}}, dir, 100
	p := start1(t, cmd)
	waitOutput(t, p, "waiting")
	// By this a later daemon finds it.
	if at, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", p.PID())); err != nil || at != dir {
		t.Errorf("it works in %s (%v), want %s", at, err, dir)
	}
	var limit unix.Rlimit
	if err := unix.Prlimit(p.PID(), unix.RLIMIT_NOFILE, nil, &limit); err != nil && !errors.Is(err, unix.EPERM) || err == nil && limit.Max != 100 {
		t.Errorf("its limit of files is %d (%v)", limit.Max, err)
	}
	p.Detach()
	again, err := Adopt(t.Context(), p.PID(), p.StartTime(), own(t))
	if err != nil {
		t.Fatal(err)
	}
	again.Detach()
	if err := Bury(t.Context(), p.PID(), p.StartTime()); err != nil {
		t.Error(err)
	}
}

// TestJailsLeaveTheDaemonAlone: what a thread takes from itself for a child it takes from no other.
func TestJailsLeaveTheDaemonAlone(t *testing.T) {
	j := newJailer(t)
	facts := func() string {
		root, err1 := os.Readlink("/proc/self/root")
		mounts, err2 := os.Readlink("/proc/self/ns/mnt")
		network, err3 := os.Readlink("/proc/self/ns/net")
		if err := errors.Join(err1, err2, err3); err != nil {
			t.Fatal(err)
		}
		return root + mounts + network
	}
	before := facts()
	for n := range 40 {
		jail := &Jail{Jailer: j}
		if j.Privileged() {
			jail.ID = 3_100_000_000 + uint32(n)
		}
		cmd := &Command{Path: "/usr/bin/true"} // a test binary under the race detector takes a second to end
		cmd.Jail, cmd.RefuseCalls, cmd.Confine = jail, true, &Confine{}
		wait(t, start1(t, cmd))
	}
	if after := facts(); after != before {
		t.Errorf("the daemon is in %s, was in %s", after, before)
	}
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	confined := func() (n int) {
		for _, task := range tasks {
			text, err := os.ReadFile("/proc/self/task/" + task.Name() + "/status")
			if err == nil && strings.Contains(string(text), "Seccomp:\t2") && !strings.Contains(string(text), "State:\tZ") {
				n++
			}
		}
		return n
	}
	deadline := time.After(testenv.Timeout(5 * time.Second))
	for confined() > 0 { // A thread takes a moment to end.
		select {
		case <-deadline:
			t.Fatalf("%d threads of the daemon are confined", confined())
		case <-time.After(time.Millisecond):
		}
	}
}

// TestJailedDevice: a device that is named can be used in a jail, whoever may open the host's.
func TestJailedDevice(t *testing.T) {
	testenv.Need(t, "root")
	if _, err := os.Stat("/dev/kvm"); err != nil {
		t.Skip(err)
	}
	j := newJailer(t)
	for named, want := range map[string]string{"/dev/kvm": "/dev/kvm: <nil>\n", os.DevNull: "no such file"} {
		cmd := command("open " + strconv.Itoa(os.O_RDWR) + " /dev/kvm")
		cmd.Jail, cmd.RefuseCalls = &Jail{Jailer: j, ID: 3_100_000_000 + uint32(os.Getpid())}, true
		cmd.Confine = &Confine{ReadWrite: []string{named}}
		p := start1(t, cmd)
		wait(t, p)
		if got := string(p.Output()); !strings.Contains(got, want) && !strings.Contains(got, "permission denied") || named == "/dev/kvm" && got != want {
			t.Errorf("with %s: %s want %s", named, got, want)
		}
	}
}

// TestJailedCopy: what only root may read is there, and the original is as it was.
func TestJailedCopy(t *testing.T) {
	testenv.Need(t, "root")
	path := filepath.Join(t.TempDir(), "kernel")
	if err := os.WriteFile(path, make([]byte, 3<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for copied, want := range map[bool]string{true: "<nil>\n", false: "permission denied"} {
		cmd := command("open " + strconv.Itoa(os.O_RDONLY) + " " + path)
		cmd.Jail, cmd.RefuseCalls = &Jail{Jailer: newJailer(t), ID: 3_100_000_000 + uint32(os.Getpid())}, true
		cmd.Confine = &Confine{ReadOnly: []string{path}}
		if copied {
			cmd.Jail.Copies = []string{path}
		}
		p := start1(t, cmd)
		wait(t, p)
		if got := string(p.Output()); !strings.Contains(got, want) {
			t.Errorf("copied %v: %s want %s", copied, got, want)
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("the file is %v now: %v", info, err)
	}
}

// TestJailInChroot: a daemon that was started in a root directory of its own has its children in jails below that, and not
// in the root that it cannot see itself.
func TestJailInChroot(t *testing.T) {
	testenv.Need(t, "root")
	newJailer(t) // which a host that makes no jails has not
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	script := `set -e
mount --make-rprivate /
mount --bind / "$1"
mount -t proc none "$1/proc"
mount --rbind /dev "$1/dev"
exec chroot "$1" "$2" -test.count=1 -test.run '^TestAttack$'`
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-c", script, "sh", t.TempDir(), exe)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
