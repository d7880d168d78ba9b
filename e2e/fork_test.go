package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/testenv"
)

// identityCode reads everything that must differ between siblings, as one JSON text. Of ssl it takes the function alone, as of
// socket: what else those modules do when they are imported takes a child longer than all the rest.
const identityCode = `
def _identity():
    import json, os, uuid, secrets, random
    from _ssl import RAND_bytes
    read = lambda p: open(p).read().strip()
    return json.dumps({
        "urandom": open("/dev/urandom", "rb").read(16).hex(), "uuid4": str(uuid.uuid4()), "secrets": secrets.token_hex(16),
        "openssl": RAND_bytes(16).hex(), "random": random.random(), "numpy": float(numpy.random.random()),
        "hostname": os.uname().nodename, "machine_id": read("/etc/machine-id"),
        "boot_id": read("/proc/sys/kernel/random/boot_id"), "identity": read("/run/forkd/identity.json"),
        "kernel_uuid": read("/proc/sys/kernel/random/uuid")})
print(_identity())`

// TestHundredChildren is the product's promise: a hundred children of one warm parent, each right, each its own.
func TestHundredChildren(t *testing.T) {
	f := shared(t)
	rounds := 1
	if testenv.Soak() {
		rounds = 10
	}
	n := 100
	if testenv.Again() { // in jails; a hundred were made without
		n = 40
	}
	for range rounds {
		manyChildren(t, f, n)
	}
}

func manyChildren(t *testing.T, f *forkd, n int) {
	children := f.fork(n)
	seen := identities{}
	eachOf(t, n, func(t testing.TB, i int) {
		c := children[i]
		if c.CloneReport == nil || c.Index != i || c.Count != n {
			t.Errorf("child %d: bad record %+v", i, c)
			return
		}
		if got, want := f.eval(c.ID, fmt.Sprintf("int(numpy.arange(%d).sum())", i+1)), fmt.Sprint(i*(i+1)/2); got != want {
			t.Errorf("child %d evaluates to %q, want %s", i, got, want)
		}
		if off := clockError(t, f, c.ID); off > 50*time.Millisecond {
			t.Errorf("child %d: its clock is off by %s", i, off)
		}
		seen.differ(t, f, c.ID)
	})
	t.Run("isolation", func(t *testing.T) { isolation(t, f, children[0].ID, children[1].ID, children[n-1].ID) })
	f.run("kill", "--tag", parentTag)
}

// identities are those of some sandboxes.
type identities struct {
	mu   sync.Mutex
	seen map[string]map[string]string // what → value → who
}

// differ compares the identity of one more sandbox with all before.
func (s *identities) differ(t testing.TB, f *forkd, sandbox string) {
	t.Helper()
	out := f.eval(sandbox, identityCode)
	var id map[string]any
	if err := json.Unmarshal([]byte(out), &id); err != nil || len(id) != 11 {
		t.Errorf("%s: %d things to compare, want 11; %v: %q", sandbox, len(id), err, out)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.seen == nil {
		s.seen = map[string]map[string]string{}
	}
	for what, value := range id {
		if s.seen[what] == nil {
			s.seen[what] = map[string]string{}
		}
		text := fmt.Sprint(value)
		if other, ok := s.seen[what][text]; ok {
			t.Errorf("%s is %q in both %s and %s", what, text, other, sandbox)
		}
		s.seen[what][text] = sandbox
	}
}

// isolation: what one child writes to memory and disk, no other sees.
func isolation(t *testing.T, f *forkd, a, b, c string) {
	f.eval(a, `secret = "of a"; open("/root/mine", "w").write("a"); import os; os.sync()`)
	f.eval(b, `secret = "of b"; open("/root/mine", "w").write("b"); import os; os.sync()`)
	if got := f.eval(a, `secret + open("/root/mine").read()`); got != "'of aa'" {
		t.Errorf("a sees %s", got)
	}
	if got := f.eval(b, `secret + open("/root/mine").read()`); got != "'of bb'" {
		t.Errorf("b sees %s", got)
	}
	if got := f.eval(c, `("secret" in globals(), __import__("os").path.exists("/root/mine"))`); got != "(False, False)" {
		t.Errorf("c sees %s", got)
	}
}

// eachOf runs f for 0..n-1, a few at a time: two cores do no more at once.
func eachOf(t testing.TB, n int, f func(t testing.TB, i int)) {
	t.Helper()
	slots := make(chan struct{}, 4)
	var wg sync.WaitGroup
	for i := range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			f(t, i)
		})
	}
	wg.Wait()
}

