package layout

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
)

// maxSocketPath is the room of sockaddr_un on Linux, less the final NUL.
const maxSocketPath = 107

func ownedByUs(info os.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(st.Uid) == os.Geteuid()
}

// DialSocket connects to a unix socket. A path longer than the kernel's address field is reached through a
// descriptor of its directory.
func DialSocket(ctx context.Context, path string) (net.Conn, error) {
	var d net.Dialer
	short, done, err := shorten(path)
	if err != nil {
		return nil, err
	}
	defer done()
	conn, err := d.DialContext(ctx, "unix", short)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", path, err)
	}
	return conn, nil
}

// ListenSocket listens on a unix socket that only its owner may open. The file must not exist.
func ListenSocket(ctx context.Context, path string) (net.Listener, error) {
	short, done, err := shorten(path)
	if err != nil {
		return nil, err
	}
	defer done()
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", short)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	// The listener would unlink the shortened path, which is gone by then; the daemon removes the file itself.
	if ul, ok := l.(*net.UnixListener); ok {
		ul.SetUnlinkOnClose(false)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return l, nil
}

func shorten(path string) (string, func(), error) {
	if len(path) <= maxSocketPath {
		return path, func() {}, nil
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return "", nil, fmt.Errorf("open socket directory: %w", err)
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)), func() { _ = dir.Close() }, nil
}
