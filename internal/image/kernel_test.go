package image

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"

	"forkd.dev/forkd/internal/image/debian/debiantest"
	"forkd.dev/forkd/internal/testenv"
)

// bzImage wraps a payload as an x86 boot image.
func bzImage(payload []byte) []byte {
	const setup = 2
	image := make([]byte, (setup+1)*512+64)
	image[0x1f1] = setup
	copy(image[0x202:], "HdrS")
	binary.LittleEndian.PutUint16(image[0x206:], 0x20f)
	binary.LittleEndian.PutUint32(image[0x248:], 64)
	binary.LittleEndian.PutUint32(image[0x24c:], uint32(len(payload)))
	return slices.Concat(image, payload)
}

func lz4Payload(t testing.TB, data []byte) []byte {
	t.Helper()
	out := []byte{0x02, 0x21, 0x4c, 0x18}
	for rest := data; len(rest) > 0; {
		n := min(len(rest), lz4Block)
		packed := make([]byte, lz4.CompressBlockBound(n))
		k, err := lz4.CompressBlock(rest[:n], packed, nil)
		if err != nil {
			t.Fatal(err)
		}
		out = binary.LittleEndian.AppendUint32(out, uint32(k))
		out = append(out, packed[:k]...)
		rest = rest[n:]
	}
	return binary.LittleEndian.AppendUint32(out, uint32(len(data)))
}

// vmlinux is an ELF file with one note segment.
func vmlinux(name string, kind uint32) []byte {
	note := binary.LittleEndian.AppendUint32(nil, uint32(len(name)))
	note = binary.LittleEndian.AppendUint32(note, 4)
	note = binary.LittleEndian.AppendUint32(note, kind)
	note = append(note, name...)
	for len(note)%4 != 0 {
		note = append(note, 0)
	}
	note = append(note, 0, 0, 0, 1)
	var b bytes.Buffer
	h := elf.Header64{
		Ident: [16]byte{0x7f, 'E', 'L', 'F', 2, 1, 1}, Type: uint16(elf.ET_EXEC), Machine: uint16(elf.EM_X86_64), Version: 1,
		Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1, Shentsize: 64,
	}
	p := elf.Prog64{Type: uint32(elf.PT_NOTE), Off: 120, Filesz: uint64(len(note)), Memsz: uint64(len(note)), Align: 4}
	_ = binary.Write(&b, binary.LittleEndian, h)
	_ = binary.Write(&b, binary.LittleEndian, p)
	b.Write(note)
	return b.Bytes()
}

