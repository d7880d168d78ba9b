package network

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// notifier tells when a port is opened or closed. The kernel announces changes of a socket's state to who measures it
// (perf); nothing has to be asked again and again, neither here nor in any fork. It is not in anybody's way, other than an
// event of tracefs, which users may want for themselves.
type notifier struct {
	mu      sync.Mutex
	changed chan struct{} // closed at a change; nil: the kernel does not tell
}

func newNotifier() *notifier {
	n := &notifier{}
	id, err := tracepoint()
	if err != nil {
		return n
	}
	// One for each processor: one for a process would cost something with every change of processes.
	var events []*event
	for cpu := range runtime.NumCPU() {
		e, err := openEvent(id, cpu)
		if err != nil {
			return n
		}
		events = append(events, e)
	}
	n.changed = make(chan struct{})
	for _, e := range events {
		go n.watch(e)
	}
	return n
}

// next is closed at the next change; nil if nobody tells.
func (n *notifier) next() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.changed
}

func (n *notifier) happened() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.changed != nil {
		close(n.changed)
		n.changed = make(chan struct{})
	}
}

// watch waits for the event as long as the machine lives.
func (n *notifier) watch(e *event) {
	raw, err := e.file.SyscallConn()
	if err != nil {
		return
	}
	for seen := e.written(); ; {
		// The poller tells of an event once, perhaps while nobody waits: what counts is what was written.
		err := raw.Read(func(uintptr) bool {
			now := e.written()
			news := now != seen
			seen = now
			return news
		})
		if err != nil {
			return
		}
		n.happened()
	}
}

// event is one that the kernel writes into a ring.
type event struct {
	file *os.File
	ring []byte
}

// headAt is where the ring's description has how much was written (struct perf_event_mmap_page, data_head).
const headAt = 1024

func (e *event) written() uint64 {
	// SAFETY: the mapping is a page and more, and never unmapped; the field is aligned to its size.
	return atomic.LoadUint64((*uint64)(unsafe.Pointer(&e.ring[headAt])))
}

// tracepoint is the number of the kernel's event "a socket's state changes".
func tracepoint() (uint64, error) {
	const dir = "/sys/kernel/tracing"
	const file = dir + "/events/sock/inet_sock_set_state/id"
	b, err := os.ReadFile(file)
	if err != nil {
		// Not left mounted: what is there is for users to decide.
		if err := unix.Mount("tracefs", dir, "tracefs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
			return 0, fmt.Errorf("mount tracefs: %w", err)
		}
		b, err = os.ReadFile(file)
		err = errors.Join(err, unix.Unmount(dir, unix.MNT_DETACH))
	}
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
}

// ringPages is a page for the kernel's description, and the smallest ring.
const ringPages = 2

// openEvent opens the event on a processor, filtered to ports that are opened or closed.
func openEvent(id uint64, cpu int) (*event, error) {
	attr := &unix.PerfEventAttr{
		Type: unix.PERF_TYPE_TRACEPOINT, Config: id, Sample: 1, Wakeup: 1, Sample_type: unix.PERF_SAMPLE_TIME,
	}
	attr.Size = uint32(unsafe.Sizeof(*attr))
	fd, err := unix.PerfEventOpen(attr, -1, cpu, -1, unix.PERF_FLAG_FD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("watch for ports: %w", err)
	}
	filter, err := unix.BytePtrFromString("newstate == 10 || oldstate == 10")
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	// SAFETY: the kernel reads the text, which ends in a zero byte, during the call.
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.PERF_EVENT_IOC_SET_FILTER, uintptr(unsafe.Pointer(filter))); errno != 0 {
		return nil, errors.Join(fmt.Errorf("watch for ports: filter: %w", errno), unix.Close(fd))
	}
	// SAFETY: of the ring only its head is read, and it is never unmapped. Mapped for reading only, the kernel overwrites what is old
	// instead of waiting for a reader; without any it would not wake anybody.
	ring, err := unix.Mmap(fd, 0, ringPages*os.Getpagesize(), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch for ports: %w", err), unix.Close(fd))
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return &event{os.NewFile(uintptr(fd), "perf"), ring}, nil
}
