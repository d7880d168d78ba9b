package memory

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func descriptorPath(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

func TestOpenImage(t *testing.T) {
	scratch, err := NewScratch(2 * PageSize)
	if err != nil {
		t.Fatal(err)
	}
	defer scratch.Close()
	if _, err := scratch.File().WriteAt([]byte("held"), PageSize); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenImage(descriptorPath(scratch.File()), 2*PageSize); err == nil || !strings.Contains(err.Error(), "not sealed") {
		t.Errorf("a file that can still be written: %v", err)
	}
	image, err := scratch.Seal()
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	if _, err := OpenImage(descriptorPath(image.File()), PageSize); err == nil {
		t.Error("an image of another size was opened")
	}
	again, err := OpenImage(descriptorPath(image.File()), 2*PageSize)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	b := make([]byte, 4)
	if _, err := again.ReadAt(b, PageSize); err != nil || string(b) != "held" {
		t.Errorf("it holds %q, %v", b, err)
	}
	id, err := image.ID()
	if err != nil {
		t.Fatal(err)
	}
	if got, err := again.ID(); err != nil || got != id {
		t.Errorf("its ID is %+v, %v, want %+v", got, err, id)
	}
	other, err := NewScratch(2 * PageSize)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if got, err := fileID(other.File()); err != nil || got == id {
		t.Errorf("another file has the same ID %+v, %v", got, err)
	}
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, make([]byte, 2*PageSize), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenImage(plain, 2*PageSize); err == nil {
		t.Error("an ordinary file was taken for an image")
	}
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenImage(pipe, 2*PageSize); err == nil { // at once, though nobody writes it
		t.Error("a pipe was taken for an image")
	}
}