func TestForkOptions(t *testing.T) {
	f := shared(t)
	children := f.fork(2, "--label", "job=7", "--label", "who=e2e", "--env", "TOKEN=t o k", "--per-child-netns", "--live-fork")
	other := f.fork(1)[0]
	id := children[1].ID
	t.Run("environment", func(t *testing.T) {
		if got := f.eval(id, `import os; os.environ["TOKEN"]`); got != "'t o k'" {
			t.Errorf("the context sees %s", got)
		}
		if got := f.run("exec", id, "--", "sh", "-c", "echo $TOKEN"); got != "t o k\n" {
			t.Errorf("a process sees %q", got)
		}
		if got := f.eval(other.ID, `import os; os.environ.get("TOKEN")`); got != "" {
			t.Errorf("a child forked without it sees %s", got)
		}
	})
	t.Run("labels", func(t *testing.T) {
		out := f.run("ls", "-q", "--label", "job=7")
		if !strings.Contains(out, children[0].ID) || !strings.Contains(out, id) || strings.Contains(out, other.ID) {
			t.Errorf("ls --label job=7 printed %q", out)
		}
	})
	t.Run("identity", func(t *testing.T) {
		var ident struct {
			SandboxID   string `json:"sandboxId"`
			ForkIndex   int    `json:"forkIndex"`
			ForkCount   int    `json:"forkCount"`
			SnapshotTag string `json:"snapshotTag"`
		}
		if err := json.Unmarshal([]byte(f.run("exec", id, "--", "cat", "/run/forkd/identity.json")), &ident); err != nil {
			t.Fatal(err)
		}
		if ident.SandboxID != id || ident.ForkIndex != 1 || ident.ForkCount != 2 || ident.SnapshotTag != parentTag {
			t.Errorf("identity file: %+v", ident)
		}
	})
	t.Run("prefix", func(t *testing.T) {
		if got := strings.TrimSpace(f.run("exec", id[:8], "--", "hostname")); got != id {
			t.Errorf("hostname is %q, want %q", got, id)
		}
	})
	t.Run("report", func(t *testing.T) {
		renewed := strings.Join(children[0].CloneReport.Renewed, " ")
		for _, want := range []string{"kernel_entropy", "wall_clock", "hostname", "machine_id", "boot_id", "identity", "random", "numpy.random"} {
			if !strings.Contains(renewed, want) {
				t.Errorf("the report lacks %s: %s", want, renewed)
			}
		}
	})
}

func TestTimeToLive(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one("--ttl", "3s")
	await(t, 30*time.Second, "the sandbox to expire", func() bool {
		r := f.try("inspect", id)
		return r.code == 1 && strings.Contains(r.stderr, "not found")
	})
}

// await polls: what is awaited shows through the command line only.
func await(t testing.TB, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(testenv.Timeout(limit))
	defer deadline.Stop()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func TestRunEndsItsChild(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	before := f.run("ls", "-q")
	r := f.try("run", parentTag, "--", "sh", "-c", "echo out; echo err >&2; exit 7")
	if r.stdout != "out\n" || r.stderr != "err\n" || r.code != 7 {
		t.Errorf("run: %+v", r)
	}
	if after := f.run("ls", "-q"); after != before {
		t.Errorf("sandboxes before %q, after %q", before, after)
	}
}
