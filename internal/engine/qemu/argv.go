package qemu

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/engine"
)

// Descriptors the VM process inherits, in the order of launchFiles.
const (
	fdRAM = 3 + iota
	fdControl
	fdQMP
	fdConsole
	fdState
	fdLink
	fdPeer // only kept, and only where there is one
)

// What the guest sees of its network, the same in every machine, as package network has it.
const (
	linkMAC = "02:66:6b:64:00:02"
	linkMTU = 65520
)

// platform is everything the arguments depend on besides the spec: what makes two machines of the same format equal.
type platform struct {
	arch        string // GOARCH of the guest
	accelerator string // TCG or KVM
	cpu         string // the whole value of -cpu
	cpuIdentity string // arm64 under KVM: which CPU "host" stands for
	clockHz     int64  // amd64: the host's time stamp counter, for the kernel's delay loops
	userNetwork bool   // no part of the format: what is behind the network device
}

// Versioned machine types that every QEMU from 7.2 on has: a newer QEMU loads what an older one saved under them.
const (
	machineAMD64 = "pc-q35-7.2"
	machineARM64 = "virt-7.2"
)

// TCG's cache of translated guest code, in MiB. It grows as code is run for the first time and is part of each
// machine's own memory, so a child's is bounded; a machine that boots and warms up runs more code, once.
const (
	childCache = 64
	bootCache  = 256
)

func (p *platform) machine() string {
	if p.arch == "arm64" {
		return machineARM64
	}
	return machineAMD64
}

// mode says how a machine begins; it is no part of the format.
type mode int

const (
	coldBoot mode = iota
	restored
)

// argv builds the arguments of QEMU; it is pure. The devices, their order and addresses are part of the format of
// every checkpoint: change them only together with the machine string of the format.
func argv(p *platform, spec *engine.Spec, m mode) ([]string, error) {
	if err := checkSpec(spec, m); err != nil {
		return nil, err
	}
	args := []string{
		"-name", "forkd-" + escape(spec.ID),
		"-no-user-config", "-nodefaults", "-display", "none", "-no-reboot",
		// spawn=deny kills QEMU at any fork or exec; resourcecontrol=deny keeps it from renicing itself.
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
	}
	args = append(args, p.board(spec, m)...)
	args = append(args, ramArgs(spec, m)...)
	args = append(args, p.channelArgs()...)
	args = append(args, p.diskArgs(spec, m)...)
	args = append(args, "-object", "rng-builtin,id=rng0", "-device", "virtio-rng-pci,id=rng,rng=rng0,addr=0x5,"+p.virtio())
	args = append(args, p.linkArgs()...)
	// Both ends of a restore must leave out the configuration section and the description of the stream.
	args = append(args, "-global", "migration.send-configuration=off")
	// Or a machine captured while it was stopped would be stopped again where it is restored.
	args = append(args, "-global", "migration.store-global-state=off")
	// A restored machine would tell its network where it is from now on: on this one there is nobody to be told.
	args = append(args, "-global", "migration.announce-rounds=0")
	if m == restored {
		return append(args, "-incoming", "defer"), nil
	}
	return append(args, "-kernel", spec.Boot.Kernel, "-initrd", spec.Boot.Initrd,
		"-append", p.cmdline(spec)), nil
}

// virtio are the options of every virtio device. The legacy interface is left out: its port I/O is slower and its state
// would have to be restored too. Emulated, a notification is served by the CPU's own thread: to wake another one for it
// took 3 ms more of an exec's 11. The choice is no part of the format.
func (p *platform) virtio() string {
	const modern = "disable-legacy=on,disable-modern=off"
	if p.accelerator == TCG {
		return modern + ",ioeventfd=off"
	}
	return modern
}

