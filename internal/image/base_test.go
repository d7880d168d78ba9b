package image

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseBase(t *testing.T) {
	sum := "sha256:" + strings.Repeat("a", 64)
	for text, want := range map[string]Base{
		"debian:bookworm":                   {Kind: KindDebian, Ref: "bookworm"},
		"oci:alpine":                        {Kind: KindOCI, Ref: "alpine"},
		"oci:localhost:5000/a/b:tag":        {Kind: KindOCI, Ref: "localhost:5000/a/b:tag"},
		"oci:example.org/a@" + sum:          {Kind: KindOCI, Ref: "example.org/a@" + sum},
		"oci-layout:dir":                    {Kind: KindLayout, Ref: "dir"},
		"oci-layout:/d:r/x#v1":              {Kind: KindLayout, Ref: "/d:r/x", Fragment: "v1"},
		"docker-archive:../a.tar#x:latest":  {Kind: KindDockerArchive, Ref: "../a.tar", Fragment: "x:latest"},
		"tar:root.tar.zst#" + sum:           {Kind: KindTar, Ref: "root.tar.zst", Fragment: sum},
		"tar:https://example.org/r.tar?a=b": {Kind: KindTar, Ref: "https://example.org/r.tar?a=b"},
		"image:0123456789ab":                {Kind: KindImage, Ref: "0123456789ab"},
		"snapshot:python-numpy":             {Kind: KindSnapshot, Ref: "python-numpy"},
	} {
		got, err := ParseBase(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: %s", text, d)
		}
		if got.String() != text {
			t.Errorf("%s became %s", text, got)
		}
	}
	for text, want := range map[string]string{
		"":                                     "write KIND:WHAT",
		"alpine":                               "write KIND:WHAT",
		"docker:alpine":                        `the kind "docker" is not known; use debian, oci,`,
		"debian:potato":                        "use one of debian:bookworm",
		"oci:":                                 "could not parse",
		"oci:UPPER/case":                       "could not parse",
		"oci-layout:":                          "names no path",
		"oci-layout:a\x00b":                    "a control character",
		"tar:x#md5:1":                          "what follows # must be sha256:",
		"tar:https:///x":                       "names no host",
		"tar:":                                 "names no file or URL",
		"image:../x":                           "not a name",
		"snapshot:" + strings.Repeat("a", 129): "not a name",
	} {
		if _, err := ParseBase(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestForeignBaseInRecipe(t *testing.T) {
	r, err := ParseRecipe("r", []byte("base: oci:alpine\nuser: 1000:1000\n"))
	if err != nil || r.From.Kind != KindOCI || r.User != "1000:1000" || r.WorkDir != "" {
		t.Errorf("%+v %v", r, err)
	}
	_, err = ParseRecipe("r", []byte("packages: [python3]\nbase: oci:alpine\n"))
	if faults, ok := errors.AsType[*FileError](err); !ok || len(faults.Faults) != 1 ||
		!strings.Contains(err.Error(), "r:1: packages are Debian's") {
		t.Error(err)
	}
	if _, err = ParseRecipe("r", []byte("base: debian:bookworm\nuser: '1000'\n")); err == nil {
		t.Error("a number as a user to be made")
	}
}
