package wire

import (
	"encoding/hex"
	"strings"
	"time"
	"unicode/utf8"
)

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
	// Metadata are the attributes user.e2b.*, without that prefix, as far as they are text.
	Metadata map[string]string `json:"metadata,omitempty"`
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

// ListDirRequest lists a directory; Depth >= 1, default 1.
type ListDirRequest struct {
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
	Mode *uint32 `json:"mode,omitempty"` // default 0644, or that of the file it replaces
	// Metadata becomes the file's, whole: what the file it replaces had is gone. Feature files.
	Metadata map[string]string `json:"metadata,omitempty"`
}

// ComposeRequest joins files into one, which appears when it is complete, and removes them. Reply: EntryReply.
type ComposeRequest struct {
	Sources     []string `json:"sources"`
	Destination string   `json:"destination"`
	User        string   `json:"user,omitempty"`
}

// TreeRequest asks for a file or directory as a PAX tar stream in data frames. Names are relative to Path, which itself has
// the name "."; sparse files are as Extract takes them. So the stream of a directory can be extracted as it is.
type TreeRequest struct {
	Path   string `json:"path"`
	User   string `json:"user,omitempty"`
	Follow bool   `json:"follow,omitempty"` // what links point at instead of the links
	Name   string `json:"name,omitempty"`   // of Path, instead of "."
	NoRoot bool   `json:"noRoot,omitempty"` // a directory's entries, without itself
}

// WatchRequest is WatchDir and CreateWatcher: events of a directory's entries, or of all below it.
type WatchRequest struct {
	Path               string `json:"path"`
	Recursive          bool   `json:"recursive,omitempty"`
	IncludeEntry       bool   `json:"includeEntry,omitempty"`
	AllowNetworkMounts bool   `json:"allowNetworkMounts,omitempty"`
	User               string `json:"user,omitempty"`
}

// Event types, as envd names them.
const (
	EventCreate = "EVENT_TYPE_CREATE"
	EventWrite  = "EVENT_TYPE_WRITE"
	EventRemove = "EVENT_TYPE_REMOVE"
	EventRename = "EVENT_TYPE_RENAME"
	EventChmod  = "EVENT_TYPE_CHMOD"
)

// FileEvent is a change. Name is relative to the watched directory, which is itself ".". A renamed entry is a RENAME of the
// old name and a CREATE of the new one.
type FileEvent struct {
	Name  string     `json:"name"`
	Type  string     `json:"type"`
	Entry *EntryInfo `json:"entry,omitempty"` // of CREATE, WRITE and CHMOD, if asked for and still there
}

// WatchEvent is a message of WatchDir: first Start, then events. The call ends well after the directory's own REMOVE, and
// with resource_exhausted when events were lost.
type WatchEvent struct {
	Start      *struct{}  `json:"start,omitempty"`
	Filesystem *FileEvent `json:"filesystem,omitempty"`
}

// WatcherReply is the reply of CreateWatcher, and the request of GetWatcherEvents and RemoveWatcher.
type WatcherReply struct {
	WatcherID string `json:"watcherId"`
}

// WatcherEvents is the reply of GetWatcherEvents.
type WatcherEvents struct {
	Events []FileEvent `json:"events"`
}

// Names of files are bytes, messages are text. In messages a byte that is not part of UTF-8 text is written as NUL, which
// no name has, and two hexadecimal digits. In tar streams names are as they are.

// EncodeName makes text of a name or path.
func EncodeName(name string) string {
	if utf8.ValidString(name) {
		return name
	}
	var b strings.Builder
	for i := 0; i < len(name); {
		r, n := utf8.DecodeRuneInString(name[i:])
		if r == utf8.RuneError && n == 1 {
			b.WriteByte(0)
			b.WriteString(hex.EncodeToString([]byte{name[i]}))
		} else {
			b.WriteString(name[i : i+n])
		}
		i += n
	}
	return b.String()
}

// DecodeName is the inverse. What EncodeName does not write is an error, an *Error.
func DecodeName(text string) (string, error) {
	before, rest, found := strings.Cut(text, "\x00")
	if !found {
		return text, nil
	}
	var b strings.Builder
	for found {
		b.WriteString(before)
		if len(rest) < 2 {
			return "", errName(text)
		}
		c, err := hex.DecodeString(rest[:2])
		if err != nil {
			return "", errName(text)
		}
		b.Write(c)
		before, rest, found = strings.Cut(rest[2:], "\x00")
	}
	b.WriteString(before)
	if EncodeName(b.String()) != text {
		return "", errName(text)
	}
	return b.String(), nil
}

func errName(text string) error {
	return Errorf(CodeInvalid, "name %.200q contains NUL; a byte that is not UTF-8 is written as NUL and its two hexadecimal digits", text)
}
