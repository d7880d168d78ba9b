package cli

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/image/dockerfile"
)

// buildDockerfile sends a Dockerfile with its context.
func (a *App) buildDockerfile(ctx context.Context, c *client.Client, file, dir string, opts client.BuildOptions) (*api.Snapshot, error) {
	var text []byte
	var err error
	if file == "-" {
		file = "Dockerfile"
		text, err = io.ReadAll(a.In)
	} else {
		text, err = os.ReadFile(file)
	}
	if err != nil {
		return nil, err
	}
	opts.Dockerfile = file
	parsed, err := dockerfile.Parse(file, text)
	if err != nil {
		return nil, err
	}
	base, err := localBase(parsed, opts)
	if err != nil {
		return nil, err
	}
	if base != nil {
		opts.Base = base.String()
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return nil, &hinted{fmt.Errorf("context %s: no such directory", dir), "forkd build -f FILE [DIRECTORY]; the default is this directory"}
	}
	return a.sendBuild(ctx, c, opts, func(w io.Writer) error { return packDockerfile(w, file, text, dir, base) })
}

// localBase is the base of a Dockerfile that is a path on this machine, if one is.
func localBase(f *dockerfile.File, opts client.BuildOptions) (*image.Base, error) {
	given := map[string]string{}
	for _, arg := range opts.BuildArgs {
		name, value, ok := strings.Cut(arg, "=")
		if !ok || name == "" {
			return nil, usage("--build-arg %s: write NAME=VALUE", arg)
		}
		given[name] = value
	}
	refs, err := f.Refs(given)
	if err != nil {
		return nil, err
	}
	var found *image.Base
	for _, ref := range refs {
		b, err := image.ParseBase(ref)
		if err != nil {
			continue // said with its line by who builds
		}
		if local, _ := b.Local(); !local {
			continue
		}
		if found != nil && found.String() != b.String() {
			return nil, fmt.Errorf("%s: two bases on this machine, %s and %s; only one can be sent along: make an image of the other first, "+
				"with forkd build, and use image:NAME", f.Name, found, b)
		}
		found = &b
	}
	return found, nil
}

func packDockerfile(w io.Writer, file string, text []byte, dir string, base *image.Base) error {
	t := tar.NewWriter(w)
	if err := t.WriteHeader(&tar.Header{Name: "Dockerfile", Size: int64(len(text)), Mode: 0o644, Typeflag: tar.TypeReg}); err != nil {
		return err
	}
	if _, err := t.Write(text); err != nil {
		return err
	}
	if base != nil {
		if err := packBase(t, recipeDir{path: dir}, *base); err != nil {
			return err
		}
	}
	ignore, err := readIgnore(file, dir)
	if err != nil {
		return err
	}
	if err := packContext(t, dir, ignore); err != nil {
		return fmt.Errorf("context %s: %w", dir, err)
	}
	return t.Close()
}

// readIgnore finds what of a context is left out: a file beside the Dockerfile goes before the context's own.
func readIgnore(file, dir string) (*dockerfile.Ignore, error) {
	for _, name := range []string{file + ".dockerignore", filepath.Join(dir, ".dockerignore")} {
		text, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return dockerfile.ParseIgnore(text), nil
	}
	return dockerfile.ParseIgnore(nil), nil
}

// packContext sends a directory as it is: files with their modes, links as links. Sockets, pipes and devices are left out.
func packContext(t *tar.Writer, dir string, ignore *dockerfile.Ignore) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	return fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name == "." {
			return nil
		}
		if ignore.Match(name) {
			if d.IsDir() && !ignore.Exceptions() {
				return fs.SkipDir
			}
			return nil // a directory's files may be exceptions; the directory itself comes with them
		}
		return packContextEntry(t, root, name)
	})
}

func packContextEntry(t *tar.Writer, root *os.Root, name string) error {
	info, err := root.Lstat(name)
	if err != nil {
		return err
	}
	link := ""
	switch mode := info.Mode(); {
	case mode&fs.ModeSymlink != 0:
		if link, err = root.Readlink(name); err != nil {
			return err
		}
	case !mode.IsRegular() && !mode.IsDir():
		return nil
	}
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	h.Name, h.Uid, h.Gid, h.Uname, h.Gname, h.Format = path.Join("context", name), 0, 0, "", "", tar.FormatPAX
	if info.IsDir() {
		h.Name += "/"
	}
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	f, err := root.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := io.CopyN(t, f, h.Size); err != nil {
		return fmt.Errorf("%s changed while it was read: %w", name, err)
	}
	return nil
}

