package cli

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/api"
)

func TestTopRows(t *testing.T) {
	before := []api.Usage{{ID: "a", TimestampUnix: 100, CPUSeconds: 1, IOReadBytes: 1000}, {ID: "gone", TimestampUnix: 100}}
	now := []api.Usage{
		{ID: "a", TimestampUnix: 102, AgeSeconds: 50, CPUSeconds: 2, IOReadBytes: 3000, IOWrittenBytes: 10},
		{ID: "new", TimestampUnix: 102, AgeSeconds: 4, CPUSeconds: 2},
		{ID: "odd", TimestampUnix: 102, CPUSeconds: 2}, // of no age
	}
	got := map[string][]float64{}
	for _, r := range topRows(before, now) {
		got[r.ID] = []float64{r.CPUPercent, r.IOReadBytesPerSecond, r.IOWrittenBytesPerSecond}
	}
	want := map[string][]float64{"a": {50, 1000, 5}, "new": {50, 0, 0}, "odd": {0, 0, 0}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestTopOrders(t *testing.T) {
	rows := []topRow{
		{Usage: api.Usage{ID: "a", SnapshotTag: "z", MemoryOwnBytes: 1, DiskOwnBytes: 3, CPUSeconds: 2, AgeSeconds: 2}, CPUPercent: 2, IOReadBytesPerSecond: 1},
		{Usage: api.Usage{ID: "b", SnapshotTag: "y", MemoryOwnBytes: 2, DiskOwnBytes: 2, CPUSeconds: 3, AgeSeconds: 1}, CPUPercent: 3, IOReadBytesPerSecond: 2},
		{Usage: api.Usage{ID: "c", SnapshotTag: "z", MemoryOwnBytes: 3, DiskOwnBytes: 1, CPUSeconds: 1, AgeSeconds: 3}, CPUPercent: 1, IOWrittenBytesPerSecond: 3},
	}
	want := map[string]string{
		"cpu": "bac", "memory": "cba", "disk": "abc", "io": "cba", "time": "bac", "age": "cab", "snapshot": "bac", "id": "abc",
	}
	for _, by := range topOrderNames() {
		for _, reverse := range []bool{false, true} {
			sortRows(rows, by, reverse)
			got := rows[0].ID + rows[1].ID + rows[2].ID
			expect := want[by]
			if reverse {
				expect = reversed(expect)
				if by == "snapshot" { // those of the same one stay in the order of their ids
					expect = "acb"
				}
			}
			if got != expect {
				t.Errorf("by %s, reverse %t: %s, want %s", by, reverse, got, expect)
			}
		}
	}
	for key, by := range topKeys() {
		if _, ok := topOrders()[by]; !ok {
			t.Errorf("key %c sorts by %s, which is no order", key, by)
		}
	}
}

func reversed(s string) string {
	var b strings.Builder
	for i := len(s) - 1; i >= 0; i-- {
		b.WriteByte(s[i])
	}
	return b.String()
}

func TestTopPicture(t *testing.T) {
	s := &topScreen{flags: topFlags{sort: "cpu"}}
	for i, state := range []string{"running", "paused", "running"} {
		s.rows = append(s.rows, topRow{
			Usage: api.Usage{
				ID: "sb" + strings.Repeat("a", i+1), SnapshotTag: "py\x1b[31m", State: state, CPUs: 1, CPUSeconds: 61.5, MemoryOwnBytes: 1 << 20, AgeSeconds: 3,
				Labels: map[string]string{"k": "v\nw"},
			},
			CPUPercent: float64(i) * 10,
		})
	}
	text := s.picture(200, 24)
	for _, want := range []string{
		"3 sandboxes, 2 running, 1 paused   CPU 30%   own memory 3.0 MiB", "by cpu", "\x1b[7mID", "1:01.50", "20.0%", "k=v⏎w",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %q", want, text)
		}
	}
	if strings.Contains(text, "\x1b[31m") {
		t.Error("a snapshot's tag steers the terminal")
	}
	small := s.picture(10, 4)
	if n := strings.Count(small, "\r\n"); n != 3 {
		t.Errorf("%d lines on a screen of 4: %q", n+1, small)
	}
	s.err = errDetached
	if text := s.picture(200, 24); !strings.Contains(text, errDetached.Error()) {
		t.Errorf("the trouble is not shown: %q", text)
	}
}

func TestTopOnce(t *testing.T) {
	d := &canned{replies: map[string]any{
		"GET /v1/usage?label=a%3Db": []api.Usage{{ID: "sba", SnapshotTag: "py", State: "running", TimestampUnix: 5, AgeSeconds: 5, CPUSeconds: 1}},
	}}
	code, out, errs := d.run(t, "top", "-l", "a=b", "--sort", "memory")
	if code != 0 || !strings.Contains(out, "sba") || !strings.Contains(out, "MEMORY OWN+SHARED") || strings.Contains(out, "\x1b") {
		t.Errorf("%d: %s%s", code, out, errs)
	}
	for _, bad := range [][]string{{"top", "--sort", "colour"}, {"top", "--interval", "1ms"}, {"top", "x"}} {
		if code, _, errs := d.run(t, bad...); code != exitUsage || errs == "" {
			t.Errorf("%v: %d %s", bad, code, errs)
		}
	}
}

func TestEvents(t *testing.T) {
	const lines = `{"sequence":7,"time":"2026-11-30T04:05:06Z","type":"sandbox.failed","sandbox_id":"sba","snapshot_tag":"py","reason":"a\u001b[31m\nb"}
{"sequence":8,"time":"2026-11-30T04:05:07Z","type":"events.lost","lost":3,"reason":"r"}
`
	d := &canned{replies: map[string]any{"GET /v1/events?follow=false&tail=2": lines, "GET /v1/events?follow=false&since=6&type=sandbox": lines}}
	code, out, errs := d.run(t, "events", "-n", "2")
	if code != 0 || !strings.Contains(out, "sandbox.failed     sba snapshot=py reason: a") || strings.Contains(out, "\x1b") || strings.Count(out, "\n") != 2 ||
		!strings.Contains(out, "lost=3") {
		t.Errorf("%d: %q %s", code, out, errs)
	}
	code, out, errs = d.run(t, "events", "--json", "--since", "6", "--type", "sandbox")
	if code != 0 || strings.Count(out, "\n") != 2 || !strings.Contains(out, `"sequence":7`) {
		t.Errorf("%d: %q %s", code, out, errs)
	}
	for _, bad := range [][]string{{"events", "--since", "x"}, {"events", "-n", "-2"}, {"events", "-n", "1", "--since", "1"}} {
		if code, _, errs := d.run(t, bad...); code != exitUsage || errs == "" {
			t.Errorf("%v: %d %s", bad, code, errs)
		}
	}
}
