package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/testenv"
)

// crowd is many clients at once: what they have waited for, and what they were refused.
type crowd struct {
	mu      sync.Mutex
	waited  map[string][]float64 // milliseconds, by call
	refused map[string]int       // by code
	wrong   []error
}

// TestCrowd: fifty clients fork, execute and kill, each as fast as it is answered. Nobody gets an error but one that says to come
// again, and the daemon is as big afterwards as before.
func TestCrowd(t *testing.T) {
	testenv.OncePerRun(t)
	f := copied(t)
	clients := number(t, "FORKD_TEST_CLIENTS", 50, 50)
	seconds := number(t, "FORKD_TEST_CROWD", 20, 300)
	f.run("kill", f.one())
	f.clean()
	first := &crowd{waited: map[string][]float64{}, refused: map[string]int{}}
	first.run(t, f, clients, time.Second) // so that its pools are filled
	f.clean()
	pid := f.status().PID
	memory, files := resident(t, pid), descriptors(t, pid)

	c := &crowd{waited: map[string][]float64{}, refused: map[string]int{}}
	c.run(t, f, clients, time.Duration(seconds)*time.Second)
	f.clean()
	for _, call := range slices.Sorted(maps.Keys(c.waited)) {
		t.Logf("%-5s %5d times, p50 %7.1f ms, p99 %7.1f ms", call, len(c.waited[call]), quantile(c.waited[call], 0.5), quantile(c.waited[call], 0.99))
	}
	nowMemory, nowFiles := resident(t, pid), descriptors(t, pid)
	t.Logf("%d clients, %d s; refused %v; the daemon's memory %d MiB, then %d; descriptors %d, then %d",
		clients, seconds, c.refused, memory>>20, nowMemory>>20, files, nowFiles)
	for _, err := range c.wrong {
		t.Error(err)
	}
	if len(c.waited["fork"]) < clients {
		t.Errorf("%d clients were given %d sandboxes", clients, len(c.waited["fork"]))
	}
	if nowMemory > memory+memory/2+32<<20 || nowFiles > files+8 {
		t.Error("the daemon has grown")
	}
	if st := f.status(); st.PID != pid {
		t.Error("it is another daemon by now")
	}
}

func (c *crowd) run(t *testing.T, f *forkd, clients int, d time.Duration) {
	ctx, stop := context.WithTimeout(t.Context(), d)
	defer stop()
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() { c.client(ctx, f) })
	}
	wg.Wait()
}

// client goes on until its time is over, and ends what it has begun.
func (c *crowd) client(ctx context.Context, f *forkd) {
	cl, err := client.New("unix://" + filepath.Join(f.home, "forkd.sock"))
	if err != nil {
		c.call("connect", func() error { return err })
		return
	}
	defer cl.Close()
	calls := context.WithoutCancel(ctx)
	for ctx.Err() == nil {
		var id string
		if !c.call("fork", func() error {
			children, err := cl.Fork(calls, api.ForkRequest{SnapshotTag: parentTag})
			if err == nil {
				id = children[0].ID
			}
			return err
		}) {
			pass(f.t, 50*time.Millisecond)
			continue
		}
		c.call("exec", func() error {
			r, err := cl.Exec(calls, id, api.ExecRequest{Args: []string{"echo", id}, TimeoutSecs: testenv.Timeout(time.Minute).Seconds()})
			if err == nil && (r.Stdout != id+"\n" || r.ExitCode != 0) {
				return fmt.Errorf("echo in %s says %+v", id, r)
			}
			return err
		})
		c.call("kill", func() error { return cl.Kill(calls, id) })
	}
}

// call makes one and keeps what came of it.
func (c *crowd) call(name string, do func() error) bool {
	began := time.Now()
	err := do()
	took := time.Since(began)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		c.waited[name] = append(c.waited[name], float64(took.Microseconds())/1000)
		return true
	}
	// What 409, 429 and 503 say: come again.
	come := []api.Code{api.CodeBusy, api.CodeThrottled, api.CodeUnavailable}
	if e, ok := errors.AsType[*api.Error](err); ok && slices.Contains(come, e.Code) && e.Message != "" {
		c.refused[name+" "+string(e.Code)]++
		return false
	}
	if len(c.wrong) < 20 {
		c.wrong = append(c.wrong, fmt.Errorf("%s after %s: %w", name, took.Round(time.Millisecond), err))
	}
	return false
}

func quantile(values []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	if len(sorted) == 0 {
		return 0
	}
	return sorted[int(q*float64(len(sorted)-1)+0.5)]
}

// resident is the memory of a process.
func resident(t testing.TB, pid int) int64 {
	t.Helper()
	for line := range strings.Lines(readFile(t, fmt.Sprintf("/proc/%d/status", pid))) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == "RssAnon:" {
			kib, err := strconv.ParseInt(fields[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return kib << 10
		}
	}
	t.Fatalf("the memory of process %d is not known", pid)
	return 0
}

func descriptors(t testing.TB, pid int) int {
	t.Helper()
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}
