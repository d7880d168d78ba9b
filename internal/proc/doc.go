// Package proc starts child processes of the daemon and keeps hold of them: confined by Landlock, with bounded output
// that needs no reader, in a session of their own, waited for through a pidfd. Children outlive the daemon on purpose:
// Adopt takes hold of those of an earlier one, Bury ends them.
//
// It knows nothing of what it starts. Engines, images and disks use it; it is the only package that starts processes.
// Its tests run real children, as root and without.
package proc
