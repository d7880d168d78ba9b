package proc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/cgroup"
)

// defaultOutputMax is enough for the complaints of a program that is not meant to talk.
const defaultOutputMax = 64 << 10

// Command describes a child to start; plain data.
type Command struct {
	Path string   // absolute
	Args []string // without the name
	Env  []string // the whole environment; nothing is inherited
	Dir  string   // working directory; empty: the root
	// Files become the child's descriptors 3 and up. The caller keeps and closes its own copies.
	Files []*os.File
	// OutputMax bounds what is kept of standard output and error together, from the beginning; 0 means 64 KiB.
	OutputMax int64
	// Confine restricts the child where ConfinementAvailable says so; elsewhere it only gets no_new_privs.
	Confine *Confine
	// Jail puts the child into surroundings of its own; nil leaves it in the daemon's. Its Confine names the files there.
	Jail *Jail
	// RefuseCalls leaves the child without those system calls that a program that only computes, and uses the files and
	// sockets it was given, does not need.
	RefuseCalls bool
	// Dials is for a child that talks to the Internet, in the daemon's own network: RefuseCalls lets it make sockets for that
	// and no others, and Confine does not refuse TCP. It makes no sense with Jail, whose network is empty.
	Dials bool
	// Bare leaves the child without any capability, as the user and the only group ID, unless that is 0. A daemon that is not
	// root has none to leave out and no other user: there it changes nothing.
	Bare *Bare
	// Name is what the child finds as its own, in the place of Path.
	Name string
	// Cgroup is the control group that the child is put into; nil: the daemon's. The caller closes it. Where it cannot be born
	// there it is there when Process.Joined returns.
	Cgroup *cgroup.Entry
	// SmallPages has the child do without huge pages, whatever it asks the kernel for. On a host that is a virtual machine, and
	// has given what is free back to its own host, each takes 4 ms to clear.
	SmallPages bool
	// MaxFiles bounds the child's descriptors; 0 leaves the daemon's limit.
	MaxFiles uint64
	// Tied has the kernel kill the child when the daemon dies. It occupies a thread of the daemon while the child runs, so
	// it is for a short question to a program that would otherwise wait for ever.
	Tied bool

	withoutLandlock bool // in tests, which look at one layer at a time
}

// Bare is what a child is that is nobody.
type Bare struct{ ID uint32 }

// Confine names the only files a child may open, beyond descriptors it is given and its own /proc entries named
// there. A directory stands for everything below it. Creating and removing files is never allowed, nor is TCP.
type Confine struct {
	ReadOnly  []string // also executable
	ReadWrite []string
}

// ConfinementAvailable says whether this kernel can confine a child, and if not, why.
func ConfinementAvailable() (bool, string) {
	abi, err := landlockABI()
	switch {
	case errors.Is(err, unix.ENOSYS):
		return false, "this kernel has no Landlock (Linux 5.13 or newer has it)"
	case errors.Is(err, unix.EOPNOTSUPP):
		return false, "Landlock is compiled in but off: add landlock to the lsm= list on the kernel's command line"
	case err != nil:
		return false, "Landlock cannot be used: " + err.Error()
	}
	return true, fmt.Sprintf("Landlock version %d", abi)
}

// Start starts a child in a session of its own. ctx bounds the call only. Unless it is Tied the child does not end with
// the daemon. Its output needs no reader: see Process.Output.
func Start(ctx context.Context, cmd *Command) (*Process, error) {
	p, err := start(ctx, cmd)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", filepath.Base(cmd.Path), err)
	}
	return p, nil
}

func start(ctx context.Context, cmd *Command) (*Process, error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	output, err := newOutput(cmd.OutputMax)
	if err != nil {
		return nil, err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		_ = output.close()
		return nil, err
	}
	defer func() { _ = null.Close() }()
	files := append([]*os.File{null, output.file, output.file}, cmd.Files...)
	over := make(chan struct{})
	child, pidfd, err := spawn(cmd, files, over)
	if err != nil {
		_ = output.close()
		return nil, err
	}
	p, err := hold(child, pidfd, output, cmd)
	if err == nil {
		err = p.join(cmd)
	}
	if err != nil || !cmd.Tied {
		close(over)
		return p, err
	}
	go func() {
		defer close(over)
		<-p.Done()
	}()
	return p, nil
}

type spawned struct {
	child *os.Process
	pidfd int
	err   error
}

// spawn starts the child from a thread made for it: Landlock and no_new_privs belong to threads, are inherited by
// children and can never be taken off again. For the kernel it is that thread whose death ends a tied child, so it stays
// until over is closed.
func spawn(cmd *Command, files []*os.File, over <-chan struct{}) (*os.Process, int, error) {
	result := make(chan spawned, 1)
	freshThread(func() {
		s := spawnHere(cmd, files)
		result <- s
		if cmd.Tied && s.err == nil {
			<-over
		}
	})
	s := <-result
	return s.child, s.pidfd, s.err
}

// joinsLate says that a child of a control group of version 2 is put into it after its start: one that is to be refused
// calls cannot be started by the only call that makes it there, for a filter cannot see what else that call is asked for.
func (cmd *Command) joinsLate() bool {
	return cmd.Cgroup != nil && cmd.Cgroup.Dir != nil && cmd.RefuseCalls
}

