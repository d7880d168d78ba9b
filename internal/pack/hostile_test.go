package pack

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/store/storetest"
)

// forged is a pack that can be spoilt in any way before it is written.
type forged struct {
	m      *Manifest
	bodies map[name][]byte // what travels of each member
	text   func([]byte) []byte
	head   func(i int, h *[block]byte) // of member i; -1: of the manifest
	order  []int
	tail   []byte
}

func forge(t *testing.T, src *Source) *forged {
	t.Helper()
	m := *src.Manifest()
	m.Members, m.Snapshots, m.Images, m.Kernels = slices.Clone(m.Members), slices.Clone(m.Snapshots), slices.Clone(m.Images), slices.Clone(m.Kernels)
	f := &forged{m: &m, bodies: map[name][]byte{}, tail: make([]byte, 2*block)}
	for i, x := range m.Members {
		b, err := os.ReadFile(src.path(x))
		if err != nil {
			t.Fatal(err)
		}
		f.bodies[name{x.Kind, x.Digest}] = b
		f.order = append(f.order, i)
	}
	return f
}

// first is the index of the first member of a kind.
func (f *forged) first(k Kind) int {
	return slices.IndexFunc(f.m.Members, func(x Member) bool { return x.Kind == k })
}

// replace gives a member another body under the same name.
func (f *forged) replace(i int, body []byte) {
	x := &f.m.Members[i]
	f.bodies[name{x.Kind, x.Digest}], x.Size = body, int64(len(body))
}

// swap gives a member other content, under its own digest.
func (f *forged) swap(t *testing.T, i int, plain []byte) layer.Digest {
	t.Helper()
	x := &f.m.Members[i]
	x.Digest, x.Length = sha256.Sum256(plain), int64(len(plain))
	f.replace(i, squeeze(t, plain))
	return x.Digest
}

func squeeze(t *testing.T, plain []byte) []byte {
	t.Helper()
	e, err := zstd.NewWriter(nil, zstd.WithEncoderCRC(false), zstd.WithWindowSize(1<<20))
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	return e.EncodeAll(plain, nil)
}

func (f *forged) bytes(t *testing.T) []byte {
	t.Helper()
	text, err := json.Marshal(f.m)
	if err != nil {
		t.Fatal(err)
	}
	if f.text != nil {
		text = f.text(text)
	}
	var b bytes.Buffer
	put := func(i int, name string, size int64, body []byte) {
		h := header(name, size)
		if f.head != nil {
			f.head(i, &h)
		}
		b.Write(h[:])
		b.Write(body)
		b.Write(make([]byte, padded(int64(len(body)))-int64(len(body))))
	}
	put(-1, manifestName, int64(len(text)), text)
	for _, i := range f.order {
		x := f.m.Members[i]
		put(i, x.path(), x.Size, f.bodies[name{x.Kind, x.Digest}])
	}
	b.Write(f.tail)
	return b.Bytes()
}

// seal puts the checksum of a header right again.
func seal(h *[block]byte) { copy(h[148:], fmt.Sprintf("%06o\x00 ", checksum(h))) }

func rename(h *[block]byte, to string) {
	clear(h[0:100])
	copy(h[:], to)
	seal(h)
}

// retype makes something else of member i.
func retype(i int, flag byte, link string) func(int, *[block]byte) {
	return func(k int, h *[block]byte) {
		if k == i {
			h[156] = flag
			copy(h[157:257], link)
			seal(h)
		}
	}
}

func renamed(i int, to string) func(int, *[block]byte) {
	return func(k int, h *[block]byte) {
		if k == i {
			rename(h, to)
		}
	}
}

