package api

import "time"

// Egress is what a sandbox may reach outside of itself. Without any of it nothing leaves. A preset is a list of rules that
// comes before allow; deny goes before both.
type Egress struct {
	Preset string `json:"preset,omitempty" enum:"none,dns-only,packages,open"` // default: none
	// Rules: DOMAIN, *.DOMAIN, ADDRESS or ADDRESS/BITS (IPv6 in brackets), each with :PORT or :FROM-TO, each with /tcp or /udp.
	Allow []string `json:"allow,omitempty"`
	Deny  []string `json:"deny,omitempty"`
	// Sent and received together, of the sandbox's whole life; then nothing passes any more. 0: no bound.
	BudgetBytes int64 `json:"budget_bytes,omitempty" minimum:"0"`
}

// EgressState is the reply to GET, PUT and PATCH /v1/sandboxes/{id}/egress: the policy that is in force, and what it has come
// to so far.
type EgressState struct {
	Egress
	Rules         []string `json:"rules"`          // what the preset stands for
	SentBytes     int64    `json:"sent_bytes"`     // by the guest, of all flows
	ReceivedBytes int64    `json:"received_bytes"` // by it
	Flows         int64    `json:"flows"`          // begun, those refused among them
	FlowsOpen     int      `json:"flows_open"`
	FlowsRefused  int64    `json:"flows_refused"` // each attempt counts
	FlowsLost     int64    `json:"flows_lost"`    // of those, attempts of so many kinds that they are not written down one by one
	FlowsCut      int64    `json:"flows_cut"`     // by a change of policy, or a budget that was spent
	Questions     int64    `json:"questions"`     // asked of its name server
	// What is left of the budget, if there is one.
	BudgetLeftBytes *int64 `json:"budget_left_bytes,omitempty"`
}

// EgressChange is the body of PATCH /v1/sandboxes/{id}/egress: what to do to the policy that is in force. Rules are removed
// before others are added.
type EgressChange struct {
	Preset      *string  `json:"preset,omitempty" enum:"none,dns-only,packages,open"`
	Allow       []string `json:"allow,omitempty"` // added
	Deny        []string `json:"deny,omitempty"`
	RemoveAllow []string `json:"remove_allow,omitempty"`
	RemoveDeny  []string `json:"remove_deny,omitempty"`
	BudgetBytes *int64   `json:"budget_bytes,omitempty" minimum:"0"`
}

// Flow is a conversation of a sandbox with something outside, or one that was refused: a TCP connection, an exchange over UDP,
// a question to the name server, pings of one address, or frames that are not the guest's to send. Refused ones that repeat
// are one flow with their number.
type Flow struct {
	ID            uint64     `json:"id"` // rising; begins anew when the network was restarted, or the sandbox was suspended
	StartedAt     time.Time  `json:"started_at"`
	EndedAt       *time.Time `json:"ended_at,omitempty"` // it is open otherwise
	Protocol      string     `json:"protocol"`           // tcp, udp, icmp, dns, frame
	From          string     `json:"from,omitempty"`     // ADDRESS:PORT in the guest
	To            string     `json:"to,omitempty"`       // ADDRESS:PORT outside
	Name          string     `json:"name,omitempty"`     // that it goes to, as far as that is known; of dns, that was asked for
	SentBytes     int64      `json:"sent_bytes"`
	ReceivedBytes int64      `json:"received_bytes"`
	Verdict       string     `json:"verdict"`            // allowed, refused, cut
	Rule          string     `json:"rule,omitempty"`     // that decided
	Reason        string     `json:"reason,omitempty"`   // why it was refused or cut, or how it failed
	Attempts      int64      `json:"attempts,omitempty"` // of refused ones that were counted together
	Lost          int64      `json:"lost,omitempty"`     // how many were not told before this one, because who follows was too slow
}
