package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/crypto/ssh"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

func testUser(uid uint32) *account.User { return &account.User{Name: "test", UID: uid, GID: uid} }

// machine is a guest of plain files: a root, and a cgroup tree whose kernel agrees with everything.
type machine struct {
	clock time.Time // as it was set
	*Agent
	root, groups string
	log          []string // what was done, in order
	fail         string   // the step that fails
	frozenAt     map[string]bool
	contexts     *fakeContexts
}

type fakeContexts struct {
	m         *machine
	env       map[string]string
	searched  bool
	onQuiesce func()
	onPIDs    func()
}

func (f *fakeContexts) Quiesce(_ context.Context, search bool) error {
	f.searched = search
	if f.onQuiesce != nil {
		f.onQuiesce()
	}
	return f.m.did("contexts.quiesce")
}

func (f *fakeContexts) Renew(_ context.Context, env map[string]string, thaw func(string) error) ([]string, []wire.NotRenewed, error) {
	f.env = env
	if err := thaw("default"); err != nil {
		return nil, nil, err
	}
	if f.m.frozen("user/ctx-default") || !f.m.frozen("user/proc") {
		return nil, nil, errors.New("the context must run, and nothing else")
	}
	return []string{"context:default:random"}, nil, f.m.did("contexts.renew")
}

func (f *fakeContexts) PIDs() map[int]string {
	if f.onPIDs != nil {
		f.onPIDs()
	}
	return nil
}

var errStep = errors.New("this step fails")

func (m *machine) did(step string) error {
	m.log = append(m.log, step)
	if m.frozenAt != nil && m.frozen("user/proc") {
		m.frozenAt[step] = true
	}
	if m.fail == step {
		return errStep
	}
	return nil
}

func (m *machine) frozen(group string) bool {
	b, err := os.ReadFile(filepath.Join(m.groups, group, "cgroup.freeze"))
	return err == nil && string(b) == "1"
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	testenv.Need(t, "root") // as the agent always is: it opens machine-id, which nobody else may write
	m := &machine{root: t.TempDir(), groups: t.TempDir()}
	for _, group := range []string{"user/proc", "user/ctx-default", "hooks"} {
		dir := filepath.Join(m.groups, group)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for name, content := range map[string]string{"cgroup.freeze": "0", "cgroup.events": "populated 1\nfrozen 1\n", "cgroup.procs": ""} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	m.put(t, "run/forkd/boot_id", "old\n")
	m.contexts = &fakeContexts{m: m}
	m.Agent = New(Config{
		Version: "test", Phase: PhaseReady, Console: &bytes.Buffer{}, Reaper: reap.New(), Accounts: account.New(m.root, account.Defaults{}),
		Cgroups: &Cgroups{root: m.groups}, Contexts: m.contexts,
		System: System{
			Root: m.root, BootIDFile: filepath.Join(m.root, "run/forkd/boot_id"),
			Entropy:     func(b []byte) error { return m.did("entropy") },
			SetClock:    func(now time.Time) error { m.clock = now; return m.did("clock") },
			SetHostname: func(string) error { return m.did("hostname") },
			Sever:       func() (int, error) { return 20, m.did("sever") },
			PowerOff:    func() error { return m.did("off") },
		},
	}, "boot")
	return m
}

func (m *machine) put(t *testing.T, name, content string) {
	t.Helper()
	path := filepath.Join(m.root, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644)); err != nil {
		t.Fatal(err)
	}
}

