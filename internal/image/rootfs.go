package image

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/md5" //nolint:gosec // dpkg's database records MD5 digests; nothing is trusted because of them.
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"forkd.dev/forkd/internal/image/debian"
)

// Where the build keeps its own things inside the image; the last step removes the directory.
const (
	buildDir   = "var/cache/forkd"
	debsDir    = buildDir + "/debs"
	stagingDir = buildDir + "/files"
	toolsDir   = buildDir + "/bin"
)

// WriteRootfs writes the image's initial root file system as a tar stream: the base's links, every package unpacked
// as dpkg would have it, dpkg's database with the packages in the state "unpacked", the .debs of the packages that
// dpkg must unpack itself, the recipe's files staged for a later step, and the system's configuration files. Owners
// are numeric. Parents come before their children, and no name leads through a symbolic link of the stream. Packages
// that are not in the cache are downloaded first. Afterwards Steps turns it into the image. Of a base that is not Debian
// it writes the layers, flattened, with the recipe's files at their places; Prepare must have been called.
func (p *Plan) WriteRootfs(ctx context.Context, w io.Writer) error {
	if p.foreign != nil {
		if err := p.foreign.tree.Write(ctx, w); err != nil {
			return fmt.Errorf("write root file system: %w", err)
		}
		return nil
	}
	if err := p.archive.Download(ctx, p.packages); err != nil {
		return err
	}
	// A tar is mostly small writes, and w may be a pipe.
	buffered := bufio.NewWriterSize(w, 256<<10)
	t := &tree{w: tar.NewWriter(buffered), links: map[string]string{}, entries: map[string]*entry{}}
	if err := p.writeRootfs(ctx, t); err != nil {
		return fmt.Errorf("write root file system: %w", err)
	}
	if err := t.w.Close(); err != nil {
		return err
	}
	return buffered.Flush()
}

func (p *Plan) writeRootfs(ctx context.Context, t *tree) error {
	links := slices.Clone(p.base.MergedLinks)
	if p.arch == "amd64" {
		links = append(links, "lib64")
	}
	for _, name := range links {
		if err := t.symlink(name, "usr/"+name); err != nil {
			return err
		}
	}
	var here []*installed
	for i, pkg := range p.packages {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		inst, err := p.unpack(ctx, t, pkg, i < p.system)
		if err != nil {
			return fmt.Errorf("package %s: %w", pkg, err)
		}
		if inst != nil {
			here = append(here, inst)
		}
	}
	if err := t.database(here); err != nil {
		return err
	}
	if err := t.configuration(p); err != nil {
		return err
	}
	return t.staged(p)
}

// unpack writes a package into the stream, or hands it in as a .deb when dpkg has to unpack it: a package with a
// preinst script expects it to run before its files are there (it may divert the files of others). The base system's
// packages are the exception, there as with debootstrap: nothing could run before them, so their scripts cope.
func (p *Plan) unpack(ctx context.Context, t *tree, pkg *debian.Package, system bool) (*installed, error) {
	f, err := p.archive.OpenPackage(ctx, pkg)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	deb, err := debian.ReadDeb(f)
	if err != nil {
		return nil, err
	}
	if deb.Control.Get("Package") != pkg.Name || deb.Control.Get("Version") != pkg.Version {
		return nil, fmt.Errorf("the file says it is %s %s", deb.Control.Get("Package"), deb.Control.Get("Version"))
	}
	if _, has := deb.Files["preinst"]; has && !system {
		return nil, t.deb(p.archive, deb, pkg)
	}
	inst := &installed{pkg: pkg, deb: deb, md5: map[string]string{}}
	inst.conffiles = parseConffiles(deb.Files["conffiles"].Data)
	return inst, t.unpack(inst)
}

// tree writes a file system as a tar stream and remembers what is in it.
type tree struct {
	w       *tar.Writer
	links   map[string]string // path → target of each symbolic link
	entries map[string]*entry // by path
	buf     []byte
}

type entry struct {
	dir   bool
	owner *installed // nil: ours
	name  string     // as the owner calls it
}

// maxLinks bounds the symbolic links followed for one name, as the kernel does.
const maxLinks = 40

