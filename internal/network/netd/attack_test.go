package netd

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/proc"
)

// attackWord has this program try what the process of networks must not do.
const attackWord = "attack"

// attempts are what it tries: os.Args[2] is a directory of the daemon's, os.Args[3] the daemon.
func attempts() map[string]func() error {
	socket := func(domain, kind int) error {
		fd, err := unix.Socket(domain, kind, 0)
		if err == nil {
			_ = unix.Close(fd)
		}
		return err
	}
	return map[string]func() error{
		"a unix socket":     func() error { return socket(unix.AF_UNIX, unix.SOCK_STREAM) },
		"a datagram socket": func() error { return socket(unix.AF_UNIX, unix.SOCK_DGRAM) },
		"a packet socket":   func() error { return socket(unix.AF_PACKET, unix.SOCK_RAW) },
		"a raw socket":      func() error { return socket(unix.AF_INET, unix.SOCK_RAW) },
		"a vsock":           func() error { return socket(unix.AF_VSOCK, unix.SOCK_STREAM) },
		"a pair":            func() error { _, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM, 0); return err },
		"a file of its own": func() error { return os.WriteFile(filepath.Join(os.TempDir(), "attack"), nil, 0o600) },
		"a file of the daemon's": func() error {
			_, err := os.ReadFile(filepath.Join(os.Args[2], "secret"))
			return err
		},
		"a directory of the daemon's": func() error { _, err := os.ReadDir(os.Args[2]); return err },
		"a namespace":                 func() error { return unix.Unshare(unix.CLONE_NEWUSER) },
		"a mount":                     func() error { return unix.Mount("none", "/mnt", "tmpfs", 0, "") },
		"root":                        func() error { return unix.Setuid(0) },
		"the daemon's memory": func() error {
			f, err := os.Open("/proc/" + os.Args[3] + "/mem")
			if err == nil {
				_ = f.Close()
			}
			return err
		},
		"the daemon's descriptors": func() error {
			pid, _ := strconv.Atoi(os.Args[3])
			_, err := unix.PidfdOpen(pid, 0)
			return err
		},
		"a key": func() error {
			_, err := unix.AddKey("user", "attack", []byte("x"), unix.KEY_SPEC_PROCESS_KEYRING)
			return err
		},
		"io_uring": func() error {
			_, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, 0, 0)
			if errors.Is(errno, unix.EPERM) {
				return errno
			}
			return nil // It came as far as its arguments.
		},
	}
}

// attack says what it could do, and what it could not that it must.
func attack(out io.Writer) {
	for what, try := range attempts() {
		if try() == nil {
			fmt.Fprintln(out, "could have", what)
		}
	}
	for _, network := range []string{"tcp4", "udp4"} {
		fd, err := unix.Socket(unix.AF_INET, map[string]int{"tcp4": unix.SOCK_STREAM, "udp4": unix.SOCK_DGRAM}[network], 0)
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: 9})
		}
		if err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			fmt.Fprintln(out, "cannot dial", network, err)
		}
	}
	if _, err := net.InterfaceAddrs(); err != nil {
		fmt.Fprintln(out, "cannot know the host's addresses", err)
	}
	if _, err := os.ReadFile("/etc/hosts"); err != nil {
		fmt.Fprintln(out, "cannot read /etc/hosts", err)
	}
	fmt.Fprintln(out, "done")
}

// TestAttack: whoever has taken the process over finds nothing to go on with.
func TestAttack(t *testing.T) {
	h := newHome(t)
	c := h.daemon()
	defer end(t, c)
	if err := os.WriteFile(filepath.Join(h.dir, "secret"), []byte("secret"), 0o644); err != nil {
		t.Fatal(err)
	}
	p, err := c.run(t.Context(), []string{attackWord, h.dir, strconv.Itoa(os.Getpid())}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Release()
	<-p.Done()
	if err := p.Err(); err != nil {
		t.Fatalf("%v\n%s", err, p.Output())
	}
	landlock, _ := proc.ConfinementAvailable()
	for line := range strings.Lines(string(p.Output())) {
		switch line = strings.TrimSpace(line); {
		case line == "done":
			return
		case !landlock && strings.Contains(line, "file"), os.Geteuid() != 0 && strings.Contains(line, "directory"):
			// Landlock alone keeps it from those.
		default:
			t.Error(line)
		}
	}
	t.Errorf("it did not come to its end: %s", p.Output())
}
