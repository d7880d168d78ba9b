package proc

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Layers of confinement, as users read them.
const (
	LayerUser      = "user"        // a user id of its own, without capabilities
	LayerUserSpace = "user-space"  // a user namespace of its own, in which it is nobody
	LayerMounts    = "mounts"      // a root directory that has only what it needs
	LayerNetwork   = "network"     // a network namespace with nothing in it
	LayerIPC       = "ipc"         // an IPC and a host name namespace of its own
	LayerProcesses = "processes"   // a process namespace: it sees and signals no process but itself
	LayerCalls     = "calls"       // a seccomp filter that refuses what it never needs of the kernel
	LayerLandlock  = "landlock"    // opens only the files that Confine names
	LayerNoNewPriv = "no-new-priv" // gains nothing by running other programs
)

// Jailer makes jails: surroundings of its own for each child, in which it finds nothing of the host's but what it was
// given. It is safe for concurrent use and meant to live as long as its program.
//
// As root a child runs as a user of its own, in a root directory that holds only what its Confine names. Other users
// may not mount, so there a child is in namespaces of its own, as nobody, and Landlock alone keeps it from files.
type Jailer struct {
	base   []string // directories in every child's root
	mounts *os.File // the mount namespace that those of children are copied from; nil without privileges
	device uint64   // of the root directory there
}

// Jail is the jail of one child.
type Jail struct {
	Jailer *Jailer
	// ID is the child's user and only group. It is used with Jailer.Privileged alone, and must be nobody else's.
	ID uint32
	// Copies are files that the child may read though its user may not: it finds a copy of each at its path.
	Copies []string
}

// spaces are the namespaces that a child gets besides its mounts'.
const spaces = unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWPID

// NewJailer tries what a jail needs. base are directories that all children may read, such as /usr. The error says what
// this host refuses.
func NewJailer(base []string) (*Jailer, error) {
	j := NewSpacesJailer()
	// Some look-ups that os makes once must not be made first on a thread whose calls are refused.
	if self, err := os.FindProcess(os.Getpid()); err == nil {
		_ = self.Release()
	}
	for _, dir := range base {
		if info, err := os.Lstat(dir); err == nil && (info.IsDir() || info.Mode()&os.ModeSymlink != 0) {
			j.base = append(j.base, dir)
		}
	}
	if os.Geteuid() != 0 {
		return j, nil
	}
	err := onThread(func() (err error) {
		j.mounts, err = j.makeMounts()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make a root directory for jails: %w", refusedHint(err))
	}
	return j, nil
}

// NewSpacesJailer makes one whose jails are namespaces only, as those of users without privileges are. Whether they are
// allowed is seen when the first child is started.
func NewSpacesJailer() *Jailer { return &Jailer{} }

// refusedHint explains the kernel's refusals.
func refusedHint(err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w (the daemon lacks CAP_SYS_ADMIN: it runs in a container, or its unit takes it away)", err)
	case errors.Is(err, unix.ENOSYS):
		return fmt.Errorf("%w (Linux 5.12 or newer can)", err)
	}
	return err
}

// Close frees what the jailer holds. Children live on.
func (j *Jailer) Close() error {
	if j.mounts == nil {
		return nil
	}
	return j.mounts.Close()
}

// Privileged says that children get a user of their own.
func (j *Jailer) Privileged() bool { return j.mounts != nil }

// Layers are those that a jail gives a child.
func (j *Jailer) Layers() []string {
	own := []string{LayerUserSpace}
	if j.Privileged() {
		own = []string{LayerUser, LayerMounts}
	}
	return append(own, LayerNetwork, LayerIPC, LayerProcesses)
}

// onThread runs f on an operating system's thread that ends with it: what it changes of itself changes nothing else.
func onThread(f func() error) error {
	result := make(chan error, 1)
	freshThread(func() { result <- f() })
	return <-result
}

// freshThread runs f as onThread does, without waiting for it.
func freshThread(f func()) {
	go func() {
		runtime.LockOSThread() // Never unlocked: the thread ends with this goroutine instead of serving others.
		if unix.Gettid() == os.Getpid() {
			// The first thread never ends, and stands for all of the program in /proc. While this goroutine holds it another
			// gets none but a different one.
			defer runtime.UnlockOSThread()
			done := make(chan struct{})
			go func() {
				defer close(done)
				runtime.LockOSThread()
				f()
			}()
			<-done
			return
		}
		f()
	}()
}

// enter puts the calling thread, which must be a fresh one, into a jail whose files are those of cmd.
func (j *Jailer) enter(cmd *Command) error {
	if !j.Privileged() {
		return nil // By the flags of attributes.
	}
	if err := j.enterMounts(cmd); err != nil {
		return fmt.Errorf("make its root directory: %w", err)
	}
	return dropBoundingSet()
}

// dropBoundingSet takes all capabilities away from what this thread starts, whoever it is.
func dropBoundingSet() error {
	for c := uintptr(0); ; c++ {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) { // the first that this kernel does not know
			return nil
		}
		if err != nil {
			return fmt.Errorf("drop capabilities: %w", err)
		}
	}
}

// attributes are those of a child that is started by a thread which has entered the jail.
func (j *Jail) attributes(sys *syscall.SysProcAttr) {
	if j.Jailer.Privileged() {
		sys.Credential = &syscall.Credential{Uid: j.ID, Gid: j.ID}
		return
	}
	// Without a map of ids: it is nobody there, and has no capabilities once it runs another program. The daemon, which
	// made the namespace, may do with it what it could before.
	sys.Cloneflags = unix.CLONE_NEWUSER | spaces
}

// Observed are the layers that the kernel shows around a process, for one that may have been started by another daemon.
// Landlock and the choice of calls are not among them: the kernel does not show them.
func Observed(pid int) ([]string, error) {
	fields, err := status(pid)
	if err != nil {
		return nil, err
	}
	var seen []string
	differs := func(space string) (bool, error) {
		theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, space))
		if err != nil {
			return false, err
		}
		ours, err := os.Readlink("/proc/self/ns/" + space)
		return theirs != ours, err
	}
	for _, s := range [][2]string{
		{"user", LayerUserSpace}, {"mnt", LayerMounts}, {"net", LayerNetwork}, {"ipc", LayerIPC}, {"pid", LayerProcesses},
	} {
		own, err := differs(s[0])
		if err != nil {
			return nil, fmt.Errorf("look at process %d: %w", pid, err)
		}
		if own {
			seen = append(seen, s[1])
		}
	}
	owner, err := Owner(pid)
	if err != nil {
		return nil, err
	}
	if strings.Trim(fields["CapEff"]+fields["CapPrm"], "0") == "" && owner != uint32(os.Geteuid()) {
		seen = append(seen, LayerUser)
	}
	if fields["NoNewPrivs"] == "1" {
		seen = append(seen, LayerNoNewPriv)
	}
	if fields["Seccomp"] == "2" {
		seen = append(seen, LayerCalls)
	}
	slices.Sort(seen)
	return seen, nil
}

// Owner is the user that a process is of.
func Owner(pid int) (uint32, error) {
	fields, err := status(pid)
	if err != nil {
		return 0, err
	}
	uid, _, _ := strings.Cut(fields["Uid"], "\t")
	n, err := strconv.ParseUint(uid, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("look at process %d: %w", pid, err)
	}
	return uint32(n), nil
}

func status(pid int) (map[string]string, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return nil, fmt.Errorf("look at process %d: %w", pid, err)
	}
	fields := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok {
			fields[name] = strings.TrimSpace(value)
		}
	}
	return fields, nil
}
