package image

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/image/debian"
	"forkd.dev/forkd/internal/image/debian/debiantest"
)

// packages is a tiny distribution that has everything a root file system can trip over.
func packages() []debiantest.Package {
	return []debiantest.Package{
		{
			Name: "base-files", Version: "12", Fields: "Essential: yes\nPriority: required\n",
			Files: []debiantest.File{
				{Name: "./", Mode: 0o755},
				{Name: "./tmp/", Mode: 0o1777},
				{Name: "./root/", Mode: 0o700},
				{Name: "./bin/", Mode: 0o755},
				{Name: "./etc/", Mode: 0o755},
				{Name: "./etc/issue", Mode: 0o644, Data: "hello"},
				{Name: "./var/run", Type: tar.TypeSymlink, Link: "/run", Mode: 0o777},
				{Name: "./run/", Mode: 0o755},
			},
			Scripts: map[string]string{"conffiles": "/etc/issue\n/etc/not-shipped\nremove-on-upgrade /etc/old\n", "md5sums": ""},
		},
		{
			Name: "base-passwd", Version: "3", Fields: "Essential: yes\nPriority: required\n",
			Scripts: map[string]string{"preinst": "#!/bin/sh\n"},
		},
		{
			Name: "libc6", Version: "2.36", Fields: "Priority: optional\nMulti-Arch: same\n",
			Files: []debiantest.File{
				{Name: "./lib/x86_64-linux-gnu/libc.so.6", Mode: 0o755, Data: "libc"},
				{Name: "./lib64/", Mode: 0o755},
				{Name: "./lib64/ld.so", Type: tar.TypeSymlink, Link: "/lib/x86_64-linux-gnu/ld.so", Mode: 0o777},
			},
			Scripts: map[string]string{"triggers": "interest-noawait /usr/lib # x\ninterest ldconfig\nactivate y\n", "postinst": "#!/bin/sh\n"},
		},
		{
			Name: "sh", Version: "1", Fields: "Essential: yes\nPriority: required\nPre-Depends: libc6\n",
			Files: []debiantest.File{
				{Name: "./bin/", Mode: 0o755},
				{Name: "./bin/su", Mode: 0o4755, UID: 0, Data: "su"},
				{Name: "./bin/sh", Mode: 0o755, Data: "shell", PAX: map[string]string{"SCHILY.xattr.security.capability": "\x01\x02"}},
				{Name: "./usr/bin/ash", Type: tar.TypeLink, Link: "./bin/sh", Mode: 0o755},
				{Name: "./var/mail/", Mode: 0o2775, UID: 8},
				{Name: "./var/run/sh/", Mode: 0o755},
				{Name: "./var/run/sh/pid", Mode: 0o600, Data: "1"},
			},
		},
		{Name: "apt", Version: "2.6", Fields: "Priority: important\n"},
		{Name: "usr-is-merged", Version: "37"},
		{
			Name: "app", Version: "1", Fields: "Depends: runtime\n",
			Files:   []debiantest.File{{Name: "./usr/share/app/x", Mode: 0o644, Data: "x"}},
			Scripts: map[string]string{"postinst": "#!/bin/sh\n"},
		},
		{
			Name: "runtime", Version: "1", Fields: "Pre-Depends: runtime-minimal\n", Scripts: map[string]string{"preinst": "#!/bin/sh\n"},
			Files: []debiantest.File{{Name: "./usr/bin/runtime", Mode: 0o755, Data: "runtime"}},
		},
		{Name: "runtime-minimal", Version: "1", Fields: "Depends: runtime-data\n"},
		{Name: "runtime-data", Version: "1"},
	}
}

type member struct {
	Header *tar.Header
	Data   string
}

func (m member) String() string {
	h := m.Header
	text := fmt.Sprintf("%s %c %04o %d:%d", h.Name, h.Typeflag, h.Mode, h.Uid, h.Gid)
	if h.Linkname != "" {
		text += " -> " + h.Linkname
	}
	return text
}

