package debian

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

func TestReadAptConf(t *testing.T) {
	root := fstest.MapFS{
		"etc/apt/apt.conf.d/10one": {Data: []byte(`// comment
Acquire { http { Proxy "http://one:3142"; Proxy::deb.debian.org "DIRECT"; }; Check-Valid-Until "no"; }
/* Acquire::https::Proxy "no"; */ # another
DPkg::Post-Invoke { "rm -f /x // y"; };
APT::NeverAutoRemove:: "^linux";
Acquire "";
Plain::Key plain;
`)},
		"etc/apt/apt.conf.d/20two.conf":    {Data: []byte("Acquire::http::Proxy \"http://two:3142\";\n#clear Plain;\n")},
		"etc/apt/apt.conf.d/30ignored.bak": {Data: []byte("{{{{")},
	}
	conf, err := ReadAptConf(root)
	if err != nil {
		t.Fatal(err)
	}
	want := AptConf{
		"acquire::http::proxy": "http://two:3142", "acquire::http::proxy::deb.debian.org": "DIRECT",
		"acquire::check-valid-until": "no", "acquire": "",
	}
	if d := cmp.Diff(want, conf); d != "" {
		t.Error(d)
	}
	if conf.Bool("Acquire::Check-Valid-Until", true) || !conf.Bool("Acquire::Other", true) {
		t.Error("booleans are misread")
	}
	for _, bad := range []string{`a { b "c";`, `} `, `a "b`, `/* x`, `#include "/etc/x";`} {
		root["etc/apt/apt.conf"] = &fstest.MapFile{Data: []byte(bad)}
		if _, err := ReadAptConf(root); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
	if conf, err := ReadAptConf(fstest.MapFS{}); err != nil || len(conf) != 0 {
		t.Errorf("a host without apt: %v, %v", conf, err)
	}
}

func TestProxy(t *testing.T) {
	environment := func(*http.Request) (*url.URL, error) { return url.Parse("http://env:1") }
	for _, c := range []struct{ name, conf, url, want string }{
		{"environment", "", "http://m.example/x", "http://env:1"},
		{"scheme", `Acquire::http::Proxy "http://a:3142/";`, "http://m.example/x", "http://a:3142/"},
		{"no scheme given", `Acquire::http::Proxy "a:3142";`, "http://m.example/x", "http://a:3142"},
		{"host", `Acquire::http::Proxy "http://a:1"; Acquire::http::Proxy::m.example "http://b:1";`, "http://m.example/x", "http://b:1"},
		{"direct", `Acquire::http::Proxy::m.example "DIRECT";`, "http://m.example/x", ""},
		{"https takes http's", `Acquire::http::Proxy "http://a:1";`, "https://m.example/x", "http://a:1"},
		{"https", `Acquire::https::Proxy "socks5h://a:1";`, "https://m.example/x", "socks5://a:1"},
		{"bad", `Acquire::http::Proxy "http://a b:1";`, "http://m.example/x", "!"},
	} {
		t.Run(c.name, func(t *testing.T) {
			conf := AptConf{}
			if err := conf.parse(c.conf); err != nil {
				t.Fatal(err)
			}
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, c.url, nil)
			if err != nil {
				t.Fatal(err)
			}
			u, err := conf.ProxyFunc(environment)(req)
			got := ""
			if u != nil {
				got = u.String()
			}
			if err != nil {
				got = "!"
			}
			if got != c.want {
				t.Errorf("got %q, %v; want %q", got, err, c.want)
			}
		})
	}
}

func FuzzAptConf(f *testing.F) {
	f.Add(`A { B "c"; D:: "e"; }; #clear A;`)
	f.Add("a b c { \"d\"; } ;;;")
	f.Fuzz(func(_ *testing.T, text string) {
		_ = AptConf{}.parse(text)
	})
}

func TestReadSources(t *testing.T) {
	root := fstest.MapFS{
		"etc/apt/sources.list": {Data: []byte(`# deb http://commented bookworm main
deb [ arch=amd64 signed-by=/k.gpg check-valid-until=no ] http://one/debian/ bookworm main contrib # tail
deb-src http://src/debian bookworm main
deb cdrom:[Debian 12]/ bookworm main
deb http://docker/linux/debian bookworm stable
debauchery
`)},
		"etc/apt/sources.list.d/x.sources": {Data: []byte(`Types: deb deb-src
URIs: http://two/debian mirror+file:///etc/apt/mirrors/d.list
Suites: trixie trixie-updates
Components: main

Types: deb
URIs: http://disabled/debian
Suites: trixie
Components: main
Enabled: no

Types: deb
URIs: http://sec/debian-security
Suites: trixie-security
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
`)},
		"etc/apt/sources.list.d/x.disabled": {Data: []byte("deb http://no/debian bookworm main\n")},
		"etc/apt/mirrors/d.list":            {Data: []byte("# m\nhttp://three/debian/ priority:1\nftp://no/debian\n")},
	}
	sources, err := ReadSources(root)
	if err != nil {
		t.Fatal(err)
	}
	main, security := mirrors(sources)
	want := []Source{
		{URI: "http://one/debian", Suite: "bookworm", Components: []string{"main", "contrib"}, SignedBy: "/k.gpg"},
		{URI: "http://two/debian", Suite: "trixie", Components: []string{"main"}, CheckValidUntil: true},
		{URI: "http://three/debian", Suite: "trixie", Components: []string{"main"}, CheckValidUntil: true},
		{URI: defaultMirror, CheckValidUntil: true},
	}
	if d := cmp.Diff(want, main); d != "" {
		t.Error(d)
	}
	wantSecurity := []Source{
		{URI: "http://sec/debian-security", Suite: "trixie-security", Components: []string{"main"}, CheckValidUntil: true},
		{URI: defaultSecurityMirror, CheckValidUntil: true},
	}
	if d := cmp.Diff(wantSecurity, security); d != "" {
		t.Error(d)
	}
}

func FuzzSources(f *testing.F) {
	f.Add("deb [a=b] http://x y z")
	f.Add("Types: deb\nURIs: x\nSuites: y\n")
	f.Fuzz(func(_ *testing.T, text string) {
		one, _ := parseOneLine(text)
		two, _ := parseDeb822(text)
		mirrors(expandMirrorLists(fstest.MapFS{}, append(one, two...)))
	})
}

func TestBaseByName(t *testing.T) {
	for _, b := range Bases() {
		if got, err := BaseByName(b.Name); err != nil || got.Codename != b.Codename {
			t.Errorf("%s: %v, %v", b.Name, got, err)
		}
	}
	_, err := BaseByName("debian:potato")
	if err == nil || !strings.Contains(err.Error(), "debian:bookworm, debian:trixie") {
		t.Errorf("got %v", err)
	}
}
