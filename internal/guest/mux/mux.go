// Package mux carries many streams over the control channel, in yamux's wire format. Session is the host's side, Server
// the agent's; both are our own. The host's trusts its peer with nothing and no wait in it depends on the peer alone; the
// agent's is driven by its one reader, for the sake of a fork's first answer. There is no keep-alive and no write
// time-out, because a paused guest must not lose its connection; and few writes, because each is an interrupt of the
// guest. The package knows nothing of calls or preambles. Only packages guest and agent import it. Its tests hold both
// sides against yamux itself.
package mux

const (
	headerSize = 12
	typeData   = 0
	typeWindow = 1
	typeGoAway = 3
	flagSYN    = 1
	version    = 0
)
