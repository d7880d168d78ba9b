package httpapi

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/host"
)

const (
	// maxParts bounds one multipart upload.
	maxParts = 10000
	// refusalPatience is how long the rest of a refused upload is taken, and thrown away.
	refusalPatience = 10 * time.Second
	// metadataHeader begins the names of headers that become a file's metadata.
	metadataHeader = "X-Metadata-"
)

// upload writes a file, or the files of a form. Each appears when it is complete. When one fails those before it are there,
// and the error names it.
func (f *files) upload(w http.ResponseWriter, r *http.Request) error {
	err := f.receive(w, r)
	if err == nil || r.Context().Err() != nil {
		return err
	}
	Drain(w, r, func() { writeError(w, err, w.Header().Get("X-Request-Id")) })
	return err
}

func (f *files) receive(w http.ResponseWriter, r *http.Request) error {
	q, err := fileQuery(r, "mode")
	if err != nil {
		return err
	}
	base := wire.WriteRequest{Path: wire.EncodeName(q.Get("path")), User: q.Get("user"), Metadata: metadataOf(r.Header)}
	if text := q.Get("mode"); text != "" {
		mode, err := strconv.ParseUint(text, 8, 32)
		if err != nil || mode > 0o7777 {
			return fmt.Errorf("%w: mode is %.20q, not an octal number up to 7777", host.ErrInvalid, text)
		}
		m := uint32(mode)
		base.Mode = &m
	}
	done, err := receiveFiles(r, func(ctx context.Context) (fileGuest, error) { return f.guest(ctx, r.PathValue("id")) }, base)
	if err != nil {
		return err
	}
	return Reply(w, http.StatusOK, done)
}

// receiveFiles writes a request's body into the guest that find finds.
func receiveFiles(r *http.Request, find func(context.Context) (fileGuest, error), base wire.WriteRequest) ([]api.File, error) {
	u := &upload{base: base}
	body, err := decodedBody(r)
	if err != nil {
		return nil, err
	}
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	form := strings.HasPrefix(kind, "multipart/")
	if form && (err != nil || params["boundary"] == "") {
		return nil, fmt.Errorf("%w: Content-Type %.100q names no boundary", host.ErrInvalid, r.Header.Get("Content-Type"))
	}
	if !form && u.base.Path == "" {
		return nil, fmt.Errorf("%w: no path given; add ?path=… to the URL, or send a form with files", host.ErrInvalid)
	}
	if u.guest, err = find(r.Context()); err != nil {
		return nil, err
	}
	if len(u.base.Metadata) > 0 && !slices.Contains(u.guest.Hello().Features, wire.FeatureFiles) {
		return nil, fmt.Errorf("%w: the agent in this snapshot keeps no metadata of files; build the snapshot again", host.ErrUnsupported)
	}
	if form {
		err = u.form(r.Context(), multipart.NewReader(body, params["boundary"]))
	} else {
		err = u.write(r.Context(), u.base.Path, body)
	}
	if err != nil {
		return nil, err
	}
	return u.done, nil
}

type upload struct {
	guest fileGuest
	base  wire.WriteRequest
	done  []api.File
}

// form writes the parts named "file", each to the path in its file name, or to the one in the URL.
func (u *upload) form(ctx context.Context, parts *multipart.Reader) error {
	u.done = []api.File{}
	seen := map[string]bool{}
	for n := 0; ; n++ {
		part, err := parts.NextRawPart()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return badForm(err)
		}
		if n >= maxParts {
			return fmt.Errorf("%w: a form of more than %d parts", host.ErrInvalid, maxParts)
		}
		name, target, err := partNames(part)
		if err != nil {
			return err
		}
		if name != "file" {
			continue
		}
		if u.base.Path != "" {
			target = u.base.Path
		}
		if target == "" {
			return fmt.Errorf("%w: a part of the form has no filename, and the URL no path", host.ErrInvalid)
		}
		if seen[target] {
			return fmt.Errorf("%w: two files for %.200q in one form; the first was written", host.ErrInvalid, target)
		}
		seen[target] = true
		if err := u.write(ctx, target, part); err != nil {
			return err
		}
	}
}

// partNames are a part's names as they are: package mime/multipart would keep the last part of the path only.
func partNames(part *multipart.Part) (field, file string, err error) {
	_, params, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
	if err != nil {
		return "", "", badForm(fmt.Errorf("Content-Disposition: %w", err))
	}
	return params["name"], wire.EncodeName(params["filename"]), nil
}

func badForm(err error) error { return fmt.Errorf("%w: form: %w", host.ErrInvalid, err) }

func (u *upload) write(ctx context.Context, target string, data io.Reader) error {
	req := u.base
	req.Path = target
	source := &sourceReader{r: data}
	var e wire.EntryReply
	err := call.Upload(ctx, u.guest, wire.MethodFileWrite, req, source, &e)
	if source.err != nil {
		return fmt.Errorf("%w: the body for %.200q broke off: %w", host.ErrInvalid, target, source.err)
	}
	if err != nil {
		return err
	}
	u.done = append(u.done, file(e.Entry))
	return nil
}

// sourceReader remembers that it was the body that failed, not the guest.
type sourceReader struct {
	r   io.Reader
	err error
}

func (s *sourceReader) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}

// decodedBody is the body without its Content-Encoding.
func decodedBody(r *http.Request) (io.Reader, error) {
	switch encoding := strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding"))); encoding {
	case "", "identity":
		return r.Body, nil
	case "gzip", "x-gzip":
		return &gzipBody{r: r.Body}, nil
	default:
		return nil, fmt.Errorf("%w: Content-Encoding %.60q; known are gzip and identity", host.ErrInvalid, encoding)
	}
}

// gzipBody reads the header of the compressed data when it is needed, not before there is somebody to tell of it.
type gzipBody struct {
	r io.Reader
	z *gzip.Reader
}

func (b *gzipBody) Read(p []byte) (int, error) {
	if b.z == nil {
		z, err := gzip.NewReader(b.r)
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF // an empty body is not an empty file
		}
		if err != nil {
			return 0, err
		}
		b.z = z
	}
	return b.z.Read(p)
}

func metadataOf(h http.Header) map[string]string {
	var meta map[string]string
	for name, values := range h {
		key, ok := strings.CutPrefix(name, metadataHeader)
		if !ok || len(values) == 0 {
			continue
		}
		if meta == nil {
			meta = map[string]string{}
		}
		meta[strings.ToLower(key)] = values[0]
	}
	return meta
}
