package debian

import (
	"fmt"
	"slices"
	"strings"
)

// UnknownPackageError is a package that no suite of the base has.
type UnknownPackageError struct {
	Name   string
	Suites []string
	Near   []string
}

func (e *UnknownPackageError) Error() string {
	text := fmt.Sprintf("package %q is not in %s", e.Name, strings.Join(e.Suites, ", "))
	if len(e.Near) > 0 {
		text += "; similar names: " + strings.Join(e.Near, ", ")
	}
	return text
}

// Resolve chooses the packages that install wanted together with everything they need: Depends and Pre-Depends of the
// named packages and of what they pull in, never Recommends. It is deterministic: the same index and names give the
// same packages, in the same order (each after what it was chosen for). suites is for messages.
//
// It does not search: a dependency takes the first alternative that the index can satisfy, as apt does nearly always,
// and packages that then exclude each other are an error that names both.
func Resolve(x *Index, wanted, suites []string) ([]*Package, error) {
	r := &resolution{index: x, chosen: map[string]*Package{}}
	for _, name := range wanted {
		if err := r.want(name, suites); err != nil {
			return nil, err
		}
	}
	done := 0
	for done < len(r.order) { // satisfy appends to order.
		if err := r.satisfy(r.order[done]); err != nil {
			return nil, err
		}
		done++
	}
	if err := r.checkConflicts(); err != nil {
		return nil, err
	}
	return r.order, nil
}

type resolution struct {
	index  *Index
	chosen map[string]*Package
	order  []*Package
}

func (r *resolution) choose(p *Package) {
	if r.chosen[p.Name] == nil {
		r.chosen[p.Name] = p
		r.order = append(r.order, p)
	}
}

func (r *resolution) want(name string, suites []string) error {
	if p := r.index.packages[name]; p != nil {
		r.choose(p)
		return nil
	}
	switch providers := r.index.provides[name]; len(providers) {
	case 0:
		return &UnknownPackageError{Name: name, Suites: suites, Near: r.index.Near(name, 5)}
	case 1:
		r.choose(providers[0].pkg)
		return nil
	default:
		var names []string
		for _, p := range providers[:min(len(providers), 8)] {
			names = append(names, p.pkg.Name)
		}
		return fmt.Errorf("package %q is virtual; name one that provides it: %s", name, strings.Join(names, ", "))
	}
}

func (r *resolution) satisfy(p *Package) error {
	for _, field := range []string{p.PreDepends, p.Depends} {
		groups, err := ParseDependencies(field)
		if err != nil {
			return fmt.Errorf("dependencies of %s: %w", p, err)
		}
		for _, alternatives := range groups {
			if err := r.satisfyOne(p, alternatives); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *resolution) satisfyOne(p *Package, alternatives []Dependency) error {
	if slices.ContainsFunc(alternatives, r.satisfied) {
		return nil
	}
	for _, d := range alternatives {
		if c := r.candidate(d); c != nil {
			r.choose(c)
			return nil
		}
	}
	texts := make([]string, 0, len(alternatives))
	for _, d := range alternatives {
		text := d.String()
		if have := r.index.packages[d.Name]; have != nil {
			text += fmt.Sprintf(" [the archive has %s]", have.Version)
		}
		texts = append(texts, text)
	}
	return fmt.Errorf("%s needs %s, which the archive cannot satisfy", p, strings.Join(texts, " | "))
}

func (r *resolution) satisfied(d Dependency) bool {
	if p := r.chosen[d.Name]; p != nil && d.Satisfies(p.Version) {
		return true
	}
	return slices.ContainsFunc(r.index.provides[d.Name], func(v *provider) bool {
		return r.chosen[v.pkg.Name] == v.pkg && v.satisfies(d)
	})
}

// satisfies: an unversioned Provides meets only an unversioned dependency (Debian policy §7.5).
func (v *provider) satisfies(d Dependency) bool {
	return d.Op == "" || v.version != "" && d.Satisfies(v.version)
}

func (r *resolution) candidate(d Dependency) *Package {
	if p := r.index.packages[d.Name]; p != nil && d.Satisfies(p.Version) && !r.excluded(p) {
		return p
	}
	for _, v := range r.index.provides[d.Name] {
		if v.satisfies(d) && !r.excluded(v.pkg) {
			return v.pkg
		}
	}
	return nil
}

// excluded reports whether p and a package already chosen cannot be installed together.
func (r *resolution) excluded(p *Package) bool {
	return slices.ContainsFunc(r.order, func(q *Package) bool { return conflict(p, q) || conflict(q, p) })
}

// conflict reports whether p declares that q cannot be beside it.
func conflict(p, q *Package) bool {
	if p == q || p.Conflicts == "" && p.Breaks == "" {
		return false
	}
	for _, field := range []string{p.Conflicts, p.Breaks} {
		if !strings.Contains(field, q.Name) && q.Provides == "" {
			continue
		}
		groups, err := ParseDependencies(field)
		if err != nil {
			continue // checkConflicts reports it.
		}
		for _, g := range groups {
			if g[0].Name == q.Name && g[0].Satisfies(q.Version) || providesMatch(q, g[0]) {
				return true
			}
		}
	}
	return false
}

func providesMatch(q *Package, d Dependency) bool {
	if !strings.Contains(q.Provides, d.Name) {
		return false
	}
	groups, err := ParseDependencies(q.Provides)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(groups, func(g []Dependency) bool {
		return g[0].Name == d.Name && (d.Op == "" || g[0].Version != "" && d.Satisfies(g[0].Version))
	})
}

func (r *resolution) checkConflicts() error {
	for _, p := range r.order {
		for _, field := range []string{p.Conflicts, p.Breaks} {
			if _, err := ParseDependencies(field); err != nil {
				return fmt.Errorf("conflicts of %s: %w", p, err)
			}
		}
		for _, q := range r.order {
			if conflict(p, q) {
				return fmt.Errorf("%s and %s cannot be installed together: take one of them out of the recipe", p, q)
			}
		}
	}
	return nil
}