// join puts a child into its group that was not born there, beside what the child does to come up: the kernel may wait some
// milliseconds for all processors to have seen it. See Process.Joined.
func (p *Process) join(cmd *Command) error {
	if !cmd.joinsLate() {
		return nil
	}
	group, err := cmd.Cgroup.Share()
	if err != nil {
		return errors.Join(err, p.Kill())
	}
	p.joined = make(chan struct{})
	go func() {
		defer close(p.joined)
		defer group.Close()
		if err := group.Enter(p.pid); err != nil {
			p.joinErr = errors.Join(err, p.Kill())
		}
	}()
	return nil
}

// Joined waits until the child is in its control group; then nothing that it does is done outside. On error it was ended.
func (p *Process) Joined() error {
	if p.joined == nil {
		return nil
	}
	<-p.joined
	return p.joinErr
}

func confinement(c *Confine, dials bool) (*os.File, error) {
	if c == nil {
		return nil, nil
	}
	abi, err := landlockABI()
	if err != nil {
		return nil, nil //nolint:nilerr // Stated by ConfinementAvailable, and shown to the user by whoever asked.
	}
	return ruleset(c, abi, dials)
}

// restrict takes from the thread what the child is not to have, in an order in which each step can still be made.
func restrict(cmd *Command) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	if cmd.Jail != nil {
		if err := cmd.Jail.Jailer.enter(cmd); err != nil {
			return fmt.Errorf("jail: %w", err)
		}
	}
	// In the jail, whose files these are; and not before, for it would forbid to mount.
	var confine *Confine
	if !cmd.withoutLandlock {
		confine = cmd.Confine
	}
	if cmd.Bare != nil && os.Geteuid() == 0 {
		if err := dropBoundingSet(); err != nil {
			return err
		}
	}
	rules, err := confinement(confine, cmd.Dials)
	if err != nil {
		return fmt.Errorf("confine: %w", err)
	}
	if rules != nil {
		err := restrictThread(rules)
		_ = rules.Close()
		if err != nil {
			return fmt.Errorf("confine: %w", err)
		}
	}
	if cmd.RefuseCalls {
		return refuseCalls(callFilter(cmd.Jail != nil && !cmd.Jail.Jailer.Privileged(), cmd.Dials))
	}
	return nil
}

func spawnHere(cmd *Command, files []*os.File) spawned {
	// First, for it needs what is taken away next. The thread moves alone, and its child is born where it is then.
	if err := cmd.Cgroup.EnterThread(); err != nil {
		return spawned{err: err}
	}
	if err := restrict(cmd); err != nil {
		return spawned{err: err}
	}
	dir := cmd.Dir
	if dir == "" {
		dir = "/"
	}
	env := cmd.Env
	if env == nil {
		env = []string{} // os.StartProcess takes nil for the daemon's own, which may hold secrets.
	}
	pidfd := -1
	sys := &syscall.SysProcAttr{Setsid: true, PidFD: &pidfd}
	if cmd.Tied {
		sys.Pdeathsig = syscall.SIGKILL
	}
	if cmd.Cgroup != nil && cmd.Cgroup.Dir != nil && !cmd.joinsLate() {
		sys.UseCgroupFD, sys.CgroupFD = true, int(cmd.Cgroup.Dir.Fd())
	}
	if cmd.Jail != nil {
		cmd.Jail.attributes(sys)
	}
	if cmd.Bare != nil && cmd.Bare.ID != 0 && os.Geteuid() == 0 {
		sys.Credential = &syscall.Credential{Uid: cmd.Bare.ID, Gid: cmd.Bare.ID}
	}
	// What this program itself was started with: all that it opens is closed for children already. Linux before 5.11 cannot.
	_ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	if cmd.SmallPages {
		defer smallPages()()
	}
	child, err := os.StartProcess(cmd.Path, append([]string{cmp.Or(cmd.Name, cmd.Path)}, cmd.Args...), &os.ProcAttr{
		Dir:   dir,
		Env:   env,
		Files: files,
		Sys:   sys,
	})
	if err != nil {
		return spawned{pidfd: -1, err: err}
	}
	if err := limit(child.Pid, cmd); err != nil {
		_ = child.Kill()
		_, _ = child.Wait()
		_ = unix.Close(pidfd)
		return spawned{pidfd: -1, err: fmt.Errorf("set resource limit: %w", err)}
	}
	return spawned{child, pidfd, nil}
}

// id is the user that the child is, 0 if that is the daemon's.
func (cmd *Command) id() uint32 {
	switch {
	case cmd.Jail != nil:
		return cmd.Jail.ID
	case cmd.Bare != nil:
		return cmd.Bare.ID
	}
	return 0
}

// limit bounds a child that nobody waits for yet. It runs on the thread that made the child.
func limit(pid int, cmd *Command) error {
	// A core file would hold a guest's memory.
	limits := map[int]unix.Rlimit{unix.RLIMIT_CORE: {}}
	if cmd.MaxFiles > 0 {
		limits[unix.RLIMIT_NOFILE] = unix.Rlimit{Cur: cmd.MaxFiles, Max: cmd.MaxFiles}
	}
	for resource, limit := range limits {
		err := unix.Prlimit(pid, resource, &limit, nil)
		if errors.Is(err, unix.EPERM) && cmd.id() != 0 {
			// The limits of another user's process are for those with CAP_SYS_RESOURCE, which not every root has.
			if err = becomeThread(cmd.id()); err == nil {
				err = unix.Prlimit(pid, resource, &limit, nil)
			}
		}
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
	}
	return nil
}
