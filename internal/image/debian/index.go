package debian

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Package is one binary package of an index. Relationship fields are kept as text and parsed when needed: a resolver
// looks at a few hundred of the 60 000 packages of an index.
type Package struct {
	Name         string `json:"name"`
	Version      string `json:"version"`
	Architecture string `json:"architecture"`
	Essential    bool   `json:"essential,omitempty"`
	Priority     string `json:"priority,omitempty"`
	Depends      string `json:"depends,omitempty"`
	PreDepends   string `json:"pre_depends,omitempty"`
	Provides     string `json:"provides,omitempty"`
	Conflicts    string `json:"conflicts,omitempty"`
	Breaks       string `json:"breaks,omitempty"`
	Replaces     string `json:"replaces,omitempty"`
	MultiArch    string `json:"multi_arch,omitempty"`
	Filename     string `json:"filename"` // relative to the mirror
	Size         int64  `json:"size"`
	SHA256       string `json:"sha256"`
	Mirror       string `json:"mirror"` // the archive's base URI this index came from
	Suite        string `json:"suite"`
}

// String is "name version", for messages.
func (p *Package) String() string { return p.Name + " " + p.Version }

// maxPackageSize bounds one .deb. Debian's largest is some 1.5 GB.
const maxPackageSize = 4 << 30

// Index is the packages of a base: of all its suites, the newest version of each name. Not safe for concurrent
// building; reading is.
type Index struct {
	packages map[string]*Package
	provides map[string][]*provider
}

type provider struct {
	pkg     *Package
	version string // of a versioned Provides
}

// NewIndex is an empty index.
func NewIndex() *Index {
	return &Index{packages: map[string]*Package{}, provides: map[string][]*provider{}}
}

// Add reads a Packages file of the given suite. An entry that cannot be what the archive means (no name, no digest, a
// file name that leaves the mirror) is an error: the index was signed, so it is a fault and not bad luck.
func (x *Index) Add(r io.Reader, mirror, suite string) error {
	return readControl(r, keepField, func(p Paragraph) error {
		pkg, err := packageOf(p)
		if err != nil {
			return err
		}
		pkg.Mirror, pkg.Suite = mirror, suite
		if old := x.packages[pkg.Name]; old != nil && CompareVersions(old.Version, pkg.Version) >= 0 {
			return nil
		}
		x.packages[pkg.Name] = pkg
		return nil
	})
}

// keepField selects what Package has a place for; see readControl.
func keepField(name []byte) bool {
	switch string(name) {
	case "Package", "Version", "Architecture", "Essential", "Priority", "Depends", "Pre-Depends", "Provides", "Conflicts",
		"Breaks", "Replaces", "Multi-Arch", "Filename", "Size", "SHA256":
		return true
	}
	return false
}

func packageOf(p Paragraph) (*Package, error) {
	pkg := &Package{}
	size := ""
	for _, f := range p {
		switch f.Name {
		case "Package":
			pkg.Name = f.Value
		case "Version":
			pkg.Version = f.Value
		case "Architecture":
			pkg.Architecture = f.Value
		case "Essential":
			pkg.Essential = f.Value == "yes"
		case "Priority":
			pkg.Priority = f.Value
		case "Depends":
			pkg.Depends = f.Value
		case "Pre-Depends":
			pkg.PreDepends = f.Value
		case "Provides":
			pkg.Provides = f.Value
		case "Conflicts":
			pkg.Conflicts = f.Value
		case "Breaks":
			pkg.Breaks = f.Value
		case "Replaces":
			pkg.Replaces = f.Value
		case "Multi-Arch":
			pkg.MultiArch = f.Value
		case "Filename":
			pkg.Filename = strings.TrimPrefix(f.Value, "./")
		case "Size":
			size = f.Value
		case "SHA256":
			pkg.SHA256 = strings.ToLower(f.Value)
		}
	}
	if !validName(pkg.Name) {
		return nil, fmt.Errorf("index entry %q: not a package name", clip(pkg.Name))
	}
	if !validVersion(pkg.Version) {
		return nil, fmt.Errorf("index entry %s: %q is not a version", pkg.Name, clip(pkg.Version))
	}
	n, err := strconv.ParseInt(size, 10, 64)
	if err != nil || n <= 0 || n > maxPackageSize {
		return nil, fmt.Errorf("index entry %s: size %q is out of range", pkg.Name, clip(size))
	}
	pkg.Size = n
	if raw, err := hex.DecodeString(pkg.SHA256); err != nil || len(raw) != 32 {
		return nil, fmt.Errorf("index entry %s: no SHA256", pkg.Name)
	}
	if !safePath(pkg.Filename) {
		return nil, fmt.Errorf("index entry %s: file name %q leaves the archive", pkg.Name, clip(pkg.Filename))
	}
	return pkg, nil
}

