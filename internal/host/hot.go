package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/store"
)

// hotImage is a snapshot unpacked and verified: its memory in a sealed memfd that all children map, with pages over it
// where it stands on another's; its disks; its device state. Built once, shared by all children, evicted when cold.
type hotImage struct {
	key   string // snapshot id; of a branch that is being written, a name of its own
	tag   string
	image string
	bytes int64        // reserved: full memory, since reading a hole of it fills the hole; for pages over another's, those
	layer layer.Digest // its memory's; zero while a branch is being written
	own   string       // the disk file that goes when it goes
	below []*hotImage  // whose memory or disk it stands on: kept as long as it is
	over  *hotImage    // of those, the one whose memory its pages are over; nil: its memory is its own

	ready chan struct{} // closed when the rest is valid, or err is set
	err   error         // guarded by the cache's lock
	disks []string      // what a child's disk stands on, the nearest first; the last is the image's, raw

	users      int
	used       time.Time
	checkpoint *engine.Checkpoint // guarded by the cache's lock: flattening replaces it
	retired    []io.Closer        // memory replaced, which a restore in progress may still read
}

// hotCache holds them. Its lock is never held while one is built.
type hotCache struct {
	h *Host

	mu      sync.Mutex
	entries map[string]*hotImage
	bases   map[string]*hotBase
}

// hotBase is the unpacked disk of an image, shared by the hot images that stand on it.
type hotBase struct {
	ready chan struct{}
	err   error
}

func newHotCache(h *Host) *hotCache {
	return &hotCache{h: h, entries: map[string]*hotImage{}, bases: map[string]*hotBase{}}
}

func (c *hotCache) has(m store.Snapshot) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.entries[m.ID()]
	return ok
}

// acquire returns the hot image of m, building it if nobody has. The caller releases it.
func (c *hotCache) acquire(ctx context.Context, m store.Snapshot) (*hotImage, error) {
	return c.acquireWith(ctx, m, func() ([]byte, error) { return c.h.store.State(m) })
}

// acquireBelow is acquire for the memory that a branch stands on. What a sandbox was when it slept has no tag, and its device
// state went when it woke: no machine is restored from that any more.
func (c *hotCache) acquireBelow(ctx context.Context, m store.Snapshot) (*hotImage, error) {
	if m.Tag != "" {
		return c.acquire(ctx, m)
	}
	return c.acquireWith(ctx, m, func() ([]byte, error) { return nil, nil })
}

// acquireWith is acquire for a machine whose device state is kept elsewhere.
func (c *hotCache) acquireWith(ctx context.Context, m store.Snapshot, state func() ([]byte, error)) (*hotImage, error) {
	c.mu.Lock()
	key := m.ID()
	if e, ok := c.entries[key]; ok {
		e.users++
		c.mu.Unlock()
		return c.join(ctx, e)
	}
	if err := c.makeRoom(m.Tag, m.Engine.MemoryBytes); err != nil {
		c.mu.Unlock()
		return nil, err
	}
	e := &hotImage{key: key, tag: m.Tag, image: m.Image, layer: m.Memory, bytes: m.Engine.MemoryBytes, ready: make(chan struct{}), users: 1}
	c.entries[key] = e
	c.mu.Unlock()

	// A caller that gives up must not spoil the image for those who joined it.
	err := c.build(context.WithoutCancel(ctx), m, e, state)
	c.mu.Lock()
	e.err = err
	close(e.ready)
	c.mu.Unlock()
	return c.join(ctx, e)
}