func plan(t *testing.T, recipe string, files fs.FS, list ...debiantest.Package) (*Plan, error) {
	t.Helper()
	a := debiantest.Serve(t)
	a.Suite(t, "bookworm", "", list...)
	a.Suite(t, "bookworm-updates", "")
	a.Suite(t, "bookworm-security", "")
	r, err := ParseRecipe("recipe.yaml", []byte(recipe))
	if err != nil {
		t.Fatal(err)
	}
	p, err := Resolve(t.Context(), r, files, Host{Root: a.Host(t), CacheDir: t.TempDir(), Arch: "amd64", Now: debiantest.Now})
	if err == nil {
		t.Cleanup(p.Close)
	}
	return p, err
}

func rootfs(t *testing.T, p *Plan) (map[string]member, []string, error) {
	t.Helper()
	var b bytes.Buffer
	if err := p.WriteRootfs(t.Context(), &b); err != nil {
		return nil, nil, err
	}
	members := map[string]member{}
	var order []string
	tr := tar.NewReader(&b)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return members, order, nil
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(h.Name, "/")
		if _, twice := members[name]; twice {
			t.Errorf("%s is in the stream twice", name)
		}
		members[name] = member{h, string(data)}
		order = append(order, name)
	}
}

const testRecipe = `base: debian:bookworm
packages: [app]
files:
  - {source: app, path: /srv/it's, owner: agent}
  - {content: "a: b\n", path: /etc/app.yaml, mode: "0600"}
env: {KEY: value}
user: agent
run: [echo hi]
`

func testFiles() fstest.MapFS {
	return fstest.MapFS{
		"app/run.sh": {Data: []byte("#!/bin/sh\n"), Mode: 0o755}, "app/data/x": {Data: []byte("x"), Mode: 0o640},
		"recipe.yaml": {Data: []byte(testRecipe)},
	}
}

func TestRootfs(t *testing.T) {
	p, err := plan(t, testRecipe, testFiles(), packages()...)
	if err != nil {
		t.Fatal(err)
	}
	members, order, err := rootfs(t, p)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"bin 2 0777 0:0 -> usr/bin", "lib64 2 0777 0:0 -> usr/lib64",
		"tmp/ 5 1777 0:0", "root/ 5 0700 0:0", "usr/bin/su 0 4755 0:0", "usr/bin/sh 0 0755 0:0",
		"usr/bin/ash 1 0755 0:0 -> usr/bin/sh", "var/mail/ 5 2775 8:0", "run/sh/pid 0 0600 0:0",
		"usr/lib/x86_64-linux-gnu/libc.so.6 0 0755 0:0", "usr/lib64/ld.so 2 0777 0:0 -> /lib/x86_64-linux-gnu/ld.so",
		"var/lib/dpkg/info/base-passwd.preinst 0 0755 0:0", "var/lib/dpkg/info/libc6:amd64.list 0 0644 0:0",
		"var/cache/forkd/debs/runtime.deb 0 0644 0:0", "etc/machine-id 0 0444 0:0", "usr/sbin/policy-rc.d 0 0755 0:0",
	} {
		name, _, _ := strings.Cut(want, " ")
		if got := members[strings.TrimSuffix(name, "/")]; got.Header == nil || got.String() != want {
			t.Errorf("want %q, got %v", want, got)
		}
	}
	if got := members["usr/bin/sh"].Header.PAXRecords["SCHILY.xattr.security.capability"]; got != "\x01\x02" {
		t.Errorf("extended attribute is %q", got)
	}
	if members["usr/bin/sh"].Header.Uname != "" {
		t.Error("owners have names")
	}
	for _, absent := range []string{"usr/bin/runtime", "bin/sh", "var/run/sh", "var/lib/dpkg/info/runtime.list", "usr/share/doc"} {
		if _, has := members[absent]; has {
			t.Errorf("%s is there", absent)
		}
	}
	checkParents(t, members, order)
	checkDatabase(t, members)
	if got := members["etc/forkd/image.json"].Data; !strings.Contains(got, `"KEY": "value"`) || !strings.Contains(got, `"workdir": "/home/agent"`) {
		t.Errorf("image.json is %s", got)
	}
	deb, err := debian.ReadDeb(strings.NewReader(members["var/cache/forkd/debs/runtime.deb"].Data))
	if err != nil || deb.Control.Get("Package") != "runtime" {
		t.Errorf("the .deb handed in: %v", err)
	}
}

