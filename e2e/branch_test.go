package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

// checksum is of a variable that tests fill with random bytes. (Python remembers the hash of one.)
const checksum = `__import__("zlib").crc32(state)`

// TestBranchModes: the reply says what was done, and a mode that was asked for is the one that is used.
func TestBranchModes(t *testing.T) {
	f := shared(t)
	for _, mode := range modes() {
		t.Run(mode, func(t *testing.T) {
			f := &forkd{t, f.bin, f.home, f.env}
			needMode(t, f, mode)
			source := f.one()
			f.eval(source, "import os; state = os.urandom(8 << 20)")
			s := f.branch(source, "-t", "modes-"+mode, "--mode", mode)
			wantParent := parentTag
			if mode == full {
				wantParent = ""
			}
			if s.Tag != "modes-"+mode || s.Status != "ready" || s.Mode != mode || s.ModeReason == "" || s.PauseMS <= 0 ||
				s.FrozenMS < s.PauseMS || s.Parent != wantParent || s.BranchedFrom != source || s.MemoryOwnBytes < 8<<20 {
				t.Errorf("the reply: %+v", s)
			}
			child := f.forkOf(s.Tag, 1)[0]
			if got, want := f.eval(child.ID, checksum), f.eval(source, checksum); got != want {
				t.Errorf("the child's state has checksum %s, its source's %s", got, want)
			}
			if code, e := f.rest(http.MethodPost, "/v1/sandboxes/"+source+"/branch", `{"mode":"`+mode+`","tag":"modes-`+mode+`"}`); code != 409 ||
				e.Code != api.CodeExists || e.Hint == "" {
				t.Errorf("a tag that exists: %d %+v", code, e)
			}
		})
	}
	t.Run("auto", func(t *testing.T) {
		f := &forkd{t, f.bin, f.home, f.env}
		source := f.one()
		s := f.branch(source)
		if s.Mode != live && s.Mode != diff || !strings.HasPrefix(s.ModeReason, "auto: ") || !strings.HasPrefix(s.Tag, "branch-"+source) {
			t.Errorf("the reply: %+v", s)
		}
		again := f.branch(source)
		if again.Parent != s.Tag {
			t.Errorf("the second branch stands on %q, want the first, %q", again.Parent, s.Tag)
		}
		if b := f.sandbox(source); b.BranchCount != 2 || b.LatestBranch != again.Tag {
			t.Errorf("the source: %+v", b)
		}
		if code, e := f.rest(http.MethodPost, "/v1/sandboxes/"+source+"/branch", `{"mode":"quick"}`); code != 400 || !strings.Contains(e.Message, "quick") {
			t.Errorf("an unknown mode: %d %+v", code, e)
		}
		if code, e := f.rest(http.MethodPost, "/v1/sandboxes/"+source+"/branch", `{"parent_tag":"`+parentTag+`"}`); code != 400 ||
			!strings.Contains(e.Message, again.Tag) {
			t.Errorf("another parent: %d %+v", code, e)
		}
	})
}

// TestHugePages: an emulated machine does without them, and the daemon does not: it makes a source's memory quick to protect
// by them. A daemon that does without makes every pause of a live branch three times as long.
func TestHugePages(t *testing.T) {
	f := shared(t)
	pid := f.sandbox(f.one()).PID
	if !strings.Contains(readFile(t, fmt.Sprintf("/proc/%d/cmdline", pid)), "tcg") {
		t.Skip("machines are not emulated here")
	}
	for _, p := range []struct {
		what string
		pid  int
		want string
	}{{"the machine", pid, "0"}, {"the daemon", f.status().PID, "1"}} {
		_, value, known := strings.Cut(readFile(t, fmt.Sprintf("/proc/%d/status", p.pid)), "THP_enabled:")
		if !known {
			t.Skip("the kernel does not tell who does without huge pages")
		}
		if got := strings.Fields(value)[0]; got != p.want {
			t.Errorf("THP_enabled of %s is %s, want %s", p.what, got, p.want)
		}
	}
}

