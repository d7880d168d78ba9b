package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"time"

	"forkd.dev/forkd/internal/image/debian"
)

// builderVersion is part of every plan's digest: raise it when the same packages and recipe would make another image.
const builderVersion = "3"

// Host is what Resolve and FetchKernel need of the host.
type Host struct {
	Root     fs.FS  // the host's root directory, os.DirFS("/"): apt's configuration and keyrings are read from it
	CacheDir string // downloads and kernels, addressed by digest; made when missing
	Arch     string // of the guest, as Go calls it: "amd64" or "arm64"
	Now      func() time.Time
	Progress func(what string, done, total int64) // may be nil; called from several goroutines
}

func (c Host) debian() debian.Config {
	return debian.Config{Root: c.Root, CacheDir: c.CacheDir, Arch: c.Arch, Now: c.Now, Progress: c.Progress}
}

// Plan is a recipe with everything resolved: what goes into the image and what has to run inside.
type Plan struct {
	// Digest identifies the image: two plans with the same digest make the same root file system, up to time stamps and
	// what the recipe's own commands do.
	Digest   string
	Recipe   *Recipe
	Packages []PackageRef
	// Notes are things the user should be told, such as a suite that no mirror has.
	Notes []string
	// WarmupCode is the code to evaluate, read from the recipe's code_file if it has one.
	WarmupCode string

	// Config is how the image's programs are started.
	Config Config

	foreign  *foreign // nil: Debian, which is what the following is about
	base     debian.Base
	arch     string
	archive  *debian.Archive
	packages []*debian.Package
	system   int // the first so many packages are the base system
	files    []StagedFile
	source   fs.FS
}

// PackageRef names a package of a plan.
type PackageRef struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	SHA256  string `json:"sha256"`
}

// Step is something to run as root inside the VM, with the new root file system as its root.
type Step struct {
	Name string // for progress and errors: "configure packages"
	Argv []string
	Env  map[string]string // complete: nothing is inherited
	Dir  string
}

// Resolve finds out what the recipe's image consists of. files is the recipe's directory. It needs the network for the
// archive's signed index, but downloads packages only when the plan is executed.
func Resolve(ctx context.Context, r *Recipe, files fs.FS, cfg Host) (*Plan, error) {
	if err := checkArch(cfg.Arch); err != nil {
		return nil, err
	}
	p := &Plan{Recipe: r, arch: cfg.Arch, source: files}
	var err error
	// What is local is checked before anything is downloaded.
	if p.files, err = StageFiles(files, r.Files); err != nil {
		return nil, err
	}
	if p.WarmupCode, err = WarmupCode(files, r.Warmup); err != nil {
		return nil, err
	}
	switch {
	case r.From.Foreign():
		err = resolveForeign(ctx, p, cfg)
	case r.From.Kind == KindDebian:
		err = resolveDebian(ctx, p, cfg)
	default:
		err = fmt.Errorf("a base of the kind %s is nothing to resolve", r.From.Kind)
	}
	if err == nil {
		p.Digest, err = p.digest()
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// resolveDebian finds the packages.
func resolveDebian(ctx context.Context, p *Plan, cfg Host) error {
	r := p.Recipe
	p.Config = Config{Env: p.environment(), WorkDir: r.WorkDir, User: r.User}
	var err error
	if p.base, err = debian.BaseByName(r.Base); err != nil {
		return err
	}
	if p.archive, err = debian.Open(ctx, cfg.debian(), p.base); err != nil {
		return fmt.Errorf("find %s: %w", r.Base, err)
	}
	p.Notes = p.archive.Skipped
	system, err := p.archive.Resolve(ctx, baseExtra, nil)
	if err != nil {
		return fmt.Errorf("resolve %s: %w", r.Base, err)
	}
	p.packages = system
	if len(r.Packages) > 0 {
		all, err := p.archive.Resolve(ctx, baseExtra, r.Packages)
		if err != nil {
			return fmt.Errorf("resolve packages of the recipe: %w", err)
		}
		p.packages = partition(system, all)
	}
	p.system = len(system)
	for _, pkg := range p.packages {
		p.Packages = append(p.Packages, PackageRef{pkg.Name, pkg.Version, pkg.SHA256})
	}
	return nil
}

// baseExtra is what a base has besides essential and required packages: the same as Debian's container image.
var baseExtra = []string{"apt"}

// Arches are the guest architectures there are kernels and images for.
func checkArch(arch string) error {
	if arch != "amd64" && arch != "arm64" {
		return fmt.Errorf("architecture %q is not supported; use amd64 or arm64", arch)
	}
	return nil
}

// partition is all with the packages of the base system first. An alternative of the base that the recipe replaces by
// another one (awk by gawk) leaves the base with both.
func partition(system, all []*debian.Package) []*debian.Package {
	out := slices.Clone(system)
	for _, p := range all {
		if !slices.ContainsFunc(system, func(q *debian.Package) bool { return q.Name == p.Name }) {
			out = append(out, p)
		}
	}
	return out
}

// Close frees what the plan holds on to.
func (p *Plan) Close() {
	if p.archive != nil {
		p.archive.Close()
	}
	if p.foreign != nil {
		p.foreign.image.Close()
	}
}

func (p *Plan) digest() (string, error) {
	type file struct {
		Path, Owner, SHA256 string
		Mode                uint32
		Dir                 bool
	}
	var files []file
	for _, f := range p.files {
		files = append(files, file{f.Path, f.Owner, f.SHA256, f.Mode, f.Dir})
	}
	record := struct {
		Builder, Base, Arch string
		Packages            []PackageRef
		Files               []file
		Env                 map[string]string
		WorkDir, User       string
		Run                 []string // always nil: commands are no part of an image any more
		DiskBytes           int64
		Foreign             string  `json:",omitempty"`
		Config              *Config `json:",omitempty"`
	}{
		builderVersion, p.Recipe.Base, p.arch, p.Packages, files, p.Recipe.Env, p.Recipe.WorkDir, p.Recipe.User,
		nil, p.Recipe.Machine.DiskBytes, "", nil,
	}
	if p.foreign != nil { // whatever it was found as: the same layers and configuration are the same image
		record.Base, record.Foreign, record.Config = "", p.foreign.image.Digest, &p.Config
	}
	data, err := json.Marshal(record)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:]), nil
}

