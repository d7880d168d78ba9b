package cli

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest/wire"
)

// shownResults prints what an evaluation shows: text as a prompt does, and of the rest what there is, or where it was
// written to.
type shownResults struct {
	dir       string    // where files go; empty: nowhere
	out, note io.Writer // nil: nothing is printed
	all       []api.Result
	files     int
}

// files are the representations that are worth a file, with the ends of their names.
func resultFiles(r *wire.Result) []struct{ ending, text string } {
	return []struct{ ending, text string }{
		{"png", r.PNG},
		{"jpeg", r.JPEG},
		{"svg", r.SVG},
		{"pdf", r.PDF},
		{"html", r.HTML},
		{"md", r.Markdown},
		{"tex", r.LaTeX},
		{"js", r.JavaScript},
		{"json", string(r.JSON)},
		{"chart.json", string(r.Chart)},
		{"data.json", string(r.Data)},
	}
}

func (s *shownResults) show(r *wire.Result) error {
	if s.out == nil { // the caller prints them all
		s.all = append(s.all, apiResult(r))
	}
	rich := len(r.Formats()) > 1 || r.Text == "" && len(r.Formats()) > 0
	if r.Text != "" && s.out != nil && (r.Main || r.PNG == "") {
		if _, err := fmt.Fprintln(s.out, r.Text); err != nil {
			return err
		}
	}
	if !rich {
		return nil
	}
	if s.dir == "" {
		return s.say("[%s: use -o DIR to get files, or --json]\n", describe(r))
	}
	return s.write(r)
}

func (s *shownResults) say(format string, args ...any) error {
	if s.note == nil {
		return nil
	}
	_, err := fmt.Fprintf(s.note, format, args...)
	return err
}

// write makes files of a result, without touching any that is there.
func (s *shownResults) write(r *wire.Result) error {
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	s.files++
	for _, f := range resultFiles(r) {
		if f.text == "" {
			continue
		}
		content := []byte(f.text)
		if f.ending == "png" || f.ending == "jpeg" || f.ending == "pdf" {
			var err error
			if content, err = base64.StdEncoding.DecodeString(f.text); err != nil {
				return fmt.Errorf("write results: the %s of result %d is not in base64: %w", f.ending, s.files, err)
			}
		}
		path, err := s.create(f.ending, content)
		if err != nil {
			return fmt.Errorf("write results: %w", err)
		}
		if err := s.say("[wrote %s]\n", path); err != nil {
			return err
		}
	}
	return nil
}

func (s *shownResults) create(ending string, content []byte) (string, error) {
	for {
		path := filepath.Join(s.dir, fmt.Sprintf("result-%d.%s", s.files, ending))
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
		if os.IsExist(err) {
			s.files++
			continue
		}
		if err != nil {
			return "", err
		}
		_, err = f.Write(content)
		if closeErr := f.Close(); err == nil {
			err = closeErr
		}
		return path, err
	}
}

// describe says what a result has besides its text: "png 640x480, line chart".
func describe(r *wire.Result) string {
	var parts []string
	for _, f := range resultFiles(r) {
		switch {
		case f.text == "":
		case f.ending == "png":
			parts = append(parts, strings.TrimSpace("png "+pngSize(f.text)))
		case f.ending == "chart.json":
			var chart struct {
				Type string `json:"type"`
			}
			if json.Unmarshal(r.Chart, &chart) == nil && chart.Type != "" && chart.Type != "unknown" {
				parts = append(parts, "data of a "+strings.ReplaceAll(chart.Type, "_", " ")+" chart")
			}
		case f.ending == "data.json":
			parts = append(parts, "table as JSON")
		default:
			parts = append(parts, f.ending)
		}
	}
	for kind := range r.Extra {
		parts = append(parts, kind)
	}
	return printable(strings.Join(parts, ", "))
}

// pngSize reads the size of a picture from its header, in base64.
func pngSize(text string) string {
	const header = 24
	head, err := base64.StdEncoding.DecodeString(text[:min(len(text), header/3*4)])
	if err != nil || len(head) < header {
		return ""
	}
	return fmt.Sprintf("%dx%d", binary.BigEndian.Uint32(head[16:]), binary.BigEndian.Uint32(head[20:]))
}

func apiResult(r *wire.Result) api.Result {
	out := api.Result{
		Text: r.Text, HTML: r.HTML, Markdown: r.Markdown, SVG: r.SVG, PNG: r.PNG, JPEG: r.JPEG, PDF: r.PDF, LaTeX: r.LaTeX, JSON: r.JSON,
		JavaScript: r.JavaScript, Data: r.Data, Chart: r.Chart, Extra: r.Extra, Main: r.Main,
	}
	for _, o := range r.Omitted {
		out.Omitted = append(out.Omitted, api.Omitted(o))
	}
	return out
}
