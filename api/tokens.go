package api

// Token is what is known of a token. The token itself is told once, by the reply that creates it.
type Token struct {
	ID            string `json:"id"`
	Name          string `json:"name"`
	Scope         string `json:"scope"`             // pull, read, use, manage, admin
	Sandbox       string `json:"sandbox,omitempty"` // it opens this one and nothing else
	CreatedAtUnix int64  `json:"created_at_unix"`
	ExpiresAtUnix int64  `json:"expires_at_unix,omitempty"`
	UsedAtUnix    int64  `json:"used_at_unix,omitempty"` // last, since the daemon started
	Expired       bool   `json:"expired,omitempty"`
	Parent        string `json:"parent,omitempty"` // id of the token that made it, and with which it is revoked

	Token string `json:"token,omitempty"` // in the reply that creates it
}

// TokenRequest is the body of POST /v1/tokens, and of POST /v1/sandboxes/{id}/tokens, which has its sandbox in its path.
type TokenRequest struct {
	Name       string  `json:"name,omitempty"`                                         // for lists and the audit log; default: its id
	Scope      string  `json:"scope,omitempty" enum:"pull,read,use,manage,admin"`      // default: use
	Sandbox    string  `json:"sandbox,omitempty"`                                      // default: all
	TTLSeconds float64 `json:"ttl_seconds,omitempty" minimum:"0" maximum:"3153600000"` // 0: for ever
	E2B        bool    `json:"e2b,omitempty"`                                          // as an API key that E2B's clients take: "e2b_" and hexadecimal digits
}
