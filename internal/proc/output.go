package proc

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// output is a memory file of fixed size that a child writes to. It needs no reader, so the daemon may die without the
// child getting SIGPIPE; it cannot grow, because it is sealed against that: further writes fail, which programs
// ignore on standard error; and nothing is left on a disk.
type output struct {
	reopened bool // by a later daemon, which does not share the child's offset

	mu   sync.Mutex
	file *os.File // nil once closed
	kept []byte   // what was in it when it was closed
}

const outputName = "forkd-output"

func newOutput(limit int64) (*output, error) {
	if limit <= 0 {
		limit = defaultOutputMax
	}
	fd, err := unix.MemfdCreate(outputName, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make output file: %w", err)
	}
	f := os.NewFile(uintptr(fd), "output")
	if err := f.Truncate(limit); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("size output file: %w", err)
	}
	// The child cannot truncate it either, which would let it start again from the top of a hole.
	seals := unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("seal output file: %w", err)
	}
	return &output{file: f}, nil
}

// tail is the newest limit bytes written so far.
func (o *output) tail(limit int64) []byte {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.file == nil {
		return o.kept
	}
	if o.reopened {
		return written(o.file, limit)
	}
	// The child writes through this same open file, so its offset is how far it came.
	end, err := unix.Seek(int(o.file.Fd()), 0, unix.SEEK_CUR)
	if err != nil {
		return nil
	}
	b := make([]byte, min(end, limit))
	n, _ := o.file.ReadAt(b, end-int64(len(b)))
	return b[:n]
}

func (o *output) close() error {
	kept := o.tail(4 << 10)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.file == nil {
		return nil
	}
	f := o.file
	o.file, o.kept = nil, kept
	return f.Close()
}