// resolve follows the symbolic links among the parents of a path, so that nothing is ever extracted through one.
func (t *tree) resolve(name string) (string, error) {
	parts := strings.Split(name, "/")
	var done []string
	for hops := 0; len(parts) > 1; {
		part := parts[0]
		parts = parts[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			done = done[:max(0, len(done)-1)]
			continue
		}
		here := strings.Join(append(slices.Clone(done), part), "/")
		target, ok := t.links[here]
		if !ok {
			done = append(done, part)
			continue
		}
		if hops++; hops > maxLinks {
			return "", fmt.Errorf("%s: too many symbolic links", name)
		}
		if strings.HasPrefix(target, "/") {
			done = done[:0]
		}
		parts = append(strings.Split(strings.Trim(target, "/"), "/"), parts...)
	}
	return strings.Join(append(done, parts[0]), "/"), nil
}

// parents makes the missing directories above a resolved path.
func (t *tree) parents(name string) error {
	for i := range len(name) {
		if name[i] != '/' {
			continue
		}
		dir := name[:i]
		if e := t.entries[dir]; e != nil {
			if !e.dir {
				return fmt.Errorf("%s: its parent %s is not a directory", name, dir)
			}
			continue
		}
		if err := t.dir(dir, 0o755); err != nil {
			return err
		}
	}
	return nil
}

func (t *tree) dir(name string, mode int64) error {
	if t.entries[name] != nil {
		return nil
	}
	if err := t.parents(name); err != nil {
		return err
	}
	t.entries[name] = &entry{dir: true}
	return t.w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode, ModTime: epoch()})
}

func (t *tree) symlink(name, target string) error {
	if err := t.parents(name); err != nil {
		return err
	}
	t.entries[name] = &entry{}
	t.links[name] = target
	return t.w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777, ModTime: epoch()})
}

// file writes one of our own files.
func (t *tree) file(name string, mode int64, data []byte) error {
	name, err := t.resolve(name)
	if err != nil {
		return err
	}
	if err := t.parents(name); err != nil {
		return err
	}
	t.entries[name] = &entry{}
	h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(data)), ModTime: epoch()}
	if err := t.w.WriteHeader(h); err != nil {
		return err
	}
	_, err = t.w.Write(data)
	return err
}

// epoch is the time stamp of what has none of its own: one that makes equal plans equal streams.
func epoch() time.Time { return time.Unix(0, 0) }

// unpack writes the data part of a package.
func (t *tree) unpack(inst *installed) error {
	tr := inst.deb.Data()
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := t.member(inst, h, tr); err != nil {
			return err
		}
	}
}

