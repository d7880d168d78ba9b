package proc

import (
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSmallPages: the child does without huge pages, and nobody else when it has been started.
func TestSmallPages(t *testing.T) {
	mine := func() int {
		without, err := unix.PrctlRetInt(unix.PR_GET_THP_DISABLE, 0, 0, 0, 0)
		if err != nil {
			t.Skip("this kernel knows nothing of it")
		}
		return without
	}
	if mine() != 0 {
		t.Skip("this process does without by itself")
	}
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			cmd := command("huge")
			cmd.SmallPages = true
			p := start1(t, cmd)
			wait(t, p)
			if out := string(p.Output()); !strings.HasPrefix(out, "1 ") {
				t.Errorf("the child says %q", out)
			}
		})
	}
	all.Wait()
	if mine() != 0 {
		t.Error("this process does without now")
	}
	p := start1(t, command("huge"))
	wait(t, p)
	if out := string(p.Output()); !strings.HasPrefix(out, "0 ") {
		t.Errorf("another child says %q", out)
	}
}