// hostile is what a pack may be, each refused for one reason.
func hostile(t *testing.T) map[string]struct {
	spoil func(f *forged)
	want  string // in the error
} {
	t.Helper()
	type row = struct {
		spoil func(f *forged)
		want  string
	}
	replaceText := func(old, next string) func(*forged) {
		return func(f *forged) {
			f.text = func(b []byte) []byte { return bytes.Replace(b, []byte(old), []byte(next), 1) }
		}
	}
	record := func(change func(s *store.Snapshot)) func(*forged) {
		return func(f *forged) { change(&f.m.Snapshots[len(f.m.Snapshots)-1]) }
	}
	member := func(kind Kind, change func(x *Member)) func(*forged) {
		return func(f *forged) { change(&f.m.Members[f.first(kind)]) }
	}
	return map[string]row{
		// The container.
		"a member's name climbs":       {func(f *forged) { f.head = renamed(2, "../../etc/passwd") }, "names a place outside"},
		"a member's name is absolute":  {func(f *forged) { f.head = renamed(2, "/etc/passwd") }, "names a place outside"},
		"a name climbs in the middle":  {func(f *forged) { f.head = renamed(2, "chunk/../../x") }, "names a place outside"},
		"a name that is not listed":    {func(f *forged) { f.head = renamed(2, "readme.txt") }, "not in the manifest"},
		"a prefix in its header":       {func(f *forged) { f.head = func(i int, h *[block]byte) { prefixed(i, h) } }, "names a place outside"},
		"a symbolic link":              {func(f *forged) { f.head = retype(1, '2', "/etc/passwd") }, "a symbolic link"},
		"a hard link":                  {func(f *forged) { f.head = retype(1, '1', "manifest.json") }, "a hard link"},
		"a character device":           {func(f *forged) { f.head = retype(1, '3', "") }, "a device"},
		"a block device":               {func(f *forged) { f.head = retype(1, '4', "") }, "a device"},
		"a directory":                  {func(f *forged) { f.head = retype(1, '5', "") }, "a directory"},
		"a pipe":                       {func(f *forged) { f.head = retype(1, '6', "") }, "a pipe"},
		"an extended header":           {func(f *forged) { f.head = retype(1, 'x', "") }, "an extended header"},
		"a global extended header":     {func(f *forged) { f.head = retype(1, 'g', "") }, "an extended header"},
		"a long name":                  {func(f *forged) { f.head = retype(1, 'L', "") }, "an extended header"},
		"a sparse file":                {func(f *forged) { f.head = retype(1, 'S', "") }, "unknown type"},
		"the manifest is a link":       {func(f *forged) { f.head = retype(-1, '2', "/etc/passwd") }, "does not begin with its manifest"},
		"the manifest is elsewhere":    {func(f *forged) { f.head = renamed(-1, "x.json") }, "does not begin with its manifest"},
		"a member twice":               {func(f *forged) { f.order = slices.Insert(f.order, 2, 1) }, "comes twice"},
		"the manifest twice":           {func(f *forged) { f.head = renamed(3, manifestName) }, "comes twice"},
		"a member is missing":          {func(f *forged) { f.order = slices.Delete(f.order, 3, 4) }, "is missing"},
		"the last member is missing":   {func(f *forged) { f.order = f.order[:len(f.order)-1] }, "ends where"},
		"members in another order":     {func(f *forged) { f.order[1], f.order[2] = f.order[2], f.order[1] }, "is missing"},
		"no members at all":            {func(f *forged) { f.order = nil }, "ends where"},
		"a header says another size":   {func(f *forged) { f.head = sized(2, 7) }, "by the manifest"},
		"a header says a huge size":    {func(f *forged) { f.head = sized(2, 1<<33-1) }, "by the manifest"},
		"a size that is no number":     {func(f *forged) { f.head = texted(2, 124, "99999999999\x00") }, "by the manifest"},
		"a size in base 256":           {func(f *forged) { f.head = texted(2, 124, "\x80\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x10") }, "by the manifest"},
		"a wrong checksum":             {func(f *forged) { f.head = func(i int, h *[block]byte) { broken(i, h) } }, "is damaged"},
		"an owner":                     {func(f *forged) { f.head = texted(2, 108, "0001750\x00") }, "of its own"},
		"a mode":                       {func(f *forged) { f.head = texted(2, 100, "0004755\x00") }, "of its own"},
		"something after the end":      {func(f *forged) { f.tail = append(f.tail, 'x') }, "something follows its end"},
		"another member after the end": {func(f *forged) { h := header("chunk/x", 0); f.tail = append(h[:], f.tail...) }, "not in the manifest"},
		"no end":                       {func(f *forged) { f.tail = nil }, "cut off"},
		"half of an end":               {func(f *forged) { f.tail = f.tail[:block] }, "cut off"},
		"the manifest's size is huge":  {func(f *forged) { f.head = sized(-1, MaxManifestBytes+1) }, "at most"},

		// The manifest.
		"a newer version":              {func(f *forged) { f.m.FormatVersion = 3 }, "it has version 3"},
		"version 0":                    {func(f *forged) { f.m.FormatVersion = 0 }, "it has version 0"},
		"no version":                   {replaceText(`"format_version":2,`, ""), "no format version"},
		"no JSON":                      {func(f *forged) { f.text = func([]byte) []byte { return []byte("{") } }, "cannot be read"},
		"a list":                       {func(f *forged) { f.text = func([]byte) []byte { return []byte("[]") } }, "cannot be read"},
		"an unknown field":             {replaceText(`"tool":`, `"lazy":1,"tool":`), "unknown field"},
		"two manifests":                {func(f *forged) { f.text = func(b []byte) []byte { return append(b, b...) } }, "cannot be read"},
		"an unknown field of a record": {replaceText(`"tag":`, `"lazy":1,"tag":`), "unknown field"},
		"a deep nest":                  {func(f *forged) { f.text = func([]byte) []byte { return bytes.Repeat([]byte("["), 1<<20) } }, "cannot be read"},
		"no snapshots":                 {func(f *forged) { f.m.Snapshots = nil }, "0 snapshots"},
		"too many snapshots":           {func(f *forged) { f.m.Snapshots = make([]store.Snapshot, MaxSnapshots+1) }, "1025 snapshots"},
		"two snapshots of one name":    {func(f *forged) { f.m.Snapshots = append(f.m.Snapshots, f.m.Snapshots[0]) }, "two snapshots"},
		"a tag that climbs":            {record(func(s *store.Snapshot) { s.Tag = "../../x" }), "bad name"},
		"a tag of a build's step":      {record(func(s *store.Snapshot) { s.Tag = ".step-0123456789abcdef0123456789abcdef" }), "bad name"},
		"a tag that is empty":          {record(func(s *store.Snapshot) { s.Tag = "" }), "cannot be empty"},
		"a record of another version":  {record(func(s *store.Snapshot) { s.FormatVersion = 9 }), "format version 9"},
		"no CPUs":                      {record(func(s *store.Snapshot) { s.Engine.CPUs = 0 }), "0 CPUs"},
		"memory without bounds":        {record(func(s *store.Snapshot) { s.Engine.MemoryBytes = 1 << 60 }), "bytes of memory"},
		"memory less than none":        {record(func(s *store.Snapshot) { s.Engine.MemoryBytes = -4096 }), "bytes of memory"},
		"a state that is no digest":    {record(func(s *store.Snapshot) { s.State = "../../etc/passwd" }), "device state"},
		"a state that is not there":    {record(func(s *store.Snapshot) { s.State = storetest.Digest("x") }), "no member"},
		"a state of another size":      {record(func(s *store.Snapshot) { s.StateBytes++ }), "no member"},
		"memory that is not there":     {record(func(s *store.Snapshot) { s.Memory = layer.Digest{1} }), "no member"},
		"no memory":                    {record(func(s *store.Snapshot) { s.Memory = layer.Digest{} }), "no member"},
		"an image that is not there":   {record(func(s *store.Snapshot) { s.Image = storetest.Digest("y") }), "not in the manifest"},
		"another image's disk":         {record(func(s *store.Snapshot) { s.ImageDisk = s.Disk }), "not that of its image"},
		"escapes in a recipe's name":   {record(func(s *store.Snapshot) { s.Recipe = "x\x1b]0;owned\a" }), "not text of one line"},
		"escapes in what is warm":      {record(func(s *store.Snapshot) { s.Warm = []string{"\x1b[2J"} }), "not text of one line"},
		"escapes in the version":       {func(f *forged) { f.m.Tool = "\x1b[31m" }, "not text of one line"},
		"an image's id that climbs": {func(f *forged) {
			for i := range f.m.Snapshots {
				f.m.Snapshots[i].Image = "../x"
			}
			f.m.Images[0].ID = "../x"
		}, "id of an image"},
		"an image of another version": {func(f *forged) { f.m.Images[0].FormatVersion = 3 }, "format version 3"},
		"an image that nobody needs":  {func(f *forged) { i := f.m.Images[0]; i.ID = storetest.Digest("z"); f.m.Images = append(f.m.Images, i) }, "no snapshot of its manifest stands"},
		"a member of no kind":         {member(Chunk, func(x *Member) { x.Kind = "script" }), "unknown kind"},
		"a kind that climbs":          {member(Chunk, func(x *Member) { x.Kind = "../../x" }), "unknown kind"},
		"a member listed twice":       {func(f *forged) { f.m.Members = append(f.m.Members, f.m.Members[0]) }, "twice"},
		"a member without a digest":   {member(Chunk, func(x *Member) { x.Digest = layer.Digest{} }), "without a digest"},
		"a chunk that is too long":    {member(Chunk, func(x *Member) { x.Length = layer.MaxChunkBytes + 4096 }), "its length is"},
		"a map that is too long":      {member(Map, func(x *Member) { x.Length = layer.MaxMapBytes + 1 }), "its length is"},
		"a length less than none":     {member(Chunk, func(x *Member) { x.Length = -1 }), "its length is"},
		"a size less than none":       {member(Chunk, func(x *Member) { x.Size = -1 }), "that cannot be"},
		"a size of nothing":           {member(Chunk, func(x *Member) { x.Size = 0 }), "that cannot be"},
		"a size without bounds":       {member(Chunk, func(x *Member) { x.Size = 1 << 40 }), "that cannot be"},
		"maps without bounds": {func(f *forged) {
			for i := range 3 {
				f.m.Members = append(f.m.Members, Member{Kind: Map, Digest: layer.Digest{byte(i), 9}, Length: layer.MaxMapBytes, Size: 1000})
			}
		}, "would take more than"},

		// Kernels.
		"a kernel in a pack of version 1":    {func(f *forged) { f.m.FormatVersion = 1 }, "none of version 1 has"},
		"a kernel's member in one":           {func(f *forged) { f.m.FormatVersion, f.m.Kernels = 1, nil }, "none of version 1 has"},
		"a kernel that is no member":         {func(f *forged) { f.m.Kernels[0].Content = layer.Digest{1} }, "no member of the pack"},
		"a kernel that is a state":           {func(f *forged) { f.m.Kernels[0].Content = f.m.Members[f.first(State)].Digest }, "no member of the pack"},
		"a kernel without a digest":          {func(f *forged) { f.m.Kernels[0].Content = layer.Digest{} }, "no member of the pack"},
		"a kernel without a name":            {func(f *forged) { f.m.Kernels[0].Name = "" }, "no snapshot of its manifest"},
		"a kernel of no snapshot":            {func(f *forged) { f.m.Kernels[0].Name = "6.6-1 " + storetest.Digest("x") }, "no snapshot of its manifest"},
		"a kernel listed twice":              {func(f *forged) { f.m.Kernels = append(f.m.Kernels, f.m.Kernels[0]) }, "twice"},
		"kernels without end":                {func(f *forged) { f.m.Kernels = make([]Kernel, 3) }, "3 kernels for 2 snapshots"},
		"a kernel's member that is nobody's": {func(f *forged) { f.m.Kernels = nil }, "nothing needs its member kernel"},
		"a kernel's member listed twice":     {func(f *forged) { f.m.Members = append(f.m.Members, f.m.Members[f.first(KernelMember)]) }, "twice"},
		"a kernel's member that is missing":  {func(f *forged) { i := f.first(KernelMember); f.order = slices.Delete(f.order, i, i+1) }, "is missing"},
		"a kernel that is too long":          {member(KernelMember, func(x *Member) { x.Length = MaxKernelBytes + 1 }), "its length is"},
		"a kernel that is a bomb":            {func(f *forged) { f.replace(f.first(KernelMember), squeeze(t, make([]byte, 8<<20))) }, "becomes more"},
		"a kernel of other bytes":            {func(f *forged) { f.spoilKernel(t, func(b []byte) []byte { b[len(b)-1] ^= 1; return b }, true) }, "does not match its digest"},
		"a kernel that is no frame":          {func(f *forged) { f.replace(f.first(KernelMember), []byte("no frame at all")) }, "cannot be decompressed"},
		"a kernel that ends early":           {func(f *forged) { f.spoilKernel(t, func(b []byte) []byte { return b[:len(b)-1] }, false) }, "bytes follow where there are"},
		"a kernel that ends in its header":   {func(f *forged) { f.spoilKernel(t, func(b []byte) []byte { return b[:20] }, false) }, "without a header"},
		"a kernel with more than it says":    {func(f *forged) { f.spoilKernel(t, func(b []byte) []byte { return append(b, 'x') }, false) }, "more than its header says"},
		"a kernel of another version": {func(f *forged) {
			f.spoilKernel(t, func(b []byte) []byte {
				return bytes.Replace(b, []byte(`"format_version":1`), []byte(`"format_version":2`), 1)
			}, false)
		}, "kernel of format version 2"},
		"a kernel with a module that climbs": {func(f *forged) {
			f.spoilKernel(t, func(b []byte) []byte { return bytes.Replace(b, []byte(`"virtio"`), []byte(`"../virtio"`), 1) }, false)
		}, "of a name that is none"},
		"a kernel with a module twice": {func(f *forged) {
			f.spoilKernel(t, func(b []byte) []byte { return bytes.Replace(b, []byte(`"virtio_blk"`), []byte(`"virtio"`), 1) }, false)
		}, "twice or of a name"},
		"a kernel with an image of less than nothing": {func(f *forged) {
			f.spoilKernel(t, func(b []byte) []byte { return bytes.Replace(b, []byte(`"image":8`), []byte(`"image":-8`), 1) }, false)
		}, "-8 bytes follow"},
		"a kernel whose header is another's form": {func(f *forged) {
			f.spoilKernel(t, func(b []byte) []byte { return bytes.Replace(b, []byte(`"image":8`), []byte(`"image": 8`), 1) }, false)
		}, "in the form that it has"},
		"a kernel with escapes in its version": {func(f *forged) {
			f.spoilKernel(t, func(b []byte) []byte { return bytes.Replace(b, []byte(`"6.1-1"`), []byte(`"\u001b[2J"`), 1) }, false)
		}, "kernel of version"},

		// The members.
		"a chunk of other bytes":     {func(f *forged) { i := f.first(Chunk); f.replace(i, squeeze(t, make([]byte, f.m.Members[i].Length))) }, "does not match its digest"},
		"a chunk that is no frame":   {func(f *forged) { f.replace(f.first(Chunk), []byte("no frame at all")) }, "cannot be decompressed"},
		"a chunk that becomes more":  {func(f *forged) { f.replace(f.first(Chunk), squeeze(t, make([]byte, 64<<20))) }, "cannot be decompressed"},
		"a chunk that becomes less":  {func(f *forged) { f.replace(f.first(Chunk), squeeze(t, []byte("x"))) }, "does not match its digest"},
		"a state of other bytes":     {func(f *forged) { f.replace(f.first(State), squeeze(t, []byte("x"))) }, "does not match its digest"},
		"a state that becomes more":  {func(f *forged) { f.replace(f.first(State), squeeze(t, make([]byte, 1<<20))) }, "becomes more"},
		"a map that is a bomb":       {func(f *forged) { f.replace(f.first(Map), squeeze(t, make([]byte, 300<<20))) }, "becomes more"},
		"a frame with a huge window": {func(f *forged) { f.replace(f.first(State), hugeWindow(t)) }, "cannot be decompressed"},
		"a map that is none": {func(f *forged) {
			i := f.first(Map)
			d := f.m.Members[i].Digest
			f.relink(d, f.swap(t, i, []byte("no map")))
		}, "too short"},
		"a chunk that nobody needs": {func(f *forged) {
			f.m.Members = append(f.m.Members, Member{Kind: Chunk})
			f.order = append(f.order, len(f.m.Members)-1)
			f.swap(t, len(f.m.Members)-1, []byte("ballast"))
		}, "nothing needs its member"},
		"a chunk that a map names is not listed": {func(f *forged) {
			i := f.first(Chunk)
			f.m.Members = slices.Delete(f.m.Members, i, i+1)
			f.order = f.order[:len(f.order)-1]
		}, "no member of the pack"},
		"a chunk's length is not the map's": {func(f *forged) { i := f.first(Chunk); f.m.Members[i].Length = 4096 }, "cannot be decompressed"},
		"memory of another size":            {func(f *forged) { f.m.Snapshots[0].Engine.MemoryBytes *= 2 }, "its memory layer has"},
		"memory that is a disk":             {func(f *forged) { f.m.Snapshots[0].Memory = f.m.Snapshots[0].Disk }, "its memory layer has"},
		"a disk that is memory":             {func(f *forged) { f.m.Snapshots[1].Disk = f.m.Snapshots[1].Memory }, "its disk layer has pages"},
		"a disk of another image":           {func(f *forged) { f.m.Images[0].DiskBytes++ }, "is not a whole disk"},
	}
}

