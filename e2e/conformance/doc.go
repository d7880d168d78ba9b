// Package conformance holds the guest's processes and files to what E2B's envd does, line by line of its protocol, in
// one real machine that all cases share. It holds nothing but tests; each names the section of the protocol's
// description that it comes from (docs/guest-protocol.md says where ours goes further).
package conformance
