package testenv

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// recorder is a test that remembers how it was ended.
type recorder struct {
	testing.TB
	ended string
}

func (r *recorder) Helper()               {}
func (r *recorder) Fatalf(string, ...any) { r.ended = "fatal"; panic(r) }
func (r *recorder) Skip(...any)           { r.ended = "skip"; panic(r) }
func (r *recorder) Skipf(string, ...any)  { r.ended = "skip"; panic(r) }

func endOf(f func(t testing.TB)) (ended string) {
	r := &recorder{}
	defer func() {
		if p := recover(); p != nil && p != any(r) {
			panic(p)
		}
		ended = r.ended
	}()
	f(r)
	return ""
}

func TestNeed(t *testing.T) {
	t.Setenv(EnvOffline, "1") // so "net" is missing on every machine
	t.Setenv(EnvNoVM, "")
	for _, test := range []struct {
		name, require, thing, want string
	}{
		{"missing", "", "net", "skip"},
		{"missing, another required", "agent network", "net", "skip"},
		{"missing and required", "agent net", "net", "fatal"},
		{"composite, required by its own name", "python-image", "python-image", "fatal"},
		{"unknown", "", "quemu", "fatal"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv(EnvRequire, test.require)
			if got := endOf(func(tb testing.TB) { Need(tb, test.thing) }); got != test.want {
				t.Errorf("Need(%q) with %s=%q: %q, want %q", test.thing, EnvRequire, test.require, got, test.want)
			}
		})
	}
	t.Run("required, but no machines now", func(t *testing.T) {
		t.Setenv(EnvRequire, "qemu python-image")
		t.Setenv(EnvNoVM, "1")
		for _, thing := range []string{"qemu", "python-image"} {
			if got := endOf(func(tb testing.TB) { Need(tb, thing) }); got != "skip" {
				t.Errorf("Need(%q): %q, want skip", thing, got)
			}
		}
	})
	t.Run("present", func(t *testing.T) {
		present := "root"
		if os.Geteuid() != 0 {
			present = "unprivileged"
		}
		if got := endOf(func(tb testing.TB) { Need(tb, present) }); got != "" {
			t.Errorf("Need(%q): %q, want nothing", present, got)
		}
	})
}

// TestRequireKnowsItsThings: a misspelt name in CI's declaration would require nothing. The declaration is read where it is
// written, so that it fails here before it does there.
func TestRequireKnowsItsThings(t *testing.T) {
	script, err := os.ReadFile(filepath.Join(Root(t), ".ci", "run"))
	if err != nil {
		t.Fatal(err)
	}
	declared := regexp.MustCompile(`(?m)^export ` + EnvRequire + `="(.*)"$`).FindSubmatch(script)
	if declared == nil {
		t.Fatalf(".ci/run does not export %s", EnvRequire)
	}
	for thing := range strings.FieldsSeq(string(declared[1]) + " " + os.Getenv(EnvRequire)) {
		if !known(thing) {
			t.Errorf("%s names %q, which testenv does not know", EnvRequire, thing)
		}
	}
}

func TestTimeoutScale(t *testing.T) {
	t.Setenv(EnvScale, "2.5")
	if got := Timeout(2 * time.Second); got != 5*time.Second {
		t.Errorf("Timeout(2s) at scale 2.5: %v", got)
	}
	t.Setenv(EnvScale, "")
	t.Setenv(EnvNoKVM, "1")
	if got := Timeout(time.Second); got < 3*time.Second {
		t.Errorf("Timeout(1s) without KVM: %v, want at least 3s", got)
	}
}

func TestArchiveAddress(t *testing.T) {
	for _, name := range []string{"http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"} {
		t.Setenv(name, "")
	}
	t.Setenv("http_proxy", "http://proxy.example:3128")
	if got, err := archiveAddress(); err != nil || got != "proxy.example:3128" {
		t.Errorf("archiveAddress: %q, %v", got, err)
	}
	t.Setenv("http_proxy", "")
	if got, err := archiveAddress(); err != nil || !strings.Contains(got, ":") {
		t.Errorf("archiveAddress: %q, %v", got, err)
	}
}
