package mcp

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"forkd.dev/forkd/api"
)

type readFileIn struct {
	SandboxID string `json:"sandbox_id"`
	Path      string `json:"path" jsonschema:"relative ones and ~ begin in the user's home"`
	Offset    int64  `json:"offset,omitempty" jsonschema:"in bytes; negative: so many before the end"`
	Limit     int    `json:"limit,omitempty" jsonschema:"bytes to read, 32768 at most and if not given"`
	User      string `json:"user,omitempty"`
}

type readFileOut struct {
	Path       string `json:"path"`
	Text       string `json:"text,omitempty"`
	Base64     string `json:"base64,omitempty"` // of what is not text
	Offset     int64  `json:"offset"`
	NextOffset int64  `json:"next_offset,omitempty"` // absent at the end
	Bytes      int64  `json:"bytes"`                 // of the whole file
}

type writeFileIn struct {
	SandboxID string `json:"sandbox_id"`
	Path      string `json:"path" jsonschema:"missing directories above it are made"`
	Content   string `json:"content"`
	Encoding  string `json:"encoding,omitempty" jsonschema:"utf-8 (default) or base64"`
	User      string `json:"user,omitempty"`
}

type listFilesIn struct {
	SandboxID string `json:"sandbox_id"`
	Path      string `json:"path,omitempty" jsonschema:"a directory; the working directory if not given"`
	Depth     int    `json:"depth,omitempty" jsonschema:"how many levels; 1 if not given"`
	User      string `json:"user,omitempty"`
}

// listed is a file as a list has it.
type listed struct {
	Path     string    `json:"path"`
	Type     string    `json:"type"`
	Size     int64     `json:"size"`
	Mode     string    `json:"mode"`
	Modified time.Time `json:"modified"`
}

type waitIn struct {
	SandboxID      string  `json:"sandbox_id"`
	Path           string  `json:"path" jsonschema:"a file of the sandbox"`
	Marker         string  `json:"marker" jsonschema:"text to wait for"`
	TimeoutSecs    float64 `json:"timeout_secs,omitempty" jsonschema:"60 if not given"`
	PollIntervalMS int     `json:"poll_interval_ms,omitempty" jsonschema:"200 if not given"`
}

type waited struct {
	Found       bool   `json:"found"`
	ElapsedMS   int64  `json:"elapsed_ms"`
	LastExcerpt string `json:"last_excerpt"`
}

func (s *server) fileTools(m *mcp.Server) {
	tool(s, m, "read_file", "Read a file of a sandbox, or a part of it; next_offset reads on.", reads, readFile)
	tool(s, m, "write_file", "Write a file of a sandbox; it replaces one that is there.", destroys, func(ctx context.Context, c *call, in writeFileIn) (any, error) {
		content := io.Reader(strings.NewReader(in.Content))
		switch in.Encoding {
		case "", "utf-8":
		case "base64":
			content = base64.NewDecoder(base64.StdEncoding, content)
		default:
			return nil, &api.Error{Code: api.CodeInvalid, Message: fmt.Sprintf("encoding is %q; give utf-8 or base64", in.Encoding)}
		}
		return c.WriteFile(ctx, in.SandboxID, in.Path, in.User, content)
	})
	tool(s, m, "list_files", "List a directory of a sandbox.", reads, func(ctx context.Context, c *call, in listFilesIn) (any, error) {
		path := in.Path
		if path == "" {
			path = "."
		}
		files, err := c.Files(ctx, in.SandboxID, path, max(in.Depth, 1), in.User)
		out := make([]listed, len(files))
		for i := range files {
			f := &files[i]
			out[i] = listed{f.Path, f.Type, f.Size, f.Permissions, f.ModifiedTime}
		}
		return out, err
	})
	tool(s, m, "wait_for_text", "Wait until a file of a sandbox contains a text, such as the last line of a log. Answers found: false when the time is over.",
		reads, waitForText)
}

