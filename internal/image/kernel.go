package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"

	"forkd.dev/forkd/internal/image/debian"
)

// kernelBase is the release whose cloud kernel every machine boots, whatever the host and the image: one kernel to
// test, and snapshots that do not depend on the recipe's base.
const kernelBase = "debian:bookworm"

// kernelVersion is part of a kernel's digest: raise it when the same package would be extracted differently.
const kernelVersion = "1"

// wantedModules are what a machine needs and Debian's kernel has as modules. Those that a kernel has built in, or does
// not have at all, are left out; what they depend on is added. The order is the loading order as far as dependencies
// leave it open.
var wantedModules = []string{
	"virtio_ring", "virtio", "virtio_pci", "virtio_mmio", "virtio_console", "virtio_blk", "virtio_rng", "virtio_net",
	"overlay", "inet_diag", "tcp_diag", "udp_diag",
}

// Kernel is a kernel ready to boot. Its files are in the cache and must not be changed.
type Kernel struct {
	Digest  string   `json:"digest"`
	Release string   `json:"release"` // uname -r, "" when not known
	Version string   `json:"version"` // of the Debian package, "" for one given by path
	Path    string   `json:"-"`       // to boot: an uncompressed vmlinux with a PVH note where possible
	BzImage string   `json:"-"`       // the packed kernel that Path came from; the same as Path when it could not be unpacked
	Modules []Module `json:"modules"` // in loading order
}

// Module is an uncompressed kernel module.
type Module struct {
	Name string `json:"name"` // "virtio_rng"
	Path string `json:"-"`
}

// FetchKernel finds Debian's cloud kernel for the architecture through the signed package index, and extracts it
// unless it is cached already.
func FetchKernel(ctx context.Context, cfg Host) (*Kernel, error) {
	if err := checkArch(cfg.Arch); err != nil {
		return nil, err
	}
	base, err := debian.BaseByName(kernelBase)
	if err != nil {
		return nil, err
	}
	archive, err := debian.Open(ctx, cfg.debian(), base)
	if err != nil {
		return nil, fmt.Errorf("find kernel: %w", err)
	}
	defer archive.Close()
	pkg, err := kernelPackage(ctx, archive, cfg.Arch)
	if err != nil {
		return nil, fmt.Errorf("find kernel: %w", err)
	}
	digest := kernelDigest(pkg)
	dir := filepath.Join(cfg.CacheDir, "kernels", digest)
	if k, err := loadKernel(dir, digest); err == nil {
		return k, nil
	}
	if err := extractKernel(ctx, archive, pkg, dir, digest); err != nil {
		return nil, fmt.Errorf("extract kernel %s: %w", pkg, err)
	}
	return loadKernel(dir, digest)
}

var kernelName = regexp.MustCompile(`^linux-image-[0-9][0-9a-z.+-]*-cloud-(amd64|arm64)$`)

// kernelPackage follows the package that always depends on the newest kernel.
func kernelPackage(ctx context.Context, archive *debian.Archive, arch string) (*debian.Package, error) {
	list, err := archive.Lookup(ctx, "linux-image-cloud-"+arch)
	if err != nil {
		return nil, err
	}
	for _, name := range dependencyNames(list[0]) {
		i := slices.IndexFunc(list, func(p *debian.Package) bool { return p.Name == name && kernelName.MatchString(name) })
		if i >= 0 {
			return list[i], nil
		}
	}
	return nil, fmt.Errorf("package %s depends on no kernel", list[0])
}

func kernelDigest(pkg *debian.Package) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "kernel %s\n%s\n%s\n", kernelVersion, pkg.SHA256, strings.Join(wantedModules, " ")))
	return hex.EncodeToString(sum[:])
}

// kernelRecord is kernel.json in a kernel's directory.
type kernelRecord struct {
	Kernel
	Boot  string            `json:"boot"`           // file name of Path
	Files map[string]string `json:"files"`          // name → SHA-256
	Kept  bool              `json:"kept,omitempty"` // it was not fetched, and goes when no record names it any more
}

const recordName = "kernel.json"

