package image

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParseRecipe(t *testing.T) {
	const text = `name: app
base: debian:trixie
packages: [python3, libstdc++6]
files:
  - source: app/
    path: /srv/app
    owner: www-data:www-data
  - {content: "x\n", path: /etc/x, mode: 0600}
env: {A: 1, B: "two", C: yes}
workdir: /srv/app
user: agent
run:
  - apt-get --version
  - |
    cd /srv
    ls
machine: {cpus: 2, memory: 1GiB, disk: 16 GiB}
warmup:
  command: [python3, -m, http.server]
  ready: {port: 8000, timeout: 10s}
  timeout: 1m
`
	got, err := ParseRecipe("recipe.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	content := "x\n"
	want := &Recipe{
		Name: "app", Base: "debian:trixie", From: Base{Kind: KindDebian, Ref: "trixie"}, Packages: []string{"python3", "libstdc++6"},
		Files: []File{
			{Source: "app", Path: "/srv/app", Owner: "www-data:www-data"},
			{Content: &content, Path: "/etc/x", Mode: 0o600},
		},
		Env: map[string]string{"A": "1", "B": "two", "C": "yes"}, WorkDir: "/srv/app", User: "agent",
		Run:     []string{"apt-get --version", "cd /srv\nls\n"},
		Machine: Machine{CPUs: 2, MemoryBytes: 1 << 30, DiskBytes: 16 << 30, DiskGiven: true, CPUsGiven: true, MemoryGiven: true},
		Warmup: &Warmup{
			Services: []Service{{
				Name: "service", Command: []string{"python3", "-m", "http.server"},
				Ready: []Ready{{Port: netip.MustParseAddrPort("[::]:8000"), Timeout: 10 * time.Second, Interval: DefaultReadyInterval}},
			}},
			Timeout: time.Minute,
		},
	}
	if d := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); d != "" {
		t.Error(d)
	}
}

