package slim

import (
	"bytes"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var versioned = &library{name: "libwide.so.3", machine: elf.EM_X86_64, symbols: []symbol{
	{"wide_open", "WIDE_1"}, {"wide_close", "WIDE_1"}, {"wide_open", "WIDE_2"}, {"wide_bare", ""},
}}

func TestEncode(t *testing.T) {
	file := versioned.encode()
	f, err := elf.NewFile(bytes.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"libwide.so.3", "wide_open", "WIDE_2", "wide_bare"} {
		if n := bytes.Count(file, []byte("\x00"+name+"\x00")); n != 1 {
			t.Errorf("%s is in it %d times", name, n)
		}
	}
	var writable, stack bool
	for _, p := range f.Progs {
		writable = writable || p.Flags&(elf.PF_W|elf.PF_X) == elf.PF_W|elf.PF_X
		stack = stack || p.Type == elf.PT_GNU_STACK && p.Flags&elf.PF_X == 0
	}
	if writable || !stack {
		t.Errorf("memory to write and run: %v; no code on stacks: %v", writable, stack)
	}
}

// asks is a program as it is linked.
func asks(needs []string, imports ...elf.ImportedSymbol) *object {
	return &object{name: "program", needs: needs, imports: imports, exports: map[string]elf.SymType{}}
}

func TestStandIn(t *testing.T) {
	lib := &object{name: "libx.so.1", machine: elf.EM_AARCH64, exports: map[string]elf.SymType{
		"f": elf.STT_FUNC, "g": 10, "bare": elf.STT_FUNC, "data": elf.STT_OBJECT, "unasked": elf.STT_FUNC,
	}}
	f := elf.ImportedSymbol{Name: "f", Version: "X_1", Library: "libx.so.1"}
	g := elf.ImportedSymbol{Name: "g", Version: "X_2", Library: "libx.so.1"}
	bare := elf.ImportedSymbol{Name: "bare"}
	others := elf.ImportedSymbol{Name: "f", Version: "Y_1", Library: "liby.so.1"}
	got := standIn(asks([]string{"libx.so.1"}, f, g, bare, others, elf.ImportedSymbol{Name: "elsewhere"}), lib)
	if want := []symbol{{"f", "X_1"}, {"g", "X_2"}, {"bare", ""}}; got == nil || !slices.Equal(got.symbols, want) || got.machine != elf.EM_AARCH64 {
		t.Errorf("made %+v, want the symbols %v", got, want)
	}
	if got := standIn(asks([]string{"libx.so.1"}, f, elf.ImportedSymbol{Name: "data", Library: "libx.so.1"}), lib); got != nil {
		t.Errorf("made %+v in place of a library of which a variable is asked", got)
	}
	if got := standIn(asks([]string{"libx.so.1"}, f, elf.ImportedSymbol{Name: "gone", Library: "libx.so.1"}), lib); got != nil {
		t.Errorf("made %+v with a symbol that the library has not", got)
	}
	if got := standIn(asks([]string{"liby.so.1"}, others), lib); got != nil {
		t.Errorf("made %+v, which the program is not linked with", got)
	}
}

// TestKeepNeeded: what a library that stays is linked with stays, however far away; what only spared ones need does not keep
// others.
func TestKeepNeeded(t *testing.T) {
	libraries := map[string]*object{}
	for name, needs := range map[string][]string{
		"stays": {"a"}, "a": {"b"}, "b": nil, "c": {"only"}, "only": {"d"}, "d": nil,
	} {
		libraries[name] = &object{name: name, needs: needs}
	}
	for _, needs := range [][]string{{"stays", "a", "b", "c", "d"}, {"d", "c", "b", "a", "stays"}} {
		candidates := map[string]*library{"a": {}, "b": {}, "c": {}, "d": {}}
		keepNeeded(&object{needs: needs}, libraries, candidates)
		if len(candidates) != 2 || candidates["c"] == nil || candidates["d"] == nil {
			t.Errorf("of %v are stood in for: %v; want c and d", needs, candidates)
		}
	}
}

// TestPrograms has the real linker load real programs with stand-ins for all libraries but the C library's.
func TestPrograms(t *testing.T) {
	tried := 0
	for _, name := range []string{"git", "qemu-system-x86_64", "qemu-system-aarch64", "qemu-img"} {
		program, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		if program, err = filepath.EvalSymlinks(program); err != nil {
			t.Fatal(err)
		}
		loaded := ldd(t, program)
		dir := filepath.Join(t.TempDir(), "libraries")
		stand, err := Make(t.Context(), program, loaded, dir, []string{"libz", "libcapstone", "libibverbs", "librdmacm", "libpng16", "libfuse3", "libaio"})
		if err != nil {
			t.Fatal(err)
		}
		if len(stand.Names) == 0 {
			continue
		}
		tried++
		cmd := exec.CommandContext(t.Context(), program, "--version")
		cmd.Env = []string{"LD_BIND_NOW=1", "LD_LIBRARY_PATH=" + dir}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s with stand-ins for %v: %v: %s", name, stand.Names, err, out)
		}
		for _, path := range ldd(t, program, "LD_LIBRARY_PATH="+dir) {
			if slices.Contains(stand.Names, filepath.Base(path)) && filepath.Dir(path) != dir {
				t.Errorf("%s still loads %s", name, path)
			}
		}
	}
	if tried == 0 {
		t.Skip("no program of this host has a library to stand in for")
	}
}

func ldd(t *testing.T, program string, env ...string) []string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program)
	cmd.Env = append(env, "LD_TRACE_LOADED_OBJECTS=1")
	out, err := cmd.Output()
	if err != nil {
		t.Skipf("the linker of this host lists no libraries: %v", err)
	}
	var paths []string
	for line := range strings.Lines(string(out)) {
		if fields := strings.Fields(line); len(fields) > 2 && fields[1] == "=>" && filepath.IsAbs(fields[2]) {
			paths = append(paths, fields[2])
		}
	}
	return paths
}

// TestMake: a second one leaves what is right as it is, and what is no longer wanted goes.
func TestMake(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "program")
	content, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, content, 0o700); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "libraries")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "libold.so.1"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	stand, err := Make(t.Context(), program, nil, dir, []string{"libz"})
	if err != nil || len(stand.Names) != 0 {
		t.Fatalf("made %+v, %v of a program without libraries", stand, err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
	if !stand.Fits() {
		t.Error("the program is another one at once")
	}
	if err := os.Rename(program, program+".old"); err != nil {
		t.Fatal(err)
	}
	if stand.Fits() {
		t.Error("fits a program that is gone")
	}
	if err := os.WriteFile(program, content, 0o700); err != nil {
		t.Fatal(err)
	}
	if stand.Fits() {
		t.Error("fits a program that was replaced")
	}
}

func TestRefused(t *testing.T) {
	text := filepath.Join(t.TempDir(), "libtext.so.1")
	if err := os.WriteFile(text, []byte("no library"), 0o600); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for what, try := range map[string]struct {
		program string
		loaded  []string
	}{
		"a program that is none":      {text, nil},
		"a library that is none":      {self, []string{text}},
		"a program that is not there": {filepath.Join(t.TempDir(), "nothing"), nil},
	} {
		dir := filepath.Join(t.TempDir(), "libraries")
		if _, err := Make(t.Context(), try.program, try.loaded, dir, nil); err == nil {
			t.Errorf("%s: no error", what)
		}
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s: made a directory", what)
		}
	}
}
