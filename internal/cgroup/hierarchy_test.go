package cgroup

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParse(t *testing.T) {
	//nolint:dupword // That is how they are named.
	mounts := parseMounts(`24 1 0:22 / /sys rw - sysfs sysfs rw
30 24 0:26 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
31 24 0:27 /docker/abc /sys/fs/cgroup/cpu\040set rw - cgroup cgroup rw,cpuacct,cpu,xattr
32 24 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
33 24 0:29 / /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio
34 24 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate
garbage
35 24 0:31 / /x rw -
`)
	want := []mount{
		{1, []Controller{Memory}, "/", "/sys/fs/cgroup/memory"},
		{1, []Controller{usage, CPU}, "/docker/abc", "/sys/fs/cgroup/cpu set"},
		{1, nil, "/", "/sys/fs/cgroup/systemd"},
		{1, []Controller{IO}, "/", "/sys/fs/cgroup/blkio"},
		{2, nil, "/", "/sys/fs/cgroup/unified"},
	}
	if diff := cmp.Diff(want, mounts, cmp.AllowUnexported(mount{})); diff != "" {
		t.Error(diff)
	}
	groups := parseGroups("12:name=systemd:/a\n9:cpu,cpuacct:/docker/abc/x\n4:memory:/user.slice\n3:blkio:/\n0::/user.slice/s:1.scope\nbad\n1:pids:relative\n")
	wantGroups := map[Controller]string{
		"name=systemd": "/a", CPU: "/docker/abc/x", usage: "/docker/abc/x", Memory: "/user.slice", IO: "/", "": "/user.slice/s:1.scope",
	}
	if diff := cmp.Diff(wantGroups, groups); diff != "" {
		t.Error(diff)
	}
}

func TestDir(t *testing.T) {
	for _, tt := range []struct {
		root, group, want string
		ok                bool
	}{
		{"/", "/", "/m", true},
		{"/", "/a/b", "/m/a/b", true},
		{"/", "/../a", "", false}, // of another namespace
		{"/docker/abc", "/docker/abc", "/m", true},
		{"/docker/abc", "/docker/abc/x", "/m/x", true},
		{"/docker/abc", "/docker/abcd", "", false},
		{"/docker/abc", "/", "", false},
		{"/docker/abc", "/docker/abc/../x", "", false},
	} {
		got, ok := mount{root: tt.root, at: "/m"}.dir(tt.group)
		if ok != tt.ok || ok && got != tt.want {
			t.Errorf("%s of %s: %s, %t", tt.group, tt.root, got, ok)
		}
	}
}

func TestChoose(t *testing.T) {
	all := wanted()
	some := []Controller{Memory, PIDs}
	for _, tt := range []struct {
		name string
		up   []ancestor
		want string // the directory, or why there is none
	}{
		{"a service of root's", []ancestor{
			{dir: "/system.slice", controllers: all, writable: true},
			{dir: "/", controllers: all, writable: true, root: true, others: true},
			{dir: "/system.slice/forkd.service", controllers: all, writable: true, own: true},
		}, "/system.slice"},
		{"root's shell", []ancestor{
			{dir: "/user.slice/user-0.slice", controllers: some, writable: true},
			{dir: "/user.slice", controllers: all, writable: true},
			{dir: "/", controllers: all, writable: true, root: true, others: true},
			{dir: "/user.slice/user-0.slice/session-1.scope", controllers: some, writable: true, others: true, own: true},
		}, "/user.slice"},
		{"a user's scope", []ancestor{
			{dir: "/u/app.slice", controllers: some, writable: true},
			{dir: "/u", controllers: some, writable: true},
			{dir: "/", controllers: all},
			{dir: "/u/app.slice/run.scope", controllers: some, writable: true, own: true},
		}, "/u/app.slice"},
		{"a user's session", []ancestor{
			{dir: "/u", controllers: all}, {dir: "/", controllers: all}, {dir: "/u/session.scope", controllers: all, others: true, own: true},
		}, "not writable"},
		{"a service with a user", []ancestor{
			{dir: "/system.slice", controllers: all},
			{dir: "/", controllers: all},
			{dir: "/system.slice/forkd.service", controllers: all, writable: true, own: true},
		}, "/system.slice/forkd.service"},
		{"in the host's root", []ancestor{{dir: "/", controllers: all, writable: true, root: true, others: true, own: true}}, "/"},
		{"a container's root", []ancestor{{dir: "/", controllers: all, writable: true, others: true, own: true}}, "processes of its own"},
		{"a container's root, alone", []ancestor{{dir: "/", controllers: all, writable: true, own: true}}, "/"},
		{"no controllers", []ancestor{{dir: "/", writable: true, root: true, own: true}}, "no controllers"},
		{"chosen before", []ancestor{
			{dir: "/a/b", controllers: all, writable: true}, {dir: "/a", controllers: some, writable: true, taken: true}, {dir: "/a/b/c", own: true},
		}, "/a"},
		{"threads", []ancestor{{dir: "/t", controllers: all, writable: true, threaded: true}, {dir: "/t/x", own: true}}, "threads only"},
	} {
		i, why := choose(tt.up)
		if i >= 0 && tt.up[i].dir != tt.want || i < 0 && !strings.Contains(why, tt.want) {
			t.Errorf("%s: %d %s, want %s", tt.name, i, why, tt.want)
		}
	}
}

