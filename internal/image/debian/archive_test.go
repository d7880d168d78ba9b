package debian

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"forkd.dev/forkd/internal/image/debian/debiantest"
	"forkd.dev/forkd/internal/testenv"
)

func testPackages() []debiantest.Package {
	return []debiantest.Package{
		{Name: "base-files", Version: "12", Fields: "Essential: yes\nPriority: required\n"},
		{Name: "apt", Version: "2.6", Fields: "Priority: required\n"},
		{Name: "usr-is-merged", Version: "37"},
		{Name: "hello", Version: "1:2.10", Fields: "Depends: libhello (>= 1)\n"},
		{Name: "libhello", Version: "1.5"},
	}
}

// archive serves bookworm, and bookworm-updates with a newer libhello.
func archive(t *testing.T) *debiantest.Archive {
	t.Helper()
	a := debiantest.Serve(t)
	a.Suite(t, "bookworm", "", testPackages()...)
	a.Suite(t, "bookworm-updates", "", debiantest.Package{Name: "libhello", Version: "1.6"})
	a.Suite(t, "bookworm-security", "")
	return a
}

func config(t *testing.T, a *debiantest.Archive) Config {
	t.Helper()
	return Config{Root: a.Host(t), CacheDir: t.TempDir(), Arch: "amd64", Now: debiantest.Now, retryGap: time.Millisecond}
}