func TestParseRecipeDefaults(t *testing.T) {
	got, err := ParseRecipe("r", []byte("base: debian:bookworm\nuser: me\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := &Recipe{Base: "debian:bookworm", From: Base{Kind: KindDebian, Ref: "bookworm"}, User: "me", WorkDir: "/home/me", Machine: Machine{CPUs: 1, MemoryBytes: 512 << 20, DiskBytes: 8 << 30}}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestParseRecipeFaults(t *testing.T) {
	long := strings.Repeat("x", 300)
	for _, c := range []struct{ name, text, want string }{
		{"empty", "", `r: recipe is empty; it needs at least "base"`},
		{"only a comment", "# x\n", `r: recipe is empty; it needs at least "base"`},
		{"no base", "user: root", `r:1: key "base" is missing; for example: base: debian:bookworm`},
		{"a list", "- a\n", `r:1: must be a mapping (key: value), not a list`},
		{"unknown base", "base: debian:potato", `r:1: base "debian:potato" is not known; use one of debian:bookworm, debian:trixie`},
		{"typo", "base: debian:bookworm\npakages: []\n", `r:2: key "pakages" is not known; did you mean "packages"?`},
		{"other name", "base: debian:bookworm\nimage: x\n", `r:2: key "image" is not known; known here: base, env, files, init, limits, machine, name, network, packages, run, user, warmup, workdir`},
		{"duplicate", "base: debian:bookworm\nuser: a\nuser: b\n", `r:3: key "user" is given twice, first in line 2`},
		{"syntax", "base: debian:bookworm\nenv: {a: b\n", `r:2: did not find expected ',' or '}'`},
		{"tab", "base: debian:bookworm\nenv:\n\ta: b\n", `r:3: found character that cannot start any token`},
		{"alias", "base: &a debian:bookworm\nname: *a\n", "r:1: anchors and aliases are not supported\nr:2: anchors and aliases are not supported"},
		{"tag", "base: !x debian:bookworm\n", `r:1: tag "!x" is not supported`},
		{"two documents", "base: debian:bookworm\n---\nbase: debian:bookworm\n", `r:2: recipe has more than one document`},
		{"NUL", "base: debian:bookworm\x00", `r: recipe contains a NUL byte: it is not a text file`},
		{"escaped NUL", `{base: debian:bookworm, workdir: "/a\0b"}`, `r:1: "/a\x00b" has a control character`},
		{"null", "base:\n", `r:1: must be a single value, not nothing`},
		{"number for text", "base: debian:bookworm\nuser: 1000\n", `r:2: must be a string; put 1000 in quotes`},
		{"long name", "base: debian:bookworm\nname: " + long, `r:2: "` + long[:60] + `…" is longer than 63 bytes`},
		{"bad name", "base: debian:bookworm\nname: ../x", `r:2: name "../x": use lower-case letters, digits, '.', '_' and '-'`},
		{"package version", "base: debian:bookworm\npackages:\n  - a=1\n  - ../b\n  - c\n  - c\n", `r:3: package "a=1": give the name only, without version or release
r:4: package "../b": give the name only, without version or release
r:6: package "c" is listed twice`},
		{"packages as text", "base: debian:bookworm\npackages: python3\n", `r:2: must be a list (- item), not "python3"`},
		{"files", "base: debian:bookworm\nfiles:\n  - source: ../x\n    path: /x\n  - path: /y\n  - {source: a, content: b, path: rel}\n  - {content: x, path: /a/../b, mode: 999, owner: 'a b'}\n  - {content: x}\n", `r:3: source "../x": must be below the recipe's directory
r:5: file: give exactly one of "source" and "content"
r:6: file: give exactly one of "source" and "content"
r:6: path "rel": write an absolute path without "..", "//" or a slash at the end
r:7: path "/a/../b": write an absolute path without "..", "//" or a slash at the end
r:7: mode "999": write it in octal, for example "0755"
r:7: owner "a b": write "user" or "user:group"
r:8: file: key "path" is missing`},
		{"absolute source", "base: debian:bookworm\nfiles: [{source: /etc/passwd, path: /x}]\n", `r:2: source "/etc/passwd": must be below the recipe's directory`},
		{"env", "base: debian:bookworm\nenv:\n  A-B: x\n  C: [1]\n", `r:3: env "A-B" is not a variable name
r:4: must be a single value, not a list`},
		{"machine", "base: debian:bookworm\nmachine:\n  cpus: 0\n  memory: 512\n  disk: 20TiB\n  gpu: 1\n", `r:3: cpus "0": must be a whole number from 1 to 64
r:4: memory "512": write a whole number with a unit, for example "512MiB" or "4GiB"
r:5: disk "20TiB": must be from 1GiB to 16TiB
r:6: key "gpu" is not known; known here: cpus, disk, memory`},
		{"negative memory", "base: debian:bookworm\nmachine: {memory: -512MiB}\n", `r:2: memory "-512MiB": write a whole number with a unit, for example "512MiB" or "4GiB"`},
		{"odd memory", "base: debian:bookworm\nmachine: {memory: 1048577KiB}\n", `r:2: memory "1048577KiB": must be a multiple of 1MiB`},
		{"warmup without anything", "base: debian:bookworm\nwarmup: {}\n", `r:2: warmup: give "context" with "code" or "code_file", or "command", or "services"`},
		{"warmup context", "base: debian:bookworm\nwarmup: {context: perl}\n", `r:2: warmup: a context needs exactly one of "code" and "code_file"
r:2: context "perl" is not known: there are python, javascript, typescript, shell, and what the recipe's files have a driver for in /etc/forkd/contexts.d`},
		{"warmup ready", "base: debian:bookworm\nwarmup:\n  command: []\n  ready: {port: 0, log: '('}\n  timeout: 5\n", `r:3: command: names no program
r:4: port "0": must be a whole number from 1 to 65535
r:4: log: error parsing regexp: missing closing ): ` + "`(`" + `
r:5: timeout "5": write a time up to 24h with a unit, for example "90s"`},
		{"context with ready", "base: debian:bookworm\nwarmup: {context: python, code: x, ready: {port: 1}}\n", `r:2: warmup: "ready" belongs to a command; code in a context is ready when it returns`},
		{"command with code", "base: debian:bookworm\nwarmup: {command: x, code: y}\n", `r:2: warmup: "code" needs a "context"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := ParseRecipe("r", []byte(c.text))
			faults, ok := errors.AsType[*FileError](err)
			if !ok {
				t.Fatalf("got %v", err)
			}
			if d := cmp.Diff(c.want, faults.Error()); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestParseRecipeBounds(t *testing.T) {
	var many strings.Builder
	many.WriteString("base: debian:bookworm\npackages:\n")
	for i := range maxListLength + 1 {
		fmt.Fprintf(&many, "  - p%d\n", i)
	}
	for name, text := range map[string]string{
		"size":    "# " + strings.Repeat("x", maxRecipeBytes) + "\nbase: debian:bookworm\n",
		"items":   many.String(),
		"nesting": "base: debian:bookworm\nenv: " + strings.Repeat("[", 20_000) + strings.Repeat("]", 20_000),
		"faults":  "base: debian:bookworm\n" + strings.Repeat("? x\n", 2000),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseRecipe("r", []byte(text))
			if faults, ok := errors.AsType[*FileError](err); !ok || len(faults.Faults) > maxFaults {
				t.Errorf("got %T with %v", err, ok)
			}
		})
	}
}

// TestRecipes parses every recipe of the repository.
func TestRecipes(t *testing.T) {
	files, err := filepath.Glob("../../recipes/*/recipe.yaml")
	if err != nil || len(files) < 2 {
		t.Fatalf("found %v, %v", files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		r, err := ParseRecipe(file, text)
		if err != nil {
			t.Error(err)
		} else if want := filepath.Base(filepath.Dir(file)); r.Name != want {
			t.Errorf("%s is named %q", file, r.Name)
		}
	}
}

func FuzzParseRecipe(f *testing.F) {
	files, _ := filepath.Glob("../../recipes/*/recipe.yaml")
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil {
			f.Add(string(text))
		}
	}
	f.Add("base: debian:bookworm\nfiles: [{content: x, path: /x, mode: 0644}]\nwarmup: {command: x, ready: {log: a}}\n")
	f.Add("a: &a [*a]\n<<: *a\n")
	f.Fuzz(func(t *testing.T, text string) {
		r, err := ParseRecipe("r", []byte(text))
		if err != nil {
			if faults, ok := errors.AsType[*FileError](err); !ok || len(faults.Faults) == 0 {
				t.Errorf("an error without faults: %v", err)
			}
			return
		}
		if r.Base == "" || r.WorkDir == "" || r.Machine.CPUs < 1 || r.Machine.MemoryBytes < minMemory || r.Machine.DiskBytes < minDisk {
			t.Errorf("accepted %+v", r)
		}
		for _, file := range r.Files {
			if strings.Contains(file.Source, "..") && strings.HasPrefix(file.Source, "..") || !strings.HasPrefix(file.Path, "/") {
				t.Errorf("accepted %+v", file)
			}
		}
	})
}
