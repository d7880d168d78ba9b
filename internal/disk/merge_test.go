package disk

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/testenv"
)

// A chain of overlays that QEMU wrote, merged from every link on, and through the layer store.
func TestMergeAndChain(t *testing.T) {
	dir, s := t.TempDir(), openStore(t)
	const size = 1200 << 20 // three second-level tables
	base := filepath.Join(dir, "base")
	rawDisk(t, base, size, 0, ClusterSize, 2*ClusterSize, 5*ClusterSize, 600<<20, 600<<20+ClusterSize)
	root, err := SaveBase(t.Context(), s, base)
	if err != nil {
		t.Fatal(err)
	}
	tops, digests := []string{base}, []layer.Digest{root.Digest}
	for i, commands := range [][]string{
		{"write -P 1 4096 512", "write -z 64k 64k", "write -P 2 600M 256k", "write -P 3 1258225664 64k"},
		{"write -P 4 64k 4k", "write -P 5 600M 64k", "write -z 614464k 64k", "write -P 6 900M 2M"},
		{}, // nothing was written
		{"discard 900M 1M", "write -P 7 320k 4k", "write -z 20M 128k", "write -P 9 614464k 64k"},
	} {
		top := filepath.Join(dir, fmt.Sprint("top", i))
		backing, format := fmt.Sprint("top", i-1), Qcow2
		if i == 0 {
			backing, format = base, Raw
		}
		if err := CreateOverlay(top, backing, format); err != nil {
			t.Fatal(err)
		}
		args := []string{"-f", "qcow2"}
		for _, c := range commands {
			args = append(args, "-c", c)
		}
		if len(commands) > 0 {
			tool(t, "qemu-io", append(args, top)...)
		}
		info, err := SaveOverlay(t.Context(), s, top, digests[i])
		if err != nil {
			t.Fatal(err)
		}
		tops, digests = append(tops, top), append(digests, info.Digest)
	}
	last := len(tops) - 1
	merged := filepath.Join(dir, "merged")
	for from := range last {
		format := Qcow2
		if from == 0 {
			format = Raw
		}
		if err := Merge(t.Context(), merged, tops[from+1:], tops[from], format); err != nil {
			t.Fatal(err)
		}
		tool(t, "qemu-img", "check", merged)
		tool(t, "qemu-img", "compare", "-f", "qcow2", "-F", "qcow2", tops[last], merged)
		if st, err := os.Stat(merged); err != nil || st.Mode()&0o222 != 0 {
			t.Errorf("the merged file can be written: %v, %v", st.Mode(), err)
		}
		loaded := filepath.Join(dir, "loaded")
		if err := LoadChain(t.Context(), s, digests[last], digests[from], loaded, tops[from], format); err != nil {
			t.Fatal(err)
		}
		tool(t, "qemu-img", "check", loaded)
		tool(t, "qemu-img", "compare", "-f", "qcow2", "-F", "qcow2", tops[last], loaded)
		if from%2 == 1 {
			continue // the rest takes long
		}
		info, err := SaveOverlays(t.Context(), s, tops[from+1:], digests[from])
		if err != nil {
			t.Fatal(err)
		}
		again, err := SaveOverlay(t.Context(), s, merged, digests[from])
		if err != nil || again != info {
			t.Errorf("the merged file is layer %+v, its parts are %+v, %v", again, info, err)
		}
		back := filepath.Join(dir, "back")
		if err := LoadBase(t.Context(), s, info.Digest, back); err != nil {
			t.Fatal(err)
		}
		tool(t, "qemu-img", "compare", "-f", "qcow2", "-F", "raw", tops[last], back)
		compact, err := s.Merge(t.Context(), digests[last], digests[from])
		if err != nil {
			t.Fatal(err)
		}
		if err := LoadChain(t.Context(), s, compact.Digest, digests[from], loaded, tops[from], format); err != nil {
			t.Fatal(err)
		}
		tool(t, "qemu-img", "compare", "-f", "qcow2", "-F", "qcow2", tops[last], loaded)
	}
	// Where the base is zero anyway, a zero cluster is not kept.
	info, err := SaveOverlays(t.Context(), s, tops[1:], root.Digest)
	if err != nil {
		t.Fatal(err)
	}
	extents, err := s.Extents(t.Context(), info.Digest)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range extents {
		if e.Zero {
			t.Errorf("a zero extent over data that is gone or never was: %+v", e)
		}
	}
	for name, err := range map[string]error{
		"no overlays":     Merge(t.Context(), merged, nil, base, Raw),
		"not a qcow2":     Merge(t.Context(), merged, []string{base}, base, Raw),
		"missing":         Merge(t.Context(), merged, []string{filepath.Join(dir, "none")}, base, Raw),
		"no layer below":  LoadChain(t.Context(), s, digests[last], layer.Digest{}, merged, base, Raw),
		"over descendant": LoadChain(t.Context(), s, digests[1], digests[2], merged, base, Raw),
	} {
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	wantOnly(t, dir, "back", "base", "loaded", "merged", "top0", "top1", "top2", "top3")
}

// FuzzStack: overlays upon one another against an array.
func FuzzStack(f *testing.F) {
	f.Add([]byte{0, 4, 0, 2, 1, 1, 255, 0, 0, 1, 9, 0, 3, 0, 2}, uint8(3))
	f.Add([]byte{}, uint8(1))
	r := rand.New(rand.NewPCG(3, 3))
	for range 6 {
		b := make([]byte, 90)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		f.Add(b, uint8(r.Uint32()))
	}
	f.Fuzz(func(t *testing.T, program []byte, files uint8) {
		const clusters = 300
		dir := t.TempDir()
		base := filepath.Join(dir, "base")
		if err := errors.Join(os.WriteFile(base, nil, 0o600), os.Truncate(base, clusters*ClusterSize)); err != nil {
			t.Fatal(err)
		}
		n := int(files%5) + 1
		var model [clusters]int // 0: not there, 1: zero, else what is written there
		var paths []string
		for k := range n {
			var own [clusters]int
			for part := program[len(program)*k/n : len(program)*(k+1)/n]; len(part) >= 3; part = part[3:] {
				for i := range int(part[1]%16) + 1 {
					if c := int(part[0]) + i; c < clusters {
						own[c] = 1 + int(part[2]%2)*(1+k*1000+c)
						model[c] = own[c]
					}
				}
			}
			paths = append(paths, filepath.Join(dir, fmt.Sprint(k)))
			writeOverlay(t, paths[k], base, own[:])
		}
		merged := filepath.Join(dir, "merged")
		if err := Merge(t.Context(), merged, paths, base, Raw); err != nil {
			t.Fatal(err)
		}
		for _, list := range [][]string{paths, {merged}} {
			st, err := openStack(t.Context(), list)
			if err != nil {
				t.Fatal(err)
			}
			defer st.close()
			var got [clusters]int
			for _, e := range st.extents {
				b := make([]byte, e.Length)
				if !e.Zero {
					if _, err := st.ReadAt(b, e.Offset); err != nil {
						t.Fatal(err)
					}
				}
				for i := int64(0); i < e.Length; i += ClusterSize {
					v := int(b[i]) | int(b[i+1])<<8 | int(b[i+ClusterSize-1])<<16
					if e.Zero {
						v = 1
					}
					got[(e.Offset+i)/ClusterSize] = v
				}
			}
			if got != model {
				t.Fatalf("%d files hold\n%v, want\n%v", len(list), got, model)
			}
		}
	})
}

// writeOverlay writes a qcow2 whose clusters hold these numbers: 0 not there, 1 zero.
func writeOverlay(t *testing.T, path, base string, clusters []int) {
	t.Helper()
	h, err := overlayHeader(path, base, Raw)
	if err != nil {
		t.Fatal(err)
	}
	var extents []layer.Extent
	for i, v := range clusters {
		if v != 0 {
			extents = appendCluster(extents, int64(i)*ClusterSize, v == 1)
		}
	}
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s, err := newOverlaySink(f, h, extents)
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range clusters {
		if v > 1 {
			b := make([]byte, ClusterSize)
			b[0], b[1], b[ClusterSize-1] = byte(v), byte(v>>8), byte(v>>16)
			if _, err := s.WriteAt(b, int64(i)*ClusterSize); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// qmp is a QEMU without a machine, whose one disk is written through NBD, as late as a guest's is: qemu-io by way of the
// monitor would have the tables written at once.
type qmp struct {
	t    *testing.T
	in   io.Writer
	out  *bufio.Reader
	disk net.Conn
}

func startQMP(t *testing.T, top string, backing any) *qmp {
	t.Helper()
	testenv.Need(t, "qemu")
	path, err := testenv.Program("qemu-system-x86_64")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), path, "-machine", "none", "-nodefaults", "-display", "none", "-qmp", "stdio")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	q := &qmp{t: t, in: stdin, out: bufio.NewReader(stdout)}
	q.do("qmp_capabilities", nil)
	q.add("n0", top, backing)
	socket := filepath.Join(t.TempDir(), "nbd")
	q.do("nbd-server-start", map[string]any{"addr": map[string]any{"type": "unix", "data": map[string]any{"path": socket}}})
	q.do("block-export-add", map[string]any{"type": "nbd", "id": "e0", "node-name": "n0", "name": "d", "writable": true})
	if q.disk, err = (&net.Dialer{}).DialContext(t.Context(), "unix", socket); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = q.disk.Close() })
	q.receive(18)                         // magic and flags
	q.send(uint32(3), []byte("IHAVEOPT"), // fixed newstyle, no zeroes
		uint32(1), uint32(1), []byte{'d'}) // the export's name
	q.receive(10) // size and flags
	return q
}

