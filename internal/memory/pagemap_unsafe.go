package memory

import (
	"context"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/layer"
)

// The ioctl PAGEMAP_SCAN of Linux 6.7 (include/uapi/linux/fs.h): _IOWR('f', 16, struct pm_scan_arg).
const (
	pagemapScanIoctl = 0xc0606610

	pageIsFile    = 1 << 2
	pageIsPresent = 1 << 3
	pageIsSwapped = 1 << 4
)

// pmScanArg is struct pm_scan_arg.
type pmScanArg struct {
	size, flags       uint64
	start, end        uint64
	walkEnd           uint64
	vec, vecLen       uint64
	maxPages          uint64
	categoryInverted  uint64
	categoryMask      uint64
	categoryAnyofMask uint64
	returnMask        uint64
}

// pageRegion is struct page_region.
type pageRegion struct{ start, end, categories uint64 }

// pagemapScan asks the kernel for all pages of a kind. The error is ENOTTY where it does not know the call.
func (p *Process) pagemapScan(ctx context.Context, f *os.File, kind pageKind) ([]layer.Extent, error) {
	end := uint64(p.base) + uint64(p.size)
	arg := pmScanArg{size: uint64(unsafe.Sizeof(pmScanArg{})), start: uint64(p.base), end: end}
	switch kind {
	case pageOwn:
		arg.categoryMask, arg.categoryInverted = pageIsFile, pageIsFile
		arg.categoryAnyofMask = pageIsPresent | pageIsSwapped
		arg.returnMask = pageIsFile // never set: regions are told apart by nothing else
	case pageAbsent:
		arg.categoryMask, arg.categoryInverted = pageIsPresent, pageIsPresent
		arg.returnMask = pageIsPresent
	}
	regions := make([]pageRegion, 16<<10)
	var pin runtime.Pinner
	pin.Pin(&regions[0])
	defer pin.Unpin()
	// SAFETY: the kernel writes vecLen regions at most there; the array is pinned, and used until the loop ends.
	arg.vec, arg.vecLen = uint64(uintptr(unsafe.Pointer(&regions[0]))), uint64(len(regions))
	var list []layer.Extent
	for arg.start < end {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		// SAFETY: arg has the layout of struct pm_scan_arg, whose size it tells, and outlives the call.
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), pagemapScanIoctl, uintptr(unsafe.Pointer(&arg)))
		if errno != 0 {
			return nil, errno
		}
		for _, r := range regions[:n] {
			list = appendExtent(list, layer.Extent{Offset: int64(r.start - uint64(p.base)), Length: int64(r.end - r.start)})
		}
		if int(n) < len(regions) {
			break
		}
		// Not walkEnd alone: when the kernel gets to the end it leaves there where it last had to empty a buffer of its
		// own (seen with 6.18), and would list the rest again.
		arg.start = max(arg.walkEnd, regions[n-1].end)
	}
	return list, nil
}
