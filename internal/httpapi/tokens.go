package httpapi

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
)

func (s *Server) tokenOperations() []operation {
	const one = " /v1/sandboxes/{id}/tokens"
	return []operation{
		{"POST /v1/tokens", access.Admin, "Create a token", s.createToken},
		{"GET /v1/tokens", access.Admin, "List tokens", s.tokens},
		{"DELETE /v1/tokens/{token}", access.Admin, "Revoke a token", s.revokeToken},
		{"POST" + one, access.Manage, "Create a token that opens this sandbox alone", s.createToken},
		{"GET" + one, access.Manage, "List the tokens of this sandbox", s.tokens},
		{"DELETE" + one + "/{token}", access.Manage, "Revoke a token of this sandbox", s.revokeToken},
	}
}

func tokenDocuments() map[string]*document {
	const one = " /v1/sandboxes/{id}/tokens"
	const once = "The reply has the token, which is not kept and cannot be had again."
	return map[string]*document{
		"POST /v1/tokens":           {id: "createToken", body: api.TokenRequest{}, about: once, replies: created(api.Token{})},
		"GET /v1/tokens":            {id: "listTokens", query: paged(), replies: ok([]api.Token{})},
		"DELETE /v1/tokens/{token}": {id: "revokeToken", about: "What is being done with it ends, too.", replies: noContent()},
		"POST" + one: {
			id: "createSandboxToken", body: api.TokenRequest{}, replies: created(api.Token{}),
			about: once + " It ends with the sandbox, and with the token that asks for it.",
		},
		"GET" + one:                 {id: "listSandboxTokens", query: paged(), replies: ok([]api.Token{})},
		"DELETE" + one + "/{token}": {id: "revokeSandboxToken", replies: noContent()},
	}
}

func (s *Server) createToken(w http.ResponseWriter, r *http.Request) error {
	var req api.TokenRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	spec, err := tokenSpec(req)
	if err != nil {
		return err
	}
	if id := r.PathValue("id"); id != "" {
		if spec.Sandbox != "" && spec.Sandbox != id {
			return fmt.Errorf("%w: sandbox is %.80q, and the path says %.80q", host.ErrInvalid, spec.Sandbox, id)
		}
		spec.Sandbox = id
	}
	spec.By = access.FromContext(r.Context())
	if spec.Sandbox != "" {
		// A name or the beginning of an id may come to mean another sandbox; the token must not.
		if spec.Sandbox, err = s.findSandbox(spec.Sandbox); err != nil {
			return err
		}
	}
	if err := s.pruneTokens(); err != nil {
		return err
	}
	token, secret, err := s.Tokens.Create(spec)
	if err != nil {
		return fmt.Errorf("create a token: %w", err)
	}
	noteCreated(r, "token", token.ID)
	out := tokenView(token)
	out.Token = secret
	w.Header().Set("Cache-Control", "no-store")
	return Reply(w, http.StatusCreated, out)
}

func tokenSpec(req api.TokenRequest) (access.Spec, error) {
	spec := access.Spec{Name: req.Name, Scope: access.Use, Sandbox: req.Sandbox, E2B: req.E2B}
	if req.Scope != "" {
		scope, err := access.ParseScope(req.Scope)
		if err != nil {
			return spec, fmt.Errorf("%w: %w", host.ErrInvalid, err)
		}
		spec.Scope = scope
	}
	if req.TTLSeconds < 0 || req.TTLSeconds > math.MaxInt64/2/float64(time.Second) || math.IsNaN(req.TTLSeconds) {
		return spec, fmt.Errorf("%w: ttl_seconds is %g", host.ErrInvalid, req.TTLSeconds)
	}
	spec.TTL = seconds(req.TTLSeconds)
	return spec, nil
}

func (s *Server) tokens(w http.ResponseWriter, r *http.Request) error {
	id := r.PathValue("id")
	if id != "" {
		var err error
		if id, err = s.findSandbox(id); err != nil {
			return err
		}
	}
	if err := s.pruneTokens(); err != nil {
		return err
	}
	list := []api.Token{}
	for _, t := range s.Tokens.List(id) {
		list = append(list, tokenView(t))
	}
	list, err := page(w, r, list, func(t *api.Token) string { return oldestFirst(t.CreatedAtUnix, t.ID) })
	if err != nil {
		return err
	}
	return Reply(w, http.StatusOK, list)
}

func (s *Server) revokeToken(w http.ResponseWriter, r *http.Request) error {
	id := r.PathValue("id")
	if id != "" {
		var err error
		if id, err = s.findSandbox(id); err != nil {
			return err
		}
	}
	if err := s.Tokens.Revoke(r.PathValue("token"), id); err != nil {
		return fmt.Errorf("revoke: %w", err)
	}
	noteTouched(r, "token", r.PathValue("token"))
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func tokenView(t access.Token) api.Token {
	v := api.Token{
		ID: t.ID, Name: t.Name, Scope: t.Scope.String(), Sandbox: t.Sandbox, CreatedAtUnix: t.Created.Unix(), Parent: t.Parent,
		Expired: t.Expired(time.Now()),
	}
	if !t.Expires.IsZero() {
		v.ExpiresAtUnix = t.Expires.Unix()
	}
	if !t.Used.IsZero() {
		v.UsedAtUnix = t.Used.Unix()
	}
	return v
}

// pruneTokens forgets the tokens of sandboxes that are gone, however they went. They are refused before that, too.
func (s *Server) pruneTokens() error { return s.Tokens.Prune(s.sandboxGone) }

func (s *Server) sandboxGone(id string) bool {
	whole, err := s.findSandbox(id)
	return errors.Is(err, host.ErrNotFound) || err == nil && whole != id
}

// findSandbox is the whole id of the sandbox that is meant.
func (s *Server) findSandbox(id string) (string, error) {
	if s.find != nil {
		return s.find(id)
	}
	return s.Host.FindSandbox(id)
}
