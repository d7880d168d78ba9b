package proc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/testenv"
)

// envChild makes the test binary play a child: its value is what to do.
const envChild = "FORKD_TEST_CHILD"

func TestMain(m *testing.M) {
	if what := os.Getenv(envChild); what != "" {
		os.Exit(child(os.Stdout, strings.Split(what, " "))) //nolint:forbidigo // This process is the child, not the tests.
	}
	testenv.Main(m.Run)
}

// child does one thing and says how it went on standard output.
func child(out io.Writer, args []string) int {
	switch args[0] {
	case "exit":
		n, _ := strconv.Atoi(args[1])
		fmt.Fprintln(os.Stderr, "last words")
		return n
	case "wait":
		fmt.Fprintln(out, "waiting")
		// Not an empty select: with nothing else to wake it the runtime would call that a deadlock and exit.
		forever := make(chan os.Signal, 1)
		signal.Notify(forever, syscall.SIGUSR1)
		<-forever
		return 0
	case "tie": // starts a child of its own, says which, and dies without a word
		p, err := Start(context.Background(), &Command{
			Path: "/proc/self/exe", Env: []string{envChild + "=wait"}, Tied: args[1] == "true",
		})
		if err != nil {
			fmt.Fprintln(out, err)
			return 1
		}
		runtime.GC()
		fmt.Fprintln(out, p.PID(), p.StartTime())
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	case "flood":
		for {
			if _, err := fmt.Fprintln(out, strings.Repeat("x", 1000)); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 0
			}
		}
	case "open": // open FLAGS PATH…: tries each and says what happened.
		flags, _ := strconv.Atoi(args[1])
		for _, path := range args[2:] {
			f, err := os.OpenFile(path, flags, 0o600)
			fmt.Fprintf(out, "%s: %v\n", path, err)
			f.Close()
		}
	case "attack":
		attack(out, parsePrey(args[1:]))
	case "dial":
		_, err := net.Dial("tcp", args[1])
		fmt.Fprintln(out, err)
	case "huge": // whether it does without huge pages
		without, err := unix.PrctlRetInt(unix.PR_GET_THP_DISABLE, 0, 0, 0, 0)
		fmt.Fprintln(out, without, err)
	case "facts":
		sid, _ := unix.Getsid(0)
		priv, _ := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
		dir, _ := os.Getwd()
		data, _ := os.ReadFile("/proc/self/fd/3")
		fmt.Fprintf(out, "leader=%v nonewprivs=%d dir=%s env=%q fd3=%q\n",
			sid == os.Getpid(), priv, dir, os.Environ(), data)
	}
	return 0
}

func command(what string) *Command {
	return &Command{Path: "/proc/self/exe", Env: []string{envChild + "=" + what}}
}

func start1(t *testing.T, cmd *Command) *Process {
	t.Helper()
	if cmd.Path == "/proc/self/exe" {
		exe, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Path = exe
	}
	if cmd.Confine != nil {
		cmd.Confine.ReadOnly = append(cmd.Confine.ReadOnly, cmd.Path)
		for _, dir := range []string{"/usr", "/lib", "/lib64"} { // A test binary may be linked dynamically.
			if _, err := os.Stat(dir); err == nil {
				cmd.Confine.ReadOnly = append(cmd.Confine.ReadOnly, dir)
			}
		}
	}
	p, err := Start(t.Context(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Kill(); err != nil {
			t.Error(err)
		}
		p.Release()
	})
	return p
}

func wait(t *testing.T, p *Process) {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(testenv.Timeout(20 * time.Second)):
		t.Fatalf("process %d does not end; output %q", p.PID(), p.Output())
	}
}

