package daemon

import (
	"testing"

	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/metrics"
)

// TestWords: what the host calls what it times is what the metrics know it by.
func TestWords(t *testing.T) {
	for _, w := range []struct {
		host host.Timed
		ours metrics.Operation
	}{
		{host.TimedFork, metrics.Fork},
		{host.TimedForkChild, metrics.ForkChild},
		{host.TimedBranch, metrics.Branch},
		{host.TimedBranchPause, metrics.BranchPause},
		{host.TimedBranchFrozen, metrics.BranchFrozen},
		{host.TimedBoot, metrics.Boot},
		{host.TimedBuild, metrics.Build},
		{host.TimedPause, metrics.Pause},
		{host.TimedResume, metrics.Resume},
		{host.TimedSuspend, metrics.Suspend},
		{host.TimedWake, metrics.Wake},
	} {
		if string(w.host) != string(w.ours) {
			t.Errorf("the host says %s, the metrics %s", w.host, w.ours)
		}
	}
	for _, w := range []struct {
		host host.Outcome
		ours metrics.Result
	}{
		{host.Done, metrics.OK},
		{host.Refused, metrics.Refused},
		{host.Canceled, metrics.Canceled},
		{host.Broken, metrics.Failed},
	} {
		if string(w.host) != string(w.ours) {
			t.Errorf("the host says %s, the metrics %s", w.host, w.ours)
		}
	}
}