func (c *hotCache) join(ctx context.Context, e *hotImage) (*hotImage, error) {
	select {
	case <-e.ready:
	case <-ctx.Done():
		c.release(e)
		return nil, context.Cause(ctx)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := e.err; err != nil {
		c.releaseLocked(e)
		return nil, err
	}
	return e, nil
}

// adopt enters a hot image that a build just made, so that the first fork need not unpack it. It may be refused
// for want of room: then it is closed and will be unpacked when asked for.
func (c *hotCache) adopt(m store.Snapshot, checkpoint *engine.Checkpoint, disk, base string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.entries[m.ID()]; ok || c.makeRoom(m.Tag, m.Engine.MemoryBytes) != nil {
		_ = checkpoint.Memory.Close()
		return
	}
	e := &hotImage{
		key: m.ID(), tag: m.Tag, image: m.Image, layer: m.Memory, bytes: m.Engine.MemoryBytes, ready: make(chan struct{}),
		checkpoint: checkpoint, own: disk, disks: []string{disk, base}, used: time.Now(),
	}
	close(e.ready)
	c.entries[e.key] = e
}

// begin reserves a place for the image of a branch, which stands on that of its source. The caller is its first user,
// and calls fill or fail.
func (c *hotCache) begin(tag, name string, bytes int64, below *hotImage) (*hotImage, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.makeRoom(tag, bytes); err != nil {
		return nil, err
	}
	below.users++
	e := &hotImage{
		key: name, tag: tag, image: below.image, bytes: bytes, below: []*hotImage{below}, ready: make(chan struct{}), users: 1,
	}
	c.entries[name] = e
	return e, nil
}

// fill makes a begun image ready. own is the file that goes when the image goes.
func (c *hotCache) fill(e *hotImage, checkpoint *engine.Checkpoint, disks []string, own string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e.checkpoint, e.disks, e.own = checkpoint, disks, own
	if checkpoint.Pages != nil {
		e.bytes = checkpoint.Pages.Bytes()
		e.over = e.below[0].owner()
	}
	close(e.ready)
}

// owner is the image whose memory the children of e map.
func (e *hotImage) owner() *hotImage {
	if e.over != nil {
		return e.over
	}
	return e
}

// fail ends a begun image that could not be made, or that nobody can ask for because its snapshot failed: it goes with
// its last user. The caller releases it.
func (c *hotCache) fail(e *hotImage, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e.err = err
	if !isClosed(e.ready) {
		close(e.ready)
	}
}

// shrink replaces an image that a live capture left by pages over an ancestor's, when those are few and nobody has mapped
// it yet: its children share the ancestor's memory again. The caller is its one user, and has stored it as m.
func (c *hotCache) shrink(ctx context.Context, e *hotImage, m store.Snapshot) error {
	if c.memory(e).Pages != nil || m.MemoryOwn > smallLayer {
		return nil
	}
	chain, err := c.h.layers.Chain(ctx, m.Memory)
	if err != nil {
		return err
	}
	below := c.hotAncestor(chain)
	if below == nil {
		return nil
	}
	next, err := c.loadOver(ctx, m, below)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil || e.users > 1 { // somebody has mapped it meanwhile
		c.releaseLocked(below)
		if err == nil {
			closeMemory(next)
		}
		return err
	}
	next.State = e.checkpoint.State
	closeMemory(e.checkpoint)
	e.checkpoint, e.bytes, e.over, e.below = next, next.Pages.Bytes(), below, append(e.below, below)
	return nil
}

// rename gives the image of a branch the snapshot's id, under which forks look for it.
func (c *hotCache) rename(e *hotImage, m store.Snapshot) {
	key := m.ID()
	c.mu.Lock()
	defer c.mu.Unlock()
	e.layer = m.Memory
	if _, taken := c.entries[key]; taken || c.entries[e.key] != e {
		return
	}
	delete(c.entries, e.key)
	e.key = key
	c.entries[key] = e
}

// memory is what a child of e is restored from.
func (c *hotCache) memory(e *hotImage) *engine.Checkpoint {
	c.mu.Lock()
	defer c.mu.Unlock()
	return e.checkpoint
}

// shareMemory is a hold of its own on the memory that the children of e map.
func (c *hotCache) shareMemory(e *hotImage) (*memory.Image, error) {
	m := c.memory(e)
	if m == nil {
		return nil, fmt.Errorf("share the memory of %s: it is not there any more", e.tag)
	}
	image, err := m.Memory.Share()
	if err != nil {
		return nil, fmt.Errorf("share the memory of %s: %w", e.tag, err)
	}
	return image, nil
}

// view is the memory of an image the caller uses.
func (c *hotCache) view(e *hotImage) memory.View {
	m := c.memory(e)
	return memory.View{Image: m.Memory, Pages: m.Pages}
}

// flattenBeyond is how much memory the pages written into each child may take together before an image of its own is
// cheaper: half of that image.
func flattenBeyond(memoryBytes int64) int64 { return memoryBytes / 2 }

// flattenFor makes pages over another's image an image of its own, when n more children would have many of them each. It
// is an improvement only: when there is no room for it the children take their pages as before.
func (c *hotCache) flattenFor(ctx context.Context, e *hotImage, n int) error {
	c.mu.Lock()
	old := e.checkpoint
	if old.Pages == nil || n == 1 || int64(n+e.users-1)*old.Pages.Bytes() <= flattenBeyond(old.Format.MemoryBytes) ||
		c.makeRoom(e.tag, old.Format.MemoryBytes) != nil {
		c.mu.Unlock()
		return nil
	}
	e.bytes += old.Format.MemoryBytes
	c.mu.Unlock()
	flat, err := memory.Flatten(ctx, memory.View{Image: old.Memory, Pages: old.Pages})
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil || e.checkpoint != old { // somebody else was faster
		e.bytes -= old.Format.MemoryBytes
		if flat != nil {
			_ = flat.Close()
		}
		return err
	}
	e.checkpoint, e.over = &engine.Checkpoint{Format: old.Format, State: old.State, Memory: flat}, nil
	e.retired = append(e.retired, old.Memory, old.Pages)
	return nil
}

// retain adds a user to an image that already has one.
func (c *hotCache) retain(e *hotImage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e.users++
}

func (c *hotCache) release(e *hotImage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.releaseLocked(e)
}

func (c *hotCache) releaseLocked(e *hotImage) {
	e.users--
	e.used = time.Now()
	// What a sandbox was when it slept, and what an earlier daemon had, nobody can ask for again.
	nameless := e.tag == "" || strings.HasPrefix(e.key, keptPrefix)
	if e.users == 0 && (e.err != nil || nameless) {
		c.drop(e)
	}
}

// makeRoom evicts cold images until need more bytes fit. The caller holds mu.
func (c *hotCache) makeRoom(tag string, need int64) error {
	for c.bytes()+need > c.h.cfg.HotMaxBytes {
		victim := c.coldest("")
		if victim == nil && c.coolOne() {
			continue
		}
		if victim == nil {
			return hint(fmt.Errorf("%w: the memory image of %s needs %s, hot images may take %s and %s are in use by running "+
				"sandboxes", ErrExhausted, tag, mib(need), mib(c.h.cfg.HotMaxBytes), mib(c.bytes())),
				"end sandboxes of other snapshots, or raise FORKD_HOT_MAX_BYTES")
		}
		c.drop(victim)
	}
	return nil
}

// coolOne frees the memory of an image that is kept only because disks of others stand on its disk. The caller holds mu.
func (c *hotCache) coolOne() bool {
	for _, e := range c.entries {
		if e.checkpoint == nil || e.users > c.derived(e) || c.sharesMemory(e) {
			continue
		}
		closeMemory(e.checkpoint)
		delete(c.entries, e.key)
		e.checkpoint, e.bytes, e.layer, e.key = nil, 0, layer.Digest{}, keptPrefix+e.key
		c.entries[e.key] = e
		return true
	}
	return false
}

// derived counts the images that stand on e. The caller holds mu.
func (c *hotCache) derived(e *hotImage) int {
	n := 0
	for _, other := range c.entries {
		for _, b := range other.below {
			if b == e {
				n++
			}
		}
	}
	return n
}

// sharesMemory reports whether pages of another image are over the memory of e, or will be. The caller holds mu.
func (c *hotCache) sharesMemory(e *hotImage) bool {
	for _, other := range c.entries {
		if other.over == e || !isClosed(other.ready) && slices.Contains(other.below, e) {
			return true
		}
	}
	return false
}

func (c *hotCache) bytes() int64 {
	var sum int64
	for _, e := range c.entries {
		sum += e.bytes
	}
	return sum
}

// coldest is the image nobody uses that was used longest ago, other than the one kept. The caller holds mu.
func (c *hotCache) coldest(keep string) *hotImage {
	var oldest *hotImage
	for key, e := range c.entries {
		if e.users == 0 && key != keep && (oldest == nil || e.used.Before(oldest.used)) {
			oldest = e
		}
	}
	return oldest
}

// drop forgets an image nobody uses. The caller holds mu.
func (c *hotCache) drop(e *hotImage) {
	if c.entries[e.key] == e {
		delete(c.entries, e.key)
	}
	if e.checkpoint != nil {
		closeMemory(e.checkpoint)
	}
	for _, r := range e.retired {
		_ = r.Close()
	}
	if e.own != "" && !c.standsOn(e.own) {
		_ = os.Remove(e.own)
	}
	for _, b := range e.below {
		c.releaseLocked(b)
	}
}

func closeMemory(c *engine.Checkpoint) {
	_ = c.Memory.Close()
	if c.Pages != nil {
		_ = c.Pages.Close()
	}
}

// forget drops a removed snapshot's hot image, unless it is in use; then it reports false. One that only other images
// stand on goes when they have gone.
func (c *hotCache) forget(m store.Snapshot) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.entries[m.ID()]
	if !ok {
		return true
	}
	derived := c.derived(e)
	if e.users > derived {
		return false
	}
	if derived == 0 {
		c.drop(e)
	}
	return true
}

