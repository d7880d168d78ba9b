package e2bapi

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/httpapi"
	"forkd.dev/forkd/internal/lineage"
)

// builtIn reports whether a template is one that clients ask for when they are told nothing. Recipes of these names come with
// forkd.
func builtIn(tag string) bool { return tag == "base" || tag == "code-interpreter-v1" }

// tagOf is the snapshot's tag that a template's name means: TEAM/NAME:TAG is NAME, or NAME.TAG where the tag is another than
// the default. A snapshot's id is its tag.
func tagOf(name string) string {
	if at := strings.LastIndexByte(name, '/'); at >= 0 {
		name = name[at+1:]
	}
	base, tag, _ := strings.Cut(name, ":")
	if tag == "" || tag == "default" || tag == "latest" {
		return base
	}
	return base + "." + tag
}

// explainTemplate says what to do about a template that is missing. Clients are told not to ask again: it would be missing
// still.
func (s *Server) explainTemplate(w http.ResponseWriter, tag string, err error) error {
	if httpapi.ToAPI(err).Code == api.CodeNotFound && builtIn(tag) {
		w.Header().Set("Should-Retry", "false")
	}
	return s.missingTemplate(tag, err)
}

func (s *Server) missingTemplate(tag string, err error) error {
	if httpapi.ToAPI(err).Code != api.CodeNotFound {
		return err
	}
	if !builtIn(tag) {
		return &api.Error{
			Code: api.CodeNotFound, Message: fmt.Sprintf("template '%.80s' not found: no snapshot has that tag", tag),
			Hint: fmt.Sprintf("forkd snapshots, or forkd build RECIPE -t %.80s", tag),
		}
	}
	return &api.Error{
		Code: api.CodeUnavailable, Message: fmt.Sprintf("template '%s' is not built yet on this host", tag),
		Hint: fmt.Sprintf("forkd build %s -t %s", tag, tag),
	}
}

// templateReply is Template, and TemplateWithBuilds with the builds.
type templateReply struct {
	ID          string          `json:"templateID"`
	Build       string          `json:"buildID"`
	Status      string          `json:"buildStatus"`
	CPUs        int             `json:"cpuCount"`
	MemoryMB    int64           `json:"memoryMB"`
	DiskMB      int64           `json:"diskSizeMB"`
	Public      bool            `json:"public"`
	Aliases     []string        `json:"aliases"`
	Names       []string        `json:"names"`
	Created     time.Time       `json:"createdAt"`
	Updated     time.Time       `json:"updatedAt"`
	CreatedBy   *struct{}       `json:"createdBy"`
	LastSpawned *time.Time      `json:"lastSpawnedAt"`
	Spawned     int             `json:"spawnCount"`
	Builds      int             `json:"buildCount"`
	Envd        string          `json:"envdVersion"`
	List        []templateBuild `json:"builds,omitempty"`
}

type templateBuild struct {
	ID       string    `json:"buildID"`
	Status   string    `json:"status"`
	Created  time.Time `json:"createdAt"`
	Updated  time.Time `json:"updatedAt"`
	Finished time.Time `json:"finishedAt"`
	CPUs     int       `json:"cpuCount"`
	MemoryMB int64     `json:"memoryMB"`
	DiskMB   int64     `json:"diskSizeMB"`
	Envd     string    `json:"envdVersion"`
}

// buildID makes a UUID, which clients parse, of a snapshot's id.
func buildID(v host.SnapshotView) string {
	id := v.ID()
	digits := strings.Map(func(c rune) rune {
		if strings.ContainsRune("0123456789abcdef", c) {
			return c
		}
		return -1
	}, id)
	digits += strings.Repeat("0", max(0, 32-len(digits)))
	return digits[:8] + "-" + digits[8:12] + "-4" + digits[13:16] + "-8" + digits[17:20] + "-" + digits[20:32]
}

