// Package pack is what of a snapshot travels: its records and those of all it stands on, and the members they need,
// each named by the digest of its content. A Source lists and opens the members in one home; a Sink takes them in
// another, in any order and from several goroutines, keeps them apart until all are there and right, and only then hands
// them to the home. Write and Read are the pack file, one stream of the two. A registry moves the same members as blobs,
// one each, and the Manifest's bytes as the first.
//
// What arrives is hostile: the Manifest is checked before anything of its members is read, no name in it ever becomes a
// path, and nothing is taken that it does not announce, with its size before and after decompression. The package
// registers nothing: package host does, with what Sink.Install gives it. It may be imported by host, by those who carry
// members elsewhere, and by edges that read a pack's manifest.
//
// How it goes together:
//
//	src, err := pack.Collect(ctx, spec)              // hard links in a directory of its own: no lock is held after it
//	m := src.Manifest(); r, err := src.Open(member)  // the bytes that travel: member.Size of them
//
//	sink, err := pack.NewSink(ctx, dir, layers, m)   // dir below the home's tmp, or one that is kept to be resumed
//	for _, member := range sink.Needed() {           // what the home's store lacks, or has damaged
//		err := sink.Put(ctx, member, r)              // verified before it counts as there
//	}
//	err = sink.Install(ctx)                          // layers are durable in the store; hold it from before this
//	state, err := sink.State(record.State)           // … and with these host writes the records
//	err = sink.Close()
package pack

import (
	"errors"
	"time"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/store"
)

// FormatVersion is the newest of manifests, and of all that they describe. A reader refuses those it does not know. What
// version 1 can say, which has no kernels, is said in it: an older forkd reads that.
const FormatVersion = 2

// Errors.
var (
	// ErrFormat: the bytes are no pack, or not one that this forkd may take. The message says where and why.
	ErrFormat = errors.New("not a valid pack")
	// ErrVersion: a pack of another version.
	ErrVersion = errors.New("pack of another format version")
	// ErrDamaged: a member is not what the manifest says, missing, or cut off.
	ErrDamaged = errors.New("the pack is damaged")
)

// Bounds. A manifest that exceeds one is refused.
const (
	MaxManifestBytes = 64 << 20
	MaxMembers       = 1 << 20
	MaxSnapshots     = 1024
	maxStateBytes    = 256 << 20 // device state: 200 KiB to a few MiB
	maxUnpacked      = 512 << 20 // all maps, device states and kernels together
)

// Kind is what a member is.
type Kind string

// Kinds of members. Every one travels as one zstd frame; its digest is that of its content.
const (
	Chunk Kind = "chunk" // pages of a layer, at most 1 MiB; as the store keeps it
	Map   Kind = "map"   // of a layer
	State Kind = "state" // device state

	KernelMember Kind = "kernel" // what boots an image, a KernelFile
)

// Member is something a pack holds beside its manifest. Kind and Digest name it.
type Member struct {
	Kind   Kind         `json:"kind"`
	Digest layer.Digest `json:"digest"` // SHA-256 of its content
	Length int64        `json:"length"` // of its content
	Size   int64        `json:"size"`   // of what travels
	// Blob is the SHA-256 of what travels: how a registry names it. A pack file leaves it out.
	Blob layer.Digest `json:"blob,omitzero"`
}

// Manifest describes a pack. Its digest covers, through those of the members, every byte of it.
type Manifest struct {
	FormatVersion int       `json:"format_version"` // first, so that any reader finds it; Collect sets it
	PackedAt      time.Time `json:"packed_at"`
	Tool          string    `json:"tool"` // version of the forkd that packed it
	// Snapshots are the one that was packed, last, and all it stands on, each after the one it stands on. They are as
	// their records are: the id of each is the digest of its compact form. Steps of builds are left out where they have
	// no name of a user's; their layers are not.
	Snapshots []store.Snapshot `json:"snapshots"`
	Images    []store.Image    `json:"images"` // that those stand on
	// Kernels are those that the snapshots were made with, as far as the packer still had them.
	Kernels []Kernel `json:"kernels,omitempty"`
	Members []Member `json:"members"`
	Scrub   *Scrub   `json:"scrub,omitempty"` // nil: nobody looked

	index map[name]int // of members, once they have been checked
}

// Scrub is what was looked for and removed before packing.
type Scrub struct {
	Looked  []string `json:"looked"`            // at which snapshots
	Found   []Secret `json:"found,omitempty"`   // and removed
	Limits  []string `json:"limits,omitempty"`  // what was not done, in words
	Flat    bool     `json:"flat,omitempty"`    // packed without its ancestry, whose layers hold what was removed
	Skipped string   `json:"skipped,omitempty"` // why nobody looked
}

// Secret is a file that was found.
type Secret struct {
	Snapshot string `json:"snapshot"` // tag
	Path     string `json:"path"`
	What     string `json:"what"` // "shell history", "private key", "token"
	Bytes    int64  `json:"bytes"`
	// Left is at how many places what it held still is in what was packed, as far as that was looked for.
	Left Left `json:"left,omitzero"`
}

// Left counts places.
type Left struct {
	Memory int `json:"memory,omitempty"` // of programs that have read it, or memory that nobody has used since
	Disk   int `json:"disk,omitempty"`   // other files, or blocks of removed ones
}

// Head is the snapshot that was packed.
func (m *Manifest) Head() store.Snapshot { return m.Snapshots[len(m.Snapshots)-1] }

// Stored is what all members together take once they have been received.
func (m *Manifest) Stored() int64 {
	var n int64
	for _, x := range m.Members {
		if x.Kind == Chunk {
			n += x.Size
		} else {
			n += x.Length
		}
	}
	return n
}

// Bytes is what all members together take on their way.
func (m *Manifest) Bytes() int64 {
	var n int64
	for _, x := range m.Members {
		n += x.Size
	}
	return n
}
