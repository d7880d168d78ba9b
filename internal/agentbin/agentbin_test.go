package agentbin

import (
	"bytes"
	"strings"
	"testing"
)

func TestAgent(t *testing.T) {
	if b, err := Agent("amd64"); err == nil && !bytes.HasPrefix(b, []byte("\x7fELF")) {
		t.Fatal("not a program")
	}
	if _, err := Agent("vax"); err == nil || !strings.Contains(err.Error(), "make agent") {
		t.Fatalf("got %v", err)
	}
}