// TestBranchNoWait: the call returns while the snapshot is written, which can be forked at once and becomes ready by itself.
func TestBranchNoWait(t *testing.T) {
	f := shared(t)
	source := f.one()
	f.eval(source, "import os; state = os.urandom(96 << 20)")
	f.branch(source, "-t", "nowait-0") // the first populates
	f.eval(source, "state = os.urandom(96 << 20)")
	begun := time.Now()
	s := f.branch(source, "-t", "nowait-1", "--no-wait")
	took := time.Since(begun)
	if s.Status != "writing" || s.PauseMS <= 0 {
		t.Errorf("with --no-wait: %+v", s)
	}
	child := f.forkOf(s.Tag, 1)[0]
	if got, want := f.eval(child.ID, checksum), f.eval(source, checksum); got != want {
		t.Errorf("the child's state has checksum %s, its source's %s", got, want)
	}
	info := f.info(s.Tag)
	t.Logf("returned after %s, ready: %+v", took, info.Snapshot)
	if info.Status != "ready" || info.Parent != "nowait-0" || info.MemoryOwnBytes < 96<<20 || !slices.Equal(info.Ancestors, []string{parentTag, "nowait-0"}) {
		t.Errorf("at last: %+v", info)
	}

	var published api.Snapshot
	mode := "--live"
	if s.Mode != live {
		mode = "--diff"
	}
	f.json(&published, "snapshot", "--from-sandbox", source, "--tag", "nowait-2", mode, "--no-wait")
	if published.Mode != s.Mode || published.Status != "writing" && published.Status != "ready" {
		t.Errorf("the published command line: %+v", published)
	}
	switch code, e := f.rest(http.MethodDelete, "/v1/snapshots/nowait-2", ""); {
	case code == http.StatusNoContent: // it was ready
	case code != 409 || e.Hint == "":
		t.Errorf("removing what is being written: %d %+v", code, e)
	default:
		if info := f.info("nowait-2"); info.Status != "ready" {
			t.Errorf("at last: %+v", info)
		}
		f.remove("nowait-2")
	}
}

// TestBranchWithChildren: branch and fork in one call.
func TestBranchWithChildren(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	source := f.one()
	f.eval(source, "state = 'of the source'")
	s := f.branch(source, "-t", "children", "-n", "3", "--label", "of=branch", "--ttl", "10m")
	if len(s.Children) != 3 {
		t.Fatalf("children: %+v", s)
	}
	for i, c := range s.Children {
		t.Cleanup(func() { f.try("kill", c.ID) })
		if c.Error != nil || c.SnapshotTag != "children" || c.Index != i || c.Labels["of"] != "branch" || c.ExpiresAtUnix == 0 {
			t.Errorf("child %d: %+v", i, c)
			continue
		}
		if got := f.eval(c.ID, "state"); got != "'of the source'" {
			t.Errorf("child %d sees %s", i, got)
		}
	}
	r := f.try("branch", source, "-t", "children-q", "-q", "-n", "1")
	if lines := strings.Fields(r.stdout); r.code != 0 || len(lines) != 2 || lines[0] != "children-q" {
		t.Errorf("with -q: %+v", r)
	} else {
		f.run("kill", lines[1])
	}
	f.remove("children-q")
	if r := f.try("branch", source, "--ttl", "3s"); r.code != 2 {
		t.Errorf("--ttl without -n: %+v", r)
	}
	if r := f.try("branch", "sbnosuchsandbox"); r.code != 1 || !strings.Contains(r.stderr, "not found") {
		t.Errorf("branch of nothing: %+v", r)
	}
}

