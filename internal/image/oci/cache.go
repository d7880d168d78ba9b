package oci

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Cache keeps what came over the network, by its digest. Several processes may use one directory at once: a file is
// there complete or not at all, and one that was opened stays readable when it is removed.
type Cache struct {
	Dir      string
	Most     int64 // bytes that Trim leaves
	Progress func(what string, done, total int64)
	RetryGap time.Duration // before the second attempt of a download; doubled for each further one
}

// Bounds of downloads.
const (
	attempts     = 4
	stallTimeout = 60 * time.Second
	maxBlob      = 1 << 40
	staleAge     = 24 * time.Hour
)

func (c *Cache) path(digest string) string {
	return filepath.Join(c.Dir, "sha256", strings.TrimPrefix(digest, "sha256:"))
}

// open opens what is cached, verified; what does not match its name is removed. It counts as used.
func (c *Cache) open(ctx context.Context, digest string) (*os.File, error) {
	f, err := os.Open(c.path(digest))
	if err != nil {
		return nil, err
	}
	got, err := digestOf(ctx, f)
	if err == nil && got != digest {
		_ = os.Remove(f.Name()) // or the next download replaces it
		err = fmt.Errorf("%w: what is cached as %s is something else", fs.ErrNotExist, digest)
	}
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	now := time.Now()
	_ = os.Chtimes(f.Name(), now, now) // else it is forgotten a little earlier
	return f, nil
}

// digestOf reads something for its digest.
func digestOf(ctx context.Context, r io.Reader) (string, error) {
	h := sha256.New()
	_, err := io.Copy(h, &contextReader{r, ctx})
	return sumText(h), err
}

func sumText(h hash.Hash) string { return "sha256:" + hex.EncodeToString(h.Sum(nil)) }

type contextReader struct {
	r   io.Reader
	ctx context.Context //nolint:containedctx // a reader has no other way to be cancelled
}

func (c *contextReader) Read(p []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.r.Read(p)
}

// source begins a download. size is -1 when it is not known.
type source func(ctx context.Context) (r io.ReadCloser, size int64, err error)

// errPermanent is wrapped by errors that another attempt would not mend.
var errPermanent = errors.New("")

// fetch returns a file of the cache, downloaded when it is not there. Without a digest it is always downloaded.
func (c *Cache) fetch(ctx context.Context, what, digest string, size int64, from source) (*os.File, string, error) {
	if digest != "" {
		if f, err := c.open(ctx, digest); err == nil {
			return f, digest, nil
		}
	}
	if err := os.MkdirAll(filepath.Join(c.Dir, "sha256"), 0o700); err != nil {
		return nil, "", fmt.Errorf("make download cache: %w", err)
	}
	gap := c.RetryGap
	for attempt := 1; ; attempt++ {
		f, got, err := c.download(ctx, what, digest, size, from)
		switch {
		case err == nil:
			return f, got, nil
		case ctx.Err() != nil:
			return nil, "", context.Cause(ctx)
		case errors.Is(err, errPermanent) || attempt == attempts:
			return nil, "", fmt.Errorf("download %s: %w", what, err)
		}
		timer := time.NewTimer(gap)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, "", context.Cause(ctx)
		}
		gap *= 2
	}
}

// download makes one attempt.
func (c *Cache) download(ctx context.Context, what, digest string, size int64, from source) (_ *os.File, _ string, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stall := time.AfterFunc(stallTimeout, func() { cancel(fmt.Errorf("nothing arrived for %s", stallTimeout)) })
	defer stall.Stop()
	r, total, err := from(ctx)
	if err != nil {
		return nil, "", causeOr(ctx, err)
	}
	defer r.Close()
	if size >= 0 && total >= 0 && size != total {
		return nil, "", fmt.Errorf("%w: it has %d bytes, its manifest says %d", ErrFormat, total, size)
	}
	if size >= 0 {
		total = size
	}
	tmp, err := os.CreateTemp(c.Dir, "tmp-")
	if err != nil {
		return nil, "", fmt.Errorf("make download cache: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, tmp.Close(), os.Remove(tmp.Name()))
		}
	}()
	h := sha256.New()
	most := int64(maxBlob)
	if size >= 0 {
		most = size
	}
	n, err := io.Copy(io.MultiWriter(tmp, h, &meter{c: c, what: what, total: total, stall: stall}), io.LimitReader(r, most+1))
	if err != nil {
		return nil, "", causeOr(ctx, err)
	}
	if total >= 0 && n != total || n > most {
		return nil, "", fmt.Errorf("%w: %d of %d bytes arrived", ErrFormat, n, total)
	}
	got := sumText(h)
	if digest != "" && got != digest {
		return nil, "", fmt.Errorf("%w: what arrived has the digest %s, not %s", ErrFormat, got, digest)
	}
	if err := os.Rename(tmp.Name(), c.path(got)); err != nil {
		return nil, "", fmt.Errorf("keep download: %w", err)
	}
	_, err = tmp.Seek(0, io.SeekStart)
	return tmp, got, err
}

func causeOr(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// meter counts what arrives.
type meter struct {
	c           *Cache
	what        string
	done, total int64
	stall       *time.Timer
}

func (m *meter) Write(p []byte) (int, error) {
	m.done += int64(len(p))
	m.stall.Reset(stallTimeout)
	if m.c.Progress != nil {
		m.c.Progress(m.what, m.done, max(m.total, m.done))
	}
	return len(p), nil
}

// Trim removes what was not used for longest, until no more than Most bytes are left, and what an interrupted download
// left behind. A failure costs only space.
func (c *Cache) Trim() {
	stale, _ := filepath.Glob(filepath.Join(c.Dir, "tmp-*"))
	for _, name := range stale {
		if info, err := os.Lstat(name); err == nil && time.Since(info.ModTime()) > staleAge {
			_ = os.Remove(name)
		}
	}
	entries, err := os.ReadDir(filepath.Join(c.Dir, "sha256"))
	if err != nil {
		return
	}
	var files []fs.FileInfo
	var total int64
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			files, total = append(files, info), total+info.Size()
		}
	}
	slices.SortFunc(files, func(a, b fs.FileInfo) int { return a.ModTime().Compare(b.ModTime()) })
	for _, f := range files {
		if total <= c.Most {
			return
		}
		if os.Remove(filepath.Join(c.Dir, "sha256", f.Name())) == nil {
			total -= f.Size()
		}
	}
}

// view reads a file from its beginning, whoever else reads it.
func view(f *os.File) (io.ReadCloser, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return io.NopCloser(io.NewSectionReader(f, 0, info.Size())), nil
}
