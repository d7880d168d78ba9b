package enginetest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/testenv"
)

// testFeatures: what Probe promises is there, and nothing else.
func testFeatures(t *testing.T, f *fixture) {
	features, err := f.engine.Probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	m := f.restore(t)
	_, capturer := m.(engine.Capturer)
	_, pauser := m.(engine.Pauser)
	_, committer := m.(engine.Committer)
	_, adopter := f.engine.(engine.Adopter)
	for name, power := range map[string][2]bool{
		"Capture": {features.Capture, capturer}, "Pause": {features.Pause, pauser}, "Commit": {features.Commit, committer},
		"Adopt": {features.Adopt, adopter},
	} {
		if power[0] != power[1] {
			t.Errorf("Features.%s is %v, the interface is there: %v", name, power[0], power[1])
		}
	}
	if features.Live && !features.Capture || features.Live == (features.LiveReason != "") {
		t.Errorf("Capture %v, Live %v, and the reason for its lack is %q", features.Capture, features.Live, features.LiveReason)
	}
	if !capturer || features.Live {
		return
	}
	_, err = m.(engine.Capturer).Capture(t.Context(), &engine.CaptureSpec{
		Mode: engine.CaptureLive, DiskTop: "/nowhere", Quiesce: func(context.Context) error {
			t.Error("a capture that is not possible quiesced the guest")
			return nil
		},
	})
	if !errors.Is(err, engine.ErrLiveUnavailable) || !strings.Contains(err.Error(), features.LiveReason) {
		t.Errorf("capture live: %v, want ErrLiveUnavailable saying %q", err, features.LiveReason)
	}
}

// testCaptureRefused: what fails before the instant changes nothing.
func testCaptureRefused(t *testing.T, f *fixture) {
	f.eachMode(t, func(t *testing.T, f *fixture, mode engine.CaptureMode) {
		s := f.source(t)
		g := Talk(t, s.M)
		c := s.M.(engine.Capturer)
		reason := errors.New("the guest has something better to do")
		for range 2 {
			_, err := c.Capture(t.Context(), &engine.CaptureSpec{
				Mode: mode, DiskTop: s.NextTop(t), Quiesce: func(context.Context) error { return reason },
			})
			if !errors.Is(err, reason) || engine.DiskMoved(err) || !strings.Contains(err.Error(), s.Spec.ID) {
				t.Errorf("quiesce refused: %v, want that reason, the machine's name, and the disk where it was", err)
			}
			within(t, g, time.Second, "get parent")
		}
		_, err := c.Capture(t.Context(), &engine.CaptureSpec{
			Mode: mode, DiskTop: filepath.Join(s.Spec.Dir, "missing.qcow2"), Quiesce: func(context.Context) error {
				t.Error("quiesced although there is no disk to move to")
				return nil
			},
		})
		if err == nil || engine.DiskMoved(err) {
			t.Errorf("a disk that is not there: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		_, err = c.Capture(ctx, &engine.CaptureSpec{
			Mode: mode, DiskTop: s.NextTop(t), Quiesce: func(ctx context.Context) error {
				cancel()
				return context.Cause(ctx)
			},
		})
		if !errors.Is(err, context.Canceled) || engine.DiskMoved(err) {
			t.Errorf("cancelled before the pause: %v", err)
		}
		g.Do("write 4096 after")
		taken := s.Capture(t, mode)
		child := Talk(t, s.Grandchild(t, f.engine, f.kit, taken))
		if got := child.Do("read 4096 5"); got != "after" {
			t.Errorf("after refused captures the grandchild's disk says %q", got)
		}
	})
	if _, err := f.restore(t).(engine.Capturer).Capture(t.Context(), &engine.CaptureSpec{Mode: "magic"}); err == nil {
		t.Error("captured in an unknown mode")
	}
}

