package httpapi

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"sync"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/host"
)

const (
	maxRecipe      = 1 << 20
	maxRecipeFiles = 8 << 30
	recipeFile     = "recipe.yaml"
)

// build receives a recipe or a Dockerfile as a tar stream, runs the build and streams its progress. The connection's end cancels it.
func (s *Server) build(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	spec := host.BuildSpec{
		Tag: q.Get("tag"), Kernel: q.Get("kernel"), Replace: q.Get("replace") == "true", NoCache: q.Get("no_cache") == "true",
	}
	spec.MayWiden = s.mayWiden(r)
	noteTouched(r, "snapshot", spec.Tag)
	if spec.Kernel != "" {
		if err := hostFiles(r, "kernel"); err != nil {
			return err
		}
	}
	dir, err := s.Host.TempDir("recipe-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("receive recipe: %w", err)
	}
	defer root.Close()
	if q.Has("dockerfile") {
		spec.Dockerfile, err = receiveDockerfile(q, dir, root, r.Body)
	} else {
		spec.Recipe, err = receive(root, tar.NewReader(r.Body))
		spec.Files = root.FS()
	}
	if err != nil {
		return err
	}
	if spec.Dockerfile != nil {
		defer spec.Dockerfile.Context.Close()
	}

	events := &eventWriter{w: w, rc: http.NewResponseController(w)}
	view, err := s.Host.Build(r.Context(), spec, func(e host.Event) {
		events.write(api.BuildEvent{Step: e.Step, Message: e.Message, Cached: e.Cached, Title: e.Title, Seconds: e.Took.Seconds()})
	})
	if err != nil {
		if !events.begun {
			return err
		}
		e := toAPI(err)
		e.RequestID = w.Header().Get("X-Request-Id")
		events.write(api.BuildEvent{Error: e})
		return err
	}
	noteCreated(r, "snapshot", view.Tag)
	snap := snapshot(view)
	events.write(api.BuildEvent{Snapshot: &snap})
	return nil
}

// receive unpacks the stream below root, which no name in it can leave, and returns the recipe.
func receive(root *os.Root, t *tar.Reader) ([]byte, error) {
	var recipe []byte
	var total int64
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%w: the body is no tar stream: %w", host.ErrInvalid, err)
		}
		if total += h.Size; total > maxRecipeFiles {
			return nil, fmt.Errorf("%w: the recipe's files have more than %d bytes", host.ErrInvalid, int64(maxRecipeFiles))
		}
		if h.Name == recipeFile && recipe == nil {
			if recipe, err = io.ReadAll(io.LimitReader(t, maxRecipe+1)); err != nil {
				return nil, fmt.Errorf("%w: read recipe: %w", host.ErrInvalid, err)
			}
			if len(recipe) > maxRecipe {
				return nil, fmt.Errorf("%w: the recipe has more than %d bytes", host.ErrInvalid, maxRecipe)
			}
			continue
		}
		if err := receiveFile(root, h, t); err != nil {
			return nil, fmt.Errorf("%w: recipe file %.200q: %w", host.ErrInvalid, h.Name, err)
		}
	}
	if recipe == nil {
		return nil, fmt.Errorf("%w: the tar stream has no %s", host.ErrInvalid, recipeFile)
	}
	return recipe, nil
}

func receiveFile(root *os.Root, h *tar.Header, r io.Reader) error {
	name := path.Clean(h.Name)
	if !fs.ValidPath(name) {
		return errors.New("not a relative path inside the recipe's directory")
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return root.MkdirAll(name, 0o700)
	case tar.TypeReg:
	default:
		return errors.New("neither a file nor a directory")
	}
	if err := root.MkdirAll(path.Dir(name), 0o700); err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600|fs.FileMode(h.Mode)&0o100)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	return errors.Join(err, f.Close())
}

// eventWriter writes one JSON line an event, each at once.
type eventWriter struct {
	w  http.ResponseWriter
	rc *http.ResponseController

	mu    sync.Mutex // events come from several goroutines
	begun bool
}

func (e *eventWriter) write(ev api.BuildEvent) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.begun {
		e.begun = true
		e.w.Header().Set("Content-Type", "application/x-ndjson")
		e.w.WriteHeader(http.StatusOK)
	}
	ev.Time = time.Now().UTC()
	line, err := json.Marshal(ev)
	if err != nil {
		return
	}
	// A client that is gone shows in the request's context, which ends the build.
	_, _ = e.w.Write(append(line, '\n'))
	_ = e.rc.Flush()
}
