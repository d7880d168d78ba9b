package host

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/store"
)

// pages are numbered, and no two are alike.
func pages(what string, from, n int) (b []byte) {
	for i := range n {
		p := make([]byte, 4096)
		copy(p, strings.Repeat(fmt.Sprintf("%s %d ", what, from+i), 4))
		b = append(b, p...)
	}
	return b
}

// What leaves the home has no page of another snapshot, although it shares chunks with one here; who stands on it goes on.
func TestPackHasNothingOfOthers(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	addLine(t, h, "one", "a", "b", "c") // the last two stand on what is written anew below
	ctx := t.Context()
	write := func(b []byte, parent, like layer.Digest) layer.Digest {
		info, err := h.layers.Write(ctx, layer.WriteSpec{
			PageSize: 4096, Size: fakeMemory, Parent: parent, Like: []layer.Digest{like}, From: bytes.NewReader(b),
			Extents: []layer.Extent{{Length: int64(len(b))}},
		})
		if err != nil {
			t.Fatal(err)
		}
		return info.Digest
	}
	release, err := h.layers.Hold(ctx)
	if err != nil {
		t.Fatal(err)
	}
	theirs := write(slices.Concat(pages("common", 0, 12), pages("their secret", 0, 3)), layer.Digest{}, layer.Digest{})
	ours := write(slices.Concat(pages("common", 4, 8), pages("ours", 0, 2), pages("common", 0, 4)), layer.Digest{}, theirs)
	if shares, err := h.layers.Shares(ctx, ours); err != nil || !shares {
		t.Fatalf("it does not share: %v, %v", shares, err)
	}
	var parent store.Snapshot
	for _, tag := range []string{"a", "b", "c"} {
		m, err := h.snapshot(tag)
		if err != nil {
			t.Fatal(err)
		}
		state, err := h.store.State(m)
		if err != nil {
			t.Fatal(err)
		}
		if m.Memory = ours; tag != "a" {
			m.Memory = write(pages("of "+tag, 0, 1), parent.Memory, layer.Digest{})
			m.ParentID = parent.ID()
		}
		if err := h.store.ReplaceSnapshot(ctx, m, state); err != nil {
			t.Fatal(err)
		}
		h.mu.Lock()
		h.snapshots[tag] = m
		h.mu.Unlock()
		parent = m
	}
	release()
	s, err := h.Fork(ctx, ForkSpec{Tag: "b", N: 1})
	if err != nil || s[0].Err != nil {
		t.Fatal(err, s)
	}
	// Who looks for a digest has nothing written anew.
	if tags := h.shelved(ctx); !slices.Equal(tags, []string{"fake"}) {
		t.Errorf("to find a digest %v are packed, want what shares nothing", tags)
	}
	b := packed(t, h, "b")
	if tags := h.shelved(ctx); !slices.Equal(tags, []string{"a", "b", "fake"}) {
		t.Errorf("with chunks of their own there are %v", tags)
	}
	there := fakeHost(t, newFakeEngine(), nil)
	got, err := there.Unpack(ctx, bytes.NewReader(b), ReceiveOptions{})
	if err != nil || !slices.Equal(got.New, []string{"a", "b"}) {
		t.Fatalf("%+v, %v", got, err)
	}
	for _, tag := range []string{"a", "b"} {
		m, err := there.snapshot(tag)
		if err != nil {
			t.Fatal(err)
		}
		text, err := there.layers.MapBytes(ctx, m.Memory)
		if err != nil {
			t.Fatal(err)
		}
		if x, err := layer.ParseMap(text); err != nil || x.Shares || contentBytes(x.Chunks) != x.OwnBytes {
			t.Errorf("%s: %+v, %v", tag, x, err)
		}
	}
	// Here all is as it was: what is above still stands on it, the sandbox branches, and the pack is known again.
	for _, tag := range []string{"b", "c"} {
		v, err := h.Snapshot(tag)
		if err != nil || !slices.Contains(v.Ancestors, "a") {
			t.Errorf("%s stands on %v, %v", tag, v.Ancestors, err)
		}
		if ver, err := h.Verify(ctx, tag); err != nil || len(ver.Damages) > 0 {
			t.Errorf("%s: %+v, %v", tag, ver, err)
		}
	}
	if _, err := h.Branch(ctx, s[0].Sandbox.ID, BranchSpec{Tag: "d"}); err != nil {
		t.Error(err)
	}
	if got, err = h.Unpack(ctx, bytes.NewReader(b), ReceiveOptions{}); err != nil || !slices.Equal(got.Present, []string{"b"}) {
		t.Errorf("the pack here: %+v, %v", got, err)
	}
	if again := packed(t, h, "c"); len(again) <= len(b) {
		t.Errorf("%d bytes of three snapshots, %d of two", len(again), len(b))
	}
}

func contentBytes(chunks []layer.Chunk) (n int64) {
	for _, c := range chunks {
		n += c.Length
	}
	return n
}
