package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/registry"
)

// Remote is something in a registry, and how that is reached.
type Remote struct {
	Ref         string                // REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:…
	Credentials *registry.Credentials // nil: those of the docker configuration of the daemon's user
	Fingerprint string                // of the registry's certificate, where nobody that the system trusts has signed it
}

func (r Remote) open(ctx context.Context, push bool) (*registry.Repository, error) {
	return registry.Open(ctx, r.Ref, registry.Options{Credentials: r.Credentials, Fingerprint: r.Fingerprint, Push: push})
}

// Transfer is one line of the progress of a push or a pull.
type Transfer struct {
	Step        string // "pack", "connect", "send", "fetch", "verify", "build"
	Message     string
	Done, Total int64 // bytes
}

// Pushed is what became of a push.
type Pushed struct {
	registry.Pushed
	Ref   string // to pull by, with the digest
	Scrub *pack.Scrub
}

// Push brings a snapshot with all it stands on to a registry, as far as it is not there.
func (h *Host) Push(ctx context.Context, tag string, to Remote, opts PackOptions, tell func(Transfer)) (Pushed, error) {
	if _, err := registry.Reference(to.Ref); err != nil {
		return Pushed{}, err
	}
	out, err := h.push(ctx, tag, to, opts, tell)
	if err != nil {
		return out, fmt.Errorf("push %s to %s: %w", tag, to.Ref, err)
	}
	return out, nil
}

func (h *Host) push(ctx context.Context, tag string, to Remote, opts PackOptions, tell func(Transfer)) (Pushed, error) {
	if _, err := h.snapshot(tag); err != nil {
		return Pushed{}, err
	}
	tell(Transfer{Step: "connect", Message: "asking the registry"})
	r, err := to.open(ctx, true) // before anything is collected: wrong credentials are told at once
	if err != nil {
		return Pushed{}, err
	}
	defer r.Close()
	tell(Transfer{Step: "pack", Message: "collecting " + tag})
	p, err := h.Pack(ctx, tag, opts)
	if err != nil {
		return Pushed{}, err
	}
	defer p.Close()
	a, err := registry.Describe(ctx, p.Source)
	if err != nil {
		return Pushed{}, err
	}
	done, err := r.Push(ctx, a, p.Source, func(at registry.Progress) {
		tell(Transfer{Step: "send", Done: at.Done, Total: at.Total})
	})
	if err != nil {
		return Pushed{}, err
	}
	return Pushed{Pushed: done, Ref: byDigest(to.Ref, done.Digest), Scrub: p.Source.Manifest().Scrub}, nil
}

// byDigest is a reference to what a tag means now.
func byDigest(ref, digest string) string {
	ref, _, _ = strings.Cut(ref, "@")
	if i := strings.LastIndexByte(ref, ':'); i > strings.LastIndexByte(ref, '/') {
		ref = ref[:i]
	}
	return ref + "@" + digest
}

// PullOptions say how what a registry has becomes a snapshot here.
type PullOptions struct {
	ReceiveOptions
	Rewarm bool // build it from its recipe if what was packed cannot run here
}

// Pulled is what became of a pull.
type Pulled struct {
	Received
	Ref    string // with the digest
	Rewarm string // why it was built from its recipe; "": it was not
}

const pullWhat = "pull"

// Pull brings a snapshot with all it stands on from a registry, as far as it is not here. What this host cannot run is refused
// when little has travelled. What has come of a pull that is broken off is kept for a while: another goes on from there.
func (h *Host) Pull(ctx context.Context, from Remote, opts PullOptions, tell func(Transfer)) (Pulled, error) {
	if _, err := registry.Reference(from.Ref); err != nil {
		return Pulled{}, err
	}
	out, err := h.pull(ctx, from, opts, tell)
	if err != nil {
		return out, fmt.Errorf("pull %s: %w", from.Ref, err)
	}
	return out, nil
}