// TestBranchClone: children of a branch differ from each other, from the source and from their cousins, as any do; and
// what of the source's processes cannot be renewed is named.
func TestBranchClone(t *testing.T) {
	f := shared(t)
	source := f.one()
	f.run("exec", source, "--", "sh", "-c", "setsid sleep 12345 >/dev/null 2>&1 </dev/null &")
	f.eval(source, "open('/root/source', 'w').write('the source'); state = 'the source'")
	s := f.branch(source, "-t", "clone")
	all := []string{source, f.one()}
	for _, c := range f.forkOf(s.Tag, 5) {
		all = append(all, c.ID)
		var names []string
		for _, n := range c.CloneReport.NotRenewed {
			names = append(names, n.Name)
		}
		if !strings.Contains(strings.Join(names, "\n"), "sleep 12345") {
			t.Errorf("%s: not_renewed does not name the running process: %q", c.ID, names)
		}
		if got := f.eval(c.ID, "state + open('/root/source').read()"); got != "'the sourcethe source'" {
			t.Errorf("%s sees %s", c.ID, got)
		}
		if off := clockError(t, f, c.ID); off > 50*time.Millisecond {
			t.Errorf("%s: its clock is off by %s", c.ID, off)
		}
	}
	for i := range 2 { // the source's come first
		seen := identities{}
		for _, id := range all {
			seen.differ(t, f, id)
		}
		if i == 0 { // A capture must not bring back what was renewed before it.
			f.branch(source, "-t", "clone-2")
			all = append(all, f.forkOf("clone-2", 1)[0].ID)
		}
	}
	isolation(t, f, all[2], all[3], all[4])
	isolation(t, f, source, all[5], all[6])
}

// TestBranchRunsOn: clients of the source notice nothing, and what ran for them at the capture runs on in the child, where
// it can be found and read.
func TestBranchRunsOn(t *testing.T) {
	f := shared(t)
	f.freely()
	source := f.one()
	const n = 150
	counting := "i=0; while [ $i -lt " + strconv.Itoa(n) + " ]; do echo $i; i=$((i+1)); sleep 0.03; done; exit 7"
	stream := f.start("exec", source, "--", "sh", "-c", counting)
	evaluation := f.start("eval", source, fmt.Sprintf("import time\nfor i in range(%d):\n    print(i, flush=True); time.sleep(0.03)\n'over'", n))
	api := f.client()
	await(t, 20*time.Second, "the command to be listed", func() bool {
		list, err := call.Processes(t.Context(), api.Guest(source))
		return err == nil && len(list) == 1
	})
	var tags []string
	for _, mode := range modes() {
		r := f.try("branch", source, "-t", "runson-"+mode, "--mode", mode)
		switch {
		case r.code == 0:
			tags = append(tags, "runson-"+mode)
			t.Cleanup(func() { f.try("rmi", "--cascade", "runson-"+mode) })
		case mode == live && strings.Contains(r.stderr, "unavailable"):
		default:
			t.Errorf("branch in mode %s: %+v", mode, r)
		}
		if err := api.Ping(t.Context(), source); err != nil {
			t.Errorf("after a branch in mode %s: %v", mode, err)
		}
	}
	for _, tag := range tags {
		goesOn(t, f, tag, n)
	}
	if r := stream.wait(t, time.Minute); r.code != 7 || r.stdout != numbers(0, n) {
		t.Errorf("the source's command: code %d, stderr %q, output %.200q", r.code, r.stderr, r.stdout)
	}
	if r := evaluation.wait(t, time.Minute); r.code != 0 || r.stdout != numbers(0, n)+"'over'\n" {
		t.Errorf("the source's evaluation: code %d, stderr %q, output %.200q", r.code, r.stderr, r.stdout)
	}
}

func numbers(from, to int) string {
	var s strings.Builder
	for i := from; i < to; i++ {
		fmt.Fprintln(&s, i)
	}
	return s.String()
}

// goesOn forks and reads the command that was running at the capture to its end.
func goesOn(t *testing.T, f *forkd, tag string, n int) {
	t.Helper()
	child := f.client().Guest(f.forkOf(tag, 1)[0].ID)
	list, err := call.Processes(t.Context(), child)
	if err != nil || len(list) != 1 || list[0].Config.Cmd != "sh" {
		t.Errorf("%s: the child lists %+v, %v", tag, list, err)
		return
	}
	var out strings.Builder
	end, err := call.Attach(t.Context(), child, wire.ConnectRequest{Process: wire.ProcessSelector{PID: list[0].PID}},
		call.Session{Output: call.Output{Stdout: &out}})
	if err != nil || end.ExitCode != 7 {
		t.Errorf("%s: the command ended with %+v, %v", tag, end, err)
	}
	// What was on its way to the source's client at the capture is that one's.
	first, _, _ := strings.Cut(out.String(), "\n")
	from, err := strconv.Atoi(first)
	if err != nil || out.String() != numbers(from, n) {
		t.Errorf("%s: the command printed %q", tag, out.String())
	}
}

