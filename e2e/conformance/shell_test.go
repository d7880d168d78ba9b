package conformance

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// console is the program on a terminal of its own, with a person's hands and eyes.
type console struct {
	g             *guest
	cmd           *exec.Cmd
	master, slave *os.File
	before        unix.Termios
	ended         chan struct{}

	mu   sync.Mutex
	text bytes.Buffer
	more chan struct{} // closed by the next text
	seen int
}

// console runs the program on a terminal of 80 by 24.
func (g *guest) console(env []string, args ...string) *console {
	g.t.Helper()
	master, slave, err := openPTY()
	if err != nil {
		g.t.Fatal(err)
	}
	if err := setSize(master, 80, 24); err != nil {
		g.t.Fatal(err)
	}
	c := &console{g: g, master: master, slave: slave, ended: make(chan struct{}), more: make(chan struct{})}
	if c.before, err = settings(slave); err != nil {
		g.t.Fatal(err)
	}
	c.cmd = command(context.WithoutCancel(g.ctx), testenv.Binary(g.t), args...)
	c.cmd.Env = append(append(c.cmd.Env, "TERM=xterm-256color", "COLORTERM=truecolor"), env...)
	c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = slave, slave, slave
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := c.cmd.Start(); err != nil {
		g.t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		buf := make([]byte, 32<<10)
		for {
			n, err := master.Read(buf)
			c.mu.Lock()
			c.text.Write(buf[:n])
			close(c.more)
			c.more = make(chan struct{})
			c.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	go func() {
		_ = c.cmd.Wait()
		close(c.ended)
	}()
	g.t.Cleanup(func() {
		_ = c.cmd.Process.Kill()
		<-c.ended
		_ = slave.Close()
		_ = master.SetReadDeadline(time.Unix(1, 0))
		<-read
		_ = master.Close()
	})
	return c
}

func (c *console) all() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.text.String()
}

// expect waits until a text appears after what was expected before.
func (c *console) expect(text string) *console {
	c.g.t.Helper()
	for {
		c.mu.Lock()
		rest, more := c.text.String()[c.seen:], c.more
		if i := strings.Index(rest, text); i >= 0 {
			c.seen += i + len(text)
			c.mu.Unlock()
			return c
		}
		c.mu.Unlock()
		select {
		case <-more:
		case <-c.g.ctx.Done():
			c.g.t.Fatalf("no %q on the terminal after %q", text, rest[max(0, len(rest)-2000):])
		}
	}
}

// typed presses keys.
func (c *console) typed(text string) *console {
	c.g.t.Helper()
	for b := []byte(text); len(b) > 0; {
		n, err := c.master.Write(b)
		if err != nil {
			c.g.t.Fatal(err)
		}
		b = b[n:]
	}
	return c
}

// run types a command and waits for what it prints, which must not be in the command itself.
func (c *console) run(command, prints string) *console {
	c.g.t.Helper()
	return c.typed(command + "\n").expect(prints)
}

// exit waits for the end of the program, and holds the terminal against what it was.
func (c *console) exit(code int) *console {
	c.g.t.Helper()
	select {
	case <-c.ended:
	case <-c.g.ctx.Done():
		c.g.t.Fatalf("it does not end; terminal %q", c.all())
	}
	if got := c.cmd.ProcessState.ExitCode(); got != code {
		c.g.t.Errorf("exit code %d, want %d; terminal %q", got, code, c.all())
	}
	c.restored()
	return c
}

func (c *console) restored() {
	c.g.t.Helper()
	after, err := settings(c.slave)
	if err != nil {
		c.g.t.Fatal(err)
	}
	if after != c.before {
		c.g.t.Errorf("the terminal is not as it was: %+v, want %+v", after, c.before)
	}
}

const prompt = "ready> "

// shell opens a shell and waits for its prompt.
func (g *guest) shell(env []string, args ...string) *console {
	g.t.Helper()
	c := g.console(env, append([]string{"shell", "-e", "HISTFILE=", g.id}, args...)...)
	c.expect("# ")
	return c.run("PS1='rea''dy> '; bind 'set enable-bracketed-paste off'", prompt)
}

// another is a sandbox of the test's own, of the snapshot of that tag.
func (g *guest) another(tag string) *guest {
	g.t.Helper()
	cmd := command(g.ctx, testenv.Binary(g.t), "fork", tag)
	out, err := cmd.Output()
	if err != nil {
		g.t.Fatalf("fork: %v", err)
	}
	id := strings.TrimSpace(string(out))
	g.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(g.t.Context()), testenv.Timeout(10*time.Second))
		defer cancel()
		if err := g.c.Kill(ctx, id); err != nil {
			g.t.Error(err)
		}
	})
	return &guest{t: g.t, id: id, c: g.c, Guest: g.c.Guest(id), ctx: g.ctx}
}