func (q *qmp) send(parts ...any) {
	q.t.Helper()
	var b bytes.Buffer
	for _, p := range parts {
		if err := binary.Write(&b, binary.BigEndian, p); err != nil {
			q.t.Fatal(err)
		}
	}
	if _, err := q.disk.Write(b.Bytes()); err != nil {
		q.t.Fatal(err)
	}
}

func (q *qmp) receive(n int) []byte {
	q.t.Helper()
	b := make([]byte, n)
	if _, err := io.ReadFull(q.disk, b); err != nil {
		q.t.Fatal(err)
	}
	return b
}

// write writes to the disk as a guest does.
func (q *qmp) write(b []byte, off int64) {
	q.t.Helper()
	q.send(uint32(0x25609513), uint16(0), uint16(1), uint64(7), off, uint32(len(b)), b)
	if answer := q.receive(16); binary.BigEndian.Uint32(answer) != 0x67446698 || binary.BigEndian.Uint32(answer[4:]) != 0 {
		q.t.Fatalf("write %d bytes at %d: answer %x", len(b), off, answer)
	}
}

func (q *qmp) do(command string, args any) string {
	q.t.Helper()
	b, err := json.Marshal(map[string]any{"execute": command, "arguments": args})
	if args == nil {
		b, err = json.Marshal(map[string]any{"execute": command})
	}
	if err != nil {
		q.t.Fatal(err)
	}
	if _, err := q.in.Write(append(b, '\n')); err != nil {
		q.t.Fatal(err)
	}
	for {
		line, err := q.out.ReadBytes('\n')
		if err != nil {
			q.t.Fatal(err)
		}
		var answer struct {
			Return json.RawMessage
			Error  *struct{ Desc string }
		}
		if err := json.Unmarshal(line, &answer); err != nil {
			q.t.Fatal(err)
		}
		if answer.Error != nil {
			q.t.Fatalf("%s %s: %s", command, b, answer.Error.Desc)
		}
		if answer.Return != nil {
			return string(answer.Return)
		}
	}
}

