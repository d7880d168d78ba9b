package e2e

import (
	"encoding/json"
	"fmt"
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

// TestEscapes makes every attempt of the table to get out of a virtual machine, of a child without a policy and again when
// it may reach one domain. Each is refused and told of by the flows; the outside's own record shows that nothing else was
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
	id := f.one()
	f.run("cp", self, id+":/root/attempts")
	var last uint64
	for _, what := range []string{"closed", "open"} {
		if what == "open" {
			f.run("egress", id, "allow", escapetest.Allowed, "*."+escapetest.Allowed)
		}
		begun := time.Now()
		reports := map[string]attemptReport{}
		for _, r := range jsonLines[attemptReport](t, f.run("exec", id, "--", "/root/attempts", attemptsWord, what)) {
			reports[r.Name] = r
		}
		closed := what == "closed"
		made := checkReports(t, reports, closed)
		var flows []api.Flow
		var untold []string
		for range 10 { // Frames, and flows' ends, may be on their way still.
			flows = jsonLines[api.Flow](t, f.run("egress", id, "log", "--json"))
			// Those that are refused as before are counted on the flows that told of them the first time.
			fresh := slices.DeleteFunc(slices.Clone(flows), func(w api.Flow) bool { return w.ID <= last && w.Attempts < 2 })
			if untold = notTold(fresh, closed); len(untold) == 0 {
				break
			}
		}
		for _, a := range untold {
			t.Errorf("no flow tells of %s", a)
		}
		dials, lookups := leftBy(t, log)
		for _, leak := range escapetest.Leaks(dials, lookups, servers.Seen(), what == "open") {
			t.Error(leak)
		}
		t.Logf("%s: %d attempts in %v, %d flows, %d dials, %d lookups outside", what, made, time.Since(begun).Round(time.Millisecond), len(flows), len(dials), len(lookups))
		for _, w := range flows {
			last = max(last, w.ID)
		}
	}
}

func jsonLines[T any](t *testing.T, text string) (all []T) {
	t.Helper()
	for line := range strings.Lines(text) {
		var v T
		if err := json.Unmarshal([]byte(line), &v); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		all = append(all, v)
	}
	return all
}

// checkReports counts the attempts that were made; none has succeeded, and what is allowed has.
func checkReports(t *testing.T, reports map[string]attemptReport, closed bool) (made int) {
	t.Helper()
	for _, a := range escapetest.All() {
		if a.WithName && closed {
			continue
		}
		made++
		if r, ok := reports[a.Name]; !ok || a.Escaped(r.Heard) || r.Error == "" {
			t.Errorf("%s: made %v, heard %q, %s", a.Name, ok, r.Heard, r.Error)
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

// notTold are the attempts that no flow tells of.
func notTold(flows []api.Flow, closed bool) (untold []string) {
	for _, a := range escapetest.All() {
		if a.WithName && closed {
			continue
		}
		if !slices.ContainsFunc(flows, func(w api.Flow) bool {
			return w.Verdict == "refused" && a.Tells(w.Protocol, w.To, w.Name, w.Reason, closed)
		}) {
			untold = append(untold, fmt.Sprintf("%s: %s %s %s: %s", a.Name, a.Protocol, a.To, a.Flow, a.Reason))
		}
	}
	return untold
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
	for _, e := range jsonLines[struct{ What, Network, Name string }](t, string(text)) {
		if e.What == "dial" {
			dials = append(dials, e.Network+" "+e.Name)
		} else {
			lookups = append(lookups, e.Name)
		}
	}
	return dials, lookups
}
