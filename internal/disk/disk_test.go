package disk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m.Run) }

func openStore(t *testing.T) *layer.Store {
	t.Helper()
	s, err := layer.Open(filepath.Join(t.TempDir(), "layers"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// tool runs a program of QEMU or e2fsprogs and returns what it prints.
func tool(t *testing.T, name string, args ...string) string {
	t.Helper()
	switch name {
	case "qemu-io":
		testenv.Need(t, "qemu-img") // of the same package
	case "dumpe2fs":
		testenv.Need(t, "e2fsck")
	default:
		testenv.Need(t, name)
	}
	path, err := testenv.Program(name)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), path, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
	return string(out)
}

// rawDisk writes a sparse raw disk with random data at these offsets.
func rawDisk(t *testing.T, path string, size int64, at ...int64) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	r := rand.NewChaCha8([32]byte{byte(len(at))})
	for _, off := range at {
		b := make([]byte, ClusterSize)
		_, _ = r.Read(b)
		if _, err := f.WriteAt(b, off); err != nil {
			t.Fatal(err)
		}
	}
}

func equalFiles(t *testing.T, a, b string) {
	t.Helper()
	x, err := os.ReadFile(a)
	if err != nil {
		t.Fatal(err)
	}
	y, err := os.ReadFile(b)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(x, y) {
		t.Errorf("%s and %s differ", filepath.Base(a), filepath.Base(b))
	}
}

func wantOnly(t *testing.T, dir string, names ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if strings.Join(got, " ") != strings.Join(names, " ") {
		t.Errorf("directory has %q, want %q", got, names)
	}
}

func TestFormat(t *testing.T) {
	testenv.Need(t, "mke2fs")
	dir := t.TempDir()
	path := filepath.Join(dir, "disk")
	if err := Format(t.Context(), path, 1<<30); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	if st.Size != 1<<30 || st.Blocks*512 > 1<<20 {
		t.Errorf("a disk of %d bytes occupies %d", st.Size, st.Blocks*512)
	}
	tool(t, "e2fsck", "-fn", path)
	super := tool(t, "dumpe2fs", "-h", path)
	if strings.Contains(super, "has_journal") {
		t.Errorf("it has a journal:\n%s", super)
	}
	if groups := tool(t, "dumpe2fs", path); strings.Count(groups, "ITABLE_ZEROED") != 8 {
		t.Errorf("a guest's kernel would zero inode tables in the background:\n%s", groups)
	}
	if root := tool(t, "debugfs", "-R", "stat /", path); !strings.Contains(root, "User:     0   Group:     0") {
		t.Errorf("the root directory is not root's:\n%s", root)
	}
}

func TestFormatRefuses(t *testing.T) {
	testenv.Need(t, "mke2fs")
	dir := t.TempDir()
	for _, size := range []int64{0, -1, 1, MinFormatSize - ClusterSize, MinFormatSize + 1} {
		if err := Format(t.Context(), filepath.Join(dir, "disk"), size); err == nil {
			t.Errorf("size %d was accepted", size)
		}
	}
	wantOnly(t, dir)
	taken := filepath.Join(dir, "taken")
	if err := os.WriteFile(taken, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Format(t.Context(), taken, 16<<20); !errors.Is(err, fs.ErrExist) {
		t.Errorf("over an existing file: %v", err)
	}
	if b, err := os.ReadFile(taken); err != nil || string(b) != "precious" {
		t.Errorf("the existing file is now %q, %v", b, err)
	}
}

func TestCreateOverlay(t *testing.T) {
	dir := t.TempDir()
	base, top, grand := filepath.Join(dir, "base.raw"), filepath.Join(dir, "top"), filepath.Join(dir, "grand")
	rawDisk(t, base, 1<<30, 0, 700<<20)
	if err := CreateOverlay(top, base, Raw); err != nil {
		t.Fatal(err)
	}
	if err := CreateOverlay(grand, "top", Qcow2); err != nil { // relative to grand's directory
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(top, &st); err != nil || st.Blocks*512 > 16<<10 {
		t.Errorf("an empty overlay occupies %d bytes, %v", st.Blocks*512, err)
	}
	if err := CreateOverlay(top, base, Raw); !errors.Is(err, fs.ErrExist) {
		t.Errorf("over an existing file: %v", err)
	}
	tool(t, "qemu-img", "check", top)
	tool(t, "qemu-img", "check", grand)
	tool(t, "qemu-img", "compare", "-f", "raw", "-F", "qcow2", base, grand)
	info := tool(t, "qemu-img", "info", grand)
	for _, want := range []string{"virtual size: 1 GiB", "backing file: top", "backing file format: qcow2", "cluster_size: 65536"} {
		if !strings.Contains(info, want) {
			t.Errorf("qemu-img info lacks %q:\n%s", want, info)
		}
	}
	tool(t, "qemu-io", "-f", "qcow2", "-c", "write -P 7 700M 128k", "-c", "write -P 8 1073676288 64k", grand)
	tool(t, "qemu-img", "check", grand)
}

func TestCreateOverlayRefuses(t *testing.T) {
	dir := t.TempDir()
	base, odd := filepath.Join(dir, "base"), filepath.Join(dir, "odd")
	rawDisk(t, base, 1<<20)
	rawDisk(t, odd, 1<<20+512)
	top := filepath.Join(dir, "top")
	for name, args := range map[string][2]string{
		"missing":       {filepath.Join(dir, "nothing"), Raw},
		"odd size":      {odd, Raw},
		"not qcow2":     {base, Qcow2},
		"other format":  {base, "vmdk"},
		"no name":       {"", Raw},
		"protocol":      {"nbd:unix:/x", Raw},
		"json":          {"json:{}", Raw},
		"NUL":           {base + "\x00", Raw},
		"name too long": {filepath.Join(dir, strings.Repeat("x/", 600)), Raw},
	} {
		t.Run(name, func(t *testing.T) {
			if err := CreateOverlay(top, args[0], args[1]); err == nil {
				t.Error("accepted")
			}
		})
	}
	wantOnly(t, dir, "base", "odd")
}

func TestBaseRoundTrip(t *testing.T) {
	dir, s := t.TempDir(), openStore(t)
	base, back := filepath.Join(dir, "base"), filepath.Join(dir, "back")
	rawDisk(t, base, 64<<20, 0, 1<<20, 33<<20, 64<<20-ClusterSize)
	info, err := SaveBase(t.Context(), s, base)
	if err != nil {
		t.Fatal(err)
	}
	if info.OwnBytes != 4*ClusterSize || !info.Parent.IsZero() {
		t.Errorf("got %+v", info)
	}
	if err := LoadBase(t.Context(), s, info.Digest, back); err != nil {
		t.Fatal(err)
	}
	equalFiles(t, base, back)
	var st unix.Stat_t
	if err := unix.Stat(back, &st); err != nil || st.Blocks*512 > 5*ClusterSize || st.Mode&0o222 != 0 {
		t.Errorf("loaded disk occupies %d bytes, mode %o, %v", st.Blocks*512, st.Mode, err)
	}
	wantOnly(t, dir, "back", "base")
	if err := LoadBase(t.Context(), s, layer.Digest{1}, filepath.Join(dir, "none")); !errors.Is(err, layer.ErrNotFound) {
		t.Errorf("unknown digest: %v", err)
	}
	wantOnly(t, dir, "back", "base")
}

// A machine's overlay with written, discarded and zeroed clusters, saved, loaded and seen through QEMU.
func TestOverlayRoundTrip(t *testing.T) {
	dir, s := t.TempDir(), openStore(t)
	base, top, back := filepath.Join(dir, "base"), filepath.Join(dir, "top"), filepath.Join(dir, "back")
	const size = 1200 << 20 // three second-level tables
	rawDisk(t, base, size, 0, ClusterSize, 2*ClusterSize, 600<<20, 600<<20+ClusterSize)
	root, err := SaveBase(t.Context(), s, base)
	if err != nil {
		t.Fatal(err)
	}
	if err := CreateOverlay(top, base, Raw); err != nil {
		t.Fatal(err)
	}
	tool(t, "qemu-io", "-f", "qcow2",
		"-c", "write -P 1 4096 512", // copies the rest of cluster 0
		"-c", "write -z 64k 64k", // zero over the base's data
		"-c", "write -P 2 128k 64k", "-c", "write -z 128k 64k", // zero, with a place allocated
		"-c", "write -P 3 600M 192k", "-c", "discard 614464k 64k", // 600M+64k
		"-c", "write -P 4 1258225664 64k", // the last cluster
		top)
	info, err := SaveOverlay(t.Context(), s, top, root.Digest)
	if err != nil {
		t.Fatal(err)
	}
	extents, err := s.Extents(t.Context(), info.Digest)
	if err != nil {
		t.Fatal(err)
	}
	zero := int64(0)
	for _, e := range extents {
		if e.Zero {
			zero += e.Length
		}
	}
	if info.OwnBytes != 4*ClusterSize || zero != 3*ClusterSize {
		t.Errorf("own %d bytes, zero %d: %+v", info.OwnBytes, zero, extents)
	}
	if err := LoadChain(t.Context(), s, info.Digest, root.Digest, back, base, Raw); err != nil {
		t.Fatal(err)
	}
	tool(t, "qemu-img", "check", back)
	tool(t, "qemu-img", "compare", "-f", "qcow2", "-F", "qcow2", top, back)
	again, err := SaveOverlay(t.Context(), s, back, root.Digest)
	if err != nil || again != info {
		t.Errorf("saved again: %+v, %v, want %+v", again, err, info)
	}

	// Flattened, both layers in one raw disk.
	flat := filepath.Join(dir, "flat")
	if err := LoadBase(t.Context(), s, info.Digest, flat); err != nil {
		t.Fatal(err)
	}
	tool(t, "qemu-img", "compare", "-f", "qcow2", "-F", "raw", top, flat)

	// A child of the loaded overlay.
	child := filepath.Join(dir, "child")
	if err := CreateOverlay(child, back, Qcow2); err != nil {
		t.Fatal(err)
	}
	tool(t, "qemu-img", "compare", "-f", "qcow2", "-F", "qcow2", top, child)
	wantOnly(t, dir, "back", "base", "child", "flat", "top")
}

func TestEmptyOverlayIsALayer(t *testing.T) {
	dir, s := t.TempDir(), openStore(t)
	base, top, back := filepath.Join(dir, "base"), filepath.Join(dir, "top"), filepath.Join(dir, "back")
	rawDisk(t, base, 8<<20, 0)
	root, err := SaveBase(t.Context(), s, base)
	if err != nil {
		t.Fatal(err)
	}
	if err := CreateOverlay(top, base, Raw); err != nil {
		t.Fatal(err)
	}
	info, err := SaveOverlay(t.Context(), s, top, root.Digest)
	if err != nil || info.OwnBytes != 0 {
		t.Fatal(info, err)
	}
	if err := LoadChain(t.Context(), s, info.Digest, root.Digest, back, base, Raw); err != nil {
		t.Fatal(err)
	}
	tool(t, "qemu-img", "check", back)
	if _, err := SaveOverlay(t.Context(), s, top, layer.Digest{}); !errors.Is(err, layer.ErrNotFound) {
		t.Errorf("without a parent: %v", err)
	}
	rawDisk(t, filepath.Join(dir, "larger"), 16<<20, 0)
	larger, err := SaveBase(t.Context(), s, filepath.Join(dir, "larger"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := SaveOverlay(t.Context(), s, top, larger.Digest); err == nil {
		t.Error("a parent of another size was accepted")
	}
	if err := LoadChain(t.Context(), s, info.Digest, root.Digest, back, filepath.Join(dir, "larger"), Raw); err == nil {
		t.Error("a backing file of another size was accepted")
	}
}

// sampleOverlay is a small valid qcow2: cluster 0 has data, 1 is zero, 2 is unallocated.
func sampleOverlay(tb testing.TB) []byte {
	tb.Helper()
	f, err := os.CreateTemp(tb.TempDir(), "qcow2")
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	h := &qcowHeader{size: 1 << 20, l1Entries: 1, backing: "/base", backingFormat: Raw}
	s, err := newOverlaySink(f, h, []layer.Extent{{Length: ClusterSize}, {Offset: ClusterSize, Length: ClusterSize, Zero: true}})
	if err != nil {
		tb.Fatal(err)
	}
	if _, err := s.WriteAt(bytes.Repeat([]byte{5}, ClusterSize), 0); err != nil {
		tb.Fatal(err)
	}
	b, err := os.ReadFile(f.Name())
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// readAll opens bytes as an overlay and reads all it holds.
func readAll(tb testing.TB, b []byte) ([]layer.Extent, error) {
	tb.Helper()
	o, err := newOverlay(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return nil, err
	}
	st := &stack{}
	if err := st.combine(tb.Context(), []string{"overlay"}, []*overlay{o}); err != nil {
		return nil, err
	}
	for _, e := range st.extents {
		if e.Zero {
			continue
		}
		if _, err := io.Copy(io.Discard, io.NewSectionReader(st, e.Offset, e.Length)); err != nil {
			return nil, err
		}
	}
	return st.extents, nil
}

func TestReadQcow2Refuses(t *testing.T) {
	const l1, l2 = 3 * ClusterSize, 4 * ClusterSize
	be := binary.BigEndian
	put32 := func(off int, v uint32) func([]byte) []byte {
		return func(b []byte) []byte { be.PutUint32(b[off:], v); return b }
	}
	put64 := func(off int, v uint64) func([]byte) []byte {
		return func(b []byte) []byte { be.PutUint64(b[off:], v); return b }
	}
	for name, tc := range map[string]struct {
		change func([]byte) []byte
		want   string
	}{
		"intact": {func(b []byte) []byte { return b }, ""},
		"longer header": {func(b []byte) []byte {
			copy(b[112:], b[104:400])
			clear(b[104:112])
			be.PutUint32(b[100:], 112)
			be.PutUint64(b[8:], be.Uint64(b[8:])+8)
			return b
		}, ""},
		"last cluster short":   {func(b []byte) []byte { return b[:len(b)-1000] }, ""},
		"empty":                {func([]byte) []byte { return nil }, "not a qcow2"},
		"magic":                {put32(0, 1), "not a qcow2"},
		"version 2":            {put32(4, 2), "version 2"},
		"small clusters":       {put32(20, 9), "clusters of"},
		"encrypted":            {put32(32, 1), "encrypted"},
		"internal snapshots":   {put32(60, 1), "internal snapshots"},
		"dirty":                {put64(72, 1), "dirty"},
		"corrupt":              {put64(72, 2), "corrupt"},
		"external data":        {put64(72, 4), "external data"},
		"zstd":                 {put64(72, 8), "compression type"},
		"extended L2":          {put64(72, 16), "extended L2"},
		"unknown feature":      {put64(72, 1<<40), "unknown incompatible feature (bit 40)"},
		"header length":        {put32(100, 1<<31), "header length"},
		"short header":         {put32(100, 72), "header length"},
		"size 0":               {put64(24, 0), "impossible size"},
		"size huge":            {put64(24, 1<<62), "impossible size"},
		"few L1 entries":       {put32(36, 0), "too few"},
		"L1 beyond":            {put64(40, 1<<40), "first-level table"},
		"L1 beyond, negative":  {put64(40, 1<<63), "first-level table"},
		"L1 unaligned":         {put64(40, l1+8), "first-level table"},
		"L1 at 0":              {put64(40, 0), "first-level table"},
		"backing name beyond":  {put64(8, ClusterSize), "backing file name"},
		"backing in header":    {put64(8, 50), "backing file name"},
		"backing name long":    {put32(16, 1024), "backing file name"},
		"extension beyond":     {put32(108, 1<<31), "header extension"},
		"L1 reserved bit":      {put64(l1, l2|1), "means nothing"},
		"L2 beyond":            {put64(l1, 1<<50), "second-level table"},
		"L2 unaligned":         {put64(l1, l2+512), "second-level table"},
		"L2 partly beyond":     {func(b []byte) []byte { be.PutUint64(b[l1:], uint64(len(b)-ClusterSize)); return b[:len(b)-1] }, "second-level table"},
		"compressed":           {put64(l2, 1<<62|5*ClusterSize), "compressed"},
		"reserved bit":         {put64(l2, 1<<57), "means nothing"},
		"data unaligned":       {put64(l2, 5*ClusterSize+512), "means nothing"},
		"data beyond":          {put64(l2, 1<<40), "beyond"},
		"one cluster used all": {func(b []byte) []byte { return repeatEntries(b, l2, 5*ClusterSize) }, "more than once"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := readAll(t, tc.change(sampleOverlay(t)))
			if (tc.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func repeatEntries(b []byte, l2 int, entry uint64) []byte {
	for i := range 16 {
		binary.BigEndian.PutUint64(b[l2+8*i:], entry)
	}
	return b
}

// Fuzzed are the parts that are read: the header's beginning and an entry of each table.
func FuzzReadQcow2(f *testing.F) {
	sample := sampleOverlay(f)
	f.Add(sample[:200], binary.BigEndian.Uint64(sample[3*ClusterSize:]), binary.BigEndian.Uint64(sample[4*ClusterSize:]))
	f.Add(sample[:104], uint64(0), uint64(1))
	f.Fuzz(func(t *testing.T, head []byte, l1, l2 uint64) {
		b := bytes.Clone(sample)
		copy(b[:ClusterSize], head)
		binary.BigEndian.PutUint64(b[3*ClusterSize:], l1)
		binary.BigEndian.PutUint64(b[4*ClusterSize:], l2)
		extents, err := readAll(t, b)
		if err == nil && len(extents) > 2*l2Entries {
			t.Fatalf("%d extents of a file with one table", len(extents))
		}
	})
}

func TestSinkRefusesClustersItHasNot(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := &qcowHeader{size: 1 << 20, l1Entries: 1, backing: "/base", backingFormat: Raw}
	s, err := newOverlaySink(f, h, []layer.Extent{{Offset: ClusterSize, Length: ClusterSize}})
	if err != nil {
		t.Fatal(err)
	}
	for _, off := range []int64{0, ClusterSize + 1, 2 * ClusterSize} {
		if _, err := s.WriteAt(make([]byte, ClusterSize), off); err == nil {
			t.Errorf("a write at %d was accepted", off)
		}
	}
}

func TestLayoutOfLargeFiles(t *testing.T) {
	h := &qcowHeader{size: qcowMaxSize, l1Entries: l1Need(qcowMaxSize)}
	for _, data := range []int64{0, 1, refBlockEntries - 40, refBlockEntries, 1 << 22} {
		l := newLayout(h, 3, data)
		if l.refBlocks*refBlockEntries < l.clusters() || l.refTable*ClusterSize/8 < l.refBlocks {
			t.Errorf("%d data clusters: %+v does not count itself", data, l)
		}
	}
}

func TestFullDiskIsNamed(t *testing.T) {
	err := fullDisk(&os.PathError{Op: "write", Path: "x", Err: unix.ENOSPC})
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "the disk is full") {
		t.Error(err)
	}
}

func BenchmarkCreateOverlay(b *testing.B) {
	dir := b.TempDir()
	base, top := filepath.Join(dir, "base"), filepath.Join(dir, "top")
	if err := errors.Join(os.WriteFile(base, nil, 0o600), os.Truncate(base, 10<<30)); err != nil {
		b.Fatal(err)
	}
	var spent time.Duration
	for b.Loop() {
		start := time.Now()
		if err := CreateOverlay(top, base, Raw); err != nil {
			b.Fatal(err)
		}
		spent += time.Since(start)
		if err := os.Remove(top); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(spent.Microseconds())/float64(b.N), "µs/create")
}
