package qemu

import (
	"strings"

	"forkd.dev/forkd/internal/memory"
)

// At the end of its snapshot QEMU takes the protection from all of the RAM once more and ends its registration: two walks
// over all pages, in which the guest's faults wait for the process's memory, 19 ms each for 512 MiB. So what has been copied
// is unregistered before, piece by piece, while the rest is being copied. QEMU then finds nothing protected, says so on its
// standard error, and goes on.

// sweep follows a drain through the RAM.
type sweep struct {
	size   int64
	passed chan int64 // places of strides that QEMU is done with; room for all
	over   chan struct{}
}

func newSweep(size int64) sweep {
	return sweep{size: size, passed: make(chan int64, (size+stride-1)/stride), over: make(chan struct{})}
}

// past is called by the drain alone.
func (s *sweep) past(off int64) { s.passed <- off }

// end ends run, once nothing calls past any more.
func (s *sweep) end() {
	close(s.passed)
	<-s.over
}

// run is until end. It is a matter of speed alone: what it leaves QEMU finds.
func (s *sweep) run(pid int, ram *memory.Process) {
	defer close(s.over)
	fds, err := userfaultfds(pid)
	if err != nil {
		return
	}
	_ = withUserfaultfds(pid, fds, func(uffd int) error {
		for off := range s.passed {
			if err := unregister(uffd, addresses{ram.Address(off), uint64(min(stride, s.size-off))}); err != nil {
				return err
			}
		}
		return nil
	})
}

// afterSweep reports whether a line of QEMU's output says that nothing was protected any more.
func afterSweep(line string) bool { return strings.Contains(line, "uffd_change_protection() failed: ") }
