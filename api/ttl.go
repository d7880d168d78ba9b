package api

// TTLRequest is the body of PUT /v1/sandboxes/{id}/ttl: another time to live, from now on.
type TTLRequest struct {
	TTLSeconds float64 `json:"ttl_seconds" minimum:"0" maximum:"4611686018"` // 0: it lives until it is killed
	Longer     bool    `json:"longer,omitempty"`                             // never make it shorter than it is
}
