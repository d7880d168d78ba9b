package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Formats of a disk, as QEMU calls them.
const (
	Raw   = "raw"
	Qcow2 = "qcow2"
)

// ClusterSize is the unit in which disks are copied on write and saved: every disk's size is a multiple of it.
const ClusterSize = 64 << 10

// MinFormatSize is the smallest disk Format accepts.
const MinFormatSize = 1 << 20

// Format makes path, which must not exist, an empty ext4 file system of size bytes in a sparse raw file. It has no
// journal: a sandbox's disk never outlives its memory, so there is no crash to recover from. Its root directory
// belongs to root whoever calls. On error nothing is left.
func Format(ctx context.Context, path string, size int64) error {
	if err := format(ctx, path, size); err != nil {
		return fmt.Errorf("format disk %s: %w", path, err)
	}
	return nil
}

func format(ctx context.Context, path string, size int64) error {
	if size < MinFormatSize || size%ClusterSize != 0 {
		return fmt.Errorf("size %d is not a multiple of 64 KiB from 1 MiB on", size)
	}
	mke2fs, err := findMke2fs()
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
		return errors.Join(fullDisk(err), os.Remove(path))
	}
	cmd := exec.CommandContext(ctx, mke2fs, mke2fsArgs(path)...)
	// The host's own defaults must not decide what the guest's kernel has to understand.
	cmd.Env = []string{"MKE2FS_CONFIG=/dev/null", "LC_ALL=C"}
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return errors.Join(context.Cause(ctx), os.Remove(path))
	}
	if err != nil {
		err = fmt.Errorf("mke2fs: %w: %s", err, strings.TrimSpace(string(out)))
		return errors.Join(err, os.Remove(path))
	}
	return nil
}

// mke2fsArgs spells out every feature. The holes of a new file are zero, so inode tables need not be written
// (assume_storage_prezeroed, e2fsprogs 1.47): the file stays sparse, and no guest's kernel sets out to zero them in
// the background. Of the two features that can say so, uninit_bg costs an emulated guest no checksums.
func mke2fsArgs(path string) []string {
	return []string{
		"-q", "-F", "-b", "4096", "-I", "256", "-i", "8192", "-m", "0",
		"-O", "none,sparse_super,large_file,huge_file,filetype,ext_attr,dir_index,dir_nlink,extra_isize,extent,flex_bg,uninit_bg",
		"-E", "root_owner=0:0,nodiscard,assume_storage_prezeroed=1",
		path,
	}
}

// findMke2fs looks where distributions put it too, for the PATH of an ordinary user lacks the sbin directories.
func findMke2fs() (string, error) {
	if p, err := exec.LookPath("mke2fs"); err == nil {
		return p, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/local/sbin"} {
		if p, err := exec.LookPath(filepath.Join(dir, "mke2fs")); err == nil {
			return p, nil
		}
	}
	return "", errors.New("mke2fs is not installed; install the package e2fsprogs")
}