func readFile(ctx context.Context, c *call, in readFileIn) (any, error) {
	f, err := c.File(ctx, in.SandboxID, in.Path, in.User)
	if err != nil {
		return nil, err
	}
	offset := in.Offset
	if offset < 0 {
		offset = max(0, f.Size+offset)
	}
	data, whole, err := readPart(ctx, c, in.SandboxID, f, in.User, offset, int64(limit(in.Limit)))
	if err != nil {
		return nil, err
	}
	out := readFileOut{Path: f.Path, Offset: offset, Bytes: max(f.Size, offset+int64(len(data)))}
	if text, ok := textOf(data, whole); ok {
		out.Text, data = text, data[:len(text)]
	} else {
		out.Base64 = base64.StdEncoding.EncodeToString(data)
	}
	if !whole {
		out.NextOffset = offset + int64(len(data))
	}
	return out, nil
}

// readPart reads n bytes of a file from offset on, and says whether they are its last. Files of the kernel's have no size, and
// are read from their beginning.
func readPart(ctx context.Context, c *call, id string, f *api.File, user string, offset, n int64) (data []byte, whole bool, err error) {
	if f.Size > 0 && offset >= f.Size {
		return nil, true, nil
	}
	var r io.ReadCloser
	if f.Size == 0 {
		if r, err = c.ReadFile(ctx, id, f.Path, user); err == nil {
			_, err = io.CopyN(io.Discard, r, offset)
		}
		if errors.Is(err, io.EOF) {
			return nil, true, r.Close()
		}
	} else {
		r, err = c.ReadFilePart(ctx, id, f.Path, user, offset, n+1)
	}
	if err != nil {
		return nil, false, err
	}
	defer r.Close()
	if data, err = io.ReadAll(io.LimitReader(r, n+1)); err != nil {
		return nil, false, fmt.Errorf("read %s: %w", f.Path, err)
	}
	if int64(len(data)) <= n {
		return data, true, nil
	}
	return data[:n], false, nil
}

// textOf is data as text, if it is that; without its end a character that is cut is left for later.
func textOf(data []byte, whole bool) (string, bool) {
	text := string(data)
	if !whole {
		for range utf8.UTFMax {
			if r, n := utf8.DecodeLastRuneInString(text); r != utf8.RuneError || n != 1 || text == "" {
				break
			}
			text = text[:len(text)-1]
		}
	}
	return text, utf8.ValidString(text) && !strings.ContainsRune(text, 0)
}

const (
	waitTimeout  = 60 * time.Second
	waitInterval = 200 * time.Millisecond
	waitLeast    = 50 * time.Millisecond
	waitExcerpt  = 64 << 10 // of the file's end that is searched
)

func waitForText(ctx context.Context, c *call, in waitIn) (any, error) {
	most, every := waitTimeout, waitInterval
	if in.TimeoutSecs > 0 {
		most = time.Duration(in.TimeoutSecs * float64(time.Second))
	}
	if in.PollIntervalMS > 0 {
		every = max(waitLeast, time.Duration(in.PollIntervalMS)*time.Millisecond)
	}
	began := time.Now()
	limit := time.NewTimer(most)
	defer limit.Stop()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		text, err := endOf(ctx, c, in.SandboxID, in.Path)
		out := waited{Found: strings.Contains(text, in.Marker), ElapsedMS: time.Since(began).Milliseconds(), LastExcerpt: tail(text, 256)}
		if e, ok := errors.AsType[*api.Error](err); err != nil && (!ok || e.Code != api.CodeNotFound || strings.HasPrefix(e.Message, "sandbox")) {
			return nil, err
		}
		if out.Found {
			return out, nil
		}
		c.progress(ctx, time.Since(began).Seconds(), most.Seconds(), "waiting for %q in %s", part(in.Marker, 0, 80), in.Path)
		select {
		case <-tick.C:
		case <-limit.C:
			return out, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// endOf is the end of a file.
func endOf(ctx context.Context, c *call, id, path string) (string, error) {
	f, err := c.File(ctx, id, path, "")
	if err != nil {
		return "", err
	}
	data, _, err := readPart(ctx, c, id, f, "", max(0, f.Size-waitExcerpt), waitExcerpt)
	return strings.ToValidUTF8(string(data), "\uFFFD"), err
}
