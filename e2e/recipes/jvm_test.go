package recipes

import (
	"fmt"
	"testing"
)

// ask asks the service in a child, which has no program for it but bash.
func (f *forkd) ask(id, path string) string {
	f.t.Helper()
	return f.exec(id, `exec bash -ec 'exec 3<>/dev/tcp/127.0.0.1/8080; printf "GET `+path+` HTTP/1.0\r\n\r\n" >&3; sed "1,/^\r\$/d" <&3'`)
}

// TestJVM: the service answers in every child, with a state and randomness of its own.
func TestJVM(t *testing.T) {
	heavy(t)
	f := built(t, "jvm")
	children := f.fork("jvm", 4)
	drawn := make([]string, len(children))
	each(children, func(i int, id string) {
		drawn[i] = f.ask(id, "/uuid")
		for n := range i + 1 {
			// The warm-up counted the empty word.
			if got, want := f.ask(id, "/count/x"), fmt.Sprintf("x %d of 2", n+1); got != want {
				t.Errorf("child %d: got %q, want %q", i, got, want)
			}
		}
	})
	distinct(t, "the service's UUID", drawn)
	warm := f.firstAnswer("jvm", func(id string) { f.ask(id, "/health") })
	cold := f.timed(func() {
		f.exec(children[0].ID, `exec bash -ec 'java -cp /srv/app -XX:+UseSerialGC -Xmx128m -XX:TieredStopAtLevel=1 -version 2>/dev/null'`)
	})
	t.Logf("first answer: %d ms by a fork; %d ms to start an empty Java virtual machine: %.1f times", warm.Milliseconds(),
		cold.Milliseconds(), float64(cold)/float64(warm))
}
