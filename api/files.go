package api

import "time"

// File types.
const (
	FileTypeFile    = "file"
	FileTypeDir     = "dir"
	FileTypeSymlink = "symlink" // one that points at nothing; others have their target's type
	FileTypeOther   = "other"   // device, pipe, socket
)

// File describes a file of a sandbox. A byte of a name that is not UTF-8 is written as NUL and two hexadecimal digits, here
// and in every path that is given.
type File struct {
	Name          string            `json:"name"`
	Path          string            `json:"path"`
	Type          string            `json:"type"`
	Size          int64             `json:"size"`
	Mode          uint32            `json:"mode"`        // permission bits with set-user-ID, set-group-ID, sticky; of a link its target's
	Permissions   string            `json:"permissions"` // as ls -l; of a link its own
	Owner         string            `json:"owner"`
	Group         string            `json:"group"`
	ModifiedTime  time.Time         `json:"modified_time"`
	SymlinkTarget string            `json:"symlink_target,omitempty"` // resolved; of a link to nothing its text
	Metadata      map[string]string `json:"metadata,omitempty"`       // given when it was uploaded
}

// FileRequest is the body of POST /v1/sandboxes/{id}/files/mkdir and /remove. Relative paths and ~ begin in the user's
// home; without a user it is the image's.
type FileRequest struct {
	Path string `json:"path" minLength:"1"`
	User string `json:"user,omitempty"`
}

// MoveRequest is the body of POST /v1/sandboxes/{id}/files/move.
type MoveRequest struct {
	Source      string `json:"source" minLength:"1"`
	Destination string `json:"destination" minLength:"1"`
	User        string `json:"user,omitempty"`
}

// ComposeRequest is the body of POST /v1/sandboxes/{id}/files/compose: the sources become one file, and are removed.
type ComposeRequest struct {
	Sources     []string `json:"sources" minItems:"1"`
	Destination string   `json:"destination" minLength:"1"`
	User        string   `json:"user,omitempty"`
}

// WatchRequest is the body of POST /v1/sandboxes/{id}/files/watchers.
type WatchRequest struct {
	Path               string `json:"path" minLength:"1"`
	Recursive          bool   `json:"recursive,omitempty"`
	Entries            bool   `json:"entries,omitempty"` // describe what was created, written or changed
	AllowNetworkMounts bool   `json:"allow_network_mounts,omitempty"`
	User               string `json:"user,omitempty"`
}

// Watcher is its reply.
type Watcher struct {
	ID string `json:"watcher_id"`
}

// FileEvent is a change in a watched directory: a line of the reply to GET /v1/sandboxes/{id}/files/watch
// (newline-delimited JSON), of which the first says started, and the last has Error if it did not end well.
type FileEvent struct {
	Started bool   `json:"started,omitempty"`
	Name    string `json:"name,omitempty"` // relative to the directory, which is "."
	Type    string `json:"type,omitempty"` // create, write, remove, rename, chmod
	Entry   *File  `json:"entry,omitempty"`
	Error   *Error `json:"error,omitempty"`
}

// FileEvents is the reply to GET /v1/sandboxes/{id}/files/watchers/{watcher}: what happened since the last one.
type FileEvents struct {
	Events []FileEvent `json:"events"`
}
