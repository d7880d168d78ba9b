//go:build amd64

package qemu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The ioctls of /dev/kvm that a one-page VM needs.
const (
	kvmGetAPIVersion       = 0xae00
	kvmCreateVM            = 0xae01
	kvmGetVCPUMmapSize     = 0xae04
	kvmCreateVCPU          = 0xae41
	kvmSetUserMemoryRegion = 0x4020ae46
	kvmSetTSSAddr          = 0xae47
	kvmRun                 = 0xae80
	kvmSetRegs             = 0x4090ae82
	kvmGetSregs            = 0x8138ae83
	kvmSetSregs            = 0x4138ae84

	kvmAPIVersion  = 12
	kvmExitHLT     = 5
	kvmExitReason  = 8 // offset in struct kvm_run
	kvmImmediately = 1 // offset of immediate_exit in struct kvm_run
	kvmLeastRun    = 16
)

const (
	// shortRun takes microseconds where KVM is what it says, and some 15 ms where guest kernel code is interpreted.
	shortRun = 10_000
	longRun  = 4_000_000
	// kvmLimit ends a run that goes on; interpreted at a thousandth of the speed a long run would take seconds.
	kvmLimit = 300 * time.Millisecond
	// tooSlow is far above what a busy host or nesting costs and far below interpretation.
	tooSlow = 20
)

type kvmRegs struct {
	rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp uint64
	r8, r9, r10, r11, r12, r13, r14, r15   uint64
	rip, rflags                            uint64
}

type kvmSegment struct {
	base                                           uint64
	limit                                          uint32
	selector                                       uint16
	kind, present, dpl, db, s, l, g, avl, unusable uint8
	_                                              uint8
}

type kvmSregs struct {
	cs, ds, es, fs, gs, ss, tr, ldt         kvmSegment
	_                                       [4]uint64 // gdt and idt
	cr0, cr2, cr3, cr4, cr8, efer, apicBase uint64
	_                                       [4]uint64
}

type kvmMemoryRegion struct {
	slot, flags                   uint32
	guestPhysical, size, userAddr uint64
}

// code is the loop of spin: dec ecx; jnz; hlt.
var code = [...]byte{0xff, 0xc9, 0x75, 0xfc, 0xf4}

// measureKVM finds out whether guest kernel code runs at the CPU's speed: /dev/kvm may open, create VMs and run user
// code on a machine whose KVM interprets all code at privilege level 0, where no stock kernel ever comes up.
// The error means that nothing was found out, which must not be remembered.
func measureKVM(ctx context.Context) (kvmResult, error) {
	dev, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return kvmResult{Reason: "this host has no /dev/kvm"}, nil
	case errors.Is(err, fs.ErrPermission):
		return kvmResult{Reason: "no permission to open /dev/kvm; add the user to the group kvm"}, nil
	case err != nil:
		return kvmResult{Reason: "open /dev/kvm: " + err.Error()}, nil
	}
	defer func() { _ = dev.Close() }()
	if err := ctx.Err(); err != nil {
		return kvmResult{}, context.Cause(ctx)
	}
	result := make(chan kvmResult, 1)
	go func() {
		runtime.LockOSThread() // KVM_RUN must stay on a thread that can be signalled; it ends with the goroutine.
		result <- measureHere(dev)
	}()
	return <-result, nil
}

func measureHere(dev *os.File) kvmResult {
	vm, err := newTinyVM(dev)
	if err != nil {
		return kvmResult{Reason: "KVM cannot run even the smallest VM: " + err.Error()}
	}
	defer vm.close()
	var native, guest time.Duration
	for _, turns := range []uint32{shortRun, longRun} {
		native = best(func() (time.Duration, error) { return timed(turns), nil })
		var failure error
		guest = best(func() (time.Duration, error) {
			d, err := vm.run(turns)
			failure = errors.Join(failure, err)
			return d, err
		})
		if failure != nil {
			return kvmResult{Reason: fmt.Sprintf("measured: not usable: a loop of %d turns in guest kernel mode: %v", turns, failure)}
		}
		// A fresh exit costs a few microseconds, however fast the code itself runs.
		if ratio := float64(guest) / float64(native+5*time.Microsecond); ratio > tooSlow {
			return kvmResult{Reason: fmt.Sprintf("measured: not usable: guest kernel code is interpreted, "+
				"%.0f times slower than native", ratio)}
		}
	}
	return kvmResult{Usable: true, Reason: fmt.Sprintf("measured: guest kernel code takes %.2f times the native time",
		float64(guest)/float64(native))}
}

func timed(turns uint32) time.Duration {
	start := time.Now()
	spin(turns)
	return max(time.Since(start), time.Nanosecond)
}

// best is the shortest of three tries, or the first that is long enough to tell by itself or fails.
func best(try func() (time.Duration, error)) time.Duration {
	var shortest time.Duration
	for i := range 3 {
		d, err := try()
		if i == 0 || d < shortest {
			shortest = d
		}
		if err != nil || d > 20*time.Millisecond {
			break
		}
	}
	return shortest
}

// tinyVM is one CPU and one page of memory at address 0, in 32-bit protected mode at privilege level 0.
type tinyVM struct {
	vm, cpu       int
	page, control []byte // mapped; control is the struct kvm_run shared with the kernel
}

