package slim

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"slices"
)

// library is a shared library whose functions all end the process.
type library struct {
	name    string
	machine elf.Machine
	symbols []symbol
}

// symbol is a function's name and, where the original's symbols have versions, its version.
type symbol struct{ name, version string }

// trap is an instruction that ends the process by SIGILL.
func trap(m elf.Machine) []byte {
	if m == elf.EM_AARCH64 {
		return []byte{0, 0, 0, 0} // udf #0
	}
	return []byte{0x0f, 0x0b, 0, 0} // ud2
}

const (
	headerSize  = 64
	segmentSize = 56
	segments    = 4
	symbolSize  = 24
	largestPage = 64 << 10 // arm64's
)

// encode is the library as a file: headers, symbols, their versions, hash table and names, the instruction, and the
// dynamic section, which alone is writable, because older linkers write into it. There are no sections: linkers at run
// time read segments only.
func (l *library) encode() []byte {
	names := newNameTable()
	versions := l.versions()
	symbols, versym := l.tables(names, versions)
	verdef := l.definitions(names, versions)
	soname := names.add(l.name)

	var file bytes.Buffer
	file.Write(make([]byte, headerSize+segments*segmentSize))
	place := func(content []byte) uint64 {
		file.Write(make([]byte, -file.Len()&15))
		at := file.Len()
		file.Write(content)
		return uint64(at)
	}
	code := place(trap(l.machine))
	for i := 1; i <= len(l.symbols); i++ {
		binary.LittleEndian.PutUint64(symbols[i*symbolSize+8:], code)
	}
	dynamic := []elf.Dyn64{
		{Tag: int64(elf.DT_SONAME), Val: soname},
		{Tag: int64(elf.DT_HASH), Val: place(l.hashTable())},
		{Tag: int64(elf.DT_SYMTAB), Val: place(symbols)},
		{Tag: int64(elf.DT_SYMENT), Val: symbolSize},
		{Tag: int64(elf.DT_STRTAB), Val: place(names.data)},
		{Tag: int64(elf.DT_STRSZ), Val: uint64(len(names.data))},
	}
	if len(versions) > 0 {
		dynamic = append(dynamic,
			elf.Dyn64{Tag: int64(elf.DT_VERSYM), Val: place(versym)},
			elf.Dyn64{Tag: int64(elf.DT_VERDEF), Val: place(verdef)},
			elf.Dyn64{Tag: int64(elf.DT_VERDEFNUM), Val: uint64(len(versions) + 1)})
	}
	dynamic = append(dynamic, elf.Dyn64{})
	table := encoded(dynamic)
	at := place(table)

	out := file.Bytes()
	copy(out, l.headers(at, uint64(len(table))))
	return out
}

// headers are the file's and those of its segments: one to read and run until at, one to read and write from there on.
func (l *library) headers(at, size uint64) []byte {
	header := elf.Header64{
		Type: uint16(elf.ET_DYN), Machine: uint16(l.machine), Version: uint32(elf.EV_CURRENT), Phoff: headerSize,
		Ehsize: headerSize, Phentsize: segmentSize, Phnum: segments, Shentsize: 64,
	}
	copy(header.Ident[:], elf.ELFMAG)
	header.Ident[elf.EI_CLASS] = byte(elf.ELFCLASS64)
	header.Ident[elf.EI_DATA] = byte(elf.ELFDATA2LSB)
	header.Ident[elf.EI_VERSION] = byte(elf.EV_CURRENT)
	// The page of the file where both meet is mapped twice, so that each has its own protection.
	up := at + largestPage
	return slices.Concat(encoded(header), encoded([segments]elf.Prog64{
		{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_X), Filesz: at, Memsz: at, Align: largestPage},
		{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_W), Off: at, Vaddr: up, Paddr: up, Filesz: size, Memsz: size, Align: largestPage},
		{Type: uint32(elf.PT_DYNAMIC), Flags: uint32(elf.PF_R | elf.PF_W), Off: at, Vaddr: up, Paddr: up, Filesz: size, Memsz: size, Align: 8},
		// Without it the linker makes the program's stack executable.
		{Type: uint32(elf.PT_GNU_STACK), Flags: uint32(elf.PF_R | elf.PF_W), Align: 16},
	}))
}