// spoilKernel changes the kernel, under the digest of what it was, or that of what it is then.
func (f *forged) spoilKernel(t *testing.T, change func([]byte) []byte, sameName bool) {
	t.Helper()
	b, err := tinyKernel().Encode()
	if err != nil {
		t.Fatal(err)
	}
	b = change(b)
	i := f.first(KernelMember)
	if sameName {
		f.replace(i, squeeze(t, b))
		return
	}
	f.m.Kernels[0].Content = f.swap(t, i, b)
}

// relink lets the records name another map.
func (f *forged) relink(old, next layer.Digest) {
	for i := range f.m.Snapshots {
		s := &f.m.Snapshots[i]
		for _, d := range []*layer.Digest{&s.Memory, &s.Disk, &s.ImageDisk} {
			if *d == old {
				*d = next
			}
		}
	}
	for i := range f.m.Images {
		if f.m.Images[i].Disk == old {
			f.m.Images[i].Disk = next
		}
	}
}

func prefixed(i int, h *[block]byte) {
	if i == 1 {
		copy(h[345:], "../..")
		seal(h)
	}
}

func broken(i int, h *[block]byte) {
	if i == 1 {
		h[20] ^= 1
	}
}

func texted(i, at int, text string) func(int, *[block]byte) {
	return func(k int, h *[block]byte) {
		if k == i {
			copy(h[at:], text)
			seal(h)
		}
	}
}

