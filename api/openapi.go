package api

import _ "embed"

// OpenAPI is the document of this API, made of the table of operations and of the types of this package. The daemon
// serves it at /openapi.json; a test of package httpapi writes it (`make generate`) and fails when it is not what they say.
//
//go:embed openapi.json
var OpenAPI []byte

// Health is the reply to GET /healthz.
type Health struct {
	OK bool `json:"ok"`
}

// Pong is the reply to POST /v1/sandboxes/{id}/ping.
type Pong struct {
	Pong  bool   `json:"pong"`
	Agent string `json:"agent"` // its version
}