func open(t *testing.T, cfg Config) *Archive {
	t.Helper()
	a, err := tryOpen(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	return a
}

func tryOpen(ctx context.Context, cfg Config) (*Archive, error) {
	base, err := BaseByName("debian:bookworm")
	if err != nil {
		return nil, err
	}
	return Open(ctx, cfg, base)
}

func TestArchive(t *testing.T) {
	served := archive(t)
	cfg := config(t, served)
	a := open(t, cfg)
	list, err := a.Resolve(t.Context(), []string{"apt"}, []string{"hello"})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, p := range list {
		names = append(names, p.String())
	}
	if got := strings.Join(names, ", "); got != "usr-is-merged 37, base-files 12, apt 2.6, hello 1:2.10, libhello 1.6" {
		t.Errorf("resolved %s", got)
	}
	if err := a.Download(t.Context(), list); err != nil {
		t.Fatal(err)
	}
	again := open(t, cfg)
	before := served.Requests("dists/bookworm/main/binary-amd64/Packages.gz")
	cached, err := again.Resolve(t.Context(), []string{"apt"}, []string{"hello"})
	if err != nil || len(cached) != len(list) || *cached[3] != *list[3] {
		t.Errorf("cached resolution: %v, %v", cached, err)
	}
	if served.Requests("dists/bookworm/main/binary-amd64/Packages.gz") != before {
		t.Error("the index was fetched again")
	}
	if err := again.Download(t.Context(), cached); err != nil {
		t.Fatal(err)
	}
	if n := served.Requests("pool/main/hello_1:2.10.deb"); n != 1 {
		t.Errorf("the package was fetched %d times", n)
	}
}

func TestResolutionIsOfItsIndex(t *testing.T) {
	served := archive(t)
	cfg := config(t, served)
	if _, err := open(t, cfg).Resolve(t.Context(), nil, []string{"hello"}); err != nil {
		t.Fatal(err)
	}
	served.Suite(t, "bookworm-updates", "", debiantest.Package{Name: "libhello", Version: "1.7"})
	list, err := open(t, cfg).Resolve(t.Context(), nil, []string{"hello"})
	if err != nil {
		t.Fatal(err)
	}
	if got := list[len(list)-1].String(); got != "libhello 1.7" {
		t.Errorf("after an update of the archive: %s", got)
	}
}

func TestOpenRefuses(t *testing.T) {
	const day = "Valid-Until: Sat, 28 Feb 2026 00:00:00 UTC\n"
	usual := "Origin: Debian\nSuite: stable\nCodename: bookworm\n"
	for _, c := range []struct {
		name   string
		change func(t *testing.T, a *debiantest.Archive, root fstest.MapFS)
		want   string
	}{
		{"expired", func(t *testing.T, a *debiantest.Archive, _ fstest.MapFS) {
			a.Suite(t, "bookworm", usual+day, testPackages()...)
		}, "expired at 2026-02-28"},
		{"expired is allowed", func(t *testing.T, a *debiantest.Archive, root fstest.MapFS) {
			a.Suite(t, "bookworm", usual+day, testPackages()...)
			root["etc/apt/apt.conf.d/50valid"] = &fstest.MapFile{Data: []byte(`Acquire::Check-Valid-Until "false";`)}
		}, ""},
		{"another release", func(t *testing.T, a *debiantest.Archive, _ fstest.MapFS) {
			a.Suite(t, "bookworm", "Origin: Debian\nSuite: oldstable\nCodename: buster\n", testPackages()...)
		}, `signed for "buster"`},
		{"another origin", func(t *testing.T, a *debiantest.Archive, _ fstest.MapFS) {
			a.Suite(t, "bookworm", "Origin: Ubuntu\nSuite: stable\nCodename: bookworm\n", testPackages()...)
		}, `origin "Ubuntu"`},
		{"tampered", func(_ *testing.T, a *debiantest.Archive, _ fstest.MapFS) {
			a.Set("dists/bookworm/InRelease", bytes.Replace(a.Get("dists/bookworm/InRelease"), []byte("stable"), []byte("stahle"), 1))
		}, "archive signature"},
		{"another key", func(t *testing.T, _ *debiantest.Archive, root fstest.MapFS) {
			root["usr/share/keyrings/debian-archive-keyring.gpg"].Data = debiantest.Keyring(t, debiantest.Key(t, debiantest.Now()))
		}, "not in the archive keyring"},
		{"no keyring", func(_ *testing.T, _ *debiantest.Archive, root fstest.MapFS) {
			delete(root, "usr/share/keyrings/debian-archive-keyring.gpg")
		}, "install the package debian-archive-keyring"},
		{"no such architecture", func(t *testing.T, a *debiantest.Archive, _ fstest.MapFS) {
			text := usual + "SHA256:\n " + strings.Repeat("0", 64) + " 1 main/binary-i386/Packages\n"
			a.Set("dists/bookworm/InRelease", debiantest.Sign(t, a.Key, text, debiantest.Now()))
		}, "no packages for amd64"},
		{"security is tampered with", func(_ *testing.T, a *debiantest.Archive, _ fstest.MapFS) {
			a.Set("dists/bookworm-security/InRelease", []byte("nothing"))
		}, "suite bookworm-security"},
	} {
		t.Run(c.name, func(t *testing.T) {
			served := archive(t)
			cfg := config(t, served)
			root := served.Host(t)
			c.change(t, served, root)
			cfg.Root = offline(root)
			_, err := tryOpen(t.Context(), cfg)
			if c.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

// offline makes Debian's own mirrors unreachable, so that a test never falls back to them.
func offline(root fstest.MapFS) fstest.MapFS {
	root["etc/apt/apt.conf.d/98offline"] = &fstest.MapFile{Data: []byte(`Acquire::http::Proxy::deb.debian.org "http://127.0.0.1:1";`)}
	return root
}

func TestFetch(t *testing.T) {
	served := archive(t)
	cfg := config(t, served)
	a := open(t, cfg)
	list, err := a.Resolve(t.Context(), nil, []string{"hello"})
	if err != nil {
		t.Fatal(err)
	}
	hello := list[slices.IndexFunc(list, func(p *Package) bool { return p.Name == "hello" })]
	const name = "pool/main/hello_1:2.10.deb"
	content := served.Get(name)

	t.Run("retries", func(t *testing.T) {
		served.FailFirst(name, http.StatusServiceUnavailable, http.StatusTooManyRequests)
		fetch(t, a, hello, content)
	})
	t.Run("damaged cache", func(t *testing.T) {
		if err := os.WriteFile(a.fetcher.Path(hello.SHA256), content[:len(content)-1], 0o600); err != nil {
			t.Fatal(err)
		}
		fetch(t, a, hello, content)
	})
	t.Run("does not retry what is not there", func(t *testing.T) {
		forget(t, a, hello)
		before := served.Requests(name)
		served.FailFirst(name, http.StatusNotFound)
		if _, err := a.OpenPackage(t.Context(), hello); err == nil || !strings.Contains(err.Error(), "404") {
			t.Errorf("got %v", err)
		}
		if n := served.Requests(name) - before; n != 1 {
			t.Errorf("asked %d times", n)
		}
	})
	for _, c := range []struct {
		name, want string
		data       []byte
	}{
		{"other content", "has digest", append([]byte("X"), content[1:]...)},
		{"longer", "the index says", append(bytes.Clone(content), 'x')},
		{"shorter", "the index says", content[:10]},
	} {
		t.Run(c.name, func(t *testing.T) {
			forget(t, a, hello)
			served.Set(name, c.data)
			if _, err := a.OpenPackage(t.Context(), hello); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v", err)
			}
			if left, _ := filepath.Glob(filepath.Join(cfg.CacheDir, "tmp", "*")); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
			if _, err := os.Stat(a.fetcher.Path(hello.SHA256)); err == nil {
				t.Error("it is in the cache")
			}
		})
	}
	served.Set(name, content)
	t.Run("at once", func(t *testing.T) {
		forget(t, a, hello)
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() { fetch(t, a, hello, content) })
		}
		wg.Wait()
	})
	t.Run("cancelled", func(t *testing.T) {
		forget(t, a, hello)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := a.OpenPackage(ctx, hello); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
}

func TestStaleFilesAreRemoved(t *testing.T) {
	dir := t.TempDir()
	old, young := filepath.Join(dir, "old"), filepath.Join(dir, "young")
	for _, name := range []string{old, young} {
		if err := os.WriteFile(name, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	before := time.Now().Add(-2 * staleAge)
	if err := os.Chtimes(old, before, before); err != nil {
		t.Fatal(err)
	}
	RemoveStale(dir, "*")
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) != 1 || left[0] != young {
		t.Errorf("left: %v", left)
	}
}

func forget(t *testing.T, a *Archive, p *Package) {
	t.Helper()
	if err := os.Remove(a.fetcher.Path(p.SHA256)); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
}

func fetch(t *testing.T, a *Archive, p *Package, want []byte) {
	t.Helper()
	f, err := a.OpenPackage(t.Context(), p)
	if err != nil {
		t.Error(err)
		return
	}
	defer f.Close()
	got, err := io.ReadAll(f)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("got %d bytes, %v", len(got), err)
	}
}

// TestHostMirror reads the indexes of every base through this host's own apt configuration.
func TestHostMirror(t *testing.T) {
	testenv.Need(t, "net", "keyring")
	for _, base := range Bases() {
		t.Run(base.Codename, func(t *testing.T) {
			cfg := Config{Root: os.DirFS("/"), CacheDir: t.TempDir(), Arch: "arm64"}
			a, err := Open(t.Context(), cfg, base)
			if err != nil {
				t.Fatal(err)
			}
			defer a.Close()
			list, err := a.Resolve(t.Context(), []string{"apt"}, []string{"python3-numpy"})
			if err != nil {
				t.Fatal(err)
			}
			if len(list) < 60 || len(list) > 200 {
				t.Errorf("resolved to %d packages", len(list))
			}
		})
	}
}
