package image

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strings"
)

// WriteInitramfs writes the initial file system as an uncompressed newc archive: the agent as /init, the kernel's
// modules as /forkd/modules/*.ko with their loading order in /forkd/modules.order (a file name a line), and the
// directories and console that the agent needs before it has mounted anything. Equal input gives equal output. It is
// not compressed: the machine's firmware-less boot copies it at memory speed, while an emulated CPU unpacks slowly.
func WriteInitramfs(w io.Writer, agent []byte, kernel *Kernel) error {
	c := &cpio{w: bufio.NewWriterSize(w, 256<<10)}
	for _, dir := range []string{"dev", "proc", "sys", "newroot", "run", "tmp", "forkd", "forkd/modules"} {
		mode := uint32(0o755)
		if dir == "tmp" {
			mode = 0o1777
		}
		c.entry(dir, modeDir|mode, nil, 0, 0)
	}
	// The kernel opens it for init before the agent can mount a devtmpfs.
	c.entry("dev/console", modeChar|0o600, nil, 5, 1)
	c.entry("init", modeRegular|0o755, agent, 0, 0)
	var order strings.Builder
	for _, m := range kernel.Modules {
		data, err := os.ReadFile(m.Path)
		if err != nil {
			return fmt.Errorf("write initramfs: %w", err)
		}
		c.entry("forkd/modules/"+m.Name+".ko", modeRegular|0o644, data, 0, 0)
		order.WriteString(m.Name + ".ko\n")
	}
	c.entry("forkd/modules.order", modeRegular|0o644, []byte(order.String()), 0, 0)
	if err := c.close(); err != nil {
		return fmt.Errorf("write initramfs: %w", err)
	}
	return nil
}

// File types of st_mode, as the format has them.
const (
	modeRegular = 0o100000
	modeDir     = 0o040000
	modeChar    = 0o020000
)

// cpio writes the "newc" format (Documentation/driver-api/early-userspace/buffer-format.rst). The first error sticks.
type cpio struct {
	w     *bufio.Writer
	inode uint32
	err   error
}

func (c *cpio) entry(name string, mode uint32, data []byte, major, minor uint32) {
	c.inode++
	if uint64(len(data)) > 1<<31 && c.err == nil {
		c.err = fmt.Errorf("%s is too large", name)
	}
	// Fields: inode, mode, uid, gid, links, mtime, size, device of the file (2), device number (2), name size, check.
	links := uint32(1)
	if mode&modeDir != 0 {
		links = 2
	}
	fields := []uint32{c.inode, mode, 0, 0, links, 0, uint32(len(data)), 0, 0, major, minor, uint32(len(name) + 1), 0}
	var h strings.Builder
	h.WriteString("070701")
	for _, f := range fields {
		fmt.Fprintf(&h, "%08X", f)
	}
	c.write([]byte(h.String() + name + "\x00"))
	c.pad(len(name) + 1 + 110)
	c.write(data)
	c.pad(len(data))
}

func (c *cpio) write(p []byte) {
	if c.err == nil {
		_, c.err = c.w.Write(p)
	}
}

// pad fills up to a multiple of four.
func (c *cpio) pad(n int) { c.write(make([]byte, -n&3)) }

func (c *cpio) close() error {
	c.inode = 0
	c.entry("TRAILER!!!", 0, nil, 0, 0)
	if c.err != nil {
		return c.err
	}
	return c.w.Flush()
}
