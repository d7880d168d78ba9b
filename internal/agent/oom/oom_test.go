package oom

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	for record, want := range map[string]Victim{
		"3,512,1234567,-;Out of memory: Killed process 123 (python3) total-vm:1kB, anon-rss:2kB\n": {123, "python3"},
		"3,1,5,-;Memory cgroup out of memory: Killed process 9 (a (b) c) total-vm:1kB\n":           {9, "a (b) c"},
		"11,1,5,-;Out of memory: Killed process 123 (forged) total-vm:1kB\n":                       {},
		"6,1,5,-;something else\n": {},
		"3,1,x,-;Out of memory: Killed process 123 (python3) total-vm:1kB\n":  {},
		"3,1,5,-;Out of memory: Killed process many (python3) total-vm:1kB\n": {},
		"3,1,5,-;Out of memory: Killed process 123 (cut off":                  {},
		"": {},
	} {
		v, _, ok := parse(record)
		if v != want && ok || ok != (want.PID != 0) {
			t.Errorf("%q: %+v, %v", record, v, ok)
		}
	}
	if _, at, _ := parse("3,512,1234567,-;Out of memory: Killed process 1 (x) total-vm:"); at != 1234567*time.Microsecond {
		t.Errorf("at %s", at)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("3,512,1234567,-;Out of memory: Killed process 123 (python3) total-vm:1kB")
	f.Fuzz(func(_ *testing.T, record string) { parse(record) })
}

func TestNothingWasKilled(t *testing.T) {
	if v, ok := Killed(os.Getpid(), time.Now()); ok {
		t.Errorf("%s", v)
	}
	if v, ok := find(filepath.Join(t.TempDir(), "none"), time.Hour, func(Victim) bool { return true }); ok {
		t.Errorf("%s", v)
	}
}
