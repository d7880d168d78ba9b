package guest

import (
	"strings"

	"forkd.dev/forkd/internal/guest/wire"
)

// Bounds of what a guest says of itself: it is kept as long as the sandbox, and shown in lists.
const (
	maxSaid      = 256  // of a name
	maxWhy       = 1024 // of an explanation
	maxRenewed   = 512
	maxUnrenewed = 1024
	maxFeatures  = 64
)

// tidy makes what a guest says of itself fit to be kept and shown.
func tidy(h *wire.Hello) {
	h.Agent, h.BootID, h.Phase = wire.Cut(h.Agent, maxSaid), wire.Cut(h.BootID, maxSaid), wire.Cut(h.Phase, maxSaid)
	h.Features = said(h.Features, maxFeatures)
	if e := h.Refusal; e != nil {
		e.Code, e.Message = wire.Cut(e.Code, maxSaid), wire.Cut(e.Message, 8*maxWhy)
	}
	if h.Awakened != nil {
		tidyReport(h.Awakened)
	}
}

func tidyReport(r *wire.AwakenReport) {
	r.Renewed = said(r.Renewed, maxRenewed)
	more := len(r.NotRenewed) - maxUnrenewed
	if more > 0 {
		r.NotRenewed = append(r.NotRenewed[:maxUnrenewed:maxUnrenewed], wire.NotRenewed{
			What: "more", Name: "the rest", Why: "the guest names more than fit here",
		})
	}
	for i := range r.NotRenewed {
		n := &r.NotRenewed[i]
		n.What, n.Name, n.Why = line(n.What, maxSaid), line(n.Name, maxWhy), line(n.Why, maxWhy)
	}
	r.Severed = max(0, r.Severed)
	if !(r.MS >= 0 && r.MS < 1e12) {
		r.MS = 0
	}
}

func said(list []string, most int) []string {
	if len(list) > most {
		list = list[:most:most]
	}
	for i, s := range list {
		list[i] = line(s, maxSaid)
	}
	return list
}

// line is one line of what a guest says.
func line(s string, n int) string {
	return wire.Cut(strings.NewReplacer("\n", " ", "\r", " ", "\t", " ").Replace(s), n)
}