func (h *Host) pull(ctx context.Context, from Remote, opts PullOptions, tell func(Transfer)) (Pulled, error) {
	tell(Transfer{Step: "connect", Message: "asking the registry"})
	r, err := from.open(ctx, false)
	if err != nil {
		return Pulled{}, err
	}
	defer r.Close()
	a, err := r.Find(ctx)
	if err != nil {
		return Pulled{}, err
	}
	out := Pulled{Ref: byDigest(from.Ref, a.Digest)}
	name := strings.TrimPrefix(a.Digest, "sha256:")
	release, err := h.hold(pullWhat+" "+short(name), pullWhat) // two of the same would fetch everything twice, into one place
	if err != nil {
		return out, err
	}
	defer release()
	if opts.Dir, err = h.pullDir(name); err != nil {
		return out, err
	}
	out.Received, err = h.Receive(ctx, a.Pack, opts.ReceiveOptions, func(ctx context.Context, sink *pack.Sink) error {
		err := r.Download(ctx, a, sink, func(at registry.Progress) {
			tell(Transfer{Step: "fetch", Done: at.Done, Total: at.Total})
		})
		if err == nil {
			tell(Transfer{Step: "verify", Message: "verifying and storing"})
		}
		return err
	})
	if err != nil && opts.Rewarm && errors.Is(err, engine.ErrIncompatible) {
		return h.rewarm(ctx, out, a.Pack, opts, err, tell)
	}
	return out, err
}

// rewarm builds what cannot run here from the recipe that the pack has, unless that was done before: a build of the same recipe is
// what was asked for, whatever its packages are by now.
func (h *Host) rewarm(ctx context.Context, out Pulled, m *pack.Manifest, opts PullOptions, why error, tell func(Transfer)) (Pulled, error) {
	head := m.Head()
	if head.RecipeText == "" || head.Branch != nil {
		return out, why // its hint says so
	}
	elsewhere := func(err error) error {
		return hint(fmt.Errorf("%w; it cannot be built here either: %w", why, err), "use it on a host that is like the one it was made on in that")
	}
	if err := image.StandsAlone([]byte(head.RecipeText)); err != nil {
		return out, elsewhere(err)
	}
	tag := head.Tag
	if opts.Tag != "" {
		tag = opts.Tag
	}
	out.Rewarm = why.Error()
	if m, err := h.snapshot(tag); err == nil {
		if !m.BuiltOf(head.RecipeText) {
			return out, takenBy(h.tagFree(tag), tag)
		}
		tell(Transfer{Step: "build", Message: fmt.Sprintf("%s is here already, built from the same recipe", tag)})
		out.Received.Snapshot, out.Received.Present = h.viewSnapshot(m), []string{tag}
		return out, nil
	}
	tell(Transfer{Step: "build", Message: "building it from its recipe, because " + why.Error()})
	view, err := h.Build(ctx, BuildSpec{Tag: tag, Recipe: []byte(head.RecipeText), Files: noFiles{}, MayWiden: opts.MayWiden}, func(e Event) {
		tell(Transfer{Step: e.Step, Message: e.Message})
	})
	if err != nil {
		return out, elsewhere(err)
	}
	out.Received.Snapshot, out.Received.New = view, []string{view.Tag}
	return out, nil
}

// noFiles are those of a recipe that travels: none.
type noFiles struct{}

func (noFiles) Open(name string) (fs.File, error) {
	return nil, &fs.PathError{Op: "open", Path: name, Err: fmt.Errorf("%w: a recipe's files do not travel with its snapshot; build it where they are", fs.ErrNotExist)}
}

// pullAge is how long what has come of a pull that was broken off is kept.
const pullAge = 7 * 24 * time.Hour

// pullDir is where the members of one pack are kept until they are complete. Old ones are removed on the way.
func (h *Host) pullDir(name string) (string, error) {
	if _, err := layer.ParseDigest(name); err != nil {
		return "", err
	}
	dir := filepath.Join(h.cfg.Home.Pulls(), name)
	h.trimPulls()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("make a place for what comes: %w", err)
	}
	now := time.Now()
	return dir, os.Chtimes(dir, now, now)
}

