package proc

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/testenv"
)

func base() []string { return []string{"/usr", "/lib", "/lib64"} }

func newJailer(t testing.TB) *Jailer {
	t.Helper()
	j, err := NewJailer(base())
	if err != nil {
		testenv.Missing(t, "jail", err.Error())
	}
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	if j.Privileged() {
		return j
	}
	// Whether users may make namespaces is seen when one is tried.
	p, err := Start(t.Context(), &Command{Path: "/usr/bin/true", Jail: &Jail{Jailer: j}, Confine: &Confine{ReadOnly: base()}})
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSPC) {
		testenv.Missing(t, "namespaces", err.Error())
	}
	if err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	p.Release()
	return j
}

func BenchmarkStart(b *testing.B) {
	testenv.Need(b, "root")
	j := newJailer(b)
	dir := b.TempDir()
	for _, c := range []struct {
		name string
		jail *Jail
	}{{"landlock", nil}, {"jail", &Jail{Jailer: j, ID: 3_100_000_001}}} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				cmd := &Command{Path: "/usr/bin/true", Dir: dir, Confine: &Confine{ReadOnly: base(), ReadWrite: []string{dir, "/dev/null"}}, Jail: c.jail}
				p, err := Start(b.Context(), cmd)
				if err != nil {
					b.Fatal(err)
				}
				<-p.Done()
				if p.Err() != nil {
					b.Fatal(p.Err())
				}
				p.Release()
			}
		})
	}
}
