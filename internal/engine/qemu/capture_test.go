package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/qemu/qmp"
)

// TestLiveIsNeverReplaced: where live is not possible it is refused before anything is looked at.
func TestLiveIsNeverReplaced(t *testing.T) {
	m := &machine{live: func(context.Context) (string, error) { return "the moon is full", nil }}
	_, err := m.Capture(t.Context(), &engine.CaptureSpec{Mode: engine.CaptureLive})
	if !errors.Is(err, engine.ErrLiveUnavailable) || !strings.Contains(err.Error(), "the moon is full") {
		t.Errorf("capture live: %v, want ErrLiveUnavailable and the reason", err)
	}
}

// TestProtection: what Probe says of live capture is what this kernel lets this user do.
func TestProtection(t *testing.T) {
	why, err := protectionUnavailable(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	allowed, _ := os.ReadFile("/proc/sys/vm/unprivileged_userfaultfd")
	switch {
	case os.Geteuid() == 0 && strings.Contains(why, "refuses"):
		t.Errorf("as root: %s", why)
	case os.Geteuid() != 0 && strings.TrimSpace(string(allowed)) == "0" && !strings.Contains(why, "sysctl vm.unprivileged_userfaultfd=1"):
		t.Errorf("an ordinary user is told %q, want the remedy", why)
	}
}

// TestRescueIsHarmless where nothing is protected and where nobody is.
func TestRescueIsHarmless(t *testing.T) {
	if err := rescue(os.Getpid()); err != nil {
		t.Errorf("a process without protection: %v", err)
	}
	gone := exec.CommandContext(t.Context(), "true")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	if err := rescue(gone.Process.Pid); err != nil {
		t.Errorf("a process that is gone: %v", err)
	}
}

// TestMayHave: only a refusal says that the disk was not switched.
func TestMayHave(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want bool
	}{
		{nil, true},
		{&qmp.Error{Command: "blockdev-snapshot"}, false},
		{fmt.Errorf("wait: %w", context.DeadlineExceeded), true},
		{qmp.ErrClosed, true},
	} {
		if got := mayHave(tt.err); got != tt.want {
			t.Errorf("%v: %v, want %v", tt.err, got, tt.want)
		}
	}
}

// TestResumeAfterItsTime: a machine whose QEMU took all of the pause's time to answer is told to run.
func TestResumeAfterItsTime(t *testing.T) {
	conn, theirs, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	peer, err := net.FileConn(theirs)
	_ = theirs.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	m := &machine{monitor: qmp.New(conn)}
	defer m.monitor.Close()
	heard := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(peer).ReadString('\n')
		heard <- line
		_, _ = io.WriteString(peer, `{"return": {}, "id": "1"}`+"\n")
	}()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := m.run(ctx); err != nil {
		t.Fatal(err)
	}
	if line := <-heard; !strings.Contains(line, `"cont"`) {
		t.Errorf("QEMU heard %q", line)
	}
}

// TestInsistOn: a VM process that never lets a request through must not keep the daemon for ever.
func TestInsistOn(t *testing.T) {
	for name, tt := range map[string]struct {
		answers []unix.Errno // the last for ever
		want    error
	}{
		"at once":     {[]unix.Errno{0}, nil},
		"changing":    {[]unix.Errno{unix.EAGAIN, unix.EINTR, unix.EAGAIN, 0}, nil},
		"refused":     {[]unix.Errno{unix.EAGAIN, unix.ENOENT}, unix.ENOENT},
		"all changes": {[]unix.Errno{unix.EAGAIN}, unix.EAGAIN},
	} {
		n := 0
		err := insistOn(func() unix.Errno {
			n++
			return tt.answers[min(n, len(tt.answers))-1]
		})
		if !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
}

func TestParseRange(t *testing.T) {
	for line, want := range map[string]addresses{
		"7f0cd9fff000-7f0cf9fff000 rw-p 00000000 00:01 34661   /memfd:forkd-image (deleted)": {0x7f0cd9fff000, 0x20000000},
		"00400000-00401000 r-xp 00000000 00:00 0 ":                                           {0x400000, 0x1000},
		"Size:             524288 kB":                                                        {},
		"VmFlags: rd wr mr":                                                                  {},
		"2000-1000 rw-p":                                                                     {},
		"x-y rw-p":                                                                           {},
		"":                                                                                   {},
	} {
		if got, ok := parseRange(line); got != want || ok != (want != addresses{}) {
			t.Errorf("%q: %+v, %v, want %+v", line, got, ok, want)
		}
	}
}

func TestAnnouncements(t *testing.T) {
	var a announcements
	event := func(name, data string) qmp.Event { return qmp.Event{Name: name, Data: json.RawMessage(data)} }
	any1, any2 := a.expect("RESUME", nil), a.expect("RESUME", nil)
	picky := a.expect("JOB", func(raw json.RawMessage) bool { return string(raw) == `"b"` })
	dropped := a.expect("RESUME", nil)
	a.drop(dropped)
	a.tell(event("JOB", `"a"`))
	a.tell(event("RESUME", `1`))
	a.tell(event("RESUME", `2`)) // Nobody waits any more; it must not block.
	a.tell(event("JOB", `"b"`))
	for name, w := range map[string]*announcement{`1`: any1, `"b"`: picky} {
		select {
		case got := <-w.seen:
			if string(got) != name {
				t.Errorf("got %s, want %s", got, name)
			}
		default:
			t.Errorf("not told of %s", name)
		}
	}
	if len(any2.seen) != 1 || len(dropped.seen) != 0 {
		t.Error("every waiter is told, and none that has left")
	}
}