// rekey follows a record that was rewritten with the same content.
func (c *hotCache) rekey(old, m store.Snapshot) {
	c.mu.Lock()
	e, ok := c.entries[old.ID()]
	c.mu.Unlock()
	if ok {
		c.rename(e, m)
	}
}

// evict drops everything cold, as lack of memory would.
func (c *hotCache) evict() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for e := c.coldest(""); e != nil; e = c.coldest("") {
		c.drop(e)
	}
}

// evictColdest drops one image that is cold and not the one kept, and reports whether there was one.
func (c *hotCache) evictColdest(keep string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	victim := c.coldest(keep)
	if victim == nil {
		return false
	}
	c.drop(victim)
	return true
}

// close drops everything; the host has no sandboxes any more.
func (c *hotCache) close() {
	c.evict()
	c.mu.Lock()
	defer c.mu.Unlock()
	for image := range c.bases {
		_ = os.Remove(c.h.cfg.Home.HotBase(image))
	}
	clear(c.bases)
}

// build unpacks what a snapshot's layers hold, in one pass over the pages and blocks, however long their chain is.
func (c *hotCache) build(ctx context.Context, m store.Snapshot, e *hotImage, state func() ([]byte, error)) error {
	devices, err := state()
	if err != nil {
		return err
	}
	base, err := c.base(ctx, m.Image)
	if err != nil {
		return err
	}
	checkpoint, below, err := c.loadMemory(ctx, m)
	if err != nil {
		return rebuildHint(fmt.Errorf("load memory of %s: %w", m.Tag, err), m.Tag)
	}
	checkpoint.State = devices
	own := c.h.cfg.Home.HotDisk(m.ID())
	err = c.h.unpackOverlay(ctx, m.Disk, m.ImageDisk, own, base)
	c.mu.Lock()
	defer c.mu.Unlock()
	if below != nil {
		e.below, e.over = append(e.below, below), below
		e.bytes = checkpoint.Pages.Bytes()
	}
	if err != nil {
		closeMemory(checkpoint)
		return rebuildHint(fmt.Errorf("load disk of %s: %w", m.Tag, err), m.Tag)
	}
	e.checkpoint, e.disks, e.own = checkpoint, []string{own, base}, own
	return nil
}