func sized(i int, size int64) func(int, *[block]byte) {
	return texted(i, 124, fmt.Sprintf("%011o\x00", size))
}

// hugeWindow is a frame that asks for a window of a gigabyte.
func hugeWindow(t *testing.T) []byte {
	t.Helper()
	return []byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 20 << 3, 0x09, 0x00, 0x00, 'x'}
}

// TestHostilePacks: each is refused with one clear error; nothing is written beside the sink's directory, nothing in the
// store, and nothing stays.
func TestHostilePacks(t *testing.T) {
	here := newHome(t)
	src := here.collect(here.chain(2))
	base := forge(t, src).bytes(t)
	if _, err := Inspect(t.Context(), bytes.NewReader(base)); err != nil {
		t.Fatalf("the pack that is spoilt is not right: %v", err)
	}
	rows := hostile(t)
	if len(rows) < 60 {
		t.Errorf("%d hostile packs, want 60", len(rows))
	}
	for what, row := range rows {
		t.Run(what, func(t *testing.T) {
			f := forge(t, src)
			row.spoil(f)
			refused(t, f.bytes(t), row.want)
		})
	}
}

// TestTruncatedPacks: cut off at every member, and in the middle of each.
func TestTruncatedPacks(t *testing.T) {
	here := newHome(t)
	src := here.collect(here.chain(2))
	whole := forge(t, src).bytes(t)
	at := int64(0)
	cuts := []int64{0, 1, block - 1, block, block + 1, int64(len(whole)) - 1, int64(len(whole)) - block}
	at = block + padded(int64(bytes.IndexByte(whole[block:], 0)))
	for _, x := range src.Manifest().Members {
		cuts = append(cuts, at, at+1, at+block, at+block+x.Size/2, at+block+x.Size)
		at += block + padded(x.Size)
	}
	if at+2*block != int64(len(whole)) {
		t.Fatalf("members end at %d of %d", at, len(whole))
	}
	for _, n := range cuts {
		if n < int64(len(whole)) {
			refused(t, whole[:n], "")
		}
	}
}

