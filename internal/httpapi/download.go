package httpapi

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"path"
	"strconv"
	"strings"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/wire"
)

// download sends a file: whole, compressed, in ranges, or not at all if the client has it.
func (f *files) download(w http.ResponseWriter, r *http.Request) error {
	q, err := fileQuery(r)
	if err != nil {
		return err
	}
	g, err := f.guest(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	remote := &remoteFile{ctx: r.Context(), guest: g, req: wire.ReadRequest{Path: wire.EncodeName(q.Get("path")), User: q.Get("user")}}
	return remote.send(w, r)
}

// send is the reply.
func (f *remoteFile) send(w http.ResponseWriter, r *http.Request) error {
	defer f.Close()
	if err := f.open(); err != nil {
		return err
	}
	compress, err := wantsGzip(r)
	if err != nil {
		return err
	}
	fileHeaders(w.Header(), f.entry, compress)
	switch {
	case compress:
		if r.Method == http.MethodHead {
			return nil
		}
		z := gzip.NewWriter(w)
		_, err = io.Copy(z, f)
		err = errors.Join(err, z.Close())
	case f.entry.Size == 0: // Of nothing, or of a file of /proc, whose size nobody knows.
		if r.Method == http.MethodHead {
			return nil
		}
		_, err = io.Copy(w, f)
	default:
		http.ServeContent(&rangeErrors{ResponseWriter: w, size: f.entry.Size}, r, "", f.entry.ModifiedTime, f)
		return f.err
	}
	if err != nil && r.Context().Err() == nil {
		// A reply without a length must not end as if it were whole.
		panic(http.ErrAbortHandler)
	}
	return err
}

// fileHeaders describe a file. What is in a guest is not to be run in whatever shows it.
func fileHeaders(h http.Header, e wire.EntryInfo, compressed bool) {
	kind := mime.TypeByExtension(path.Ext(e.Name))
	if kind == "" {
		kind = "application/octet-stream"
	}
	name := strings.ToValidUTF8(strings.ReplaceAll(e.Name, "\x00", "\uFFFD"), "\uFFFD")
	h.Set("Content-Type", kind)
	h.Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": name}))
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Security-Policy", "sandbox")
	h.Set("Vary", "Accept-Encoding")
	if compressed {
		h.Set("Content-Encoding", "gzip")
	}
	if e.Size == 0 {
		return // its content may change without a sign
	}
	tag := fmt.Sprintf(`"%x-%x"`, e.ModifiedTime.UnixNano(), e.Size)
	if compressed {
		h.Set("Last-Modified", e.ModifiedTime.UTC().Format(http.TimeFormat))
		tag = "W/" + tag
	}
	h.Set("ETag", tag)
}

// remoteFile reads a file of the guest, opened anew where the reader jumps.
type remoteFile struct {
	ctx   context.Context //nolint:containedctx // one request's
	guest fileGuest
	req   wire.ReadRequest
	entry wire.EntryInfo

	s    *wire.Stream
	data io.Reader // of s
	from int64     // where data is
	at   int64
	err  error // what broke the reading
}

// open begins to read at the current place.
func (f *remoteFile) open() error {
	f.Close()
	req := f.req
	req.Offset = f.at
	s, err := f.guest.Open(f.ctx, wire.MethodFileRead, req)
	if err != nil {
		return err
	}
	var e wire.EntryReply
	if err := s.RecvMessage(&e); err != nil {
		_ = s.Close()
		return err
	}
	if e.Entry.Size < 0 {
		_ = s.Close()
		return fmt.Errorf("read %.200q: %w: a file of %d bytes", f.req.Path, guest.ErrProtocol, e.Entry.Size)
	}
	f.s, f.data, f.from, f.entry = s, s.DataReader(), f.at, e.Entry
	return nil
}

// Close ends the call, also one in the middle of a file.
func (f *remoteFile) Close() {
	if f.s != nil {
		_ = f.s.Close()
		f.s = nil
	}
}

// Read implements io.Reader.
func (f *remoteFile) Read(p []byte) (int, error) {
	if f.s == nil || f.from != f.at {
		if err := f.open(); err != nil {
			f.err = err
			return 0, err
		}
	}
	n, err := f.data.Read(p)
	f.at += int64(n)
	f.from += int64(n)
	if err != nil && !errors.Is(err, io.EOF) {
		f.err = err
	}
	return n, err
}

// Seek implements io.Seeker for what http.ServeContent does.
func (f *remoteFile) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += f.at
	case io.SeekEnd:
		offset += f.entry.Size
	}
	if offset < 0 {
		return 0, errors.New("seek before the beginning")
	}
	f.at = offset
	return offset, nil
}