func (s *Server) describeTemplate(v host.SnapshotView) templateReply {
	return templateReply{
		ID: v.Tag, Build: buildID(v), Status: "ready", CPUs: v.Engine.CPUs, MemoryMB: v.Engine.MemoryBytes >> 20, DiskMB: s.diskMB(v.Image),
		Aliases: []string{v.Tag}, Names: []string{v.Tag}, Created: v.CreatedAt.UTC(), Updated: v.CreatedAt.UTC(),
		Spawned: v.Sandboxes, Builds: 1, Envd: envdVersion,
	}
}

// templates are the snapshots that were built; those of sandboxes are listed as snapshots.
func (s *Server) templates(w http.ResponseWriter, r *http.Request) error {
	all := slices.DeleteFunc(s.Host.Snapshots(), func(v host.SnapshotView) bool {
		return v.Branch != nil || v.Status != lineage.Ready || lineage.IsStep(v.Tag)
	})
	slices.SortFunc(all, func(a, b host.SnapshotView) int {
		return cmp.Or(b.CreatedAt.Compare(a.CreatedAt), strings.Compare(a.Tag, b.Tag))
	})
	out := []templateReply{}
	if strings.HasPrefix(r.URL.Path, "/v2/") {
		var err error
		if all, err = page(w, r.URL.Query(), all, func(v host.SnapshotView) string { return v.Tag }); err != nil {
			return err
		}
	}
	for _, v := range all {
		out = append(out, s.describeTemplate(v))
	}
	return httpapi.Reply(w, http.StatusOK, out)
}

func (s *Server) findTemplate(name string) (host.SnapshotView, error) {
	v, err := s.Host.Snapshot(tagOf(name))
	if err != nil || v.Status != lineage.Ready {
		return v, &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf("template '%.80s' not found", name)}
	}
	return v, nil
}

func noTags(http.ResponseWriter, *http.Request) error {
	return unsupported("tags: a template has one tag here, which is part of its name")
}

// templateOf is /templates/aliases/ALIAS and /templates/TEMPLATE/tags, which overlap.
func (s *Server) templateOf(w http.ResponseWriter, r *http.Request) error {
	first, of := r.PathValue("template"), r.PathValue("of")
	switch {
	case first == "aliases":
		return s.alias(w, of)
	case of == "tags":
		return noTags(w, r)
	}
	return &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf("there is no %.80q of a template", of)}
}

func (s *Server) alias(w http.ResponseWriter, alias string) error {
	v, err := s.findTemplate(alias)
	if err != nil {
		return err
	}
	return httpapi.Reply(w, http.StatusOK, map[string]any{"templateID": v.Tag, "public": false})
}

func (s *Server) template(w http.ResponseWriter, r *http.Request) error {
	v, err := s.findTemplate(r.PathValue("template"))
	if err != nil {
		return err
	}
	t := s.describeTemplate(v)
	t.List = []templateBuild{{
		t.Build, t.Status, t.Created, t.Created, t.Created, t.CPUs, t.MemoryMB, t.DiskMB, t.Envd,
	}}
	return httpapi.Reply(w, http.StatusOK, t)
}

func (s *Server) removeTemplate(w http.ResponseWriter, r *http.Request) error {
	v, err := s.findTemplate(r.PathValue("template"))
	if err != nil {
		return err
	}
	httpapi.NoteTouched(r, "snapshot", v.Tag)
	if _, err := s.Host.RemoveSnapshot(r.Context(), v.Tag, host.RemoveOptions{}); err != nil {
		return err
	}
	return empty(w, http.StatusNoContent)
}

func (s *Server) changeTemplate(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Public *bool `json:"public"`
	}
	if err := body(w, r, &req); err != nil {
		return err
	}
	v, err := s.findTemplate(r.PathValue("template"))
	if err != nil {
		return err
	}
	if req.Public != nil && *req.Public {
		return unsupported("public: templates are for those who have a token of this daemon")
	}
	return httpapi.Reply(w, http.StatusOK, map[string]any{"names": []string{v.Tag}})
}