// loadKernel reads a kernel of the cache and verifies its files.
func loadKernel(dir, digest string) (*Kernel, error) {
	data, err := os.ReadFile(filepath.Join(dir, recordName))
	if err != nil {
		return nil, err
	}
	var rec kernelRecord
	if err := json.Unmarshal(data, &rec); err != nil {
		return nil, err
	}
	for name, want := range rec.Files {
		f, err := os.Open(filepath.Join(dir, filepath.Base(name)))
		if err != nil {
			return nil, err
		}
		sum, _, err := copyHash(io.Discard, f)
		f.Close()
		if err != nil {
			return nil, err
		}
		if sum != want {
			return nil, fmt.Errorf("kernel cache: %s is damaged", name)
		}
	}
	k := rec.Kernel
	if k.Digest != digest || rec.Files[rec.Boot] == "" {
		return nil, errors.New("kernel cache: record does not match")
	}
	k.Path, k.BzImage = filepath.Join(dir, filepath.Base(rec.Boot)), filepath.Join(dir, "vmlinuz")
	if rec.Files["vmlinuz"] == "" {
		k.BzImage = k.Path
	}
	for i, m := range k.Modules {
		k.Modules[i].Path = filepath.Join(dir, filepath.Base(m.Name)+".ko")
	}
	return &k, nil
}

// extractKernel fills a temporary directory and gives it its name when it is complete.
func extractKernel(ctx context.Context, archive *debian.Archive, pkg *debian.Package, dir, digest string) error {
	f, err := archive.OpenPackage(ctx, pkg)
	if err != nil {
		return err
	}
	defer f.Close()
	deb, err := debian.ReadDeb(f)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return err
	}
	debian.RemoveStale(filepath.Dir(dir), "tmp-*")
	tmp, err := os.MkdirTemp(filepath.Dir(dir), "tmp-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	rec := kernelRecord{Kernel: Kernel{Digest: digest, Version: pkg.Version}, Files: map[string]string{}}
	found, err := spoolKernel(ctx, deb, tmp)
	if err != nil {
		return err
	}
	rec.Release = found.release
	if err := rec.addKernel(tmp, found.image); err != nil {
		return err
	}
	if err := rec.addModules(tmp, found.modules); err != nil {
		return err
	}
	if err := os.RemoveAll(filepath.Join(tmp, "all")); err != nil {
		return err
	}
	data, err := json.MarshalIndent(rec, "", "\t")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(tmp, recordName), data, 0o600); err != nil {
		return err
	}
	return placeKernel(tmp, dir, digest)
}

// placeKernel gives a complete directory its name.
func placeKernel(tmp, dir, digest string) error {
	// A directory that is there but could not be loaded is damaged. Another process may be faster than this one.
	if _, err := loadKernel(dir, digest); err == nil {
		return nil
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	return os.Rename(tmp, dir)
}

// spooled is what spoolKernel found in a kernel package.
type spooled struct {
	release string
	image   []byte
	modules map[string]string // name → path
}

const (
	maxKernelImage = 256 << 20
	maxModule      = 128 << 20
)

// spoolKernel reads a kernel package: the image into memory, every module into dir/all, unpacked. The package has no
// list of their dependencies (that is made when it is installed), so all of them are needed to find out.
func spoolKernel(ctx context.Context, deb *debian.Deb, dir string) (*spooled, error) {
	s := &spooled{modules: map[string]string{}}
	if err := os.Mkdir(filepath.Join(dir, "all"), 0o700); err != nil {
		return nil, err
	}
	tr := deb.Data()
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		name, err := debian.CleanName(h.Name)
		if err != nil {
			return nil, err
		}
		if release, ok := strings.CutPrefix(name, "boot/vmlinuz-"); ok && h.Size > 0 {
			s.release = release
			if s.image, err = readAtMost(tr, maxKernelImage); err != nil {
				return nil, err
			}
		}
		module, unpack := moduleName(path.Base(name))
		if module == "" || h.Size == 0 {
			continue
		}
		r, err := unpack(tr)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		data, err := readAtMost(r, maxModule)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		s.modules[module] = filepath.Join(dir, "all", module+".ko")
		if err := os.WriteFile(s.modules[module], data, 0o600); err != nil {
			return nil, err
		}
	}
	if s.image == nil {
		return nil, errors.New("the package has no /boot/vmlinuz")
	}
	return s, nil
}

func readAtMost(r io.Reader, limit int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("larger than %d bytes", limit)
	}
	return data, err
}

var modulePattern = regexp.MustCompile(`^([A-Za-z0-9_-]{1,100})\.ko(\.xz|\.zst)?$`)

// moduleName is the name of the module in a file, or "", and how to unpack it.
func moduleName(file string) (string, func(io.Reader) (io.Reader, error)) {
	m := modulePattern.FindStringSubmatch(file)
	if m == nil {
		return "", nil
	}
	unpack := func(r io.Reader) (io.Reader, error) { return r, nil }
	switch m[2] {
	case ".xz":
		unpack = func(r io.Reader) (io.Reader, error) { return xz.NewReader(r) }
	case ".zst":
		unpack = func(r io.Reader) (io.Reader, error) { return zstd.NewReader(r, zstd.WithDecoderConcurrency(1)) }
	}
	return strings.ReplaceAll(m[1], "-", "_"), unpack
}

