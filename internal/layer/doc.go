// Package layer stores sets of pages: what a snapshot adds to its parent, for memory (4 KiB pages) and disks (64 KiB
// clusters) alike. A layer is a map file, which names every page it holds as "data" or "zero", and chunks of
// compressed page data named by the digest of their content, of which a map may use parts. A page the map does not name is the parent's; a hole
// never means anything else. The format is written down byte for byte in docs/formats.md.
//
// It knows nothing of machines, images or snapshots, and keeps no list of which layers are in use: that is the
// caller's, who passes it to Sweep. Packages memory, disk and host import it. Tests run on real files and flip bits in
// them; the map decoder is fuzzed.
package layer
