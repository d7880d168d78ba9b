package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/network/escapetest"
	"forkd.dev/forkd/internal/network/networktest"
	"forkd.dev/forkd/internal/testenv"
)

// TestEscapes makes every attempt of the table to get out of a virtual machine, from a child without a policy and from one
// that may reach one domain. Each is refused and told of by the flows; the outside's own record shows that nothing else was
// dialled or looked up; what is allowed works.
func TestEscapes(t *testing.T) {
	testenv.OncePerRun(t)
	servers := networktest.NewServers(t)
	stage, log := escapeStage(t, servers)
	f := copied(t, "FORKD_NETWORK_OUTER="+stage)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, what string
		flags      []string
	}{
		{"no policy", "closed", nil},
		{"one domain", "open", []string{"--allow", escapetest.Allowed, "--allow", "*." + escapetest.Allowed}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := &forkd{t: t, bin: f.bin, home: f.home, env: f.env}
			id := f.one(c.flags...)
			f.run("cp", self, id+":/root/attempts")
			begun := time.Now()
			reports := map[string]attemptReport{}
			for line := range strings.Lines(f.run("exec", id, "--", "/root/attempts", attemptsWord, c.what)) {
				var r attemptReport
				if err := json.Unmarshal([]byte(line), &r); err != nil {
					t.Fatalf("%v: %s", err, line)
				}
				reports[r.Name] = r
			}
			var flows []api.Flow
			f.json(&flows, "egress", id, "log")
			made := checkEscapes(t, reports, flows, c.what == "closed")
			dials, lookups := leftBy(t, log)
			for _, leak := range escapetest.Leaks(dials, lookups, servers.Seen(), c.what == "open") {
				t.Error(leak)
			}
			t.Logf("%d attempts in %v, %d flows, %d dials, %d lookups outside", made, time.Since(begun).Round(time.Millisecond), len(flows), len(dials), len(lookups))
		})
	}
}

func checkEscapes(t *testing.T, reports map[string]attemptReport, flows []api.Flow, closed bool) (made int) {
	for _, a := range escapetest.All() {
		if a.WithName && closed {
			continue
		}
		made++
		r, ok := reports[a.Name]
		if !ok || a.Escaped(r.Heard) || r.Error == "" {
			t.Errorf("%s: made %v, heard %q, %s", a.Name, ok, r.Heard, r.Error)
		}
		if !slices.ContainsFunc(flows, func(w api.Flow) bool {
			return w.Verdict == "refused" && a.Tells(w.Protocol, w.To, w.Name, w.Reason, closed)
		}) {
			t.Errorf("%s: no flow tells of %s %s %s: %s (in the guest: %s)", a.Name, a.Protocol, a.To, a.Flow, a.Reason, r.Error)
		}
	}
	if closed {
		return made
	}
	for name := range escapetest.Honest() {
		if r, ok := reports[name]; !ok || r.Error != "" {
			t.Errorf("%s, which is allowed: made %v, heard %q, %s", name, ok, r.Heard, r.Error)
		}
	}
	return made
}

// escapeStage writes the outside of the attempts' world, and names the file of its record.
func escapeStage(t *testing.T, servers *networktest.Servers) (stage, log string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil { // the process of networks may be another user's
		t.Fatal(err)
	}
	stage, log = filepath.Join(dir, "outside.json"), filepath.Join(dir, "outside.log")
	text, err := json.Marshal(map[string]any{
		"names": escapetest.Names(), "hosts": servers.Hosts, "own": []netip.Addr{netip.MustParseAddr(escapetest.Own4)}, "log": log,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(stage, text, 0o644); err != nil { //nolint:gosec // as the directory
		t.Fatal(err)
	}
	return stage, log
}

// leftBy is what an outside has recorded.
func leftBy(t *testing.T, log string) (dials, lookups []string) {
	t.Helper()
	text, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for lines.Scan() {
		var e struct{ What, Network, Name string }
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatal(err)
		}
		if e.What == "dial" {
			dials = append(dials, e.Network+" "+e.Name)
		} else {
			lookups = append(lookups, e.Name)
		}
	}
	return dials, lookups
}
