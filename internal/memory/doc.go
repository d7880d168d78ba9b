// Package memory holds the RAM of machines outside any machine: Scratch, the writable file a booting machine uses as
// its RAM, and Image, the sealed and therefore immutable file that all children of a snapshot map copy-on-write. It
// saves images as layers and loads them back, and measures what memory a VM process really owns.
//
// It knows nothing of engines, guests or snapshots. Engines and the host import it; it imports package layer only.
// Tests run on real memfds and need no VM.
package memory