func newTinyVM(dev *os.File) (_ *tinyVM, err error) {
	v := &tinyVM{vm: -1, cpu: -1}
	defer func() {
		if err != nil {
			v.close()
		}
	}()
	fd := int(dev.Fd())
	version, err := kvmCall(fd, kvmGetAPIVersion, 0)
	if err != nil || version != kvmAPIVersion {
		return nil, fmt.Errorf("API version %d: %w", version, errors.Join(err, errors.ErrUnsupported))
	}
	size, err := kvmCall(fd, kvmGetVCPUMmapSize, 0)
	if err != nil || size < kvmLeastRun {
		return nil, fmt.Errorf("size of a CPU's control page %d: %w", size, errors.Join(err, errors.ErrUnsupported))
	}
	if v.vm, err = kvmCall(fd, kvmCreateVM, 0); err != nil {
		return nil, fmt.Errorf("create VM: %w", err)
	}
	// Old Intel CPUs want three pages for themselves; where it is not needed it does not matter.
	_, _ = kvmCall(v.vm, kvmSetTSSAddr, 0xfffbd000)
	v.page, err = unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("map memory: %w", err)
	}
	copy(v.page, code[:])
	region := kvmMemoryRegion{size: uint64(len(v.page)), userAddr: uint64(uintptr(unsafe.Pointer(&v.page[0])))}
	// SAFETY: the page is mapped outside Go's heap, cannot move, and stays mapped until the VM is closed.
	if err := kvmSet(v.vm, kvmSetUserMemoryRegion, unsafe.Pointer(&region)); err != nil {
		return nil, fmt.Errorf("give memory: %w", err)
	}
	if v.cpu, err = kvmCall(v.vm, kvmCreateVCPU, 0); err != nil {
		return nil, fmt.Errorf("create CPU: %w", err)
	}
	if v.control, err = unix.Mmap(v.cpu, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("map CPU: %w", err)
	}
	return v, v.protectedMode()
}

func (v *tinyVM) protectedMode() error {
	var s kvmSregs
	// SAFETY: s has the layout and size of struct kvm_sregs (312 bytes, checked by a test) and outlives the calls.
	if err := kvmSet(v.cpu, kvmGetSregs, unsafe.Pointer(&s)); err != nil {
		return fmt.Errorf("read registers: %w", err)
	}
	data := kvmSegment{limit: 0xffffffff, selector: 16, kind: 3, present: 1, db: 1, s: 1, g: 1}
	s.ds, s.es, s.fs, s.gs, s.ss = data, data, data, data, data
	s.cs = kvmSegment{limit: 0xffffffff, selector: 8, kind: 11, present: 1, db: 1, s: 1, g: 1}
	s.cr0 |= 1 // Protected mode, no paging.
	// SAFETY: as above.
	if err := kvmSet(v.cpu, kvmSetSregs, unsafe.Pointer(&s)); err != nil {
		return fmt.Errorf("set registers: %w", err)
	}
	return nil
}

// run runs the loop and returns how long it took. It gives up after kvmLimit.
func (v *tinyVM) run(turns uint32) (time.Duration, error) {
	regs := kvmRegs{rcx: uint64(turns), rflags: 2}
	// SAFETY: regs has the layout and size of struct kvm_regs (144 bytes, checked by a test) and outlives the call.
	if err := kvmSet(v.cpu, kvmSetRegs, unsafe.Pointer(&regs)); err != nil {
		return 0, fmt.Errorf("set registers: %w", err)
	}
	var late atomic.Bool
	pid, tid := os.Getpid(), unix.Gettid()
	fired := make(chan struct{})
	stop := time.AfterFunc(kvmLimit, func() {
		defer close(fired)
		late.Store(true)
		v.control[kvmImmediately] = 1
		// The runtime's own wake-up signal: its handler does nothing here, but the signal takes KVM_RUN out of the guest.
		_ = unix.Tgkill(pid, tid, unix.SIGURG)
	})
	defer func() {
		if !stop.Stop() {
			<-fired // It writes to memory that is about to be unmapped.
		}
	}()
	start := time.Now()
	for {
		_, err := kvmCall(v.cpu, kvmRun, 0)
		took := time.Since(start)
		switch {
		case late.Load():
			return took, fmt.Errorf("not done after %s: guest kernel code is interpreted or does not run", kvmLimit)
		case errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN):
			continue // Go's scheduler signals its threads, too.
		case err != nil:
			return took, err
		}
		// SAFETY: control is at least kvmLeastRun bytes and page aligned.
		if reason := *(*uint32)(unsafe.Pointer(&v.control[kvmExitReason])); reason != kvmExitHLT {
			return took, fmt.Errorf("the VM stopped for reason %d", reason)
		}
		return took, nil
	}
}

func (v *tinyVM) close() {
	for _, m := range [][]byte{v.control, v.page} {
		if m != nil {
			_ = unix.Munmap(m)
		}
	}
	for _, fd := range []int{v.cpu, v.vm} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

func kvmCall(fd int, request, arg uintptr) (int, error) {
	// SAFETY: no pointer is passed.
	n, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, arg)
	if errno != 0 {
		return -1, errno
	}
	return int(n), nil
}

func kvmSet(fd int, request uintptr, arg unsafe.Pointer) error {
	// SAFETY: arg points to the struct that request names, which the caller keeps alive.
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}
