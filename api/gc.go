package api

// GCRequest says what may go beside what nothing needs any more. Without anything it is that alone.
type GCRequest struct {
	OlderThanSeconds float64 `json:"older_than_seconds,omitempty" minimum:"0"` // snapshots that were not used for so long
	KeepLast         int     `json:"keep_last,omitempty" minimum:"0"`          // of each recipe so many stay, the newest; given alone: the others go
	MaxBytes         int64   `json:"max_bytes,omitempty" minimum:"0"`          // the least recently used go until the store takes no more
	Images           bool    `json:"images,omitempty"`                         // those on which no snapshot stands, too
	DryRun           bool    `json:"dry_run,omitempty"`                        // only say what would go
}

// GCItem is something that has gone, or would.
type GCItem struct {
	Kind         string `json:"kind"` // "snapshot", "step" of a build, "image"
	Name         string `json:"name"`
	LastUsedUnix int64  `json:"last_used_unix"`
	Why          string `json:"why"`
	Removed      bool   `json:"removed"`
	Error        *Error `json:"error,omitempty"` // why it could not
}

// GCReply says what has gone, or would.
type GCReply struct {
	Items      []GCItem          `json:"items"`
	Kept       map[string]string `json:"kept,omitempty"` // snapshots that would have gone, and why they stay
	FreedBytes int64             `json:"freed_bytes"`
	LeftBytes  int64             `json:"left_bytes"` // that the store takes then
}
