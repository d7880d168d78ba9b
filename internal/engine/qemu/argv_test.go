package qemu

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/engine"
)

var update = flag.Bool("update", false, "write the golden files")

func goldenSpec(m mode) *engine.Spec {
	s := &engine.Spec{
		ID: "sb-1,2", Dir: "/run/m", CPUs: 2, MemoryBytes: 512 << 20,
		Disk: engine.Disk{Path: "/run/m/disk,1.qcow2", Format: "qcow2", Backing: []string{"/run/m/below,1.qcow2", "/images/base"}},
	}
	if m == coldBoot {
		s.Boot = &engine.Boot{Kernel: "/images/vmlinux", Initrd: "/images/initramfs", Cmdline: "forkd.phase=build"}
	}
	return s
}

// TestArguments keeps the arguments as they are: a change in the devices breaks every snapshot made before, so it must
// be seen in review, and come with another layoutRevision.
func TestArguments(t *testing.T) {
	platforms := map[string]platform{
		"amd64-tcg": {arch: "amd64", accelerator: TCG, cpu: cpuTCG, clockHz: 2_600_000_000},
		"amd64-kvm": {arch: "amd64", accelerator: KVM, cpu: cpuOf("AuthenticAMD"), clockHz: 2_600_000_000},
		"arm64-tcg": {arch: "arm64", accelerator: TCG, cpu: cpuARM64TCG},
		"arm64-kvm": {arch: "arm64", accelerator: KVM, cpu: "host", cpuIdentity: "0x00000000413fd0c1"},
	}
	for name, p := range platforms {
		for suffix, m := range map[string]mode{"boot": coldBoot, "restore": restored} {
			t.Run(name+"-"+suffix, func(t *testing.T) {
				args, err := argv(&p, goldenSpec(m), m)
				if err != nil {
					t.Fatal(err)
				}
				compare(t, filepath.Join("testdata", name+"-"+suffix+".args"), oneOptionALine(args))
			})
		}
	}
}

func oneOptionALine(args []string) string {
	var b strings.Builder
	for i, a := range args {
		switch {
		case i == 0:
		case strings.HasPrefix(a, "-"):
			b.WriteByte('\n')
		default:
			b.WriteByte(' ')
		}
		b.WriteString(a)
	}
	return b.String() + "\n"
}

func compare(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s\nif the change is meant: go test -update", path, diff)
	}
}

// TestRestoreDiffersOnlyWhereItMay: a restored machine must have the devices of the one that was frozen.
func TestRestoreDiffersOnlyWhereItMay(t *testing.T) {
	p := platform{arch: "amd64", accelerator: TCG, cpu: cpuTCG, clockHz: 1}
	boot, err := argv(&p, goldenSpec(coldBoot), coldBoot)
	if err != nil {
		t.Fatal(err)
	}
	restore, err := argv(&p, goldenSpec(restored), restored)
	if err != nil {
		t.Fatal(err)
	}
	devices := func(args []string) []string {
		var found []string
		for i, a := range args {
			switch a {
			case "-device", "-machine", "-cpu", "-smp", "-m", "-serial", "-global", "-rtc", "-bios":
				// Tables for the guest's boot, no device.
				found = append(found, a+" "+strings.Replace(args[i+1], ",acpi=off", "", 1))
			}
		}
		return found
	}
	if diff := cmp.Diff(devices(boot), devices(restore)); diff != "" {
		t.Errorf("boot and restore differ in their devices (-boot +restore):\n%s", diff)
	}
}

func TestBadSpecs(t *testing.T) {
	p := platform{arch: "amd64", accelerator: TCG, cpu: cpuTCG}
	for name, c := range map[string]struct {
		mode   mode
		change func(*engine.Spec)
	}{
		"no cpus":         {coldBoot, func(s *engine.Spec) { s.CPUs = 0 }},
		"many cpus":       {coldBoot, func(s *engine.Spec) { s.CPUs = maxCPUs + 1 }},
		"negative memory": {coldBoot, func(s *engine.Spec) { s.MemoryBytes = -1 << 30 }},
		"little memory":   {coldBoot, func(s *engine.Spec) { s.MemoryBytes = 1 << 20 }},
		"half a page":     {coldBoot, func(s *engine.Spec) { s.MemoryBytes += 2048 }},
		"disk format":     {coldBoot, func(s *engine.Spec) { s.Disk.Format = "raw,readonly=off" }},
		"no disk":         {coldBoot, func(s *engine.Spec) { s.Disk.Path = "" }},
		"no directory":    {coldBoot, func(s *engine.Spec) { s.Dir = "" }},
		"no boot":         {coldBoot, func(s *engine.Spec) { s.Boot = nil }},
		"no initramfs":    {coldBoot, func(s *engine.Spec) { s.Boot.Initrd = "" }},
		"kernel":          {restored, func(s *engine.Spec) { s.Boot = &engine.Boot{} }},
	} {
		spec := goldenSpec(c.mode)
		c.change(spec)
		if args, err := argv(&p, spec, c.mode); err == nil {
			t.Errorf("%s: no error; arguments %q", name, args)
		}
	}
}