// testCaptureCancelled: whoever waits for the copy goes away in the middle of it, and the guest notices nothing.
func testCaptureCancelled(t *testing.T, f *fixture) {
	f.eachMode(t, func(t *testing.T, f *fixture, mode engine.CaptureMode) {
		s := f.source(t)
		g := Talk(t, s.M)
		g.Do("churn 24 0")
		for i := range 3 {
			c := s.Begin(t, mode)
			ctx, cancel := context.WithCancelCause(t.Context())
			gone := errors.New("the reader is gone")
			if i == 0 {
				cancel(gone) // At once; later in the middle.
			} else {
				time.AfterFunc(time.Duration(i)*20*time.Millisecond, func() { cancel(gone) })
			}
			captured, err := c.Finish(ctx)
			if err == nil { // It was faster.
				c.captured = captured
				c.Drop()
			} else if !errors.Is(err, gone) {
				t.Errorf("cancelled: %v, want that reason", err)
			}
			cancel(nil)
			within(t, g, time.Second, "get parent")
		}
		g.Do("check")
		child := Talk(t, s.Grandchild(t, f.engine, f.kit, s.Capture(t, mode)))
		child.Do("check")
		g.Do("check")
	})
}

// testSilentInThePause: a VM process that answers nothing from the pause on, for longer than a capture waits, and goes on
// when everybody has given up: the guest runs, and can be captured.
func testSilentInThePause(t *testing.T, f *fixture) {
	if !testenv.Soak() && os.Getenv("FORKD_TEST_SILENT") == "" {
		t.Skip("most of a minute for each mode: make soak, or set FORKD_TEST_SILENT=1")
	}
	f.eachMode(t, func(t *testing.T, f *fixture, mode engine.CaptureMode) {
		s := f.source(t)
		g := Talk(t, s.M)
		g.Do("churn 24 20")
		pid := s.M.Ref().PID
		top := s.NextTop(t)
		began := time.Now()
		_, err := s.M.(engine.Capturer).Capture(t.Context(), &engine.CaptureSpec{
			Mode: mode, DiskTop: top, Quiesce: func(context.Context) error { return syscall.Kill(pid, syscall.SIGSTOP) },
		})
		if took := time.Since(began); err == nil || took > testenv.Timeout(time.Minute) {
			t.Errorf("a capture of a process that stands still: %v, after %s", err, took)
		}
		if engine.DiskMoved(err) {
			s.chain = append(s.chain, top)
		}
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		within(t, g, 5*time.Second, "get parent")
		g.Do("check")
		child := Talk(t, s.Grandchild(t, f.engine, f.kit, s.Capture(t, mode)))
		child.Do("check")
		g.Do("check")
	})
}