// forkd runs a command that must succeed.
func (g *guest) cli(args ...string) string {
	g.t.Helper()
	var stderr bytes.Buffer
	cmd := command(g.ctx, testenv.Binary(g.t), args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		g.t.Fatalf("forkd %v: %v: %s%s", args, err, out, &stderr)
	}
	return string(out)
}

// TestLeftRunning has the command line's side of processes that nobody is attached to.
func TestLeftRunning(t *testing.T) {
	runCases(t, []kase{
		{"cli", "exec -d, ps, logs, attach, signal", func(t *testing.T, g *guest) {
			pid := strings.TrimSpace(g.cli("exec", "-d", "--tag", "left", g.id, "--", "sh", "-c", "echo one; trap 'echo bye; exit 3' TERM; while :; do sleep 0.05; done"))
			if ps := g.cli("ps", g.id); !strings.Contains(ps, pid) || !strings.Contains(ps, "left") {
				t.Errorf("ps: %s", ps)
			}
			g.eventually("it has printed", func() bool { return g.cli("logs", g.id, "left") == "one\n" })
			g.cli("signal", g.id, "left")
			cmd := command(g.ctx, testenv.Binary(t), "attach", g.id, pid)
			out, err := cmd.Output()
			exit, ok := errors.AsType[*exec.ExitError](err)
			if !ok || exit.ExitCode() != 3 || string(out) != "one\nbye\n" {
				t.Errorf("attach: %q, %v", out, err)
			}
			if ps := g.cli("ps", "-a", g.id); !strings.Contains(ps, "exit status 3") {
				t.Errorf("ps -a: %s", ps)
			}
			want(t, "last line", g.cli("logs", "-n", "1", g.id, "left"), "bye\n")
		}},
		{"cli", "logs -f follows a process", func(t *testing.T, g *guest) {
			g.cli("exec", "-d", "--tag", "followed", g.id, "--", "sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.2; done")
			want(t, "logs", g.cli("logs", "-f", g.id, "followed"), "1\n2\n3\n")
		}},
		{"cli", "logs -f follows the console", func(t *testing.T, g *guest) {
			c := g.console(nil, "logs", "-f", "-n", "1", g.id)
			g.sh("sleep 0.5; echo of-the-test > /dev/console")
			c.expect("of-the-test").typed("\x03").exit(0)
		}},
		{"cli", "a process is inherited through a branch", func(t *testing.T, g *guest) {
			own := g.another(parentTag)
			own.cli("exec", "-d", "-i", "--tag", "inherited", own.id, "--", "sh", "-c", "echo before; read x; echo got $x")
			own.eventually("it has printed", func() bool { return own.cli("logs", own.id, "inherited") == "before\n" })
			own.cli("branch", own.id, "-t", "conformance-branch")
			t.Cleanup(func() {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), testenv.Timeout(10*time.Second))
				defer cancel()
				_ = command(ctx, testenv.Binary(t), "rmi", "--force", "conformance-branch").Run()
			})
			child := g.another("conformance-branch")
			for _, where := range []*guest{child, own} {
				cmd := command(g.ctx, testenv.Binary(t), "attach", "-i", where.id, "inherited")
				cmd.Stdin = strings.NewReader(where.id + "\n")
				out, err := cmd.Output()
				if err != nil || string(out) != "before\ngot "+where.id+"\n" {
					t.Errorf("in %s: %q, %v", where.id, out, err)
				}
			}
		}},
		{"shell", "an image without a shell", func(t *testing.T, g *guest) {
			own := g.another(parentTag)
			own.sh("mkdir /hidden; mv /usr/bin/bash /usr/bin/sh /usr/bin/dash /usr/bin/rbash /hidden/ 2>/dev/null; true")
			cmd := command(g.ctx, testenv.Binary(t), "shell", own.id)
			out, err := cmd.CombinedOutput()
			exit, ok := errors.AsType[*exec.ExitError](err)
			if !ok || exit.ExitCode() != 125 || !strings.Contains(string(out), "no shell") || !strings.Contains(string(out), "busybox") {
				t.Errorf("%v: %s", err, out)
			}
		}},
	})
}

