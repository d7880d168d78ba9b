package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/host"
)

// fileGuest is what the routes for files need of a sandbox.
type fileGuest interface {
	call.Opener
	Hello() wire.Hello
}

// files are the routes for a sandbox's files. Contents pass through in pieces: the slower of client and guest sets the
// pace.
type files struct {
	guest func(ctx context.Context, id string) (fileGuest, error)
}

func (s *Server) files() *files {
	return &files{guest: func(ctx context.Context, id string) (fileGuest, error) { return s.Host.Guest(ctx, id) }}
}

func (f *files) operations() []operation {
	const base = " /v1/sandboxes/{id}/files"
	return []operation{
		{"GET" + base, access.Use, "Read a file", f.download}, // and HEAD
		{"POST" + base, access.Use, "Write files", f.upload},
		{"PUT" + base, access.Use, "Write a file", f.upload},
		{"DELETE" + base, access.Use, "Remove a file or directory", f.removeQuery},
		{"GET" + base + "/list", access.Use, "List a directory", f.list},
		{"GET" + base + "/stat", access.Use, "Describe a file", f.stat},
		{"POST" + base + "/mkdir", access.Use, "Make a directory", f.mkdir},
		{"POST" + base + "/move", access.Use, "Move a file", f.move},
		{"POST" + base + "/remove", access.Use, "Remove a file or directory", f.remove},
		{"POST" + base + "/compose", access.Use, "Join files into one", f.compose},
		{"GET" + base + "/watch", access.Use, "Watch a directory", f.watch},
		{"POST" + base + "/watchers", access.Use, "Start a watcher whose events are fetched", f.createWatcher},
		{"GET" + base + "/watchers/{watcher}", access.Use, "Fetch a watcher's events", f.watcherEvents},
		{"DELETE" + base + "/watchers/{watcher}", access.Use, "End a watcher", f.removeWatcher},
	}
}

// fileQuery is the part of a URL that names a file. Bytes that are not UTF-8 may be given as they are.
func fileQuery(r *http.Request, others ...string) (url.Values, error) {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, fmt.Errorf("%w: query: %w", host.ErrInvalid, err)
	}
	known := append([]string{"path", "user"}, others...)
	for k := range q {
		if !slices.Contains(known, k) {
			return nil, fmt.Errorf("%w: query has %.60q; known are %s", host.ErrInvalid, k, strings.Join(known, ", "))
		}
	}
	return q, nil
}