// addKernel stores the packed kernel, and the unpacked one if it boots by PVH.
func (rec *kernelRecord) addKernel(dir string, image []byte) error {
	if err := rec.add(dir, "vmlinuz", image); err != nil {
		return err
	}
	rec.Boot = "vmlinuz"
	vmlinux, err := unpackKernel(image)
	if err != nil || !hasPVHNote(vmlinux) {
		return nil //nolint:nilerr // the packed kernel boots too, only more slowly.
	}
	rec.Boot = "vmlinux"
	return rec.add(dir, "vmlinux", vmlinux)
}

func (rec *kernelRecord) add(dir, name string, data []byte) error {
	sum := sha256.Sum256(data)
	rec.Files[name] = hex.EncodeToString(sum[:])
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return f.Close()
}

func (rec *kernelRecord) addModules(dir string, all map[string]string) error {
	names, err := loadOrder(wantedModules, func(name string) ([]string, error) {
		file, ok := all[name]
		if !ok {
			return nil, fs.ErrNotExist
		}
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		return moduleDependencies(f)
	})
	if err != nil {
		return err
	}
	for _, name := range names {
		data, err := os.ReadFile(all[name])
		if err != nil {
			return err
		}
		if err := rec.add(dir, name+".ko", data); err != nil {
			return err
		}
		rec.Modules = append(rec.Modules, Module{Name: name})
	}
	return nil
}

// loadOrder adds what the wanted modules depend on, each before its first user. A wanted module that does not exist is
// left out, a dependency that does not exist is an error.
func loadOrder(wanted []string, dependencies func(name string) ([]string, error)) ([]string, error) {
	var out []string
	state := map[string]int{} // 1 in progress, 2 done
	var visit func(name, by string) error
	visit = func(name, by string) error {
		switch {
		case state[name] == 2:
			return nil
		case state[name] == 1:
			return fmt.Errorf("module %s needs itself, by way of %s", name, by)
		}
		deps, err := dependencies(name)
		if errors.Is(err, fs.ErrNotExist) && by == "" {
			return nil
		}
		if err != nil {
			return fmt.Errorf("module %s: %w", name, err)
		}
		state[name] = 1
		for _, dep := range deps {
			if err := visit(dep, name); err != nil {
				return err
			}
		}
		state[name] = 2
		out = append(out, name)
		return nil
	}
	for _, name := range wanted {
		if err := visit(name, ""); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// moduleDependencies reads "depends=" of a module's .modinfo section.
func moduleDependencies(r io.ReaderAt) ([]string, error) {
	info, err := modinfo(r)
	if err != nil {
		return nil, err
	}
	for entry := range bytes.SplitSeq(info, []byte{0}) {
		list, ok := bytes.CutPrefix(entry, []byte("depends="))
		if !ok || len(list) == 0 {
			continue
		}
		var names []string
		for name := range strings.SplitSeq(string(list), ",") {
			names = append(names, strings.ReplaceAll(name, "-", "_"))
		}
		return names, nil
	}
	return nil, nil
}

func modinfo(r io.ReaderAt) ([]byte, error) {
	f, err := elf.NewFile(r)
	if err != nil {
		return nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, errors.New("no .modinfo section")
	}
	if section.Size > 1<<20 {
		return nil, errors.New(".modinfo is too large")
	}
	return section.Data()
}

// KernelAt is a kernel that the user gave by path. Its modules are the *.ko files of the directory "modules" next to
// it, loaded in the order of that directory's modules.order (one name a line); without such a directory it has none.
// modules may also name that directory.
func KernelAt(file, modules string) (*Kernel, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("kernel: %w", err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, fmt.Errorf("kernel %s: not a file", file)
	}
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return nil, fmt.Errorf("kernel %s: %w", file, err)
	}
	k := &Kernel{Path: file, BzImage: file}
	if modules == "" {
		modules = filepath.Join(filepath.Dir(file), "modules")
	}
	order, err := os.ReadFile(filepath.Join(modules, "modules.order"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("kernel %s: %w", file, err)
	}
	for line := range strings.FieldsSeq(string(order)) {
		base := path.Base(line)
		name, _ := moduleName(base)
		if name == "" || path.Ext(base) != ".ko" {
			return nil, fmt.Errorf("kernel %s: modules.order names %q, which is not an uncompressed module", file, short(line))
		}
		data, err := os.ReadFile(filepath.Join(modules, base))
		if err != nil {
			return nil, fmt.Errorf("kernel %s: %w", file, err)
		}
		h.Write(data)
		k.Modules = append(k.Modules, Module{Name: name, Path: filepath.Join(modules, base)})
	}
	k.Digest = hex.EncodeToString(h.Sum(nil))
	return k, nil
}
