// Package e2e tests the built program as its users meet it: the command line, a daemon of its own in a directory of
// its own, real virtual machines. It holds nothing but tests. The default parent is built once, and every test forks
// from it.
package e2e
