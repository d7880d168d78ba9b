// Package registry carries packs to and from OCI registries. A snapshot is an artifact there: a manifest whose config is
// an index (the pack's own manifest, and which member is where), and blobs that are members end to end, those of each
// layer in blobs of their own, cut where their content says. So what two snapshots share is the same blobs, and a branch
// adds its own layer only. docs/packs.md has the format.
//
// Push sends blobs that the registry lacks, whole, several at once. Pull fetches the index, then of each blob only the
// members that are needed, by range, and goes on where it was interrupted. Handler is a registry of its own, read only,
// for the snapshots of one home.
//
// A registry is not trusted: nothing it sends is used before its digest was found right, no answer is longer than what
// was announced, none takes for ever, and it cannot make this host connect to addresses inside its network. Speaking
// without encryption is for the loopback. What the members mean is package pack's; package host imports this one, and
// nobody else.
package registry
