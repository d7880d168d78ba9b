// Package image turns a recipe into what a machine boots: a root file system made of Debian packages, a kernel and an
// initramfs. It works as an ordinary user and without chroot: packages are resolved, verified and unpacked into a tar
// stream on the host, and the steps that must run inside (maintainer scripts, the recipe's own commands) are handed
// out as a list that package host runs in a VM. It starts no VM and no process itself, and it knows nothing of
// snapshots. Only package host and the command line's recipe check may import it. Tested on synthetic packages; the
// tests that read Debian's own skip when its mirror cannot be reached.
package image
