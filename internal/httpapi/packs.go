package httpapi

import (
	"errors"
	"fmt"
	"mime"
	"net/http"
	"strconv"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/pack"
)

// packType is the media type of a pack file.
const packType = "application/vnd.forkd.pack"

// digestHeader names a pack.
const digestHeader = "X-Forkd-Pack-Digest"

func (s *Server) packOperations() []operation {
	return []operation{
		{"POST /v1/snapshots/{tag}/pack", access.Manage, "Pack a snapshot with all it stands on", s.pack},
		{"POST /v1/packs", access.Manage, "Make snapshots of a pack", s.unpack},
		{"POST /v1/snapshots/{tag}/verify", access.Read, "Read all that a snapshot is made of and say what is damaged", s.verify},
		{"GET /v1/snapshots/{tag}/provenance", access.Read, "Where a snapshot comes from", s.provenance},
	}
}

func packDocuments() map[string]*document {
	return map[string]*document{
		"POST /v1/snapshots/{tag}/pack": {
			id: "pack", query: []parameter{{name: "scrub", kind: boolean, about: "false: pack it as it is. Else secrets are looked for and removed, in a child."}},
			about: "The reply is a pack file (docs/packs.md). One that ends before its `Content-Length` is none. " +
				"`" + digestHeader + "` is the SHA-256 of its manifest, and through that of all that is in it.",
			replies: []response{{status: http.StatusOK, media: packType, about: "The pack file."}},
		},
		"POST /v1/packs": {
			id: "unpack", media: []string{packType, bytesType},
			query: []parameter{{name: "tag", about: "Of the snapshot; without it that of the pack.", pattern: tagPattern, form: tagForm}},
			about: "The body is a pack file. What this host cannot run is refused when the beginning has been read. Nothing is registered until " +
				"all of it is there and verified, and nothing that is here is changed. Children that may reach anything take scope admin, as in a recipe.",
			replies: []response{
				{status: http.StatusCreated, of: api.Unpacked{}},
				{status: http.StatusOK, of: api.Unpacked{}, about: "It is here already."},
			},
		},
		"POST /v1/snapshots/{tag}/verify": {
			id: "verify", body: struct{}{}, replies: ok(api.Verified{}), about: "Damage is no error: `ok` is false.",
		},
		"GET /v1/snapshots/{tag}/provenance": {id: "provenance", replies: ok(api.Provenance{})},
	}
}

func (s *Server) pack(w http.ResponseWriter, r *http.Request) error {
	scrub := true
	if r.URL.Query().Has("scrub") {
		var err error
		if scrub, err = flag(r, "scrub"); err != nil {
			return err
		}
	}
	tag := r.PathValue("tag")
	p, err := s.Host.Pack(r.Context(), tag, host.PackOptions{NoScrub: !scrub})
	if err != nil {
		return err
	}
	defer p.Close()
	h := w.Header()
	h.Set("Content-Type", packType)
	h.Set("Content-Length", strconv.FormatInt(p.Size(), 10))
	h.Set("Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": tag + ".forkd"}))
	h.Set(digestHeader, p.Digest().String())
	w.WriteHeader(http.StatusOK)
	if err := p.Write(r.Context(), w); err != nil {
		s.Log.Warn("a pack was broken off", "snapshot", tag, "error", err)
		// The client sees that it is shorter than was announced.
		panic(http.ErrAbortHandler)
	}
	return nil
}

func (s *Server) unpack(w http.ResponseWriter, r *http.Request) error {
	opts := host.ReceiveOptions{Tag: r.URL.Query().Get("tag"), MayWiden: s.mayWiden(r)}
	body := &sourceReader{r: r.Body}
	got, err := s.Host.Unpack(r.Context(), body, opts)
	if err != nil {
		if body.err != nil && r.Context().Err() == nil && !errors.Is(err, pack.ErrDamaged) {
			err = fmt.Errorf("%w: the body broke off: %w", host.ErrInvalid, err)
		}
		if r.Context().Err() == nil {
			Drain(w, r, func() { writeError(w, err, w.Header().Get("X-Request-Id")) })
		}
		return err
	}
	status := http.StatusOK
	if len(got.New) > 0 {
		status = http.StatusCreated
		noteCreated(r, "snapshot", got.New...)
	}
	return Reply(w, status, unpacked(got))
}