// refused tries a pack both ways.
func refused(t *testing.T, b []byte, want string) {
	t.Helper()
	_, err := Inspect(t.Context(), bytes.NewReader(b))
	tellsOne(t, err, want)
	there := newHome(t)
	root := t.TempDir()
	dir := filepath.Join(root, "tmp", "sink")
	err = func() error {
		p, err := NewReader(bytes.NewReader(b))
		if err != nil {
			return err
		}
		sink, err := NewSink(t.Context(), dir, there.Layers, p.Manifest())
		if err != nil {
			return err
		}
		defer sink.Close()
		if err := p.Receive(t.Context(), sink); err != nil {
			return err
		}
		return sink.Install(t.Context())
	}()
	tellsOne(t, err, want)
	for _, place := range []string{root, filepath.Dir(there.Dir)} {
		_ = filepath.WalkDir(place, func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				t.Errorf("%s is left", path)
			}
			return nil
		})
	}
}

func tellsOne(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case err == nil:
		t.Error("it was taken")
	case !errors.Is(err, ErrFormat) && !errors.Is(err, ErrVersion) && !errors.Is(err, ErrDamaged):
		t.Errorf("%v is none of the package's errors", err)
	case !strings.Contains(err.Error(), want):
		t.Errorf("the error is\n%v\nand does not say %q", err, want)
	case len(err.Error()) > 600:
		t.Errorf("an error of %d bytes: %.200s…", len(err.Error()), err)
	}
}

