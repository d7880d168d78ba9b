package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/testenv"
)

type status struct {
	Running bool   `json:"running"`
	PID     int    `json:"pid"`
	Version string `json:"version"`
	Socket  string `json:"socket"`
	Address string `json:"address"`
}

func (f *forkd) status() status {
	f.t.Helper()
	var st status
	r := f.try("daemon", "status", "--json")
	if err := json.Unmarshal([]byte(r.stdout), &st); err != nil {
		f.t.Fatalf("daemon status --json: %v: %+v", err, r)
	}
	return st
}

func TestDaemonLife(t *testing.T) {
	f := alone(t)
	if r := f.try("daemon", "status"); r.code != 1 || !strings.Contains(r.stdout, "not running") {
		t.Errorf("status before: %+v", r)
	}
	if r := f.try("--no-autostart", "ls"); r.code != 1 || !strings.Contains(r.stderr, "try: forkd daemon start") {
		t.Errorf("ls without a daemon: %+v", r)
	}
	f.run("ls") // starts one
	st := f.status()
	if !st.Running || st.PID < 2 || st.Version == "" || st.Socket != filepath.Join(f.home, "forkd.sock") {
		t.Errorf("status: %+v", st)
	}
	if info, err := os.Stat(st.Socket); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the socket is %v, %v; want mode 0600", info, err)
	}
	if r := f.try("serve"); r.code != 1 || !strings.Contains(r.stderr, "already running") {
		t.Errorf("a second daemon: %+v", r)
	}
	f.run("daemon", "start")
	if again := f.status(); again.PID != st.PID {
		t.Errorf("start replaced daemon %d by %d", st.PID, again.PID)
	}
	f.run("daemon", "stop", "--kill")
	if alive(st.PID) {
		t.Errorf("daemon %d is still there", st.PID)
	}
	f.run("daemon", "stop", "--kill") // again: no error
}

// TestManyAtOnceStartOneDaemon: commands that all find no daemon end up with the same one.
func TestManyAtOnceStartOneDaemon(t *testing.T) {
	f := alone(t)
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			if r := f.try("ls"); r.code != 0 {
				t.Errorf("ls: %+v", r)
			}
		})
	}
	wg.Wait()
}

func TestLongHome(t *testing.T) {
	f := alone(t)
	f.home = filepath.Join(f.home, strings.Repeat("long/", 30))
	defer f.try("daemon", "stop", "--kill")
	f.run("ls")
	if st := f.status(); !st.Running {
		t.Errorf("status: %+v", st)
	}
}

// TestUnknownTagNamesOtherDaemons: whoever asks the wrong daemon is told the right one.
func TestUnknownTagNamesOtherDaemons(t *testing.T) {
	f := shared(t)
	f.run("daemon", "start")
	other := alone(t)
	r := other.try("fork", parentTag)
	if r.code != 1 || !strings.Contains(r.stderr, "FORKD_HOST=unix://"+filepath.Join(f.home, "forkd.sock")) {
		t.Errorf("fork of a tag that another daemon has: %+v", r)
	}
	through := &forkd{t, f.bin, other.home, []string{"FORKD_HOST=unix://" + filepath.Join(f.home, "forkd.sock")}}
	if out := through.run("snapshots"); !strings.Contains(out, parentTag) {
		t.Errorf("through FORKD_HOST: %q", out)
	}
	for _, bad := range []string{"nonsense", "unix://relative", "ftp://x"} {
		r := (&forkd{t, f.bin, other.home, []string{"FORKD_HOST=" + bad}}).try("ls")
		if r.code != 2 || !strings.Contains(r.stderr, "FORKD_HOST") {
			t.Errorf("FORKD_HOST=%s: %+v", bad, r)
		}
	}
}

func TestBadEnvironment(t *testing.T) {
	for _, env := range []string{"FORKD_MAX_SANDBOXES=many", "FORKD_HOT_MAX_BYTES=-1", "FORKD_ACCELERATOR=warp"} {
		f := alone(t, env)
		name, _, _ := strings.Cut(env, "=")
		if r := f.try("ls"); r.code != 1 || !strings.Contains(r.stderr, name) {
			t.Errorf("%s: %+v", env, r)
		}
	}
}

// TestKVMIsNeverReplaced: KVM asked for by name, where it does not work, is an error and not emulation.
func TestKVMIsNeverReplaced(t *testing.T) {
	f := copied(t, "FORKD_ACCELERATOR=kvm")
	r := f.try("fork", parentTag)
	if r.code == 0 {
		t.Skip("KVM works here")
	}
	if !strings.Contains(strings.ToLower(r.stderr), "kvm") {
		t.Errorf("fork with KVM asked for: %+v", r)
	}
}

