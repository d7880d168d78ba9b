package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/image/flatten"
)

// dirBlobs are the blobs of a layout.
type dirBlobs struct{ dir fs.FS }

func blobPath(digest string) string { return "blobs/" + strings.Replace(digest, ":", "/", 1) }

func (b dirBlobs) small(_ context.Context, d descriptor) ([]byte, error) { return b.bytes(d) }

func (b dirBlobs) bytes(d descriptor) ([]byte, error) {
	f, err := b.open(d)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAll(f, maxConfig)
}

func (b dirBlobs) layer(_ context.Context, d descriptor) (flatten.Opener, error) {
	f, err := b.open(d)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return func(context.Context) (io.ReadCloser, error) { return b.dir.Open(blobPath(d.Digest)) }, nil
}

// open opens a blob that is as large as its descriptor says.
func (b dirBlobs) open(d descriptor) (fs.File, error) {
	f, err := b.dir.Open(blobPath(d.Digest))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: the layout has no blob %s", ErrFormat, d.Digest)
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	switch {
	case err != nil:
	case !info.Mode().IsRegular():
		err = fmt.Errorf("%w: the blob %s is no file", ErrFormat, d.Digest)
	case info.Size() != d.Size:
		err = fmt.Errorf("%w: the blob %s has %d bytes, not %d", ErrFormat, d.Digest, info.Size(), d.Size)
	default:
		return f, nil
	}
	f.Close()
	return nil, err
}

// OpenLayout finds an image in a directory in the OCI image layout: the one that which names, by name or digest, or
// the only one there is.
func OpenLayout(ctx context.Context, dir fs.FS, which, arch string) (*Image, error) {
	index, err := readIndex(dir)
	if err != nil {
		return nil, err
	}
	d, err := selectFrom(index.Manifests, which, arch)
	if err != nil {
		return nil, err
	}
	return open(ctx, dirBlobs{dir}, *d, arch)
}

func readIndex(dir fs.FS) (*manifest, error) {
	f, err := dir.Open(indexFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: the directory has no %s, so it is no OCI image layout", ErrFormat, indexFile)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := readAll(f, maxManifest)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", indexFile, err)
	}
	index := &manifest{}
	if err := json.Unmarshal(data, index); err != nil {
		return nil, fmt.Errorf("%w: %s is no JSON: %w", ErrFormat, indexFile, err)
	}
	return index, nil
}

// LayoutFiles are the files of a layout that an image needs, for all its platforms: a layout may hold many images. What
// makes no sense is left to whoever opens the image to complain about.
func LayoutFiles(dir fs.FS, which string) ([]string, error) {
	index, err := readIndex(dir)
	if err != nil {
		return nil, err
	}
	files := []string{indexFile}
	blobs := dirBlobs{dir}
	seen := map[string]bool{}
	var visit func(d descriptor, depth int)
	visit = func(d descriptor, depth int) {
		if d.check(0) != nil || seen[d.Digest] || len(seen) > maxReachable {
			return
		}
		seen[d.Digest] = true
		if _, err := fs.Stat(dir, blobPath(d.Digest)); err != nil {
			return
		}
		files = append(files, blobPath(d.Digest))
		if depth > maxDepth {
			return
		}
		data, err := blobs.bytes(d)
		if err != nil {
			return
		}
		m, err := parseManifest(data, d.MediaType)
		if err != nil {
			return
		}
		for _, next := range m.Manifests {
			visit(next, depth+1)
		}
		if m.Manifests == nil {
			for _, part := range append(m.Layers, m.Config) {
				visit(part, maxDepth+1)
			}
		}
	}
	for _, d := range index.Manifests {
		if which == "" || d.Digest == which || d.Annotations[refName] == which {
			visit(d, 1)
		}
	}
	return files, nil
}

// maxReachable bounds what is looked at of a layout.
const maxReachable = 50_000

const indexFile = "index.json"

// selectFrom picks one of a layout's images.
func selectFrom(list []descriptor, which, arch string) (*descriptor, error) {
	named := list
	if which != "" {
		named = nil
		for _, d := range list {
			if d.Digest == which || d.Annotations[refName] == which {
				named = append(named, d)
			}
		}
	}
	switch {
	case len(list) == 0:
		return nil, fmt.Errorf("%w: the layout is empty", ErrNotFound)
	case len(named) == 1:
		return &named[0], nil
	case len(named) == 0:
		return nil, fmt.Errorf("%w named %q; there are: %s", ErrNotFound, which, names(list))
	}
	// The same image for several platforms, or several images.
	fits := slices.DeleteFunc(slices.Clone(named), func(d descriptor) bool {
		return d.Platform == nil || d.Platform.Architecture != arch || d.Platform.OS != "linux"
	})
	if len(fits) == 1 {
		return &fits[0], nil
	}
	if len(fits) == 0 && !slices.ContainsFunc(named, func(d descriptor) bool { return d.Platform == nil }) {
		_, err := choose(named, platform{OS: "linux", Architecture: arch})
		return nil, err
	}
	return nil, fmt.Errorf("%w: the layout has several; say which after #: %s", ErrNotFound, names(named))
}

func names(list []descriptor) string {
	var all []string
	for _, d := range list {
		name := d.Annotations[refName]
		if name == "" {
			name = d.Digest
		}
		all = append(all, fmt.Sprintf("%.100s", name))
	}
	return strings.Join(all[:min(len(all), 20)], ", ")
}
