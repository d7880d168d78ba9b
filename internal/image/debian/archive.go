package debian

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/ulikunitz/xz"
	"golang.org/x/sync/errgroup"
)

// Config is what Open needs; Root, CacheDir and Arch must be set.
type Config struct {
	Root     fs.FS  // the host's root directory: apt's configuration and keyrings are read from it
	CacheDir string // downloads go here and nowhere else
	Arch     string // Debian's word: "amd64", "arm64"
	Now      func() time.Time
	Progress Progress

	retryGap time.Duration // of tests; 0: the fetcher's own
}

// Archive is the verified state of one base's suites: it knows the indexes' digests, and fetches the indexes
// themselves only when a resolution is not cached. Safe for concurrent use after Open.
type Archive struct {
	Base    Base
	Suites  []string // that were found: "bookworm", "bookworm-updates", "bookworm-security"
	Skipped []string // suites the mirrors do not have, each with why; shown to the user
	Main    string   // URI of the main archive

	arch    string
	dir     string
	fetcher *Fetcher
	indexes []indexRef
}

type indexRef struct {
	mirror, suite, name string
	byHash              bool
	file                IndexFile
}

// maxIndexSize bounds a Packages file, packed or unpacked; Debian's are at most 60 MB.
const maxIndexSize = 1 << 30

// Open finds mirrors of the base, downloads their signed Release files and verifies them. Suites for updates and
// security may be missing on a mirror, which Skipped then tells; any other failure is an error.
func Open(ctx context.Context, cfg Config, base Base) (*Archive, error) {
	conf, err := ReadAptConf(cfg.Root)
	if err != nil {
		return nil, err
	}
	sources, err := ReadSources(cfg.Root)
	if err != nil {
		return nil, err
	}
	fetcher, err := NewFetcher(cfg.CacheDir, conf, cfg.Root, cfg.Progress)
	if err != nil {
		return nil, err
	}
	if cfg.retryGap > 0 {
		fetcher.retryGap = cfg.retryGap
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	a := &Archive{Base: base, arch: cfg.Arch, dir: cfg.CacheDir, fetcher: fetcher}
	o := &opener{cfg: cfg, conf: conf, archive: a}
	main, security := mirrors(sources)
	if err := o.suite(ctx, main, base.Codename, needed); err != nil {
		return nil, err
	}
	if err := o.suite(ctx, main, base.Codename+"-updates", optional); err != nil {
		return nil, err
	}
	if err := o.suite(ctx, security, base.Codename+"-security", optional); err != nil {
		return nil, err
	}
	return a, nil
}

// Close ends idle connections.
func (a *Archive) Close() { a.fetcher.Close() }

type need int

const (
	needed need = iota
	optional
)

type opener struct {
	cfg     Config
	conf    AptConf
	archive *Archive
}

// suite adds one suite from the first mirror that serves a trustworthy one.
func (o *opener) suite(ctx context.Context, candidates []Source, suite string, n need) error {
	var failures []error
	allMissing := true
	for _, source := range candidates {
		rel, err := o.release(ctx, source, suite)
		if err == nil {
			err = o.add(source, suite, rel)
		}
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		allMissing = allMissing && missing(err)
		failures = append(failures, err)
	}
	err := fmt.Errorf("suite %s: %w", suite, errors.Join(failures...))
	if n == optional && allMissing {
		o.archive.Skipped = append(o.archive.Skipped, fmt.Sprintf("%s: no mirror has it", suite))
		return nil
	}
	return fmt.Errorf("%w\ntry: `apt-get update` on this host shows whether its mirror and proxy work", err)
}

func (o *opener) release(ctx context.Context, source Source, suite string) (*Release, error) {
	from := source.URI + "/dists/" + suite + "/InRelease"
	data, err := o.archive.fetcher.small(ctx, from, maxRelease)
	if err != nil {
		return nil, err
	}
	var extra []string
	if source.SignedBy != "" {
		extra = append(extra, source.SignedBy)
	}
	keys, err := ReadKeyrings(o.cfg.Root, extra...)
	if err != nil {
		return nil, err
	}
	now := o.cfg.Now()
	rel, err := ParseInRelease(data, keys, now)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", from, err)
	}
	// The suite's name is inside the signature: without this check a mirror could serve an older release under it.
	if rel.Codename != suite && rel.Suite != suite {
		return nil, fmt.Errorf("%s: it is signed for %q (%s)", from, rel.Codename, rel.Suite)
	}
	if rel.Origin != "Debian" {
		return nil, fmt.Errorf("%s: it is signed for origin %q, not Debian", from, clip(rel.Origin))
	}
	check := source.CheckValidUntil && o.conf.Bool("Acquire::Check-Valid-Until", true)
	if check && !rel.ValidUntil.IsZero() && now.After(rel.ValidUntil) {
		return nil, fmt.Errorf("%s: expired at %s; is the mirror being updated, and this host's clock right? "+
			"(apt's Acquire::Check-Valid-Until \"false\" switches this check off)", from, rel.ValidUntil.Format(time.RFC3339))
	}
	return rel, nil
}

