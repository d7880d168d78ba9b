package mountinfo

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParse(t *testing.T) {
	text := `157 168 254:0 /home/machines/m/disk//deleted /h/machines/m/disk rw,nosuid - ext4 /dev/vda rw,discard
30 23 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:11 - cgroup none rw,cpu,cpuacct
31 23 0:27 /a\040b /with\011tab\134and\x rw - tmpfs none

no mount - at all
`
	want := []Mount{
		{Root: "/home/machines/m/disk//deleted", At: "/h/machines/m/disk", Type: "ext4", Options: "rw,discard"},
		{Root: "/", At: "/sys/fs/cgroup/cpu,cpuacct", Type: "cgroup", Options: "rw,cpu,cpuacct"},
		{Root: "/a b", At: "/with\ttab\\and\\x", Type: "tmpfs"},
	}
	if diff := cmp.Diff(want, Parse(text)); diff != "" {
		t.Error(diff)
	}
}