// TestBranchSizes: a layer holds what changed, and nothing else.
func TestBranchSizes(t *testing.T) {
	f := shared(t)
	source := f.one()
	// Changed in place: what is freed has changed, too, and nobody could say how much that is.
	f.eval(source, "import os; state = numpy.frombuffer(bytearray(os.urandom(96 << 20)), dtype=numpy.uint64)")
	f.branch(source, "-t", "sizes-0")
	before := storedBytes(t, f.home)
	idle := f.branch(source, "-t", "sizes-1")
	if stored := storedBytes(t, f.home) - before; stored > 4<<20 || idle.StoredBytes > 4<<20 {
		t.Errorf("the layer of an idle branch takes %d bytes on disk; it says %d", stored, idle.StoredBytes)
	}
	const branches, changed = 10, 8 << 20
	before = storedBytes(t, f.home)
	var own int64
	for i := range branches {
		part := fmt.Sprintf("state[%d:%d]", i*changed/8, (i+1)*changed/8)
		f.eval(source, fmt.Sprintf("_ = numpy.add(%s, 1, out=%s)", part, part))
		s := f.branch(source, "-t", fmt.Sprintf("sizes-%d", i+2))
		own += s.MemoryOwnBytes
	}
	stored := storedBytes(t, f.home) - before
	t.Logf("ten branches with %d MiB changed before each: %.1f MiB of pages, %.1f MiB on disk", changed>>20, mib(own), mib(stored))
	if least, most := int64(branches*changed), int64(branches*changed)*3/2; stored > most || own < least {
		t.Errorf("ten branches take %d bytes on disk, more than %d, or have %d of their own, less than %d", stored, most, own, least)
	}
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }

