package image

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/image/debian"
)

// installed is what dpkg's database says of one package that was unpacked on the host.
type installed struct {
	pkg       *debian.Package
	deb       *debian.Deb
	paths     []string          // as dpkg lists them: "/.", "/usr", "/usr/bin/x"
	md5       map[string]string // of regular files, by path without the leading slash
	conffiles []string          // absolute
}

// infoName is the stem of the package's files in dpkg's info directory.
func (i *installed) infoName() string {
	if i.deb.Control.Get("Multi-Arch") == "same" {
		return i.pkg.Name + ":" + i.deb.Control.Get("Architecture")
	}
	return i.pkg.Name
}

// parseConffiles reads the conffiles control file. Lines with a flag ("remove-on-upgrade") name files that a package
// no longer has.
func parseConffiles(text []byte) []string {
	var files []string
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimRight(line, " \t\r\n"); strings.HasPrefix(line, "/") {
			files = append(files, line)
		}
	}
	return files
}

// status is the package's paragraph of dpkg's status file: unpacked, waiting to be configured. Its configuration files
// are already in place, so their digests are recorded as if they had been configured: dpkg compares a file only when
// it has unpacked a new version beside it.
func (i *installed) status() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "Package: %s\nStatus: install ok unpacked\n", i.pkg.Name)
	for _, f := range i.deb.Control {
		switch {
		case strings.EqualFold(f.Name, "Package"), strings.EqualFold(f.Name, "Status"), strings.EqualFold(f.Name, "Conffiles"):
			continue
		case f.Value == "":
			continue
		}
		fmt.Fprintf(&b, "%s: %s\n", f.Name, strings.ReplaceAll(f.Value, "\n", "\n "))
	}
	if len(i.conffiles) > 0 {
		b.WriteString("Conffiles:\n")
		for _, name := range i.conffiles {
			md5 := i.md5[name[1:]]
			if md5 == "" {
				md5 = "newconffile" // listed but not shipped.
			}
			fmt.Fprintf(&b, " %s %s\n", name, md5)
		}
	}
	b.WriteByte('\n')
	return b.Bytes()
}

// md5sums is the package's own list of digests, or one made here where it has none, as dpkg does while unpacking.
func (i *installed) md5sums() []byte {
	if f, ok := i.deb.Files["md5sums"]; ok {
		return f.Data
	}
	var b bytes.Buffer
	for _, p := range i.paths {
		name := strings.TrimPrefix(p, "/")
		if sum := i.md5[name]; sum != "" && !slices.Contains(i.conffiles, p) {
			fmt.Fprintf(&b, "%s  %s\n", sum, name)
		}
	}
	return b.Bytes()
}

// list is the package's file list.
func (i *installed) list() []byte {
	return []byte(strings.Join(i.paths, "\n") + "\n")
}

// triggers collects what packages are interested in: dpkg's triggers/File and its files for named triggers.
type triggers struct {
	file  []string
	named map[string][]string
}

func (t *triggers) add(i *installed) {
	for line := range strings.Lines(string(i.deb.Files["triggers"].Data)) {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		if len(fields) != 2 || !strings.HasPrefix(fields[0], "interest") {
			continue
		}
		who := i.infoName()
		if fields[0] == "interest-noawait" {
			who += "/noawait"
		}
		switch name := fields[1]; {
		case strings.HasPrefix(name, "/"):
			t.file = append(t.file, name+" "+who)
		case debian.ValidName(name):
			t.named[name] = append(t.named[name], who)
		}
	}
}

// graph is who needs whom among the packages of a plan.
type graph struct {
	providers map[string][]*debian.Package // real and virtual names
}

func newGraph(packages []*debian.Package) *graph {
	g := &graph{providers: map[string][]*debian.Package{}}
	for _, p := range packages {
		g.providers[p.Name] = append(g.providers[p.Name], p)
		for _, name := range names(p.Provides) {
			g.providers[name] = append(g.providers[name], p)
		}
	}
	return g
}

// order returns the packages so that each comes after those it depends on, as far as there are no cycles.
func (g *graph) order(packages []*debian.Package) []*debian.Package {
	wanted := map[*debian.Package]bool{}
	for _, p := range packages {
		wanted[p] = true
	}
	var out []*debian.Package
	seen := map[*debian.Package]bool{}
	var visit func(p *debian.Package)
	visit = func(p *debian.Package) {
		if seen[p] {
			return
		}
		seen[p] = true
		for _, q := range g.needs(p) {
			visit(q)
		}
		if wanted[p] {
			out = append(out, p)
		}
	}
	for _, p := range packages {
		visit(p)
	}
	return out
}

// needs is every package that one of p's dependencies may mean.
func (g *graph) needs(p *debian.Package) []*debian.Package {
	var list []*debian.Package
	for _, name := range dependencyNames(p) {
		list = append(list, g.providers[name]...)
	}
	return list
}

// preDepends is p's Pre-Depends with everything that these need, without p.
func (g *graph) preDepends(p *debian.Package) []*debian.Package {
	var list []*debian.Package
	seen := map[*debian.Package]bool{p: true}
	var visit func(q *debian.Package)
	visit = func(q *debian.Package) {
		if seen[q] {
			return
		}
		seen[q] = true
		list = append(list, q)
		for _, r := range g.needs(q) {
			visit(r)
		}
	}
	for _, name := range names(p.PreDepends) {
		for _, q := range g.providers[name] {
			visit(q)
		}
	}
	return list
}

// dependencyNames is every package named in p's dependencies.
func dependencyNames(p *debian.Package) []string {
	return append(names(p.PreDepends), names(p.Depends)...)
}

// names is every package named in a relationship field.
func names(field string) []string {
	groups, err := debian.ParseDependencies(field)
	if err != nil {
		return nil // the resolver has read the same field.
	}
	var list []string
	for _, g := range groups {
		for _, d := range g {
			list = append(list, d.Name)
		}
	}
	return list
}
