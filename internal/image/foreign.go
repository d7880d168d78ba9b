package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"forkd.dev/forkd/internal/image/flatten"
	"forkd.dev/forkd/internal/image/oci"
)

// foreign is the part of a plan whose base is somebody else's file system.
type foreign struct {
	image *oci.Image
	tree  *flatten.Tree // since Prepare
	disk  int64
	size  flatten.Size
}

// maxAutomatic is what a base may unpack to when the recipe names no size of the disk.
const maxAutomatic = 64 << 30

// resolveForeign finds the image that a base names.
func resolveForeign(ctx context.Context, p *Plan, cfg Host) error {
	img, err := openForeign(ctx, p.Recipe.From, p.source, cfg)
	if err != nil {
		return fmt.Errorf("find base %s: %w", short(p.Recipe.Base), err)
	}
	p.foreign = &foreign{image: img}
	p.Notes = img.Notes
	base, notes, err := readConfig(&img.Config)
	if err != nil {
		p.Close()
		return fmt.Errorf("base %s: %w", short(p.Recipe.Base), err)
	}
	p.Notes = append(p.Notes, notes...)
	p.Config = base.with(p.Recipe)
	return nil
}

// LocalFiles are the files of the directory that a base names which it needs, by their names below it.
func LocalFiles(b Base, dir fs.FS) ([]string, error) { return oci.LayoutFiles(dir, b.Fragment) }

// maxCached bounds the layers that are kept for the next build.
const maxCached = 20 << 30

func (c Host) blobs() *oci.Cache {
	return &oci.Cache{Dir: filepath.Join(c.CacheDir, "oci"), Most: maxCached, Progress: c.Progress, RetryGap: time.Second}
}

func openForeign(ctx context.Context, b Base, files fs.FS, cfg Host) (*oci.Image, error) {
	if local, _ := b.Local(); local {
		if _, err := fs.Stat(files, LocalDir); err != nil {
			return nil, errors.New("the request does not bring it along: the command line reads what is on your machine and sends it")
		}
	}
	switch b.Kind {
	case KindLayout:
		dir, err := fs.Sub(files, LocalDir)
		if err != nil {
			return nil, err
		}
		return oci.OpenLayout(ctx, dir, b.Fragment, cfg.Arch)
	case KindDockerArchive:
		return oci.OpenDockerArchive(ctx, files, LocalFile, b.Fragment, cfg.Arch, cfg.CacheDir)
	case KindOCI:
		return oci.OpenRegistry(ctx, b.Ref, cfg.blobs(), cfg.Arch)
	case KindTar:
		if b.Remote() {
			return oci.OpenTarURL(ctx, b.Ref, b.Fragment, cfg.blobs())
		}
		return oci.OpenTar(ctx, files, LocalFile, b.Fragment)
	default:
		return nil, fmt.Errorf("a base of the kind %s cannot be resolved here", b.Kind)
	}
}

// Bounds of an image's configuration: it is stored with every snapshot.
const (
	maxConfigEnv    = 1000
	maxConfigArgs   = 1000
	maxConfigText   = 128 << 10 // of variables, or of arguments, together
	maxConfigLabels = 256 << 10
	maxConfigPorts  = 1000
)

// readConfig takes over what an image says of its programs.
func readConfig(c *oci.Config) (*Config, []string, error) {
	out := &Config{Env: map[string]string{}, User: c.User, WorkDir: c.WorkingDir, Entrypoint: c.Entrypoint, Cmd: c.Cmd}
	for _, kv := range c.Env {
		if name, value, ok := strings.Cut(kv, "="); ok && name != "" {
			out.Env[name] = value
		}
	}
	if out.WorkDir != "" {
		out.WorkDir = path.Clean("/" + out.WorkDir)
	}
	for port := range c.ExposedPorts {
		out.Ports = append(out.Ports, port)
	}
	slices.Sort(out.Ports)
	if err := out.check(); err != nil {
		return nil, nil, fmt.Errorf("its configuration: %w", err)
	}
	var notes []string
	size := 0
	for _, name := range sortedKeys(c.Labels) {
		if size += len(name) + len(c.Labels[name]); size > maxConfigLabels {
			notes = append(notes, fmt.Sprintf("labels of more than %d KiB are left out", maxConfigLabels>>10))
			break
		}
		if out.Labels == nil {
			out.Labels = map[string]string{}
		}
		out.Labels[name] = c.Labels[name]
	}
	return out, notes, nil
}