// add opens a qcow2 as the engine does: nothing is ever synced.
func (q *qmp) add(node, path string, backing any) {
	q.t.Helper()
	cache := map[string]any{"no-flush": true}
	q.do("blockdev-add", map[string]any{
		"driver": "qcow2", "node-name": node, "cache": cache, "backing": backing,
		"file": map[string]any{"driver": "file", "filename": path, "cache": cache},
	})
}

// A QEMU has switched to a new top and still holds the old one: all it wrote there is in the file, though nothing is
// ever synced, and nothing more is written there.
func TestFrozenOverlayIsComplete(t *testing.T) {
	dir, s := t.TempDir(), openStore(t)
	base := filepath.Join(dir, "base")
	rawDisk(t, base, 256<<20, 0, 70<<20)
	root, err := SaveBase(t.Context(), s, base)
	if err != nil {
		t.Fatal(err)
	}
	tops := []string{filepath.Join(dir, "0"), filepath.Join(dir, "1"), filepath.Join(dir, "2")}
	if err := CreateOverlay(tops[0], base, Raw); err != nil {
		t.Fatal(err)
	}
	q := startQMP(t, tops[0], map[string]any{
		"driver": "raw", "read-only": true, "file": map[string]any{"driver": "file", "filename": base, "read-only": true},
	})
	want := filepath.Join(dir, "want") // what the disk holds
	b, err := os.ReadFile(base)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(want, b, 0o600); err != nil {
		t.Fatal(err)
	}
	shadow, err := os.OpenFile(want, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer shadow.Close()
	write := func(pattern byte, kib, length int) {
		t.Helper()
		b := bytes.Repeat([]byte{pattern}, length<<10)
		q.write(b, int64(kib)<<10)
		if _, err := shadow.WriteAt(b, int64(kib)<<10); err != nil {
			t.Fatal(err)
		}
	}
	for i := range tops {
		write(byte(10+i), i*100, 4)
		write(byte(20+i), 100<<10, 3<<10)
		write(byte(30+i), 60<<10+i*1000, 200)
		// Were it there already, this test would show nothing.
		if !heldBack(t, tops[i]) {
			t.Errorf("overlay %d is complete before the switch", i)
		}
		if i+1 == len(tops) {
			break
		}
		if err := CreateOverlay(tops[i+1], filepath.Base(tops[i]), Qcow2); err != nil {
			t.Fatal(err)
		}
		next := fmt.Sprint("n", i+1)
		q.add(next, tops[i+1], nil)
		q.do("blockdev-snapshot", map[string]any{"node": fmt.Sprint("n", i), "overlay": next})
		frozen, err := os.ReadFile(tops[i])
		if err != nil {
			t.Fatal(err)
		}
		merged, flat := filepath.Join(dir, "merged"), filepath.Join(dir, "flat")
		if err := Merge(t.Context(), merged, tops[:i+1], base, Raw); err != nil {
			t.Fatal(err)
		}
		tool(t, "qemu-img", "check", merged)
		tool(t, "qemu-img", "compare", "-f", "raw", "-F", "qcow2", want, merged)
		info, err := SaveOverlays(t.Context(), s, tops[:i+1], root.Digest)
		if err != nil {
			t.Fatal(err)
		}
		if err := LoadBase(t.Context(), s, info.Digest, flat); err != nil {
			t.Fatal(err)
		}
		tool(t, "qemu-img", "compare", "-f", "raw", "-F", "raw", want, flat)
		write(99, 200<<10, 64)
		if now, err := os.ReadFile(tops[i]); err != nil || !bytes.Equal(now, frozen) {
			t.Errorf("QEMU wrote to the frozen overlay: %v", err)
		}
	}
}

// heldBack reports whether the tables of a file that QEMU is writing lack clusters that its data already has.
func heldBack(t *testing.T, path string) bool {
	t.Helper()
	st, err := openStack(t.Context(), []string{path})
	if err != nil {
		return true
	}
	defer st.close()
	n := int64(0)
	for _, e := range st.extents {
		n += e.Length
	}
	return n < 3<<20
}

// Sixteen overlays of 16 MiB each.
func BenchmarkMerge(b *testing.B) {
	dir := b.TempDir()
	base := filepath.Join(dir, "base")
	const size = 4 << 30
	if err := errors.Join(os.WriteFile(base, nil, 0o600), os.Truncate(base, size)); err != nil {
		b.Fatal(err)
	}
	var tops []string
	for i := range 16 {
		path := filepath.Join(dir, fmt.Sprint(i))
		h, err := overlayHeader(path, base, Raw)
		if err != nil {
			b.Fatal(err)
		}
		f, err := os.Create(path)
		if err != nil {
			b.Fatal(err)
		}
		extents := []layer.Extent{{Length: 4 << 20}, {Offset: int64(i+1) * 128 << 20, Length: 12 << 20}}
		s, err := newOverlaySink(f, h, extents)
		if err != nil {
			b.Fatal(err)
		}
		for _, e := range extents {
			if _, err := s.WriteAt(bytes.Repeat([]byte{byte(i)}, int(e.Length)), e.Offset); err != nil {
				b.Fatal(err)
			}
		}
		if err := f.Close(); err != nil {
			b.Fatal(err)
		}
		tops = append(tops, path)
	}
	unix.Sync()
	b.SetBytes(4<<20 + 16*12<<20)
	for b.Loop() {
		if err := Merge(b.Context(), filepath.Join(dir, "merged"), tops, base, Raw); err != nil {
			b.Fatal(err)
		}
	}
}
