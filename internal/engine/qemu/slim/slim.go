// Package slim starts a program without the libraries that it is linked with and never calls. A distribution's QEMU is
// linked with some fifty, for RDMA, VNC, FUSE and much else; the dynamic linker maps and relocates each of them whenever
// a VM process starts, which is a third of the start. In their place a directory gets stand-ins: libraries of the same
// names that have the symbols asked for, all of them one instruction that ends the process.
//
// A library is left as it is where anything but the program and other spared libraries is linked with it, or where more
// than functions is asked of it.
package slim

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Stand is what stands in for a program's libraries.
type Stand struct {
	Dir   string   // for LD_LIBRARY_PATH
	Names []string // of the libraries that are not loaded, sorted

	program string
	stamp   stamp
}

// Fits says whether the program is the one that the stand-ins were made for: a newer one may ask more of its libraries.
func (s *Stand) Fits() bool {
	now, err := stampOf(s.program)
	return err == nil && now == s.stamp
}

// Make fills dir, which it makes, with stand-ins for those of program's libraries whose names begin with one of spare,
// each followed by a version ("libpng16" is of libpng16.so.16). loaded are the paths of all libraries that the dynamic
// linker loads with program. Without any to stand in for it returns a Stand without names.
func Make(ctx context.Context, program string, loaded []string, dir string, spare []string) (*Stand, error) {
	st := &Stand{Dir: dir, program: program}
	var err error
	if st.stamp, err = stampOf(program); err != nil {
		return nil, err
	}
	libraries, err := spared(ctx, program, loaded, spare)
	if err != nil {
		return nil, fmt.Errorf("see what %s asks of its libraries: %w", filepath.Base(program), err)
	}
	for _, l := range libraries {
		st.Names = append(st.Names, l.name)
	}
	slices.Sort(st.Names)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	if err := removeOthers(dir, st.Names); err != nil {
		return nil, err
	}
	for _, l := range libraries {
		if err := write(filepath.Join(dir, l.name), l.encode()); err != nil {
			return nil, err
		}
	}
	return st, nil
}

// write replaces the file at once: machines that run have the old one mapped.
func write(path string, content []byte) error {
	if old, err := os.ReadFile(path); err == nil && slices.Equal(old, content) {
		return nil
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".new-")
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

func removeOthers(dir string, names []string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if slices.Contains(names, e.Name()) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// stamp tells one version of a file from another.
type stamp struct {
	inode, size    uint64
	seconds, nanos int64
}

func stampOf(path string) (stamp, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return stamp{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return stamp{st.Ino, uint64(st.Size), st.Mtim.Sec, st.Mtim.Nsec}, nil
}

// object is a program or library as it is linked.
type object struct {
	name    string // what others are linked with it by
	needs   []string
	imports []elf.ImportedSymbol
	exports map[string]elf.SymType
	machine elf.Machine
}

func readObject(path string) (*object, error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	defer func() { _ = f.Close() }()
	if f.Class != elf.ELFCLASS64 || f.Data != elf.ELFDATA2LSB {
		return nil, fmt.Errorf("%s is %v %v: %w", path, f.Class, f.Data, errors.ErrUnsupported)
	}
	o := &object{name: filepath.Base(path), exports: map[string]elf.SymType{}, machine: f.Machine}
	if names, err := f.DynString(elf.DT_SONAME); err == nil && len(names) == 1 {
		o.name = names[0]
	}
	if o.needs, err = f.ImportedLibraries(); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if o.imports, err = f.ImportedSymbols(); err != nil && !errors.Is(err, elf.ErrNoSymbols) {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	symbols, err := f.DynamicSymbols()
	if err != nil && !errors.Is(err, elf.ErrNoSymbols) {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF {
			o.exports[s.Name] = elf.ST_TYPE(s.Info)
		}
	}
	return o, nil
}

// spared are the stand-ins to be made.
func spared(ctx context.Context, program string, loaded, spare []string) ([]*library, error) {
	main, err := readObject(program)
	if err != nil {
		return nil, err
	}
	libraries := map[string]*object{}
	for _, path := range loaded {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		o, err := readObject(path)
		if err != nil {
			return nil, err
		}
		libraries[o.name] = o
	}
	candidates := map[string]*library{}
	for name, o := range libraries {
		if !slices.ContainsFunc(spare, func(s string) bool { return strings.HasPrefix(name, s+".so.") }) {
			continue
		}
		if l := standIn(main, o); l != nil {
			candidates[name] = l
		}
	}
	keepNeeded(main, libraries, candidates)
	return slices.Collect(maps.Values(candidates)), nil
}

// keepNeeded takes from the candidates what libraries that stay are linked with. What only candidates need is not loaded.
func keepNeeded(main *object, libraries map[string]*object, candidates map[string]*library) {
	stay := map[string]bool{}
	for next := main.needs; len(next) > 0; {
		name := next[0]
		next = next[1:]
		if stay[name] || candidates[name] != nil || libraries[name] == nil {
			continue
		}
		stay[name] = true
		for _, need := range libraries[name].needs {
			delete(candidates, need) // so that it is walked itself
			next = append(next, need)
		}
	}
}

// standIn is a library with what main asks of o; nil if main is not linked with it, or if that is more than functions.
func standIn(main, o *object) *library {
	if !slices.Contains(main.needs, o.name) {
		return nil
	}
	const indirect = elf.SymType(10) // STT_GNU_IFUNC
	l := &library{name: o.name, machine: o.machine}
	for _, s := range main.imports {
		kind, has := o.exports[s.Name]
		if s.Library != o.name && (s.Library != "" || !has) {
			continue
		}
		if kind != elf.STT_FUNC && kind != indirect {
			return nil
		}
		l.symbols = append(l.symbols, symbol{s.Name, s.Version})
	}
	return l
}