// check refuses what no process could be started with.
func (c Config) check() error {
	text := func(what string, most int, list ...string) error {
		size := 0
		for _, s := range list {
			if size += len(s); strings.ContainsRune(s, 0) || size > most {
				return fmt.Errorf("%s with a NUL, or of more than %d bytes", what, most)
			}
		}
		return nil
	}
	var env []string
	for k, v := range c.Env {
		env = append(env, k, v)
	}
	if len(c.Env) > maxConfigEnv || len(c.Entrypoint)+len(c.Cmd) > maxConfigArgs || len(c.Ports) > maxConfigPorts {
		return fmt.Errorf("more than %d variables, arguments or ports", maxConfigEnv)
	}
	return errors.Join(
		text("environment", maxConfigText, env...),
		text("entry point and command", maxConfigText, slices.Concat(c.Entrypoint, c.Cmd)...),
		text("user", maxNameLength*2, c.User), text("working directory", maxPathLength, c.WorkDir),
		text("ports", maxConfigText, c.Ports...),
	)
}

// with is the configuration with a recipe's values on top.
func (c Config) with(r *Recipe) Config {
	out := c
	out.Env = maps.Clone(c.Env)
	maps.Copy(out.Env, r.Env)
	if r.User != "" {
		out.User = r.User
	}
	if r.WorkDir != "" {
		out.WorkDir = r.WorkDir
	}
	return out
}

// Prepare reads what the image is made of as far as the size of the disk depends on it. It comes before DiskBytes and
// WriteRootfs; nothing of it is needed for an image that is there already.
func (p *Plan) Prepare(ctx context.Context) error {
	if p.foreign == nil || p.foreign.tree != nil {
		return nil
	}
	most := int64(maxAutomatic)
	if m := p.Recipe.Machine; m.DiskGiven {
		most = m.DiskBytes
	}
	tree := flatten.New(flatten.DefaultLimits(most))
	for _, l := range p.foreign.image.Layers {
		if err := tree.Add(ctx, l); err != nil {
			return fmt.Errorf("base %s: %w", short(p.Recipe.Base), err)
		}
	}
	if err := p.complete(tree); err != nil {
		return err
	}
	size := tree.Size()
	disk, err := p.Recipe.Machine.fit(size)
	if err != nil {
		return fmt.Errorf("base %s: %w", short(p.Recipe.Base), err)
	}
	p.foreign.tree, p.foreign.disk, p.foreign.size = tree, disk, size
	return nil
}

// DiskBytes is the size of the image's disk.
func (p *Plan) DiskBytes() int64 {
	if p.foreign != nil {
		return p.foreign.disk
	}
	return p.Recipe.Machine.DiskBytes
}

// Unpacked is how many layers the base has, and what they unpack to. It is zero for Debian, and before Prepare.
func (p *Plan) Unpacked() (layers int, size flatten.Size) {
	if p.foreign == nil || p.foreign.tree == nil {
		return 0, flatten.Size{}
	}
	return len(p.foreign.image.Layers), p.foreign.size
}

// Of a disk as disk.Format makes it: what its own tables take, and how many files it has room for.
const (
	diskOverhead  = 64 << 20
	bytesPerInode = 8192
)

// fit is the size of a disk for a tree, with room to grow.
func (m *Machine) fit(s flatten.Size) (int64, error) {
	least := (s.Bytes+s.Files*512)/100*106 + diskOverhead
	least = max(least, s.Files*bytesPerInode/100*105)
	if m.DiskGiven && least > m.DiskBytes {
		return 0, fmt.Errorf("it unpacks to %d files of %s, for which machine.disk of %s is too small; set it to %s or more",
			s.Files, sizeText(roundUp(s.Bytes, 1<<20)), sizeText(m.DiskBytes), sizeText(roundUp(least, 1<<30)))
	}
	if m.DiskGiven {
		return m.DiskBytes, nil
	}
	return max(m.DiskBytes, roundUp(least/4*5+1<<30, 1<<30)), nil
}

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }

// complete puts on top of the base what the recipe and the machine need.
func (p *Plan) complete(tree *flatten.Tree) error {
	for _, name := range []string{"dev", "proc", "sys", "run"} {
		if err := tree.Mount(name); err != nil {
			return fmt.Errorf("base %s: %w", short(p.Recipe.Base), err)
		}
	}
	for _, name := range []string{"/etc", "/tmp", "/var/tmp"} { // a machine writes there
		if err := tree.Reach(name); err != nil {
			return fmt.Errorf("base %s: %s: %w", short(p.Recipe.Base), name, err)
		}
	}
	if !tree.Exists("/tmp") {
		if err := tree.Put(flatten.File{Name: "/tmp", Mode: 0o1777, Dir: true}); err != nil {
			return err
		}
	}
	if len(p.Recipe.Run) > 0 && !tree.Executable("/bin/sh") {
		return fmt.Errorf(`base %s has no /bin/sh, which the recipe's "run" needs`, short(p.Recipe.Base))
	}
	accounts := newAccounts(tree)
	if name, _, _ := strings.Cut(p.Config.User, ":"); len(p.Recipe.Run) == 0 && name != "" && !accounts.knows(name) {
		return fmt.Errorf(`base %s has no user %q in its /etc/passwd; name one of those, a number, or make it in "run"`,
			short(p.Recipe.Base), short(name))
	}
	if p.Config.WorkDir != "" {
		if err := tree.Put(flatten.File{Name: p.Config.WorkDir, Mode: 0o755, Dir: true}); err != nil {
			return fmt.Errorf("working directory: %w", err)
		}
	}
	config, err := p.Config.file()
	if err != nil {
		return err
	}
	if err := tree.Put(flatten.File{Name: configFile, Mode: 0o644, Content: config}); err != nil {
		return fmt.Errorf("base %s: %w", short(p.Recipe.Base), err)
	}
	for _, f := range p.files {
		if err := p.putFile(tree, accounts, f); err != nil {
			return fmt.Errorf("recipe file for %s: %w", f.Path, err)
		}
	}
	return nil
}

