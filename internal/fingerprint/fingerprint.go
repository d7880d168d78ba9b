// Package fingerprint names a certificate by its public key, for those who know the key that is meant: in the place of names
// and signers. Both sides of TLS between forkds import it.
package fingerprint

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

const prefix = "sha256//"

// Of is a certificate's: sha256//BASE64 of its public key, as curl takes it.
func Of(cert *x509.Certificate) string {
	sum := sha256.Sum256(cert.RawSubjectPublicKeyInfo)
	return prefix + base64.StdEncoding.EncodeToString(sum[:])
}

// Parse reads sha256//BASE64, or sha256:HEX.
func Parse(text string) ([]byte, error) {
	var sum []byte
	var err error
	if b64, ok := strings.CutPrefix(text, prefix); ok {
		sum, err = base64.StdEncoding.DecodeString(b64)
	} else {
		sum, err = hex.DecodeString(strings.ReplaceAll(strings.TrimPrefix(text, "sha256:"), ":", ""))
	}
	if err != nil || len(sum) != sha256.Size {
		return nil, fmt.Errorf("fingerprint %.100q: give it as the daemon prints it: sha256//…", text)
	}
	return sum, nil
}

// Check compares what the other side has shown with what Parse returned.
func Check(s tls.ConnectionState, want []byte) error {
	if len(s.PeerCertificates) == 0 {
		return errors.New("it shows no certificate")
	}
	got := sha256.Sum256(s.PeerCertificates[0].RawSubjectPublicKeyInfo)
	if subtle.ConstantTimeCompare(got[:], want) != 1 {
		return fmt.Errorf("its certificate's fingerprint is %s, another than was given", Of(s.PeerCertificates[0]))
	}
	return nil
}
