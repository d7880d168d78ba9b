package network

import (
	"net/netip"
	"time"
)

// Verdicts of a flow.
const (
	VerdictAllowed = "allowed" // the policy lets it pass (it may still have failed, then Reason says how)
	VerdictRefused = "refused" // the policy or a limit refused it
	VerdictCut     = "cut"     // it was allowed and open, until the policy changed or the budget was spent
)

// Protocols of a flow beside egress's TCP and UDP.
const (
	protocolDNS   = "dns"
	protocolICMP  = "icmp"
	protocolFrame = "frame"
)

// Flow is one conversation that a guest began or tried to: a TCP connection, a UDP exchange, a question to the name
// server, pings of one address, or frames that no stack may see. Refused ones that repeat are counted on one Flow, so
// that a guest cannot flood its own record.
type Flow struct {
	ID       uint64         `json:"id"` // rising from 1 within a Network
	Started  time.Time      `json:"started"`
	Ended    time.Time      `json:"ended,omitzero"`     // zero: open
	Protocol string         `json:"protocol"`           // tcp, udp, icmp, dns, frame
	Guest    netip.AddrPort `json:"guest"`              // where it comes from
	To       netip.AddrPort `json:"to"`                 // where it wanted to go; invalid for frames that name no address
	Name     string         `json:"name,omitempty"`     // by server name, host header or the name that DNS gave the address for; the question of dns
	Sent     int64          `json:"sent"`               // bytes of payload, guest → outside
	Received int64          `json:"received"`           // outside → guest
	Verdict  string         `json:"verdict"`            // allowed, refused, cut
	Rule     string         `json:"rule,omitempty"`     // the rule that decided
	Reason   string         `json:"reason,omitempty"`   // why it was refused or cut, or how it failed
	Attempts int64          `json:"attempts,omitempty"` // how often, where refused ones were counted together; 0: once
	Lost     int64          `json:"lost,omitempty"`     // how many were not told before this one, to whom it is told
}

// Totals are a Network's counters since it was made; they only rise, except Open.
type Totals struct {
	Talked         bool  `json:"talked"`          // any TCP, UDP or ICMP was seen from the guest
	Open           int   `json:"open"`            // flows open now
	Flows          int64 `json:"flows"`           // begun, refused ones among them
	Refused        int64 `json:"refused"`         // by policy or limit, each attempt counted
	Lost           int64 `json:"lost"`            // of those, kinds that were too many to be told apart
	Cut            int64 `json:"cut"`             // by a change of policy or a spent budget
	Questions      int64 `json:"questions"`       // asked of the name server
	Sent           int64 `json:"sent"`            // bytes of payload, guest → outside
	Received       int64 `json:"received"`        // outside → guest
	FramesIn       int64 `json:"frames_in"`       // from the guest
	FramesOut      int64 `json:"frames_out"`      // to the guest
	FramesDropped  int64 `json:"frames_dropped"`  // while closed, beyond a limit, or because the guest does not take them
	FramesRefused  int64 `json:"frames_refused"`  // that are not this guest's to send: spoofed, source routed, foreign protocols
	BudgetLeft     int64 `json:"budget_left"`     // bytes; -1: no budget
	BudgetExceeded bool  `json:"budget_exceeded"` // nothing more leaves
}

// Limits bound what one guest can cost its host. A zero field means its default.
type Limits struct {
	Flows          int   `json:"flows,omitempty"`            // open at once: 1024
	FlowsPerSecond int   `json:"flows_per_second,omitempty"` // new ones, with a burst of as many again: 512
	FramesBuffered int   `json:"frames_buffered,omitempty"`  // towards a guest that does not take them: 256
	BytesPerSecond int64 `json:"bytes_per_second,omitempty"` // both directions together; 0: no limit
	Kept           int   `json:"kept,omitempty"`             // ended flows that Flows still lists: 1024
}
