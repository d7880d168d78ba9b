package qemu

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/memory"
)

// TestDiscardNeedsNoQEMU: a capture is given up also when QEMU neither writes nor closes its end of the stream, before the
// flood and after it.
func TestDiscardNeedsNoQEMU(t *testing.T) {
	for name, flood := range map[string]bool{"held": false, "flowing": true} {
		t.Run(name, func(t *testing.T) {
			ours, theirs, err := streamPipe()
			if err != nil {
				t.Fatal(err)
			}
			defer theirs.Close()
			scratch, err := memory.NewScratch(testRAM)
			if err != nil {
				t.Fatal(err)
			}
			l := &liveCapture{
				m: &machine{spec: engine.Spec{MemoryBytes: testRAM}}, held: true, scratch: scratch, stream: ours,
				flood: make(chan struct{}), cut: make(chan struct{}), armed: make(chan struct{}), drained: make(chan struct{}),
			}
			if l.pipe, err = dam(theirs); err != nil {
				t.Fatal(err)
			}
			go l.drain(nil)
			if flood {
				l.letFlow()
				untilEmpty(t, theirs) // and the drain waits for more
			}
			ended := make(chan error, 1)
			go func() { ended <- l.discard() }()
			select {
			case err := <-ended:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("the drain waits for QEMU")
			}
		})
	}
}

func untilEmpty(t *testing.T, pipe *os.File) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for n := 1; n > 0; {
		<-tick.C
		var err error
		if n, err = unix.IoctlGetInt(int(pipe.Fd()), unix.TIOCINQ); err != nil {
			t.Fatal(err)
		}
	}
	<-tick.C
}
