package proc

import (
	"sync"

	"golang.org/x/sys/unix"
)

// withSmallPages counts the children that are being started and are to have none but small pages. It is of this whole process
// because what it stands for is.
var withSmallPages struct {
	sync.Mutex
	starts int
	before int // whether this process did without by itself
}

// smallPages has children that are started until done is called do without huge pages. They inherit it from this process,
// which does without as long: what it asks for then is refused, so it must not be so for good. A kernel that knows nothing of
// it has no huge pages to give.
func smallPages() (done func()) {
	s := &withSmallPages
	s.Lock()
	defer s.Unlock()
	if s.starts++; s.starts == 1 {
		s.before, _ = unix.PrctlRetInt(unix.PR_GET_THP_DISABLE, 0, 0, 0, 0)
		_ = unix.Prctl(unix.PR_SET_THP_DISABLE, 1, 0, 0, 0)
	}
	return func() {
		s.Lock()
		defer s.Unlock()
		if s.starts--; s.starts == 0 {
			_ = unix.Prctl(unix.PR_SET_THP_DISABLE, uintptr(s.before), 0, 0, 0)
		}
	}
}
