package process

import (
	"bytes"
	"strconv"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agent/agenttest"
	"forkd.dev/forkd/internal/guest/wire"
)

func (f *fixture) connectWith(t *testing.T, req wire.ConnectRequest) *wire.Stream {
	t.Helper()
	s := agenttest.Call(t, f.handlers[wire.MethodProcessConnect], req)
	started(t, s)
	return s
}

// launch starts a process to which nobody is attached.
func (f *fixture) launch(t *testing.T, req wire.StartRequest) uint32 {
	t.Helper()
	req.Detach = true
	s := agenttest.Call(t, f.handlers[wire.MethodProcessStart], req)
	pid := started(t, s)
	if r := follow(t, s); r.end != nil || r.err != nil {
		t.Fatalf("more than a start: %+v", r)
	}
	return pid
}

func (f *fixture) info(t *testing.T, pid uint32) wire.ProcessInfo {
	t.Helper()
	var list wire.ProcessList
	if err := f.unary(t, wire.MethodProcessList, wire.ListRequest{Ended: true}, &list); err != nil {
		t.Fatal(err)
	}
	for _, p := range list.Processes {
		if p.PID == pid {
			return p
		}
	}
	t.Fatalf("process %d is not listed", pid)
	return wire.ProcessInfo{}
}

// TestOutputPositions: whatever the sizes, each reader gets every byte once and in order, of what is kept.
func TestOutputPositions(t *testing.T) {
	o := newOutput()
	var all bytes.Buffer
	for i := range 5000 {
		kind := wire.KindStdout
		if i%7 == 0 {
			kind = wire.KindStderr
		}
		data := []byte(strings.Repeat(strconv.Itoa(i)+",", i%50+1))
		all.Write(data)
		o.write(kind, data)
	}
	if o.end != int64(all.Len()) || o.end-o.start > keptBytes {
		t.Fatalf("from %d to %d of %d bytes", o.start, o.end, all.Len())
	}
	var got bytes.Buffer
	for at := o.start; at < o.end; {
		_, data := o.from(at)
		got.Write(data)
		at += int64(len(data))
	}
	if want := all.Bytes()[o.start:]; !bytes.Equal(got.Bytes(), want) {
		t.Errorf("%d bytes, want %d", got.Len(), len(want))
	}
	// In the middle of a chunk.
	_, data := o.from(o.end - 3)
	if !bytes.Equal(data, all.Bytes()[all.Len()-3:]) {
		t.Errorf("the last three: %q", data)
	}
}

// TestLostOutput: an observer that is too slow is told how much is gone, and gets the rest.
func TestLostOutput(t *testing.T) {
	o := newOutput()
	o.write(wire.KindStdout, []byte("first"))
	r := o.attach(nil, &wire.ConnectRequest{Observe: true, Replay: true})
	data := []byte(strings.Repeat("x", 1000))
	for range keptBytes/len(data) + 1 {
		o.write(wire.KindStdout, data)
	}
	lost := o.end - keptBytes
	if n := o.next(r); n.event == nil || n.event.Lost != lost {
		t.Fatalf("got %+v, want %d bytes lost", n, lost)
	}
	if n := o.next(r); n.event != nil || len(n.data) == 0 || r.at != lost {
		t.Errorf("then event %v, %d bytes from %d, want those from %d", n.event, len(n.data), r.at, lost)
	}
}

// TestStuckReader: one that takes nothing holds the process back, and nobody else.
func TestStuckReader(t *testing.T) {
	f := newFixture(t, 0)
	_, pid := f.start(t, shell("yes | head -c 20000000; exec sleep 100")) // not read
	waitFor(t, func() bool { return f.info(t, pid).Output > ahead })
	second := f.connectWith(t, wire.ConnectRequest{Process: wire.ProcessSelector{PID: pid}, Replay: true, Observe: true, NoWait: true})
	// What the process prints until it is held back may displace what the second is being sent.
	if r := observe(t, second); r.stdout.Len() == 0 || r.end != nil {
		t.Errorf("the second got %d bytes, end %v", r.stdout.Len(), r.end)
	}
	if out := f.info(t, pid).Output; out > 4<<20 {
		t.Errorf("%d bytes were taken from the process", out)
	}
	if err := f.unary(t, wire.MethodProcessSendSignal, wire.SendSignalRequest{Process: wire.ProcessSelector{PID: pid}, Signal: 9}, nil); err != nil {
		t.Error(err)
	}
}