// checkParents: what extracts the stream needs neither to make directories nor to follow links.
func checkParents(t *testing.T, members map[string]member, order []string) {
	t.Helper()
	seen := map[string]bool{".": true}
	for _, name := range order {
		if dir := filepath.Dir(name); !seen[dir] || dir != "." && members[dir].Header.Typeflag != tar.TypeDir {
			t.Errorf("%s comes before its directory, or through a link", name)
		}
		seen[name] = true
	}
}

func checkDatabase(t *testing.T, members map[string]member) {
	t.Helper()
	status := members["var/lib/dpkg/status"].Data
	want := "Package: base-files\nStatus: install ok unpacked\nVersion: 12\nMaintainer: T <t@example.org>\nArchitecture: amd64\n" +
		"Essential: yes\nPriority: required\nDescription: test package\n with a second line\n" +
		"Conffiles:\n /etc/issue 5d41402abc4b2a76b9719d911017c592\n /etc/not-shipped newconffile\n\n"
	if !strings.Contains(status, want) {
		t.Errorf("status is\n%s", status)
	}
	if strings.Contains(status, "Package: runtime\n") || !strings.Contains(status, "Package: app\n") {
		t.Errorf("status has the wrong packages:\n%s", status)
	}
	for name, want := range map[string]string{
		"info/sh.list":            "/bin\n/bin/su\n/bin/sh\n/usr/bin/ash\n/var/mail\n/var/run/sh\n/var/run/sh/pid\n",
		"info/base-files.list":    "/.\n/tmp\n/root\n/bin\n/etc\n/etc/issue\n/var/run\n/run\n",
		"info/app.md5sums":        "9dd4e461268c8034f5c8564e155c67a6  usr/share/app/x\n",
		"info/base-files.md5sums": "",
		"info/format":             "1\n",
		"triggers/File":           "/usr/lib libc6:amd64/noawait\n",
		"triggers/ldconfig":       "libc6:amd64\n",
		"diversions":              "",
	} {
		got, has := members["var/lib/dpkg/"+name]
		if !has || got.Data != want {
			t.Errorf("%s is %q, want %q", name, got.Data, want)
		}
	}
}