// StagedFile is a file or directory of a recipe, read once to know its content.
type StagedFile struct {
	Path   string // in the image
	Owner  string // "user", "user:group" or numbers
	Mode   uint32
	SHA256 string // of a file's content
	Dir    bool

	source string // in the recipe's directory, "" for inline content
	inline string
	size   int64
}

const (
	maxSourceFiles = 100_000
	maxSourceBytes = 8 << 30
)

// StageFiles finds a recipe's files in its directory and reads each once, to know its content.
func StageFiles(files fs.FS, list []File) ([]StagedFile, error) {
	var out []StagedFile
	var total int64
	for _, f := range list {
		owner := f.Owner
		if owner == "" {
			owner = "root:root"
		}
		if f.Content != nil {
			sum := sha256.Sum256([]byte(*f.Content))
			out = append(out, StagedFile{
				Path: f.Path, Owner: owner, Mode: modeOr(f.Mode, 0o644), SHA256: hex.EncodeToString(sum[:]),
				inline: *f.Content, size: int64(len(*f.Content)),
			})
			continue
		}
		err := fs.WalkDir(files, f.Source, func(name string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			rel := ""
			if name != f.Source {
				rel = name[len(f.Source):]
				if f.Source == "." {
					rel = "/" + name
				}
			}
			s := StagedFile{Path: path.Clean(f.Path + rel), Owner: owner, source: name}
			switch {
			case e.IsDir():
				s.Dir, s.Mode = true, 0o755
			case e.Type().IsRegular():
				if err := s.read(files, f.Mode); err != nil {
					return err
				}
			default:
				return fmt.Errorf("%s is neither a file nor a directory", name)
			}
			total += s.size
			if len(out) >= maxSourceFiles || total > maxSourceBytes {
				return fmt.Errorf("more than %d files or %d bytes", maxSourceFiles, int64(maxSourceBytes))
			}
			out = append(out, s)
			return nil
		})
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("recipe file %q does not exist in the recipe's directory", f.Source)
		}
		if err != nil {
			return nil, fmt.Errorf("recipe file %q: %w", f.Source, err)
		}
	}
	return out, nil
}

func (s *StagedFile) read(files fs.FS, mode uint32) error {
	f, err := files.Open(s.source)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	h := sha256.New()
	if s.size, err = io.Copy(h, io.LimitReader(f, maxSourceBytes+1)); err != nil {
		return err
	}
	s.SHA256 = hex.EncodeToString(h.Sum(nil))
	s.Mode = modeOr(mode, 0o644|uint32(info.Mode().Perm()&0o111))
	return nil
}

func modeOr(mode, fallback uint32) uint32 {
	if mode != 0 {
		return mode
	}
	return fallback
}

// WarmupCode is the code that a warm-up evaluates, which may be in a file of the recipe's directory.
func WarmupCode(files fs.FS, w *Warmup) (string, error) {
	if w == nil || w.CodeFile == "" {
		if w != nil {
			return w.Code, nil
		}
		return "", nil
	}
	f, err := files.Open(w.CodeFile)
	if err != nil {
		return "", fmt.Errorf("recipe code_file %q: %w", w.CodeFile, errors.Unwrap(err))
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxTextLength+1))
	if err != nil {
		return "", fmt.Errorf("recipe code_file %q: %w", w.CodeFile, err)
	}
	if len(text) > maxTextLength {
		return "", fmt.Errorf("recipe code_file %q is longer than %d bytes", w.CodeFile, maxTextLength)
	}
	return string(text), nil
}
