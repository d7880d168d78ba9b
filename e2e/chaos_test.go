package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/e2e/load"
	"forkd.dev/forkd/internal/testenv"
)

const (
	firedTag = "fired" // of it every sandbox of the tests below is forked: a load runs in each
	chaosMiB = 4       // that the load rewrites
	chaosers = 2       // who fork, branch, ask and kill beside one another
)

// chaos is a home in which things are killed.
type chaos struct {
	*forkd

	records uint64 // that the load had written when firedTag was captured, at least
	chains  []string

	mu     sync.Mutex
	alive  map[string]bool // sandboxes that were told to a client, and that nobody was told to end
	tags   map[string]bool // likewise
	done   map[string]int  // what went well, by its name
	failed map[string]int
}

// TestChaos kills the daemon, a VM process, the process of networks or a client at a random instant under a load of forks, branches, calls and removals,
// and looks each time whether all that was promised is there, and nothing else.
func TestChaos(t *testing.T) {
	c := newChaos(t)
	rounds := number(t, "FORKD_TEST_CHAOS", 10, 1000)
	begin, before := c.counts(), c.files()
	for round := range rounds {
		c.round(round)
		if t.Failed() {
			t.Fatalf("after round %d of %d; the daemon's log:\n%s", round+1, rounds, tail(readFile(t, filepath.Join(c.home, "daemon.log")), 40))
		}
	}
	// Layers that nothing needs any more go when something is removed, or when a daemon starts.
	c.run("daemon", "stop")
	c.run("daemon", "start")
	end := c.counts()
	t.Logf("%d rounds: went well %v, failed as they may %v; at the beginning %v, at the end %v", rounds, c.done, c.failed, begin, end)
	for what, n := range end {
		// The daemon's own descriptors vary with what its runtime has opened by then.
		if slack := map[string]int{"descriptors": 8, "descriptors of networks": 4}[what]; n > begin[what]+slack {
			t.Errorf("%s: %d at the beginning, %d at the end", what, begin[what], n)
		}
	}
	if end["files"] > begin["files"] {
		after := c.files()
		maps.DeleteFunc(after, func(name string, _ bool) bool { return before[name] })
		t.Errorf("new files: %v", slices.Sorted(maps.Keys(after)))
	}
}

func newChaos(t *testing.T) *chaos {
	t.Helper()
	c := &chaos{forkd: copied(t), done: map[string]int{}, failed: map[string]int{}}
	source := c.one()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c.run("cp", self, source+":/root/load")
	c.run("exec", source, "--", "/root/load", load.Word, "start", strconv.Itoa(chaosMiB), "2")
	await(t, time.Minute, "the load's first records", func() bool { return c.look(source).Records > 0 })
	r := c.look(source)
	c.records, c.chains = r.Records, r.Chains
	c.run("branch", source, "-t", firedTag, "--mode", diff)
	c.run("kill", source)
	return c
}

// child forks one; whoever asked for it ends it.
func (c *chaos) child(tag string) string {
	c.t.Helper()
	return strings.TrimSpace(c.run("fork", tag))
}

// look has the load of a sandbox look at everything it has.
func (c *chaos) look(id string) load.Report {
	c.t.Helper()
	var r load.Report
	out := c.run("exec", id, "--", "/root/load", load.Word, "ask", "check", "0")
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		c.t.Fatalf("the load of %s answers %q: %v", id, out, err)
	}
	if r.Error != "" {
		c.t.Errorf("the load of %s: %s", id, r.Error)
	}
	return r
}

// round lets one thing be killed.
func (c *chaos) round(n int) {
	c.t.Helper()
	c.alive, c.tags = map[string]bool{}, map[string]bool{}
	ctx, stop := context.WithCancel(c.t.Context())
	defer stop()
	var wg sync.WaitGroup
	for i := range chaosers {
		wg.Go(func() { c.work(ctx, fmt.Sprintf("r%d-%d", n, i)) })
	}
	pass(c.t, 300*time.Millisecond+rand.N(1200*time.Millisecond))
	what := []string{"daemon", "machine", "client", "network"}[n%4]
	c.killOne(what)
	pass(c.t, rand.N(500*time.Millisecond))
	stop()
	wg.Wait()
	began := time.Now()
	c.verify(n, what)
	c.t.Logf("round %d: %s killed; looked at in %s", n, what, time.Since(began).Round(time.Second/10))
}