func (p *platform) board(spec *engine.Spec, m mode) []string {
	var options string
	if p.arch == "arm64" {
		options = machineARM64 + ",gic-version=3"
	} else {
		// Every device left out is one less to start, probe and restore. The PIT and HPET stay: see decision 0002.
		if m == restored {
			options = ",acpi=off" // The guest has read the tables long ago; a thirtieth of a start is spent to build them.
		}
		options = machineAMD64 + options + ",vmport=off,smm=off,sata=off,smbus=off,usb=off,i8042=off,graphics=off,hpet=on"
	}
	args := []string{"-machine", options + ",suppress-vmdesc=on,dump-guest-core=off,mem-merge=off,memory-backend=ram"}
	if p.arch == "amd64" {
		// qboot starts the kernel some 0.5 s earlier than SeaBIOS under TCG.
		args = append(args, "-bios", "qboot.rom")
	}
	accel := KVM
	if p.accelerator == TCG {
		cache := childCache
		if m == coldBoot {
			cache = bootCache
		}
		accel = fmt.Sprintf("tcg,thread=multi,tb-size=%d", cache)
	}
	return append(args, "-accel", accel, "-cpu", p.cpu,
		"-smp", fmt.Sprintf("cpus=%d,sockets=1,cores=%d,threads=1", spec.CPUs, spec.CPUs),
		"-rtc", "base=utc,clock=host")
}

func ramArgs(spec *engine.Spec, m mode) []string {
	share := "on" // The file is the RAM, and becomes the image.
	if m == restored {
		share = "off" // A private mapping: what the child writes is its own, the image stays as it is.
	}
	return []string{
		"-m", fmt.Sprintf("size=%dk", spec.MemoryBytes>>10),
		"-object", fmt.Sprintf("memory-backend-file,id=ram,size=%d,mem-path=/proc/self/fd/%d,share=%s,prealloc=off,merge=off,dump=off",
			spec.MemoryBytes, fdRAM, share),
	}
}

// channelArgs are the monitor, the console and the control port, all on descriptors made by the daemon.
func (p *platform) channelArgs() []string {
	return []string{
		"-chardev", fmt.Sprintf("socket,id=qmp,fd=%d,server=on,wait=off", fdQMP),
		"-mon", "chardev=qmp,mode=control",
		"-chardev", fmt.Sprintf("socket,id=console,fd=%d,server=on,wait=off", fdConsole),
		"-serial", "chardev:console",
		"-chardev", fmt.Sprintf("socket,id=control,fd=%d,server=on,wait=off", fdControl),
		// An interrupt of its own for each queue: with fewer than these the guest's driver shares one among all, and
		// every byte for the port makes it look into all queues and start a worker for the control queue.
		"-device", "virtio-serial-pci,id=serial,max_ports=2,vectors=7,addr=0x3," + p.virtio(),
		"-device", "virtserialport,bus=serial.0,nr=1,chardev=control,name=" + PortName,
	}
}

// linkArgs are the guest's network device. It is there whether or not there is a network: it is part of the format. Without
// firmware for booting from it, and without asking the guest to announce itself where it was restored, which would wake
// it for nothing.
func (p *platform) linkArgs() []string {
	netdev := fmt.Sprintf("dgram,id=link,local.type=fd,local.str=%d", fdLink)
	if p.userNetwork {
		netdev = "user,id=link,ipv6=off,net=192.0.0.0/29,host=192.0.0.1,dns=192.0.0.3,dhcpstart=192.0.0.4"
	}
	return []string{
		"-netdev", netdev,
		"-device", fmt.Sprintf("virtio-net-pci,id=nic,netdev=link,mac=%s,host_mtu=%d,guest_announce=off,romfile=,addr=0x6,%s",
			linkMAC, linkMTU, p.virtio()),
	}
}

// diskDevice is QEMU's id of the guest's disk.
const diskDevice = "vda"

func (p *platform) diskArgs(spec *engine.Spec, m mode) []string {
	// No flush: a machine's disk never outlives its memory, so nothing is gained by waiting for the medium. What is
	// kept, a snapshot, is made durable from outside.
	const cache = "cache.no-flush=on,discard=ignore,detect-zeroes=off"
	return []string{
		"-blockdev", "driver=file,node-name=disk-file,filename=" + escape(spec.Disk.Path) + ",aio=threads," + cache + dropCache(m, ""),
		"-blockdev", "driver=" + spec.Disk.Format + ",node-name=disk,file=disk-file," + cache + backing(spec, m),
		// A full host gives the guest an error; QEMU's default would stop the guest until somebody came along.
		"-device", "virtio-blk-pci,id=" + diskDevice + ",drive=disk,num-queues=1,discard=off,write-zeroes=off,werror=report,rerror=report,addr=0x4," + p.virtio(),
	}
}

