// Package images builds container images of many families and checks that machines have exactly their trees: against a
// reference unpacking of its own, in real guests. It holds nothing but tests.
package images
