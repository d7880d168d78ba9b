package httpapi

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/mountinfo"
)

func TestFileSystem(t *testing.T) {
	const mounts = `21 1 254:0 / / rw,relatime - ext4 /dev/root rw
22 21 0:5 / /dev rw - devtmpfs none rw
23 22 0:20 / /dev/shm rw shared:2 - tmpfs none rw
24 21 0:21 / /mnt/with\040space rw - xfs /dev/vdb rw
25 24 0:22 / /mnt/with\040space rw - btrfs /dev/vdc rw
broken line
26 21 0:23 / /srv rw -
`
	for path, want := range map[string]string{
		"/": "ext4", "/home/x": "ext4", "/dev/shm/forkd": "tmpfs", "/dev/shmoo": "devtmpfs", "/mnt/with space/a": "btrfs",
		"/srv/x": "ext4",
	} {
		if got := fileSystem(mountinfo.Parse(mounts), path); got != want {
			t.Errorf("%s is on %q, want %q", path, got, want)
		}
	}
	if got := fileSystem(nil, "/x"); got != "" {
		t.Errorf("without mounts: %q", got)
	}
}

func TestLoadAverage(t *testing.T) {
	if diff := cmp.Diff([]float64{0.5, 1.25, 10}, loadAverage("0.50 1.25 10.00 2/300 12345\n")); diff != "" {
		t.Error(diff)
	}
	for _, bad := range []string{"", "1 2", "a b c d"} {
		if got := loadAverage(bad); got != nil {
			t.Errorf("%q: %v", bad, got)
		}
	}
}

// FuzzFacts: other users mount things, and name them.
func FuzzFacts(f *testing.F) {
	f.Add("21 1 254:0 / / rw,relatime - ext4 /dev/root rw\n24 21 0:21 / /mnt/with\\040space rw - xfs /dev/vdb rw\n", "/mnt/with space/a", "0.50 1.25 10.00 2/300 1\n")
	f.Add("1 2 3 4 \\777 - x", "/", "NaN Inf -1")
	f.Add("\\04", "", "")
	f.Fuzz(func(t *testing.T, mounts, path, load string) {
		if kind := fileSystem(mountinfo.Parse(mounts), path); strings.ContainsAny(kind, " \n") {
			t.Errorf("a file system of the kind %q", kind)
		}
		if l := loadAverage(load); l != nil && len(l) != 3 {
			t.Errorf("loads %v", l)
		}
	})
}
