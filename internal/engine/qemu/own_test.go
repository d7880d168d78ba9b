package qemu_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/enginetest"
	"forkd.dev/forkd/internal/engine/qemu"
	"forkd.dev/forkd/internal/proc"
	"forkd.dev/forkd/internal/testenv"
)

// TestVMMCannotWriteSnapshot is invariant 2 on the real process: whatever descriptor a child's own QEMU holds, the
// snapshot's memory does not change through it, and the process is confined.
func TestVMMCannotWriteSnapshot(t *testing.T) {
	e, kit := newEngine(t), enginetest.NewKit(t)
	// The directory's name is longer than a unix socket's may be.
	spec := kit.Spec(t, 2)
	spec.Dir = filepath.Join(spec.Dir, strings.Repeat("long", 30))
	if err := os.Mkdir(spec.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	m, err := e.Boot(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	enginetest.Talk(t, m)
	c, err := m.Freeze(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Memory.Close()
	child := kit.Spec(t, 2)
	child.Boot = nil
	m, err = e.Restore(t.Context(), child, c)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	pid := m.Ref().PID
	f, err := os.OpenFile(fmt.Sprintf("/proc/%d/fd/3", pid), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte("x"), 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("write through the VM process's descriptor: %v, want EPERM", err)
	}
	if err := f.Truncate(0); !errors.Is(err, unix.EPERM) {
		t.Errorf("truncate through the VM process's descriptor: %v, want EPERM", err)
	}
	if _, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); !errors.Is(err, unix.EPERM) {
		t.Errorf("map through the VM process's descriptor: %v, want EPERM", err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("the VM process has not %q:\n%s", want, status)
		}
	}
}

// TestPackedKernel: a kernel given by the user may be a bzImage.
func TestPackedKernel(t *testing.T) {
	e, kit := newEngine(t), enginetest.NewKit(t)
	spec := kit.Spec(t, 1)
	spec.Boot.Kernel = kit.BzImage
	m, err := e.Boot(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	enginetest.Talk(t, m)
}

// TestPanicIsNoticed: an init that ends panics the kernel; the machine ends and says what the kernel said.
func TestPanicIsNoticed(t *testing.T) {
	e, kit := newEngine(t), enginetest.NewKit(t)
	spec := kit.Spec(t, 1)
	spec.Boot.Cmdline = "rdinit=/nowhere"
	m, err := e.Boot(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	<-m.Done()
	if err := m.Err(); !errors.Is(err, engine.ErrDead) || !strings.Contains(err.Error(), "panicked") {
		t.Errorf("Err: %v, want ErrDead naming a panic", err)
	}
	if !strings.Contains(string(m.Console()), "Kernel panic") {
		t.Errorf("the panic is not on the console: %s", m.Console())
	}
}

// TestCaptureOfTwoCPUs: both stop at one instant.
func TestCaptureOfTwoCPUs(t *testing.T) {
	e, kit := newEngine(t), enginetest.NewKit(t)
	features, err := e.Probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	m := boot(t, e, kit, 2)
	enginetest.Talk(t, m)
	base, err := m.Freeze(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer base.Memory.Close()
	spec := kit.Spec(t, 2)
	spec.Boot = nil
	s := enginetest.NewSource(t, e, spec, base)
	g := enginetest.Talk(t, s.M)
	g.Do("churn 16 0")
	for _, mode := range []engine.CaptureMode{engine.CaptureDiff, engine.CaptureLive, engine.CaptureDiff} {
		if mode == engine.CaptureLive && !features.Live {
			continue
		}
		c := s.Capture(t, mode)
		enginetest.Talk(t, s.Grandchild(t, e, kit, c)).Do("check")
	}
	g.Do("check")
}

func TestConfig(t *testing.T) {
	if _, err := qemu.New(qemu.Config{Accelerator: "fast"}); err == nil {
		t.Error("an unknown accelerator is no error")
	}
	e, err := qemu.New(qemu.Config{Binary: "/nowhere/qemu"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Probe(t.Context()); !errors.Is(err, engine.ErrUnavailable) {
		t.Errorf("a binary that is not there: %v, want ErrUnavailable", err)
	}
}

// TestNoSilentFallback is invariant 9: KVM that was asked for and does not work is an error.
func TestNoSilentFallback(t *testing.T) {
	testenv.Need(t, "qemu")
	auto, err := qemu.New(qemu.Config{})
	if err != nil {
		t.Fatal(err)
	}
	f, err := auto.Probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Log(f.AcceleratorReason)
	kvm, err := qemu.New(qemu.Config{Accelerator: qemu.KVM})
	if err != nil {
		t.Fatal(err)
	}
	switch _, err := kvm.Probe(t.Context()); {
	case f.KVMUsable && err != nil:
		t.Errorf("KVM was found usable but asking for it fails: %v", err)
	case !f.KVMUsable && !errors.Is(err, engine.ErrUnavailable):
		t.Errorf("KVM is not usable but asking for it gives %v", err)
	}
	if confined, _ := proc.ConfinementAvailable(); confined != (f.Confined == "landlock") {
		t.Errorf("Probe says confined %q, the kernel %v", f.Confined, confined)
	}
	if !slices.Contains([]string{qemu.TCG, qemu.KVM}, f.Format.Accelerator) {
		t.Errorf("accelerator %q", f.Format.Accelerator)
	}
}
