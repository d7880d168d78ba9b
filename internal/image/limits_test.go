package image

import (
	"strings"
	"testing"
)

func TestLimits(t *testing.T) {
	const base = "base: debian:bookworm\nlimits:\n"
	r, err := ParseRecipe("x", []byte(base+"  memory: 1GiB\n  cpu: 50%\n  io: 10MiB\n  iops: 500\n  pids: 256\n"))
	if err != nil {
		t.Fatal(err)
	}
	if want := (Limits{1 << 30, 0.5, 10 << 20, 500, 256}); r.Limits != want {
		t.Errorf("got %+v, want %+v", r.Limits, want)
	}
	if r, err := ParseRecipe("x", []byte(base+"  cpu: 2\n")); err != nil || r.Limits != (Limits{CPUs: 2}) {
		t.Errorf("cpu alone: %+v, %v", r, err)
	}
	for bad, says := range map[string]string{
		"memory: 1MiB": "64MiB", "memory: 5": "unit", "cpu: 0": "0.01", "cpu: NaN": "0.01", "cpu: -1": "0.01", "cpu: [1]": "single value",
		"cpu: 1e9": "1024", "io: 1KiB": "must be from", "iops: 1": "10", "pids: 3": "128", "swap: 1": "swap",
	} {
		if _, err := ParseRecipe("x", []byte(base+"  "+bad+"\n")); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
