package image

import (
	"strings"

	"forkd.dev/forkd/internal/network/egress"
)

// Network is what a recipe says of networks.
type Network struct {
	Sandboxes egress.Policy // of what is forked of its snapshot, unless a fork asks for another
	Build     egress.Policy // of its commands and its warm-up
}

const (
	minBudget = 1 << 20
	maxBudget = 1 << 50
)

// network reads a preset's name, or a mapping with more.
func (d *decoder) network(n *node) *Network {
	var build *node
	w := &Network{Sandboxes: d.policy(n, &build)}
	w.Build = w.Sandboxes
	if build != nil {
		w.Build = d.policy(build, nil)
	}
	return w
}

// policy reads one policy. Where build may be given it is kept for later.
func (d *decoder) policy(n *node, build **node) egress.Policy {
	var p egress.Policy
	if n.isScalar() {
		p.Preset = d.preset(n)
		return p
	}
	fields := map[string]func(*node){
		"preset": func(n *node) { p.Preset = d.preset(n) },
		"allow":  func(n *node) { p.Allow = d.rules(n) },
		"deny":   func(n *node) { p.Deny = d.rules(n) },
		"budget": func(n *node) { p.BudgetBytes = d.size(n, "budget", minBudget, maxBudget) },
	}
	if build != nil {
		fields["build"] = func(n *node) { *build = n }
	}
	d.mapping(n, fields)
	return p
}

// preset is the name of a preset, "" for the one that allows nothing.
func (d *decoder) preset(n *node) string {
	s, ok := d.text(n, maxNameLength)
	if !ok {
		return ""
	}
	if _, err := egress.Preset(s); err != nil {
		d.fault(n, "network %q: no such preset; there are %s. Rules go below allow", short(s), strings.Join(egress.Presets(), ", "))
		return ""
	}
	if s == egress.None {
		return ""
	}
	return s
}

func (d *decoder) rules(n *node) (rules []egress.Rule) {
	seen := map[string]int{}
	d.list(n, func(n *node) {
		s, ok := d.text(n, maxPathLength)
		if !ok {
			return
		}
		rule, err := egress.ParseRule(s)
		if err != nil {
			d.fault(n, "%s", err)
			return
		}
		if line, dup := seen[rule.String()]; dup {
			d.fault(n, "rule %q is given twice, first in line %d", short(s), line)
			return
		}
		seen[rule.String()] = n.Line
		rules = append(rules, rule)
	})
	return rules
}

// ParseNetwork reads what a recipe has after "network:", in one line. Name is for messages.
func ParseNetwork(name, text string) (*Network, error) {
	d := &decoder{}
	if strings.ContainsFunc(text, func(r rune) bool { return r < ' ' }) {
		d.fault(nil, "it has more than one line; write {preset: packages, allow: [pypi.org]}")
		return nil, &FileError{Name: name, Faults: d.faults}
	}
	var w *Network
	if root := d.document([]byte(text)); root != nil {
		w = d.network(root)
	}
	if len(d.faults) > 0 {
		for i := range d.faults {
			d.faults[i].Line = 0 // there is one
		}
		return nil, &FileError{Name: name, Faults: d.faults}
	}
	return w, nil
}
