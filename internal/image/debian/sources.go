package debian

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"path"
	"slices"
	"strings"
)

// Source is one archive of the host's apt sources with one suite.
type Source struct {
	URI             string // http or https, without a trailing slash
	Suite           string
	Components      []string
	SignedBy        string // path of a keyring named for this source, or ""
	CheckValidUntil bool   // false: its configuration says not to
}

const maxSourcesFile = 1 << 20

// ReadSources reads etc/apt/sources.list and sources.list.d below root. Only binary archives reached by http or https
// count; "mirror+file" lists are followed. What is not understood (a foreign option, a cdrom) is skipped: the host's
// apt lives with it, and a missing Debian mirror has a default.
func ReadSources(root fs.FS) ([]Source, error) {
	names, err := listDir(root, "etc/apt/sources.list.d")
	if err != nil {
		return nil, err
	}
	var all []Source
	for _, name := range append([]string{"etc/apt/sources.list"}, names...) {
		read := parseOneLine
		switch path.Ext(name) {
		case ".list":
		case ".sources":
			read = parseDeb822
		default:
			continue
		}
		text, err := readSmall(root, name, maxSourcesFile)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read apt sources /%s: %w", name, err)
		}
		sources, err := read(string(text))
		if err != nil {
			return nil, fmt.Errorf("read apt sources /%s: %w", name, err)
		}
		all = append(all, sources...)
	}
	return expandMirrorLists(root, all), nil
}

func readSmall(root fs.FS, name string, limit int64) ([]byte, error) {
	f, err := root.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("%s is larger than %d bytes", name, limit)
	}
	return data, nil
}

// parseOneLine reads the sources.list(5) format: deb [option=value …] uri suite component….
func parseOneLine(text string) ([]Source, error) {
	var sources []Source
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		line = strings.TrimSpace(line)
		rest, ok := strings.CutPrefix(line, "deb")
		if !ok || rest == "" || rest[0] != ' ' && rest[0] != '\t' && rest[0] != '[' {
			continue
		}
		s := Source{CheckValidUntil: true}
		rest = strings.TrimSpace(rest)
		if options, tail, ok := strings.Cut(rest, "]"); ok && strings.HasPrefix(options, "[") {
			rest = tail
			for option := range strings.FieldsSeq(options[1:]) {
				key, value, _ := strings.Cut(option, "=")
				switch strings.ToLower(key) {
				case "signed-by":
					s.SignedBy = keyringPath(value)
				case "check-valid-until":
					s.CheckValidUntil = !isNo(value)
				}
			}
		}
		fields := strings.Fields(rest)
		if len(fields) < 2 {
			continue
		}
		s.URI, s.Suite, s.Components = strings.TrimRight(fields[0], "/"), fields[1], fields[2:]
		sources = append(sources, s)
	}
	return sources, nil
}

func parseDeb822(text string) ([]Source, error) {
	var sources []Source
	err := ReadControl(strings.NewReader(text), func(p Paragraph) error {
		if !slices.Contains(p.List("Types"), "deb") || isNo(p.Get("Enabled")) {
			return nil
		}
		for _, uri := range p.List("URIs") {
			for _, suite := range p.List("Suites") {
				sources = append(sources, Source{
					URI: strings.TrimRight(uri, "/"), Suite: suite, Components: p.List("Components"),
					SignedBy: keyringPath(p.Get("Signed-By")), CheckValidUntil: !isNo(p.Get("Check-Valid-Until")),
				})
			}
		}
		return nil
	})
	return sources, err
}

// keyringPath keeps Signed-By values that are a file; a key in the field itself or a fingerprint is not supported,
// and the archive keyring is what decides then.
func keyringPath(value string) string {
	first, _, _ := strings.Cut(strings.TrimSpace(value), ",")
	if strings.HasPrefix(first, "/") && !strings.ContainsAny(first, " \n") {
		return first
	}
	return ""
}

func isNo(value string) bool {
	switch strings.ToLower(strings.TrimSpace(value)) {
	case "no", "false", "0", "off", "without", "disable":
		return true
	}
	return false
}

// expandMirrorLists replaces "mirror+file:" URIs, as Debian's cloud images have them, by the mirrors in that file and
// drops everything that is not http or https.
func expandMirrorLists(root fs.FS, sources []Source) []Source {
	var out []Source
	for _, s := range sources {
		uris := []string{s.URI}
		if file, ok := strings.CutPrefix(s.URI, "mirror+file:"); ok {
			text, err := readSmall(root, strings.TrimLeft(file, "/"), maxSourcesFile)
			if err != nil {
				continue
			}
			uris = uris[:0]
			for line := range strings.Lines(string(text)) {
				if fields := strings.Fields(line); len(fields) > 0 && !strings.HasPrefix(fields[0], "#") {
					uris = append(uris, strings.TrimRight(fields[0], "/"))
				}
			}
		}
		for _, uri := range uris {
			u, err := url.Parse(uri)
			if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
				continue
			}
			s.URI = uri
			out = append(out, s)
		}
	}
	return out
}

// Base is a Debian release that images can be made of.
type Base struct {
	Name     string // "debian:bookworm"
	Codename string // "bookworm"
	// MergedLinks are the top-level links that the release's packages expect and base-files does not ship itself.
	MergedLinks []string
	// Seed names packages chosen before any dependency is looked at, where the first alternative would be the wrong one
	// in a new root file system.
	Seed []string
}

// Bases are the known bases, oldest first.
func Bases() []Base {
	return []Base{
		{
			Name: "debian:bookworm", Codename: "bookworm",
			MergedLinks: []string{"bin", "lib", "sbin"},
			// init-system-helpers needs "usrmerge | usr-is-merged"; the former converts an unmerged system.
			Seed: []string{"usr-is-merged"},
		},
		{Name: "debian:trixie", Codename: "trixie", MergedLinks: []string{"bin", "lib", "sbin"}},
	}
}

// BaseByName finds a base; the error lists the known ones.
func BaseByName(name string) (Base, error) {
	var known []string
	for _, b := range Bases() {
		if b.Name == name {
			return b, nil
		}
		known = append(known, b.Name)
	}
	return Base{}, fmt.Errorf("base %q is not known; use one of %s", clip(name), strings.Join(known, ", "))
}

// Debian's own mirror, used when the host's apt has none.
const (
	defaultMirror         = "http://deb.debian.org/debian"
	defaultSecurityMirror = "http://deb.debian.org/debian-security"
)

// mirrors lists where to look for the main archive of a base, and for its security archive, the host's own choices
// first. Whether a candidate really is Debian's archive is decided by its signed Release file, not here.
func mirrors(sources []Source) (main, security []Source) {
	releases := map[string]bool{"stable": true, "oldstable": true, "oldoldstable": true, "testing": true, "unstable": true, "sid": true}
	for _, name := range []string{"buster", "bullseye", "bookworm", "trixie", "forky", "duke"} {
		releases[name] = true
	}
	add := func(list []Source, s Source) []Source {
		if slices.ContainsFunc(list, func(o Source) bool { return o.URI == s.URI }) {
			return list
		}
		return append(list, s)
	}
	for _, s := range sources {
		if !slices.Contains(s.Components, "main") {
			continue
		}
		switch name, tail, _ := strings.Cut(s.Suite, "-"); {
		case !releases[name]:
		case tail == "security":
			security = add(security, s)
		case tail == "" || tail == "updates":
			main = add(main, s)
		}
	}
	main = add(main, Source{URI: defaultMirror, CheckValidUntil: true})
	security = add(security, Source{URI: defaultSecurityMirror, CheckValidUntil: true})
	return main, security
}
