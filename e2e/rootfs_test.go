package e2e

import (
	"crypto/sha256"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// rootfsFile makes a root file system of one program, this one, and one file.
func rootfsFile(t testing.TB) string {
	t.Helper()
	testenv.Need(t, "mke2fs")
	dir := t.TempDir()
	tree, file := filepath.Join(dir, "tree"), filepath.Join(dir, "root.ext4")
	for _, sub := range []string{"bin", "etc"} {
		if err := os.MkdirAll(filepath.Join(tree, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]struct {
		content []byte
		mode    os.FileMode
	}{
		"bin/program": {program, 0o755},
		"etc/made-of": {[]byte("elsewhere\n"), 0o644},
		"etc/passwd":  {[]byte("root:x:0:0::/:/bin/sh\n"), 0o644},
	} {
		if err := os.WriteFile(filepath.Join(tree, name), f.content, f.mode); err != nil {
			t.Fatal(err)
		}
	}
	mke2fs, err := testenv.Program("mke2fs")
	if err != nil {
		t.Fatal(err)
	}
	// 100 MiB and one block: no multiple of 64 KiB.
	cmd := exec.CommandContext(t.Context(), mke2fs, "-q", "-t", "ext4", "-b", "4096", "-E", "root_owner=0:0", "-d", tree, file, "25601")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("mke2fs: %v\n%s", err, out)
	}
	if err := os.Chmod(file, 0o400); err != nil {
		t.Fatal(err)
	}
	return file
}

func sum(t testing.TB, file string) [32]byte {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return sha256.Sum256(content)
}

// TestRootfs: a root file system in a file, made by somebody else, becomes a snapshot whose children run its programs. The
// file stays what it was, and what cannot be one is refused by its name, at once, with nothing left.
func TestRootfs(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	file := rootfsFile(t)
	before := sum(t, file)
	const tag = "e2e-rootfs"
	var snap api.Snapshot
	f.json(&snap, "snapshot", "--rootfs", file, "-t", tag, "--memory", "256MiB")
	t.Cleanup(func() { f.run("rmi", tag) })
	if snap.Tag != tag || snap.Status != "ready" || snap.MemoryBytes != 256<<20 {
		t.Errorf("the snapshot is %+v", snap)
	}
	for _, child := range f.forkOf(tag, 2) {
		if r := f.try("exec", child.ID, "--", "/bin/program", "load"); r.code != 1 || !strings.Contains(r.stderr, "give start MIB RATE") {
			t.Errorf("its program: %+v", r)
		}
		if got := f.run("cp", child.ID+":/etc/made-of", "-"); got != "elsewhere\n" {
			t.Errorf("its file has %q", got)
		}
		if r := f.tryIn(strings.NewReader(child.ID), "cp", "-", child.ID+":/etc/made-of"); r.code != 0 {
			t.Errorf("write its file: %+v", r)
		}
		if got := f.run("cp", child.ID+":/etc/made-of", "-"); got != child.ID {
			t.Errorf("its file has %q", got)
		}
	}
	if sum(t, file) != before {
		t.Error("the file was changed")
	}
	if r := f.try("snapshot", "--rootfs", file, "-t", tag); r.code != 1 || !strings.Contains(r.stderr, "exists") {
		t.Errorf("a tag that is taken: %+v", r)
	}

	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("neither\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, want string
		flags      []string
	}{
		{"no file", "no such file", []string{"--rootfs", "/no/such/file"}},
		{"a relative path", "absolute", []string{"--rootfs", "root.ext4"}},
		{"a device", "no regular file", []string{"--rootfs", "/dev/null"}},
		{"another format", "not an ext4 file system", []string{"--rootfs", text}},
		{"no kernel", "kernel \"/no/such/kernel\"", []string{"--rootfs", file, "--kernel", "/no/such/kernel"}},
		{"what is no kernel", "does not boot", []string{"--rootfs", file, "--kernel", text}},
		{"too little memory", "128MiB", []string{"--rootfs", file, "--memory", "1MiB"}},
		{"more than there is", "this host has", []string{"--rootfs", file, "--memory", "900GiB"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := f.try(append([]string{"snapshot", "-t", "e2e-refused"}, tt.flags...)...)
			if r.code != 1 || !strings.Contains(r.stderr, tt.want) {
				t.Errorf("exit code %d, want 1 and %q in:\n%s", r.code, tt.want, r.stderr)
			}
			if r := f.try("snapshot-info", "e2e-refused"); r.code != 1 {
				t.Errorf("a snapshot is left: %+v", r)
			}
		})
	}
}
