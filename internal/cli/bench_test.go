package cli

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/image"
)

func TestSpread(t *testing.T) {
	if got := spreadOf(nil); got != (spread{}) {
		t.Errorf("of nothing: %+v", got)
	}
	sample := []float64{9}
	for i := range 99 {
		sample = append(sample, float64(100-i)) // 100 … 2
	}
	want := spread{Runs: 100, First: 9, Min: 2, P50: 50, P90: 90, P99: 99, Max: 100}
	if diff := cmp.Diff(want, spreadOf(sample)); diff != "" {
		t.Error(diff)
	}
	if sample[0] != 9 || sample[1] != 100 {
		t.Error("the sample was sorted in place; its order is part of the report")
	}
}

func TestLongestGap(t *testing.T) {
	at := func(ms int) time.Time { return time.UnixMilli(int64(ms)) }
	var times []time.Time
	for _, ms := range []int{0, 10, 20, 90, 100, 105, 300} {
		times = append(times, at(ms))
	}
	for _, tt := range []struct {
		from, to int
		want     float64
		known    bool
	}{
		{0, 100, 70, true},
		{25, 80, 70, true},   // wholly inside one gap
		{95, 104, 10, true},  // the long one is over, the longest is not yet
		{95, 110, 195, true}, // begun before the end
		{100, 105, 5, true},
		{300, 300, 0, true},
		{0, 301, 0, false}, // nothing heard since
	} {
		got, known := longestGap(times, at(tt.from), at(tt.to))
		if got != tt.want || known != tt.known {
			t.Errorf("from %d to %d: %g, %t; want %g, %t", tt.from, tt.to, got, known, tt.want, tt.known)
		}
	}
	if _, known := longestGap(nil, at(0), at(0)); known {
		t.Error("a gap is known of no answers")
	}
}

// TestParentRecipe: the recipe is text of this program, which a user never sees before it is refused.
func TestParentRecipe(t *testing.T) {
	r, err := image.ParseRecipe("recipe.yaml", fmt.Appendf(nil, parentRecipe, 1536, 512))
	if err != nil {
		t.Fatal(err)
	}
	if r.Machine.MemoryBytes != 1536<<20 || !strings.Contains(r.Warmup.Code, "range(512)") {
		t.Errorf("a parent of 1536 MiB, 512 in use, has %d bytes and warms up with %q", r.Machine.MemoryBytes, r.Warmup.Code)
	}
	python, err := os.ReadFile("../../recipes/python-numpy/recipe.yaml")
	if err != nil {
		t.Fatal(err)
	}
	same, err := image.ParseRecipe("recipe.yaml", python)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(same.Packages, r.Packages); diff != "" || same.Machine.DiskBytes != r.Machine.DiskBytes {
		t.Errorf("the parent needs an image of its own, quickstart's would do: packages %s", diff)
	}
}

func testReport() *branchReport {
	r := &branchReport{
		Host: &api.HostInfo{
			Kernel: "Linux 6.18", CPUs: 2, CPUModel: "Some <CPU>", StoreFilesystem: "ext4", LoadAverage: []float64{0.5, 1, 2},
			Engine: map[string]any{"format": map[string]any{"engine": "qemu", "version": "7.2.22", "accelerator": "tcg"}},
		},
		Tag: "forkd-bench-512-0", MemoryMiB: 512, UsedMiB: 128, WriterMiB: 100, Runs: 6,
	}
	live, diff := newSeries(modeLive, 0), newSeries(modeDiff, 100)
	for i := range 6 {
		ms := float64(i + 1)
		live.Samples = append(live.Samples, branchSample{CallMS: ms, ReadyMS: 100 * ms, PauseMS: 2 * ms, ClientGapMS: 10 * ms, MemoryMiB: 3, StoredMiB: 1})
		live.Quiet = append(live.Quiet, quietSample{ClientGapMS: 4, TickerGapMS: 2, Ticks: 500})
	}
	live.Children = append(live.Children, childSample{CopyMS: 50, AnswerMS: 250, AfterCopy: 200})
	live.sum()
	diff.Error = "this host <cannot>"
	r.Series = []*branchSeries{live, diff}
	return r
}

func TestBranchReport(t *testing.T) {
	r := testReport()
	if got := r.Series[0].Sixth; got != 6 {
		t.Errorf("the sixth is %g times the first, want 6", got)
	}
	var out bytes.Buffer
	if err := printBranches(&out, r); err != nil {
		t.Fatal(err)
	}
	golden(t, "bench_branch.txt", out.Bytes())
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"host", "load_average", "series", "samples", "client_gap_ms", "ticker_gap_ms", "p99", "after_copy_ms"} {
		if !bytes.Contains(text, []byte(`"`+key+`"`)) {
			t.Errorf("the report has no %q", key)
		}
	}
}

func TestFiguresAreWellFormed(t *testing.T) {
	fork := &benchReport{Host: testReport().Host, Tag: "t", Samples: forkSamples{Single: []float64{1, 2}, Own: []float64{30}}}
	for name, f := range map[string]interface{ Write(w io.Writer) error }{
		"branch": testReport().figure(), "fork": fork.figure(),
	} {
		var out bytes.Buffer
		if err := f.Write(&out); err != nil {
			t.Fatal(err)
		}
		d := xml.NewDecoder(&out)
		for {
			_, err := d.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}
}

func TestBranchBenchFlags(t *testing.T) {
	good := branchBench{mode: modeAll, runs: 1, memory: 1536, used: 1024}
	if err := good.check(); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(b *branchBench){
		"mode":   func(b *branchBench) { b.mode = modeAuto },
		"runs":   func(b *branchBench) { b.runs = 0 },
		"memory": func(b *branchBench) { b.held = 512 },
		"writer": func(b *branchBench) { b.writer = -1 },
	} {
		b := good
		change(&b)
		if err := b.check(); err == nil {
			t.Errorf("a bad %s is accepted", name)
		}
	}
}

// golden compares with a file of testdata; FORKD_TEST_UPDATE=1 writes it.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if os.Getenv("FORKD_TEST_UPDATE") != "" {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got; FORKD_TEST_UPDATE=1 rewrites it):\n%s", path, diff)
	}
}

func TestRefusedBranchesAreAskedForAgainAndCounted(t *testing.T) {
	b := branchBench{a: &App{Err: io.Discard}}
	late := &api.Error{Code: api.CodeTimeout, Message: "user processes did not stop"}
	s, left := newSeries(modeLive, 0), 3
	err := b.again(s, func() error {
		if left--; left > 0 {
			return late
		}
		return nil
	})
	if err != nil || s.Refused != 2 {
		t.Errorf("%v after %d refusals, want none after 2", err, s.Refused)
	}
	s = newSeries(modeLive, 0)
	if err := b.again(s, func() error { return late }); !errors.Is(err, late) || s.Refused != maxRefused {
		t.Errorf("%v after %d refusals, want the error after %d", err, s.Refused, maxRefused)
	}
	s = newSeries(modeLive, 0)
	other := &api.Error{Code: api.CodeIncompatible}
	if err := b.again(s, func() error { return other }); !errors.Is(err, other) || s.Refused != 0 {
		t.Errorf("%v after %d refusals, want the error at once", err, s.Refused)
	}
}
