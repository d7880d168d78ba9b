package qemu

// kvmResult is what measuring KVM found.
type kvmResult struct {
	Usable bool
	Reason string // "measured: …", or why it could not be measured
}
