package wire

import "time"

// Entry types, as envd names them.
const (
	TypeFile      = "FILE_TYPE_FILE"
	TypeDirectory = "FILE_TYPE_DIRECTORY"
	TypeSymlink   = "FILE_TYPE_SYMLINK"
	TypeOther     = "FILE_TYPE_UNSPECIFIED"
)

// EntryInfo describes a file.
type EntryInfo struct {
	Name          string    `json:"name"`
	Type          string    `json:"type"`
	Path          string    `json:"path"`
	Size          int64     `json:"size,string"`
	Mode          uint32    `json:"mode"`        // permission bits with setuid, setgid, sticky as in stat(2)
	Permissions   string    `json:"permissions"` // "-rw-r--r--"
	Owner         string    `json:"owner"`
	Group         string    `json:"group"`
	ModifiedTime  time.Time `json:"modifiedTime"`
	SymlinkTarget *string   `json:"symlinkTarget,omitempty"`
}

// PathRequest is Stat, MakeDir and Remove. Relative paths and ~ start in the user's home.
type PathRequest struct {
	Path string `json:"path"`
	User string `json:"user,omitempty"`
}

// MoveRequest renames.
type MoveRequest struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
	User        string `json:"user,omitempty"`
}

// ListRequest lists a directory; Depth >= 1, default 1.
type ListRequest struct {
	Path  string `json:"path"`
	Depth uint32 `json:"depth,omitempty"`
	User  string `json:"user,omitempty"`
}

// EntryReply and EntriesReply answer the calls above.
type EntryReply struct {
	Entry EntryInfo `json:"entry"`
}

// EntriesReply is the reply of ListDir.
type EntriesReply struct {
	Entries []EntryInfo `json:"entries"`
}

// ReadRequest reads a file from Offset; Length 0 means to the end. The first reply message is an EntryReply.
type ReadRequest struct {
	Path   string `json:"path"`
	User   string `json:"user,omitempty"`
	Offset int64  `json:"offset,omitempty"`
	Length int64  `json:"length,omitempty"`
}

// WriteRequest creates or replaces a file with the data frames that follow, up to the half-close. Missing parent
// directories are made. The file appears under its name only when all has arrived. Reply: EntryReply.
type WriteRequest struct {
	Path string  `json:"path"`
	User string  `json:"user,omitempty"`
	Mode *uint32 `json:"mode,omitempty"` // default 0644
}
