package host

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/store"
)

// addLine adds snapshots that stand on one another, whose layers are made of seed.
func addLine(t *testing.T, h *Host, seed string, tags ...string) {
	t.Helper()
	ctx := t.Context()
	write := func(page, size int64, parent layer.Digest, text string) layer.Info {
		data := make([]byte, size)
		copy(data[page:], strings.Repeat(text, 100))
		info, err := h.layers.Write(ctx, layer.WriteSpec{
			PageSize: page, Size: size, Parent: parent, From: bytes.NewReader(data), Extents: []layer.Extent{{Offset: page, Length: page}},
		})
		if err != nil {
			t.Fatal(err)
		}
		return info
	}
	release, err := h.layers.Hold(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	base := write(64<<10, 256<<10, layer.Digest{}, "image "+seed)
	sum := sha256.Sum256([]byte(seed))
	img := store.Image{
		FormatVersion: store.FormatVersion, ID: hex.EncodeToString(sum[:]), Name: seed, Disk: base.Digest, DiskBytes: base.Size, CreatedAt: time.Now().UTC(),
	}
	if err := h.store.AddImage(ctx, img); err != nil {
		t.Fatal(err)
	}
	h.mu.Lock()
	h.images[img.ID] = img
	h.mu.Unlock()
	mem, dsk := layer.Digest{}, base.Digest
	var parent store.Snapshot
	for _, tag := range tags {
		mem, dsk = write(4<<10, fakeMemory, mem, "memory "+seed+tag).Digest, write(64<<10, 256<<10, dsk, "disk "+seed+tag).Digest
		m := store.Snapshot{
			FormatVersion: store.FormatVersion, Tag: tag, CreatedAt: time.Now().UTC(), Image: img.ID, ImageDisk: base.Digest, Memory: mem, Disk: dsk,
			Warm: []string{}, Protocol: wire.Version, Source: "key of " + seed + tag, Recipe: seed, RecipeText: "name: x\n", Kernel: kernelNamed(seed),
			Engine: engine.Format{Engine: "fake", Version: "1.0", CPUs: 1, MemoryBytes: fakeMemory},
		}.WithState([]byte("device state of " + seed + tag))
		if parent.Tag != "" {
			m.Parent, m.ParentID = parent.Tag, parent.ID()
		}
		if err := h.enterSnapshot(ctx, m, []byte("device state of "+seed+tag), false); err != nil {
			t.Fatal(err)
		}
		parent = m
	}
}

func packed(t *testing.T, h *Host, tag string) []byte {
	t.Helper()
	p, err := h.Pack(t.Context(), tag, PackOptions{NoScrub: true})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var b bytes.Buffer
	if err := p.Write(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	if int64(b.Len()) != p.Size() {
		t.Errorf("%d bytes, %d were announced", b.Len(), p.Size())
	}
	return b.Bytes()
}

// TestUnpack: a line of snapshots is the same in another home, and whatever is there already stays as it is.
func TestUnpack(t *testing.T) {
	here := fakeHost(t, newFakeEngine(), nil)
	addLine(t, here, "one", "a", "b", "c")
	whole, first := packed(t, here, "c"), packed(t, here, "a")
	checkEmpty(t, here.cfg.Home.Temp())

	there := fakeHost(t, newFakeEngine(), nil)
	got, err := there.Unpack(t.Context(), bytes.NewReader(first), ReceiveOptions{})
	if err != nil || !slices.Equal(got.New, []string{"a"}) || got.Fetched != got.Bytes {
		t.Fatalf("%+v, %v", got, err)
	}
	got, err = there.Unpack(t.Context(), bytes.NewReader(whole), ReceiveOptions{})
	if err != nil || !slices.Equal(got.New, []string{"b", "c"}) || !slices.Equal(got.Present, []string{"a"}) {
		t.Fatalf("%+v, %v", got, err)
	}
	if got.Fetched >= got.Bytes {
		t.Errorf("%d of %d bytes were stored, although a relative was there", got.Fetched, got.Bytes)
	}
	v, err := there.Snapshot("c")
	if err != nil || !slices.Equal(v.Ancestors, []string{"a", "b"}) {
		t.Fatalf("%v stands on %v, %v", v.Tag, v.Ancestors, err)
	}
	for _, tag := range []string{"a", "b", "c"} {
		old, err := here.snapshot(tag)
		if err != nil {
			t.Fatal(err)
		}
		m, err := there.snapshot(tag)
		if err != nil {
			t.Fatal(err)
		}
		if !m.Is(old.ID()) || m.Memory != old.Memory || m.Disk != old.Disk || m.RecipeText != old.RecipeText {
			t.Errorf("%s is another snapshot: %+v", tag, m)
		}
		if m.Source == old.Source || m.Image == old.Image {
			t.Errorf("%s: a build would take it for its own: source %q, image %s", tag, m.Source, m.Image)
		}
	}
	if found, err := there.Verify(t.Context(), "c"); err != nil || len(found.Damages) > 0 {
		t.Errorf("%+v, %v", found, err)
	}
	// Again: nothing to do. Back home: it is what it came from. Under another name: a record more.
	for _, h := range []*Host{there, here} {
		if got, err := h.Unpack(t.Context(), bytes.NewReader(whole), ReceiveOptions{}); err != nil || len(got.New) > 0 || got.Fetched > 0 || got.Snapshot.Tag != "c" {
			t.Errorf("again: %+v, %v", got, err)
		}
	}
	if got, err := here.Unpack(t.Context(), bytes.NewReader(packed(t, there, "c")), ReceiveOptions{}); err != nil || len(got.New) > 0 {
		t.Errorf("back: %+v, %v", got, err)
	}
	got, err = there.Unpack(t.Context(), bytes.NewReader(whole), ReceiveOptions{Tag: "d"})
	if err != nil || !slices.Equal(got.New, []string{"d"}) || got.Snapshot.Tag != "d" {
		t.Errorf("another name: %+v, %v", got, err)
	}
	if _, err := there.RemoveSnapshot(t.Context(), "a", RemoveOptions{Cascade: true}); err != nil {
		t.Error(err)
	}
	checkEmpty(t, there.cfg.Home.Temp())
	checkEmpty(t, there.cfg.Home.Unfinished())
}

// TestUnpackAmongOthers: names that are taken are not taken away.
func TestUnpackAmongOthers(t *testing.T) {
	here, there := fakeHost(t, newFakeEngine(), nil), fakeHost(t, newFakeEngine(), nil)
	addLine(t, here, "one", "a", "b")
	addLine(t, there, "two", "a", "z")
	before, _ := there.snapshot("a")
	whole := packed(t, here, "b")
	got, err := there.Unpack(t.Context(), bytes.NewReader(whole), ReceiveOptions{})
	if err != nil || len(got.New) != 2 || got.Renamed["a"] != got.New[0] || !strings.HasPrefix(got.New[0], "a.") {
		t.Fatalf("%+v, %v", got, err)
	}
	if after, _ := there.snapshot("a"); after.ID() != before.ID() {
		t.Error("the snapshot that was there was changed")
	}
	if v, err := there.Snapshot("b"); err != nil || !slices.Equal(v.Ancestors, []string{got.New[0]}) {
		t.Errorf("it stands on %v, %v", v.Ancestors, err)
	}
	_, err = there.Unpack(t.Context(), bytes.NewReader(packed(t, here, "a")), ReceiveOptions{Tag: "z"})
	if hinted, ok := errors.AsType[*HintError](err); !errors.Is(err, store.ErrExists) || !ok || !strings.Contains(hinted.Try, "-t") {
		t.Errorf("a tag that is taken: %v", err)
	}
}

// manifestOf lets a test change what a pack says of itself; its members are still those of src.
func manifestOf(t *testing.T, h *Host, tag string, change func(*pack.Manifest)) (*pack.Manifest, *Packed) {
	t.Helper()
	p, err := h.Pack(t.Context(), tag, PackOptions{NoScrub: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	m := *p.Source.Manifest()
	m.Snapshots = slices.Clone(m.Snapshots)
	change(&m)
	text, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	decoded, err := pack.Decode(text)
	if err != nil {
		t.Fatal(err)
	}
	return decoded, p
}

// carryAll is what a fetch does that goes well.
func carryAll(p *Packed) func(context.Context, *pack.Sink) error {
	return func(ctx context.Context, sink *pack.Sink) error {
		for _, x := range sink.Needed() {
			r, err := p.Source.Open(x)
			if err != nil {
				return err
			}
			if err := sink.Put(ctx, x, r); err != nil {
				return err
			}
		}
		return nil
	}
}

// TestGate: what cannot run here is refused before anything is fetched, and says what differs and what would work.
func TestGate(t *testing.T) {
	here, there := fakeHost(t, newFakeEngine(), nil), fakeHost(t, newFakeEngine(), nil)
	addLine(t, here, "one", "a", "b")
	head := func(change func(*store.Snapshot)) func(*pack.Manifest) {
		return func(m *pack.Manifest) { change(&m.Snapshots[len(m.Snapshots)-1]) }
	}
	for what, row := range map[string]struct {
		change func(*pack.Manifest)
		want   string
		hint   string
		is     error
	}{
		"architecture": {head(func(s *store.Snapshot) { s.Engine.Arch = "riscv64" }), "architecture", "--rewarm", engine.ErrIncompatible},
		"engine":       {head(func(s *store.Snapshot) { s.Engine.Engine = "other" }), "engine", "--rewarm", engine.ErrIncompatible},
		"accelerator":  {head(func(s *store.Snapshot) { s.Engine.Accelerator = "kvm" }), "accelerator", "--rewarm", engine.ErrIncompatible},
		"machine type": {head(func(s *store.Snapshot) { s.Engine.Machine = "q" }), "machine type", "--rewarm", engine.ErrIncompatible},
		"CPU":          {head(func(s *store.Snapshot) { s.Engine.CPUModel = "big" }), "CPU model", "--rewarm", engine.ErrIncompatible},
		"version":      {head(func(s *store.Snapshot) { s.Engine.Version = "99.0" }), "version", "--rewarm", engine.ErrIncompatible},
		"a branch": {head(func(s *store.Snapshot) {
			s.Engine.Arch, s.Branch = "riscv64", &store.Branch{From: "sbx", Mode: "live"}
		}), "architecture", "a branch, which no recipe makes again", engine.ErrIncompatible},
		"egress": {head(func(s *store.Snapshot) { s.Egress = egress.Policy{Preset: egress.Open} }), "may reach", "admin", ErrWider},
		"limits": {head(func(s *store.Snapshot) { s.Limits.PIDs = 1 }), "limit of 1 processes", "", ErrPack},
	} {
		t.Run(what, func(t *testing.T) {
			m, _ := manifestOf(t, here, "b", row.change)
			_, err := there.Receive(t.Context(), m, ReceiveOptions{}, func(context.Context, *pack.Sink) error {
				t.Error("something was fetched")
				return nil
			})
			if !errors.Is(err, row.is) || !strings.Contains(err.Error(), row.want) {
				t.Errorf("the error is %v, want %q", err, row.want)
			}
			if row.hint == "" {
				return
			}
			if hinted, ok := errors.AsType[*HintError](err); !ok || !strings.Contains(hinted.Try, row.hint) {
				t.Errorf("the advice is %+v, want %q", hinted, row.hint)
			}
		})
	}
	there.cfg.Disk = func(string) (int64, int64, error) { return 100, 1 << 40, nil }
	if _, err := there.Unpack(t.Context(), bytes.NewReader(packed(t, here, "b")), ReceiveOptions{}); !errors.Is(err, ErrExhausted) {
		t.Errorf("on a full disk: %v", err)
	}
	nothingOf(t, there, "a", "b")
}

// nothingOf makes sure that a pack has left nothing: no record, no layer, no file.
func nothingOf(t *testing.T, h *Host, tags ...string) {
	t.Helper()
	for _, tag := range tags {
		if _, err := h.snapshot(tag); !errors.Is(err, ErrNotFound) {
			t.Errorf("snapshot %s: %v", tag, err)
		}
	}
	checkEmpty(t, h.cfg.Home.Temp())
	checkEmpty(t, h.cfg.Home.Unfinished())
	if list := h.Images(); len(list) != 1 {
		t.Errorf("%d images, want that of the fake", len(list))
	}
	fake, err := h.snapshot(fakeTag)
	if err != nil {
		t.Fatal(err)
	}
	maps := 0
	_ = filepath.WalkDir(filepath.Join(h.cfg.Home.Layers(), "maps"), func(_ string, d fs.DirEntry, _ error) error {
		if !d.IsDir() {
			maps++
		}
		return nil
	})
	if want := len(map[layer.Digest]bool{fake.Memory: true, fake.Disk: true, fake.ImageDisk: true}); maps != want {
		t.Errorf("%d layers in the store, want %d", maps, want)
	}
}

// TestUnpackFails: whatever goes wrong, nothing is left, and the same pack can be unpacked afterwards.
func TestUnpackFails(t *testing.T) {
	here := fakeHost(t, newFakeEngine(), nil)
	addLine(t, here, "one", "a", "b", "c")
	whole := packed(t, here, "c")
	var cause error
	for what, try := range map[string]func(t *testing.T, h *Host) error{
		"cut off": func(t *testing.T, h *Host) error {
			_, err := h.Unpack(t.Context(), bytes.NewReader(whole[:len(whole)-3000]), ReceiveOptions{})
			return err
		},
		"damaged": func(t *testing.T, h *Host) error {
			b := bytes.Clone(whole)
			b[len(b)-1024-520] ^= 1
			_, err := h.Unpack(t.Context(), bytes.NewReader(b), ReceiveOptions{})
			return err
		},
		"given up": func(t *testing.T, h *Host) error {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			r := io.MultiReader(bytes.NewReader(whole[:len(whole)/2]), readerFunc(func([]byte) (int, error) { cancel(); return 0, ctx.Err() }))
			_, err := h.Unpack(ctx, r, ReceiveOptions{})
			return err
		},
		"the head's record cannot be written": func(t *testing.T, h *Host) error {
			m, p := manifestOf(t, here, "c", func(*pack.Manifest) {})
			_, err := h.Receive(t.Context(), m, ReceiveOptions{}, func(ctx context.Context, sink *pack.Sink) error {
				// Something has its place.
				h.mu.Lock()
				delete(h.snapshots, "c")
				h.mu.Unlock()
				if err := h.store.AddSnapshot(ctx, store.Snapshot{FormatVersion: 1, Tag: "c", CreatedAt: time.Now()}.WithState(nil), nil); err != nil {
					return err
				}
				return carryAll(p)(ctx, sink)
			})
			if err := h.store.RemoveSnapshot("c"); err != nil {
				t.Error(err)
			}
			return err
		},
	} {
		t.Run(what, func(t *testing.T) {
			there := fakeHost(t, newFakeEngine(), nil)
			if cause = try(t, there); cause == nil {
				t.Fatal("it was unpacked")
			}
			nothingOf(t, there, "a", "b", "c")
			if _, err := there.Unpack(t.Context(), bytes.NewReader(whole), ReceiveOptions{}); err != nil {
				t.Errorf("afterwards: %v", err)
			}
		})
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// TestKilledWhileUnpacking: what a daemon leaves that dies between the first and the last record is gone at the next start.
func TestKilledWhileUnpacking(t *testing.T) {
	here := fakeHost(t, newFakeEngine(), nil)
	addLine(t, here, "one", "a", "b", "c")
	there := fakeHost(t, newFakeEngine(), nil)
	got, err := there.Unpack(t.Context(), bytes.NewReader(packed(t, here, "c")), ReceiveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	head, err := there.snapshot("c")
	if err != nil {
		t.Fatal(err)
	}
	// As it was before the head's record was written.
	if err := there.store.BeginUnpacking(head, store.Unpacking{Snapshots: got.New[:2], Images: []string{head.Image}}); err != nil {
		t.Fatal(err)
	}
	if err := there.store.RemoveSnapshot("c"); err != nil {
		t.Fatal(err)
	}
	if _, err := there.TempDir("unpack-"); err != nil {
		t.Fatal(err)
	}
	next, err := Open(t.Context(), there.cfg)
	if err != nil {
		t.Fatal(err)
	}
	nothingOf(t, next, "a", "b", "c")
	if err := next.Close(context.WithoutCancel(t.Context())); err != nil {
		t.Error(err)
	}
}

// TestPackKeeps: what is removed after a pack was collected is still in it.
func TestPackKeeps(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	addLine(t, h, "one", "a", "b")
	p, err := h.Pack(t.Context(), "b", PackOptions{NoScrub: true})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if _, err := h.RemoveSnapshot(t.Context(), "a", RemoveOptions{Cascade: true}); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := p.Write(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	if _, err := pack.Inspect(t.Context(), &b); err != nil {
		t.Error(err)
	}
}

// TestRewarmAgain: what was built of the same recipe before is found, without asking anybody for packages; a tag that something else
// has is not taken for it.
func TestRewarmAgain(t *testing.T) {
	here, there := fakeHost(t, newFakeEngine(), nil), fakeHost(t, newFakeEngine(), nil)
	addLine(t, here, "one", "a")
	const recipe = "base: debian:bookworm\n"
	m, _ := manifestOf(t, here, "a", func(m *pack.Manifest) { m.Snapshots[0].Engine.Arch, m.Snapshots[0].RecipeText = "riscv64", recipe })
	addLine(t, there, "two", "a", "on-a")
	there.mu.Lock()
	built := there.snapshots["a"]
	built.Source, built.RecipeText = strings.Repeat("0123456789abcdef", 4), recipe
	there.snapshots["a"] = built
	theirs := built
	theirs.Tag, theirs.Source = "theirs", "unpacked of "+built.ID()
	there.snapshots["theirs"] = theirs
	there.mu.Unlock()
	for tag, taken := range map[string]bool{"": false, "a": false, "on-a": true, "theirs": true} {
		opts := PullOptions{Rewarm: true, ReceiveOptions: ReceiveOptions{Tag: tag}}
		_, why := there.Receive(t.Context(), m, opts.ReceiveOptions, nil)
		if !errors.Is(why, engine.ErrIncompatible) {
			t.Fatalf("as %q: %v", tag, why)
		}
		got, err := there.rewarm(t.Context(), Pulled{}, m, opts, why, func(Transfer) {})
		if !taken {
			if err != nil || len(got.New) > 0 || !slices.Equal(got.Present, []string{"a"}) || got.Snapshot.ID() != built.ID() || got.Rewarm == "" {
				t.Errorf("as %q: %+v, %v", tag, got, err)
			}
			continue
		}
		if hinted, ok := errors.AsType[*HintError](err); !errors.Is(err, store.ErrExists) || !ok || !strings.Contains(hinted.Try, "-t TAG") {
			t.Errorf("as %q: %v", tag, err)
		}
	}
}
