package house

import (
	"go/ast"
	"go/token"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// allowed is every import between our packages, tests apart. Arrows point down: nothing below host may name it, lower
// packages do not know each other, only the edges know api. A package below one of these, without a line of its own,
// belongs to its household: it may import what the head may, and the members one another. Before adding a line, read
// "Rules" in docs/ARCHITECTURE.md.
func allowed() map[string][]string {
	return map[string][]string{
		// Mains.
		"cmd/forkd":       {"internal/cli", "internal/daemon", "internal/layout"},
		"cmd/forkd-agent": {"internal/agent"},

		// The edges.
		"api":    {},
		"client": {"api", "internal/fingerprint", "internal/guest/call", "internal/guest/wire", "internal/layout"}, // layout: where the daemon listens
		// A call's frames pass through the daemon as they are; recipes are read here to know which files to send.
		"internal/cli": {
			"api", "client", "internal/guest/call", "internal/guest/tree", "internal/guest/wire", "internal/image", "internal/layout", "internal/mcp", "internal/pack", "internal/proc", "internal/registry",
			"recipes",
		},
		"recipes":      {},
		"internal/mcp": {"api", "client"},
		// The edge translates the errors of what is below into the API's, so it knows their sentinels.
		"internal/httpapi": {
			"api", "internal/access", "internal/audit", "internal/engine", "internal/events", "internal/guest", "internal/guest/call", "internal/guest/wire", "internal/host", "internal/image", "internal/layer",
			"internal/lineage", "internal/metrics", "internal/mountinfo", "internal/network", "internal/network/egress", "internal/pack", "internal/registry", "internal/store",
		},
		// Another protocol on the same listener: whose requests are let in, written down and counted is decided in httpapi, once.
		"internal/e2bapi": {
			"api", "internal/access", "internal/guest", "internal/guest/call", "internal/guest/wire", "internal/host", "internal/httpapi", "internal/lineage",
			"internal/image", "internal/network/egress",
		},
		"internal/daemon": {
			"api", "internal/access", "internal/audit", "internal/cgroup", "internal/engine", "internal/engine/qemu", "internal/e2bapi", "internal/events", "internal/fingerprint", "internal/host", "internal/httpapi",
			"internal/image", "internal/layout", "internal/metrics", "internal/network/egress", "internal/network/netd", "internal/store", "internal/agentbin",
		},

		// The core.
		"internal/host": {
			"internal/agentbin", "internal/cgroup", "internal/disk", "internal/engine", "internal/events", "internal/guest", "internal/guest/call",
			"internal/guest/wire", "internal/image", "internal/keylock", "internal/layer", "internal/layout", "internal/lineage",
			"internal/memory", "internal/mountinfo", "internal/network", "internal/network/egress", "internal/pack", "internal/proc", "internal/registry", "internal/store", "internal/undo",
		},

		// Below it.
		"internal/engine":          {"internal/cgroup", "internal/memory"},
		"internal/engine/qemu":     {"internal/engine", "internal/memory", "internal/proc", "internal/undo"},
		"internal/store":           {"internal/cgroup", "internal/engine", "internal/layer", "internal/layout", "internal/lineage", "internal/network/egress"},
		"internal/pack":            {"internal/layer", "internal/lineage", "internal/store"},
		"internal/registry":        {"internal/fingerprint", "internal/layer", "internal/pack"},
		"internal/lineage":         {},
		"internal/layout":          {},
		"internal/access":          {},
		"internal/audit":           {},
		"internal/events":          {},
		"internal/metrics":         {},
		"internal/layer":           {},
		"internal/memory":          {"internal/layer"},
		"internal/disk":            {"internal/layer", "internal/proc"},
		"internal/image":           {"internal/guest/wire", "internal/layer", "internal/disk", "internal/layout", "internal/network/egress", "internal/proc", "internal/agentbin", "internal/undo"},
		"internal/network":         {"internal/network/egress", "internal/network/inspect", "internal/network/pin", "internal/proc"},
		"internal/network/egress":  {}, // pure, as are inspect and pin
		"internal/network/inspect": {},
		"internal/network/netd":    {"internal/layout", "internal/network", "internal/network/egress", "internal/proc"},
		"internal/network/pin":     {},
		"internal/guest":           {"internal/guest/mux", "internal/guest/wire"},
		"internal/guest/call":      {"internal/guest/wire", "internal/guest/transpile"},
		"internal/guest/mux":       {},
		"internal/guest/transpile": {},
		"internal/guest/tree":      {"internal/guest/wire"},
		"internal/guest/wire":      {},
		"internal/proc":            {"internal/cgroup"},
		"internal/cgroup":          {"internal/mountinfo"},
		"internal/agentbin":        {},

		// In the guest.
		"internal/agent": {"internal/guest/mux", "internal/guest/tree", "internal/guest/wire"},

		// Tiny tools, and tests' own.
		"internal/undo":        {},
		"internal/fingerprint": {},
		"internal/mountinfo":   {},
		"internal/keylock":     {},
		"internal/testenv":     {},
		"internal/house":       {},
		"e2e":                  {},
		"e2e/liar":             {"internal/agent", "internal/guest/mux", "internal/guest/wire"}, // what it replaces, and lies to
	}
}

// onlyForTests may be imported by test files and by each other alone; what they import is no arrow of the program.
func onlyForTests(pkg string) bool {
	return pkg == "internal/testenv" || strings.HasSuffix(pkg, "test")
}

func TestImports(t *testing.T) {
	table := allowed()
	for _, s := range sources(t, token.NewFileSet()) {
		if s.isTest() || onlyForTests(s.pkg()) {
			continue
		}
		head, ok := household(table, s.pkg())
		if !ok {
			t.Errorf("%s: package %s is not in the import table (imports_test.go): give it its line", s.path, s.pkg())
			continue
		}
		for _, pkg := range ours(t, s) {
			if onlyForTests(pkg) {
				t.Errorf("%s: imports %s, which is for tests only", s.path, pkg)
				continue
			}
			below, _ := household(table, pkg)
			if below != head && !slices.Contains(table[head], below) {
				t.Errorf("%s: the import table does not allow %s → %s", s.path, head, below)
			}
		}
	}
}

// household is the longest line of the table that is a package or above it.
func household(table map[string][]string, pkg string) (string, bool) {
	for ; pkg != "."; pkg = path.Dir(pkg) {
		if _, ok := table[pkg]; ok {
			return pkg, true
		}
	}
	return "", false
}

// TestTableHasNoCycle: two lines that look harmless alone can make one.
func TestTableHasNoCycle(t *testing.T) {
	table := allowed()
	var visit func(pkg string, above []string)
	visit = func(pkg string, above []string) {
		if slices.Contains(above, pkg) {
			t.Fatalf("the import table has a cycle: %s", strings.Join(append(above, pkg), " → "))
		}
		for _, below := range table[pkg] {
			visit(below, append(slices.Clone(above), pkg))
		}
	}
	for pkg := range table {
		visit(pkg, nil)
	}
}

// ours are the packages of this module that a file imports.
func ours(t *testing.T, s *source) []string {
	var found []string
	for _, spec := range s.file.Imports {
		name, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			t.Fatal(err)
		}
		if pkg, ok := strings.CutPrefix(name, module+"/"); ok {
			found = append(found, pkg)
		}
	}
	return found
}

