package pack

import (
	"bytes"
	"crypto/sha256"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/store"
)

// TestOldPack: one that a forkd wrote which knew version 1 is read, and is written again as it was.
func TestOldPack(t *testing.T) {
	old, err := os.ReadFile(filepath.Join("testdata", "version1.forkd"))
	if err != nil {
		t.Fatal(err)
	}
	p, err := Inspect(t.Context(), bytes.NewReader(old))
	if err != nil {
		t.Fatal(err)
	}
	if m := p.Manifest(); m.FormatVersion != 1 || m.Head().Tag != "a" || len(m.Kernels) > 0 {
		t.Errorf("version %d of %s with %d kernels", m.FormatVersion, m.Head().Tag, len(m.Kernels))
	}
	there := newHome(t)
	sink := newSink(t, there, p.Manifest())
	again, err := NewReader(bytes.NewReader(old))
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Receive(t.Context(), sink); err != nil {
		t.Fatal(err)
	}
	if err := sink.Install(t.Context()); err != nil {
		t.Fatal(err)
	}
	src, err := Collect(t.Context(), Spec{
		Dir: t.TempDir(), Layers: there.Layers, Manifest: *p.Manifest(), State: sink.State,
		Kernel: func(store.Snapshot) ([]byte, error) { return nil, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := Write(t.Context(), &b, src); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b.Bytes(), old) {
		t.Error("without a kernel it is not written as it was")
	}
}

// TestKernelTravels: it is one member of all snapshots that were made with it, and does not travel to where it is.
func TestKernelTravels(t *testing.T) {
	here, there := newHome(t), newHome(t)
	src := here.collect(here.chain(3))
	m := src.Manifest()
	content, err := tinyKernel().Encode()
	if err != nil {
		t.Fatal(err)
	}
	want := []Kernel{{Name: m.Snapshots[0].Kernel, Content: sha256.Sum256(content)}}
	if diff := cmp.Diff(want, m.Kernels); diff != "" || m.FormatVersion != 2 || m.kernelMembers() != 1 {
		t.Errorf("version %d, %d members: %s", m.FormatVersion, m.kernelMembers(), diff)
	}
	x, _ := m.member(KernelMember, want[0].Content)
	sink := newSink(t, there, m)
	if err := sink.Offer(x, []byte("another")); err != nil || !sink.Needs(x) {
		t.Errorf("another was taken for it: %v", err)
	}
	if err := sink.Offer(x, content); err != nil || sink.Needs(x) {
		t.Errorf("what is there is needed: %v", err)
	}
	if err := carry(t.Context(), src, sink); err != nil {
		t.Fatal(err)
	}
	if got := sink.Fetched(); got != m.Bytes()-x.Size {
		t.Errorf("%d bytes moved of %d, %d of them a kernel that was there", got, m.Bytes(), x.Size)
	}
	if err := sink.Install(t.Context()); err != nil {
		t.Fatal(err)
	}
	b, err := sink.Kernel(x.Digest)
	if err != nil {
		t.Fatal(err)
	}
	got, err := DecodeKernel(b)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(tinyKernel(), got); diff != "" {
		t.Error(diff)
	}
}

// FuzzKernel: there is one encoding of what is read.
func FuzzKernel(f *testing.F) {
	whole, err := tinyKernel().Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Add(whole[:len(whole)-1])
	f.Add([]byte(`{"format_version":1,"version":"","release":"","image":1,"modules":[]}` + "\nx"))
	f.Add([]byte(`{"format_version":1,"version":"","release":"","image":1,"modules":null}` + "\nx"))
	f.Fuzz(func(t *testing.T, b []byte) {
		k, err := DecodeKernel(b)
		if err != nil {
			return
		}
		again, err := k.Encode()
		if err != nil || !bytes.Equal(again, b) {
			t.Errorf("%q becomes %q, %v", b, again, err)
		}
	})
}
