// Package agentbin carries the guest agent inside the forkd binary, one build for each architecture. The directory bin
// is filled by `make agent` and not in version control. Only the builder of initramfs images imports it.
package agentbin

import (
	"embed"
	"fmt"
)

//go:embed all:bin
var bin embed.FS

// Agent returns the agent for a GOARCH. The caller must not modify it.
func Agent(arch string) ([]byte, error) {
	b, err := bin.ReadFile("bin/forkd-agent-" + arch)
	if err != nil {
		return nil, fmt.Errorf("this forkd was built without the guest agent for %s; run `make agent` and build again", arch)
	}
	return b, nil
}
