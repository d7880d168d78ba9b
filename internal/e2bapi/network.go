package e2bapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"strings"

	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/network/egress"
)

// network is SandboxNetworkConfig.
type network struct {
	AllowPublic *bool           `json:"allowPublicTraffic,omitempty"`
	AllowOut    []string        `json:"allowOut,omitempty"`
	DenyOut     []string        `json:"denyOut,omitempty"`
	Proxy       json.RawMessage `json:"egressProxy,omitempty"`
	MaskHost    string          `json:"maskRequestHost,omitempty"`
	Rules       json.RawMessage `json:"rules,omitempty"`
	DNS         []string        `json:"dnsServers,omitempty"`
	HTTPSPorts  []int           `json:"httpsPorts,omitempty"`
}

func (n *network) check() error {
	switch {
	case n.AllowPublic != nil && *n.AllowPublic:
		return unsupported("network.allowPublicTraffic: ports of sandboxes are opened to all one by one here, not together")
	case present(n.Proxy):
		return unsupported("network.egressProxy: there is no proxy for sandboxes here")
	case present(n.Rules):
		return unsupported("network.rules: requests are not rewritten here")
	case n.MaskHost != "":
		return unsupported("network.maskRequestHost: requests are not rewritten here")
	case len(n.DNS) > 0:
		return unsupported("network.dnsServers: sandboxes cannot choose their name servers here")
	case len(n.HTTPSPorts) > 0:
		return unsupported("network.httpsPorts: HTTPS is looked at on port 443 here")
	}
	return nil
}

// policy is what a sandbox may reach whose client says this of the network. Nothing said is the daemon's own setting, and so is
// that it may reach the internet: older clients say that always. As on E2B denying everything leaves what is allowed by name; of
// other rules the one that denies goes first here.
func (s *Server) policy(internet *bool, n *network) (p egress.Policy, said bool, err error) {
	p.Preset = s.Egress
	denied := internet != nil && !*internet
	said = denied || n != nil && len(n.AllowOut)+len(n.DenyOut) > 0
	if denied {
		p.Preset = egress.None
	}
	if n == nil {
		return p, said, nil
	}
	if err := n.check(); err != nil {
		return p, said, err
	}
	for i, text := range n.DenyOut {
		if text == "0.0.0.0/0" || text == "::/0" {
			p.Preset = egress.None
			continue
		}
		rule, err := ruleOf(text)
		if err != nil {
			return p, said, invalid("network.denyOut[%d]: %v", i, err)
		}
		p.Deny = append(p.Deny, rule)
	}
	for i, text := range n.AllowOut {
		rule, err := ruleOf(text)
		if err == nil && rule.Domain != "" && len(rule.Ports) == 0 { // as on E2B, where names are those of HTTP and TLS
			rule, err = egress.ParseRule(text + ":80,443/tcp")
		}
		if err != nil {
			return p, said, invalid("network.allowOut[%d]: %v", i, err)
		}
		p.Allow = append(p.Allow, rule)
	}
	return p, said, nil
}

// ruleOf reads an address, a range of them, or a name. In ours addresses of IPv6 are in brackets.
func ruleOf(text string) (egress.Rule, error) {
	address, bits, _ := strings.Cut(text, "/")
	if a, err := netip.ParseAddr(address); err == nil && a.Is6() {
		text = "[" + address + "]"
		if bits != "" {
			text += "/" + bits
		}
	}
	return egress.ParseRule(text)
}

// limitNetwork says what a new sandbox may reach. More than its snapshot allows is for those alone who may widen it; what the
// daemon gives by itself is its administrator's choice.
func (s *Server) limitNetwork(r *http.Request, spec *host.ForkSpec, internet *bool, n *network) error {
	p, said, err := s.policy(internet, n)
	if err != nil {
		return err
	}
	if spec.MayWiden = s.API.MayWiden(r); !spec.MayWiden {
		p, spec.MayWiden = s.given(p, s.Host.SnapshotEgress(spec.Tag), said)
	}
	spec.Egress = &p
	return nil
}

// given is a policy as one has it who may not widen, and whether the daemon itself gives it: what the snapshot denies stays
// denied, and its budget stays, but the daemon's preset goes before the snapshot's, and so does less than that.
func (s *Server) given(p, snapshot egress.Policy, said bool) (egress.Policy, bool) {
	p = egress.Merge(&p, &snapshot)
	return p, !said || egress.Narrower(&p, &egress.Policy{Preset: s.Egress}) == nil
}

func (s *Server) setNetwork(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		network

		AllowInternet *bool `json:"allow_internet_access"`
	}
	if err := body(w, r, &req); err != nil {
		return err
	}
	v, err := s.one(r)
	if err != nil {
		return err
	}
	p, _, err := s.policy(req.AllowInternet, &req.network)
	if err != nil {
		return err
	}
	_, err = s.Host.SetEgress(r.Context(), v.ID, func(egress.Policy) (egress.Policy, error) { return p, nil }, s.API.MayWiden(r))
	if err != nil {
		return fmt.Errorf("network: %w", err)
	}
	return empty(w, http.StatusNoContent)
}

// describeNetwork tells what a sandbox may reach: a preset is told by its rules.
func describeNetwork(v host.View) (internet bool, n *network) {
	n = &network{}
	for _, r := range append(v.Egress.Rules(), v.Egress.Allow...) {
		n.AllowOut = append(n.AllowOut, r.String())
	}
	for _, r := range v.Egress.Deny {
		n.DenyOut = append(n.DenyOut, r.String())
	}
	if v.Egress.Preset == egress.Open {
		n.AllowOut = nil
		return true, n
	}
	n.DenyOut = append(n.DenyOut, "0.0.0.0/0")
	return len(n.AllowOut) > 0, n
}
