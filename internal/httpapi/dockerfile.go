package httpapi

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/image/dockerfile"
)

// Names in the body of a Dockerfile's build.
const (
	dockerfileEntry = "Dockerfile"
	contextPrefix   = "context/"
)

// receiveDockerfile reads a Dockerfile with its context. The context's files are spooled in one file of dir and never get
// their names on this host; a base that is a path on the client's machine is unpacked below root.
func receiveDockerfile(q url.Values, dir string, root *os.Root, body io.Reader) (*host.DockerfileSpec, error) {
	spec := &host.DockerfileSpec{Name: q.Get("dockerfile"), Target: q.Get("target"), Args: map[string]string{}, Bases: map[string]fs.FS{}}
	for _, a := range q["build_arg"] {
		name, value, ok := strings.Cut(a, "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("%w: build_arg %.60q: write NAME=VALUE", host.ErrInvalid, a)
		}
		spec.Args[name] = value
	}
	var err error
	if spec.Machine, err = machineOf(q); err != nil {
		return nil, err
	}
	if text := q.Get("network"); text != "" {
		if spec.Network, err = image.ParseNetwork("network", text); err != nil {
			return nil, fmt.Errorf("%w: %w", host.ErrInvalid, err)
		}
	}
	spool, err := os.OpenFile(filepath.Join(dir, "context"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("receive context: %w", err)
	}
	spec.Context = dockerfile.NewContext(spool) // The file is open as long as the build; its directory goes with the request.
	if err := receiveContext(spec, root, tar.NewReader(body)); err != nil {
		return nil, errors.Join(err, spool.Close())
	}
	if spec.Text == nil {
		return nil, errors.Join(fmt.Errorf("%w: the tar stream has no %s", host.ErrInvalid, dockerfileEntry), spool.Close())
	}
	if base := q.Get("base"); base != "" {
		spec.Bases[base] = root.FS()
	}
	return spec, nil
}

func receiveContext(spec *host.DockerfileSpec, root *os.Root, t *tar.Reader) error {
	var total int64
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%w: the body is no tar stream: %w", host.ErrInvalid, err)
		}
		if total += h.Size; total > maxRecipeFiles {
			return fmt.Errorf("%w: the context's files have more than %d bytes", host.ErrInvalid, int64(maxRecipeFiles))
		}
		name, isContext := strings.CutPrefix(h.Name, contextPrefix)
		switch {
		case isContext:
			if name = strings.TrimSuffix(name, "/"); name == "" {
				continue
			}
			err = spec.Context.Add(name, h, t)
		case h.Name == dockerfileEntry && spec.Text == nil:
			if spec.Text, err = io.ReadAll(io.LimitReader(t, maxRecipe+1)); err == nil && len(spec.Text) > maxRecipe {
				err = fmt.Errorf("more than %d bytes", maxRecipe)
			}
		case strings.HasPrefix(h.Name, image.LocalDir):
			err = receiveFile(root, h, t)
		default:
			err = errors.New("unknown entry")
		}
		if err != nil {
			return fmt.Errorf("%w: %.200q: %w", host.ErrInvalid, h.Name, err)
		}
	}
}

// machineOf is the size of the machine, of what is given.
func machineOf(q url.Values) (m image.Machine, err error) {
	number := func(name string, least, most, unit int64) int64 {
		text := q.Get(name)
		if text == "" || err != nil {
			return 0
		}
		n, parseErr := strconv.ParseInt(text, 10, 64)
		if parseErr != nil || n < least || n > most || n%unit != 0 {
			err = fmt.Errorf("%w: %s %.40q: a number from %d to %d, a multiple of %d", host.ErrInvalid, name, text, least, most, unit)
		}
		return n
	}
	const mib = 1 << 20
	m.CPUs = int(number("cpus", 1, 64, 1))
	m.MemoryBytes = number("memory_bytes", 128*mib, 1<<40, mib)
	m.DiskBytes = number("disk_bytes", 1<<30, 16<<40, mib)
	return m, err
}