// rangeErrors gives the one error that http.ServeContent sends the shape of ours.
type rangeErrors struct {
	http.ResponseWriter
	size int64
	told bool
}

func (w *rangeErrors) WriteHeader(status int) {
	if status != http.StatusRequestedRangeNotSatisfiable {
		w.ResponseWriter.WriteHeader(status)
		return
	}
	w.told = true
	for _, name := range []string{"Content-Disposition", "Content-Length", "ETag", "Last-Modified"} {
		w.Header().Del(name)
	}
	w.Header().Set("Content-Range", fmt.Sprintf("bytes */%d", w.size))
	message := fmt.Sprintf("the range is not within the file, which has %d bytes", w.size)
	_ = Reply(w.ResponseWriter, status, &api.Error{Text: message, Code: api.CodeInvalid, Message: message})
}

func (w *rangeErrors) Write(p []byte) (int, error) {
	if w.told {
		return len(p), nil
	}
	return w.ResponseWriter.Write(p)
}

// wantsGzip decides on the encoding of a reply, as envd does: gzip where the client prefers it, but never of a part or of
// what may not have changed.
func wantsGzip(r *http.Request) (bool, error) {
	plain, zipped := acceptable(strings.Join(r.Header.Values("Accept-Encoding"), ","))
	for _, name := range []string{"Range", "If-Range", "If-Modified-Since", "If-None-Match"} {
		if r.Header.Get(name) == "" {
			continue
		}
		if plain == 0 {
			return false, &api.Error{Code: api.CodeUnacceptable, Message: name + " needs a reply that is not encoded, which Accept-Encoding rules out"}
		}
		return false, nil
	}
	if plain == 0 && zipped == 0 {
		return false, &api.Error{Code: api.CodeUnacceptable, Message: "Accept-Encoding rules out both gzip and a reply that is not encoded"}
	}
	return zipped > 0 && zipped >= plain, nil
}

// acceptable weighs a reply as it is and one by gzip. A client that does not speak of the former takes it, but likes the
// latter better if it names it.
func acceptable(header string) (plain, zipped float64) {
	const unsaid = -1
	plain, zipped = unsaid, 0
	other := float64(unsaid)
	for part := range strings.SplitSeq(header, ",") {
		name, params, _ := strings.Cut(part, ";")
		weight := 1.0
		for param := range strings.SplitSeq(params, ";") {
			if q, ok := strings.CutPrefix(strings.ToLower(strings.TrimSpace(param)), "q="); ok {
				if v, err := strconv.ParseFloat(q, 64); err == nil {
					weight = max(0, min(v, 1))
				}
			}
		}
		switch strings.ToLower(strings.TrimSpace(name)) {
		case "gzip", "x-gzip":
			zipped = weight
		case "identity":
			plain = weight
		case "*":
			other = weight
		}
	}
	switch {
	case plain != unsaid:
	case other == 0:
		plain = 0
	default:
		plain = 0.001
	}
	if other > 0 && zipped == 0 && plain == 0 && !strings.Contains(strings.ToLower(header), "gzip") {
		zipped = other
	}
	return plain, zipped
}