// machineFlags are the size of a machine that no recipe says.
type machineFlags struct {
	cpus         int
	memory, disk string
}

func (m *machineFlags) given() bool { return *m != machineFlags{} }

// recipe is the size as a recipe says it.
func (m *machineFlags) recipe() string {
	if !m.given() {
		return ""
	}
	text := "machine:\n"
	if m.cpus != 0 {
		text += fmt.Sprintf("  cpus: %d\n", m.cpus)
	}
	if m.memory != "" {
		text += fmt.Sprintf("  memory: %q\n", m.memory)
	}
	if m.disk != "" {
		text += fmt.Sprintf("  disk: %q\n", m.disk)
	}
	return text
}

// buildOf says what the arguments of build ask for.
func (a *App) buildOf(args []string, file string, machine *machineFlags, opts *client.BuildOptions,
) (func(context.Context, *client.Client) (*api.Snapshot, error), error) {
	if file == "" && len(args) == 0 {
		return nil, usage("name a recipe or a base, or a Dockerfile with -f")
	}
	if opts.Network != "" {
		if _, err := image.ParseNetwork("--network", opts.Network); err != nil {
			return nil, usage("%w", err)
		}
	}
	if file == "" && isDockerContext(args[0]) {
		file = filepath.Join(args[0], "Dockerfile")
	}
	if file != "" {
		dir := "."
		if len(args) == 1 {
			dir = args[0]
		}
		// Sizes are read as a recipe's are.
		size, err := sizes(machine)
		if err != nil {
			return nil, err
		}
		opts.CPUs, opts.MemoryBytes, opts.DiskBytes = size.Machine.CPUs, size.Machine.MemoryBytes, size.Machine.DiskBytes
		return func(ctx context.Context, c *client.Client) (*api.Snapshot, error) {
			return a.buildDockerfile(ctx, c, file, dir, *opts)
		}, nil
	}
	if len(opts.BuildArgs) > 0 || opts.Target != "" {
		return nil, usage("--build-arg and --target are for a Dockerfile; name it with -f")
	}
	dir, name, err := openRecipe(args[0])
	if err == nil {
		if machine.given() {
			return nil, usage("--cpus, --memory and --disk are for a Dockerfile or a base; a recipe says them itself, below machine")
		}
		if opts.Network != "" {
			return nil, usage("--network is for a Dockerfile or a base; a recipe says it itself, under network")
		}
		return func(ctx context.Context, c *client.Client) (*api.Snapshot, error) {
			return a.doBuild(ctx, c, dir, name, *opts)
		}, nil
	}
	base, baseErr := image.ParseBase(args[0])
	if baseErr != nil {
		if strings.Contains(args[0], ":") {
			return nil, errors.Join(err, baseErr)
		}
		return nil, err
	}
	text := []byte(fmt.Sprintf("base: %q\n", base.String()) + machine.recipe())
	if opts.Network != "" {
		text = append(text, "network: "+opts.Network+"\n"...)
	}
	return func(ctx context.Context, c *client.Client) (*api.Snapshot, error) {
		return a.buildText(ctx, c, recipeDir{os.DirFS("."), "."}, "base "+args[0], text, *opts)
	}, nil
}

// isDockerContext says whether a directory has a Dockerfile and no recipe.
func isDockerContext(dir string) bool {
	_, recipe := os.Stat(filepath.Join(dir, "recipe.yaml"))
	_, file := os.Stat(filepath.Join(dir, "Dockerfile"))
	return errors.Is(recipe, fs.ErrNotExist) && file == nil
}

// sizes reads sizes as a recipe has them; what is not given is zero.
func sizes(m *machineFlags) (*image.Recipe, error) {
	r, err := image.ParseRecipe("--cpus, --memory, --disk", []byte("base: debian:bookworm\n"+m.recipe()))
	if err != nil {
		if e, ok := errors.AsType[*image.FileError](err); ok && len(e.Faults) > 0 {
			return nil, usage("%s", e.Faults[0].Message)
		}
		return nil, err
	}
	if m.cpus == 0 {
		r.Machine.CPUs = 0
	}
	if m.memory == "" {
		r.Machine.MemoryBytes = 0
	}
	if m.disk == "" {
		r.Machine.DiskBytes = 0
	}
	return r, nil
}