// add notes the suite's package index. The gzip form is preferred: it unpacks ten times faster than xz.
func (o *opener) add(source Source, suite string, rel *Release) error {
	a := o.archive
	plain := "main/binary-" + a.arch + "/Packages"
	for _, name := range []string{plain + ".gz", plain + ".xz", plain} {
		file, ok := rel.Files[name]
		if !ok {
			continue
		}
		if file.Size > maxIndexSize {
			return fmt.Errorf("%s %s: %d bytes is out of range", suite, name, file.Size)
		}
		a.indexes = append(a.indexes, indexRef{source.URI, suite, name, rel.ByHash, file})
		a.Suites = append(a.Suites, suite)
		if suite == a.Base.Codename {
			a.Main = source.URI
		}
		return nil
	}
	return fmt.Errorf("suite %s at %s has no packages for %s", suite, source.URI, a.arch)
}

// Index downloads and reads the package indexes of all suites.
func (a *Archive) Index(ctx context.Context) (*Index, error) {
	files := make([]*os.File, len(a.indexes))
	defer func() {
		for _, f := range files {
			if f != nil {
				f.Close()
			}
		}
	}()
	group, gctx := errgroup.WithContext(ctx)
	for i, ref := range a.indexes {
		group.Go(func() error {
			base := ref.mirror + "/dists/" + ref.suite + "/"
			urls := []string{base + ref.name}
			if ref.byHash {
				dir, _, _ := strings.Cut(ref.name, "/Packages")
				urls = append([]string{base + dir + "/by-hash/SHA256/" + ref.file.SHA256}, urls...)
			}
			f, err := a.fetcher.Fetch(gctx, "package index of "+ref.suite, ref.file.SHA256, ref.file.Size, urls...)
			files[i] = f
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	index := NewIndex()
	for i, ref := range a.indexes {
		r, err := decompress(files[i], ref.name)
		if err == nil {
			err = index.Add(io.LimitReader(r, maxIndexSize), ref.mirror, ref.suite)
		}
		if err != nil {
			return nil, fmt.Errorf("package index of %s: %w", ref.suite, err)
		}
	}
	if err := index.Finish(); err != nil {
		return nil, err
	}
	return index, nil
}

func decompress(r io.Reader, name string) (io.Reader, error) {
	switch filepath.Ext(name) {
	case ".gz":
		return gzip.NewReader(r)
	case ".xz":
		return xz.NewReader(bufio.NewReaderSize(r, 256<<10))
	default:
		return r, nil
	}
}

// resolverVersion goes into the key of cached resolutions: raise it when the same index and names would be resolved
// differently.
const resolverVersion = "1"

// Resolve chooses what to install: everything essential and of priority "required", extra, and wanted, with all
// dependencies. The result is cached under the digests of the indexes, so that asking again costs no index.
func (a *Archive) Resolve(ctx context.Context, extra, wanted []string) ([]*Package, error) {
	key := a.key(extra, wanted)
	if list, err := a.load(key); err == nil {
		return list, nil
	}
	index, err := a.Index(ctx)
	if err != nil {
		return nil, err
	}
	names := append(slices.Clone(a.Base.Seed), index.base()...)
	names = append(names, extra...)
	list, err := Resolve(index, append(names, wanted...), a.Suites)
	if err != nil {
		return nil, err
	}
	return list, a.save(key, list)
}

// Lookup resolves only the named packages with their dependencies, without a base system.
func (a *Archive) Lookup(ctx context.Context, names ...string) ([]*Package, error) {
	key := a.key([]string{"\x00lookup"}, names)
	if list, err := a.load(key); err == nil {
		return list, nil
	}
	index, err := a.Index(ctx)
	if err != nil {
		return nil, err
	}
	list, err := Resolve(index, names, a.Suites)
	if err != nil {
		return nil, err
	}
	return list, a.save(key, list)
}

// base is what debootstrap's minimal variant installs.
func (x *Index) base() []string {
	var names []string
	for _, name := range x.Names() {
		if p := x.packages[name]; p.Essential {
			names = append(names, name)
		}
	}
	for _, name := range x.Names() {
		if p := x.packages[name]; !p.Essential && p.Priority == "required" {
			names = append(names, name)
		}
	}
	return names
}

func (a *Archive) key(extra, wanted []string) string {
	h := sha256.New()
	fmt.Fprintf(h, "%s\x00%s\x00%s\x00", resolverVersion, a.Base.Name, a.arch)
	for _, ref := range a.indexes {
		fmt.Fprintf(h, "%s\x00%s\x00", ref.suite, ref.file.SHA256)
	}
	fmt.Fprintf(h, "%q\x00%q", extra, wanted)
	return hex.EncodeToString(h.Sum(nil))
}

// load reads a cached resolution. Mirrors are not part of its key: they are set to those of now.
func (a *Archive) load(key string) ([]*Package, error) {
	data, err := os.ReadFile(filepath.Join(a.dir, "resolved", key+".json"))
	if err != nil {
		return nil, err
	}
	var list []*Package
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, err
	}
	for _, p := range list {
		i := slices.IndexFunc(a.indexes, func(r indexRef) bool { return p != nil && r.suite == p.Suite })
		if i < 0 || !validName(p.Name) || !validVersion(p.Version) || !safePath(p.Filename) || len(p.SHA256) != 64 {
			return nil, errors.New("cached resolution is damaged")
		}
		p.Mirror = a.indexes[i].mirror
	}
	return list, nil
}

func (a *Archive) save(key string, list []*Package) error {
	data, err := json.Marshal(list)
	if err != nil {
		return err
	}
	if err := writeFile(filepath.Join(a.dir, "resolved", key+".json"), filepath.Join(a.dir, "tmp"), bytes.NewReader(data)); err != nil {
		return fmt.Errorf("cache resolution: %w", err)
	}
	return nil
}

// writeFile makes a file appear complete or not at all.
func writeFile(name, tmpDir string, r io.Reader) error {
	tmp, err := os.CreateTemp(tmpDir, "write-")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	defer tmp.Close()
	if _, err := io.Copy(tmp, r); err != nil {
		return err
	}
	if err := tmp.Sync(); err != nil {
		return err
	}
	if err := tmp.Close(); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), name)
}

// Download makes all packages available in the cache, a few at a time.
func (a *Archive) Download(ctx context.Context, packages []*Package) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallelDownloads)
	for _, p := range packages {
		group.Go(func() error {
			f, err := a.OpenPackage(ctx, p)
			if err != nil {
				return err
			}
			return f.Close()
		})
	}
	return group.Wait()
}

// TempFile is a file in the cache directory that nobody else sees and that is gone when it is closed.
func (a *Archive) TempFile() (*os.File, error) {
	f, err := os.CreateTemp(filepath.Join(a.dir, "tmp"), "spool-")
	if err != nil {
		return nil, err
	}
	return f, os.Remove(f.Name())
}

// OpenPackage is the verified .deb of p, downloaded when it is not cached.
func (a *Archive) OpenPackage(ctx context.Context, p *Package) (*os.File, error) {
	if len(p.SHA256) != 64 {
		return nil, fmt.Errorf("package %s: no digest", p)
	}
	return a.fetcher.Fetch(ctx, p.String(), p.SHA256, p.Size, p.Mirror+"/"+p.Filename)
}
