package api

// Unpacked says what came of a pack.
type Unpacked struct {
	Snapshot     Snapshot          `json:"snapshot"`
	Digest       string            `json:"digest"`            // of the pack's manifest: its name
	New          []string          `json:"new"`               // tags that were registered, root first
	Present      []string          `json:"present"`           // tags of what was here already
	Renamed      map[string]string `json:"renamed,omitempty"` // what the pack calls a snapshot → its tag here
	Members      int               `json:"members"`           // of the pack
	Bytes        int64             `json:"bytes"`             // of all its members
	FetchedBytes int64             `json:"fetched_bytes"`     // of those that were not here
	Scrub        *Scrub            `json:"scrub,omitempty"`
}

// Scrub is what was looked for before packing.
type Scrub struct {
	Looked  []string `json:"looked"` // at which snapshots
	Found   []Secret `json:"found"`  // and removed
	Limits  []string `json:"limits,omitempty"`
	Flat    bool     `json:"flat,omitempty"`    // packed without the snapshots that it stood on, whose layers hold what was removed
	Skipped string   `json:"skipped,omitempty"` // why nobody looked
}

// Secret is a file that was found and removed.
type Secret struct {
	Snapshot string `json:"snapshot"`
	Path     string `json:"path"`
	What     string `json:"what"`
	Bytes    int64  `json:"bytes"`
	// Left is where what it held still is, as far as that was looked for.
	Left SecretLeft `json:"left,omitzero"`
}

// SecretLeft is at how many places what was removed still is in what was packed.
type SecretLeft struct {
	Memory int `json:"memory,omitempty"` // of programs that have read it, or memory that nobody has used since
	Disk   int `json:"disk,omitempty"`   // other files, or blocks of removed ones
}

// Verified says what was read of a snapshot, and what is damaged.
type Verified struct {
	OK        bool     `json:"ok"`
	Snapshots []string `json:"snapshots"` // it, last, and all it stands on
	Layers    int      `json:"layers"`
	Chunks    int      `json:"chunks"`
	Bytes     int64    `json:"bytes"` // of their content
	Damages   []Damage `json:"damages"`
}

// Damage is something that is not what it was.
type Damage struct {
	What   string   `json:"what"`
	Reason string   `json:"reason"`
	Breaks []string `json:"breaks"` // tags of snapshots
}

// Provenance says where a snapshot comes from, the root first.
type Provenance struct {
	Snapshots []Origin      `json:"snapshots"`
	Images    []ImageOrigin `json:"images"`
}

// Origin is one snapshot of a line.
type Origin struct {
	Tag           string         `json:"tag"`
	ID            string         `json:"id"`
	Formerly      []string       `json:"formerly,omitempty"` // ids it had before, here or elsewhere
	ParentTag     string         `json:"parent_tag,omitempty"`
	ParentID      string         `json:"parent_id,omitempty"`
	CreatedAt     string         `json:"created_at"`
	Tool          string         `json:"tool,omitempty"` // version of forkd; none: made before that was written down
	Source        string         `json:"source"`
	Recipe        string         `json:"recipe,omitempty"`
	RecipeDigest  string         `json:"recipe_digest,omitempty"`
	RecipeText    string         `json:"recipe_text,omitempty"`
	Commands      []string       `json:"commands"` // that its recipe runs
	Warm          []string       `json:"warm"`
	BranchedFrom  string         `json:"branched_from,omitempty"`
	Mode          string         `json:"mode,omitempty"`
	Ran           *Ran           `json:"ran,omitempty"` // in the sandbox, before it was branched; none: made before that was written down
	Image         string         `json:"image"`
	Kernel        string         `json:"kernel,omitempty"`
	KernelContent string         `json:"kernel_content,omitempty"` // digest of what travels of it; none: it is not there any more
	Agent         string         `json:"agent,omitempty"`
	Engine        map[string]any `json:"engine"`
	MemoryLayer   string         `json:"memory_layer"`
	DiskLayer     string         `json:"disk_layer"`
	State         string         `json:"state"` // digest of the device state
}

// Ran is what was run in a sandbox since it was forked. What interpreters were told is not there.
type Ran struct {
	Commands [][]string `json:"commands"`       // the first, in order; "…" ends what was cut
	More     int        `json:"more,omitempty"` // others, which were not written down
	Lost     bool       `json:"lost,omitempty"` // what was run before the daemon was started again may be missing
}

// ImageOrigin is an image that snapshots of a line stand on.
type ImageOrigin struct {
	ID        string   `json:"id"`
	Name      string   `json:"name"`
	Base      string   `json:"base"`
	Disk      string   `json:"disk"` // digest of its content
	CreatedAt string   `json:"created_at"`
	Packages  []string `json:"packages"`
}
