// Package netd runs the networks of all sandboxes of one daemon in a process of its own, without privileges: Server is that
// process, Client the daemon's side of it. What a guest sends is read by the Server alone. The daemon makes each link, a pair
// of sockets, gives one end to the machine and the other to the Server, and keeps a copy: when the process dies it
// starts another and hands the links over again, so that only flows are lost; when the daemon dies its successor finds the
// process by its socket, takes copies of the links, and flows go on.
//
// It decides nothing about frames (package network does) and knows no sandboxes but by their ids. The daemon is its user.
package netd
