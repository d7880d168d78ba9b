package oci

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/image/flatten"
)

// Bounds of an archive of `docker save`.
const (
	maxMembers = 20_000
	maxArchive = 256 << 30
)

// archive is a tar file whose members can be read in any order.
type archive struct {
	file    io.ReaderAt
	members map[string]member
	close   func()
}

type member struct {
	offset, size int64
	link         string // of a symbolic link
}

// OpenDockerArchive finds an image in a file written by `docker save`: the one that which names, or the only one. A
// file that is compressed is unpacked into a temporary file in tmp.
func OpenDockerArchive(ctx context.Context, files fs.FS, name, which, arch, tmp string) (*Image, error) {
	a, err := openArchive(ctx, files, name, tmp)
	if err != nil {
		return nil, err
	}
	img, err := a.image(which, arch)
	if err != nil {
		a.close()
		return nil, err
	}
	img.close = append(img.close, a.close)
	return img, nil
}

func openArchive(ctx context.Context, files fs.FS, name, tmp string) (*archive, error) {
	f, err := files.Open(name)
	if err != nil {
		return nil, err
	}
	at, ok := f.(interface {
		io.ReaderAt
		io.Seeker
	})
	if !ok {
		f.Close()
		return nil, errors.New("the archive is no file that can be read in any order")
	}
	size, err := at.Seek(0, io.SeekEnd)
	if err != nil {
		f.Close()
		return nil, err
	}
	a := &archive{file: at, close: func() { f.Close() }}
	if packed, err := isPacked(at); err != nil || packed {
		defer f.Close()
		if err != nil {
			return nil, err
		}
		spool, n, err := unpackTo(ctx, tmp, io.NewSectionReader(at, 0, size))
		if err != nil {
			return nil, err
		}
		a.file, size, a.close = spool, n, func() { spool.Close() }
	}
	if err := a.index(ctx, io.NewSectionReader(a.file, 0, size)); err != nil {
		a.close()
		return nil, err
	}
	return a, nil
}

// isPacked reports whether a file begins like no tar file.
func isPacked(f io.ReaderAt) (bool, error) {
	head := make([]byte, 512)
	n, err := f.ReadAt(head, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	return n < len(head) || string(head[257:262]) != "ustar", nil
}

// unpackTo unpacks into a file that has no name any more.
func unpackTo(ctx context.Context, dir string, r io.Reader) (*os.File, int64, error) {
	plain, done, err := flatten.Decompress(r)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	defer done()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, 0, err
	}
	f, err := os.CreateTemp(dir, "tmp-")
	if err != nil {
		return nil, 0, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	n, err := io.Copy(f, &contextReader{io.LimitReader(plain, maxArchive+1), ctx})
	switch {
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case err != nil:
		err = fmt.Errorf("%w: %w", ErrFormat, err)
	case n > maxArchive:
		err = fmt.Errorf("%w: it unpacks to more than %d GiB", ErrFormat, maxArchive>>30)
	}
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, n, nil
}

// index finds the members.
func (a *archive) index(ctx context.Context, f *io.SectionReader) error {
	a.members = map[string]member{}
	t := tar.NewReader(f)
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%w: it is no tar file: %w", ErrFormat, err)
		}
		if len(a.members) >= maxMembers {
			return fmt.Errorf("%w: an archive of more than %d members", ErrFormat, maxMembers)
		}
		name := path.Clean("/" + h.Name)[1:]
		switch h.Typeflag {
		case tar.TypeReg:
			offset, err := f.Seek(0, io.SeekCurrent)
			if err != nil {
				return err
			}
			a.members[name] = member{offset: offset, size: h.Size}
		case tar.TypeSymlink: // how older versions name a layer that several images have
			a.members[name] = member{link: path.Join("/"+path.Dir(name), h.Linkname)[1:]}
		}
	}
}

// open opens a member.
func (a *archive) open(name string) (*io.SectionReader, error) {
	name = path.Clean("/" + name)[1:]
	for range 3 {
		m, ok := a.members[name]
		switch {
		case !ok:
			return nil, fmt.Errorf("%w: the archive has no member %.120q", ErrFormat, name)
		case m.link == "":
			return io.NewSectionReader(a.file, m.offset, m.size), nil
		}
		name = m.link
	}
	return nil, fmt.Errorf("%w: the member %.120q is a link to a link to a link", ErrFormat, name)
}

func (a *archive) small(name string) ([]byte, error) {
	r, err := a.open(name)
	if err != nil {
		return nil, err
	}
	return readAll(r, maxConfig)
}

// saved is an image in an archive's manifest.json.
type saved struct {
	Config   string
	RepoTags []string
	Layers   []string
}