// backing describes the files below a restored machine's disk as their headers do, to add one option: when a machine is
// restored QEMU has the kernel forget what it has cached of the machine's files, for they might be on another host's
// disk. All children read the same ones.
func backing(spec *engine.Spec, m mode) string {
	if m != restored || spec.Disk.Format != "qcow2" {
		return ""
	}
	var text, prefix strings.Builder
	for i, path := range spec.Disk.Backing {
		format := "qcow2"
		if i == len(spec.Disk.Backing)-1 {
			format = "raw"
		}
		prefix.WriteString("backing.")
		fmt.Fprintf(&text, ",%[1]sdriver=%[2]s,%[1]sfile.driver=file,%[1]sfile.filename=%[3]s%[4]s", prefix.String(), format,
			escape(path), dropCache(m, prefix.String()+"file."))
	}
	return text.String()
}

func dropCache(m mode, prefix string) string {
	if m != restored {
		return ""
	}
	return "," + prefix + "drop-cache=off"
}

// cmdline is the engine's part of the kernel's command line and the caller's. The reasons are in decision 0002.
func (p *platform) cmdline(spec *engine.Spec) string {
	words := []string{
		"panic=-1", "quiet", "random.trust_cpu=on", "nowatchdog", "audit=0", "psi=0", "lsm=landlock,yama",
		"cryptomgr.notests",
	}
	if p.arch == "arm64" {
		words = append(words, "console=ttyAMA0")
	} else {
		words = append(words, "console=ttyS0", "reboot=k", "8250.nr_uarts=1", "no_timer_check")
	}
	if p.accelerator == TCG {
		// Emulated code does not speculate; the kernel's mitigations only cost time. Translated code is found by its
		// virtual address: with randomized ones every start of a program translates its libraries anew. The rest protects
		// the guest's kernel from its own users, at a price in every call.
		words = append(words, "mitigations=off", "norandmaps", "init_on_alloc=0", "hardened_usercopy=off",
			"randomize_kstack_offset=off")
	}
	if p.accelerator == TCG && p.arch == "amd64" {
		words = append(words, "clocksource=hpet", "tsc=unstable", "tsc_early_khz="+strconv.FormatInt(p.clockHz/1000, 10))
	}
	if spec.Boot.Cmdline != "" {
		words = append(words, spec.Boot.Cmdline)
	}
	return strings.Join(words, " ")
}

// escape doubles commas, which end a value in QEMU's option lists.
func escape(s string) string { return strings.ReplaceAll(s, ",", ",,") }

const (
	maxCPUs        = 64
	minMemoryBytes = 64 << 20
)

func checkSpec(spec *engine.Spec, m mode) error {
	switch {
	case spec.CPUs < 1 || spec.CPUs > maxCPUs:
		return fmt.Errorf("%d cpus: a machine has 1 to %d", spec.CPUs, maxCPUs)
	case spec.MemoryBytes < minMemoryBytes || spec.MemoryBytes%(1<<20) != 0:
		return fmt.Errorf("memory of %d bytes: it must be whole MiB and at least %d MiB", spec.MemoryBytes, minMemoryBytes>>20)
	case spec.Disk.Format != "raw" && spec.Disk.Format != "qcow2":
		return fmt.Errorf("disk format %q: it must be raw or qcow2", spec.Disk.Format)
	case spec.Disk.Path == "" || spec.Dir == "":
		return errors.New("a machine needs a disk and a directory")
	case m == coldBoot && (spec.Boot == nil || spec.Boot.Kernel == "" || spec.Boot.Initrd == ""):
		return errors.New("a cold start needs a kernel and an initramfs")
	case m == restored && spec.Boot != nil:
		return errors.New("a restored machine takes no kernel")
	}
	return nil
}
