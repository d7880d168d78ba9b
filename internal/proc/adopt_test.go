package proc

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// own is the name of this program, which children run too.
func own(t *testing.T) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Base(exe)
}

// left is a child that its daemon has given up.
func left(t *testing.T, what, says string) *Process {
	t.Helper()
	p := start1(t, command(what))
	waitOutput(t, p, says)
	p.Detach()
	select {
	case <-p.Done():
	default:
		t.Fatal("Done is open after Detach")
	}
	if err := errors.Join(p.Err(), p.Kill()); err != nil {
		t.Errorf("after Detach: %v", err)
	}
	if err := syscall.Kill(p.PID(), 0); err != nil {
		t.Fatalf("the process given up does not run on: %v", err)
	}
	t.Cleanup(func() {
		if err := Bury(context.WithoutCancel(t.Context()), p.PID(), p.StartTime()); err != nil {
			t.Error(err)
		}
	})
	return p
}

func TestAdopt(t *testing.T) {
	was := left(t, "wait", "waiting")
	p, err := Adopt(t.Context(), was.PID(), was.StartTime(), own(t))
	if err != nil {
		t.Fatal(err)
	}
	if p.PID() != was.PID() || p.StartTime() != was.StartTime() {
		t.Errorf("adopted %d of %d, want %d of %d", p.PID(), p.StartTime(), was.PID(), was.StartTime())
	}
	if got := string(p.Output()); got != "waiting\n" {
		t.Errorf("output %q, want what it wrote before", got)
	}
	select {
	case <-p.Done():
		t.Error("it has ended")
	default:
	}
	p.Detach() // and once more
	if p, err = Adopt(t.Context(), was.PID(), was.StartTime(), own(t)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := p.Kill(); err != nil {
			t.Errorf("Kill: %v", err)
		}
	}
	if err := p.Err(); err != nil {
		t.Errorf("Err: %v, want nil after Kill", err)
	}
	p.Release()
	if got := string(p.Output()); got != "waiting\n" {
		t.Errorf("output after the end and Release: %q", got)
	}
	if _, err := Adopt(t.Context(), was.PID(), was.StartTime(), own(t)); !errors.Is(err, ErrGone) {
		t.Errorf("adopt what has ended: %v, want ErrGone", err)
	}
}

func TestAdoptedEndsByItself(t *testing.T) {
	was := left(t, "wait", "waiting")
	p, err := Adopt(t.Context(), was.PID(), was.StartTime(), own(t))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Release()
	if err := syscall.Kill(p.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	wait(t, p)
	if err := p.Err(); !errors.Is(err, ErrUnknownExit) || !strings.Contains(err.Error(), "waiting") {
		t.Errorf("Err: %v, want ErrUnknownExit with what the process said", err)
	}
}

func TestAdoptRefuses(t *testing.T) {
	was := left(t, "wait", "waiting")
	for name, c := range map[string]struct {
		pid       int
		startedAt uint64
		program   string
		want      error
		says      string
	}{
		"number of another process": {was.PID(), was.StartTime() + 1, own(t), ErrGone, ""},
		"other program":             {was.PID(), was.StartTime(), "qemu", nil, "not qemu"},
		"no such process":           {1 << 22, 1, own(t), ErrGone, ""},
		"init":                      {1, 1, own(t), nil, "no process of ours"},
		"negative":                  {-1, 1, own(t), nil, "no process of ours"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Adopt(t.Context(), c.pid, c.startedAt, c.program)
			if err == nil || c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("Adopt: %v, want %v %s", err, c.want, c.says)
			}
		})
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Adopt(ended, was.PID(), was.StartTime(), own(t)); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
	if err := syscall.Kill(was.PID(), 0); err != nil {
		t.Errorf("the process is gone after refusals: %v", err)
	}
}
