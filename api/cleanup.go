package api

// Leftover is something of the daemon's that nobody needs any more: GET /v1/leftovers lists them, DELETE removes them.
type Leftover struct {
	Kind    string `json:"kind"`
	Name    string `json:"name"`
	Detail  string `json:"detail"`
	Bytes   int64  `json:"bytes,omitempty"` // that it takes on disk
	Hint    string `json:"hint,omitempty"`
	Kept    bool   `json:"kept,omitempty"`    // it is only shown: removing it would lose what somebody may want back
	Removed bool   `json:"removed,omitempty"` // in the reply to DELETE
	Error   *Error `json:"error,omitempty"`   // why it could not be
}