// smallLayer is what is rather written into each child than made an image of its own: writing it takes some 20 ms.
const smallLayer = 64 << 20

// loadMemory is a hot ancestor's image with pages over it, where there is one and the pages are few, else an image.
func (c *hotCache) loadMemory(ctx context.Context, m store.Snapshot) (_ *engine.Checkpoint, below *hotImage, err error) {
	chain, err := c.h.layers.Chain(ctx, m.Memory)
	if err != nil {
		return nil, nil, err
	}
	if below := c.hotAncestor(chain); below != nil {
		checkpoint, err := c.loadOver(ctx, m, below)
		if err != nil {
			c.release(below)
			return nil, nil, err
		}
		return checkpoint, below, nil
	}
	image, err := memory.Load(ctx, c.h.layers, m.Memory)
	if err != nil {
		return nil, nil, err
	}
	return &engine.Checkpoint{Format: m.Engine, Memory: image}, nil, nil
}

func (c *hotCache) loadOver(ctx context.Context, m store.Snapshot, below *hotImage) (*engine.Checkpoint, error) {
	pages, err := memory.LoadPages(ctx, c.h.layers, m.Memory, below.layer)
	if err != nil {
		return nil, err
	}
	image, err := c.memory(below).Memory.Share()
	if err != nil {
		return nil, errors.Join(err, pages.Close())
	}
	return &engine.Checkpoint{Format: m.Engine, Memory: image, Pages: pages}, nil
}

