package files

import (
	"errors"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
)

const (
	// metaPrefix is envd's: where it keeps what callers say about a file.
	metaPrefix = "user.e2b."
	// maxMetaName is the kernel's limit of an attribute's name.
	maxMetaName = 255 - len(metaPrefix)
	// maxMeta is what fits into an ext4 inode's one block of attributes.
	maxMeta = 4096
)

// checkMetadata refuses what could not be stored, before any data is taken.
func checkMetadata(meta map[string]string) error {
	total := 0
	for k, v := range meta {
		switch {
		case k == "":
			return wire.Errorf(wire.CodeInvalid, "metadata with an empty name")
		case len(k) > maxMetaName:
			return wire.Errorf(wire.CodeInvalid, "metadata name %.60q… is longer than %d bytes", k, maxMetaName)
		case !printable(k) || !printable(v):
			return wire.Errorf(wire.CodeInvalid, "metadata %q: names and values are printable ASCII", k)
		}
		total += len(metaPrefix) + len(k) + len(v)
	}
	if total > maxMeta {
		return wire.Errorf(wire.CodeInvalid, "metadata of %d bytes; %d fit", total, maxMeta)
	}
	return nil
}

func printable(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) < 0
}

// setMetadata puts metadata on a file that has none. Where a file system has no such attributes the file is kept without:
// its entry says so.
func setMetadata(fd int, meta map[string]string) error {
	for k, v := range meta {
		err := unix.Fsetxattr(fd, metaPrefix+k, []byte(v), 0)
		if errors.Is(err, unix.ENOTSUP) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// metadata reads a path's, following links. What cannot be read, or is no text, is left out.
func metadata(path string) map[string]string {
	var space [4096]byte
	list := space[:]
	n, err := unix.Listxattr(path, list)
	if errors.Is(err, unix.ERANGE) {
		list = make([]byte, 64<<10) // the kernel's limit
		n, err = unix.Listxattr(path, list)
	}
	if err != nil || n == 0 {
		return nil
	}
	var meta map[string]string
	for name := range strings.SplitSeq(string(list[:n]), "\x00") {
		key, ok := strings.CutPrefix(name, metaPrefix)
		if !ok || !utf8.ValidString(key) {
			continue
		}
		value := make([]byte, maxMeta)
		n, err := unix.Getxattr(path, name, value)
		if err != nil || !utf8.Valid(value[:n]) {
			continue
		}
		if meta == nil {
			meta = map[string]string{}
		}
		meta[key] = string(value[:n])
	}
	return meta
}
