package e2bapi

import (
	"encoding/json"
	"net/http"

	"forkd.dev/forkd/internal/host"
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

// limitNetwork turns what a client says of the network into what the sandbox is let do. A sandbox has no network today, so
// what allows something is refused, and what forbids something holds.
func (s *Server) limitNetwork(_ *host.ForkSpec, internet *bool, n *network) error {
	if internet != nil && *internet {
		return unsupported("allow_internet_access: sandboxes of this daemon have no network")
	}
	if n == nil {
		return nil
	}
	switch {
	case len(n.AllowOut) > 0:
		return unsupported("network.allowOut: sandboxes of this daemon have no network")
	case present(n.Proxy):
		return unsupported("network.egressProxy: there is no proxy for sandboxes here")
	case present(n.Rules):
		return unsupported("network.rules: requests are not rewritten here")
	case n.MaskHost != "":
		return unsupported("network.maskRequestHost: requests are not rewritten here")
	case len(n.DNS) > 0:
		return unsupported("network.dnsServers: sandboxes cannot choose their name servers here")
	case len(n.HTTPSPorts) > 0:
		return unsupported("network.httpsPorts: it is not served here")
	}
	return nil
}

func (s *Server) setNetwork(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		network

		AllowInternet *bool `json:"allow_internet_access"`
	}
	if err := body(w, r, &req); err != nil {
		return err
	}
	if _, err := s.one(r); err != nil {
		return err
	}
	if err := s.limitNetwork(&host.ForkSpec{}, req.AllowInternet, &req.network); err != nil {
		return err
	}
	return empty(w, http.StatusNoContent)
}

func (s *Server) describeNetwork(d *sandboxDetail, _ host.View) {
	no := false
	d.AllowInternet = &no
}