func waitOutput(t *testing.T, p *Process, want string) {
	t.Helper()
	deadline := time.After(testenv.Timeout(20 * time.Second))
	for !strings.Contains(string(p.Output()), want) {
		select {
		case <-deadline:
			t.Fatalf("output %q never holds %q", p.Output(), want)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func TestEnds(t *testing.T) {
	t.Run("exit 0", func(t *testing.T) {
		p := start1(t, command("exit 0"))
		wait(t, p)
		if err := p.Err(); err != nil {
			t.Errorf("Err: %v, want nil", err)
		}
	})
	t.Run("exit 3", func(t *testing.T) {
		p := start1(t, command("exit 3"))
		wait(t, p)
		if err := p.Err(); err == nil || !strings.Contains(err.Error(), "status 3") || !strings.Contains(err.Error(), "last words") {
			t.Errorf("Err: %v, want the status and what the child said", err)
		}
	})
	t.Run("killed by another", func(t *testing.T) {
		p := start1(t, command("wait"))
		waitOutput(t, p, "waiting")
		if err := syscall.Kill(p.PID(), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		wait(t, p)
		if err := p.Err(); err == nil || !strings.Contains(err.Error(), "signal 9") {
			t.Errorf("Err: %v, want the signal", err)
		}
	})
	t.Run("killed by us", func(t *testing.T) {
		p := start1(t, command("wait"))
		waitOutput(t, p, "waiting")
		for range 2 {
			if err := p.Kill(); err != nil {
				t.Errorf("Kill: %v", err)
			}
		}
		if err := p.Err(); err != nil {
			t.Errorf("Err: %v, want nil after Kill", err)
		}
	})
}

// TestTied: a child that is tied ends with its daemon, and any other does not.
func TestTied(t *testing.T) {
	for _, tied := range []bool{true, false} {
		p := start1(t, command(fmt.Sprintf("tie %v", tied)))
		<-p.Done()
		var pid int
		var started uint64
		if _, err := fmt.Sscan(string(p.Output()), &pid, &started); err != nil {
			t.Fatalf("the daemon said %q: %v", p.Output(), err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		gone := false
		for !gone && ctx.Err() == nil {
			// It may be a zombie whose adopter is slow.
			at, err := startTime(pid)
			gone = err != nil || at != started || zombie(pid)
			if !tied {
				break
			}
		}
		if gone != tied {
			t.Errorf("tied %v: after its daemon's death it is gone: %v", tied, gone)
		}
		if err := Bury(ctx, pid, started); err != nil {
			t.Error(err)
		}
	}
	p := start1(t, &Command{Path: "/proc/self/exe", Env: []string{envChild + "=exit 0"}, Tied: true})
	<-p.Done()
	if err := p.Err(); err != nil {
		t.Errorf("a tied child that ends by itself: %v", err)
	}
}

func zombie(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(stat), ") ")
	return err == nil && strings.HasPrefix(rest, "Z")
}

func TestStartErrors(t *testing.T) {
	if _, err := Start(t.Context(), &Command{Path: "/nowhere/prog"}); err == nil || !strings.Contains(err.Error(), "prog") {
		t.Errorf("a program that is not there: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Start(ctx, command("exit 0")); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
}

// TestContextBoundsTheCallOnly: a request's end must not end the machine it started.
func TestContextBoundsTheCallOnly(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cmd := command("wait")
	cmd.Path = exe
	p, err := Start(ctx, cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Release()
	defer func() {
		if err := p.Kill(); err != nil {
			t.Error(err)
		}
	}()
	cancel()
	waitOutput(t, p, "waiting")
	select {
	case <-p.Done():
		t.Error("the child ended with the context of the call")
	default:
	}
}

func TestSurroundings(t *testing.T) {
	f := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(f, []byte("given"), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	cmd := command("facts")
	cmd.Files = []*os.File{file}
	p := start1(t, cmd)
	wait(t, p)
	want := fmt.Sprintf("leader=true nonewprivs=1 dir=/ env=[%q] fd3=%q\n", envChild+"=facts", "given")
	if got := string(p.Output()); got != want {
		t.Errorf("child says %s want %s", got, want)
	}
}

// TestLimits: a core file would hold a guest's memory.
func TestLimits(t *testing.T) {
	cmd := command("wait")
	cmd.MaxFiles = 77
	p := start1(t, cmd)
	for resource, want := range map[int]uint64{unix.RLIMIT_CORE: 0, unix.RLIMIT_NOFILE: 77} {
		var got unix.Rlimit
		if err := unix.Prlimit(p.PID(), resource, nil, &got); err != nil {
			t.Fatal(err)
		}
		if got.Cur != want || got.Max != want {
			t.Errorf("limit %d is %+v, want %d", resource, got, want)
		}
	}
}

// TestOutputIsBounded: a child that floods its output neither blocks nor fills memory, and needs no reader.
func TestOutputIsBounded(t *testing.T) {
	cmd := command("flood")
	cmd.OutputMax = 10_000
	p := start1(t, cmd)
	wait(t, p)
	if n := len(p.Output()); n > 10_000 || n < 9_000 { // A write that does not fit is refused as a whole.
		t.Errorf("%d bytes kept, want at most 10000 and nearly that", n)
	}
	p.Release()
	if len(p.Output()) == 0 {
		t.Error("no output after Release")
	}
}

// TestConfined is invariant 2: a confined child cannot open for writing what it may read, nor anything else at all.
func TestConfined(t *testing.T) {
	if ok, why := ConfinementAvailable(); !ok {
		testenv.Missing(t, "landlock", why)
	}
	dir := t.TempDir()
	backing, own, other := filepath.Join(dir, "backing"), filepath.Join(dir, "own"), filepath.Join(dir, "other")
	for _, f := range []string{backing, own, other} {
		if err := os.WriteFile(f, []byte("x"), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		flags int
		path  string
		ok    bool
	}{
		"read own":          {os.O_RDONLY, own, true},
		"write own":         {os.O_RDWR, own, true},
		"truncate own":      {os.O_RDWR | os.O_TRUNC, own, true},
		"read backing":      {os.O_RDONLY, backing, true},
		"write backing":     {os.O_WRONLY, backing, false},
		"read-write":        {os.O_RDWR, backing, false},
		"truncate backing":  {os.O_WRONLY | os.O_TRUNC, backing, false},
		"append to backing": {os.O_WRONLY | os.O_APPEND, backing, false},
		"read other":        {os.O_RDONLY, other, false},
		"write other":       {os.O_RDWR, other, false},
		"create":            {os.O_RDWR | os.O_CREATE, filepath.Join(dir, "new"), false},
		"list directory":    {os.O_RDONLY, dir, false},
		"passwords":         {os.O_RDONLY, "/etc/passwd", false},
		"processes":         {os.O_RDONLY, "/proc/1/status", false},
		"around by link":    {os.O_RDWR, "/proc/self/root" + backing, false},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := command(fmt.Sprintf("open %d %s", c.flags, c.path))
			cmd.Confine = &Confine{ReadOnly: []string{backing}, ReadWrite: []string{own}}
			p := start1(t, cmd)
			wait(t, p)
			if got := strings.HasSuffix(string(p.Output()), ": <nil>\n"); got != c.ok {
				t.Errorf("allowed: %v, want %v: %s", got, c.ok, p.Output())
			}
		})
	}
	if _, err := os.ReadFile(other); err != nil {
		t.Errorf("the daemon itself has become confined: %v", err)
	}
}

// TestConfinedHasNoTCP: not even to a service of the host's own.
func TestConfinedHasNoTCP(t *testing.T) {
	if abi, err := landlockABI(); err != nil || abi < 4 {
		testenv.Missing(t, "landlock", fmt.Sprintf("version %d cannot restrict networks", abi))
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for confined, want := range map[bool]string{false: "<nil>", true: "permission denied"} {
		cmd := command("dial " + l.Addr().String())
		if confined {
			cmd.Confine = &Confine{}
		}
		p := start1(t, cmd)
		wait(t, p)
		if got := string(p.Output()); !strings.Contains(got, want) {
			t.Errorf("confined %v: %s want %s", confined, got, want)
		}
	}
}

func TestConfineMissingFile(t *testing.T) {
	if ok, why := ConfinementAvailable(); !ok {
		testenv.Missing(t, "landlock", why)
	}
	cmd := &Command{Path: "/bin/true", Confine: &Confine{ReadWrite: []string{"/nowhere/disk"}}}
	if _, err := Start(t.Context(), cmd); err == nil || !strings.Contains(err.Error(), "/nowhere/disk") {
		t.Errorf("error %v, want one naming the file", err)
	}
}

func TestBury(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "sleep", "1000") // Started by "an earlier daemon": not through this package.
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	reaped := make(chan error, 1)
	go func() { reaped <- cmd.Wait() }()
	pid := cmd.Process.Pid
	started, err := startTime(pid)
	if err != nil {
		t.Fatal(err)
	}
	if err := Bury(t.Context(), pid, started+1); err != nil {
		t.Errorf("another process with the same number: %v", err)
	}
	if err := syscall.Kill(pid, 0); err != nil {
		t.Fatal("buried a process that was not meant")
	}
	if err := Bury(t.Context(), pid, started); err != nil {
		t.Errorf("Bury: %v", err)
	}
	if err := <-reaped; err == nil {
		t.Error("the process ended by itself")
	}
	if err := Bury(t.Context(), pid, started); err != nil {
		t.Errorf("Bury again: %v", err)
	}
	for _, pid := range []int{0, -1, 1} {
		if err := Bury(t.Context(), pid, 0); err == nil {
			t.Errorf("Bury of process %d: no error", pid)
		}
	}
}

func FuzzStartTime(f *testing.F) {
	f.Add("1234 (a b) c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20")
	f.Add("")
	f.Add(")")
	f.Add("1 (x) S")
	f.Fuzz(func(_ *testing.T, stat string) { _, _ = parseStartTime(stat) })
}

func TestParseStartTime(t *testing.T) {
	got, err := parseStartTime("1234 (a b) c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20")
	if err != nil || got != 4711 {
		t.Errorf("%d, %v; want 4711", got, err)
	}
}