// TestStalledPack: who gives up is not waited for.
func TestStalledPack(t *testing.T) {
	here := newHome(t)
	src := here.collect(here.chain(1))
	whole := forge(t, src).bytes(t)
	ctx, cancel := context.WithCancel(t.Context())
	r := &stalling{b: whole[:len(whole)/2], ctx: ctx, reached: cancel}
	if _, err := Inspect(ctx, r); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want that it was cancelled", err)
	}
}

type stalling struct {
	b       []byte
	ctx     context.Context //nolint:containedctx // the test's
	reached func()
}

func (s *stalling) Read(p []byte) (int, error) {
	if len(s.b) == 0 {
		s.reached()
		<-s.ctx.Done()
		return 0, context.Cause(s.ctx)
	}
	n := copy(p, s.b)
	s.b = s.b[n:]
	return n, nil
}

// FuzzPack: whatever is read, it ends, takes no more than it may, and is either right or refused for a reason.
func FuzzPack(f *testing.F) {
	seed := tinyPack(f)
	f.Add(seed)
	for _, n := range []int{0, 100, block, len(seed) / 2, len(seed) - 1} {
		f.Add(seed[:n])
	}
	old, err := os.ReadFile("testdata/version1.forkd")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(old)
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := Inspect(t.Context(), bytes.NewReader(b))
		if err != nil {
			if !errors.Is(err, ErrFormat) && !errors.Is(err, ErrVersion) && !errors.Is(err, ErrDamaged) {
				t.Errorf("%v is none of the package's errors", err)
			}
			return
		}
		// There is one encoding: what was taken is what would be written, but for the manifest's own form.
		if p.at != int64(len(b)) {
			t.Errorf("%d of %d bytes were read", p.at, len(b))
		}
	})
}