func validVersion(v string) bool {
	if v == "" || len(v) > 256 {
		return false
	}
	for i := range len(v) {
		c := v[i]
		if !isDigit(c) && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && !strings.ContainsRune(".+-~:", rune(c)) {
			return false
		}
	}
	return true
}

// safePath reports whether p is a clean relative path below its base, as archives name their files.
func safePath(p string) bool {
	return p != "" && len(p) < 1024 && path.Clean(p) == p && p[0] != '/' && p != ".." && !strings.HasPrefix(p, "../") &&
		!strings.ContainsAny(p, "\x00\n\r?#\\")
}

// Finish builds the table of virtual packages; call it once, after the last Add.
func (x *Index) Finish() error {
	for _, name := range x.Names() {
		pkg := x.packages[name]
		groups, err := ParseDependencies(pkg.Provides)
		if err != nil {
			return fmt.Errorf("provides of %s: %w", pkg.Name, err)
		}
		for _, g := range groups {
			x.provides[g[0].Name] = append(x.provides[g[0].Name], &provider{pkg: pkg, version: g[0].Version})
		}
	}
	// The most important provider first, then by name: what apt prefers, and independent of the index's order.
	for _, list := range x.provides {
		slices.SortStableFunc(list, func(a, b *provider) int {
			return cmp.Compare(priorityRank(a.pkg.Priority), priorityRank(b.pkg.Priority))
		})
	}
	return nil
}

func priorityRank(p string) int {
	return slices.Index([]string{"extra", "optional", "standard", "important", "required"}, p) * -1
}

// Names are all real packages, sorted.
func (x *Index) Names() []string {
	names := make([]string, 0, len(x.packages))
	for name := range x.packages {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Near are up to n names that a user who typed name may have meant.
func (x *Index) Near(name string, n int) []string {
	type match struct {
		name string
		rank int
	}
	var found []match
	for _, candidate := range x.Names() {
		if d := distance(name, candidate, 2); d <= 2 && d < len(name) {
			found = append(found, match{candidate, d})
		} else if len(name) >= 4 && strings.Contains(candidate, name) {
			found = append(found, match{candidate, 3 + len(candidate) - len(name)})
		}
	}
	slices.SortStableFunc(found, func(a, b match) int { return a.rank - b.rank })
	names := make([]string, 0, n)
	for _, m := range found[:min(n, len(found))] {
		names = append(names, m.name)
	}
	return names
}

// distance is the number of edits between a and b, or limit+1 when there are more.
func distance(a, b string, limit int) int {
	if len(a)-len(b) > limit || len(b)-len(a) > limit || len(a) > 300 {
		return limit + 1
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal, best := row[0], i
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := diagonal
			if a[i-1] != b[j-1] {
				cost++
			}
			diagonal = row[j]
			row[j] = min(cost, row[j]+1, row[j-1]+1)
			best = min(best, row[j])
		}
		if best > limit {
			return limit + 1
		}
	}
	return row[len(b)]
}
