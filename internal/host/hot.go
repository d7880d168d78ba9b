package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/store"
)

// hotImage is a snapshot unpacked and verified: its memory in a sealed memfd that all children map, its disk layer
// over its image's disk, its device state. Built once, shared by all children, evicted when cold.
type hotImage struct {
	key        string // snapshot id
	tag        string
	image      string
	checkpoint *engine.Checkpoint
	protocol   int    // of the agent in it
	disk       string // qcow2 over base
	base       string // raw
	bytes      int64  // reserved: the machine's full memory, since reading a hole of it fills the hole

	ready chan struct{} // closed when the rest is valid, or err is set
	err   error
	users int
	used  time.Time
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
	c.mu.Lock()
	key := m.ID()
	if e, ok := c.entries[key]; ok {
		e.users++
		c.mu.Unlock()
		return c.join(ctx, e)
	}
	if err := c.makeRoom(m); err != nil {
		c.mu.Unlock()
		return nil, err
	}
	e := &hotImage{key: key, tag: m.Tag, image: m.Image, bytes: m.Engine.MemoryBytes, ready: make(chan struct{}), users: 1}
	c.entries[key] = e
	c.mu.Unlock()

	// A caller that gives up must not spoil the image for those who joined it.
	e.err = c.build(context.WithoutCancel(ctx), m, e)
	close(e.ready)
	return c.join(ctx, e)
}

func (c *hotCache) join(ctx context.Context, e *hotImage) (*hotImage, error) {
	select {
	case <-e.ready:
	case <-ctx.Done():
		c.release(e)
		return nil, context.Cause(ctx)
	}
	if e.err != nil {
		c.release(e)
		return nil, e.err
	}
	return e, nil
}

// adopt enters a hot image that a build just made, so that the first fork need not unpack it. It may be refused
// for want of room: then it is closed and will be unpacked when asked for.
func (c *hotCache) adopt(m store.Snapshot, checkpoint *engine.Checkpoint, disk, base string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.entries[m.ID()]; ok || c.makeRoom(m) != nil {
		_ = checkpoint.Memory.Close()
		return
	}
	e := &hotImage{
		key: m.ID(), tag: m.Tag, image: m.Image, bytes: m.Engine.MemoryBytes, ready: make(chan struct{}),
		checkpoint: checkpoint, protocol: m.Protocol, disk: disk, base: base, used: time.Now(),
	}
	close(e.ready)
	c.entries[e.key] = e
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
	e.users--
	e.used = time.Now()
	if e.err != nil && e.users == 0 {
		delete(c.entries, e.key)
	}
}

// makeRoom evicts cold images until m fits. The caller holds mu.
func (c *hotCache) makeRoom(m store.Snapshot) error {
	need := m.Engine.MemoryBytes
	for c.bytes()+need > c.h.cfg.HotMaxBytes {
		victim := c.coldest()
		if victim == nil {
			return hint(fmt.Errorf("%w: the memory image of %s needs %s, hot images may take %s and %s are in use by running "+
				"sandboxes", ErrExhausted, m.Tag, mib(need), mib(c.h.cfg.HotMaxBytes), mib(c.bytes())),
				"end sandboxes of other snapshots, or raise FORKD_HOT_MAX_BYTES")
		}
		c.drop(victim)
	}
	return nil
}

func (c *hotCache) bytes() int64 {
	var sum int64
	for _, e := range c.entries {
		sum += e.bytes
	}
	return sum
}

func (c *hotCache) coldest() *hotImage {
	var oldest *hotImage
	for _, e := range c.entries {
		if e.users == 0 && (oldest == nil || e.used.Before(oldest.used)) {
			oldest = e
		}
	}
	return oldest
}

// drop forgets an image nobody uses. The caller holds mu.
func (c *hotCache) drop(e *hotImage) {
	delete(c.entries, e.key)
	if e.checkpoint != nil {
		_ = e.checkpoint.Memory.Close()
	}
	if e.disk != "" {
		_ = os.Remove(e.disk)
	}
}

// forget drops a snapshot's hot image, if nobody uses it; it reports whether none is left.
func (c *hotCache) forget(m store.Snapshot) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.entries[m.ID()]
	if !ok {
		return true
	}
	if e.users > 0 {
		return false
	}
	c.drop(e)
	return true
}

// evict drops everything cold, as lack of memory would.
func (c *hotCache) evict() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for e := c.coldest(); e != nil; e = c.coldest() {
		c.drop(e)
	}
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

func (c *hotCache) build(ctx context.Context, m store.Snapshot, e *hotImage) (err error) {
	state, err := c.h.store.State(m)
	if err != nil {
		return err
	}
	base, err := c.base(ctx, m.Image)
	if err != nil {
		return err
	}
	image, err := memory.Load(ctx, c.h.layers, m.Memory)
	if err != nil {
		return rebuildHint(fmt.Errorf("load memory of %s: %w", m.Tag, err), m.Tag)
	}
	disk := c.h.cfg.Home.HotDisk(m.ID())
	if err := c.h.unpackOverlay(ctx, m.Disk, disk, base); err != nil {
		return rebuildHint(errors.Join(fmt.Errorf("load disk of %s: %w", m.Tag, err), image.Close()), m.Tag)
	}
	e.checkpoint = &engine.Checkpoint{Format: m.Engine, State: state, Memory: image}
	e.protocol = m.Protocol
	e.disk, e.base = disk, base
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
		b.err = c.h.unpackBase(ctx, image, path)
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
