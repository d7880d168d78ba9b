package flatten

import (
	"fmt"
	"runtime"
	"testing"
)

// BenchmarkIndex says what a name costs in memory.
func BenchmarkIndex(b *testing.B) {
	const names = 200_000
	layer := func() []byte { // the members themselves are not to be counted
		members := make([]member, 0, names)
		for i := range names {
			members = append(members, file(fmt.Sprintf("usr/lib/python3/dist-packages/package%d/module_%d.py", i%500, i), "x"))
		}
		return pack(b, members...)
	}()
	var before, after runtime.MemStats
	for b.Loop() {
		runtime.GC()
		runtime.ReadMemStats(&before)
		tree := New(DefaultLimits(1 << 40))
		if err := add(b.Context(), tree, layer); err != nil {
			b.Fatal(err)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/names, "bytes/name")
		runtime.KeepAlive(tree)
	}
}
