package host

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
)

// Admission: what is promised to a child must be there when it asks for it, or the kernel's OOM killer chooses a
// victim among all of them.
const (
	// childOwn is what a child is expected to have of its own: its VM process with the translation cache, and the pages
	// it writes. Measured with the default parent: about 30 MiB after the first evaluation.
	childOwn = 48 << 20
	// memoryReserve stays free for the host, if nothing else was said.
	memoryReserve = 256 << 20
)

// admit promises room for n children of m and one hot image, or says what is short. The image of a branch that is being
// written is there already. The caller calls done once the children are in the table or have failed.
func (h *Host) admit(_ context.Context, m store.Snapshot, writing *writing, n int) (done func(), err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, ErrClosed
	}
	if have := h.running() + h.forking; have+n > h.cfg.MaxSandboxes {
		return nil, hint(fmt.Errorf("%w: %d sandboxes would run, the most is %d and %d run now", ErrExhausted, have+n,
			h.cfg.MaxSandboxes, have), "end some with: forkd kill ID")
	}
	if err := h.roomOnDisk(n); err != nil {
		return nil, err
	}
	need := int64(n) * childOwn
	if writing == nil && !h.hot.has(m) {
		need += m.Engine.MemoryBytes
	}
	left, err := h.roomFor(need, m.ID())
	if err != nil {
		return nil, err
	}
	if left < 0 {
		return nil, hint(fmt.Errorf("%w: %d children of %s need about %s of memory, the host has %s to spare", ErrExhausted,
			n, m.Tag, mib(need), mib(max(0, left+need))), "fork fewer, or end some with: forkd kill ID")
	}
	h.forking += n
	h.promised += need
	return sync.OnceFunc(func() {
		h.mu.Lock()
		h.forking -= n
		h.promised -= need
		h.mu.Unlock()
	}), nil
}

// running is how many sandboxes have a machine, or had one and are not ended. The caller holds mu.
func (h *Host) running() int {
	n := 0
	for _, s := range h.sandboxes {
		if !s.is(lineage.Suspended) {
			n++
		}
	}
	return n
}

const (
	// childDisk is what a child is expected to write on its disk at least. Measured: 12 KiB when it is awake, and what its
	// user writes then.
	childDisk = 1 << 20
	// Of the store's file system so much is left for what runs already, and for the layers of its branches.
	diskReserve     = 1 << 30
	diskReservePart = 50
)

// roomOnDisk says whether n children may begin to write on the store's disk.
func (h *Host) roomOnDisk(n int) error {
	free, size, err := h.cfg.Disk(h.cfg.Home.Root)
	if err != nil {
		return fmt.Errorf("read free space of the store: %w", err)
	}
	keep := min(int64(diskReserve), size/diskReservePart)
	if h.cfg.DiskReserve > 0 {
		keep = h.cfg.DiskReserve
	}
	if need := int64(n)*childDisk + keep; free < need {
		return hint(fmt.Errorf("%w: %d children may write on the store's disk, which has %s free and keeps %s", ErrExhausted, n, mib(free),
			mib(keep)), "remove what nobody needs: forkd rmi, forkd images rm, forkd cleanup; or fork fewer")
	}
	return nil
}

// diskSpace is the free space and the size of a file system.
func diskSpace(path string) (free, size int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, 0, err
	}
	return int64(st.Bavail) * st.Bsize, int64(st.Blocks) * st.Bsize, nil
}

// admitCopy promises room for the copy of a machine's memory. The caller calls done once the copy has been made, or will
// not be.
func (h *Host) admitCopy(bytes int64) (done func(), err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	left, err := h.roomFor(bytes, "")
	if err != nil {
		return nil, err
	}
	if left < 0 {
		return nil, hint(fmt.Errorf("%w: the copy of its memory needs %s, the host has %s to spare", ErrExhausted, mib(bytes),
			mib(max(0, left+bytes))), "end some sandboxes with: forkd kill ID")
	}
	h.promised += bytes
	return sync.OnceFunc(func() {
		h.mu.Lock()
		h.promised -= bytes
		h.mu.Unlock()
	}), nil
}

// roomFor is what the host would have to spare after need more bytes; negative: it has not so much. What was promised to
// others counts as taken until it has been, and cold hot images are evicted, but for the one kept, before anybody is
// refused for want of what they take. The caller holds mu, and keeps it until it has noted its own promise: else two could
// be promised the same.
func (h *Host) roomFor(need int64, keep string) (left int64, err error) {
	for {
		free, err := h.freeMemory()
		if err != nil {
			return 0, err
		}
		if left = free - need; left >= 0 || !h.hot.evictColdest(keep) {
			return left, nil
		}
	}
}

// freeMemory is the memory that nobody has and nobody was promised. The caller holds mu.
func (h *Host) freeMemory() (int64, error) {
	available, err := h.cfg.Available()
	if err != nil {
		return 0, fmt.Errorf("read available memory: %w", err)
	}
	if limit, limited := h.cfg.Groups.Headroom(); limited {
		available = min(available, limit)
	}
	return available - h.promised - h.cfg.MemoryReserve, nil
}

// admitBuild says whether a machine of that size can be booted: its memory becomes an image, all of it.
func (h *Host) admitBuild(bytes int64) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	left, err := h.roomFor(bytes, "")
	if err != nil {
		return err
	}
	if left < 0 {
		return hint(fmt.Errorf("%w: the build's machine needs %s of memory, the host has %s to spare", ErrExhausted, mib(bytes),
			mib(max(0, left+bytes))), "end sandboxes with: forkd kill --all, or make machine.memory smaller in the recipe")
	}
	return nil
}

func mib(n int64) string { return fmt.Sprintf("%d MiB", n>>20) }

// parallelism is how many children are made at once. Nearly all that each waits for is a processor: more of them than
// there are only take turns, and what one has in a processor's cache is gone when it is its turn again.
func parallelism() int { return runtime.NumCPU() }

func availableMemory() (int64, error) { return meminfo("MemAvailable") }

func totalMemory() int64 {
	n, err := meminfo("MemTotal")
	if err != nil {
		return 1 << 30 // no /proc: a bound that is small enough anywhere
	}
	return n
}

func meminfo(key string) (int64, error) {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		name, rest, _ := strings.Cut(lines.Text(), ":")
		if name != key {
			continue
		}
		kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("parse %s: %w", key, err)
		}
		return kib << 10, nil
	}
	return 0, fmt.Errorf("no %s in /proc/meminfo", key)
}