func TestSettings(t *testing.T) {
	l := Limits{MemoryBytes: 1 << 20, CPUs: 0.05, PIDs: 100, IOBytes: 5000, IORequests: 7}
	text := func(all []setting) (lines []string) {
		for _, s := range all {
			lines = append(lines, s.file+" "+s.value)
		}
		return lines
	}
	want := []string{
		"memory.swap.max 0", "memory.oom.group 1", "memory.max 1048576", "cpu.max 5000 100000", "cpu.weight 5", "pids.max 100",
		"io.max 8:0 rbps=5000 wbps=5000 riops=7 wiops=7",
	}
	if diff := cmp.Diff(want, text(l.settings(2, "8:0"))); diff != "" {
		t.Error(diff)
	}
	want = []string{
		"memory.limit_in_bytes 1048576", "memory.memsw.limit_in_bytes 1048576", "cpu.cfs_period_us 100000", "cpu.cfs_quota_us 5000", "cpu.shares 51",
		"pids.max 100",
	}
	if diff := cmp.Diff(want, text(l.settings(1, "8:0"))); diff != "" {
		t.Error(diff)
	}
	for _, version := range []int{1, 2} {
		if got := (Limits{}).settings(version, "8:0"); len(got) != 0 {
			t.Errorf("no limits in version %d: %v", version, got)
		}
	}
	if got := text(Limits{IORequests: 9}.settings(2, "8:0")); len(got) != 1 || got[0] != "io.max 8:0 rbps=max wbps=max riops=9 wiops=9" {
		t.Errorf("requests alone: %v", got)
	}
	for cpus, want := range map[float64]int64{0.001: 1, 0.01: 1, 0.05: 5, 0.5: 50, 1: 100, 4: 100} {
		if got := weight(cpus, defaultWeight, 1); got != want {
			t.Errorf("a limit of %g cpus weighs %d, want %d", cpus, got, want)
		}
	}
	if got := quota(1e-9); got != 1000 {
		t.Errorf("the least quota is %d", got)
	}
}

// FuzzParse: what the kernel says is read without a panic, whatever it says in containers of whatever kind.
func FuzzParse(f *testing.F) {
	//nolint:dupword // That is how they are named.
	f.Add("30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", "0::/a\n", "oom_kill 1\n8:0 rbytes=1 wbytes=2\n")
	f.Fuzz(func(t *testing.T, mounts, groups, text string) {
		own := parseGroups(groups)
		for _, m := range parseMounts(mounts) {
			for _, g := range own {
				if dir, ok := m.dir(g); ok && strings.Contains("/"+dir+"/", "/../") && !strings.Contains(m.at, "..") {
					t.Errorf("%s of %+v is %s", g, m, dir)
				}
			}
		}
		fields(text)
		sumIO(text)
	})
}
