package daemon

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"forkd.dev/forkd/internal/layout"
)

const (
	certificateLife  = 2 * 365 * 24 * time.Hour
	certificateSpare = 60 * 24 * time.Hour // it is made anew when it is left with less
)

// ownCertificate is a self-signed certificate for what clients may call this daemon. Its key lasts, so that the pin does;
// the certificate around it is made anew when its time runs out or the daemon's names change.
func ownCertificate(home layout.Home, bind string) (*x509.Certificate, error) {
	certFile, keyFile := home.Certificate()
	if err := os.MkdirAll(filepath.Dir(certFile), 0o700); err != nil {
		return nil, fmt.Errorf("make a certificate: %w", err)
	}
	key, err := ownKey(keyFile)
	if err != nil {
		return nil, err
	}
	names, addrs := callable(bind)
	now := time.Now()
	if cert := readCertificate(certFile); cert != nil && key.PublicKey.Equal(cert.PublicKey) && now.Add(certificateSpare).Before(cert.NotAfter) &&
		covers(cert, names, addrs) {
		return cert, nil
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("make a certificate: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "forkd"}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(certificateLife),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true, DNSNames: names, IPAddresses: addrs,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, fmt.Errorf("make a certificate: %w", err)
	}
	if err := writePEM(certFile, "CERTIFICATE", der, 0o644); err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

func ownKey(file string) (*ecdsa.PrivateKey, error) {
	text, err := os.ReadFile(file)
	if err == nil {
		if block, _ := pem.Decode(text); block != nil {
			if key, err := x509.ParsePKCS8PrivateKey(block.Bytes); err == nil {
				if key, ok := key.(*ecdsa.PrivateKey); ok {
					return key, nil
				}
			}
		}
		return nil, fmt.Errorf("the key of this daemon's certificate, %s, is damaged; move it away and clients will have to be told the new fingerprint", file)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the key of this daemon's certificate: %w", err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	return key, writePEM(file, "PRIVATE KEY", der, 0o600)
}

func readCertificate(file string) *x509.Certificate {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil
	}
	return cert
}

func writePEM(file, kind string, der []byte, mode os.FileMode) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(file), ".new-")
	if err != nil {
		return fmt.Errorf("write %s: %w", filepath.Base(file), err)
	}
	err = errors.Join(pem.Encode(tmp, &pem.Block{Type: kind, Bytes: der}), tmp.Chmod(mode), tmp.Sync(), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), file)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", filepath.Base(file), errors.Join(err, os.Remove(tmp.Name())))
	}
	return nil
}

// callable is what clients may call a daemon that is bound to that address.
func callable(bind string) (names []string, addrs []net.IP) {
	names, addrs = []string{"localhost"}, []net.IP{net.IPv4(127, 0, 0, 1).To4(), net.IPv6loopback}
	host, _, err := net.SplitHostPort(bind)
	if err != nil {
		return names, addrs
	}
	ip := net.ParseIP(host)
	switch {
	case host == "" || ip != nil && ip.IsUnspecified(): // every address that the host has now
		if name, err := os.Hostname(); err == nil && name != "localhost" {
			names = append(names, name)
		}
		all, _ := net.InterfaceAddrs()
		for _, a := range all {
			if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
				addrs = append(addrs, n.IP)
			}
		}
	case ip != nil:
		addrs = append(addrs, ip)
	case host != "localhost":
		names = append(names, host)
	}
	return names, addrs
}

func covers(cert *x509.Certificate, names []string, addrs []net.IP) bool {
	for _, n := range names {
		if cert.VerifyHostname(n) != nil {
			return false
		}
	}
	for _, a := range addrs {
		if cert.VerifyHostname(a.String()) != nil {
			return false
		}
	}
	return true
}

// keyPair is a certificate in files, which are read again when they have changed: a renewed one needs no restart.
type keyPair struct {
	certFile, keyFile string

	mu     sync.Mutex
	pair   *tls.Certificate
	stamp  [2]time.Time
	looked time.Time
}

func (k *keyPair) load() error {
	stamp := k.stamps()
	pair, err := tls.LoadX509KeyPair(k.certFile, k.keyFile)
	if err != nil {
		return fmt.Errorf("load the certificate %s with the key %s: %w", k.certFile, k.keyFile, err)
	}
	k.pair, k.stamp = &pair, stamp
	return nil
}

func (k *keyPair) stamps() (s [2]time.Time) {
	for i, file := range []string{k.certFile, k.keyFile} {
		if info, err := os.Stat(file); err == nil {
			s[i] = info.ModTime()
		}
	}
	return s
}

// get looks at the files at most once in ten seconds. A pair that does not load, half of it being new, is tried again then;
// the one before serves on.
func (k *keyPair) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if now := time.Now(); now.Sub(k.looked) >= 10*time.Second {
		k.looked = now
		if k.stamps() != k.stamp {
			_ = k.load()
		}
	}
	return k.pair, nil
}