// trimPulls removes what has come of pulls that were broken off longer ago than pullAge, and returns the bytes freed.
func (h *Host) trimPulls() (freed int64) {
	entries, err := os.ReadDir(h.cfg.Home.Pulls())
	if err != nil {
		return 0 // there was no pull
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || time.Since(info.ModTime()) < pullAge {
			continue
		}
		release, err := h.hold(pullWhat+" "+short(e.Name()), removeWhat)
		if err != nil {
			continue // it goes on just now
		}
		path := filepath.Join(h.cfg.Home.Pulls(), e.Name())
		n := diskUsage(path)
		if err := os.RemoveAll(path); err != nil {
			h.log.Warn("remove what has come of an old pull", "error", err)
		} else {
			freed += n
		}
		release()
	}
	return freed
}

// RemoteVerified is what VerifyRemote has read.
type RemoteVerified struct {
	Ref      string // with the digest
	Manifest *pack.Manifest
}

// VerifyRemote reads all of a snapshot in a registry and checks it. It needs room for all of it on the way; nothing is kept.
func (h *Host) VerifyRemote(ctx context.Context, from Remote, tell func(Transfer)) (RemoteVerified, error) {
	a, err := h.verifyRemote(ctx, from, tell)
	if err != nil {
		return RemoteVerified{}, fmt.Errorf("verify %s: %w", from.Ref, err)
	}
	return RemoteVerified{byDigest(from.Ref, a.Digest), a.Pack}, nil
}

func (h *Host) verifyRemote(ctx context.Context, from Remote, tell func(Transfer)) (*registry.Artifact, error) {
	tell(Transfer{Step: "connect", Message: "asking the registry"})
	r, err := from.open(ctx, false)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	a, err := r.Find(ctx)
	if err != nil {
		return nil, err
	}
	dir, err := h.TempDir("verify-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	// A store of its own: what is here would not be read there.
	empty, err := layer.Open(filepath.Join(dir, "layers"))
	if err != nil {
		return nil, err
	}
	sink, err := pack.NewSink(ctx, filepath.Join(dir, "members"), empty, a.Pack)
	if err != nil {
		return nil, err
	}
	err = r.Download(ctx, a, sink, func(at registry.Progress) { tell(Transfer{Step: "fetch", Done: at.Done, Total: at.Total}) })
	if err != nil {
		return nil, h.explainFull(err)
	}
	return a, sink.Verify(ctx)
}

// Shelf is a registry of this home's snapshots, read only, under their tags. They are packed as they are: who may pull may
// have all that they hold. The caller closes it.
func (h *Host) Shelf() *registry.Shelf {
	return &registry.Shelf{
		Idle: 10 * time.Minute, Most: 8, Tags: h.shelved,
		ID: func(tag string) (string, error) {
			m, err := h.snapshot(tag)
			if err != nil {
				return "", err
			}
			return m.ID(), nil
		},
		Collect: func(ctx context.Context, tag string) (*registry.Held, error) {
			p, err := h.Pack(ctx, tag, PackOptions{NoScrub: true, AsMade: true})
			if err != nil {
				return nil, err
			}
			return &registry.Held{Source: p.Source, Close: p.Close}, nil
		},
	}
}

// shelved are the tags of what may have been on the shelf before, in order: no steps of builds, and nothing that shares parts of
// chunks. That is given chunks of its own, and with them its digest, when it is asked for by its tag; to be asked for a digest must
// not have the store written anew.
func (h *Host) shelved(ctx context.Context) []string {
	h.mu.Lock()
	tags := slices.DeleteFunc(slices.Sorted(maps.Keys(h.snapshots)), lineage.IsStep)
	h.mu.Unlock()
	return slices.DeleteFunc(tags, func(tag string) bool {
		shared, err := h.shared(ctx, h.leaving(tag))
		return shared || err != nil
	})
}
