// Package qemu is the engine that runs machines in QEMU, by software emulation (TCG) or KVM: the arguments (pure), the
// process, booting, freezing into a checkpoint and restoring from one. What was measured of QEMU, and why each option
// is as it is, is in docs/decisions/0002-machine-type-and-clocks.md and docs/engines.md.
//
// It knows nothing of snapshots, images or the agent. Only the daemon's wiring imports it; everyone else sees package
// engine. The arguments are tested against golden files, the rest by the contract in enginetest on real machines.
package qemu

// PortName is the name of the virtio-serial port that carries the control channel.
const PortName = "forkd.control"
