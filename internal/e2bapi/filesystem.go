package e2bapi

import (
	"context"
	"errors"
	"io"
	"net/http"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/httpapi"
)

// entry is how envd describes a file: of a link it prints the mode as Go does.
func entry(e wire.EntryInfo) wire.EntryInfo {
	if len(e.Permissions) > 0 && e.Permissions[0] == 'l' {
		e.Permissions = "L" + e.Permissions[1:]
	}
	return e
}

// touch notes which files a call is about.
func touch(r *http.Request, paths ...string) {
	for _, p := range paths {
		if p != "" {
			httpapi.NoteTouched(r, "file", p[:min(len(p), 1024)])
		}
	}
}

func (s *Server) onPath(method string) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		req := wire.PathRequest{}
		if err := message(w, r, &req); err != nil {
			return err
		}
		req.User = userOf(r)
		touch(r, req.Path)
		var out wire.EntryReply
		if err := s.unary(r, method, req, &out); err != nil {
			return err
		}
		return httpapi.Reply(w, http.StatusOK, wire.EntryReply{Entry: entry(out.Entry)})
	}
}

func (s *Server) removePath(w http.ResponseWriter, r *http.Request) error {
	req := wire.PathRequest{}
	if err := message(w, r, &req); err != nil {
		return err
	}
	req.User = userOf(r)
	touch(r, req.Path)
	return done(w, s.unary(r, wire.MethodFileRemove, req, nil))
}

func (s *Server) move(w http.ResponseWriter, r *http.Request) error {
	req := wire.MoveRequest{}
	if err := message(w, r, &req); err != nil {
		return err
	}
	req.User = userOf(r)
	touch(r, req.Source, req.Destination)
	var out wire.EntryReply
	if err := s.unary(r, wire.MethodFileMove, req, &out); err != nil {
		return err
	}
	return httpapi.Reply(w, http.StatusOK, wire.EntryReply{Entry: entry(out.Entry)})
}

func (s *Server) listDir(w http.ResponseWriter, r *http.Request) error {
	req := wire.ListDirRequest{}
	if err := message(w, r, &req); err != nil {
		return err
	}
	req.User = userOf(r)
	touch(r, req.Path)
	out := wire.EntriesReply{}
	if err := s.unary(r, wire.MethodFileList, req, &out); err != nil {
		return err
	}
	list := wire.EntriesReply{Entries: []wire.EntryInfo{}}
	for i := range out.Entries {
		list.Entries = append(list.Entries, entry(out.Entries[i]))
	}
	return httpapi.Reply(w, http.StatusOK, list)
}

// watchDir tells changes until the client leaves, or the directory is gone.
func (s *Server) watchDir(r *http.Request, out *stream) error {
	req := wire.WatchRequest{}
	if err := firstFrame(r, &req); err != nil {
		return err
	}
	req.User = userOf(r)
	touch(r, req.Path)
	ctx, cancel, err := bounded(r)
	if err != nil {
		return err
	}
	defer cancel()
	conn, err := s.guest(ctx, r)
	if err != nil {
		return err
	}
	up, err := conn.Open(ctx, wire.MethodWatch, req)
	if err != nil {
		return err
	}
	defer up.Close()
	stop := context.AfterFunc(ctx, func() { _ = up.Close() })
	defer stop()
	for {
		var e wire.WatchEvent
		err := up.RecvMessage(&e)
		switch {
		case err != nil && ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		if e.Filesystem == nil {
			if err := out.send(e); err != nil {
				return err
			}
			continue
		}
		for _, f := range s.written.events(targetOf(r).id, []wire.FileEvent{*e.Filesystem}) {
			if err := out.send(wire.WatchEvent{Filesystem: &f}); err != nil {
				return err
			}
		}
	}
}

func (s *Server) createWatcher(w http.ResponseWriter, r *http.Request) error {
	req := wire.WatchRequest{}
	if err := message(w, r, &req); err != nil {
		return err
	}
	req.User = userOf(r)
	touch(r, req.Path)
	var out wire.WatcherReply
	if err := s.unary(r, wire.MethodWatcherNew, req, &out); err != nil {
		return err
	}
	return httpapi.Reply(w, http.StatusOK, out)
}

func (s *Server) watcherEvents(w http.ResponseWriter, r *http.Request) error {
	req := wire.WatcherReply{}
	if err := message(w, r, &req); err != nil {
		return err
	}
	out := wire.WatcherEvents{}
	if err := s.unary(r, wire.MethodWatcherEvents, req, &out); err != nil {
		return err
	}
	out.Events = s.written.events(targetOf(r).id, out.Events)
	return httpapi.Reply(w, http.StatusOK, out)
}

func (s *Server) removeWatcher(w http.ResponseWriter, r *http.Request) error {
	req := wire.WatcherReply{}
	if err := message(w, r, &req); err != nil {
		return err
	}
	return done(w, s.unary(r, wire.MethodWatcherRemove, req, nil))
}

// fileUser is as which user files are read and written: the URL says it, or the header. Of a signed URL nothing else counts: the
// header is not signed, and would let whom it was given to act as anybody.
func fileUser(r *http.Request) string {
	q := r.URL.Query()
	if user := q.Get("username"); user != "" || q.Get("signature") != "" {
		return user
	}
	return userOf(r)
}

func (s *Server) download(w http.ResponseWriter, r *http.Request) error {
	conn, err := s.guest(r.Context(), r)
	if err != nil {
		return err
	}
	return s.API.Download(w, r, conn, wire.ReadRequest{Path: wire.EncodeName(r.URL.Query().Get("path")), User: fileUser(r)})
}

// writeInfo is what is told of a file that was written.
type writeInfo struct {
	Name     string            `json:"name"`
	Type     string            `json:"type"`
	Path     string            `json:"path"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

func (s *Server) upload(w http.ResponseWriter, r *http.Request) error {
	note := func(path string) { s.written.note(targetOf(r).id, path) }
	written, err := s.API.Upload(r, func(ctx context.Context) (httpapi.FileGuest, error) {
		conn, err := s.guest(ctx, r)
		if err != nil {
			return nil, err
		}
		return noting{conn, note}, nil
	},
		wire.WriteRequest{Path: wire.EncodeName(r.URL.Query().Get("path")), User: fileUser(r)})
	if err != nil {
		if r.Context().Err() == nil {
			httpapi.Drain(w, r, func() { failPlain(w, err, "") })
		}
		return err
	}
	list := []writeInfo{}
	for i := range written {
		list = append(list, writeInfo{Name: written[i].Name, Type: "file", Path: written[i].Path, Metadata: written[i].Metadata})
	}
	return httpapi.Reply(w, http.StatusOK, list)
}

func (s *Server) compose(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Sources     []string `json:"source_paths"`
		Destination string   `json:"destination"`
		User        string   `json:"username"`
	}
	if err := body(w, r, &req); err != nil {
		return err
	}
	if req.User == "" {
		req.User = userOf(r)
	}
	touch(r, req.Destination)
	var out wire.EntryReply
	in := wire.ComposeRequest{Sources: req.Sources, Destination: req.Destination, User: req.User}
	if err := s.unary(r, wire.MethodFileCompose, in, &out); err != nil {
		return err
	}
	return httpapi.Reply(w, http.StatusOK, writeInfo{Name: out.Entry.Name, Type: api.FileTypeFile, Path: out.Entry.Path, Metadata: out.Entry.Metadata})
}
