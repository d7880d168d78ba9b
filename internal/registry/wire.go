package registry

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"time"

	"forkd.dev/forkd/internal/fingerprint"
)

// Errors.
var (
	errPlain   = errors.New("plain HTTP is for registries on this machine's loopback only")
	errInside  = errors.New("it leads to an address inside this host's network, which a registry may not")
	errStalled = errors.New("it sends nothing any more")
	errEndless = errors.New("it sends more than was announced")
)

const (
	// maxAnswer bounds every answer that is not a blob: manifests are the largest.
	maxAnswer = maxManifest + 64<<10
	// parallelBlobs is how many blobs travel at once.
	parallelBlobs = 4
	// patience is how long the other side may be silent.
	patience     = 60 * time.Second
	maxRedirects = 5
)

// wire is how requests reach one registry: encrypted but on the loopback, and nowhere else inside the host's network than
// to the registry itself, whatever it answers.
type wire struct {
	*http.Transport
	host  string        // of the registry, as the user gave it
	stall time.Duration // an answer that is silent for so long has ended

	mu      sync.Mutex
	proxies map[string]bool // addresses that the environment names
}

func newWire(host string, trust *tls.Config, stall time.Duration) *wire {
	w := &wire{host: hostname(host), stall: stall, proxies: map[string]bool{}}
	w.Transport = &http.Transport{
		Proxy: w.proxy, DialContext: w.dial, ForceAttemptHTTP2: true, MaxIdleConnsPerHost: parallelBlobs, TLSClientConfig: trust,
		IdleConnTimeout: 30 * time.Second, TLSHandshakeTimeout: 20 * time.Second, ResponseHeaderTimeout: stall,
		MaxResponseHeaderBytes: 256 << 10,
		DisableCompression:     true, // a digest is of the bytes as they are
	}
	return w
}

// hostname is a host without its port.
func hostname(host string) string {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return strings.ToLower(strings.Trim(host, "[]"))
}

func (w *wire) proxy(r *http.Request) (*url.URL, error) {
	u, err := http.ProxyFromEnvironment(r)
	if err != nil || u == nil {
		return u, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.proxies[hostname(u.Host)] = true
	return u, nil
}

func (w *wire) dial(ctx context.Context, network, address string) (net.Conn, error) {
	d := &net.Dialer{Timeout: 30 * time.Second}
	host := hostname(address)
	w.mu.Lock()
	known := host == w.host || w.proxies[host]
	w.mu.Unlock()
	if !known {
		// Of what the name has become, not of what it was when somebody looked.
		d.Control = func(_, address string, _ syscall.RawConn) error {
			ap, err := netip.ParseAddrPort(address)
			if err != nil || !public(ap.Addr()) {
				return fmt.Errorf("%s: %w", host, errInside)
			}
			return nil
		}
	}
	return d.DialContext(ctx, network, address)
}

// public reports whether an address is one of the internet's.
func public(a netip.Addr) bool {
	a = a.Unmap()
	if !a.IsGlobalUnicast() || a.IsPrivate() || a.IsLoopback() || a.IsLinkLocalUnicast() {
		return false
	}
	for _, p := range []string{"100.64.0.0/10", "192.0.0.0/24", "198.18.0.0/15", "240.0.0.0/4", "0.0.0.0/8", "64:ff9b::/96", "2002::/16"} {
		if netip.MustParsePrefix(p).Contains(a) {
			return false
		}
	}
	return true
}

// RoundTrip refuses what must not be asked, and bounds the answer.
func (w *wire) RoundTrip(r *http.Request) (*http.Response, error) {
	host := hostname(r.URL.Host)
	if r.URL.Scheme != "https" && !loopback(host) {
		return nil, fmt.Errorf("%s: %w", r.URL.Host, errPlain)
	}
	if a, err := netip.ParseAddr(host); err == nil && host != w.host && !public(a) || loopback(host) && host != w.host {
		return nil, fmt.Errorf("%s: %w", r.URL.Host, errInside) // also where a proxy would have to say so
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	r = r.WithContext(ctx)
	if r.Body != nil && r.Body != http.NoBody {
		// One that does not read what it is sent would keep it for ever: ResponseHeaderTimeout begins after that.
		sent := &sending{ReadCloser: r.Body, stall: w.stall, timer: time.AfterFunc(w.stall, func() { cancel(errStalled) })}
		defer sent.timer.Stop()
		r.Body = sent
	}
	answer, err := w.Transport.RoundTrip(r)
	if err != nil {
		if errors.Is(context.Cause(ctx), errStalled) {
			err = errStalled
		}
		cancel(nil)
		return nil, err
	}
	most := int64(maxAnswer)
	if n, ok := r.Context().Value(mostKey{}).(int64); ok {
		most = n
	}
	answer.Body = &bounded{ReadCloser: answer.Body, left: most, stall: w.stall, cancel: cancel}
	return answer, nil
}

// sending is a body on its way, which must go on.
type sending struct {
	io.ReadCloser
	stall time.Duration
	timer *time.Timer
}

func (s *sending) Read(p []byte) (int, error) {
	s.timer.Reset(s.stall)
	return s.ReadCloser.Read(p)
}

// mostKey is how many bytes the answer to a request may have, in its context.
type mostKey struct{}

func atMost(ctx context.Context, n int64) context.Context {
	return context.WithValue(ctx, mostKey{}, n)
}

// bounded is an answer's body that neither goes on for ever nor stands still.
type bounded struct {
	io.ReadCloser
	left   int64
	stall  time.Duration
	cancel context.CancelCauseFunc
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left < 0 {
		return 0, errEndless
	}
	if int64(len(p)) > b.left+1 {
		p = p[:b.left+1]
	}
	timer := time.AfterFunc(b.stall, func() { b.cancel(errStalled) })
	n, err := b.ReadCloser.Read(p)
	if !timer.Stop() && err != nil && !errors.Is(err, io.EOF) {
		err = errStalled
	}
	if b.left -= int64(n); b.left < 0 {
		return n, errEndless
	}
	return n, err
}

func (b *bounded) Close() error {
	b.cancel(nil)
	return b.ReadCloser.Close()
}

func loopback(host string) bool {
	if host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.Unmap().IsLoopback()
}

// trust is whose certificate is taken. A fingerprint is in the place of names and signers, and of the registry alone:
// where it leads to, the system's signers are asked.
func trust(host, expected string) (*tls.Config, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if expected == "" {
		return cfg, nil
	}
	want, err := fingerprint.Parse(expected)
	if err != nil {
		return nil, err
	}
	name := hostname(host)
	cfg.InsecureSkipVerify = true
	cfg.VerifyConnection = func(s tls.ConnectionState) error {
		if err := fingerprint.Check(s, want); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	}
	return cfg, nil
}
