// Package testenv is what tests ask about the machine they run on: whether a thing they need is there, how patient to
// be, and whether they left anything behind.
//
// It is not a fixture library: test images and machines are made by the packages that own them. Only test files may
// import it (package house enforces that). Its own tests run each check against a real leak.
package testenv

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The environment variables that steer tests.
const (
	// EnvRequire lists, separated by blanks, the things that must be present: Need fails instead of skipping. CI
	// sets it, so that a machine that lost QEMU does not turn green by skipping everything.
	EnvRequire = "FORKD_TEST_REQUIRE"
	// EnvNoVM skips every test that starts a machine.
	EnvNoVM = "FORKD_TEST_NO_VM"
	// EnvNoKVM makes tests use software emulation even where KVM works.
	EnvNoKVM = "FORKD_TEST_NO_KVM"
	// EnvOffline skips every test that asks a package archive.
	EnvOffline = "FORKD_TEST_OFFLINE"
	// EnvSoak turns on the long counts.
	EnvSoak = "FORKD_SOAK"
	// EnvScale multiplies every Timeout.
	EnvScale = "FORKD_TEST_SCALE"
	// EnvBinary is a program to test instead of the one that make build made.
	EnvBinary = "FORKD_TEST_BINARY"
)

// probe returns why a thing is missing, or nil.
type probe func() error

// probes are the things that Need knows.
func probes() map[string]probe {
	return map[string]probe{
		"qemu":            qemuMissing,
		"qemu-img":        program("qemu-img", "qemu-utils"),
		"docker-registry": program("docker-registry", "docker-registry; make setup-test fetches it, and make has it in the path"),
		"mke2fs":          program("mke2fs", "e2fsprogs"),
		"e2fsck":          program("e2fsck", "e2fsprogs"),
		"debugfs":         program("debugfs", "e2fsprogs"),
		"gcc":             program("gcc", "gcc"),
		"git":             program("git", "git"),
		"python3":         program("python3", "python3"),
		"bash":            program("bash", "bash"),
		"sh":              program("sh", "dash"),
		"node":            program("node", "nodejs"),
		"npm":             program("npm", "npm"),
		"perl":            program("perl", "perl-base"),
		"agent":           agentMissing,
		"guest":           guestMissing,
		"binary":          binaryMissing,
		"net":             netMissing,
		"root":            rootMissing,
		"unprivileged":    unprivilegedMissing,
		"kvm":             kvmMissing,
		"keyring":         keyringMissing,
		"python-image":    pythonImageMissing,
		"sdk-node":        sdkMissing("node"),
		"sdk-python":      sdkMissing("python"),
		"sdk-runtimes":    sdkMissing("runtimes"),
	}
}

// found are things that only the test which needs them can look for.
func found() []string {
	return []string{
		"cgroups", "cgroup-2", "cgroup-cpu", "cgroup-io", "cgroup-memory", "cgroup-pids", "jail", "landlock", "live", "namespaces", "pypi",
		"strace", "systemd-analyze",
	}
}

func known(thing string) bool {
	_, ok := probes()[thing]
	return ok || slices.Contains(found(), thing)
}

// errNoVM is no lack of this machine's: whoever runs the tests will start machines another time.
var errNoVM = errors.New(EnvNoVM + " is set")

// Need skips the test unless every thing is present, and fails it when a missing thing is named in EnvRequire.
// A name it does not know fails the test: a misspelt need would otherwise never be met.
func Need(t testing.TB, things ...string) {
	t.Helper()
	known := probes()
	for _, thing := range things {
		missing, ok := known[thing]
		if !ok {
			t.Fatalf("testenv: nothing is known about %q", thing)
		}
		err := missing()
		if errors.Is(err, errNoVM) {
			t.Skip(err)
		}
		if err != nil {
			Missing(t, thing, err.Error())
		}
	}
}

// Missing ends the test because a thing that only the caller can look for is not there: it skips, or fails when the
// thing is named in EnvRequire.
func Missing(t testing.TB, thing, reason string) {
	t.Helper()
	if !known(thing) {
		t.Fatalf("testenv: nothing is known about %q", thing)
	}
	if slices.Contains(strings.Fields(os.Getenv(EnvRequire)), thing) {
		t.Fatalf("%s is required here (%s) but missing: %s", thing, EnvRequire, reason)
	}
	t.Skipf("needs %s: %s", thing, reason)
}