func TestQuickstart(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	type child struct {
		ID     string `json:"id"`
		Result string `json:"result"`
	}
	var report struct {
		Built    bool    `json:"built"`
		Kept     string  `json:"kept"`
		Children []child `json:"children"`
	}
	for range 2 { // idempotent
		f.json(&report, "quickstart")
		if report.Built || len(report.Children) != 10 || report.Children[0].Result != "45" || report.Kept != report.Children[0].ID {
			t.Errorf("quickstart: %+v", report)
		}
		if out := f.run("ls", "-q", "--label", "forkd.quickstart=yes"); strings.TrimSpace(out) != report.Kept {
			t.Errorf("kept %q, running %q", report.Kept, out)
		}
	}
	f.run("kill", report.Kept)
}

// TestClocksStayRight: ten minutes after the fork the children's clocks are still the host's.
func TestClocksStayRight(t *testing.T) {
	f := shared(t)
	if !testenv.Soak() {
		t.Skip("takes ten minutes; set FORKD_SOAK=1")
	}
	children := f.fork(20)
	timer := time.NewTimer(10 * time.Minute)
	defer timer.Stop()
	<-timer.C
	worst := time.Duration(0)
	for _, c := range children {
		worst = max(worst, clockError(t, f, c.ID))
	}
	t.Logf("after ten minutes the worst of %d clocks is off by %s", len(children), worst)
	if worst > 50*time.Millisecond {
		t.Errorf("a clock drifted by %s in ten minutes", worst)
	}
}

// clockError is how far a child's clock is off at least: each reading says that the guest's time lay between two of the
// host's, and a few of them narrow it down to what the fastest round trip leaves open.
func clockError(t testing.TB, f *forkd, id string) time.Duration {
	t.Helper()
	low, high := -time.Hour, time.Hour // of guest less host
	for range 5 {
		before := time.Now()
		out := f.eval(id, "__import__('time').time()")
		after := time.Now()
		var seconds float64
		if err := json.Unmarshal([]byte(out), &seconds); err != nil {
			t.Fatalf("the clock of %s reads %q", id, out)
		}
		guest := time.UnixMicro(int64(seconds * 1e6))
		low, high = max(low, guest.Sub(after)), min(high, guest.Sub(before))
	}
	switch {
	case low > 0:
		return low
	case high < 0:
		return -high
	}
	return 0
}

// TestBench reports; nothing about times is asserted.
func TestBench(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	var report struct {
		Host   map[string]any `json:"host"`
		N      int            `json:"n"`
		AllMS  float64        `json:"all_answered_ms"`
		Single struct {
			Runs int     `json:"runs"`
			P50  float64 `json:"p50"`
		} `json:"single_ms"`
		Own struct {
			P50 float64 `json:"p50"`
		} `json:"own_mib"`
	}
	f.json(&report, "bench", "fork", "-n", "4", "--runs", "2")
	if report.N != 4 || report.AllMS <= 0 || report.Single.Runs != 2 || report.Single.P50 <= 0 || report.Own.P50 <= 0 || report.Host["engine"] == nil {
		t.Errorf("bench: %+v", report)
	}
	if out := f.run("ls", "-q", "--label", "forkd.bench=yes"); out != "" {
		t.Errorf("bench left %q", out)
	}
}

func TestImagesAndSnapshots(t *testing.T) {
	f := shared(t)
	if out := f.run("images", "ls"); !strings.Contains(out, "debian:bookworm") {
		t.Errorf("images: %q", out)
	}
	if r := f.try("images", "rm", parentTag); r.code != 1 || !strings.Contains(r.stderr, "forkd rmi ") || !strings.Contains(r.stderr, parentTag) {
		t.Errorf("removing an image in use: %+v", r)
	}
	var info struct {
		Tag    string         `json:"tag"`
		Engine map[string]any `json:"engine"`
		BootMS float64        `json:"boot_ms"`
		Warm   []string       `json:"warm"`
	}
	f.json(&info, "snapshot-info", parentTag)
	if info.Tag != parentTag || info.Engine["machine"] == "" || info.BootMS <= 0 || len(info.Warm) != 1 {
		t.Errorf("snapshot-info: %+v", info)
	}
	if out := f.run("completion", "bash"); !strings.Contains(out, "forkd") {
		t.Error("no completion for bash")
	}
	var checks struct {
		OK     bool `json:"ok"`
		Checks []struct{ Name, Status string }
	}
	f.json(&checks, "doctor")
	if !checks.OK || len(checks.Checks) < 8 {
		t.Errorf("doctor: %+v", checks)
	}
}
