package api

import "time"

// RegistryLogin opens a registry: a name and a password, or a token alone.
type RegistryLogin struct {
	Username string `json:"username,omitempty"`
	Password string `json:"password,omitempty"`
	Token    string `json:"token,omitempty"`
}

// PushRequest asks for a snapshot to be brought to a registry.
type PushRequest struct {
	Ref         string         `json:"ref"`                   // REGISTRY/NAME:TAG
	Scrub       *bool          `json:"scrub,omitempty"`       // false: as it is; else secrets are looked for and removed first
	Login       *RegistryLogin `json:"login,omitempty"`       // none: the docker configuration of the daemon's user
	Fingerprint string         `json:"fingerprint,omitempty"` // of the registry's certificate, where nobody that the system trusts has signed it
}

// PullRequest asks for a snapshot from a registry.
type PullRequest struct {
	Ref         string         `json:"ref"`                   // REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:DIGEST
	Tag         string         `json:"tag,omitempty"`         // of the snapshot; none: the one that it had
	Rewarm      bool           `json:"rewarm,omitempty"`      // build it from its recipe if it cannot run here
	Verify      bool           `json:"verify,omitempty"`      // only read all of it and check it, and keep nothing
	Login       *RegistryLogin `json:"login,omitempty"`       // none: the docker configuration of the daemon's user
	Fingerprint string         `json:"fingerprint,omitempty"` // of the registry's certificate, where nobody that the system trusts has signed it
}

// Pushed says what came of a push.
type Pushed struct {
	Ref        string `json:"ref"` // with the digest: what to pull by
	Digest     string `json:"digest"`
	SentBytes  int64  `json:"sent_bytes"`
	ThereBytes int64  `json:"there_bytes"` // of what the registry had already
	Scrub      *Scrub `json:"scrub,omitempty"`
}

// Pulled says what came of a pull.
type Pulled struct {
	Unpacked
	Ref    string `json:"ref"`              // with the digest of what was pulled
	Rewarm string `json:"rewarm,omitempty"` // why it was built from its recipe; none: it was not
}

// RemoteVerified says that all of a snapshot in a registry is as its digests say.
type RemoteVerified struct {
	Ref       string   `json:"ref"` // with the digest
	Snapshots []string `json:"snapshots"`
	Members   int      `json:"members"`
	Bytes     int64    `json:"bytes"`
}

// TransferEvent is a line of the progress of a push or a pull. The last one has pushed, pulled, verified or error.
type TransferEvent struct {
	Time       time.Time       `json:"time"`
	Step       string          `json:"step,omitempty"` // short noun: "pack", "send", "fetch", …
	Message    string          `json:"message,omitempty"`
	DoneBytes  int64           `json:"done_bytes,omitempty"`
	TotalBytes int64           `json:"total_bytes,omitempty"`
	Pushed     *Pushed         `json:"pushed,omitempty"`
	Pulled     *Pulled         `json:"pulled,omitempty"`
	Verified   *RemoteVerified `json:"verified,omitempty"`
	Error      *Error          `json:"error,omitempty"`
}