// Enterable lets every user into dir, which t.TempDir has made, and into what is above it as far as the run has made that. The
// rest is the host's, and stays as it is: a test that opened directories up to the root took the sticky bit off /tmp.
func Enterable(t testing.TB, dir string) {
	t.Helper()
	last := filepath.Dir(dir) // the test's
	if run := os.Getenv(envRun); run != "" && strings.HasPrefix(dir, run) {
		last = run
	}
	for ; strings.HasPrefix(dir, last); dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err == nil {
			err = os.Chmod(dir, info.Mode()|0o111)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// Soak reports whether the long counts were asked for.
func Soak() bool { return on(EnvSoak) }

// Again reports whether this is the second half of a run, with privileges, that has done all without them: what is done many
// times over may be done less often then.
func Again() bool { return on("FORKD_TEST_AGAIN") }

// OncePerRun skips a test in the second half of a run that has just done it without privileges, where they change nothing
// of what it is about.
func OncePerRun(t testing.TB) {
	t.Helper()
	if Again() {
		t.Skip("done without privileges in this run, which says the same; make soak does it both ways")
	}
}

// Seed is a home of forkd that an earlier run, or an earlier package of this one, has left for others: with the default
// parent and what was downloaded for it. Empty: there is none.
func Seed() string {
	for _, name := range []string{"FORKD_TEST_SEED", "FORKD_TEST_KEEP"} {
		dir := os.Getenv(name)
		if _, err := os.Stat(filepath.Join(dir, "snapshots")); dir != "" && err == nil {
			return dir
		}
	}
	return ""
}

// NoKVM reports whether tests must use software emulation.
func NoKVM() bool { return on(EnvNoKVM) }

// Timeout scales a deadline that is generous on an idle machine with KVM to this machine: emulation, the race
// detector and the present load make everything slower. It is for giving up, never for measuring.
func Timeout(d time.Duration) time.Duration {
	if s, err := strconv.ParseFloat(os.Getenv(EnvScale), 64); err == nil && s > 0 {
		return time.Duration(float64(d) * s)
	}
	scale := 1.0
	if NoKVM() || kvmMissing() != nil {
		scale *= 3
	}
	if raceEnabled {
		scale *= 2
	}
	scale *= 1 + min(load(), 3)
	return time.Duration(float64(d) * scale)
}

// load is the number of runnable threads a core had during the last minute.
func load() float64 {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), " ")
	average, err := strconv.ParseFloat(first, 64)
	if err != nil {
		return 0
	}
	return average / float64(runtime.NumCPU())
}

// Root is the directory of go.mod above the working directory, which in a test is its package's.
func Root(t testing.TB) string {
	t.Helper()
	root, err := root()
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// Binary is the path of the built forkd; it needs "binary".
func Binary(t testing.TB) string {
	t.Helper()
	Need(t, "binary")
	if path := os.Getenv(EnvBinary); path != "" {
		return path
	}
	return filepath.Join(Root(t), "bin", "forkd")
}

func root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("no go.mod above the working directory")
		}
		dir = parent
	}
}

func on(name string) bool {
	value := os.Getenv(name)
	return value != "" && value != "0"
}

// Program finds a program in the path and in the system directories, which an unprivileged user's path often lacks.
func Program(name string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/local/sbin"} {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("no %s in the path", name)
}

func program(name, debianPackage string) probe {
	return func() error {
		if _, err := Program(name); err != nil {
			return fmt.Errorf("%w (Debian's package %s)", err, debianPackage)
		}
		return nil
	}
}

func qemuMissing() error {
	if on(EnvNoVM) {
		return errNoVM
	}
	names := map[string][2]string{
		"amd64": {"qemu-system-x86_64", "qemu-system-x86"},
		"arm64": {"qemu-system-aarch64", "qemu-system-arm"},
	}
	name, ok := names[runtime.GOARCH]
	if !ok {
		return fmt.Errorf("no QEMU is known for %s", runtime.GOARCH)
	}
	return program(name[0], name[1])()
}

func agentMissing() error {
	return built(filepath.Join("internal", "agentbin", "bin", "forkd-agent-"+runtime.GOARCH), "make agent")
}

// guestMissing asks for what the engines' tests boot, where no compiler is at hand.
func guestMissing() error {
	return built(filepath.Join("internal", "engine", "enginetest", "bin", "guest-"+runtime.GOARCH), "make test-guest")
}

func binaryMissing() error {
	if path := os.Getenv(EnvBinary); path != "" {
		_, err := os.Stat(path)
		return err
	}
	return built(filepath.Join("bin", "forkd"), "make build")
}

// sdkMissing asks for what an SDK is checked, built and tested with.
func sdkMissing(which string) probe {
	return func() error {
		return built(filepath.Join(".tools", "sdk", which, ".ready"), "scripts/sdk "+map[bool]string{true: "runtimes", false: "setup"}[which == "runtimes"])
	}
}

func built(path, how string) error {
	root, err := root()
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(root, path)); err != nil {
		return fmt.Errorf("%s is not built; try: %s", path, how)
	}
	return nil
}

func rootMissing() error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("running as uid %d", os.Geteuid())
	}
	return nil
}

func unprivilegedMissing() error {
	if os.Geteuid() == 0 {
		return errors.New("running as root")
	}
	return nil
}

// kvmMissing says only that the device cannot be opened: whether it is of use the engine measures.
func kvmMissing() error {
	if NoKVM() {
		return errors.New(EnvNoKVM + " is set")
	}
	if err := unix.Access("/dev/kvm", unix.R_OK|unix.W_OK); err != nil {
		return fmt.Errorf("open /dev/kvm: %w", err)
	}
	return nil
}

func keyringMissing() error {
	if _, err := os.Stat("/usr/share/keyrings/debian-archive-keyring.gpg"); err != nil {
		return errors.New("no archive keys (Debian's package debian-archive-keyring)")
	}
	return nil
}

// pythonImageMissing: an image with Python is made from an archive's packages and started, so it needs all of that.
func pythonImageMissing() error {
	return errors.Join(qemuMissing(), agentMissing(), program("mke2fs", "e2fsprogs")(), keyringMissing(), netMissing())
}
