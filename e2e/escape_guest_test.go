package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/network/escapetest"
)

// attemptsWord is the first argument of the tests' program when it is to make attempts from inside a guest, with its
// kernel's sockets and with frames past them.
const attemptsWord = "make-attempts"

// attemptReport is what came of one attempt; a line of JSON for each is printed.
type attemptReport struct {
	Name  string `json:"name"`
	Heard string `json:"heard,omitempty"`
	Error string `json:"error,omitempty"`
	Took  string `json:"took"`
}

// prison is the machine that this runs in.
type prison struct {
	dialer net.Dialer
	socket int
	index  int
}

// openPrison finds the machine's interface, past which frames are put onto the link.
func openPrison() (*prison, error) {
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(interfaces, func(i net.Interface) bool { return i.HardwareAddr.String() == escapetest.GuestMAC })
	if i < 0 {
		return nil, errors.New("this machine has no network")
	}
	socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a socket for frames: %w", err)
	}
	return &prison{socket: socket, index: interfaces[i].Index}, nil
}

func (g *prison) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return g.dialer.DialContext(ctx, network, address)
}

func (g *prison) Send(frame []byte) error {
	return unix.Sendto(g.socket, frame, 0, &unix.SockaddrLinklayer{Ifindex: g.index})
}

func (*prison) Patience() time.Duration { return 300 * time.Millisecond }

// makeAttempts makes those attempts that need no name ("closed"), or all of them and what is allowed ("open").
func makeAttempts(ctx context.Context, args []string, out io.Writer) error {
	if len(args) != 1 || args[0] != "closed" && args[0] != "open" {
		return errors.New("say closed or open")
	}
	g, err := openPrison()
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(g.socket) }()
	open, looked := args[0] == "open", false
	enc := json.NewEncoder(out)
	for _, a := range escapetest.All() {
		if a.WithName && !open {
			continue
		}
		if a.WithName && !looked {
			if err := escapetest.Look(ctx, g); err != nil {
				return err
			}
			looked = true
		}
		if err := reportAttempt(enc, a.Name, func() (string, error) { return a.Try(ctx, g) }); err != nil {
			return err
		}
	}
	if !open {
		return nil
	}
	for name, try := range escapetest.Honest() {
		if err := reportAttempt(enc, name, func() (string, error) { return try(ctx, g) }); err != nil {
			return err
		}
	}
	return nil
}

func reportAttempt(enc *json.Encoder, name string, try func() (string, error)) error {
	begun := time.Now()
	heard, err := try()
	r := attemptReport{Name: name, Heard: heard, Took: time.Since(begun).Round(time.Millisecond).String()}
	if err != nil {
		r.Error = err.Error()
	}
	return enc.Encode(r)
}
