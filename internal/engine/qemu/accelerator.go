package qemu

import (
	"context"
	"fmt"
	"strings"

	"forkd.dev/forkd/internal/engine"
)

// cpuTCG is the x86-64-v2 level and what costs nothing to emulate beyond it, exactly as QEMU 7.2's TCG has it. With
// enforce QEMU refuses to start rather than leave a feature out. Left out on purpose: AVX (slow and young in 7.2's
// emulation), ERMS (byte-wise string moves are the slowest to emulate) and SMEP/SMAP. Family and model are those of QEMU's
// Opteron_G3, the newest without AVX: libraries that choose code by them (OpenBLAS, and with it numpy's and scipy's wheels)
// take qemu64 for a processor with 3DNow, and die of an illegal instruction.
const cpuTCG = "qemu64,family=16,model=2,-svm,+cx16,+lahf-lm,+popcnt,+ssse3,+sse4.1,+sse4.2,+aes,+pclmulqdq,+rdrand,+fsgsbase,+movbe," +
	"+abm,+bmi1,+bmi2,+arat,enforce"

// cpuKVM is x86-64-v3, so that a snapshot moves between hosts of one vendor. The vendor is part of it: under KVM the
// guest sees the host's; family and model are added, see kvmCPU.
const cpuKVM = "qemu64,-svm,+cx16,+lahf-lm,+popcnt,+ssse3,+sse4.1,+sse4.2,+aes,+pclmulqdq,+rdrand,+rdseed,+fsgsbase," +
	"+movbe,+abm,+bmi1,+bmi2,+xsave,+xsaveopt,+avx,+avx2,+f16c,+fma,+smep,+smap,+arat,enforce"

// cpuARM64TCG is the newest core that every QEMU from 7.2 on emulates and that has no optional features.
const cpuARM64TCG = "cortex-a72"

func chooseAccelerator(ctx context.Context, cfg Config, h *host) error {
	p := &h.platform
	var err error
	if p.clockHz, err = measureClock(ctx); err != nil {
		return err
	}
	if cfg.Accelerator == TCG {
		h.kvm = kvmResult{Reason: "not measured: software emulation was asked for"}
	} else if h.kvm, err = measureKVM(ctx); err != nil {
		return fmt.Errorf("measure KVM: %w", err)
	}
	if cfg.Accelerator == KVM && !h.kvm.Usable {
		return fmt.Errorf("%w: KVM was asked for and is not usable: %s; ask for auto or tcg instead",
			engine.ErrUnavailable, h.kvm.Reason)
	}
	h.acceleratorReason = h.kvm.Reason
	if !h.kvm.Usable {
		p.accelerator, p.cpu = TCG, cpuTCG
		if p.arch == "arm64" {
			p.cpu = cpuARM64TCG
		}
		return nil
	}
	p.accelerator = KVM
	return kvmCPU(p)
}

// kvmCPU names the CPU a guest under KVM sees.
func kvmCPU(p *platform) error {
	id, err := cpuIdentity()
	if err != nil {
		return err
	}
	if p.arch == "arm64" {
		// KVM on arm64 offers no model but the host's own.
		p.cpu, p.cpuIdentity = "host", id
		return nil
	}
	p.cpu = cpuOf(id)
	return nil
}

// cpuOf has cpuKVM say that it is the vendor's first with x86-64-v3, by the numbers of QEMU's EPYC and Haswell; another
// vendor keeps QEMU's.
func cpuOf(vendor string) string {
	as := "qemu64,vendor=" + vendor + ","
	switch vendor {
	case "AuthenticAMD":
		as += "family=23,model=1,"
	case "GenuineIntel":
		as += "family=6,model=60,"
	}
	return strings.Replace(cpuKVM, "qemu64,", as, 1)
}
