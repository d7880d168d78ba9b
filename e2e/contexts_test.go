package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// TestContexts: several interpreters in a sandbox, each with a state of its own, and their lives.
func TestContexts(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one()
	if got := f.run("eval", id, "--language", "shell", "--", "cd /tmp; x=5; pwd"); got != "/tmp\n" {
		t.Errorf("%q", got)
	}
	if r := f.try("eval", id, "--language", "sh", "--", "echo $x; pwd; exit_code() { return 3; }; exit_code"); r.stdout != "5\n/tmp\n" || r.code != 3 {
		t.Errorf("%+v", r)
	}
	if got := f.run("contexts", "create", id, "second", "--cwd", "/usr", "--env", "K=v", "--user", "root"); got != "second\n" {
		t.Errorf("%q", got)
	}
	if got := f.run("eval", id, "--context", "second", "--", "import os; os.getcwd(), os.environ['K'], 'numpy' in globals()"); got != "('/usr', 'v', False)\n" {
		t.Errorf("%q", got)
	}
	if got := f.run("eval", id, "--env", "ONE=1", "--", "import os; os.environ['ONE'], 'numpy' in globals()"); got != "('1', True)\n" {
		t.Errorf("%q", got)
	}
	var list []api.Context
	f.json(&list, "contexts", "ls", id)
	var got []string
	for _, c := range list {
		got = append(got, c.ID+" "+c.Language)
		if !c.Alive || c.PID == 0 || c.Version == "" {
			t.Errorf("%+v", c)
		}
	}
	if diff := cmp.Diff([]string{"default python", "second python", "shell " + "shell"}, got); diff != "" {
		t.Error(diff)
	}
	if r := f.try("eval", id, "--language", "shell", "--", "exit 4"); r.code != 1 || !strings.Contains(r.stderr, "ended (exit status 4)") || !strings.Contains(r.stderr, "--restart") {
		t.Errorf("%+v", r)
	}
	if r := f.try("eval", id, "--language", "shell", "--", "echo on"); r.code != 1 || !strings.Contains(r.stderr, "ended earlier") {
		t.Errorf("%+v", r)
	}
	f.run("contexts", "restart", id, "shell")
	if got := f.run("eval", id, "--language", "shell", "--", "echo \"<$x>\""); got != "<>\n" {
		t.Errorf("%q", got)
	}
	f.run("contexts", "rm", id, "second")
	if r := f.try("contexts", "restart", id, "second"); r.code == 0 || !strings.Contains(r.stderr, "no context") {
		t.Errorf("%+v", r)
	}
	if r := f.try("eval", id, "--language", "cobol", "--", "1"); r.code == 0 || !strings.Contains(r.stderr, "no interpreter for language") {
		t.Errorf("%+v", r)
	}
	if r := f.try("eval", id, "x = bytearray(1 << 40)"); r.code != 1 || !strings.Contains(r.stderr, "MemoryError") {
		t.Errorf("%+v", r)
	}
	if r := f.try("eval", id, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"); r.code != 1 || !strings.Contains(r.stderr, "somebody killed it") {
		t.Errorf("%+v", r)
	}
	f.run("contexts", "restart", id, "default")
	// Page after page, until the kernel ends it.
	if r := f.try("eval", id, "x = []\nwhile True: x.append(bytearray(b'x') * (8 << 20))"); r.code != 1 || !strings.Contains(r.stderr, "out of memory") {
		t.Errorf("%+v", r)
	}
}

// TestResults: what code shows, on the command line and in a streamed reply, in order.
func TestResults(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one()
	code := "class R:\n    def __repr__(self): return 'r'\n    def _repr_png_(self): return b'\\x89PNG\\r\\n\\x1a\\n' + bytes(20)\n" +
		"print('one')\ndisplay(R())\nprint('two')\nR()"
	r := f.try("eval", id, code)
	if r.stdout != "one\ntwo\nr\n" || strings.Count(r.stderr, "[png ") != 2 {
		t.Errorf("%+v", r)
	}
	dir := filepath.Join(t.TempDir(), "out")
	f.run("eval", id, "-o", dir, "--", code)
	if b, err := os.ReadFile(filepath.Join(dir, "result-2.png")); err != nil || !bytes.HasPrefix(b, []byte("\x89PNG")) {
		t.Errorf("%q %v", b, err)
	}
	var res api.EvalResponse
	f.json(&res, "eval", id, code)
	if len(res.Results) != 2 || res.Results[0].PNG == "" || res.Results[0].Main || !res.Results[1].Main || res.Stdout != "one\ntwo\n" || *res.Result != "r" {
		t.Errorf("%+v", res)
	}

	for _, accept := range []string{"application/x-ndjson", "text/event-stream"} {
		var kinds []string
		for _, e := range f.events(id, accept, code+"\n1/0") {
			kinds = append(kinds, strings.TrimSpace(e.Type+" "+e.Text+e.Name))
		}
		want := []string{
			"stdout one", "result r", "stdout two", "error ZeroDivisionError", "number_of_executions", "end_of_execution",
		}
		if diff := cmp.Diff(want, kinds); diff != "" {
			t.Errorf("%s: %s", accept, diff)
		}
	}
}

// events evaluates through the API, with a stream as the reply.
func (f *forkd) events(id, accept, code string) []api.EvalEvent {
	f.t.Helper()
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(f.home, "forkd.sock"))
		},
	}, Timeout: 5 * time.Minute}
	body, err := json.Marshal(api.EvalRequest{Code: code})
	if err != nil {
		f.t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(f.t.Context(), http.MethodPost, "http://forkd/v1/sandboxes/"+id+"/eval", bytes.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	req.Header.Set("Accept", accept)
	resp, err := client.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != accept {
		f.t.Fatalf("%s %s", resp.Status, resp.Header.Get("Content-Type"))
	}
	var list []api.EvalEvent
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		text, ok := strings.CutPrefix(lines.Text(), "data: ")
		if ok != (accept == "text/event-stream") {
			continue
		}
		var e api.EvalEvent
		if err := json.Unmarshal([]byte(text), &e); err != nil {
			f.t.Fatalf("%q: %v", text, err)
		}
		list = append(list, e)
	}
	return list
}

// TestInstalledDriver: the driver of docs/contexts.md, in a guest that has nothing but Debian's base, and in a fork of it.
func TestInstalledDriver(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	page, err := os.ReadFile("../docs/contexts.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(page), "```perl\n")
	text, _, _ := strings.Cut(rest, "```")
	path := filepath.Join(t.TempDir(), "perl")
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	id := f.one()
	f.run("exec", id, "--", "mkdir", "-p", "/etc/forkd/contexts.d")
	f.run("cp", path, id+":/etc/forkd/contexts.d/perl")
	f.run("exec", id, "--", "chmod", "755", "/etc/forkd/contexts.d/perl")
	if got := f.run("eval", id, "--language", "perl", "--", "$x = 20; print \"hi\\n\"; $x + 22"); got != "hi\n42\n" {
		t.Errorf("%q", got)
	}
	tag := "perl-driver"
	f.run("branch", id, "-t", tag)
	defer f.try("rmi", tag)
	children := f.forkOf(tag, 1)
	defer f.run("kill", children[0].ID)
	if got := f.run("eval", children[0].ID, "--language", "perl", "--", "$x"); got != "20\n" {
		t.Errorf("%q", got)
	}
	report, err := json.Marshal(children[0].CloneReport)
	if err != nil || !strings.Contains(string(report), "cannot renew") {
		t.Errorf("%s %v", report, err)
	}
}