func (t *tree) member(inst *installed, h *tar.Header, content io.Reader) error {
	listed, err := debian.CleanName(h.Name)
	if err != nil {
		return err
	}
	if strings.ContainsAny(listed, "\n") {
		return fmt.Errorf("file name %q has a newline", listed)
	}
	if listed == "." {
		inst.paths = append(inst.paths, "/.")
		return nil
	}
	name, err := t.resolve(listed)
	if err != nil {
		return err
	}
	inst.paths = append(inst.paths, "/"+listed)
	if keep, err := t.overlaps(inst, h, name, listed); err != nil || keep {
		return err
	}
	if err := t.parents(name); err != nil {
		return err
	}
	out := &tar.Header{
		Typeflag: h.Typeflag, Name: name, Mode: h.Mode & 0o7777, Uid: h.Uid, Gid: h.Gid, ModTime: h.ModTime,
		PAXRecords: xattrs(h), Linkname: h.Linkname,
	}
	e := &entry{owner: inst, name: listed}
	switch h.Typeflag {
	case tar.TypeReg:
		out.Size = h.Size
	case tar.TypeDir:
		e.dir, out.Name = true, name+"/"
	case tar.TypeSymlink:
		t.links[name] = h.Linkname
	case tar.TypeLink:
		target, err := debian.CleanName(h.Linkname)
		if err != nil {
			return err
		}
		inst.md5[listed] = inst.md5[target]
		if out.Linkname, err = t.resolve(target); err != nil {
			return err
		}
		if have := t.entries[out.Linkname]; have == nil || have.dir {
			return fmt.Errorf("%s is a link to %s, which is not before it", listed, target)
		}
	case tar.TypeChar, tar.TypeBlock:
		out.Devmajor, out.Devminor = h.Devmajor, h.Devminor
	case tar.TypeFifo:
	default:
		return fmt.Errorf("%s: unknown kind of file %q", listed, h.Typeflag)
	}
	t.entries[name] = e
	if err := t.w.WriteHeader(out); err != nil {
		return err
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	return t.copy(inst, listed, content)
}

func xattrs(h *tar.Header) map[string]string {
	var records map[string]string
	for key, value := range h.PAXRecords {
		if strings.HasPrefix(key, "SCHILY.xattr.") {
			if records == nil {
				records = map[string]string{}
			}
			records[key] = value
		}
	}
	return records
}

// copy writes a file's content. Digests are taken only where dpkg's database needs one that the package lacks.
func (t *tree) copy(inst *installed, listed string, content io.Reader) error {
	if t.buf == nil {
		t.buf = make([]byte, 256<<10)
	}
	_, has := inst.deb.Files["md5sums"]
	if has && !slices.Contains(inst.conffiles, "/"+listed) {
		_, err := io.CopyBuffer(t.w, content, t.buf)
		return err
	}
	h := md5.New() //nolint:gosec // see the import.
	if _, err := io.CopyBuffer(io.MultiWriter(t.w, h), content, t.buf); err != nil {
		return err
	}
	inst.md5[listed] = hex.EncodeToString(h.Sum(nil))
	return nil
}

// overlaps decides about a path that the stream already has, as dpkg does: directories are shared, a directory stays
// where a link of the same name comes, and a file is taken over only by a package that declares to replace the other.
// keep: nothing is to be written.
func (t *tree) overlaps(inst *installed, h *tar.Header, name, listed string) (keep bool, err error) {
	old := t.entries[name]
	if old == nil {
		return false, nil
	}
	_, oldIsLink := t.links[name]
	isDir := h.Typeflag == tar.TypeDir
	switch {
	case old.dir && (isDir || h.Typeflag == tar.TypeSymlink):
		return true, nil
	case isDir && oldIsLink:
		return true, nil
	case oldIsLink && h.Typeflag == tar.TypeSymlink && t.links[name] == h.Linkname:
		return true, nil
	case old.dir || isDir:
		return false, fmt.Errorf("/%s is a directory in one package and a file in another", listed)
	}
	switch {
	case old.owner == nil || old.owner == inst:
		return false, fmt.Errorf("/%s is there twice", listed)
	case replaces(inst, old.owner):
		old.owner.paths = slices.DeleteFunc(old.owner.paths, func(p string) bool { return p == "/"+old.name })
		delete(t.links, name)
		return false, nil
	case replaces(old.owner, inst):
		inst.paths = inst.paths[:len(inst.paths)-1]
		return true, nil
	}
	return false, fmt.Errorf("/%s is also in package %s, and neither declares to replace the other", listed, old.owner.pkg)
}

func replaces(a, b *installed) bool {
	groups, err := debian.ParseDependencies(a.pkg.Replaces)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(groups, func(g []debian.Dependency) bool {
		return g[0].Name == b.pkg.Name && g[0].Satisfies(b.pkg.Version)
	})
}

// deb hands a package in for dpkg to unpack, its parts re-packed without compression: inside an emulated machine
// unpacking xz would take ten times as long as here.
func (t *tree) deb(archive *debian.Archive, deb *debian.Deb, pkg *debian.Package) error {
	spool, err := archive.TempFile()
	if err != nil {
		return err
	}
	defer spool.Close()
	if err := deb.Repack(spool); err != nil {
		return err
	}
	size, err := spool.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if _, err := spool.Seek(0, io.SeekStart); err != nil {
		return err
	}
	name := debsDir + "/" + pkg.Name + ".deb"
	if err := t.parents(name); err != nil {
		return err
	}
	t.entries[name] = &entry{}
	if err := t.w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: size, ModTime: epoch()}); err != nil {
		return err
	}
	_, err = io.Copy(t.w, spool)
	return err
}