func TestRootfsIsDeterministic(t *testing.T) {
	p, err := plan(t, testRecipe, testFiles(), packages()...)
	if err != nil {
		t.Fatal(err)
	}
	var a, b bytes.Buffer
	if err := p.WriteRootfs(t.Context(), &a); err != nil {
		t.Fatal(err)
	}
	if err := p.WriteRootfs(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(a.Bytes(), b.Bytes()) {
		t.Error("two streams of one plan differ")
	}
}

func TestOverlappingFiles(t *testing.T) {
	file := debiantest.File{Name: "./usr/share/x", Mode: 0o644, Data: "1"}
	second := debiantest.File{Name: "./usr/share/x", Mode: 0o644, Data: "2"}
	dir := debiantest.File{Name: "./usr/share/x/", Mode: 0o755}
	link := debiantest.File{Name: "./usr/share/x", Type: tar.TypeSymlink, Link: "y", Mode: 0o777}
	outside := debiantest.File{Name: "./usr/share/x", Type: tar.TypeSymlink, Link: "../../../../etc", Mode: 0o777}
	through := debiantest.File{Name: "./usr/share/x/passwd", Mode: 0o644, Data: "2"}
	loop := debiantest.File{Name: "./usr/share/x", Type: tar.TypeSymlink, Link: "x", Mode: 0o777}
	for _, c := range []struct {
		name         string
		aFields      string
		a            debiantest.File
		bFields      string
		b            debiantest.File
		want, result string
	}{
		{"conflict", "", file, "", second, "is also in package a 1, and neither declares to replace the other", ""},
		{"second replaces", "", file, "Replaces: a\n", second, "TWICE", "2"},
		{"first replaces", "Replaces: b (<< 2)\n", file, "", second, "", "1"},
		{"replaces another version", "Replaces: b (<< 1)\n", file, "", second, "neither declares", ""},
		{"directory and file", "", file, "", dir, "is a directory in one package and a file in another", ""},
		{"link on a directory", "", dir, "", link, "", ""},
		{"directory on a link", "", link, "", dir, "", ""},
		{"link climbs only to the root", "", outside, "", through, "", ""},
		{"link to itself", "", loop, "", through, "too many symbolic links", ""},
		{"leaves the package", "", debiantest.File{Name: "./../x", Data: "x"}, "", second, "leaves the package", ""},
		{"hard link to nothing", "", debiantest.File{Name: "./y", Type: tar.TypeLink, Link: "./nothing"}, "", second, "which is not before it", ""},
		{"hard link leaves", "", debiantest.File{Name: "./y", Type: tar.TypeLink, Link: "../../x"}, "", second, "leaves the package", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			list := append(packages()[:6],
				debiantest.Package{Name: "a", Version: "1", Fields: c.aFields, Files: []debiantest.File{c.a}},
				debiantest.Package{Name: "b", Version: "1", Fields: c.bFields, Files: []debiantest.File{c.b}})
			p, err := plan(t, "base: debian:bookworm\npackages: [a, b]\n", fstest.MapFS{}, list...)
			if err != nil {
				t.Fatal(err)
			}
			if c.want == "TWICE" { // the later member wins, as in any tar.
				c.want = ""
				var b bytes.Buffer
				if err := p.WriteRootfs(t.Context(), &b); err != nil {
					t.Fatal(err)
				}
				if got := lastContent(t, &b, "usr/share/x"); got != c.result {
					t.Errorf("got %q", got)
				}
				return
			}
			members, order, err := rootfs(t, p)
			if c.want != "" {
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("got %v, want %q", err, c.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			checkParents(t, members, order)
			if c.result != "" && members["usr/share/x"].Data != c.result {
				t.Errorf("got %q", members["usr/share/x"].Data)
			}
			if c.name == "link climbs only to the root" && members["etc/passwd"].Data != "2" {
				t.Errorf("order is %v", order)
			}
		})
	}
}

func lastContent(t *testing.T, r io.Reader, name string) string {
	t.Helper()
	found := ""
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Name == name {
			data, err := io.ReadAll(tr)
			if err != nil {
				t.Fatal(err)
			}
			found = string(data)
		}
	}
}

func TestResolveFaults(t *testing.T) {
	for _, c := range []struct{ name, recipe, want string }{
		{"unknown package", "base: debian:bookworm\npackages: [runtim]\n", `package "runtim" is not in bookworm, bookworm-updates, bookworm-security; similar names: runtime`},
		{"missing source", "base: debian:bookworm\nfiles: [{source: nope, path: /x}]\n", `recipe file "nope" does not exist in the recipe's directory`},
		{"missing code", "base: debian:bookworm\nwarmup: {context: python, code_file: nope.py}\n", `recipe code_file "nope.py"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := plan(t, c.recipe, testFiles(), packages()...); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

func TestSourcesStayInTheRecipesDirectory(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	for _, source := range []string{"link", "."} {
		if list, err := StageFiles(root.FS(), []File{{Source: source, Path: "/x"}}); err == nil {
			t.Errorf("%s: staged %+v", source, list)
		}
	}
}

func TestDigest(t *testing.T) {
	digest := func(recipe string, files fs.FS, list []debiantest.Package) string {
		p, err := plan(t, recipe, files, list...)
		if err != nil {
			t.Fatal(err)
		}
		return p.Digest
	}
	base := digest(testRecipe, testFiles(), packages())
	if again := digest(testRecipe, testFiles(), packages()); again != base {
		t.Error("the same recipe has two digests")
	}
	if warm := digest(testRecipe+"warmup: {command: ls}\nmachine: {memory: 1GiB}\n", testFiles(), packages()); warm != base {
		t.Error("memory and warm-up change the image")
	}
	if run := digest(strings.Replace(testRecipe, "echo hi", "echo ho", 1), testFiles(), packages()); run != base {
		t.Error("commands, which are steps on top of it, change the image")
	}
	changed := testFiles()
	changed["app/data/x"] = &fstest.MapFile{Data: []byte("y"), Mode: 0o640}
	upgraded := packages()
	upgraded[len(upgraded)-1].Version = "2"
	for name, other := range map[string]string{
		"file":    digest(testRecipe, changed, packages()),
		"package": digest(testRecipe, testFiles(), upgraded),
		"env":     digest(strings.Replace(testRecipe, "KEY: value", "KEY: other", 1), testFiles(), packages()),
		"user":    digest(strings.Replace(testRecipe, "user: agent", "user: other", 1), testFiles(), packages()),
		"mode":    digest(strings.Replace(testRecipe, "0600", "0644", 1), testFiles(), packages()),
		"disk":    digest(testRecipe+"machine: {disk: 9GiB}\n", testFiles(), packages()),
	} {
		if other == base {
			t.Errorf("a change of %s does not change the digest", name)
		}
	}
}

func TestFileThatChangesMeanwhile(t *testing.T) {
	files := testFiles()
	p, err := plan(t, testRecipe, files, packages()...)
	if err != nil {
		t.Fatal(err)
	}
	files["app/run.sh"] = &fstest.MapFile{Data: []byte("#!/bin/sh\r"), Mode: 0o755}
	if err := p.WriteRootfs(t.Context(), io.Discard); err == nil || !strings.Contains(err.Error(), "changed during the build") {
		t.Errorf("got %v", err)
	}
}

func TestCancelledRootfs(t *testing.T) {
	p, err := plan(t, testRecipe, testFiles(), packages()...)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.WriteRootfs(ctx, io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestSteps(t *testing.T) {
	p, err := plan(t, testRecipe, testFiles(), packages()...)
	if err != nil {
		t.Fatal(err)
	}
	steps := p.Steps()
	var got []string
	for _, s := range steps {
		got = append(got, s.Name)
	}
	want := []string{"prepare packages", "configure packages", "compile Python code", "make user agent", "copy files", "clean up"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	for _, s := range steps {
		if out, err := shell(t, "", nil, "-n", "-c", s.Argv[2]); err != nil {
			t.Errorf("%s: %v: %s", s.Name, err, out)
		}
	}
}

// shell runs /bin/sh.
func shell(t *testing.T, dir string, env []string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/bin/sh", args...)
	cmd.Dir, cmd.Env = dir, append(env, "PATH="+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// TestConfigureOrder runs the script with a dpkg that only writes down what it is asked.
func TestConfigureOrder(t *testing.T) {
	p, err := plan(t, testRecipe, testFiles(), packages()...)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	debs := filepath.Join(dir, debsDir)
	if err := os.MkdirAll(debs, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(debs, "runtime.deb"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	dpkg := filepath.Join(dir, "dpkg")
	if err := os.WriteFile(dpkg, []byte("#!/bin/sh\necho \"$@\"\n"), 0o700); err != nil { //nolint:gosec // a program.
		t.Fatal(err)
	}
	script := strings.ReplaceAll(p.configureScript(), "/"+debsDir, debs)
	script = strings.ReplaceAll(script, `"dpkg --force-unsafe-io --force-confdef --force-confold"`, dpkg)
	out, err := shell(t, dir, nil, "-ec", script)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	want := `--configure usr-is-merged base-files base-passwd sh apt libc6
--configure runtime-data runtime-minimal
--unpack runtime.deb
--configure -a
`
	if d := cmp.Diff(want, out); d != "" {
		t.Error(d)
	}
}

func TestFilesScript(t *testing.T) {
	dir := t.TempDir()
	staged := filepath.Join(dir, stagingDir)
	if err := os.MkdirAll(staged, 0o700); err != nil {
		t.Fatal(err)
	}
	owner := fmt.Sprintf("%d:%d", os.Getuid(), os.Getgid())
	p := &Plan{files: []StagedFile{
		{Path: dir + "/it's", Dir: true, Mode: 0o750, Owner: owner},
		{Path: dir + "/it's/a $file", Mode: 0o640, Owner: owner},
		{Path: dir + "/deep/er/x", Mode: 0o4755, Owner: owner},
	}}
	for i, data := range []string{"1", "2"} {
		if err := os.WriteFile(filepath.Join(staged, fmt.Sprint(i+1)), []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	out, err := shell(t, dir, nil, "-ec", strings.ReplaceAll(p.filesScript(), "/"+stagingDir, staged))
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for name, want := range map[string]fs.FileMode{
		"it's": fs.ModeDir | 0o750, "it's/a $file": 0o640, "deep/er/x": fs.ModeSetuid | 0o755,
	} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
}

// TestMaintscriptHelper: only calls that concern no upgrade are cut short.
func TestMaintscriptHelper(t *testing.T) {
	script := strings.ReplaceAll(maintscriptHelper, "exec /usr/bin/dpkg-maintscript-helper", "echo real")
	for _, c := range []struct {
		name string
		args []string
		real bool
	}{
		{"preinst", []string{"rm_conffile", "/x", "1", "--", "install"}, false},
		{"preinst", []string{"rm_conffile", "/x", "1", "--", "install", ""}, false},
		{"postinst", []string{"dir_to_symlink", "/x", "y", "1", "--", "configure", ""}, false},
		{"postinst", []string{"rm_conffile", "/x", "1", "--", "configure", "0.9"}, true},
		{"preinst", []string{"rm_conffile", "/x", "1", "--", "upgrade", "0.9"}, true},
		{"postinst", []string{"supports", "rm_conffile"}, true},
		{"postrm", []string{"rm_conffile", "/x", "1", "--", "purge"}, true},
		{"postinst", []string{"rm_conffile", "/x", "1", "--", "abort-upgrade", ""}, true},
	} {
		out, err := shell(t, "", []string{"DPKG_MAINTSCRIPT_NAME=" + c.name}, append([]string{"-ec", script, "helper"}, c.args...)...)
		if err != nil || strings.HasPrefix(out, "real") != c.real {
			t.Errorf("%s %v: %q, %v", c.name, c.args, out, err)
		}
	}
}

func TestGraphOrder(t *testing.T) {
	list := []*debian.Package{
		{Name: "a", Depends: "b, v"}, {Name: "b", Depends: "a | c"}, {Name: "c", Provides: "v"}, {Name: "d", PreDepends: "a"},
	}
	g := newGraph(list)
	var names []string
	for _, p := range g.order(list) {
		names = append(names, p.Name)
	}
	if d := cmp.Diff([]string{"c", "b", "a", "d"}, names); d != "" {
		t.Error(d)
	}
	if got := g.order(g.preDepends(list[3])); len(got) != 3 || slices.Contains(got, list[3]) {
		t.Errorf("pre-depends of d: %v", got)
	}
}
