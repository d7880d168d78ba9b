// Package debian reads Debian archives as a client: the host's apt configuration, signed indexes, package versions and
// dependencies, and the .deb files themselves. It verifies everything it hands out (archive signature → index digest →
// package digest) and keeps downloads in a cache addressed by digest. It never runs apt or dpkg, never writes outside
// its cache directory, and installs nothing: package image, its only importer, turns packages into a root file system.
// Tested on synthetic archives served in-process; one test reads the host's own mirror and skips when there is none.
package debian