func (m *machine) get(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(m.root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// hostTime is what the host answers to who asks.
var hostTime = time.Date(2030, 1, 2, 3, 4, 5, 6, time.UTC)

// call runs a handler over a pipe and returns its message, if any.
func call(t *testing.T, h wire.Handler, request any) ([]byte, error) {
	t.Helper()
	b, err := json.Marshal(request)
	if err != nil {
		t.Fatal(err)
	}
	here, there := net.Pipe()
	message := make(chan []byte, 1)
	go func() {
		host := wire.NewStream(there)
		for {
			kind, p, err := host.Recv()
			if err != nil {
				p = nil
			}
			if err == nil && kind == wire.KindData && host.Send(kind, wire.AppendClock(nil, hostTime)) == nil {
				continue
			}
			message <- bytes.Clone(p)
			return
		}
	}()
	err = h(t.Context(), wire.NewStream(here), b)
	_ = here.Close()
	return <-message, err
}

// TestIdentityFileInTheWay: an image with a directory in a file's place is an error, not the end of PID 1.
func TestIdentityFileInTheWay(t *testing.T) {
	m := newMachine(t)
	if err := os.MkdirAll(filepath.Join(m.root, "etc/machine-id"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := call(t, m.handlers[wire.MethodAwaken], request()); err == nil || !strings.Contains(err.Error(), "machine-id") {
		t.Errorf("got %v", err)
	}
}

func request() *wire.AwakenRequest {
	return &wire.AwakenRequest{
		SandboxID: "sb-1", SnapshotTag: "py", Index: 2, Count: 5, Hostname: "sb-1", MachineID: strings.Repeat("0a", 16),
		BootID: "01234567-89ab-4def-8123-456789abcdef", Entropy: make([]byte, 64), Env: map[string]string{"A": "b"},
	}
}

func TestAwaken(t *testing.T) {
	m := newMachine(t)
	m.put(t, "etc/hostname", "a-much-longer-name-than-the-new-one\n")
	m.put(t, "etc/hosts", "127.0.0.1 localhost\n127.0.1.1 a-much-longer-name-than-the-new-one\n10.0.0.1 db # mine")
	m.put(t, "var/lib/dbus/machine-id", "old\n")
	m.put(t, "var/lib/systemd/random-seed", "seed")
	if err := os.Symlink("/nowhere/at/all", filepath.Join(m.root, "etc/machine-id")); err != nil {
		t.Fatal(err)
	}
	if _, err := call(t, m.handlers[wire.MethodQuiesce], struct{}{}); err != nil {
		t.Fatal(err)
	}
	for _, g := range []string{"user/proc", "user/ctx-default"} {
		if !m.frozen(g) {
			t.Errorf("%s is not frozen", g)
		}
	}
	message, err := call(t, m.handlers[wire.MethodAwaken], request())
	if err != nil {
		t.Fatal(err)
	}
	report := wire.AwakenReport{}
	if err := json.Unmarshal(message, &report); err != nil {
		t.Fatal(err)
	}
	want := []string{"kernel_entropy", "wall_clock", "hostname", "machine_id", "boot_id", "identity", "context:default:random"}
	if diff := cmp.Diff(want, report.Renewed); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"contexts.quiesce", "entropy", "clock", "hostname", "contexts.renew"}, m.log); diff != "" {
		t.Error(diff)
	}
	for name, want := range map[string]string{
		"etc/hostname":            "sb-1\n",
		"etc/machine-id":          strings.Repeat("0a", 16) + "\n",
		"var/lib/dbus/machine-id": strings.Repeat("0a", 16) + "\n",
		"run/forkd/boot_id":       "01234567-89ab-4def-8123-456789abcdef\n",
	} {
		if got := m.get(t, name); got != want {
			t.Errorf("%s: %q", name, got)
		}
	}
	if got := strings.TrimRight(m.get(t, "etc/hosts"), "\n"); got != "127.0.0.1 localhost\n10.0.0.1 db # mine\n127.0.1.1\tsb-1" {
		t.Errorf("etc/hosts: %q", got)
	}
	if _, err := os.Stat(filepath.Join(m.root, "var/lib/systemd/random-seed")); err == nil {
		t.Error("the seed is still there")
	}
	id := wire.Identity{}
	if err := json.Unmarshal([]byte(m.get(t, "run/forkd/identity.json")), &id); err != nil || id.SandboxID != "sb-1" || id.ForkIndex != 2 {
		t.Errorf("identity %v, %v", id, err)
	}
	if m.frozen("user/proc") || m.frozen("user/ctx-default") {
		t.Error("still frozen")
	}
	if off := m.clock.Sub(hostTime); off < 0 || off > 10*time.Second {
		t.Errorf("the clock was set to %s, the host's was %s", m.clock, hostTime)
	}
	user, err := m.cfg.Accounts.User("root")
	if err != nil {
		t.Fatal(err)
	}
	if env, err := m.cfg.Accounts.Environ(user, nil); err != nil || !slices.Contains(env, "A=b") || m.contexts.env["A"] != "b" {
		t.Errorf("environment %v, %v", env, err)
	}

	// A fork of the fork, with other lengths.
	second := request()
	second.Hostname, second.SandboxID = "another-host", "s"
	if _, err := call(t, m.handlers[wire.MethodAwaken], second); err != nil {
		t.Fatal(err)
	}
	if got := m.get(t, "etc/hostname"); got != "another-host\n" {
		t.Errorf("etc/hostname: %q", got)
	}
	if got := m.get(t, "etc/hosts"); strings.Contains(got, "sb-1") || !strings.Contains(got, "127.0.1.1\tanother-host\n") {
		t.Errorf("etc/hosts: %q", got)
	}
	if err := json.Unmarshal([]byte(m.get(t, "run/forkd/identity.json")), &id); err != nil || id.SandboxID != "s" {
		t.Errorf("identity %v, %v", id, err)
	}
}

// Invariant 4: whatever step fails, nothing of the user's runs.
// Connections end while everything is frozen, contexts too, and before anything else is done; who is not asked ends none.
func TestAwakenSevers(t *testing.T) {
	m := newMachine(t)
	m.frozenAt = map[string]bool{}
	r := request()
	r.Sever = true
	message, err := call(t, m.handlers[wire.MethodAwaken], r)
	if err != nil {
		t.Fatal(err)
	}
	report := wire.AwakenReport{}
	if err := json.Unmarshal(message, &report); err != nil {
		t.Fatal(err)
	}
	if report.Severed != 20 || report.Renewed[0] != wire.RenewedConnections {
		t.Errorf("the report says %+v", report)
	}
	if len(m.log) == 0 || m.log[0] != "sever" || !m.frozenAt["sever"] {
		t.Errorf("was done: %v, frozen at %v", m.log, m.frozenAt)
	}
}

func TestFailedAwakenThawsNothing(t *testing.T) {
	for _, step := range []string{"sever", "entropy", "clock", "hostname", "contexts.renew"} {
		m := newMachine(t)
		m.fail = step
		r := request()
		r.Sever = true
		if _, err := call(t, m.handlers[wire.MethodAwaken], r); !errors.Is(err, errStep) {
			t.Errorf("%s: %v", step, err)
		}
		if !m.frozen("user/proc") || !m.frozen("user/ctx-default") {
			t.Errorf("%s: something runs", step)
		}
	}
}

func TestAwakenRefuses(t *testing.T) {
	for name, change := range map[string]func(*wire.AwakenRequest){
		"little entropy":     func(r *wire.AwakenRequest) { r.Entropy = r.Entropy[:63] },
		"too much entropy":   func(r *wire.AwakenRequest) { r.Entropy = make([]byte, 513) },
		"no hostname":        func(r *wire.AwakenRequest) { r.Hostname = "" },
		"hostname of a line": func(r *wire.AwakenRequest) { r.Hostname = "a\n1.2.3.4 bank" },
		"long hostname":      func(r *wire.AwakenRequest) { r.Hostname = strings.Repeat("a", 65) },
		"machine id":         func(r *wire.AwakenRequest) { r.MachineID = "xyz" },
		"boot id":            func(r *wire.AwakenRequest) { r.BootID = "" },
	} {
		m := newMachine(t)
		r := request()
		change(r)
		var refusal *wire.Error
		if _, err := call(t, m.handlers[wire.MethodAwaken], r); !errors.As(err, &refusal) || refusal.Code != wire.CodeInvalid || len(m.log) > 0 {
			t.Errorf("%s: %v, did %v", name, err, m.log)
		}
	}
}

func TestFreezeThatDoesNotHappen(t *testing.T) {
	m := newMachine(t)
	events := filepath.Join(m.groups, "user/proc/cgroup.events")
	if err := os.WriteFile(events, []byte("populated 1\nfrozen 0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var refusal *wire.Error
	if _, err := call(t, m.handlers[wire.MethodQuiesce], struct{}{}); !errors.As(err, &refusal) || refusal.Code != wire.CodeDeadline {
		t.Fatalf("got %v", err)
	}
	if m.frozen("user/proc") || m.frozen("user/ctx-default") {
		t.Error("still frozen")
	}
	// And processes can be started again.
	resume, err := m.cfg.Reaper.Pause(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	resume()
}

func TestHooks(t *testing.T) {
	m := newMachine(t)
	for name, script := range map[string]string{
		"10-good":   "#!/bin/sh\necho $FORKD_SANDBOX_ID $FORKD_FORK_INDEX $FORKD_FORK_COUNT > " + m.root + "/ran\n",
		"20-bad":    "#!/bin/sh\nexit 3\n",
		"30-broken": "#!/no/such/interpreter\n",
	} {
		m.put(t, "etc/forkd/fork.d/"+name, script)
		if err := os.Chmod(filepath.Join(m.root, "etc/forkd/fork.d", name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	m.put(t, "etc/forkd/fork.d/README", "not a hook")
	if err := os.RemoveAll(filepath.Join(m.groups, "hooks")); err != nil { // not a real cgroup
		t.Fatal(err)
	}
	message, err := call(t, m.handlers[wire.MethodAwaken], request())
	if err != nil {
		t.Fatal(err)
	}
	report := wire.AwakenReport{}
	if err := json.Unmarshal(message, &report); err != nil {
		t.Fatal(err)
	}
	if got := m.get(t, "ran"); got != "sb-1 2 5\n" {
		t.Errorf("the hook saw %q", got)
	}
	if !slices.Contains(report.Renewed, "fork_hook:10-good") || len(report.NotRenewed) != 2 || report.NotRenewed[0].Why != "exit status 3" {
		t.Errorf("got %+v", report)
	}
}

func TestHostKeys(t *testing.T) {
	m := newMachine(t)
	for _, kind := range []string{"ed25519", "ecdsa", "rsa"} {
		m.put(t, "etc/ssh/ssh_host_"+kind+"_key", "old")
		m.put(t, "etc/ssh/ssh_host_"+kind+"_key.pub", "old")
	}
	message, err := call(t, m.handlers[wire.MethodAwaken], request())
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"ed25519", "ecdsa"} {
		name := "etc/ssh/ssh_host_" + kind + "_key"
		key, err := ssh.ParsePrivateKey([]byte(m.get(t, name)))
		if err != nil {
			t.Fatal(err)
		}
		if got := m.get(t, name+".pub"); got != string(ssh.MarshalAuthorizedKey(key.PublicKey())) {
			t.Errorf("%s.pub is of another key", name)
		}
		if info, err := os.Stat(filepath.Join(m.root, name)); err != nil || info.Mode() != 0o600 {
			t.Errorf("%v, %v", info.Mode(), err)
		}
	}
	if _, err := os.Stat(filepath.Join(m.root, "etc/ssh/ssh_host_rsa_key")); err == nil {
		t.Error("everybody's RSA key is still there")
	}
	if !bytes.Contains(message, []byte("ssh_host_rsa_key")) {
		t.Errorf("the report does not say so: %s", message)
	}
}

func TestPowerOff(t *testing.T) {
	m := newMachine(t)
	m.cfg.System.Root = filepath.Join(m.root, "not a mount point")
	if _, err := call(t, m.handlers[wire.MethodPowerOff], struct{}{}); err != nil || !slices.Contains(m.log, "off") {
		t.Fatalf("%v, did %v", err, m.log)
	}
}

func TestBuildPhase(t *testing.T) {
	m := newMachine(t)
	m.setPhase(PhaseBuild)
	for _, method := range []string{wire.MethodQuiesce, wire.MethodAwaken} {
		var refusal *wire.Error
		if _, err := call(t, m.handlers[method], request()); !errors.As(err, &refusal) || refusal.Code != wire.CodePrecondition {
			t.Errorf("%s: %v", method, err)
		}
	}
}

func TestMetrics(t *testing.T) {
	message, err := call(t, newMachine(t).handlers[wire.MethodMetrics], struct{}{})
	if err != nil {
		t.Fatal(err)
	}
	m := wire.Metrics{}
	if err := json.Unmarshal(message, &m); err != nil || m.MemTotal == 0 || m.DiskTotal == 0 || m.Processes == 0 {
		t.Fatalf("%+v, %v", m, err)
	}
}