func unpacked(got host.Received) api.Unpacked {
	return api.Unpacked{
		Snapshot: snapshot(got.Snapshot), Digest: got.Digest.String(), New: notNil(got.New), Present: notNil(got.Present),
		Renamed: got.Renamed, Members: got.Members, Bytes: got.Bytes, FetchedBytes: got.Fetched, Scrub: scrubReport(got.Scrub),
	}
}

func scrubReport(s *pack.Scrub) *api.Scrub {
	if s == nil {
		return nil
	}
	out := &api.Scrub{Looked: notNil(s.Looked), Found: []api.Secret{}, Limits: s.Limits, Flat: s.Flat, Skipped: s.Skipped}
	for _, f := range s.Found {
		out.Found = append(out.Found, api.Secret{
			Left: api.SecretLeft(f.Left), Snapshot: f.Snapshot, Path: f.Path, What: f.What, Bytes: f.Bytes,
		})
	}
	return out
}

func (s *Server) verify(w http.ResponseWriter, r *http.Request) error {
	if err := decode(w, r, &struct{}{}); err != nil {
		return err
	}
	v, err := s.Host.Verify(r.Context(), r.PathValue("tag"))
	if err != nil {
		return err
	}
	out := api.Verified{
		OK: len(v.Damages) == 0, Snapshots: notNil(v.Snapshots), Layers: v.Layers, Chunks: v.Chunks, Bytes: v.Bytes, Damages: []api.Damage{},
	}
	for _, d := range v.Damages {
		out.Damages = append(out.Damages, api.Damage{What: d.What, Reason: d.Reason, Breaks: notNil(d.Breaks)})
	}
	return Reply(w, http.StatusOK, out)
}

func (s *Server) provenance(w http.ResponseWriter, r *http.Request) error {
	p, err := s.Host.Provenance(r.PathValue("tag"))
	if err != nil {
		return err
	}
	return Reply(w, http.StatusOK, provenance(p))
}

func provenance(p host.Provenance) api.Provenance {
	out := api.Provenance{Snapshots: []api.Origin{}, Images: []api.ImageOrigin{}}
	for _, l := range p.Links {
		o := api.Origin{
			Tag: l.Tag, ID: l.ID, Formerly: l.Formerly, ParentTag: l.Parent, ParentID: l.ParentID, CreatedAt: l.CreatedAt.UTC().Format(time.RFC3339),
			Tool: l.Tool, Source: l.Source, Recipe: l.Recipe, RecipeDigest: l.RecipeDigest, RecipeText: l.RecipeText, Commands: notNil(l.Commands),
			Warm: notNil(l.Warm), Image: l.Image, Kernel: l.Kernel, KernelContent: l.Content, Agent: l.Agent, Engine: asMap(l.Engine), MemoryLayer: l.Memory.String(),
			DiskLayer: l.Disk.String(), State: l.State,
		}
		if l.Branch != nil {
			o.BranchedFrom, o.Mode = l.Branch.From, l.Branch.Mode
			if r := l.Branch.Ran; r != nil {
				o.Ran = &api.Ran{Commands: [][]string{}, More: r.More, Lost: r.Lost}
				o.Ran.Commands = append(o.Ran.Commands, r.Commands...)
			}
		}
		out.Snapshots = append(out.Snapshots, o)
	}
	for _, i := range p.Images {
		out.Images = append(out.Images, api.ImageOrigin{
			ID: i.ID, Name: i.Name, Base: i.Base, Disk: i.Disk.String(), CreatedAt: i.CreatedAt.UTC().Format(time.RFC3339), Packages: notNil(i.Packages),
		})
	}
	return out
}
