package qemu

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/qemu/slim"
)

// spareable are libraries of which QEMU calls nothing for a machine with the arguments that package qemu builds:
// disassembly, VNC and its passwords, devices of the host, persistent memory, migration by RDMA, other networks than a
// datagram socket, filters in the kernel, exports of disks as files, and the D-Bus.
var spareable = []string{
	"libcapstone", "libpng16", "libjpeg", "libsasl2", "libudev", "libpmem", "librdmacm", "libibverbs",
	"libslirp", "libvdeplug", "libbpf", "libfuse3", "libgio-2.0",
}

// slimmed finds out whether this QEMU starts without them. A host where it does not only starts its machines later, so
// what stands in the way is no error.
func (e *Engine) slimmed(ctx context.Context, h *host) {
	if e.cfg.Libraries == "" || h.platform.userNetwork {
		return // QEMU's own networking is libslirp.
	}
	stand, err := e.standIns(ctx, h)
	if err != nil {
		h.slimReason = fmt.Sprintf("started with all its libraries: %v", err)
		return
	}
	if len(stand.Names) > 0 {
		h.slim = stand
	}
}

func (e *Engine) standIns(ctx context.Context, h *host) (*slim.Stand, error) {
	loaded, err := loadedWith(ctx, h.binary)
	if err != nil {
		return nil, err
	}
	stand, err := slim.Make(ctx, h.binary, loaded, e.cfg.Libraries, spareable)
	if err != nil {
		return nil, err
	}
	// Every symbol is looked up at once, so one that is missing shows here.
	out, err := ask(ctx, h.binary, []string{libraryPath(stand), "LD_BIND_NOW=1"}, "-version")
	if err != nil {
		return nil, err
	}
	v, err := parseVersion(string(out), h.binary, emulators[h.platform.arch])
	if err == nil && v != h.version {
		err = fmt.Errorf("%w: it is %s then", engine.ErrUnavailable, v)
	}
	return stand, err
}

// loadedWith are the libraries that the dynamic linker loads with a program. It is asked as ldd does.
func loadedWith(ctx context.Context, binary string) ([]string, error) {
	out, err := ask(ctx, binary, []string{"LD_TRACE_LOADED_OBJECTS=1"}, "-version")
	if err != nil {
		return nil, err
	}
	var paths []string
	for line := range strings.Lines(string(out)) {
		_, rest, ok := strings.Cut(line, " => ") // Without it: the linker, and what the kernel brings.
		path, _, _ := strings.Cut(rest, " (0x")
		if ok && filepath.IsAbs(path) {
			paths = append(paths, path)
		}
	}
	if len(paths) == 0 {
		return nil, fmt.Errorf("%w: its dynamic linker does not say which libraries it has", engine.ErrUnavailable)
	}
	return paths, nil
}

func libraryPath(stand *slim.Stand) string { return "LD_LIBRARY_PATH=" + stand.Dir }

// environment is the VM process's. A start fills 12 MiB of its heap, page by page: huge pages, where the host has them,
// and one heap instead of one a thread spare three quarters of those faults, an eighth of a start's time.
func (h *host) environment() []string {
	env := []string{"GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"}
	if h.slim != nil && h.slim.Fits() {
		env = append(env, libraryPath(h.slim))
	}
	return env
}

// programs are the files that every VM process may read.
func (h *host) programs() []string {
	files := append([]string{"/etc/ld.so.cache"}, h.files...)
	if h.slim != nil {
		files = append(files, h.slim.Dir)
	}
	return existing(append(files, everyJail...))
}