// killOne ends something in the hardest way, and starts the daemon again if it was that.
func (c *chaos) killOne(what string) {
	c.t.Helper()
	switch what {
	case "daemon":
		c.killDaemon()
		c.run("daemon", "start")
	case "machine":
		if pids := machinesOf(c.home); len(pids) > 0 {
			_ = syscall.Kill(pids[rand.N(len(pids))], syscall.SIGKILL) // it may be gone by now
		}
	case "network":
		if pid := networkOf(c.home); pid != 0 {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	case "client":
		verbs := [][]string{{"fork", firedTag, "-n", "2"}, {"run", firedTag, "--", "sleep", "5"}}
		s := c.start(verbs[rand.N(len(verbs))]...)
		pass(c.t, rand.N(800*time.Millisecond))
		_ = s.cmd.Process.Kill()
		<-s.done
	}
}

// work forks, branches, calls and removes until it is told to stop; the last call is not cut off.
func (c *chaos) work(ctx context.Context, name string) {
	cl, err := client.New("unix://" + filepath.Join(c.home, "forkd.sock"))
	if err != nil {
		c.t.Error(err)
		return
	}
	defer cl.Close()
	call := context.WithoutCancel(ctx)
	var ids, tags []string
	for i := 0; ctx.Err() == nil; i++ {
		pass(c.t, 10*time.Millisecond) // there may be no daemon
		if len(ids) == 0 {
			children, err := cl.Fork(call, api.ForkRequest{SnapshotTag: firedTag})
			if c.went("fork", err) {
				ids = append(ids, children[0].ID)
				c.promise(c.alive, children[0].ID)
			}
			continue
		}
		id := ids[len(ids)-1]
		switch rand.N(6) {
		case 0:
			tag, wait := fmt.Sprintf("%s-%d", name, i), rand.N(2) == 0
			_, err := cl.Branch(call, id, api.BranchRequest{Tag: tag, Mode: []string{"auto", diff}[rand.N(2)], Wait: &wait})
			if c.went("branch", err) && wait {
				c.promise(c.tags, tag)
				tags = append(tags, tag)
			}
		case 1:
			_, err := cl.Exec(call, id, api.ExecRequest{Args: []string{"sh", "-c", "echo $$ > /root/note"}})
			c.went("exec", err)
		case 2:
			c.forget(c.alive, id) // from when it is asked for
			c.went("kill", cl.Kill(call, id))
			ids = ids[:len(ids)-1]
		case 3:
			children, err := cl.Fork(call, api.ForkRequest{SnapshotTag: firedTag})
			if c.went("fork", err) {
				ids = append(ids, children[0].ID)
				c.promise(c.alive, children[0].ID)
			}
		case 4:
			if len(tags) > 0 { // refused while the sandbox's next branch stands on it, or a fork of it lives
				tag := tags[len(tags)-1]
				tags = tags[:len(tags)-1]
				c.forget(c.tags, tag)
				c.went("remove", cl.RemoveSnapshot(call, tag))
			}
		case 5:
			_, err := cl.Suspend(call, id)
			if c.went("suspend", err) {
				_, err = cl.Wake(call, id)
				c.went("wake", err)
			}
		}
	}
}

func (c *chaos) promise(list map[string]bool, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	list[name] = true
}

func (c *chaos) forget(list map[string]bool, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(list, name)
}

// went counts, and complains of an error that nobody may get: one of the daemon's that is its own fault.
func (c *chaos) went(what string, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		c.done[what]++
		return true
	}
	c.failed[what]++
	e, ok := errors.AsType[*api.Error](err)
	switch {
	case errors.Is(err, client.ErrGone), errors.Is(err, client.ErrNoDaemon): // it was killed
	case ok && e.Message != "" && (e.Code != api.CodeInternal || named(e.Message) || strings.Contains(e.Message, "died")):
	default:
		c.t.Errorf("%s: %v (%T)", what, err, err)
	}
	return false
}

