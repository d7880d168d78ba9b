package enginetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/testenv"
)

// testAdopt: a machine that was given up runs on, and the next to adopt it finds it as it was, console and all.
func testAdopt(t *testing.T, f *fixture) {
	features, err := f.engine.Probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	adopter, ok := f.engine.(engine.Adopter)
	if ok != features.Adopt {
		t.Fatalf("Features.Adopt is %v, the engine is an Adopter: %v", features.Adopt, ok)
	}
	if !ok {
		t.Skip("this engine cannot adopt")
	}
	spec := f.spec(t)
	m, err := f.engine.Restore(t.Context(), spec, f.checkpoint)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.engine.Bury(context.WithoutCancel(t.Context()), m.Ref()); err != nil {
			t.Error(err)
		}
	})
	g := Talk(t, m)
	g.Do("set who adopted")
	// It goes on printing with nobody to read it, which must not hold it up.
	if _, err := fmt.Fprintln(g.conn, "print 3000 "+strings.Repeat("y", 60)); err != nil {
		t.Fatal(err)
	}
	detach(t, m)
	g.Close()
	if err := syscall.Kill(m.Ref().PID, 0); err != nil {
		t.Fatalf("a machine that was given up has ended: %v", err)
	}
	a := &engine.Adoption{Spec: spec, Ref: m.Ref(), Format: f.checkpoint.Format}
	for range 2 { // The first gives it up again.
		start := time.Now()
		again, err := adopter.Adopt(t.Context(), a)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { again.Machine.Close() })
		g := Talk(t, again.Machine)
		if got := g.Do("get who"); got != "adopted" {
			t.Errorf("memory of the adopted machine: %q", got)
		}
		t.Logf("answers %s after Adopt began", time.Since(start))
		if again.Machine.Ref() != m.Ref() {
			t.Errorf("it is %+v, want %+v", again.Machine.Ref(), m.Ref())
		}
		if !slices.Equal(again.Disks, append([]string{spec.Disk.Path}, spec.Disk.Backing...)) {
			t.Errorf("its disk is %q, want %q over %q", again.Disks, spec.Disk.Path, spec.Disk.Backing)
		}
		f.checkImage(t, again.Memory)
		g.Do("print 1 hello-again")
		awaitConsole(t, again.Machine, "hello-again")
		g.Close()
		detach(t, again.Machine)
	}
	testAdoptRefuses(t, adopter, a)
	last, err := adopter.Adopt(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	last.Memory.Close()
	if err := last.Machine.Close(); err != nil {
		t.Error(err)
	}
	if err := last.Machine.Err(); err != nil {
		t.Errorf("Err after Close: %v", err)
	}
	if _, err := adopter.Adopt(t.Context(), a); !errors.Is(err, engine.ErrDead) {
		t.Errorf("adopt a machine that has ended: %v, want ErrDead", err)
	}
}

// checkImage: an adopted machine brings the image that it and its siblings stand on.
func (f *fixture) checkImage(t *testing.T, image *memory.Image) {
	t.Helper()
	if image == nil {
		t.Error("the adopted machine comes without its image")
		return
	}
	defer image.Close()
	want, err := f.checkpoint.Memory.ID()
	if err != nil {
		t.Fatal(err)
	}
	if got, err := image.ID(); err != nil || got != want {
		t.Errorf("its image is %+v, %v, want %+v", got, err, want)
	}
}

func testAdoptRefuses(t *testing.T, adopter engine.Adopter, a *engine.Adoption) {
	t.Helper()
	other := *a
	other.Ref.StartTime++
	if _, err := adopter.Adopt(t.Context(), &other); !errors.Is(err, engine.ErrDead) {
		t.Errorf("adopt another process of the same number: %v, want ErrDead", err)
	}
	other = *a
	other.Ref.PID, other.Ref.StartTime = syscall.Getpid(), 0
	if _, err := adopter.Adopt(t.Context(), &other); err == nil {
		t.Error("adopted this test")
	}
	// Paused, and let run again.
	paused := *a
	paused.Paused = true
	for _, want := range []*engine.Adoption{&paused, a} {
		m, err := adopter.Adopt(t.Context(), want)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		g, err := TryTalk(ctx, m.Machine)
		if err == nil {
			g.Close()
		}
		if (err == nil) == want.Paused && ctx.Err() == nil {
			t.Errorf("adopted with paused %v, the guest answers: %v", want.Paused, err)
		}
		cancel()
		m.Memory.Close()
		detach(t, m.Machine)
	}
}

func detach(t *testing.T, m engine.Machine) {
	t.Helper()
	d, ok := m.(engine.Detacher)
	if !ok {
		t.Fatalf("%T cannot be given up", m)
	}
	if err := d.Detach(); err != nil {
		t.Fatal(err)
	}
	waitDone(t, m, time.Second)
	if err := errors.Join(m.Err(), m.Close()); err != nil {
		t.Errorf("after Detach: %v", err)
	}
	if _, err := m.DialGuest(t.Context()); err == nil {
		t.Error("DialGuest of a machine that was given up succeeds")
	}
}

func awaitConsole(t *testing.T, m engine.Machine, want string) {
	t.Helper()
	deadline := time.After(testenv.Timeout(20 * time.Second))
	for !strings.Contains(string(m.Console()), want) {
		select {
		case <-deadline:
			t.Fatalf("the console never shows %q: %q", want, tail(m.Console()))
		case <-time.After(10 * time.Millisecond):
		}
	}
}