func (a *archive) image(which, arch string) (*Image, error) {
	data, err := a.small("manifest.json")
	if err != nil {
		return nil, fmt.Errorf("%w: it has no manifest.json, so it was not written by `docker save`", ErrFormat)
	}
	var all []saved
	if err := json.Unmarshal(data, &all); err != nil {
		return nil, fmt.Errorf("%w: manifest.json is no list of images: %w", ErrFormat, err)
	}
	s, err := pick(all, which)
	if err != nil {
		return nil, err
	}
	if data, err = a.small(s.Config); err != nil {
		return nil, err
	}
	cfg, err := parseConfig(data, platform{OS: "linux", Architecture: arch})
	if err != nil {
		return nil, err
	}
	if len(s.Layers) > maxLayers || len(s.Layers) != len(cfg.RootFS.DiffIDs) {
		return nil, fmt.Errorf("%w: %d layers, of which its configuration knows %d", ErrFormat, len(s.Layers), len(cfg.RootFS.DiffIDs))
	}
	// The configuration names the layers by what they unpack to, which is all there is to verify.
	img := &Image{Digest: Digest(data), Config: cfg.Config}
	for i, name := range s.Layers {
		if _, err := a.open(name); err != nil {
			return nil, err
		}
		img.Layers = append(img.Layers, flatten.Layer{
			Name: fmt.Sprintf("layer %d of %d", i+1, len(s.Layers)), DiffID: cfg.RootFS.DiffIDs[i],
			Open: func(context.Context) (io.ReadCloser, error) {
				r, err := a.open(name)
				if err != nil {
					return nil, err
				}
				return io.NopCloser(r), nil
			},
		})
	}
	return img, nil
}

func pick(all []saved, which string) (*saved, error) {
	var there []string
	for i := range all {
		s := &all[i]
		there = append(there, append(slices.Clone(s.RepoTags), s.Config)...)
		if which != "" && (slices.Contains(s.RepoTags, which) || s.Config == which ||
			"sha256:"+strings.TrimSuffix(path.Base(s.Config), ".json") == which) {
			return s, nil
		}
	}
	switch {
	case len(all) == 1 && which == "":
		return &all[0], nil
	case len(all) == 0:
		return nil, fmt.Errorf("%w: the archive is empty", ErrNotFound)
	case which == "":
		return nil, fmt.Errorf("%w: the archive has several; say which after #: %s", ErrNotFound, listed(there))
	}
	return nil, fmt.Errorf("%w named %q; there are: %s", ErrNotFound, which, listed(there))
}

func listed(all []string) string {
	for i, s := range all {
		all[i] = fmt.Sprintf("%.100s", s)
	}
	return strings.Join(all[:min(len(all), 20)], ", ")
}

// OpenTar takes a tar file, compressed or not, for a root file system. want is the digest it must have, or "".
func OpenTar(ctx context.Context, files fs.FS, name, want string) (*Image, error) {
	f, err := files.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	digest, err := digestOf(ctx, f)
	if err != nil {
		return nil, err
	}
	if want != "" && want != digest {
		return nil, fmt.Errorf("%w: the file has the digest %s, not %s", ErrFormat, digest, want)
	}
	return oneLayer(digest, func(context.Context) (io.ReadCloser, error) { return files.Open(name) }), nil
}

// OpenTarURL downloads such a file. With a digest it is taken from the cache when it is there.
func OpenTarURL(ctx context.Context, url, want string, cache *Cache) (*Image, error) {
	wire := newTransport()
	defer wire.CloseIdleConnections()
	var by http.RoundTripper = wire
	if want != "" {
		by = wire.Transport // the digest says what it is, however it came
	}
	client := &http.Client{Transport: by}
	f, digest, err := cache.fetch(ctx, url, want, -1, func(ctx context.Context) (io.ReadCloser, int64, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
		if err != nil {
			return nil, 0, err
		}
		answer, err := client.Do(req)
		if err != nil {
			return nil, 0, lasting(err)
		}
		if answer.StatusCode == http.StatusOK {
			return answer.Body, answer.ContentLength, nil
		}
		answer.Body.Close()
		err = fmt.Errorf("the server answers %s", answer.Status)
		if answer.StatusCode < http.StatusInternalServerError && answer.StatusCode != http.StatusTooManyRequests {
			err = fmt.Errorf("%w%w", errPermanent, err)
		}
		return nil, 0, err
	})
	if err != nil {
		return nil, err
	}
	cache.Trim()
	img := oneLayer(digest, func(context.Context) (io.ReadCloser, error) { return view(f) })
	img.close = append(img.close, func() { f.Close() })
	return img, nil
}

func oneLayer(digest string, open flatten.Opener) *Image {
	return &Image{Digest: digest, Layers: []flatten.Layer{{Name: "tar file", Open: open}}}
}
