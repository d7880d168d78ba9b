package cli

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

// rootfsFlags are about a root file system made elsewhere. Its paths are the daemon's, which may be on another host: they
// are not made absolute here.
type rootfsFlags struct {
	rootfs, kernel, memory string
	cpus                   int
}

func (f *rootfsFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.rootfs, "rootfs", "", "absolute path of an ext4 file system on the daemon's host; it is copied")
	cmd.Flags().StringVar(&f.kernel, "kernel", "", "absolute path of a kernel there (default: forkd's own)")
	cmd.Flags().StringVar(&f.memory, "memory", "", "memory of its machine, such as 1GiB (default 512MiB)")
	cmd.Flags().IntVar(&f.cpus, "cpus", 0, "CPUs of its machine (default 1)")
}

func (f *rootfsFlags) given() bool {
	return f.rootfs != "" || f.kernel != "" || f.memory != "" || f.cpus != 0
}

func (a *App) bootRootfs(ctx context.Context, tag string, f *rootfsFlags) error {
	if f.rootfs == "" {
		return usage("--kernel, --memory and --cpus are of the machine for a root file system; name that with --rootfs")
	}
	if tag == "" {
		return usage("name the snapshot with -t TAG")
	}
	req := api.CreateSnapshotRequest{Tag: tag, Rootfs: f.rootfs, Kernel: f.kernel, CPUs: f.cpus}
	if f.memory != "" {
		var err error
		if req.MemoryBytes, err = parseSize(f.memory); err != nil {
			return usage("--memory %q: %s", f.memory, err)
		}
	}
	return a.withDaemon(ctx, func(c *client.Client) error {
		snap, err := c.CreateSnapshot(ctx, req)
		if err != nil {
			return err
		}
		return a.show(snap, func(w io.Writer) error {
			_, err := fmt.Fprintln(w, snap.Tag)
			return err
		})
	})
}

// changed is the first of those flags that was given.
func changed(cmd *cobra.Command, names ...string) string {
	for _, name := range names {
		if cmd.Flags().Changed(name) {
			return name
		}
	}
	return ""
}