func TestUnpackKernel(t *testing.T) {
	data := bytes.Repeat([]byte("vmlinux "), 3<<20) // more than two blocks of LZ4.
	z, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	size := binary.LittleEndian.AppendUint32(nil, uint32(len(data)))
	for name, payload := range map[string][]byte{"lz4": lz4Payload(t, data), "zstd": append(z.EncodeAll(data, nil), size...)} {
		got, err := unpackKernel(bzImage(payload))
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
	good := lz4Payload(t, data)
	for name, payload := range map[string][]byte{
		"unknown": []byte("0123456789"), "truncated": good[:len(good)/2], "no blocks": good[:4], "wrong size": append(bytes.Clone(good), 1, 2, 3, 4),
	} {
		if _, err := unpackKernel(bzImage(payload)); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestPVHNote(t *testing.T) {
	for _, c := range []struct {
		name string
		data []byte
		want bool
	}{
		{"PVH", vmlinux("Xen\x00", 18), true},
		{"another note", vmlinux("Xen\x00", 6), false},
		{"another owner", vmlinux("GNU\x00", 18), false},
		{"not ELF", []byte("x"), false},
	} {
		if got := hasPVHNote(c.data); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func FuzzUnpackKernel(f *testing.F) {
	f.Add(bzImage(lz4Payload(f, []byte("a kernel, a kernel, a kernel"))))
	f.Add(vmlinux("Xen\x00", 18))
	f.Fuzz(func(_ *testing.T, data []byte) {
		if len(data) > 8 { // the size at the end says how much to allocate.
			data[len(data)-1], data[len(data)-2] = 0, 0
		}
		_, _ = unpackKernel(data)
		hasPVHNote(data)
		_, _ = moduleDependencies(bytes.NewReader(data))
	})
}

func TestLoadOrder(t *testing.T) {
	deps := map[string][]string{"a": {"b", "c"}, "b": {"c"}, "c": nil, "x": {"y"}, "l": {"m"}, "m": {"l"}}
	look := func(name string) ([]string, error) {
		d, ok := deps[name]
		if !ok {
			return nil, fs.ErrNotExist
		}
		return d, nil
	}
	got, err := loadOrder([]string{"c", "builtin", "a"}, look)
	if d := cmp.Diff([]string{"c", "b", "a"}, got); err != nil || d != "" {
		t.Error(err, d)
	}
	if _, err := loadOrder([]string{"x"}, look); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing dependency: %v", err)
	}
	if _, err := loadOrder([]string{"l"}, look); err == nil || !strings.Contains(err.Error(), "needs itself") {
		t.Errorf("a cycle: %v", err)
	}
}

func TestModuleName(t *testing.T) {
	for file, want := range map[string]string{
		"virtio-rng.ko": "virtio_rng", "x.ko.xz": "x", "x.ko.zst": "x", "x.ko.gz": "", "x.o": "", "..ko": "", "a/b.ko": "",
	} {
		if got, _ := moduleName(file); got != want {
			t.Errorf("%s: %q", file, got)
		}
	}
}

func kernelArchive(t *testing.T) (*debiantest.Archive, Host) {
	t.Helper()
	a := debiantest.Serve(t)
	a.Suite(t, "bookworm", "",
		debiantest.Package{Name: "linux-image-cloud-amd64", Version: "6.1.1-1", Fields: "Depends: linux-image-6.1.0-1-cloud-amd64 (= 6.1.1-1)\n"},
		debiantest.Package{
			Name: "linux-image-6.1.0-1-cloud-amd64", Version: "6.1.1-1",
			Files: []debiantest.File{
				{Name: "./boot/vmlinuz-6.1.0-1-cloud-amd64", Mode: 0o644, Data: string(bzImage(lz4Payload(t, vmlinux("Xen\x00", 18))))},
			},
		})
	a.Suite(t, "bookworm-updates", "")
	a.Suite(t, "bookworm-security", "")
	return a, Host{Root: a.Host(t), CacheDir: t.TempDir(), Arch: "amd64", Now: debiantest.Now}
}

func TestFetchKernel(t *testing.T) {
	a, cfg := kernelArchive(t)
	k, err := FetchKernel(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if k.Release != "6.1.0-1-cloud-amd64" || k.Version != "6.1.1-1" || filepath.Base(k.Path) != "vmlinux" || filepath.Base(k.BzImage) != "vmlinuz" {
		t.Errorf("got %+v", k)
	}
	data, err := os.ReadFile(k.Path)
	if err != nil || !bytes.Equal(data, vmlinux("Xen\x00", 18)) {
		t.Errorf("vmlinux: %d bytes, %v", len(data), err)
	}
	again, err := FetchKernel(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(k, again); d != "" {
		t.Error(d)
	}
	// A damaged cache is noticed and made again.
	if err := os.WriteFile(k.Path, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := FetchKernel(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	if repaired, err := os.ReadFile(k.Path); err != nil || !bytes.Equal(repaired, data) {
		t.Errorf("after damage: %d bytes, %v", len(repaired), err)
	}
	if n := a.Requests("pool/main/linux-image-6.1.0-1-cloud-amd64_6.1.1-1.deb"); n != 1 {
		t.Errorf("the package was fetched %d times", n)
	}
	if left, _ := filepath.Glob(filepath.Join(cfg.CacheDir, "kernels", "tmp-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// TestDebianKernel extracts the kernel that machines really boot.
func TestDebianKernel(t *testing.T) {
	testenv.Need(t, "net", "keyring", "qemu") // it unpacks 100 MB: with the tests that boot it, not with the fast ones.
	k, err := FetchKernel(t.Context(), Host{Root: os.DirFS("/"), CacheDir: t.TempDir(), Arch: "amd64"})
	if err != nil {
		t.Fatal(err)
	}
	if filepath.Base(k.Path) != "vmlinux" || !strings.HasSuffix(k.Release, "-cloud-amd64") {
		t.Errorf("got %+v", k)
	}
	at := map[string]int{}
	for i, m := range k.Modules {
		at[m.Name] = i + 1
	}
	for _, pair := range [][2]string{{"virtio_ring", "virtio"}, {"virtio", "virtio_pci"}, {"failover", "virtio_net"}, {"inet_diag", "tcp_diag"}} {
		if at[pair[0]] == 0 || at[pair[0]] >= at[pair[1]] {
			t.Errorf("%s is not before %s: %v", pair[0], pair[1], at)
		}
	}
}

func TestKernelAt(t *testing.T) {
	dir := t.TempDir()
	write := func(name, data string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("bzImage", "kernel")
	k, err := KernelAt(filepath.Join(dir, "bzImage"), "")
	if err != nil || len(k.Modules) != 0 {
		t.Fatalf("got %+v, %v", k, err)
	}
	write("modules/a-b.ko", "module")
	write("modules/modules.order", "kernel/drivers/a-b.ko\n")
	with, err := KernelAt(filepath.Join(dir, "bzImage"), "")
	if err != nil || len(with.Modules) != 1 || with.Modules[0].Name != "a_b" || with.Digest == k.Digest {
		t.Errorf("got %+v, %v", with, err)
	}
	for _, bad := range []string{"../../etc/passwd", "x.ko.xz", "missing.ko"} {
		write("modules/modules.order", bad)
		if _, err := KernelAt(filepath.Join(dir, "bzImage"), ""); err == nil {
			t.Errorf("%s was accepted", bad)
		}
	}
	if _, err := KernelAt(dir, ""); err == nil {
		t.Error("a directory was accepted")
	}
}

func TestInitramfs(t *testing.T) {
	dir := t.TempDir()
	module := filepath.Join(dir, "m")
	if err := os.WriteFile(module, []byte("module!"), 0o600); err != nil {
		t.Fatal(err)
	}
	k := &Kernel{Modules: []Module{{Name: "virtio", Path: module}, {Name: "virtio_pci", Path: module}}}
	var a, b bytes.Buffer
	if err := WriteInitramfs(&a, []byte("agent"), k); err != nil {
		t.Fatal(err)
	}
	if err := WriteInitramfs(&b, []byte("agent"), k); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(a.Bytes(), b.Bytes()) {
		t.Error("two archives differ")
	}
	got := readCPIO(t, a.Bytes())
	want := map[string]string{
		"dev": "40755 ", "proc": "40755 ", "sys": "40755 ", "newroot": "40755 ", "run": "40755 ", "tmp": "41777 ", "forkd": "40755 ",
		"forkd/modules": "40755 ", "dev/console": "20600 5:1 ", "init": "100755 agent", "forkd/modules/virtio.ko": "100644 module!",
		"forkd/modules/virtio_pci.ko": "100644 module!", "forkd/modules.order": "100644 virtio.ko\nvirtio_pci.ko\n",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	k.Modules[0].Path = filepath.Join(dir, "missing")
	if err := WriteInitramfs(io.Discard, nil, k); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

// readCPIO reads a newc archive: name → octal mode, device, content.
func readCPIO(t *testing.T, data []byte) map[string]string {
	t.Helper()
	entries := map[string]string{}
	for len(data) >= 110 && string(data[:6]) == "070701" {
		field := func(i int) int {
			v, err := strconv.ParseUint(string(data[6+8*i:14+8*i]), 16, 32)
			if err != nil {
				t.Fatal(err)
			}
			return int(v)
		}
		mode, size, nameSize := field(1), field(6), field(11)
		name := string(data[110 : 110+nameSize-1])
		start := (110 + nameSize + 3) &^ 3
		content := string(data[start : start+size])
		device := ""
		if mode&0o170000 == modeChar {
			device = fmt.Sprintf("%d:%d ", field(9), field(10))
		}
		data = data[(start+size+3)&^3:]
		if name == "TRAILER!!!" {
			return entries
		}
		entries[name] = fmt.Sprintf("%o %s%s", mode, device, content)
	}
	t.Fatal("no trailer")
	return nil
}
