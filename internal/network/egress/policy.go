package egress

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// maxRules bounds a policy's own rules, allowing and denying each.
const maxRules = 1000

// A Policy is what a sandbox may reach. The zero Policy: nothing. Its methods may be called at once from many goroutines
// while nobody changes it.
type Policy struct {
	// Preset names rules (see Presets) that count as if they were in Allow. Empty is "none".
	Preset string `json:"preset,omitempty"`
	Allow  []Rule `json:"allow,omitempty"`
	// Deny wins over Allow and Preset.
	Deny []Rule `json:"deny,omitempty"`
	// BudgetBytes is how much may be sent and received before every flow is cut. 0: there is no budget. Verdicts know nothing of it.
	BudgetBytes int64 `json:"budget_bytes,omitempty"`
}

// A Destination is where a flow goes.
type Destination struct {
	Protocol string // TCP or UDP
	AddrPort netip.AddrPort
	// Names are those that the sandbox looked up and was given this address for.
	Names []string
	// Own: the address is one of this host's, whatever range it is from.
	Own bool
}

// A Verdict is a decision with its reason, which is for people who ask why.
type Verdict struct {
	Allow bool
	// Rule is the rule that decided, as text. Empty: none did.
	Rule   string
	Reason string
	// Inspect: the flow is allowed as far as its address goes, but what it sends must be looked at (internal/network/inspect), and Server,
	// Opaque or Hidden be asked, before any of it leaves.
	Inspect bool
	// Type: of a name that may be looked up, only not for what was asked.
	Type bool
}

// Validate finds policies that cannot be meant: unknown presets, rules that are none, a negative budget, too many rules.
func (p *Policy) Validate() error {
	if _, err := rulesOf(p.Preset); err != nil {
		return err
	}
	if p.BudgetBytes < 0 {
		return fmt.Errorf("an egress budget of %d bytes: it cannot be negative (0 is none)", p.BudgetBytes)
	}
	for _, rules := range [][]Rule{p.Allow, p.Deny} {
		if len(rules) > maxRules {
			return fmt.Errorf("an egress policy with %d rules of a kind: at most %d are looked at for each flow", len(rules), maxRules)
		}
		for i := range rules {
			if err := rules[i].Validate(); err != nil {
				return err
			}
		}
	}
	return nil
}

// Rules are all that allow: the preset's and the policy's own.
func (p *Policy) Rules() []Rule {
	preset, err := rulesOf(p.Preset)
	if err != nil { // an unknown preset allows nothing
		preset = nil
	}
	return append(preset, p.Allow...)
}

// Clone is a copy that shares nothing with the policy.
func (p *Policy) Clone() Policy {
	c := *p
	c.Allow, c.Deny = cloneRules(p.Allow), cloneRules(p.Deny)
	return c
}

func cloneRules(rules []Rule) []Rule {
	rules = slices.Clone(rules)
	for i := range rules {
		rules[i].Ports = slices.Clone(rules[i].Ports)
	}
	return rules
}

// Merge adds what is denied by parent to child, and takes its budget where child has none or a larger one: what "the
// same or narrower" means for a child that names only what it wants.
func Merge(child, parent *Policy) Policy {
	c := child.Clone()
	for _, d := range parent.Deny {
		if !slices.ContainsFunc(c.Deny, func(have Rule) bool { return have.String() == d.String() }) {
			c.Deny = append(c.Deny, d)
		}
	}
	if parent.BudgetBytes != 0 && (c.BudgetBytes == 0 || c.BudgetBytes > parent.BudgetBytes) {
		c.BudgetBytes = parent.BudgetBytes
	}
	return c
}

// ErrWider says that a policy allows something that another does not.
var ErrWider = errors.New("egress would be wider")
