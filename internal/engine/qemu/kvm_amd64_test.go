package qemu

import (
	"context"
	"testing"
	"time"
	"unsafe"
)

// TestKernelStructs: the kernel reads and writes these by size.
func TestKernelStructs(t *testing.T) {
	for name, c := range map[string][2]uintptr{
		"kvm_regs":                    {unsafe.Sizeof(kvmRegs{}), 144},
		"kvm_sregs":                   {unsafe.Sizeof(kvmSregs{}), 312},
		"kvm_segment":                 {unsafe.Sizeof(kvmSegment{}), 24},
		"kvm_userspace_memory_region": {unsafe.Sizeof(kvmMemoryRegion{}), 32},
	} {
		if c[0] != c[1] {
			t.Errorf("%s has %d bytes, want %d", name, c[0], c[1])
		}
	}
}

// TestMeasureKVM: whatever this host has, the answer is quick, and the same twice.
func TestMeasureKVM(t *testing.T) {
	start := time.Now()
	first, err := measureKVM(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
	t.Logf("%+v in %s", first, time.Since(start))
	second, err := measureKVM(t.Context())
	if err != nil || first.Usable != second.Usable {
		t.Errorf("measured again: %+v, %v; before %+v", second, err, first)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if r, err := measureKVM(ended); err == nil && (r.Usable || r.Reason == "") {
		t.Errorf("with an ended context: %+v", r)
	}
}