// TestBranchTree: a branch of a branch of a branch, each with its own line's memory and disk, whatever is cold.
func TestBranchTree(t *testing.T) {
	testenv.OncePerRun(t)
	f := copied(t)
	const depth = 6
	id, want := f.one(), ""
	f.eval(id, "line = ''")
	for i := range depth {
		name := string(rune('a' + i))
		// What is written survives the capture on the disk itself: it is synced and dropped from the page cache.
		f.eval(id, fmt.Sprintf("line += %q; _ = open('/root/line', 'a').write(%q); import os; os.sync()", name, name))
		f.run("exec", id, "--", "sh", "-c", "echo 3 > /proc/sys/vm/drop_caches")
		want += name
		s := f.branch(id, "-t", "tree-"+name)
		if i > 0 && s.Parent != "tree-"+string(rune('a'+i-1)) {
			t.Errorf("tree-%s stands on %q", name, s.Parent)
		}
		f.eval(id, "line += '?'; _ = open('/root/line', 'a').write('?'); os.sync()") // its own, after the capture
		id = f.forkOf(s.Tag, 1)[0].ID
		onLine(t, f, id, want)
	}
	siblings := f.forkOf("tree-c", 2)
	isolation(t, f, siblings[0].ID, siblings[1].ID, id)
	onLine(t, f, siblings[0].ID, "abc")

	t.Run("shown", func(t *testing.T) {
		out := f.run("tree")
		if at, below := strings.Index(out, "snapshot tree-a"), strings.Index(out, "snapshot tree-f"); at < 0 || below < at {
			t.Errorf("the tree:\n%s", out)
		}
		s := f.info("tree-f")
		if s.ChainDepth < depth || len(s.Ancestors) != depth || s.Ancestors[0] != parentTag || s.MemorySharedBytes < s.MemoryOwnBytes ||
			s.MemoryOwnBytes <= 0 || s.DiskSharedBytes <= 0 {
			t.Errorf("the deepest: %+v", s)
		}
		if b := f.sandbox(id); b.MemoryOwnBytes <= 0 || b.MemorySharedBytes <= 0 || b.DiskSharedBytes <= 0 {
			t.Errorf("the sandbox of it: %+v", b)
		}
		if d := f.info("tree-b").Dependents; !slices.Equal(d, []string{"tree-c"}) {
			t.Errorf("on tree-b stand %q", d)
		}
	})
	t.Run("parents stay", func(t *testing.T) {
		code, e := f.rest(http.MethodDelete, "/v1/snapshots/tree-b", "")
		if code != 409 || !strings.Contains(e.Message, "tree-c") || !strings.Contains(e.Hint, "--cascade") || !strings.Contains(e.Hint, "--force") {
			t.Errorf("removing a parent: %d %+v", code, e)
		}
		if r := f.try("rmi", "--cascade", "--force", "tree-b"); r.code != 2 {
			t.Errorf("both flags: %+v", r)
		}
	})
	f.run("kill", "--all")
	f.run("daemon", "stop", "--kill")

	t.Run("cold", func(t *testing.T) {
		for name, line := range map[string]string{"tree-f": "abcdef", "tree-a": "a", "tree-d": "abcd"} {
			child := f.forkOf(name, 1)[0].ID
			onLine(t, f, child, line)
			f.run("kill", child)
		}
	})
	t.Run("compacted", func(t *testing.T) {
		f.run("compact", "tree-e", "-t", "tree-alone")
		if s := f.info("tree-alone"); s.Parent != "" || len(s.Ancestors) != 0 {
			t.Errorf("the compacted one: %+v", s)
		}
		child := f.forkOf("tree-alone", 1)[0].ID
		onLine(t, f, child, "abcde")
		f.run("kill", child)
	})
	t.Run("forced", func(t *testing.T) {
		f.run("rmi", "--force", "tree-c")
		if s := f.info("tree-d"); s.Parent != "tree-b" {
			t.Errorf("tree-d stands on %q", s.Parent)
		}
		f.run("daemon", "stop", "--kill")
		for name, line := range map[string]string{"tree-f": "abcdef", "tree-d": "abcd", "tree-b": "ab"} {
			child := f.forkOf(name, 1)[0].ID
			onLine(t, f, child, line)
			f.run("kill", child)
		}
	})
	t.Run("cascade", func(t *testing.T) {
		running := f.forkOf("tree-f", 1)[0].ID
		if r := f.try("rmi", "--cascade", "tree-b"); r.code != 1 || !strings.Contains(r.stderr, "running") {
			t.Errorf("under a sandbox: %+v", r)
		}
		f.run("kill", running)
		f.run("rmi", "--cascade", "tree-b")
		for tag := range f.tags() {
			if strings.HasPrefix(tag, "tree-") && tag != "tree-a" && tag != "tree-alone" {
				t.Errorf("%s is still there", tag)
			}
		}
		for name, line := range map[string]string{"tree-a": "a", "tree-alone": "abcde"} {
			child := f.forkOf(name, 1)[0].ID
			onLine(t, f, child, line)
			f.run("kill", child)
		}
	})
	f.remove("tree-a", "tree-alone")
	f.clean()
}

// onLine looks whether a sandbox has its own line's memory and disk.
func onLine(t *testing.T, f *forkd, id, want string) {
	t.Helper()
	f.run("exec", id, "--", "sh", "-c", "echo 3 > /proc/sys/vm/drop_caches")
	if got := f.eval(id, "(line, open('/root/line').read())"); got != fmt.Sprintf("('%s', '%s')", want, want) {
		t.Errorf("%s sees %s, want %s", id, got, want)
	}
}

