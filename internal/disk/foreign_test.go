package disk

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/testenv"
)

// super is the beginning of a file system of so many blocks of 1 KiB.
func super(blocks uint32) []byte {
	b := make([]byte, headSize)
	binary.LittleEndian.PutUint16(b[superMagic:], 0xEF53)
	binary.LittleEndian.PutUint32(b[superBlocksLow:], blocks)
	return b
}

func writeFile(t testing.TB, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestCopyForeign: a copy is the same bytes, padded, has the same digest wherever there are holes, and leaves what it is of.
func TestCopyForeign(t *testing.T) {
	const size = 300<<10 + 512 // no multiple of a cluster
	content := make([]byte, size)
	copy(content, super(size>>10))
	copy(content[200<<10:], "in the middle")
	content[size-1] = 1
	full, holes := writeFile(t, content), filepath.Join(t.TempDir(), "holes")
	f, err := os.Create(holes)
	if err != nil {
		t.Fatal(err)
	}
	for off := 0; off < size; off += 4096 {
		if part := content[off:min(off+4096, size)]; !bytes.Equal(part, make([]byte, len(part))) {
			if _, err := f.WriteAt(part, int64(off)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	digests := map[string]bool{}
	for _, from := range []string{full, holes} {
		to := filepath.Join(t.TempDir(), "copy")
		got, err := CopyForeign(t.Context(), from, to)
		if err != nil {
			t.Fatal(err)
		}
		copied, err := os.ReadFile(to)
		if err != nil {
			t.Fatal(err)
		}
		if int64(len(copied)) != got.Size || got.Size%ClusterSize != 0 || got.Size-size >= ClusterSize {
			t.Errorf("the copy has %d bytes, said to be %d, of %d", len(copied), got.Size, size)
		}
		if !bytes.Equal(copied[:size], content) || !bytes.Equal(copied[size:], make([]byte, len(copied)-size)) {
			t.Error("the copy is not what was copied")
		}
		var st unix.Stat_t
		if err := unix.Stat(to, &st); err != nil {
			t.Fatal(err)
		}
		if st.Blocks*512 >= got.Size {
			t.Errorf("the copy has no holes: %d bytes of %d", st.Blocks*512, got.Size)
		}
		digests[got.Digest] = true
	}
	content[250<<10] = 1
	other, err := CopyForeign(t.Context(), writeFile(t, content), filepath.Join(t.TempDir(), "copy"))
	if err != nil {
		t.Fatal(err)
	}
	if len(digests) != 1 || digests[other.Digest] {
		t.Errorf("digests %v of equal content, %s of another", digests, other.Digest)
	}
	if after, err := os.ReadFile(full); err != nil || bytes.Equal(after, content) || len(after) != size {
		t.Errorf("what was copied was changed: %v", err)
	}
}

// TestCopyForeignOfMke2fs: what mke2fs makes is one, of every size of block.
func TestCopyForeignOfMke2fs(t *testing.T) {
	testenv.Need(t, "mke2fs")
	for _, args := range [][]string{{"-t", "ext4"}, {"-t", "ext4", "-b", "1024"}, {"-t", "ext4", "-O", "64bit"}, {"-t", "ext2"}, {"-t", "ext3"}} {
		path := filepath.Join(t.TempDir(), "fs")
		rawDisk(t, path, 16<<20)
		tool(t, "mke2fs", append(args, "-q", "-F", path)...)
		if _, err := CopyForeign(t.Context(), path, filepath.Join(t.TempDir(), "copy")); err != nil {
			t.Errorf("%v: %v", args, err)
		}
	}
}

// TestCopyForeignRefuses: what is no file system is named as what it is, and leaves no file.
func TestCopyForeignRefuses(t *testing.T) {
	with := func(at int, magic string) []byte {
		b := make([]byte, 4096)
		copy(b[at:], magic)
		return b
	}
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, path, want string }{
		{"missing", "/no/such/file", "no such file"},
		{"a directory", t.TempDir(), "no regular file"},
		{"a device", "/dev/null", "no regular file"},
		{"a pipe", fifo, "no regular file"},
		{"empty", writeFile(t, nil), "not an ext4"},
		{"zeros", writeFile(t, make([]byte, 1<<20)), "not an ext4"},
		{"text", writeFile(t, []byte("hello")), "not an ext4"},
		{"qcow2", writeFile(t, with(0, "QFI\xfb")), "qcow2"},
		{"squashfs", writeFile(t, with(0, "hsqs")), "squashfs"},
		{"gzip", writeFile(t, []byte("\x1f\x8b")), "gzip"},
		{"tar", writeFile(t, with(257, "ustar")), "tar:FILE"},
		{"a disk", writeFile(t, with(512, "EFI PART")), "partitions"},
		{"cut off", writeFile(t, super(1000)), "cut off: 2048 bytes of 1024000"},
		{"no blocks", writeFile(t, super(0)), "0 blocks"},
		{"too many", writeFile(t, super(0xffffffff)), "cut off"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			to := filepath.Join(t.TempDir(), "copy")
			_, err := CopyForeign(t.Context(), tt.path, to)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q in it", err, tt.want)
			}
			if _, err := os.Lstat(to); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("a file is left: %v", err)
			}
		})
	}
}

// TestHugeForeign: a small file system in a file of any size is refused before it is copied.
func TestHugeForeign(t *testing.T) {
	for _, size := range []int64{qcowMaxSize + 1, 1<<63 - 1} {
		if err := checkForeign(super(1), size); !errors.Is(err, ErrNoFileSystem) || !strings.Contains(err.Error(), "at most") {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
	if err := checkForeign(super(1), qcowMaxSize); err != nil {
		t.Error(err)
	}
}

// TestCopyForeignThatChanges: a file system that something writes to is not taken.
func TestCopyForeignThatChanges(t *testing.T) {
	path := writeFile(t, append(super(2), make([]byte, 1<<20)...))
	ctx := &changing{Context: t.Context(), change: func() {
		if err := os.Chtimes(path, time.Time{}, time.Now().Add(time.Second)); err != nil {
			t.Error(err)
		}
	}}
	if _, err := CopyForeign(ctx, path, filepath.Join(t.TempDir(), "copy")); err == nil || !strings.Contains(err.Error(), "changed") {
		t.Errorf("got %v", err)
	}
}

// FuzzCheckForeign: whatever a file begins with, it is judged.
func FuzzCheckForeign(f *testing.F) {
	f.Add(super(2), int64(2048))
	f.Add(super(0xffffffff), int64(1<<40))
	f.Add([]byte("QFI\xfb"), int64(4))
	f.Fuzz(func(t *testing.T, head []byte, size int64) {
		if err := checkForeign(head, size); err == nil {
			if size < 1<<10 { // a block
				t.Errorf("%d bytes are a file system", size)
			}
		} else if !errors.Is(err, ErrNoFileSystem) {
			t.Errorf("%v is no ErrNoFileSystem", err)
		}
	})
}

// changing is a context that does something when it is first asked.
type changing struct {
	context.Context //nolint:containedctx // it is one.

	change func()
}

func (c *changing) Err() error {
	if c.change != nil {
		c.change()
		c.change = nil
	}
	return c.Context.Err()
}
