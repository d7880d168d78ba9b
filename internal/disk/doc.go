// Package disk makes and stores the disks of machines: empty file systems, copy-on-write overlays (qcow2, written and
// read by our own code, so that neither a fork nor a save starts a program), and their layers.
//
// It knows nothing of engines or guests, and never mounts anything. Engines' users and the host import it; it imports
// package layer only. Tests cross-check with qemu-img and qemu-io where they are installed.
package disk
