package load

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m.Run) }

// worked is a churn that has rewritten its memory one and a half times.
func worked(t *testing.T) *churn {
	t.Helper()
	t.Chdir(t.TempDir())
	c, err := newChurn(4 << 20)
	if errors.Is(err, unix.EINVAL) {
		t.Skipf("no direct I/O on this file system: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = c.file.Close(), c.slots.Close() })
	for range c.count()*3/2 + 100 {
		if err := c.step(); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// TestCheck: whatever a capture could mix up of two instants is found.
func TestCheck(t *testing.T) {
	tests := []struct {
		name string
		harm func(t *testing.T, c *churn)
		want string
	}{
		{"nothing", func(*testing.T, *churn) {}, ""},
		{"an old page", func(_ *testing.T, c *churn) { fill(c.page(7), 7, c.generation-1) }, "says it is page 7"},
		{"a new page", func(_ *testing.T, c *churn) { fill(c.page(c.cursor), uint64(c.cursor), c.generation) }, "says it is page"},
		{"another page", func(_ *testing.T, c *churn) { copy(c.page(3), c.page(4)) }, "says it is page 4"},
		{"half a page", func(_ *testing.T, c *churn) { copy(c.page(3)[2048:], c.page(c.cursor)[2048:]) }, "is torn"},
		{"a page of zeros", func(_ *testing.T, c *churn) { clear(c.page(9)) }, "says it is page 0"},
		{"a longer file", func(t *testing.T, c *churn) { write(t, c.file.Write, make([]byte, recordSize)) }, "the file has"},
		{"a shorter file", func(t *testing.T, c *churn) { cut(t, c) }, "records"},
		{"an older slot", func(t *testing.T, c *churn) { slotOf(t, c, c.records-1, c.records-1-slots) }, "the disk has not record"},
		{"a newer slot", func(t *testing.T, c *churn) {
			for c.records <= slots {
				if err := c.step(); err != nil {
					t.Fatal(err)
				}
			}
			slotOf(t, c, c.records, c.records)
		}, "the disk has not record"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := worked(t)
			tt.harm(t, c)
			got := c.report(true, 0).Error
			if (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
				t.Errorf("found %q, want %q", got, tt.want)
			}
		})
	}
}

func write(t *testing.T, to func([]byte) (int, error), b []byte) {
	t.Helper()
	if _, err := to(b); err != nil {
		t.Fatal(err)
	}
}

func cut(t *testing.T, c *churn) {
	t.Helper()
	if err := c.file.Truncate(int64(c.records-1) * recordSize); err != nil {
		t.Fatal(err)
	}
}

func slotOf(t *testing.T, c *churn, place, number uint64) {
	t.Helper()
	fill(c.slot, number, 1)
	write(t, func(b []byte) (int, error) { return c.slots.WriteAt(b, int64(place%slots)*pageSize) }, c.slot)
}

// TestStaleIsFoundLater: a page that a check does not see before it is rewritten is found by its rewriting.
func TestStaleIsFoundLater(t *testing.T) {
	c := worked(t)
	fill(c.page(c.cursor+1), uint64(c.cursor+1), c.generation-2)
	c.some()
	if want := fmt.Sprintf("page %d of generation %d", c.cursor, c.generation-1); !strings.Contains(c.report(false, 0).Error, want) {
		t.Errorf("found %q, want %q", c.report(false, 0).Error, want)
	}
}

// TestChains: two copies of one program have the records of before their parting in common, and no others.
func TestChains(t *testing.T) {
	c := worked(t)
	chains := c.report(true, 0).Chains
	if uint64(len(chains)) != c.records || len(chains) < 4 {
		t.Fatalf("%d chains of %d records", len(chains), c.records)
	}
	if got := c.report(true, 2).Chains; got[0] != chains[2] || len(got) != len(chains)-2 {
		t.Errorf("from record 2 on: %q of %q", got, chains)
	}
}
