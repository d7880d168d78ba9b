package httpapi

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/lineage"
)

func TestBranchRequests(t *testing.T) {
	yes, no := true, false
	for _, tt := range []struct {
		name string
		req  api.BranchRequest
		want host.BranchSpec
		err  error
	}{
		{name: "nothing", want: host.BranchSpec{Mode: host.BranchAuto}},
		{name: "auto", req: api.BranchRequest{Mode: "auto", Tag: "t"}, want: host.BranchSpec{Mode: host.BranchAuto, Tag: "t"}},
		{name: "live", req: api.BranchRequest{Mode: "live"}, want: host.BranchSpec{Mode: host.BranchLive}},
		{name: "diff", req: api.BranchRequest{Mode: "diff"}, want: host.BranchSpec{Mode: host.BranchDiff}},
		{name: "full", req: api.BranchRequest{Mode: "full"}, want: host.BranchSpec{Mode: host.BranchFull}},
		{name: "no such mode", req: api.BranchRequest{Mode: "fast"}, err: host.ErrInvalid},
		{name: "waits", req: api.BranchRequest{Wait: &yes}, want: host.BranchSpec{Mode: host.BranchAuto}},
		{name: "does not wait", req: api.BranchRequest{Wait: &no}, want: host.BranchSpec{Mode: host.BranchAuto, NoWait: true}},
		{name: "does not wait, any mode", req: api.BranchRequest{Wait: &no, Mode: "full"}, want: host.BranchSpec{Mode: host.BranchFull, NoWait: true}},
		{name: "legacy diff", req: api.BranchRequest{Diff: true}, want: host.BranchSpec{Mode: host.BranchDiff}},
		{name: "legacy live", req: api.BranchRequest{Live: true, Wait: &no}, want: host.BranchSpec{Mode: host.BranchLive, NoWait: true}},
		{name: "legacy measure", req: api.BranchRequest{MeasureDiff: true}, want: host.BranchSpec{Mode: host.BranchAuto}},
		{name: "legacy parent", req: api.BranchRequest{ParentTag: "p", Mode: "diff"}, want: host.BranchSpec{Mode: host.BranchDiff, Parent: "p"}},
		{name: "two legacy words", req: api.BranchRequest{Diff: true, Live: true}, err: host.ErrInvalid},
		{name: "measure and live", req: api.BranchRequest{MeasureDiff: true, Live: true}, err: host.ErrInvalid},
		{name: "mode and a legacy word", req: api.BranchRequest{Mode: "diff", Diff: true}, err: host.ErrInvalid},
		{name: "mode and measure", req: api.BranchRequest{Mode: "auto", MeasureDiff: true}, err: host.ErrInvalid},
		{name: "bad tag", req: api.BranchRequest{Tag: "../x"}, err: lineage.ErrName},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := branchSpec(tt.req)
			if !errors.Is(err, tt.err) {
				t.Fatalf("error is %v, want %v", err, tt.err)
			}
			if err != nil {
				return
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestChildrenOfABranch(t *testing.T) {
	labels := map[string]string{"a": "b"}
	got, err := childrenSpec(api.BranchRequest{N: 3, Labels: labels, Env: labels, TTLSeconds: 1.5})
	if err != nil {
		t.Fatal(err)
	}
	want := host.ForkSpec{N: 3, Labels: labels, Env: labels, TTL: 1500 * time.Millisecond}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if _, err := childrenSpec(api.BranchRequest{}); err != nil {
		t.Error(err)
	}
	for name, req := range map[string]api.BranchRequest{
		"negative n": {N: -1}, "huge n": {N: host.MaxForkN + 1}, "labels of nobody": {Labels: labels}, "env of nobody": {Env: labels},
		"ttl of nobody": {TTLSeconds: 1}, "negative ttl": {N: 1, TTLSeconds: -1}, "endless ttl": {N: 1, TTLSeconds: 1e300},
	} {
		if _, err := childrenSpec(req); !errors.Is(err, host.ErrInvalid) {
			t.Errorf("%s: %v, want %v", name, err, host.ErrInvalid)
		}
	}
}

func TestWaitTime(t *testing.T) {
	for query, want := range map[string]time.Duration{
		"": 0, "?wait=": 0, "?wait=0": 0, "?wait=1.5": 1500 * time.Millisecond, "?wait=3600": time.Hour,
	} {
		got, err := waitTime(httptest.NewRequest(http.MethodGet, "/x"+query, nil))
		if err != nil || got != want {
			t.Errorf("%q: %v, %v; want %v", query, got, err, want)
		}
	}
	for _, query := range []string{"?wait=-1", "?wait=x", "?wait=NaN", "?wait=Inf", "?wait=3601", "?wait=10s"} {
		if got, err := waitTime(httptest.NewRequest(http.MethodGet, "/x"+query, nil)); !errors.Is(err, host.ErrInvalid) {
			t.Errorf("%q: %v, %v; want %v", query, got, err, host.ErrInvalid)
		}
	}
}

func TestRemoveOptions(t *testing.T) {
	for query, want := range map[string]host.RemoveOptions{
		"": {}, "?cascade=true": {Cascade: true}, "?force=1": {Force: true}, "?cascade=false&force=true": {Force: true},
	} {
		got, err := removeOptions(httptest.NewRequest(http.MethodDelete, "/x"+query, nil))
		if err != nil || got != want {
			t.Errorf("%q: %+v, %v; want %+v", query, got, err, want)
		}
	}
	for _, query := range []string{"?cascade=true&force=true", "?cascade=yes", "?force=2"} {
		if _, err := removeOptions(httptest.NewRequest(http.MethodDelete, "/x"+query, nil)); !errors.Is(err, host.ErrInvalid) {
			t.Errorf("%q: %v, want %v", query, err, host.ErrInvalid)
		}
	}
}

func TestErrorsOfBranches(t *testing.T) {
	for _, tt := range []struct {
		err    error
		status int
		code   api.Code
		hint   bool
	}{
		{fmt.Errorf("branch: %w", errLive), http.StatusConflict, api.CodeIncompatible, true},
		{fmt.Errorf("branch: %w", lineage.ErrState), http.StatusConflict, api.CodeWrongState, false},
		{fmt.Errorf("branch: %w", host.ErrBusy), http.StatusConflict, api.CodeBusy, false},
		{fmt.Errorf("branch: %w", host.ErrExhausted), http.StatusServiceUnavailable, api.CodeNoCapacity, false},
		{fmt.Errorf("branch: %w", host.ErrUnsupported), http.StatusNotImplemented, api.CodeUnsupported, false},
	} {
		e := toAPI(tt.err)
		if e.Code != tt.code || status(e.Code) != tt.status || (e.Hint != "") != tt.hint {
			t.Errorf("%v is %+v with status %d, want code %s, status %d, a hint: %t", tt.err, e, status(e.Code), tt.code, tt.status, tt.hint)
		}
	}
}

func TestSnapshotsInTheMaking(t *testing.T) {
	v := host.SnapshotView{Status: lineage.Writing, Progress: 0.25}
	v.Tag = "t"
	got := snapshot(v)
	if got.Status != "writing" || got.Bootable || got.ID != "" || got.Progress != 0.25 || got.Warm == nil {
		t.Errorf("a writing snapshot is shown as %+v", got)
	}
	got = snapshot(host.SnapshotView{Status: lineage.FailedSnap, Reason: "disk full"})
	if got.Status != "failed" || got.Error != "disk full" {
		t.Errorf("a failed snapshot is shown as %+v", got)
	}
	if got = snapshot(host.SnapshotView{Status: lineage.Ready}); got.ID == "" || !got.Bootable {
		t.Errorf("a ready snapshot is shown as %+v", got)
	}
}
