package e2e

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/testenv"
)

const (
	fireMiB = 112
	// noRecord asks for the chains of no record: of all since the beginning they are megabytes after an hour.
	noRecord = 1 << 62
)

// TestBranchIntegrity: whatever a guest does to its memory and disk at the moment of its capture, the copy is of one
// instant, and the guest does not notice.
func TestBranchIntegrity(t *testing.T) {
	f := shared(t)
	for _, mode := range modes() {
		t.Run(mode, func(t *testing.T) {
			if mode != live {
				testenv.OncePerRun(t)
			}
			f := &forkd{t, f.bin, f.home, f.env}
			needMode(t, f, mode)
			underFire(t, f, mode, number(t, "FORKD_TEST_BRANCHES", 20, 1000))
		})
	}
}

// kept is a branch whose grandchildren are checked again when everything is cold.
type kept struct {
	tag           string
	before, after uint64
}

func underFire(t *testing.T, f *forkd, mode string, n int) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("%d branches, seed %d", n, seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	source := f.one()
	f.fire(source, fireMiB)
	const keep = 3 // of the last: each stands on the one before
	var last []kept
	var pauses, gaps []float64
	begun := f.ask(source, "report", noRecord)
	for i := range n {
		pass(t, time.Duration(rng.Int64N(int64(200*time.Millisecond))))
		before := f.ask(source, "report", noRecord).Records
		flags := []string{"--mode", mode}
		if i%2 == 1 { // The first grandchild then starts before the snapshot is durable.
			flags = append(flags, "--no-wait")
		}
		snap := f.branch(source, flags...)
		now := f.ask(source, "report", before)
		pauses, gaps = append(pauses, snap.PauseMS), append(gaps, now.GapMS)
		if snap.Mode != mode {
			t.Fatalf("asked for %s, got %s: %s", mode, snap.Mode, snap.ModeReason)
		}
		if !grandchild(t, f, source, kept{snap.Tag, before, now.Records}) {
			t.Fatalf("round %d of %d in mode %s, seed %d: the copy is wrong", i, n, mode, seed)
		}
		if f.info(snap.Tag).Status != "ready" {
			t.Fatalf("snapshot %s is not ready: %+v", snap.Tag, f.info(snap.Tag))
		}
		if (i+1)%100 == 0 {
			t.Logf("%s: %d of %d branches, all right", mode, i+1, n)
		}
		if i < n-keep {
			f.remove(snap.Tag)
			continue
		}
		last = append(last, kept{snap.Tag, before, now.Records})
	}
	end := f.ask(source, "check", noRecord)
	t.Logf("%s: pause %s ms, the longest gap of a 1 kHz ticker %s ms; the source rewrote its memory %d times and wrote %d records",
		mode, spread(pauses), spread(gaps), end.Generation-begun.Generation, end.Records-begun.Records)
	if end.Generation <= begun.Generation+1 || end.Records < begun.Records+uint64(n) {
		t.Errorf("the source did next to nothing: from %+v to %+v", begun, end)
	}
	f.restart() // Nothing of the branches is in memory any more: their layers are read.
	for _, k := range last {
		if !grandchild(t, f, source, k) {
			t.Errorf("%s, read from its layers, is wrong", k.tag)
		}
	}
	f.ask(source, "check", noRecord)
}

// grandchild forks a branch and has the fork look for what is wrong with itself, and says whether nothing was.
func grandchild(t *testing.T, f *forkd, source string, k kept) bool {
	t.Helper()
	id := strings.TrimSpace(f.run("fork", k.tag))
	defer f.run("kill", id)
	child := f.answer(id, "check", k.before)
	if child.Error != "" {
		t.Errorf("%s: %s", k.tag, child.Error)
		return false
	}
	origin := f.ask(source, "report", k.before)
	if same := k.before + uint64(common(child, origin)); same < k.before || same > k.after || child.Records < k.before {
		t.Errorf("%s has %d records, of which %d are its source's, which had %d before and %d after", k.tag, child.Records, same,
			k.before, k.after)
		return false
	}
	return true
}
