package cli

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
)

// boundFlags are those of every verb that makes sandboxes.
type boundFlags struct {
	memory, cpu, io string
	iops, pids      int64
	ttlAction       string
	idle            time.Duration
	idleAction      string
	autoResume      bool
}

func (f *boundFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.memory, "memory-limit", "", "host memory of each, VM process included, e.g. 300MiB; reaching it ends it")
	cmd.Flags().StringVar(&f.cpu, "cpu-limit", "", "processor time of each: 0.5 or 50% of one CPU, 2 of two")
	cmd.Flags().StringVar(&f.io, "io-limit", "", "what each may read, and write, of its disk a second, e.g. 10MiB")
	cmd.Flags().Int64Var(&f.iops, "iops-limit", 0, "how often each may read, and write, of its disk a second")
	cmd.Flags().Int64Var(&f.pids, "pids-limit", 0, "threads of each VM process; the guest has a limit for its processes by itself")
	cmd.Flags().StringVar(&f.ttlAction, "ttl-action", "", "at the end of --ttl: kill (default), pause or suspend")
	cmd.Flags().DurationVar(&f.idle, "idle", 0, "when nobody used it for this time, e.g. 10m: see --idle-action")
	cmd.Flags().StringVar(&f.idleAction, "idle-action", "", "after --idle: suspend (default), pause or kill")
	cmd.Flags().BoolVar(&f.autoResume, "auto-resume", false, "resume or wake it when it is used")
	for _, name := range []string{"ttl-action", "idle-action"} {
		completeWords(cmd, name, "kill", "pause", "suspend")
	}
}

// given says that any was.
func (f *boundFlags) given() bool { return *f != (boundFlags{}) }

// bounds reads them.
func (f *boundFlags) bounds() (api.Bounds, error) {
	b := api.Bounds{
		TTLAction: f.ttlAction, IdleSeconds: f.idle.Seconds(), IdleAction: f.idleAction, AutoResume: f.autoResume,
	}
	l := api.Limits{IORequestsPerSecond: f.iops, PIDs: f.pids}
	var err error
	if f.memory != "" {
		if l.MemoryBytes, err = parseSize(f.memory); err != nil {
			return b, usage("--memory-limit: %w", err)
		}
	}
	if f.io != "" {
		if l.IOBytesPerSecond, err = parseSize(strings.TrimSuffix(f.io, "/s")); err != nil {
			return b, usage("--io-limit: %w", err)
		}
	}
	if f.cpu != "" {
		if l.CPUs, err = parseCPUs(f.cpu); err != nil {
			return b, usage("--cpu-limit: %w", err)
		}
	}
	if f.iops < 0 || f.pids < 0 || f.idle < 0 {
		return b, usage("--iops-limit, --pids-limit and --idle are not negative")
	}
	if f.idleAction != "" && f.idle == 0 {
		return b, usage("--idle-action is done after --idle; give that, too")
	}
	if l != (api.Limits{}) {
		b.Limits = &l
	}
	return b, nil
}

// parseCPUs reads 0.5, 2 or 50%.
func parseCPUs(s string) (float64, error) {
	number, per := s, 1.0
	if n, ok := strings.CutSuffix(s, "%"); ok {
		number, per = n, 100
	}
	n, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if err != nil || !(n > 0) || n > 1e6 {
		return 0, fmt.Errorf("%q is no number of CPUs; give for example 0.5, 2 or 50%%", s)
	}
	return n / per, nil
}