// testCaptureOfTheDead: a machine that dies in a capture is dead, and one that is dead cannot be captured.
func testCaptureOfTheDead(t *testing.T, f *fixture) {
	f.eachMode(t, func(t *testing.T, f *fixture, mode engine.CaptureMode) {
		s := f.source(t)
		Talk(t, s.M).Do("churn 24 0")
		_, err := s.M.(engine.Capturer).Capture(t.Context(), &engine.CaptureSpec{
			Mode: mode, DiskTop: s.NextTop(t), Quiesce: func(context.Context) error {
				return syscall.Kill(s.M.Ref().PID, syscall.SIGKILL)
			},
		})
		if !errors.Is(err, engine.ErrDead) {
			t.Errorf("killed before the pause: %v, want ErrDead", err)
		}
		if _, err := s.M.(engine.Capturer).Capture(t.Context(), &engine.CaptureSpec{Mode: mode, DiskTop: s.NextTop(t)}); !errors.Is(err, engine.ErrDead) {
			t.Errorf("capture of the dead: %v, want ErrDead", err)
		}
		s = f.source(t)
		Talk(t, s.M)
		c := s.Begin(t, mode)
		if err := syscall.Kill(s.M.Ref().PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		captured, err := c.Finish(t.Context())
		switch {
		case err == nil: // It had been copied.
			c.captured = captured
			c.Drop()
		case !errors.Is(err, engine.ErrDead):
			t.Errorf("killed while it was copied: %v, want ErrDead", err)
		}
	})
}

// testPause: a halted machine stands still, keeps its connections, and can be captured without running.
func testPause(t *testing.T, f *fixture) {
	s := f.source(t)
	p, ok := s.M.(engine.Pauser)
	if !ok {
		t.Skip("this engine cannot pause")
	}
	g := Talk(t, s.M)
	set := func(paused bool) {
		t.Helper()
		for range 2 {
			if err := p.SetPaused(t.Context(), paused); err != nil {
				t.Fatal(err)
			}
		}
	}
	set(false)
	g.Do("set who halted")
	for _, mode := range f.modes(t) {
		set(true)
		c := s.Capture(t, mode)
		answered := make(chan error, 1)
		go func() {
			_, err := g.Ask("get who")
			answered <- err
		}()
		select {
		case err := <-answered:
			t.Errorf("captured %s while it was halted, the machine answers: %v", mode, err)
			answered <- err
		case <-time.After(300 * time.Millisecond):
		}
		set(false)
		if err := <-answered; err != nil {
			t.Fatal(err)
		}
		if got := Talk(t, s.Grandchild(t, f.engine, f.kit, c)).Do("get who"); got != "halted" {
			t.Errorf("a grandchild of the halted machine says %q", got)
		}
	}
}

// testCaptureOfCaptures: a grandchild is captured like a child, however the one before it was, down four generations.
func testCaptureOfCaptures(t *testing.T, f *fixture) {
	modes := f.modes(t)
	s := f.source(t)
	g := Talk(t, s.M)
	g.Do("churn 4 20")
	for i := range 2 * len(modes) {
		mode := modes[i/2%len(modes)] // Each after itself and after the other.
		g.Do(fmt.Sprintf("set generation-%d %s", i, mode))
		c := s.Capture(t, mode)
		s = s.Child(t, f.engine, f.kit, c)
		g = Talk(t, s.M)
		g.Do("check")
		for j := range i + 1 {
			if got := g.Do(fmt.Sprintf("get generation-%d", j)); got != string(modes[j/2%len(modes)]) {
				t.Errorf("generation %d finds %q of generation %d", i, got, j)
			}
		}
	}
}

// testManyCaptures: captures in a row, of both modes in turn, do not get slower.
func testManyCaptures(t *testing.T, f *fixture) {
	modes := f.modes(t)
	s := f.source(t)
	g := Talk(t, s.M)
	g.Do("churn 8 20")
	var last *Taken
	for i := range 6 {
		for _, mode := range modes {
			last = s.Capture(t, mode)
			t.Logf("%d, %s: setup %s, pause %s", i+1, mode, last.Setup.Round(time.Millisecond/10), last.Pause.Round(time.Millisecond/10))
		}
	}
	g.Do("check")
	Talk(t, s.Grandchild(t, f.engine, f.kit, last)).Do("check")
}

// testCommit: the files of a chain are merged under a guest that writes.
func testCommit(t *testing.T, f *fixture) {
	s := f.source(t)
	committer, ok := s.M.(engine.Committer)
	if !ok {
		t.Skip("this engine cannot commit")
	}
	g := Talk(t, s.M)
	g.Do("churn 8 0")
	for range 4 {
		s.Capture(t, engine.CaptureDiff)
	}
	top := len(s.chain) - 1
	for name, files := range map[string][2]string{
		"the present top": {s.chain[top], s.chain[1]},
		"unknown":         {filepath.Join(s.Spec.Dir, "unknown.qcow2"), s.chain[1]},
		"itself":          {s.chain[2], s.chain[2]},
		"upside down":     {s.chain[1], s.chain[2]},
	} {
		if err := committer.CommitDisk(t.Context(), files[0], files[1]); err == nil {
			t.Errorf("committed %s", name)
		}
	}
	if err := committer.CommitDisk(t.Context(), s.chain[top-1], s.chain[1]); err != nil {
		t.Fatal(err)
	}
	s.remove(t, 2, top)
	for _, name := range opened(t, s.M.Ref().PID) {
		if strings.HasPrefix(name, s.Spec.Dir) && strings.HasSuffix(name, " (deleted)") {
			t.Errorf("the machine keeps %s open, which it does not need any more", name)
		}
	}
	g.Do("check")
	c := s.Capture(t, engine.CaptureDiff)
	Talk(t, s.Grandchild(t, f.engine, f.kit, c)).Do("check")
	g.Do("check")
}

// opened are the files that a process has open.
func opened(t *testing.T, pid int) []string {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if name, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil { // else it was just closed
			names = append(names, name)
		}
	}
	return names
}
