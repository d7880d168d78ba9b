package account

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/agent/agenttest"
	"forkd.dev/forkd/internal/guest/wire"
)

func newTable(t *testing.T, passwd, group string, d Defaults) *Table {
	t.Helper()
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"passwd": passwd, "group": group} {
		if err := os.WriteFile(filepath.Join(root, "etc", name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return New(root, d)
}

const (
	passwd = "root:x:0:0:root:/root:/bin/bash\n" +
		"# a comment\n\n:::\nbroken:x:1\nodd:x:-1:5::/:\n+::::::\n" +
		"user:x:1000:1001:A User,,,:/home/user:/bin/sh\n" +
		"user:x:7:7::/shadowed:\n" +
		"lost:x:1002:1002:::\n"
	group = "root:x:0:\nuser:x:1001:\nsudo:x:27:other,user\ndocker:x:999:user\nmine:x:1001:user\nbad:x:y:user\n"
)

func TestUser(t *testing.T) {
	table := newTable(t, passwd, group, Defaults{User: "user"})
	user := &User{Name: "user", UID: 1000, GID: 1001, Groups: []uint32{27, 999}, Home: "/home/user", Shell: "/bin/sh"}
	for name, want := range map[string]*User{
		"":            user,
		"user":        user,
		"1000":        user,
		"root":        {Name: "root", Home: "/root", Shell: "/bin/bash"},
		"0":           {Name: "root", Home: "/root", Shell: "/bin/bash"},
		"lost":        {Name: "lost", UID: 1002, GID: 1002, Home: "/"},
		"12345":       {Name: "12345", UID: 12345, Home: "/"}, // as images mean it
		"user:docker": {Name: "user", UID: 1000, GID: 999, Home: "/home/user", Shell: "/bin/sh"},
		"1000:7":      {Name: "user", UID: 1000, GID: 7, Home: "/home/user", Shell: "/bin/sh"},
		"12345:sudo":  {Name: "12345", UID: 12345, GID: 27, Home: "/"},
	} {
		got, err := table.User(name)
		if err != nil {
			t.Errorf("%q: %v", name, err)
			continue
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q: %s", name, diff)
		}
	}
	for _, name := range []string{"nobody-here", "odd", "broken", "-1", "4294967295", "99999999999", "user:x", "user:", "user:bad", "user:-1", "#"} {
		if u, err := table.User(name); agenttest.Code(err) != wire.CodeUnknownUser {
			t.Errorf("%q: %+v %v", name, u, err)
		}
	}
	if u, err := New(t.TempDir(), Defaults{}).User(""); err != nil || u.UID != 0 || u.Home != "/root" {
		t.Errorf("without /etc/passwd: %+v %v", u, err)
	}
}

func TestEnviron(t *testing.T) {
	table := newTable(t, passwd, group, Defaults{Env: map[string]string{"A": "1", "B": "1", "PATH": "/image"}})
	table.SetEnv(map[string]string{"B": "2", "C": "2"})
	u := &User{Name: "user", Home: "/home/user"}
	got, err := table.Environ(u, map[string]string{"C": "3", "HOME": "/elsewhere", "D": "a=b"})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"PATH=/image", "HOME=/elsewhere", "USER=user", "LOGNAME=user", "A=1", "B=2", "C=3", "D=a=b"}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	table.SetDefaults(Defaults{Env: map[string]string{"HOME": "/root", "USER": "root", "A": "1"}})
	got, err = table.Environ(&User{Name: "user", UID: 1000, Home: "/home/user"}, nil)
	if want := []string{"PATH=" + defaultPath, "HOME=/home/user", "USER=user", "LOGNAME=user", "A=1", "B=2", "C=2"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("not the image's user: %q, %v", got, err)
	}
	table.SetDefaults(Defaults{Env: map[string]string{"HOME": "/opt/root"}})
	if got, err = table.Environ(&User{Name: "root", Home: "/root"}, nil); err != nil || got[1] != "HOME=/opt/root" {
		t.Errorf("the image's user: %q, %v", got, err)
	}
	for _, bad := range []map[string]string{{"": "x"}, {"A=B": "x"}, {"A": "x\x00"}, {"A\x00": "x"}} {
		if _, err := table.Environ(u, bad); agenttest.Code(err) != wire.CodeInvalid {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestPathAndDir(t *testing.T) {
	home := t.TempDir()
	u := &User{Home: home}
	for path, want := range map[string]string{"~": home, "~/x": home + "/x", "x/../y": home + "/y", "/a//b/": "/a/b", "~x": home + "/~x", ".": home} {
		if got := Path(u, path); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
	table := New("/", Defaults{})
	if got, err := table.Dir(u, ""); err != nil || got != home {
		t.Errorf("%s %v", got, err)
	}
	table.SetDefaults(Defaults{Workdir: "/"})
	if got, _ := table.Dir(u, ""); got != "/" {
		t.Error(got)
	}
	if got, _ := New("/", Defaults{}).Dir(&User{Home: "/no/such"}, ""); got != "/" {
		t.Error(got)
	}
	if _, err := table.Dir(u, "missing"); agenttest.Code(err) != wire.CodeInvalid {
		t.Error(err)
	}
}

func FuzzUser(f *testing.F) {
	f.Add(passwd, group, "user")
	f.Add(strings.Repeat("a", 100000), "::::", "0")
	f.Fuzz(func(t *testing.T, passwd, group, name string) {
		table := newTable(t, passwd, group, Defaults{})
		u, err := table.User(name)
		if err == nil && (u.UID == 1<<32-1 || !filepath.IsAbs(u.Home)) {
			t.Errorf("%+v", u)
		}
		table.Names()
	})
}
