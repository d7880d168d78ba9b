package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/qemu/qmp"
	"forkd.dev/forkd/internal/engine/qemu/slim"
	"forkd.dev/forkd/internal/proc"
)

// oldestMajor and oldestMinor are the first QEMU with our machine types.
const (
	oldestMajor = 7
	oldestMinor = 2
)

// probeTime bounds each question to a QEMU; 30 ms are usual.
const probeTime = 15 * time.Second

// host is what was found of this host.
type host struct {
	binary            string
	version           string
	platform          platform
	kvm               kvmResult
	acceleratorReason string
	live              liveHost
	jailer            *proc.Jailer // nil: VM processes get no jails
	jailReason        string       // why
	files             []string     // what QEMU must read that is not below /usr
	slim              *slim.Stand  // nil: QEMU is started with all its libraries
	slimReason        string       // why, unless it was not asked for
}

// layoutRevision changes with the list of devices in argv, which a checkpoint depends on as on the machine type.
const layoutRevision = "+forkd3"

func (h *host) format() engine.Format {
	f := engine.Format{
		Engine: Name, Version: h.version, Arch: h.platform.arch, Accelerator: h.platform.accelerator,
		Machine: h.platform.machine() + layoutRevision, CPUModel: h.platform.cpu,
	}
	if h.platform.cpuIdentity != "" {
		f.CPUModel += " " + h.platform.cpuIdentity
	}
	if h.platform.accelerator == KVM {
		// Emulated machines keep time by devices that count nanoseconds; see decision 0002.
		f.TSCHz = h.platform.clockHz
	}
	return f
}

// emulator is QEMU's name of an architecture, and the packages that have it.
type emulator struct {
	name     string
	packages string
	firmware string // must be in one of QEMU's data directories
}

var emulators = map[string]emulator{
	"amd64": {"qemu-system-x86_64", "qemu-system-x86 (Debian, Ubuntu), qemu-system-x86-core (Fedora) or qemu-system-x86 (Arch, openSUSE)", "qboot.rom"},
	"arm64": {"qemu-system-aarch64", "qemu-system-arm (Debian, Ubuntu), qemu-system-aarch64-core (Fedora) or qemu-system-aarch64 (Arch)", ""},
}

func (e *Engine) probe(ctx context.Context, arch string) (*host, error) {
	cfg := e.cfg
	em, ok := emulators[arch]
	if !ok {
		return nil, fmt.Errorf("%w: no machine is defined for %s, only for amd64 and arm64", engine.ErrUnavailable, arch)
	}
	h := &host{platform: platform{arch: arch, userNetwork: cfg.UserNetwork}}
	var err error
	if h.binary, err = find(cfg.Binary, em); err != nil {
		return nil, err
	}
	if h.version, err = version(ctx, h.binary, em); err != nil {
		return nil, err
	}
	dirs, err := dataDirs(ctx, h.binary)
	if err != nil {
		return nil, err
	}
	if em.firmware != "" && !holds(dirs, em.firmware) {
		return nil, fmt.Errorf("%w: QEMU's firmware %s is missing; install the package qemu-system-data (Debian, Ubuntu), "+
			"or all of %s", engine.ErrUnavailable, em.firmware, em.packages)
	}
	h.files = outsideUsr(append(dirs, h.binary))
	if err := checkMonitor(ctx, h); err != nil {
		return nil, err
	}
	e.slimmed(ctx, h)
	if err := e.probeJail(ctx, h); err != nil {
		return nil, err
	}
	if err := probeLive(ctx, h); err != nil {
		return nil, fmt.Errorf("try write protection of memory: %w", err)
	}
	if err := chooseAccelerator(ctx, cfg, h); err != nil {
		return nil, err
	}
	return h, nil
}

func find(asked string, em emulator) (string, error) {
	places := []string{asked}
	if asked == "" {
		places = nil
		for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/bin", "/usr/local/bin", "/usr/libexec") {
			if filepath.IsAbs(dir) {
				places = append(places, filepath.Join(dir, em.name))
			}
		}
	}
	if asked == "" {
		places = append(places, "/usr/libexec/qemu-kvm") // The only name of it on RHEL and its relatives.
	}
	for _, path := range places {
		st, err := os.Stat(path)
		if err != nil || st.IsDir() || st.Mode()&0o111 == 0 {
			continue
		}
		abs, err := filepath.Abs(path)
		if err != nil {
			return "", err
		}
		return filepath.EvalSymlinks(abs)
	}
	if asked != "" {
		return "", fmt.Errorf("%w: %s is no program; set the path of %s, or leave it out to have it found",
			engine.ErrUnavailable, asked, em.name)
	}
	return "", fmt.Errorf("%w: %s is not installed; install the package %s", engine.ErrUnavailable, em.name, em.packages)
}

var versionLine = regexp.MustCompile(`(?m)^QEMU emulator version (\d+)\.(\d+)(?:\.(\d+))?`)

func version(ctx context.Context, binary string, em emulator) (string, error) {
	out, err := ask(ctx, binary, nil, "-version")
	if err != nil {
		return "", err
	}
	return parseVersion(string(out), binary, em)
}