// hotAncestor finds the nearest image that is hot and flat, with few pages above it. The caller releases it.
func (c *hotCache) hotAncestor(chain []layer.Info) *hotImage {
	c.mu.Lock()
	defer c.mu.Unlock()
	var above int64
	for i := len(chain) - 1; i >= 0 && above <= smallLayer; i-- {
		for _, e := range c.entries {
			if e.layer == chain[i].Digest && e.checkpoint != nil && e.checkpoint.Pages == nil {
				e.users++
				return e
			}
		}
		above += chain[i].OwnBytes
	}
	return nil
}

func rebuildHint(err error, tag string) error {
	return hint(err, "remove it with: forkd rmi %s, then build it again from its recipe", tag)
}

// base returns the path of an image's unpacked disk, unpacking it if it is not there.
func (c *hotCache) base(ctx context.Context, image string) (string, error) {
	path := c.h.cfg.Home.HotBase(image)
	c.mu.Lock()
	b, ok := c.bases[image]
	if !ok {
		b = &hotBase{ready: make(chan struct{})}
		c.bases[image] = b
		c.mu.Unlock()
		// As with memory images: a build that is given up must not fail the forks that wait for the same disk.
		b.err = c.h.unpackBase(context.WithoutCancel(ctx), image, path)
		close(b.ready)
	} else {
		c.mu.Unlock()
	}
	select {
	case <-b.ready:
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
	if b.err != nil {
		c.mu.Lock()
		if c.bases[image] == b {
			delete(c.bases, image)
		}
		c.mu.Unlock()
		return "", b.err
	}
	return path, nil
}

// adoptBase enters the disk a build left at its place in the hot directory.
func (c *hotCache) adoptBase(image string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b := &hotBase{ready: make(chan struct{})}
	close(b.ready)
	c.bases[image] = b
}

// forgetBase removes an image's unpacked disk. The caller has made sure that nothing stands on it.
func (c *hotCache) forgetBase(image string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.bases, image)
	_ = os.Remove(c.h.cfg.Home.HotBase(image))
}