// unary makes a call in the guest.
func (f *files) unary(r *http.Request, method string, in, out any) error {
	g, err := f.guest(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	return call.Unary(r.Context(), g, method, in, out)
}

// entry makes a call whose reply describes a file.
func (f *files) entry(w http.ResponseWriter, r *http.Request, method string, in any) error {
	var e wire.EntryReply
	if err := f.unary(r, method, in, &e); err != nil {
		return err
	}
	return Reply(w, http.StatusOK, file(e.Entry))
}

func file(e wire.EntryInfo) api.File {
	out := api.File{
		Name: e.Name, Path: e.Path, Type: api.FileTypeOther, Size: e.Size, Mode: e.Mode, Permissions: e.Permissions,
		Owner: e.Owner, Group: e.Group, ModifiedTime: e.ModifiedTime, Metadata: e.Metadata,
	}
	switch e.Type {
	case wire.TypeFile:
		out.Type = api.FileTypeFile
	case wire.TypeDirectory:
		out.Type = api.FileTypeDir
	case wire.TypeSymlink:
		out.Type = api.FileTypeSymlink
	}
	if e.SymlinkTarget != nil {
		out.SymlinkTarget = *e.SymlinkTarget
	}
	return out
}

func (f *files) stat(w http.ResponseWriter, r *http.Request) error {
	q, err := fileQuery(r)
	if err != nil {
		return err
	}
	return f.entry(w, r, wire.MethodFileStat, wire.PathRequest{Path: wire.EncodeName(q.Get("path")), User: q.Get("user")})
}

func (f *files) list(w http.ResponseWriter, r *http.Request) error {
	q, err := fileQuery(r, "depth")
	if err != nil {
		return err
	}
	depth := uint64(1)
	if text := q.Get("depth"); text != "" {
		if depth, err = strconv.ParseUint(text, 10, 32); err != nil || depth == 0 {
			return fmt.Errorf("%w: depth is %.20q, not a number from 1", host.ErrInvalid, text)
		}
	}
	var e wire.EntriesReply
	req := wire.ListDirRequest{Path: wire.EncodeName(q.Get("path")), Depth: uint32(depth), User: q.Get("user")}
	if err := f.unary(r, wire.MethodFileList, req, &e); err != nil {
		return err
	}
	out := make([]api.File, len(e.Entries))
	for i := range e.Entries {
		out[i] = file(e.Entries[i])
	}
	return Reply(w, http.StatusOK, out)
}

func (f *files) mkdir(w http.ResponseWriter, r *http.Request) error {
	var req api.FileRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	return f.entry(w, r, wire.MethodFileMakeDir, wire.PathRequest{Path: req.Path, User: req.User})
}

func (f *files) move(w http.ResponseWriter, r *http.Request) error {
	var req api.MoveRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	return f.entry(w, r, wire.MethodFileMove, wire.MoveRequest{Source: req.Source, Destination: req.Destination, User: req.User})
}

func (f *files) compose(w http.ResponseWriter, r *http.Request) error {
	var req api.ComposeRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	return f.entry(w, r, wire.MethodFileCompose, wire.ComposeRequest{Sources: req.Sources, Destination: req.Destination, User: req.User})
}

func (f *files) remove(w http.ResponseWriter, r *http.Request) error {
	var req api.FileRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	return f.removePath(w, r, req.Path, req.User)
}

func (f *files) removeQuery(w http.ResponseWriter, r *http.Request) error {
	q, err := fileQuery(r)
	if err != nil {
		return err
	}
	return f.removePath(w, r, wire.EncodeName(q.Get("path")), q.Get("user"))
}

func (f *files) removePath(w http.ResponseWriter, r *http.Request, path, user string) error {
	if err := f.unary(r, wire.MethodFileRemove, wire.PathRequest{Path: path, User: user}, nil); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// watch streams events as lines of JSON until the client leaves.
func (f *files) watch(w http.ResponseWriter, r *http.Request) error {
	q, err := fileQuery(r, "recursive", "entries", "allow_network_mounts")
	if err != nil {
		return err
	}
	req := wire.WatchRequest{Path: wire.EncodeName(q.Get("path")), User: q.Get("user")}
	var errs [3]error
	req.Recursive, errs[0] = flag(r, "recursive")
	req.IncludeEntry, errs[1] = flag(r, "entries")
	req.AllowNetworkMounts, errs[2] = flag(r, "allow_network_mounts")
	if err := errors.Join(errs[:]...); err != nil {
		return err
	}
	g, err := f.guest(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	s, err := g.Open(r.Context(), wire.MethodWatch, req)
	if err != nil {
		return err
	}
	defer s.Close()
	lines := json.NewEncoder(w)
	flush := http.NewResponseController(w)
	for started := false; ; {
		var e wire.WatchEvent
		err := s.RecvMessage(&e)
		switch {
		case err != nil && !started:
			return err
		case errors.Is(err, io.EOF) || r.Context().Err() != nil:
			return nil // the directory is gone, which was told, or the client is
		case err != nil:
			return lines.Encode(api.FileEvent{Error: toAPI(err)})
		case e.Start != nil && !started:
			started = true
			w.Header().Set("Content-Type", "application/x-ndjson")
			err = lines.Encode(api.FileEvent{Started: true})
		case e.Filesystem != nil && started:
			err = lines.Encode(event(*e.Filesystem))
		}
		if err := errors.Join(err, flush.Flush()); err != nil {
			return err
		}
	}
}

func event(e wire.FileEvent) api.FileEvent {
	out := api.FileEvent{Name: e.Name, Type: strings.ToLower(strings.TrimPrefix(e.Type, "EVENT_TYPE_"))}
	if e.Entry != nil {
		entry := file(*e.Entry)
		out.Entry = &entry
	}
	return out
}

func (f *files) createWatcher(w http.ResponseWriter, r *http.Request) error {
	var req api.WatchRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	var made wire.WatcherReply
	err := f.unary(r, wire.MethodWatcherNew, wire.WatchRequest{
		Path: req.Path, Recursive: req.Recursive, IncludeEntry: req.Entries, AllowNetworkMounts: req.AllowNetworkMounts, User: req.User,
	}, &made)
	if err != nil {
		return err
	}
	return Reply(w, http.StatusCreated, api.Watcher{ID: made.WatcherID})
}

func (f *files) watcherEvents(w http.ResponseWriter, r *http.Request) error {
	var got wire.WatcherEvents
	if err := f.unary(r, wire.MethodWatcherEvents, wire.WatcherReply{WatcherID: r.PathValue("watcher")}, &got); err != nil {
		return err
	}
	out := api.FileEvents{Events: make([]api.FileEvent, len(got.Events))}
	for i := range got.Events {
		out.Events[i] = event(got.Events[i])
	}
	return Reply(w, http.StatusOK, out)
}

func (f *files) removeWatcher(w http.ResponseWriter, r *http.Request) error {
	if err := f.unary(r, wire.MethodWatcherRemove, wire.WatcherReply{WatcherID: r.PathValue("watcher")}, nil); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
