package daemon

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/fingerprint"
	"forkd.dev/forkd/internal/layout"
)

// Network is how the daemon serves TCP, beside its unix socket.
type Network struct {
	Bind    string // host:port; "": it does not
	TLSCert string // files of the certificate and its key; "": one of its own where the address is not this host's alone
	TLSKey  string
}

func (n *Network) check() error {
	if n.Bind == "" {
		if n.TLSCert != "" || n.TLSKey != "" {
			return errors.New("a certificate is for TCP: give --bind HOST:PORT as well (FORKD_BIND)")
		}
		return nil
	}
	_, port, err := net.SplitHostPort(n.Bind)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return fmt.Errorf("address to bind %.320q: give HOST:PORT, such as 127.0.0.1:8889", n.Bind)
	}
	if (n.TLSCert == "") != (n.TLSKey == "") {
		return errors.New("a certificate and its key come together: --tls-cert and --tls-key (FORKD_TLS_CERT, FORKD_TLS_KEY)")
	}
	return nil
}

// errNoToken is said before anything listens: an open port that lets in nobody is a mistake, and one that lets in everybody
// is worse.
var errNoToken = errors.New("a daemon serves TCP only when there is a token, and there is none that is good.\n" +
	"Make one first, with a daemon that serves its unix socket only:\n" +
	"  forkd token create NAME --scope manage\n" +
	"  forkd daemon stop\n" +
	"and start again")

// public is a listener over TCP, and what clients have to know of it.
type public struct {
	net.Listener

	url string // https://host:port
	pin string // of the certificate, if it is our own
}

// listenTCP takes the address. What goes to another host is encrypted.
func listenTCP(ctx context.Context, n Network, home layout.Home, tokens *access.Store) (*public, error) {
	if !tokens.Usable() {
		return nil, errNoToken
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", n.Bind)
	if err != nil {
		return nil, fmt.Errorf("listen for TCP: %w", err)
	}
	p, err := encrypt(newBoundedListener(l, mostConnections()), n, home)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return p, nil
}

func encrypt(l net.Listener, n Network, home layout.Home) (*public, error) {
	addr, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		return nil, fmt.Errorf("listen for TCP: %s is no address of TCP", l.Addr())
	}
	if n.TLSCert == "" && addr.IP.IsLoopback() {
		return &public{Listener: l, url: "http://" + addr.String()}, nil
	}
	p := &public{url: "https://" + addr.String()}
	source := &keyPair{certFile: n.TLSCert, keyFile: n.TLSKey}
	if n.TLSCert == "" {
		cert, err := ownCertificate(home, n.Bind)
		if err != nil {
			return nil, err
		}
		source.certFile, source.keyFile = home.Certificate()
		p.pin = fingerprint.Of(cert)
	}
	if err := source.load(); err != nil {
		return nil, err
	}
	// Calls into guests take connections over, which HTTP/2 does not allow: it is for those only who speak nothing else.
	p.Listener = tls.NewListener(l, &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1", "h2"}, GetCertificate: source.get,
	})
	return p, nil
}

// whose finds out who is at the other end of a connection: on the unix socket the kernel knows, over TCP nobody is anybody
// until a token says so.
func whose(ctx context.Context, c net.Conn) context.Context {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	return access.With(ctx, access.Peer(peerUID(u), unix.Geteuid()))
}

// peerUID is the user who connected; -1 if the kernel does not say.
func peerUID(c *net.UnixConn) int {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1
	}
	uid := -1
	err = raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			uid = int(cred.Uid)
		}
	})
	if err != nil {
		return -1
	}
	return uid
}

// serveAll serves all listeners until one fails or the server is shut down, and then tells once for each.
func serveAll(server *http.Server, listeners []net.Listener) <-chan error {
	failed := make(chan error, len(listeners))
	for _, l := range listeners {
		go func() { failed <- server.Serve(l) }()
	}
	return failed
}
