// Package network is the other end of a guest's only link: a TCP/IP stack in user space, made for one sandbox at its first
// frame, that ends every conversation of the guest here and, where the sandbox's policy allows it, holds one with the
// outside in its stead. Frames of a guest never leave the host; neither does a byte that no rule allows.
//
// It is no daemon (netd runs many Networks in one process), knows no sandboxes, and decides nothing itself: what is allowed
// is egress's, what first bytes say is inspect's. It starts nothing until Run, and Run ends all of it. The host and netd
// may import it.
package network
