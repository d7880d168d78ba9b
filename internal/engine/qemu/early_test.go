package qemu

import (
	"bytes"
	"slices"
	"testing"

	"forkd.dev/forkd/internal/memory"
)

// TestEarlyPages: what was taken in the pause is what the image gets, not what the stream has of it later; and what the
// stream brought out of its order is told.
func TestEarlyPages(t *testing.T) {
	const pages = 8
	w := &streamWriter{}
	w.start("ram")
	w.list("ram", pages*memory.PageSize)
	w.end()
	w.part(sectionPart)
	block := "ram"
	for _, i := range []int{0, 1, 5, 6, 2, 3, 4, 7} { // 5 and 6 were about to be written
		w.page(block, i*memory.PageSize, bytes.Repeat([]byte{byte(i + 1)}, memory.PageSize))
		block = ""
	}
	w.end()
	w.Write(deviceState)

	early := newEarly([]int64{6 * memory.PageSize, 2 * memory.PageSize, 5 * memory.PageSize})
	if want := []int64{2 * memory.PageSize, 5 * memory.PageSize, 6 * memory.PageSize}; !slices.Equal(early.pages, want) {
		t.Fatalf("early pages %v", early.pages)
	}
	for i := range early.content {
		early.content[i] = 0xee
	}
	ram := make(sliceSink, pages*memory.PageSize)
	except := newPageSet(int64(len(ram)))
	for _, off := range early.pages {
		except.add(off)
	}
	var jumped []int64
	_, err := drain(&w.Buffer, ram, int64(len(ram)), &except, streamNews{
		jumped: func(off int64) { jumped = append(jumped, off/memory.PageSize) },
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := early.write(ram); err != nil {
		t.Fatal(err)
	}
	for i, want := range []byte{1, 2, 0xee, 4, 5, 0xee, 0xee, 8} {
		if page := ram[i*memory.PageSize : (i+1)*memory.PageSize]; !bytes.Equal(page, bytes.Repeat([]byte{want}, memory.PageSize)) {
			t.Errorf("page %d is %#x", i, page[0])
		}
	}
	if want := []int64{5, 2, 7}; !slices.Equal(jumped, want) {
		t.Errorf("out of order: %v, want %v", jumped, want)
	}
}

func TestHabits(t *testing.T) {
	h := &habits{}
	h.learn([]int64{3, 1, 3})
	h.learn([]int64{2, 1})
	if got := h.known(); !slices.Equal(got, []int64{2, 1, 3}) {
		t.Errorf("known: %v", got)
	}
	many := make([]int64, 2*earlyMost)
	for i := range many {
		many[i] = int64(i)
	}
	h.learn(many)
	if got := h.known(); len(got) != earlyMost || got[0] != 0 {
		t.Errorf("%d pages are known", len(got))
	}
}