func parseVersion(out, binary string, em emulator) (string, error) {
	m := versionLine.FindStringSubmatch(out)
	if m == nil {
		return "", fmt.Errorf("%w: %s does not say its version: %q", engine.ErrUnavailable, filepath.Base(binary), firstLine(out))
	}
	var major, minor int
	if _, err := fmt.Sscan(m[1], &major); err != nil {
		return "", err
	}
	if _, err := fmt.Sscan(m[2], &minor); err != nil {
		return "", err
	}
	v := strings.TrimPrefix(m[0], "QEMU emulator version ")
	if major < oldestMajor || major == oldestMajor && minor < oldestMinor {
		return "", fmt.Errorf("%w: QEMU %s is too old, %d.%d or newer is needed; install a newer %s",
			engine.ErrUnavailable, v, oldestMajor, oldestMinor, em.packages)
	}
	return v, nil
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}

func dataDirs(ctx context.Context, binary string) ([]string, error) {
	out, err := ask(ctx, binary, nil, "-L", "help")
	if err != nil {
		return nil, err
	}
	var dirs []string
	for line := range strings.Lines(string(out)) {
		if dir := filepath.Clean(strings.TrimSpace(line)); filepath.IsAbs(dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs, nil
}

func holds(dirs []string, name string) bool {
	return slices.ContainsFunc(dirs, func(dir string) bool {
		_, err := os.Stat(filepath.Join(dir, name))
		return err == nil
	})
}

func outsideUsr(paths []string) []string {
	var out []string
	for _, p := range paths {
		if !strings.HasPrefix(p, "/usr/") {
			out = append(out, p)
		}
	}
	return out
}

// ask runs QEMU for a short answer on its standard output.
func ask(ctx context.Context, binary string, env []string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	p, err := proc.Start(ctx, &proc.Command{Path: binary, Args: args, Env: env, Tied: true})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", engine.ErrUnavailable, err)
	}
	defer p.Release()
	select {
	case <-p.Done():
	case <-ctx.Done():
		return nil, errors.Join(fmt.Errorf("ask %s %s: %w", filepath.Base(binary), args[0], context.Cause(ctx)), p.Kill())
	}
	if err := p.Err(); err != nil {
		return nil, fmt.Errorf("%w: ask for %s: %w", engine.ErrUnavailable, args[0], err)
	}
	return p.Output(), nil
}

// needed are the commands that a distribution may have compiled out.
var needed = []string{
	"stop", "cont", "quit", "getfd", "migrate-incoming", "xen-save-devices-state", "query-block", "query-named-block-nodes",
	"blockdev-add", "blockdev-del", "blockdev-snapshot", "block-commit", "migrate", "query-migrate", "migrate-set-capabilities",
}

// checkMonitor asks a QEMU without a machine which commands it has, and whether it can capture live.
func checkMonitor(ctx context.Context, h *host) error {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	names, capabilities, err := askMonitor(ctx, h)
	if err != nil {
		return fmt.Errorf("%w: ask QEMU which commands it has: %w", engine.ErrUnavailable, err)
	}
	for _, name := range needed {
		if !slices.Contains(names, name) {
			return fmt.Errorf("%w: this QEMU %s was built without the command %s; install the distribution's package %s",
				engine.ErrUnavailable, h.version, name, emulators[h.platform.arch].packages)
		}
	}
	if !slices.Contains(capabilities, backgroundSnapshot) {
		h.live.lacks = fmt.Sprintf("this QEMU %s was built without background snapshots; install the distribution's package %s",
			h.version, emulators[h.platform.arch].packages)
	}
	return nil
}

// askMonitor returns the names of QEMU's commands and migration capabilities.
func askMonitor(ctx context.Context, h *host) (names, capabilities []string, err error) {
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, nil, err
	}
	client := qmp.New(ours)
	defer func() { err = errors.Join(err, client.Close()) }()
	p, err := proc.Start(ctx, &proc.Command{
		Path: h.binary,
		Args: []string{
			"-machine", "none", "-nodefaults", "-no-user-config", "-display", "none", "-S",
			"-chardev", "socket,id=qmp,fd=3", "-mon", "chardev=qmp,mode=control",
		},
		Files: []*os.File{theirs},
		Tied:  true, // QEMU does not mind the end of its monitor's connection.
	})
	_ = theirs.Close()
	if err != nil {
		return nil, nil, err
	}
	defer p.Release()
	defer func() { err = errors.Join(err, p.Kill()) }()
	var list []struct {
		Name       string `json:"name"`
		Capability string `json:"capability"`
	}
	err = client.Batch(ctx, []qmp.Command{{Name: "qmp_capabilities"}, {Name: "query-commands"}}, &list)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %s", err, sayQEMU(p.Output()))
	}
	for _, c := range list {
		names = append(names, c.Name)
	}
	list = nil
	if err := client.Do(ctx, qmp.Command{Name: "query-migrate-capabilities"}, &list); err != nil {
		return nil, nil, err
	}
	for _, c := range list {
		capabilities = append(capabilities, c.Capability)
	}
	filter := qmp.Command{Name: "query-command-line-options", Args: map[string]string{"option": "sandbox"}}
	if err := client.Do(ctx, filter, nil); err != nil {
		return nil, nil, fmt.Errorf("this QEMU %s was built without its filter of system calls (seccomp); install the distribution's package %s: %w",
			h.version, emulators[h.platform.arch].packages, err)
	}
	return names, capabilities, nil
}
