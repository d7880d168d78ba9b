package debian

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"github.com/ProtonMail/go-crypto/openpgp"
	"github.com/ProtonMail/go-crypto/openpgp/clearsign"
	"github.com/ProtonMail/go-crypto/openpgp/packet"
)

// ErrSignature is an index whose signature cannot be trusted.
var ErrSignature = errors.New("archive signature")

// archiveKeyrings are the places of Debian's archive keys: the package debian-archive-keyring, in the form it has on
// Debian 12 and Ubuntu, and the one of Debian 13.
var archiveKeyrings = []string{
	"usr/share/keyrings/debian-archive-keyring.gpg",
	"usr/share/keyrings/debian-archive-keyring.pgp",
}

const (
	maxKeyring = 8 << 20
	maxRelease = 16 << 20
)

// ReadKeyrings loads OpenPGP public keys: the files named by extra, and Debian's archive keyring.
func ReadKeyrings(root fs.FS, extra ...string) (openpgp.EntityList, error) {
	var keys openpgp.EntityList
	for _, name := range extra {
		some, err := readKeyring(root, strings.TrimLeft(name, "/"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		keys = append(keys, some...)
	}
	for _, name := range archiveKeyrings {
		some, err := readKeyring(root, name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return append(keys, some...), nil
	}
	if len(keys) > 0 {
		return keys, nil
	}
	return nil, fmt.Errorf("%w: this host has no /%s; install the package debian-archive-keyring", ErrSignature, archiveKeyrings[0])
}

func readKeyring(root fs.FS, name string) (openpgp.EntityList, error) {
	data, err := readSmall(root, name, maxKeyring)
	if err != nil {
		return nil, fmt.Errorf("read keyring /%s: %w", name, err)
	}
	read := openpgp.ReadKeyRing
	if bytes.HasPrefix(data, []byte("-----BEGIN")) {
		read = openpgp.ReadArmoredKeyRing
	}
	keys, err := read(bytes.NewReader(data))
	if err != nil {
		return nil, fmt.Errorf("read keyring /%s: %w", name, err)
	}
	return keys, nil
}

// Release is a verified Release file.
type Release struct {
	Origin, Suite, Codename string
	Date, ValidUntil        time.Time // zero: not stated
	ByHash                  bool
	Files                   map[string]IndexFile
}

// IndexFile is a file that a Release vouches for.
type IndexFile struct {
	Size   int64
	SHA256 string
}

// ParseInRelease verifies a clear-signed Release against keys and reads it. One good signature by a known key is
// enough: during a key change the archive signs with several. Nothing of the text is looked at before that. now is the
// instant at which signatures must be valid.
func ParseInRelease(data []byte, keys openpgp.EntityList, now time.Time) (*Release, error) {
	if len(data) > maxRelease {
		return nil, fmt.Errorf("%w: Release file is larger than %d bytes", ErrSignature, maxRelease)
	}
	block, rest := clearsign.Decode(data)
	if block == nil {
		return nil, fmt.Errorf("%w: not a signed Release file (it begins %q); is a captive portal or proxy in between?",
			ErrSignature, clip(string(bytes.TrimSpace(data[:min(len(data), 60)]))))
	}
	if len(bytes.TrimSpace(rest)) > 0 || !bytes.HasPrefix(bytes.TrimLeft(data, "\r\n\t "), []byte("-----BEGIN PGP SIGNED MESSAGE-----")) {
		return nil, fmt.Errorf("%w: text outside the signed part", ErrSignature)
	}
	signature, err := io.ReadAll(io.LimitReader(block.ArmoredSignature.Body, 1<<20))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSignature, err)
	}
	if err := verify(block.Bytes, signature, keys, now); err != nil {
		return nil, err
	}
	return parseRelease(block.Plaintext)
}

// verify checks each signature packet by itself, since the library's own check stops at the first one whose issuer it
// knows, even when that key has expired and a later signature is good.
func verify(signed, signatures []byte, keys openpgp.EntityList, now time.Time) error {
	config := &packet.Config{Time: func() time.Time { return now }}
	reader := packet.NewReader(bytes.NewReader(signatures))
	var unknown []string
	var failure error
	for range 32 {
		p, err := reader.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("%w: unreadable: %w", ErrSignature, err)
		}
		sig, ok := p.(*packet.Signature)
		if !ok || sig.IssuerKeyId == nil {
			continue
		}
		if len(keys.KeysById(*sig.IssuerKeyId)) == 0 {
			unknown = append(unknown, fmt.Sprintf("%016X", *sig.IssuerKeyId))
			continue
		}
		var one bytes.Buffer
		if err := sig.Serialize(&one); err != nil {
			return fmt.Errorf("%w: %w", ErrSignature, err)
		}
		_, err = openpgp.CheckDetachedSignature(keys, bytes.NewReader(signed), &one, config)
		if err == nil {
			return nil
		}
		failure = fmt.Errorf("%w by key %016X: %w", ErrSignature, *sig.IssuerKeyId, err)
	}
	if failure != nil {
		return failure
	}
	if len(unknown) > 0 {
		return fmt.Errorf("%w: signed by %s, which is not in the archive keyring; is debian-archive-keyring up to date?",
			ErrSignature, strings.Join(unknown, ", "))
	}
	return fmt.Errorf("%w: none found", ErrSignature)
}

func parseRelease(text []byte) (*Release, error) {
	rel := &Release{Files: map[string]IndexFile{}}
	seen := false
	err := ReadControl(bytes.NewReader(text), func(p Paragraph) error {
		if seen {
			return errors.New("more than one paragraph")
		}
		seen = true
		rel.Origin, rel.Suite, rel.Codename = p.Get("Origin"), p.Get("Suite"), p.Get("Codename")
		rel.ByHash = p.Get("Acquire-By-Hash") == "yes"
		var err error
		if rel.Date, err = releaseTime(p.Get("Date")); err != nil {
			return fmt.Errorf("date: %w", err)
		}
		if rel.ValidUntil, err = releaseTime(p.Get("Valid-Until")); err != nil {
			return fmt.Errorf("valid-until: %w", err)
		}
		return rel.addFiles(p.Get("SHA256"))
	})
	if err != nil {
		return nil, fmt.Errorf("release file: %w", err)
	}
	if len(rel.Files) == 0 {
		return nil, errors.New("release file: it lists no SHA256 digests")
	}
	return rel, nil
}

func releaseTime(text string) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	var err error
	for _, layout := range []string{"Mon, _2 Jan 2006 15:04:05 MST", "Mon, _2 Jan 2006 15:04:05 -0700"} {
		var t time.Time
		if t, err = time.Parse(layout, text); err == nil {
			return t.UTC(), nil
		}
	}
	return time.Time{}, err
}

func (r *Release) addFiles(list string) error {
	for line := range strings.Lines(list) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		if len(fields) != 3 {
			return fmt.Errorf("digest line %q", clip(line))
		}
		raw, err := hex.DecodeString(fields[0])
		if err != nil || len(raw) != 32 {
			return fmt.Errorf("digest line %q", clip(line))
		}
		size, err := strconv.ParseInt(fields[1], 10, 64)
		if err != nil || size < 0 {
			return fmt.Errorf("digest line %q: bad size", clip(line))
		}
		if !safePath(fields[2]) {
			return fmt.Errorf("digest line %q: bad file name", clip(line))
		}
		r.Files[fields[2]] = IndexFile{Size: size, SHA256: strings.ToLower(fields[0])}
	}
	return nil
}