// TestBranchDiskChain: however often a source is branched, its disk opens no more than 16 files, and keeps its content.
func TestBranchDiskChain(t *testing.T) {
	f := shared(t)
	source := f.one()
	longest := 0
	for i := range 20 {
		f.eval(source, fmt.Sprintf("_ = open('/root/n%d', 'w').write('%d'); import os; os.sync()", i, i))
		s := f.branch(source, "--mode", diff)
		longest = max(longest, disksOf(t, f.sandbox(source).PID))
		if i%5 == 4 {
			child := f.forkOf(s.Tag, 1)[0]
			longest = max(longest, disksOf(t, child.PID))
			sum := fmt.Sprintf("[open('/root/n%%d' %% i).read() for i in range(%d)] == [str(i) for i in range(%d)]", i+1, i+1)
			f.run("exec", child.ID, "--", "sh", "-c", "echo 3 > /proc/sys/vm/drop_caches")
			if got := f.eval(child.ID, sum); got != "True" {
				t.Errorf("after %d branches the child's disk has not all files: %s", i+1, got)
			}
			f.run("kill", child.ID)
		}
	}
	t.Logf("the longest chain has %d files", longest)
	if longest < 2 || longest > 16 {
		t.Errorf("a disk opens %d files", longest)
	}
	f.run("exec", source, "--", "sh", "-c", "echo 3 > /proc/sys/vm/drop_caches")
	if got := f.eval(source, "[open('/root/n%d' % i).read() for i in range(20)] == [str(i) for i in range(20)]"); got != "True" {
		t.Errorf("the source's disk has not all files: %s", got)
	}
}

// disksOf counts the disk files that a process has open.
func disksOf(t *testing.T, pid int) int {
	t.Helper()
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]bool{}
	for _, link := range links {
		target, err := os.Readlink(link)
		if err == nil && (strings.HasSuffix(target, ".qcow2") || strings.HasSuffix(target, ".raw") || strings.Contains(target, "/hot/")) {
			files[target] = true
		}
	}
	return len(files)
}

// TestBranchesAtOnce: whoever wants the same sandbox at the same moment gets it or is told why not.
func TestBranchesAtOnce(t *testing.T) {
	f := shared(t)
	source := f.one()
	f.eval(source, "import os; state = os.urandom(64 << 20)")
	var commands []*started
	for i := range 3 {
		commands = append(commands, f.start("branch", source, "-t", fmt.Sprintf("atonce-%d", i)))
	}
	commands = append(commands, f.start("pause", source), f.start("resume", source), f.start("branch", source, "-t", "atonce-0"))
	succeeded := 0
	for _, c := range commands {
		r := c.wait(t, time.Minute)
		if r.code == 0 {
			succeeded++
			continue
		}
		if r.code != 1 || !strings.Contains(r.stderr, "progress") && !strings.Contains(r.stderr, "exists") && !strings.Contains(r.stderr, "wrong state") {
			t.Errorf("%v: %+v", c.cmd.Args[1:], r)
		}
	}
	if succeeded == 0 {
		t.Error("nobody got it")
	}
	f.run("resume", source)
	if got := f.eval(source, "len(state)"); got != strconv.Itoa(64<<20) {
		t.Errorf("afterwards the source has %s", got)
	}
	for tag, status := range f.tags() {
		if !strings.HasPrefix(tag, "atonce-") {
			continue
		}
		if status != "ready" {
			t.Errorf("%s is %s", tag, status)
		}
		f.run("rmi", "--cascade", tag)
		break
	}
	for tag := range f.tags() {
		if strings.HasPrefix(tag, "atonce-") {
			f.run("rmi", "--cascade", tag)
		}
	}
}

// TestPause: a paused sandbox answers nobody, keeps everything, and knows the time when it runs again.
func TestPause(t *testing.T) {
	f := shared(t)
	id := f.one()
	f.eval(id, "state = 41")
	f.run("pause", id)
	f.run("pause", id) // nothing changes
	if s := f.sandbox(id); s.State != "paused" {
		t.Errorf("it is %s", s.State)
	}
	if code, e := f.rest(http.MethodPost, "/v1/sandboxes/"+id+"/exec", `{"args":["true"]}`); code != 409 || e.Code != api.CodeWrongState ||
		!strings.Contains(e.Hint, "forkd resume "+id) {
		t.Errorf("exec: %d %+v", code, e)
	}
	if r := f.try("exec", id, "--", "true"); r.code != 125 || !strings.Contains(r.stderr, "forkd resume") {
		t.Errorf("exec: %+v", r)
	}
	pass(t, 700*time.Millisecond)
	s := f.branch(id, "-t", "paused")
	if got := f.sandbox(id).State; got != "paused" {
		t.Errorf("after its branch it is %s", got)
	}
	child := f.forkOf(s.Tag, 1)[0].ID
	if got := f.eval(child, "state + 1"); got != "42" {
		t.Errorf("a child of the paused one sees %s", got)
	}
	f.run("resume", id)
	f.run("resume", id)
	for _, one := range []string{id, child} {
		if off := clockError(t, f, one); off > 50*time.Millisecond {
			t.Errorf("the clock of %s is off by %s", one, off)
		}
	}
	if got := f.eval(id, "state + 1"); got != "42" {
		t.Errorf("resumed it sees %s", got)
	}
	f.run("pause", id)
	f.run("kill", id)
}

