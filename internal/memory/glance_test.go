package memory

import (
	"errors"
	"io/fs"
	"os"
	"testing"
)

// TestGlance: it says what the long way says.
func TestGlance(t *testing.T) {
	ballast := make([]byte, 64<<20)
	for i := 0; i < len(ballast); i += 4096 {
		ballast[i] = 1
	}
	long, err := Measure(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	short, err := Glance(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	const near = 8 << 20 // this process runs meanwhile
	if d := long.OwnBytes - short.OwnBytes; d > near || d < -near || short.OwnBytes < int64(len(ballast)) {
		t.Errorf("own: %d the long way, %d the short", long.OwnBytes, short.OwnBytes)
	}
	if d := long.SharedBytes - short.SharedBytes; d > near || d < -near || short.SharedBytes == 0 {
		t.Errorf("shared: %d the long way, %d the short", long.SharedBytes, short.SharedBytes)
	}
	if ballast[4096] != 1 {
		t.Error("the ballast is gone")
	}
	if _, err := Glance(1 << 30); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no such process: %v", err)
	}
}

func FuzzParseStatus(f *testing.F) {
	f.Add([]byte("Name:\tqemu\nRssAnon:\t  100 kB\nRssFile:\t 20 kB\nRssShmem:\t 3 kB\nVmSwap:\t 4 kB\n"))
	f.Add([]byte("Name:\tzombie\nState:\tZ\n"))
	f.Add([]byte("RssAnon:\t-1 kB\nRssFile: x kB\n"))
	f.Fuzz(func(_ *testing.T, b []byte) { _, _ = parseStatus(b) })
}

func BenchmarkGlance(b *testing.B) {
	for b.Loop() {
		if _, err := Glance(os.Getpid()); err != nil {
			b.Fatal(err)
		}
	}
}
