// Package memory holds the RAM of machines outside any machine: Scratch, the writable file a booting machine uses as
// its RAM, and Image, the sealed and therefore immutable file that all children of a snapshot map copy-on-write. Pages
// are what a machine has of its own over an image, and a View is the two together. It saves views as layers and loads
// them back, reads and writes the RAM of a VM process from outside (Process), and measures what memory it really owns.
//
// It knows nothing of engines, guests or snapshots. Engines and the host import it; it imports package layer only.
// Tests run on real memfds and need no VM.
package memory
