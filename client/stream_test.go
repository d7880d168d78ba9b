package client

import (
	"io"
	"net/http"
	"testing"
)

// TestReadFilePart: a part is the part, also of a file of which the daemon sends the whole, as of those without a size.
func TestReadFilePart(t *testing.T) {
	for name, daemon := range map[string]answering{
		"the part":      {http.StatusPartialContent, []byte("cde")},
		"the whole":     {http.StatusOK, []byte("abcdefgh")},
		"up to its end": {http.StatusOK, []byte("abcde")},
	} {
		c, err := New("http://127.0.0.1:1")
		if err != nil {
			t.Fatal(err)
		}
		c.http.Transport = daemon
		r, err := c.ReadFilePart(t.Context(), "sb", "/proc/x", "", 2, 3)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(r); string(got) != "cde" || err != nil || r.Close() != nil {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}
