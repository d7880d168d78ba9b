package client

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"strings"

	"forkd.dev/forkd/internal/fingerprint"
	"forkd.dev/forkd/internal/layout"
)

// ErrUntrusted means that what answers does not prove to be the daemon that is meant.
var ErrUntrusted = errors.New("no secure connection to the daemon")

// Config is how to reach a daemon.
type Config struct {
	Address     string // unix:///path, http://host:port or https://host:port
	Token       string // over TCP every daemon wants one
	CA          string // file of certificates that a daemon over https is trusted by; "": the system's
	Fingerprint string // of the daemon's key, as it prints it: that one is trusted and no other, whatever it is called
}

// Open makes a client. It connects to nothing yet.
func Open(cfg Config) (*Client, error) {
	if path, ok := strings.CutPrefix(cfg.Address, "unix://"); ok {
		if !strings.HasPrefix(path, "/") {
			return nil, fmt.Errorf("daemon address %q: the path of a unix socket is absolute: unix:///path", cfg.Address)
		}
		dial := func(ctx context.Context) (net.Conn, error) { return layout.DialSocket(ctx, path) }
		return newClient(cfg, "http://forkd", dial), nil
	}
	u, err := url.Parse(cfg.Address)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || u.User != nil {
		return nil, errors.New("the daemon's address is not understood: give unix:///path, http://host:port or https://host:port")
	}
	if u.Scheme == "http" {
		return openPlain(cfg, u)
	}
	trust, err := cfg.trust(u.Hostname())
	if err != nil {
		return nil, err
	}
	address := u.Host
	if u.Port() == "" {
		address = net.JoinHostPort(u.Hostname(), "443")
	}
	dial := func(ctx context.Context) (net.Conn, error) { return dialTLS(ctx, address, trust) }
	return newClient(cfg, strings.TrimSuffix(cfg.Address, "/"), dial), nil
}

func openPlain(cfg Config, u *url.URL) (*Client, error) {
	if cfg.Token != "" && !thisHost(u.Hostname()) {
		return nil, fmt.Errorf("daemon address %s: the token would travel unencrypted; give https://", cfg.Address)
	}
	if cfg.Fingerprint != "" {
		return nil, fmt.Errorf("daemon address %s: there is a fingerprint to check and no certificate; give https://", cfg.Address)
	}
	address := u.Host
	if u.Port() == "" {
		address = net.JoinHostPort(u.Hostname(), "80")
	}
	dial := func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", address)
	}
	return newClient(cfg, strings.TrimSuffix(cfg.Address, "/"), dial), nil
}

func thisHost(name string) bool {
	if name == "localhost" || strings.HasSuffix(name, ".localhost") {
		return true
	}
	a, err := netip.ParseAddr(name)
	return err == nil && a.Unmap().IsLoopback()
}

func (cfg *Config) trust(host string) (*tls.Config, error) {
	// Calls take a connection over, which HTTP/2 does not allow.
	trust := &tls.Config{ServerName: host, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}
	if cfg.Fingerprint != "" {
		want, err := fingerprint.Parse(cfg.Fingerprint)
		if err != nil {
			return nil, err
		}
		// In the place of names and signers: the daemon holds the key that is meant.
		trust.InsecureSkipVerify = true
		trust.VerifyConnection = func(s tls.ConnectionState) error { return fingerprint.Check(s, want) }
		return trust, nil
	}
	if cfg.CA == "" {
		return trust, nil
	}
	text, err := os.ReadFile(cfg.CA)
	if err != nil {
		return nil, fmt.Errorf("read the certificates to trust: %w", err)
	}
	trust.RootCAs = x509.NewCertPool()
	if !trust.RootCAs.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("there is no certificate in %s (PEM)", cfg.CA)
	}
	return trust, nil
}

func dialTLS(ctx context.Context, address string, trust *tls.Config) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	secure := tls.Client(conn, trust)
	if err := secure.HandshakeContext(ctx); err != nil {
		_ = conn.Close()
		return nil, &untrustedError{err}
	}
	return secure, nil
}

// untrustedError is a handshake that failed.
type untrustedError struct{ err error }

func (e *untrustedError) Error() string {
	text := e.err.Error()
	if plain, ok := errors.AsType[tls.RecordHeaderError](e.err); ok {
		text = plain.Msg + "; perhaps it is http://"
	}
	return text
}

func (e *untrustedError) Unwrap() error { return e.err }