// verify: what was promised is there, whole; what is there is right; and after its removal nothing is left.
func (c *chaos) verify(n int, killed string) {
	c.t.Helper()
	list := map[string]api.Sandbox{}
	var all []api.Sandbox
	c.json(&all, "ls")
	for _, s := range all {
		list[s.ID] = s
	}
	failed := 0
	for id := range c.alive {
		s, ok := list[id]
		switch {
		case !ok:
			c.t.Errorf("round %d (%s killed): sandbox %s is gone", n, killed, id)
		case s.State == "failed":
			failed++
		case s.State == "suspended": // the daemon died between the two
		case s.State != "running":
			c.t.Errorf("round %d (%s killed): sandbox %s is %s", n, killed, id, s.State)
		}
	}
	if most := map[string]int{"machine": 1}[killed]; failed > most {
		c.t.Errorf("round %d (%s killed): %d sandboxes failed", n, killed, failed)
	}
	c.wakeAll(list)
	running := 0
	for id, s := range list {
		if s.State == "running" {
			if running++; running <= looks() {
				c.look(id)
			}
		}
	}
	if pids := machinesOf(c.home); len(pids) != running {
		c.t.Errorf("round %d (%s killed): %d sandboxes run, and the machines %v", n, killed, running, pids)
	}
	c.run("kill", "--all")
	c.verifyTags(n, killed)
	child := c.child(firedTag)
	r := c.look(child)
	if r.Records < c.records || !slices.Equal(r.Chains[:c.records], c.chains) {
		c.t.Errorf("round %d (%s killed): snapshot %s is not what it was", n, killed, firedTag)
	}
	c.run("kill", child)
	c.clean()
}

// looks is how many sandboxes, and how many branches, are looked into in a round.
func looks() int {
	if testenv.Soak() {
		return 100
	}
	return 1
}

// wakeAll wakes what was suspended when the daemon died.
func (c *chaos) wakeAll(list map[string]api.Sandbox) {
	c.t.Helper()
	for id, s := range list {
		if s.State == "suspended" {
			c.run("wake", id)
			s.State = "running"
			list[id] = s
		}
	}
}

// verifyTags: a branch that was promised is ready, and any that is ready is right.
func (c *chaos) verifyTags(n int, killed string) {
	c.t.Helper()
	var settled map[string]string
	await(c.t, 2*time.Minute, "the branches to settle", func() bool {
		settled = c.forkd.tags()
		for _, status := range settled {
			if status == "writing" {
				return false
			}
		}
		return true
	})
	for tag := range c.tags {
		if settled[tag] != "ready" {
			c.t.Errorf("round %d (%s killed): branch %s was ready and is %q", n, killed, tag, settled[tag])
		}
	}
	looked := 0
	for tag, status := range settled {
		if tag == parentTag || tag == firedTag {
			continue
		}
		if looked++; status == "ready" && looked <= looks() {
			child := c.child(tag)
			c.look(child)
			c.run("kill", child)
		}
		c.run("rmi", "--cascade", tag)
		maps.DeleteFunc(settled, func(other, _ string) bool { // what stood on it
			_, ok := c.forkd.tags()[other]
			return !ok
		})
	}
}

// counts is what must not grow.
func (c *chaos) counts() map[string]int {
	c.t.Helper()
	id := c.child(firedTag) // so that all there is to be warmed is warm
	group := ""
	for part := range strings.SplitSeq(readFile(c.t, fmt.Sprintf("/proc/%d/cgroup", c.sandbox(id).PID)), "/") {
		if group == "" && strings.HasPrefix(part, "forkd-") {
			group = "/" + part // of this home
		}
	}
	c.run("kill", id)
	pid := c.status().PID
	entries := func(dir string) int {
		list, err := os.ReadDir(dir)
		if err != nil {
			c.t.Fatal(err)
		}
		return len(list)
	}
	groups := 0
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() && group != "" && strings.Contains(path, group) {
			groups++
		}
		return nil
	})
	network := 0
	if pid := networkOf(c.home); pid != 0 {
		network = entries(fmt.Sprintf("/proc/%d/fd", pid))
	}
	return map[string]int{
		"descriptors of networks": network,
		"processes":               len(machinesOf(c.home)), "descriptors": entries(fmt.Sprintf("/proc/%d/fd", pid)), "files": len(c.files()),
		"mounts": strings.Count(readFile(c.t, fmt.Sprintf("/proc/%d/mountinfo", pid)), c.home), "groups": groups,
	}
}

// files are those of the home that sandboxes, snapshots and images take.
func (c *chaos) files() map[string]bool {
	c.t.Helper()
	found := map[string]bool{}
	for _, sub := range []string{"layers", "snapshots", "images", "hot", "machines", "tmp", "unfinished", "suspended", "workspaces"} {
		err := filepath.WalkDir(filepath.Join(c.home, sub), func(path string, d os.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				found[path] = true
			}
			return err
		})
		if err != nil {
			c.t.Fatal(err)
		}
	}
	return found
}

func tail(text string, lines int) string {
	all := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
