package cli

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"forkd.dev/forkd/api"
)

// FuzzTop: whatever a daemon says of its sandboxes, the picture has a line for each, and no rate is negative.
func FuzzTop(f *testing.F) {
	const one = `[{"id":"a","snapshot_tag":"t","state":"running","timestamp_unix":1,"cpu_seconds":2,"age_seconds":3,"labels":{"k":"v"}}]`
	for _, seed := range [][2]string{
		{one, strings.ReplaceAll(one, `"timestamp_unix":1`, `"timestamp_unix":1e300`)},
		{"[]", one},
		{one, "[]"},
		{one, one},
		{`[{}]`, `[{},{}]`},
		{one, `[{"id":"\u001b[2J\n","cpu_seconds":-1e308,"memory_own_bytes":-9223372036854775808,"age_seconds":1e308}]`},
	} {
		f.Add([]byte(seed[0]), []byte(seed[1]))
	}
	f.Fuzz(func(t *testing.T, before, now []byte) {
		var old, list []api.Usage
		if json.Unmarshal(before, &old) != nil || json.Unmarshal(now, &list) != nil {
			return
		}
		rows := topRows(old, list)
		if len(rows) != len(list) {
			t.Fatalf("%d rows of %d sandboxes", len(rows), len(list))
		}
		for _, r := range rows {
			if r.CPUPercent < 0 || r.IOReadBytesPerSecond < 0 || r.IOWrittenBytesPerSecond < 0 {
				t.Errorf("a negative rate: %+v", r)
			}
		}
		for _, by := range topOrderNames() {
			sortRows(rows, by, false)
		}
		var out bytes.Buffer
		if err := topTable(&out, rows); err != nil {
			t.Fatal(err)
		}
		if lines := bytes.Count(out.Bytes(), []byte("\n")); lines != len(rows)+1 {
			t.Errorf("%d lines of %d sandboxes:\n%q", lines, len(rows), out.Bytes())
		}
		if bytes.ContainsAny(out.Bytes(), "\x1b\x07\x00") {
			t.Errorf("a terminal would be told: %q", out.Bytes())
		}
	})
}
