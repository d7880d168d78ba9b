package host

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/store"
)

// Admission: what is promised to a child must be there when it asks for it, or the kernel's OOM killer chooses a
// victim among all of them.
const (
	// childOwn is what a child is expected to have of its own: its VM process with the translation cache, and the pages
	// it writes. Measured with the default parent: about 30 MiB after the first evaluation.
	childOwn = 48 << 20
	// reserve stays free for the host.
	reserve = 256 << 20
)

// admit promises room for n children of m and one hot image, or says what is short. The image of a branch that is being
// written is there already. The caller calls done once the children are in the table or have failed.
func (h *Host) admit(_ context.Context, m store.Snapshot, writing *writing, n int) (done func(), err error) {
	available, err := h.cfg.Available()
	if err != nil {
		return nil, fmt.Errorf("read available memory: %w", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, ErrClosed
	}
	if have := len(h.sandboxes) + h.forking; have+n > h.cfg.MaxSandboxes {
		return nil, hint(fmt.Errorf("%w: %d sandboxes would run, the most is %d and %d run now", ErrExhausted, have+n,
			h.cfg.MaxSandboxes, have), "end some with: forkd kill ID")
	}
	need := int64(n+h.forking)*childOwn + reserve
	if writing == nil && !h.hot.has(m) {
		need += m.Engine.MemoryBytes
	}
	if need > available {
		return nil, hint(fmt.Errorf("%w: %d children of %s need about %s of memory, the host has %s available", ErrExhausted,
			n, m.Tag, mib(need), mib(available)), "fork fewer, or end some with: forkd kill ID")
	}
	h.forking += n
	return func() {
		h.mu.Lock()
		h.forking -= n
		h.mu.Unlock()
	}, nil
}

// admitBuild says whether a machine of that size can be booted: its memory becomes an image, all of it.
func (h *Host) admitBuild(bytes int64) error {
	available, err := h.cfg.Available()
	if err != nil {
		return fmt.Errorf("read available memory: %w", err)
	}
	if need := bytes + reserve; need > available {
		return hint(fmt.Errorf("%w: the build's machine needs %s of memory, the host has %s available", ErrExhausted, mib(need),
			mib(available)), "end sandboxes with: forkd kill --all, or make machine.memory smaller in the recipe")
	}
	return nil
}

func mib(n int64) string { return fmt.Sprintf("%d MiB", n>>20) }

// parallelism is two children a core: each waits now and then, for its VM process to start or for its agent to answer.
// Measured with 60 children on two cores: 7.5 to 8.0 s with two at a time, 6.6 to 7.2 s with four, no less with eight.
func parallelism() int { return 2 * runtime.NumCPU() }

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
