// Command forkd-agent is PID 1 of a guest: see package agent.
package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent"
	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/contexts"
	"forkd.dev/forkd/internal/agent/files"
	"forkd.dev/forkd/internal/agent/network"
	"forkd.dev/forkd/internal/agent/oom"
	"forkd.dev/forkd/internal/agent/probe"
	"forkd.dev/forkd/internal/agent/process"
	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/agent/systemd"
)

// version is set by the build.
var version = "dev"

func main() {
	if os.Args[0] == systemd.StageName {
		fmt.Fprintf(os.Stderr, "forkd-agent: start systemd: %v\n", systemd.Stage())
		os.Exit(1)
	}
	if os.Getpid() != 1 {
		fmt.Fprintf(os.Stderr, "forkd-agent %s is started by a guest's kernel as its first process; forkd does all of that\n", version)
		os.Exit(2)
	}
	defer func() {
		// A PID 1 that ends is a kernel panic: rather say why and switch off.
		if r := recover(); r != nil {
			fmt.Fprintf(os.Stderr, "forkd-agent: panic: %v\n%s", r, debug.Stack())
			off()
		}
	}()
	withSettings()
	tune()
	fmt.Fprintf(os.Stderr, "forkd-agent: %v\n", run(context.Background()))
	off()
}

// settings of the runtime that can be given in the environment only. A fork runs everything for the first time and
// therefore slowly; the runtime would take that for loops to interrupt by a signal, whose handling is the next thing to
// run for the first time. Nor should the first thing a goroutine does there be to move to a smaller stack.
const settings = "asyncpreemptoff=1,gcshrinkstackoff=1"

// withSettings starts the program again with settings. Without them it works as well, only slower.
func withSettings() {
	if os.Getenv("GODEBUG") != settings {
		// The runtime gives itself the hard limit and those that it starts what it began with: the customary soft limit, for
		// programs that loop over all descriptors or use select, and a hard one to which those that know better may go.
		_ = syscall.Setrlimit(unix.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 1024, Max: 524288})
		_ = syscall.Exec("/proc/self/exe", os.Args, []string{"GODEBUG=" + settings})
		_ = syscall.Exec("/init", os.Args, []string{"GODEBUG=" + settings}) // proc is not mounted yet, usually
	}
}

func off() {
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

// tune keeps the agent small, and quiet in a fork: no collection of garbage by the clock, which jumps there, and no
// looking for changed CPU limits.
func tune() {
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(14 << 20)
	runtime.GOMAXPROCS(min(runtime.NumCPU(), 2))
	// PID 1 must not die of a signal. Not ignored but caught, because children would inherit ignoring.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGPIPE,
		syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM)
}

// run serves the host until that fails.
func run(ctx context.Context) error {
	console := os.Stderr
	phase, port, err := agent.Boot(ctx, console)
	if err != nil {
		return fmt.Errorf("boot: %w", err)
	}
	accounts := account.New("/", account.Defaults{})
	groups := &agent.Cgroups{}
	if phase == agent.PhaseReady {
		if groups, err = agent.SetUp(accounts); err != nil {
			return fmt.Errorf("set up the guest: %w", err)
		}
	}
	threads := lowerMonitor()
	started := time.Now()
	reaper := reap.NewInit()
	go reaper.Run(ctx)
	interpreters := contexts.New(contexts.Config{
		Reaper: reaper, Accounts: accounts, CgroupDir: groups.Context,
		StepClock:   agent.StepClock,
		OutOfMemory: func(pid int) bool { _, ok := oom.Killed(pid, started); return ok },
		Gone: func(id string) {
			if err := groups.RemoveContext(ctx, id); err != nil {
				fmt.Fprintf(console, "forkd-agent: clean up after context %s: %v\n", id, err)
			}
		},
	})
	a := agent.New(agent.Config{
		Version: version, Phase: phase, System: agent.RealSystem(), Console: console,
		Reaper: reaper, Accounts: accounts, Cgroups: groups, Contexts: interpreters, Begin: threads.level,
		Services: []agent.Service{
			process.New(process.Config{
				Reaper: reaper, Accounts: accounts, Group: func() (process.Group, error) { return groups.Process() },
			}),
			files.New(accounts),
			interpreters,
			probe.Service{},
			network.NewService(groups.PIDs),
		},
	}, bootID())
	return a.Serve(ctx, port)
}

func bootID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
