package memory

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// pagemapProtected is set for a page that userfaultfd protects from being written.
const pagemapProtected = 1 << 57

// Protection looks at which pages of a machine are write-protected. It is not safe for concurrent use.
type Protection struct {
	p    *Process
	file *os.File // its page table
	buf  []byte
}

// Protection opens the machine's page table. The caller closes it.
func (p *Process) Protection() (*Protection, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", p.pid))
	if err != nil {
		return nil, fmt.Errorf("look at the protection of process %d: %w", p.pid, gone(err))
	}
	return &Protection{p: p, file: f}, nil
}

// Close gives the descriptor back.
func (q *Protection) Close() error { return q.file.Close() }

// ReadProtected copies the RAM from off on into a buffer of whole pages, with the machine running, and sets protected for
// each page of it that nothing can have written meanwhile: one that was write-protected when all had been read. Protection
// is given to all pages at once and taken from each once, so such a page is what it was when it was given.
func (q *Protection) ReadProtected(off int64, into []byte, protected []bool) error {
	n := len(into) / PageSize
	if off < 0 || off%PageSize != 0 || len(into)%PageSize != 0 || n != len(protected) || n == 0 || int64(len(into)) > q.p.size-off {
		return fmt.Errorf("read protected pages: %d bytes at %d of %d, for %d pages", len(into), off, q.p.size, len(protected))
	}
	if err := q.readProtected(off, into, protected); err != nil {
		return fmt.Errorf("read protected pages of process %d: %w", q.p.pid, gone(err))
	}
	return nil
}

func (q *Protection) readProtected(off int64, into []byte, protected []bool) error {
	base := q.p.base + uintptr(off)
	if err := q.p.transfer(false, into, []unix.RemoteIovec{{Base: base, Len: len(into)}}); err != nil {
		return err
	}
	const entry = 8
	if n := len(protected) * entry; cap(q.buf) < n {
		q.buf = make([]byte, n)
	}
	entries := q.buf[:len(protected)*entry]
	if _, err := io.ReadFull(io.NewSectionReader(q.file, int64(base)/PageSize*entry, int64(len(entries))), entries); err != nil {
		return err
	}
	for i := range protected {
		protected[i] = binary.NativeEndian.Uint64(entries[i*entry:])&pagemapProtected != 0
	}
	return nil
}
