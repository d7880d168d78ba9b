package reap

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/testenv"
)

// envInit makes the test binary the init of a PID namespace.
const envInit = "FORKD_TEST_REAP_INIT"

func TestMain(m *testing.M) {
	if os.Getenv(envInit) != "" {
		os.Exit(beInit()) //nolint:forbidigo // it is a program of its own
	}
	testenv.Main(m.Run)
}

func shell(script string) *Command {
	return &Command{Path: "/bin/sh", Args: []string{"sh", "-c", script}, Files: []int{0, 1, 2}, Sys: &syscall.SysProcAttr{Setsid: true}}
}

func TestState(t *testing.T) {
	r := New()
	defer r.Wait()
	for script, want := range map[string]struct {
		text   string
		code   int
		signal syscall.Signal
	}{
		"exit 0":          {"exit status 0", 0, 0},
		"exit 3":          {"exit status 3", 3, 0},
		"kill -KILL $$":   {"signal: killed", -1, syscall.SIGKILL},
		"kill -SEGV $$":   {"signal: segmentation fault", -1, syscall.SIGSEGV},
		"kill -TERM $$":   {"signal: terminated", -1, syscall.SIGTERM},
		"kill -USR1 $$":   {"signal: user defined signal 1", -1, syscall.SIGUSR1},
		"exec /bin/false": {"exit status 1", 1, 0},
	} {
		c, err := r.Start(t.Context(), shell("ulimit -c 0; "+script))
		if err != nil {
			t.Fatal(err)
		}
		<-c.Done()
		if s := c.State(); s.String() != want.text || s.ExitCode() != want.code || s.Signal() != want.signal {
			t.Errorf("%s: %v %d %v", script, s, s.ExitCode(), s.Signal())
		}
		if err := c.Signal(syscall.SIGKILL); !errors.Is(err, os.ErrProcessDone) {
			t.Errorf("signal after the end: %v", err)
		}
	}
}

func TestStartFails(t *testing.T) {
	r := New()
	defer r.Wait()
	_, err := r.Start(t.Context(), &Command{Path: "/no/such", Args: []string{"x"}})
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
}

func TestSignalGroup(t *testing.T) {
	r := New()
	defer r.Wait()
	c, err := r.Start(t.Context(), shell("sleep 100 & wait"))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SignalGroup(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-c.Done()
}

func TestPause(t *testing.T) {
	r := New()
	defer r.Wait()
	running, err := r.Start(t.Context(), shell("exec sleep 100"))
	if err != nil {
		t.Fatal(err)
	}
	resume, err := r.Pause(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	started := make(chan *Child, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		c, err := r.Start(t.Context(), shell("exit 0"))
		if err != nil {
			t.Error(err)
		}
		started <- c
	})
	// Signals and exits go on.
	if err := running.Signal(syscall.SIGKILL); err != nil {
		t.Error(err)
	}
	<-running.Done()
	select {
	case <-started:
		t.Error("it started while paused")
	default:
	}
	// Nor does one whose caller left meanwhile, at any time.
	gone, leave := context.WithCancel(t.Context())
	var left sync.WaitGroup
	left.Go(func() {
		if _, err := r.Start(gone, shell("exit 0")); !errors.Is(err, context.Canceled) {
			t.Errorf("started for nobody: %v", err)
		}
	})
	<-time.After(5 * time.Millisecond) // it waits by then, or need not
	leave()
	left.Wait()
	resume()
	<-(<-started).Done()
	wg.Wait()
}

// TestInit runs a reaper as PID 1 of a namespace with hundreds of children that end at once, and orphans.
func TestInit(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(60*time.Second))
	defer cancel()
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), envInit+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	if os.Getuid() != 0 {
		// Asked first without mappings: where it is refused, Go's fork leaves the pipe for the mappings open.
		probe := exec.CommandContext(ctx, "/bin/true")
		probe.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER}
		if err := probe.Run(); err != nil {
			t.Skipf("no user namespace here: %v", err)
		}
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EINVAL) {
		t.Skipf("no PID namespace here: %v", err)
	}
	if err != nil || !strings.HasSuffix(string(out), "ok\n") {
		t.Errorf("%v: %s", err, out)
	}
}

// beInit is PID 1.
func beInit() int {
	say := bufio.NewWriter(os.Stdout)
	defer say.Flush()
	fail := func(text string) int {
		_, _ = say.WriteString(text + "\n")
		return 1
	}
	if os.Getpid() != 1 {
		return fail("pid " + strconv.Itoa(os.Getpid()))
	}
	r := NewInit()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var running sync.WaitGroup
	running.Go(func() { r.Run(ctx) })
	var wg sync.WaitGroup
	bad := make(chan string, 1000)
	for range 8 {
		wg.Go(func() {
			for i := range 50 {
				code := i % 7
				// Each leaves an orphan that ends a little later.
				c, err := r.Start(ctx, shell("(exec sleep 0.0"+strconv.Itoa(code)+") & exit "+strconv.Itoa(code)))
				if err != nil {
					bad <- err.Error()
					return
				}
				<-c.Done()
				if c.State().ExitCode() != code {
					bad <- c.State().String()
				}
				if _, err := r.Start(ctx, &Command{Path: "/no/such", Args: []string{"x"}}); !errors.Is(err, os.ErrNotExist) {
					bad <- err.Error()
				}
			}
		})
	}
	wg.Wait()
	// All orphans are collected too: no child is left.
	for deadline := time.Now().Add(20 * time.Second); ; {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if errors.Is(err, unix.ECHILD) {
			break
		}
		if time.Now().After(deadline) {
			return fail("children are left")
		}
		<-time.After(5 * time.Millisecond)
	}
	cancel()
	running.Wait()
	if len(bad) > 0 {
		return fail(<-bad)
	}
	_, _ = say.WriteString("ok\n")
	return 0
}
