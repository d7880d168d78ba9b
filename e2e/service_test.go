package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/testenv"
)

// installed is what scripts/install makes, below a directory.
func installed(t *testing.T, prefix string) (dir string) {
	t.Helper()
	testenv.Need(t, "bash", "binary")
	dir = t.TempDir()
	run := func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), filepath.Join(testenv.Root(t), "scripts", "install"), args...)
		cmd.Env = append(os.Environ(), "DESTDIR="+dir, "PREFIX="+prefix, "FORKD_BINARY="+testenv.Binary(t))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("install %v: %v\n%s", args, err, out)
		}
	}
	run()
	run("--remove")
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			t.Errorf("%s is still there after its removal", path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	run()
	return dir
}

// TestInstall: the program, its completions and its unit are where they belong, and other programs accept them.
func TestInstall(t *testing.T) {
	dir := installed(t, "/opt/forkd")
	unit := filepath.Join(dir, "opt/forkd/lib/systemd/system/forkd.service")
	text := readFile(t, unit)
	if !strings.Contains(text, "ExecStart=/opt/forkd/bin/forkd serve\n") {
		t.Errorf("the unit starts another program:\n%s", text)
	}
	// What jails are made with is left to the daemon; without one of them they would be those of other users than root.
	_, needs, _ := strings.Cut(readFile(t, filepath.Join(testenv.Root(t), "docs", "security.md")), "## Capabilities that the daemon needs as root")
	for _, name := range regexp.MustCompile("CAP_[A-Z_]+").FindAllString(needs, -1) {
		if !regexp.MustCompile(`(?m)^CapabilityBoundingSet=.*\b` + name + `\b`).MatchString(text) {
			t.Errorf("the unit takes %s from the daemon", name)
		}
	}
	share := filepath.Join(dir, "opt/forkd/share")
	bash := "source " + filepath.Join(share, "bash-completion/completions/forkd") + " && complete -p forkd"
	if out, err := exec.CommandContext(t.Context(), "bash", "-c", bash).CombinedOutput(); err != nil || !strings.Contains(string(out), "__start_forkd") {
		t.Errorf("the completion of bash: %v\n%s", err, out)
	}
	for shell, file := range map[string]string{"zsh": "zsh/site-functions/_forkd", "fish": "fish/vendor_completions.d/forkd.fish"} {
		path := filepath.Join(share, file)
		if !strings.Contains(readFile(t, path), "forkd") {
			t.Errorf("there is no completion for %s", shell)
		}
		if program, err := exec.LookPath(shell); err == nil {
			if out, err := exec.CommandContext(t.Context(), program, "-n", path).CombinedOutput(); err != nil { //nolint:gosec // It is a shell's.
				t.Errorf("the completion of %s: %v\n%s", shell, err, out)
			}
		}
	}
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		testenv.Missing(t, "systemd-analyze", err.Error())
	}
	// It is to be started from where it lies now.
	if err := os.WriteFile(unit, bytes.ReplaceAll([]byte(text), []byte("/opt/forkd/bin"), []byte(filepath.Join(dir, "opt/forkd/bin"))), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"verify", unit},
		// What it may do beyond this is what its machines need; the unit says of each why.
		{"security", "--offline=yes", "--threshold=53", unit},
	} {
		cmd := exec.CommandContext(t.Context(), analyze, args...) //nolint:gosec // As above.
		cmd.Dir = dir                                             // it asks where it is, which may lie below what this user may not enter
		out, err := cmd.CombinedOutput()
		if err != nil || args[0] == "verify" && len(bytes.TrimSpace(out)) > 0 {
			t.Errorf("systemd-analyze %s: %v\n%s", args[0], err, out)
		}
	}
}

// checkService starts the daemon as a service in a guest with systemd: it says when it is ready, comes back when it is killed, and
// stops when it is told to.
func checkService(t *testing.T, f *forkd, id string) {
	t.Helper()
	dir := installed(t, "/usr/local")
	in := func(command string) string {
		t.Helper()
		return strings.TrimSuffix(f.run("exec", id, "--timeout", "2m", "--", "sh", "-c", command), "\n")
	}
	f.run("cp", "-r", filepath.Join(dir, "usr/local")+"/.", id+":/usr/local")
	in("mkdir -p /etc/forkd && echo FORKD_MAX_SANDBOXES=7 > /etc/forkd/forkd.env")
	if got := in("systemctl daemon-reload && systemctl start forkd.service; systemctl is-active forkd.service"); got != "active" {
		t.Fatalf("the service is %q\n%s", got, in("systemctl status --no-pager forkd.service; journalctl --no-pager -u forkd.service"))
	}
	if got := in("forkd --no-autostart ls -q && forkd --no-autostart --json doctor | grep sandboxes_max"); !strings.Contains(got, "7") {
		t.Errorf("its settings have not arrived: %q", got)
	}
	if got := in("stat -c %a:%U /var/lib/forkd /run/forkd/forkd.sock"); got != "700:root\n600:root" {
		t.Errorf("its files are %q", got)
	}
	pid := in("systemctl show -p MainPID --value forkd.service")
	in("systemctl reload forkd.service")
	if got := in("systemctl show -p MainPID --value forkd.service"); got != pid {
		t.Errorf("after a reload it is process %s, not %s", got, pid)
	}
	in("kill -9 " + pid)
	await(t, 30*time.Second, "the daemon to come back", func() bool {
		return in("forkd --no-autostart daemon status >/dev/null 2>&1; systemctl is-active forkd.service || true") == "active" &&
			in("systemctl show -p MainPID --value forkd.service") != pid
	})
	if got := in("systemctl stop forkd.service; systemctl show -p ActiveState,Result --value forkd.service"); got != "success\ninactive" {
		t.Errorf("after its stop it is %q\n%s", got, in("journalctl --no-pager -u forkd.service"))
	}
}
