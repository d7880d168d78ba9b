package host

import (
	"errors"
	"io"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/lineage"
)

// TestBecause: a call that broke says that the sandbox has ended, and how.
func TestBecause(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	broke := io.ErrUnexpectedEOF
	id := h.one(t, ForkSpec{}).ID
	if err := h.Because(id, &wire.Error{Message: "no"}); errors.Is(err, lineage.ErrState) {
		t.Errorf("a refusal of the guest's: %v", err)
	}
	_ = machineOf(t, h, id).end(errors.New("its fan broke"))
	if err := h.Because(id, broke); !errors.Is(err, lineage.ErrState) || !errors.Is(err, broke) || !strings.Contains(err.Error(), "its fan broke") {
		t.Errorf("of a machine that died: %v", err)
	}
	awaitFailed(t, h, id)
	if err := h.Because(id, broke); !errors.Is(err, lineage.ErrState) || !strings.Contains(err.Error(), "its fan broke") {
		t.Errorf("of a sandbox that has failed: %v", err)
	}
	if err := h.Kill(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if err := h.Because(id, broke); !errors.Is(err, lineage.ErrState) || !strings.Contains(err.Error(), "ended meanwhile") {
		t.Errorf("of a sandbox that was ended: %v", err)
	}
}