// database writes dpkg's records of the packages that were unpacked here.
func (t *tree) database(here []*installed) error {
	const dir = "var/lib/dpkg/"
	var status bytes.Buffer
	tr := triggers{named: map[string][]string{}}
	for _, inst := range here {
		status.Write(inst.status())
		tr.add(inst)
		stem := dir + "info/" + inst.infoName() + "."
		if err := t.file(stem+"list", 0o644, inst.list()); err != nil {
			return err
		}
		if err := t.file(stem+"md5sums", 0o644, inst.md5sums()); err != nil {
			return err
		}
		for _, name := range sortedKeys(inst.deb.Files) {
			f := inst.deb.Files[name]
			if name == "control" || name == "md5sums" {
				continue
			}
			if err := t.file(stem+name, f.Mode, f.Data); err != nil {
				return err
			}
		}
	}
	slices.Sort(tr.file)
	files := []struct {
		name string
		data []byte
	}{
		{"status", status.Bytes()},
		{"available", nil},
		{"diversions", nil},
		{"statoverride", nil},
		{"info/format", []byte("1\n")},
		{"triggers/File", lines(tr.file)},
		{"triggers/Unincorp", nil},
	}
	for _, f := range files {
		if err := t.file(dir+f.name, 0o644, f.data); err != nil {
			return err
		}
	}
	for _, name := range sortedKeys(tr.named) {
		if err := t.file(dir+"triggers/"+name, 0o644, lines(tr.named[name])); err != nil {
			return err
		}
	}
	return nil
}

func lines(list []string) []byte {
	if len(list) == 0 {
		return nil
	}
	return []byte(strings.Join(list, "\n") + "\n")
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// imageConfig is /etc/forkd/image.json, which the agent reads.
type imageConfig struct {
	Env     map[string]string `json:"env"`
	WorkDir string            `json:"workdir"`
	User    string            `json:"user"`
}

// configuration writes the files that no package has.
func (t *tree) configuration(p *Plan) error {
	config, err := p.Config.file()
	if err != nil {
		return err
	}
	suite := p.base.Codename
	sources := "# Debian's own mirrors; a sandbox reaches them when its network allows it.\n" +
		"deb http://deb.debian.org/debian " + suite + " main\n" +
		"deb http://deb.debian.org/debian " + suite + "-updates main\n" +
		"deb http://deb.debian.org/debian-security " + suite + "-security main\n"
	files := []struct {
		name string
		mode int64
		text string
	}{
		{"etc/hostname", 0o644, "forkd\n"},
		{"etc/hosts", 0o644, "127.0.0.1\tlocalhost\n127.0.1.1\tforkd\n::1\tlocalhost ip6-localhost ip6-loopback\n"},
		{"etc/resolv.conf", 0o644, "# Written when the machine has a network.\n"},
		{"etc/machine-id", 0o444, ""},
		{"etc/apt/sources.list", 0o644, sources},
		{configFile, 0o644, string(config)},
		// Maintainer scripts ask before they start a service; 101: not now. Removed at the end of the build.
		{"usr/sbin/policy-rc.d", 0o755, "#!/bin/sh\nexit 101\n"},
		{toolsDir + "/dpkg-maintscript-helper", 0o755, maintscriptHelper},
		{toolsDir + "/py3compile", 0o755, py3compileHelper},
	}
	for _, f := range files {
		if err := t.file(f.name, f.mode, []byte(f.text)); err != nil {
			return err
		}
	}
	return nil
}

// staged hands in the recipe's files below a directory of our own: they get their places in a step after the packages
// are configured, by then their owners exist and no maintainer script finds them in its way.
func (t *tree) staged(p *Plan) error {
	for i, f := range p.files {
		if f.Dir {
			continue
		}
		name := path.Join(stagingDir, strconv.Itoa(i))
		if f.source == "" {
			if err := t.file(name, 0o600, []byte(f.inline)); err != nil {
				return err
			}
			continue
		}
		if err := t.source(p, name, &f); err != nil {
			return fmt.Errorf("recipe file %q: %w", f.source, err)
		}
	}
	return nil
}

// source copies a file of the recipe's directory.
func (t *tree) source(p *Plan, name string, f *StagedFile) error {
	if err := t.parents(name); err != nil {
		return err
	}
	h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o600, Size: f.size, ModTime: epoch()}
	if err := t.w.WriteHeader(h); err != nil {
		return err
	}
	return f.copy(t.w, p.source)
}