// TestSuspend: a suspended sandbox is no process, and wakes as what it was, also with another daemon.
func TestSuspend(t *testing.T) {
	f := copied(t)
	id := f.one("--label", "job=9")
	before := storedBytes(t, f.home)
	f.eval(id, "import os; state = os.urandom(16 << 20); _ = open('/root/mine', 'w').write('kept')")
	const kept = checksum + ", open('/root/mine').read()"
	want := f.eval(id, kept)
	identity := f.run("exec", id, "--", "cat", "/etc/machine-id", "/proc/sys/kernel/random/boot_id", "/run/forkd/identity.json", "/etc/hostname")
	f.run("exec", id, "--", "sh", "-c", "setsid sleep 23456 >/dev/null 2>&1 </dev/null &")
	for round := range 3 {
		pid := f.sandbox(id).PID
		switch round {
		case 1: // from a pause
			f.run("pause", id)
		case 2: // what was branched before
			f.branch(id, "-t", "before-suspension")
		}
		f.run("suspend", id)
		f.run("suspend", id)
		if s := f.sandbox(id); s.State != "suspended" || s.PID != 0 || s.Labels["job"] != "9" {
			t.Errorf("round %d: suspended it is %+v", round, s)
		}
		if alive(pid) || len(machinesOf(f.home)) != 0 {
			t.Errorf("round %d: its process %d is there, machines %v", round, pid, machinesOf(f.home))
		}
		if code, e := f.rest(http.MethodPost, "/v1/sandboxes/"+id+"/exec", `{"args":["true"]}`); code != 409 || !strings.Contains(e.Hint, "forkd wake "+id) {
			t.Errorf("round %d: exec: %d %+v", round, code, e)
		}
		switch round {
		case 1:
			f.restart()
		case 2:
			f.killDaemon()
		}
		f.run("wake", id)
		f.run("wake", id)
		if got := f.eval(id, kept); got != want {
			t.Errorf("round %d: awake it sees %s", round, got)
		}
		if got := f.run("exec", id, "--", "cat", "/etc/machine-id", "/proc/sys/kernel/random/boot_id", "/run/forkd/identity.json", "/etc/hostname"); got != identity {
			t.Errorf("round %d: it was\n%s\nand is\n%s", round, identity, got)
		}
		if off := clockError(t, f, id); off > 50*time.Millisecond {
			t.Errorf("round %d: its clock is off by %s", round, off)
		}
		if out := f.run("exec", id, "--", "sh", "-c", "tr '\\0' ' ' < /proc/$(pidof sleep)/cmdline"); !strings.Contains(out, "23456") {
			t.Errorf("round %d: its process is gone: %q", round, out)
		}
	}
	s := f.branch(id, "-t", "of-the-awake")
	child := f.forkOf(s.Tag, 1)[0].ID
	if got := f.eval(child, kept); got != want {
		t.Errorf("a child of the awakened one sees %s", got)
	}
	f.run("suspend", id)
	f.run("kill", id) // from the disk
	if r := f.try("wake", id); r.code != 1 || !strings.Contains(r.stderr, "not found") {
		t.Errorf("waking a killed one: %+v", r)
	}
	f.run("kill", child)
	f.run("rmi", "of-the-awake", "before-suspension")
	f.clean()
	if after := storedBytes(t, f.home); after > before+1<<20 {
		t.Errorf("the layers took %.1f MiB before and %.1f after", mib(before), mib(after))
	}
}