// versions are those of the symbols, each once, in order of their first use.
func (l *library) versions() []string {
	var all []string
	for _, s := range l.symbols {
		if s.version != "" && !slices.Contains(all, s.version) {
			all = append(all, s.version)
		}
	}
	return all
}

// firstVersion is the index of the first version: 0 is of symbols that are local, 1 of those without a version.
const firstVersion = 2

// tables are the symbols, without addresses, and the index of each one's version. The first is the empty one.
func (l *library) tables(names *nameTable, versions []string) (symbols, versym []byte) {
	table := make([]elf.Sym64, 1, len(l.symbols)+1)
	indices := make([]uint16, 1, len(l.symbols)+1)
	for _, s := range l.symbols {
		table = append(table, elf.Sym64{
			Name: uint32(names.add(s.name)), Info: elf.ST_INFO(elf.STB_GLOBAL, elf.STT_FUNC),
			Shndx: 1, // Any section: there are none, but 0 would say that it is missing here, too.
			Size:  uint64(len(trap(l.machine))),
		})
		index := uint16(1)
		if i := slices.Index(versions, s.version); i >= 0 {
			index = uint16(firstVersion + i)
		}
		indices = append(indices, index)
	}
	return encoded(table), encoded(indices)
}

// verdef is the definition of a version, with its one name.
type verdef struct {
	Version, Flags, Index, Names uint16
	Hash, Aux, Next              uint32
	Name, NextName               uint32
}

// definitions are of the library itself, by its name, and of each version.
func (l *library) definitions(names *nameTable, versions []string) []byte {
	const size, aux, base = 28, 20, 1
	all := []verdef{{Version: 1, Flags: base, Index: 1, Names: 1, Hash: hash(l.name), Aux: aux, Next: size, Name: uint32(names.add(l.name))}}
	for i, v := range versions {
		all = append(all, verdef{
			Version: 1, Index: uint16(firstVersion + i), Names: 1, Hash: hash(v), Aux: aux, Next: size, Name: uint32(names.add(v)),
		})
	}
	all[len(all)-1].Next = 0
	return encoded(all)
}

// hashTable is DT_HASH: every symbol that the program is linked with is looked up in every library, so most buckets are
// empty.
func (l *library) hashTable() []byte {
	buckets := make([]uint32, 4*len(l.symbols)+1)
	chain := make([]uint32, len(l.symbols)+1)
	for i, s := range l.symbols {
		b := &buckets[hash(s.name)%uint32(len(buckets))]
		chain[i+1] = *b
		*b = uint32(i + 1)
	}
	return encoded(slices.Concat([]uint32{uint32(len(buckets)), uint32(len(chain))}, buckets, chain))
}

// hash is that of symbols and versions; its source is the System V ABI, "Hash Table".
func hash(name string) uint32 {
	var h uint32
	for i := range len(name) {
		h = h<<4 + uint32(name[i])
		h ^= h >> 24 & 0xf0
		h &= 0x0fffffff
	}
	return h
}

// nameTable is a table of names that end with a zero byte. The first is empty.
type nameTable struct {
	data  []byte
	known map[string]uint64
}

func newNameTable() *nameTable { return &nameTable{data: []byte{0}, known: map[string]uint64{}} }

func (s *nameTable) add(name string) uint64 {
	if at, ok := s.known[name]; ok {
		return at
	}
	at := uint64(len(s.data))
	s.known[name] = at
	s.data = append(append(s.data, name...), 0)
	return at
}

// encoded is a value of fixed size in the file's byte order.
func encoded(v any) []byte {
	out, err := binary.Append(nil, binary.LittleEndian, v)
	if err != nil {
		panic(err) // Of types without a fixed size only.
	}
	return out
}
