// Package cgroup bounds and measures what child processes take of the host: memory, processor time, disk and processes,
// by control groups of the kernel, version 2 or 1, whichever the host has. It finds a place where the daemon may make
// groups, makes one for each child, finds them again after the daemon was started anew, and removes what is left.
//
// It starts no process and knows no machines: package proc starts a child in a group's Entry, package host makes and
// removes groups. What is decided is pure (hierarchy.go, limits.go); its tests use files made for them, and real groups
// where the host has them.
package cgroup