// putFile puts a file of the recipe at its place.
func (p *Plan) putFile(tree *flatten.Tree, accounts *accounts, f StagedFile) error {
	uid, gid, err := accounts.owner(f.Owner)
	if err != nil {
		return err
	}
	file := flatten.File{Name: f.Path, Mode: int64(f.Mode), UID: uid, GID: gid, Dir: f.Dir}
	switch {
	case f.Dir:
	case f.source == "":
		file.Content = []byte(f.inline)
	default:
		file.Size = f.size
		file.Open = func(context.Context) (io.ReadCloser, error) {
			in, err := p.source.Open(f.source)
			if err != nil {
				return nil, err
			}
			return &unchanged{ReadCloser: in, hash: sha256.New(), want: f.SHA256}, nil
		}
	}
	return tree.Put(file)
}

// unchanged reads a file that must still have the content that the plan's digest names.
type unchanged struct {
	io.ReadCloser
	hash interface {
		io.Writer
		Sum(b []byte) []byte
	}
	want string
}

func (u *unchanged) Read(b []byte) (int, error) {
	n, err := u.ReadCloser.Read(b)
	_, _ = u.hash.Write(b[:n])
	return n, err
}

// Verify is called when everything was read.
func (u *unchanged) Verify() error {
	if hex.EncodeToString(u.hash.Sum(nil)) != u.want {
		return errChanged
	}
	return nil
}

// configFile is where the agent looks for the defaults of a machine's processes.
const configFile = "etc/forkd/image.json"

// file is the content of configFile.
func (c Config) file() ([]byte, error) {
	text, err := json.MarshalIndent(imageConfig{c.Env, c.WorkDir, c.User}, "", "\t")
	return append(text, '\n'), err
}

// accounts are an image's users and groups, as far as they say who owns a file.
type accounts struct {
	users, groups map[string]int
	primary       map[string]int // group of a user
}

func newAccounts(tree *flatten.Tree) *accounts {
	a := &accounts{users: map[string]int{"root": 0}, groups: map[string]int{"root": 0}, primary: map[string]int{"root": 0}}
	for _, f := range accountLines(tree.Account("etc/passwd")) {
		uid, err := strconv.Atoi(f[2])
		if err == nil && len(f) > 3 {
			a.users[f[0]] = uid
			if gid, err := strconv.Atoi(f[3]); err == nil {
				a.primary[f[0]] = gid
			}
		}
	}
	for _, f := range accountLines(tree.Account("etc/group")) {
		if gid, err := strconv.Atoi(f[2]); err == nil {
			a.groups[f[0]] = gid
		}
	}
	return a
}

func accountLines(text []byte) [][]string {
	var out [][]string
	for line := range bytes.Lines(text) {
		f := strings.Split(strings.TrimSpace(string(line)), ":")
		if len(f) >= 3 && f[0] != "" {
			out = append(out, f)
		}
	}
	return out
}

func (a *accounts) knows(name string) bool {
	_, ok := a.users[name]
	_, err := strconv.ParseUint(name, 10, 32)
	return ok || err == nil
}

// owner reads "user", "user:group" or numbers. A user's group is its own.
func (a *accounts) owner(text string) (uid, gid int, err error) {
	user, group, hasGroup := strings.Cut(text, ":")
	uid, ok := a.users[user]
	if !ok {
		if uid, err = strconv.Atoi(user); err != nil {
			return 0, 0, fmt.Errorf("the base has no user %q in its /etc/passwd", user)
		}
	}
	gid = a.primary[user]
	if !hasGroup {
		return uid, gid, nil
	}
	if gid, ok = a.groups[group]; !ok {
		if gid, err = strconv.Atoi(group); err != nil {
			return 0, 0, fmt.Errorf("the base has no group %q in its /etc/group", group)
		}
	}
	return uid, gid, nil
}