// TestUnsafeIsNamed: what the type system cannot check is found by the name of its file, and says why it is sound.
func TestUnsafeIsNamed(t *testing.T) {
	for _, s := range sources(t, token.NewFileSet()) {
		if s.isTest() {
			continue
		}
		uses := unsafeUses(s.file)
		named := strings.HasSuffix(s.path, "_unsafe.go")
		switch {
		case len(uses) > 0 && !named:
			t.Errorf("%s: %s belongs into a file named *_unsafe.go", s.path, strings.Join(uses, ", "))
		case named && !strings.Contains(s.text, "SAFETY"):
			t.Errorf("%s: no SAFETY comment says why this is sound", s.path)
		}
	}
}

// unsafeUses are the unsafe package, memory mappings and raw system calls.
func unsafeUses(file *ast.File) []string {
	var uses []string
	ast.Inspect(file, func(node ast.Node) bool {
		selector, ok := node.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		pkg, ok := selector.X.(*ast.Ident)
		if !ok {
			return true
		}
		name := pkg.Name + "." + selector.Sel.Name
		raw := strings.HasSuffix(pkg.Name, "unix") || pkg.Name == "syscall"
		switch selector.Sel.Name {
		case "Mmap", "MmapPtr", "Mremap", "Syscall", "Syscall6", "Syscall9", "RawSyscall", "RawSyscall6", "SyscallNoError":
			if raw {
				uses = append(uses, name)
			}
		default:
			if pkg.Name == "unsafe" {
				uses = append(uses, name)
			}
		}
		return true
	})
	slices.Sort(uses)
	return slices.Compact(uses)
}
