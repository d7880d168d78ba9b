package qemu

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/qemu/slim"
	"forkd.dev/forkd/internal/testenv"
)

func TestParseVersion(t *testing.T) {
	em := emulators["amd64"]
	for out, want := range map[string]string{
		"QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright (c)": "7.2.22",
		"QEMU emulator version 10.0.13\n":                                               "10.0.13",
		"QEMU emulator version 11.1":                                                    "11.1",
		"QEMU emulator version 7.1.0":                                                   "",
		"QEMU emulator version 6.2.0 (Debian)":                                          "",
		"hello":                                                                         "",
		"":                                                                              "",
		"QEMU emulator version 99999999999999999999.2.3":                                "",
	} {
		got, err := parseVersion(out, "/usr/bin/qemu-system-x86_64", em)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v; want %q", out, got, err, want)
		}
		if want == "" && strings.Contains(out, "version 7.1") && (!errors.Is(err, engine.ErrUnavailable) || !strings.Contains(err.Error(), "7.2")) {
			t.Errorf("%q: %v, want ErrUnavailable naming the oldest version", out, err)
		}
	}
}

func FuzzParseVersion(f *testing.F) {
	f.Add("QEMU emulator version 7.2.22 (Debian)")
	f.Fuzz(func(_ *testing.T, out string) { _, _ = parseVersion(out, "qemu", emulators["amd64"]) })
}

func TestFindNamesThePackage(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := find("", emulator{name: "qemu-system-nothing", packages: "qemu-system-nothing-package"})
	if err == nil && fileExists("/usr/libexec/qemu-kvm") {
		t.Skip("this host has /usr/libexec/qemu-kvm, which is found instead")
	}
	if !errors.Is(err, engine.ErrUnavailable) || !strings.Contains(err.Error(), "qemu-system-nothing-package") {
		t.Errorf("error %v, want ErrUnavailable naming the package", err)
	}
}

// TestLibraries: QEMU is started without libraries that no machine needs, unless it was replaced meanwhile or does not
// start like that.
func TestLibraries(t *testing.T) {
	testenv.Need(t, "qemu")
	dir := filepath.Join(t.TempDir(), "libraries")
	probed := func() *host {
		e, err := New(Config{Accelerator: TCG, Jail: JailOff, Libraries: dir})
		if err != nil {
			t.Fatal(err)
		}
		h, err := e.host(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	h := probed()
	if h.slim == nil {
		t.Skipf("nothing to do without here: %s", h.slimReason)
	}
	path := libraryPath(h.slim)
	if env := h.environment(); !slices.Contains(env, path) || !slices.Contains(h.programs(), dir) {
		t.Errorf("%v of %v are stood in for, and QEMU starts with %v and may read %v", h.slim.Names, dir, env, h.programs())
	}
	binary := filepath.Join(t.TempDir(), "qemu")
	if err := os.Symlink(h.binary, binary); err != nil {
		t.Fatal(err)
	}
	loaded, err := loadedWith(t.Context(), binary)
	if err != nil {
		t.Fatal(err)
	}
	if h.slim, err = slim.Make(t.Context(), binary, loaded, dir, spareable); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(binary); err != nil {
		t.Fatal(err)
	}
	if env := h.environment(); slices.Contains(env, path) {
		t.Errorf("a program that was replaced starts with %v", env)
	}
	// A directory that cannot be made is no reason to do without machines.
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if h := probed(); h.slim != nil || !strings.Contains(h.slimReason, dir) {
		t.Errorf("without a directory: %+v, %q", h.slim, h.slimReason)
	}
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// TestConfinement: what the machine stands on may be read, never written.
func TestConfinement(t *testing.T) {
	h := &host{platform: platform{arch: "amd64", accelerator: TCG}}
	for _, m := range []mode{coldBoot, restored} {
		spec := goldenSpec(m)
		c := confinement(h, spec, m)
		want := []string{spec.Disk.Path, os.DevNull}
		if m == restored {
			want = append(want, filepath.Dir(spec.Disk.Path))
		}
		if !slices.Equal(c.ReadWrite, want) {
			t.Errorf("the VM process may write %q, want its disk alone, and what a capture puts beside it", c.ReadWrite)
		}
		for _, backing := range spec.Disk.Backing {
			if !slices.Contains(c.ReadOnly, backing) {
				t.Errorf("the VM process may not read %s", backing)
			}
		}
		if slices.Contains(c.ReadOnly, filepath.Dir(spec.Dir)) || slices.Contains(c.ReadOnly, "/") {
			t.Errorf("the VM process may read too much: %q", c.ReadOnly)
		}
	}
}

func TestMeasureClock(t *testing.T) {
	a, err := measureClock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !counterReadable {
		if a != 0 {
			t.Errorf("%d Hz measured of no counter", a)
		}
		return
	}
	b, err := measureClock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if a < 100e6 || a > 20e9 {
		t.Errorf("%d Hz is no CPU's", a)
	}
	if d := float64(a-b) / float64(a); d > 5e-4 || d < -5e-4 {
		t.Errorf("two measurements differ: %d and %d Hz", a, b)
	}
	t.Logf("%d and %d Hz", a, b)
}

// TestConsoleRing: any amount in, the newest 64 KiB out.
func TestConsoleRing(t *testing.T) {
	var c console
	var all []byte
	for i := range 3000 {
		p := []byte(strings.Repeat(string(rune('a'+i%26)), 1+i%97))
		all = append(all, p...)
		if n, err := c.Write(p); n != len(p) || err != nil {
			t.Fatal(n, err)
		}
		if want := all[max(0, len(all)-consoleMax):]; i%300 == 0 && string(c.Bytes()) != string(want) {
			t.Fatalf("after %d bytes the ring does not hold the newest", len(all))
		}
	}
	big := []byte(strings.Repeat("z", 3*consoleMax) + "end")
	if _, err := c.Write(big); err != nil || string(c.Bytes()) != string(big[len(big)-consoleMax:]) {
		t.Error("a write larger than the ring does not leave its end")
	}
}