// TestShell drives forkd shell as a person would.
func TestShell(t *testing.T) {
	pidOf := func(c *console) uint32 {
		m := regexp.MustCompile(`forkd attach \S+ (\d+)`).FindStringSubmatch(c.all())
		if m == nil {
			c.g.t.Fatalf("no pid in %q", c.all())
		}
		n, err := strconv.Atoi(m[1])
		if err != nil {
			c.g.t.Fatal(err)
		}
		return uint32(n)
	}
	running := func(g *guest, pid uint32) *api.Process {
		list, err := g.c.Processes(g.ctx, g.id, false)
		if err != nil {
			g.t.Fatal(err)
		}
		for _, p := range list {
			if p.PID == pid {
				return &p
			}
		}
		return nil
	}
	runCases(t, []kase{
		{"shell", "exit code and banner", func(_ *testing.T, g *guest) {
			c := g.console(nil, "shell", g.id)
			c.expect("leave it running: ctrl-p,ctrl-q").expect("# ")
			c.typed("exit 7\n").exit(7)
		}},
		{"shell", "size and resize", func(t *testing.T, g *guest) {
			c := g.shell(nil).run("stty size", "24 80").expect(prompt)
			if err := setSize(c.master, 132, 50); err != nil {
				t.Fatal(err)
			}
			c.run("while [ \"$(stty size)\" != '50 132' ]; do sleep 0.1; done; echo re''sized", "resized").typed("exit\n").exit(0)
		}},
		{"shell", "a terminal without a size", func(t *testing.T, g *guest) {
			c := g.shell(nil)
			if err := setSize(c.master, 0, 0); err != nil {
				t.Fatal(err)
			}
			c.run("sleep 0.5; stty size", "24 80").typed("exit\n").exit(0)
		}},
		{"shell", "colours", func(_ *testing.T, g *guest) {
			c := g.shell(nil).run("echo $TERM+$COLORTERM+$LANG", "xterm-256color+truecolor+C.UTF-8")
			c.run("ls --color=always -d /tmp", "\x1b[").typed("exit\n").exit(0)
		}},
		{"shell", "a terminal that the guest does not know", func(_ *testing.T, g *guest) {
			g.shell([]string{"TERM=no-such-terminal"}).run("echo $TERM.", "xterm-256color.").typed("exit\n").exit(0)
		}},
		{"shell", "ctrl-c is the guest's", func(_ *testing.T, g *guest) {
			c := g.shell(nil).typed("sh -c 'echo be\"\"gin; exec sleep 100'\n").expect("begin")
			c.typed("\x03").expect(prompt).run("echo $?.", "130.").typed("exit 0\n").exit(0)
		}},
		{"shell", "ctrl-z, bg and fg", func(_ *testing.T, g *guest) {
			c := g.shell(nil).typed("sh -c 'echo be\"\"gin; exec sleep 100'\n").expect("begin").typed("\x1a").expect("Stopped")
			c.run("jobs", "Stopped").run("bg", "&").run("jobs", "Running").expect(prompt)
			c.typed("fg\n").expect("sleep 100'").typed("\x03").expect(prompt).typed("exit 0\n").exit(0)
		}},
		{"shell", "ctrl-d", func(_ *testing.T, g *guest) { g.shell(nil).typed("\x04").exit(0) }},
		{"shell", "1 MiB is pasted without loss", func(_ *testing.T, g *guest) {
			var paste strings.Builder
			for i := 0; paste.Len() < 1<<20; i++ {
				paste.WriteString(strconv.Itoa(i*7919) + " line of a paste\n")
			}
			text := paste.String()[:1<<20]
			sum := sha256.Sum256([]byte(text))
			c := g.shell(nil).typed("stty raw -echo; echo rea''dy; head -c 1048576 | sha256sum; stty sane\n").expect("ready\n")
			c.typed(text).expect(hex.EncodeToString(sum[:])).typed("\nexit 0\n").exit(0)
		}},
		{"shell", "1 MiB of lines is pasted to a program that reads lines", func(_ *testing.T, g *guest) {
			line := strings.Repeat("x", 99) + "\n"
			c := g.shell(nil).typed("stty -echo; echo rea''dy; head -n 10486 | wc -c; stty echo\n").expect("ready\r\n")
			c.typed(strings.Repeat(line, 10486)).expect("1048600").typed("\nexit 0\n").exit(0)
		}},
		{"shell", "much output", func(_ *testing.T, g *guest) {
			g.shell(nil).run("seq 1 200000; echo e''nd", "200000\r\nend").typed("exit\n").exit(0)
		}},
		{"shell", "detach and attach", func(t *testing.T, g *guest) {
			c := g.shell(nil).run("mark=here; echo s''et", "set").expect(prompt)
			c.typed("\x10\x11").exit(0).expect("detached")
			pid := pidOf(c)
			g.eventually("nobody is attached", func() bool {
				p := running(g, pid)
				if p == nil || !p.TTY {
					t.Fatalf("%+v", p)
				}
				return p.Attached == 0
			})
			d := g.console(nil, "attach", g.id, strconv.Itoa(int(pid)))
			d.expect(prompt) // drawn again
			d.run("echo still-$mark", "still-here").typed("exit 9\n").exit(9)
		}},
		{"shell", "other detach keys", func(_ *testing.T, g *guest) {
			c := g.console(nil, "shell", "-e", "HISTFILE=", "--detach-keys", "ctrl-a,d", g.id)
			c.expect("leave it running: ctrl-a,d").expect("# ")
			c.typed("\x10\x11").run("echo al''ive", "alive").typed("\x01").typed("d").exit(0).expect("detached")
			call := g.console(nil, "signal", g.id, strconv.Itoa(int(pidOf(c))), "KILL")
			call.exit(0)
		}},
		{"shell", "the first detach key alone is the guest's", func(_ *testing.T, g *guest) {
			c := g.shell(nil).run("echo fi''rst", "first").expect(prompt)
			c.typed("\x10").expect("echo fi''rst") // the line before, after a moment
			c.typed("\n").expect("first").typed("exit\n").exit(0)
		}},
		{"shell", "bad detach keys", func(_ *testing.T, g *guest) {
			g.console(nil, "shell", "--detach-keys", "ctrl-1", g.id).expect("is no key").exit(2)
		}},
		{"shell", "SIGTERM restores the terminal and hangs up", func(_ *testing.T, g *guest) {
			c := g.shell(nil).run("echo pi''d-$$.", "pid-").expect(".")
			pid := regexp.MustCompile(`pid-(\d+)\.`).FindStringSubmatch(c.all())[1]
			if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil {
				g.t.Fatal(err)
			}
			c.exit(130)
			g.eventually("the shell ends", func() bool { return !g.alive(pid) })
		}},
		{"shell", "SIGTSTP and SIGCONT", func(_ *testing.T, g *guest) {
			c := g.shell(nil)
			pid := c.cmd.Process.Pid
			if err := syscall.Kill(pid, syscall.SIGTSTP); err != nil {
				g.t.Fatal(err)
			}
			g.eventually("it stops", func() bool {
				stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
				return err == nil && strings.Contains(string(stat), ") T ")
			})
			c.restored()
			if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
				g.t.Fatal(err)
			}
			g.eventually("the terminal is raw again", func() bool {
				now, err := settings(c.slave)
				return err == nil && now != c.before
			})
			c.run("echo ba''ck", "back").typed("exit\n").exit(0)
		}},
		{"shell", "as a user, in a directory", func(_ *testing.T, g *guest) {
			c := g.console(nil, "shell", "-u", "nobody", "-w", "/tmp", g.id)
			c.expect("$ ").run("echo $(id -un)-$PWD-$0", "nobody-/tmp--bash").typed("exit\n").exit(0)
		}},
		{"shell", "input that is no terminal", func(t *testing.T, g *guest) {
			cmd := command(g.ctx, testenv.Binary(t), "shell", g.id)
			cmd.Stdin = strings.NewReader("tty; echo $0; exit 5\n")
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			exit, ok := errors.AsType[*exec.ExitError](err)
			if !ok || exit.ExitCode() != 5 || string(out) != "not a tty\n-bash\n" || stderr.Len() > 0 {
				t.Errorf("%v: stdout %q stderr %q", err, out, &stderr)
			}
		}},
		{"shell", "exec -t", func(_ *testing.T, g *guest) {
			c := g.console(nil, "exec", "-t", g.id, "--", "sh", "-c", "stty size; read x; echo got-$x; exit 3")
			c.expect("24 80").typed("it\n").expect("got-it").exit(3)
		}},
		{"shell", "a killed daemon restores the terminal, and the shell is found again", func(_ *testing.T, g *guest) {
			c := g.shell(nil).run("mark=kept; echo pi''d-$$.", "pid-").expect(".")
			pid := regexp.MustCompile(`pid-(\d+)\.`).FindStringSubmatch(c.all())[1]
			v, err := g.c.Version(g.ctx)
			if err != nil {
				g.t.Fatal(err)
			}
			if err := syscall.Kill(v.PID, syscall.SIGKILL); err != nil {
				g.t.Fatal(err)
			}
			c.exit(125)
			d := g.console(nil, "attach", g.id, pid) // starts a daemon, which adopts the sandbox
			d.expect(prompt).run("echo still-$mark", "still-kept").typed("exit 4\n").exit(4)
		}},
	})
}
