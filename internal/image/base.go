package image

import (
	"errors"
	"fmt"
	"net/url"
	"path"
	"regexp"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"forkd.dev/forkd/internal/image/debian"
)

// Kind says where a base comes from.
type Kind string

// The kinds of base, each the word before the colon.
const (
	KindDebian        Kind = "debian"         // a release, assembled from its packages
	KindOCI           Kind = "oci"            // a registry
	KindLayout        Kind = "oci-layout"     // a directory in the OCI image layout
	KindDockerArchive Kind = "docker-archive" // a file written by `docker save`
	KindTar           Kind = "tar"            // a root file system as one tar file
	KindImage         Kind = "image"          // an image that is here already
	KindSnapshot      Kind = "snapshot"       // a warm machine to go on from
)

// Base is what an image starts from. Its text form is KIND:REF, with #FRAGMENT for those that may have one.
type Base struct {
	Kind     Kind
	Ref      string // what follows the kind: a release, a reference, a path, a URL, an id or name, a tag
	Fragment string // which image of a layout or archive: a name or sha256:…; of a tar file: its digest
}

// LocalDir is where the file or the content of the directory that a base names travels in the files of a build request:
// the daemon opens no path that a recipe names.
const LocalDir = ".forkd-base"

// LocalFile is the name of the file of a base that is one.
const LocalFile = LocalDir + "/file"

const maxBaseLength = 2048

var (
	digestPattern = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	tagPattern    = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)
)

// ParseBase reads a base's text. It touches no file and no network.
func ParseBase(text string) (Base, error) {
	kind, ref, ok := strings.Cut(text, ":")
	if !ok {
		return Base{}, fmt.Errorf("base %q: write KIND:WHAT, for example debian:bookworm or oci:docker.io/library/alpine:3", short(text))
	}
	if strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f }) || len(text) > maxBaseLength {
		return Base{}, fmt.Errorf("base %q: a control character, or longer than %d bytes", short(text), maxBaseLength)
	}
	b := Base{Kind: Kind(kind), Ref: ref}
	var err error
	switch b.Kind {
	case KindDebian:
		_, err = debian.BaseByName(text)
		return b, err // names the ones there are
	case KindOCI:
		_, err = name.ParseReference(ref)
	case KindLayout, KindDockerArchive:
		b.Ref, b.Fragment, _ = strings.Cut(ref, "#")
		if b.Ref == "" {
			err = errors.New("names no path")
		}
	case KindTar:
		b.Ref, b.Fragment, _ = strings.Cut(ref, "#")
		err = b.checkTar()
	case KindImage, KindSnapshot:
		if !tagPattern.MatchString(ref) {
			err = errors.New("not a name")
		}
	default:
		return Base{}, fmt.Errorf("base %q: the kind %q is not known; use debian, oci, oci-layout, docker-archive, tar, image or snapshot",
			short(text), short(kind))
	}
	if err != nil {
		return Base{}, fmt.Errorf("base %q: %w", short(text), err)
	}
	return b, nil
}

func (b Base) checkTar() error {
	switch {
	case b.Ref == "":
		return errors.New("names no file or URL")
	case b.Fragment != "" && !digestPattern.MatchString(b.Fragment):
		return errors.New("what follows # must be sha256: and 64 hexadecimal digits")
	case !b.Remote():
		return nil
	}
	u, err := url.Parse(b.Ref)
	if err != nil {
		return err
	}
	if u.Host == "" {
		return errors.New("the URL names no host")
	}
	return nil
}

// String is the text that ParseBase read.
func (b Base) String() string {
	s := string(b.Kind) + ":" + b.Ref
	if b.Fragment != "" {
		s += "#" + b.Fragment
	}
	return s
}

// Remote reports whether the base is fetched over the network.
func (b Base) Remote() bool {
	return b.Kind == KindOCI ||
		b.Kind == KindTar && (strings.HasPrefix(b.Ref, "http://") || strings.HasPrefix(b.Ref, "https://"))
}

// Local reports whether Ref is a path on the machine of whoever asks for the build, and whether a directory is meant.
func (b Base) Local() (local, dir bool) {
	switch b.Kind {
	case KindLayout:
		return true, true
	case KindDockerArchive:
		return true, false
	case KindTar:
		return !b.Remote(), false
	default:
		return false, false
	}
}

// Foreign reports whether the base is somebody else's file system, unpacked as it is.
func (b Base) Foreign() bool {
	switch b.Kind {
	case KindOCI, KindLayout, KindDockerArchive, KindTar:
		return true
	default:
		return false
	}
}

// LocalPath is where the base's path leads from the directory of the recipe that names it.
func (b Base) LocalPath(recipeDir string) string {
	if path.IsAbs(b.Ref) {
		return path.Clean(b.Ref)
	}
	return path.Join(recipeDir, b.Ref)
}
