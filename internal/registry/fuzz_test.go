package registry

import (
	"bytes"
	"errors"
	"testing"

	"forkd.dev/forkd/internal/pack"
)

// FuzzIndex: whatever a registry calls a snapshot is refused with an error of the packages', or is one whose blobs hold all
// of its members and nothing else.
func FuzzIndex(f *testing.F) {
	h := newHome(f)
	h.Sizes.RootPages, h.Sizes.BranchedPages, h.Sizes.ImagePages, h.Sizes.Step = 2, 1, 1, 0
	m := h.chain(2)
	for n := range 2 {
		a, err := Describe(f.Context(), h.collect(m, n+1))
		if err != nil {
			f.Fatal(err)
		}
		text, err := decompress(bytes.NewReader(a.config), maxIndex)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(a.manifest, text, false)
		f.Add(a.manifest, a.config, true)
		f.Add(a.manifest, a.config[:len(a.config)/2], true)
		f.Add(a.manifest[:len(a.manifest)/2], text, false)
		f.Add(a.manifest, text[:len(text)/2], false)
		f.Add(a.manifest, bytes.Replace(text, []byte(`"members":[[`), []byte(`"members":[[1,9],[`), 1), false)
		f.Add(bytes.ReplaceAll(a.manifest, []byte(TypeIndex), []byte("application/vnd.oci.image.config.v1+json")), text, false)
	}
	f.Fuzz(func(t *testing.T, manifest, config []byte, compressed bool) {
		a, err := read(manifest, config, compressed)
		if err != nil {
			for _, known := range []error{ErrForeign, pack.ErrFormat, pack.ErrVersion} {
				if errors.Is(err, known) {
					return
				}
			}
			t.Fatalf("%v is none of the packages' errors", err)
		}
		checkWhole(t, a)
	})
}

// read is parse, or what that does with an index that it has decompressed: hardly any frame would get through.
func read(manifest, config []byte, compressed bool) (*Artifact, error) {
	if compressed {
		return parse(manifest, config)
	}
	m, err := parseManifest(manifest)
	if err != nil {
		return nil, err
	}
	a := &Artifact{manifest: manifest, config: config}
	return a, a.read(m, config)
}

func checkWhole(t *testing.T, a *Artifact) {
	t.Helper()
	missing := map[pack.Member]bool{}
	for _, x := range a.Pack.Members {
		missing[x] = true
	}
	s := &lacking{missing}
	total := int64(len(a.manifest) + len(a.config))
	for _, b := range a.blobs {
		size := int64(0)
		for _, x := range b.members {
			size += x.Size
		}
		if size != b.size {
			t.Errorf("blob %s of %d bytes has members of %d", b.digest, b.size, size)
		}
		total += b.size
		for { // as a pull does
			from, run := nextRun(b, s)
			if len(run) == 0 {
				break
			}
			if !missing[run[0]] || !missing[run[len(run)-1]] || from < 0 || from >= b.size {
				t.Errorf("from %d of %s would be fetched, which nobody needs", from, b.digest)
			}
			for _, x := range run {
				delete(missing, x)
			}
		}
	}
	if len(missing) > 0 || total != a.Bytes() {
		t.Errorf("%d members are in no blob; %d bytes of %d", len(missing), total, a.Bytes())
	}
}

// lacking is a sink that needs what is missing.
type lacking struct{ missing map[pack.Member]bool }

func (l *lacking) Needs(x pack.Member) bool { return l.missing[x] }