// TestObserver: it is told what it lost, and takes nothing from the next who attaches.
func TestObserver(t *testing.T) {
	f := newFixture(t, 0)
	pid := f.launch(t, shell("head -c 5000000 /dev/zero; exit 3"))
	sel := wire.ProcessSelector{PID: pid}
	waitFor(t, func() bool { return f.info(t, pid).End != nil })
	look := follow(t, f.connectWith(t, wire.ConnectRequest{Process: sel, Observe: true, Replay: true}))
	if look.stdout.Len() < keptBytes-pipeChunk || look.end == nil {
		t.Errorf("observed %d bytes, end %v", look.stdout.Len(), look.end)
	}
	if r := follow(t, f.connect(t, pid)); r.stdout.Len() != look.stdout.Len() || r.end.ExitCode != 3 {
		t.Errorf("attached after: %d bytes, end %+v", r.stdout.Len(), r.end)
	}
	if r := follow(t, f.connect(t, pid)); r.stdout.Len() != 0 {
		t.Errorf("attached again: %d bytes", r.stdout.Len())
	}
	if r := follow(t, f.connectWith(t, wire.ConnectRequest{Process: sel, Replay: true})); r.stdout.Len() == 0 {
		t.Error("nothing to replay")
	}
}

// TestUnheardEnd: an end that nobody was told of outlives the others, up to a number.
func TestUnheardEnd(t *testing.T) {
	f := newFixture(t, 50*time.Millisecond)
	heard := f.run(t, shell("true")).pid
	first := f.launch(t, shell("echo x; exit 4"))
	waitFor(t, func() bool { return f.info(t, first).End != nil })
	waitFor(t, func() bool {
		_, err := f.find(wire.ProcessSelector{PID: heard}, true)
		return err != nil
	})
	if r := follow(t, f.connect(t, first)); r.end == nil || r.end.ExitCode != 4 || r.stdout.String() != "x\n" {
		t.Errorf("%+v", r)
	}
	for range maxUnheard {
		f.launch(t, shell("exit 0"))
	}
	waitFor(t, func() bool {
		_, err := f.find(wire.ProcessSelector{PID: first}, true)
		return err != nil
	})
}

// TestEndedOutputIsBounded: what is kept of those that have ended is bounded together, the oldest goes first.
func TestEndedOutputIsBounded(t *testing.T) {
	f := newFixture(t, 0)
	var pids []uint32
	for range maxEndedBytes/keptBytes + 2 {
		pid := f.launch(t, shell("head -c 400000 /dev/zero"))
		waitFor(t, func() bool { return f.info(t, pid).End != nil })
		pids = append(pids, pid)
	}
	f.mu.Lock()
	kept := f.Manager.kept
	f.mu.Unlock()
	if kept > maxEndedBytes {
		t.Errorf("%d bytes are kept", kept)
	}
	if r := follow(t, f.connect(t, pids[0])); r.stdout.Len() != 0 || r.end == nil {
		t.Errorf("the oldest: %d bytes, end %v", r.stdout.Len(), r.end)
	}
	if r := follow(t, f.connect(t, pids[len(pids)-1])); r.stdout.Len() < keptBytes-pipeChunk {
		t.Errorf("the newest: %d bytes", r.stdout.Len())
	}
}

func TestStreamInput(t *testing.T) {
	f := newFixture(t, 0)
	s, pid := f.start(t, shell("cat"))
	in := agenttest.Call(t, f.handlers[wire.MethodProcessInput], wire.StreamInputRequest{Process: wire.ProcessSelector{PID: pid}})
	for i := range 100 {
		if err := in.Send(wire.KindStdin, []byte(strconv.Itoa(i)+"\n")); err != nil {
			t.Fatal(err)
		}
	}
	if err := in.HalfClose(); err != nil {
		t.Fatal(err)
	}
	if err := in.RecvMessage(&struct{}{}); err != nil {
		t.Fatal(err)
	}
	if err := s.HalfClose(); err != nil {
		t.Fatal(err)
	}
	if r := follow(t, s); strings.Count(r.stdout.String(), "\n") != 100 || !strings.HasSuffix(r.stdout.String(), "\n99\n") {
		t.Errorf("%q", &r.stdout)
	}
}

func TestForTerminal(t *testing.T) {
	for _, tt := range []struct {
		env        []string
		kind       string
		term, lang string
	}{
		{nil, "", "xterm-256color", "C.UTF-8"},
		{nil, "dumb", "dumb", "C.UTF-8"},
		{nil, "no-such-terminal", "xterm-256color", "C.UTF-8"},
		{nil, "../../etc/passwd", "xterm-256color", "C.UTF-8"},
		{[]string{"TERM=mine", "LANG=de_DE.UTF-8"}, "dumb", "mine", "de_DE.UTF-8"},
		{[]string{"LC_ALL=C"}, "dumb", "dumb", ""},
	} {
		env := strings.Join(forTerminal(tt.env, tt.kind), " ") + " "
		if !strings.Contains(env, "TERM="+tt.term+" ") || tt.lang != "" && !strings.Contains(env, "LANG="+tt.lang+" ") || tt.lang == "" && strings.Contains(env, "LANG=") {
			t.Errorf("%v %q: %s", tt.env, tt.kind, env)
		}
	}
}
