// Package egress decides what a sandbox may reach: rules, presets of rules, the verdicts that follow from them, and
// whether one policy allows no more than another. It is pure: it opens nothing, reads no clock and keeps nothing between
// calls. Nothing leaves under the zero policy. Whoever moves packets (internal/network) asks it before a name is looked
// up, before an address is dialled, and when a flow's first bytes say which server they are for; anybody may import it.
//
// What it promises, whatever the rules:
//   - A deny wins over every allow.
//   - Addresses that are not the Internet's (this host's, private, link-local, multicast, reserved ranges, the metadata
//     services of clouds) are reached only by a rule that names them by address: a rule for a name never opens them, nor
//     does one for a range that merely contains them.
//   - A rule for a name allows the addresses that the sandbox was given for that name, and no others.
//   - UDP to port 443 (QUIC, in which the server's name cannot be read) needs a rule by address and port.
package egress
