package agent

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/pem"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/crypto/ssh"

	"forkd.dev/forkd/internal/guest/wire"
)

// renewHostKeys replaces the SSH server's keys, where there are any. An RSA key takes seconds in an emulated guest, so
// it is renewed only where there is no other kind, and removed otherwise: better no key than everybody's.
func (a *Agent) renewHostKeys(ctx context.Context, root *os.Root, report *wire.AwakenReport) error {
	keys, err := hostKeys(root)
	if err != nil || len(keys) == 0 {
		return err
	}
	for _, name := range keys {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		kind := strings.TrimSuffix(strings.TrimPrefix(path.Base(name), "ssh_host_"), "_key")
		key, err := newHostKey(kind, len(keys) == 1)
		if err != nil {
			return fmt.Errorf("make SSH host key %s: %w", name, err)
		}
		if key == nil {
			if err := removeKey(root, name); err != nil {
				return err
			}
			report.NotRenewed = append(report.NotRenewed, wire.NotRenewed{
				What: "ssh_host_key", Name: "/" + name, Why: "removed: a key of this kind takes too long to make; the other kinds were renewed",
			})
			continue
		}
		if err := writeHostKey(root, name, key); err != nil {
			return fmt.Errorf("renew SSH host key %s: %w", name, err)
		}
	}
	report.Renewed = append(report.Renewed, "ssh_host_keys")
	return nil
}

func hostKeys(root *os.Root) ([]string, error) {
	// Lstat first: most images have no SSH server, and reading a directory costs more than finding none.
	if _, err := root.Lstat("etc/ssh"); err != nil {
		return nil, nil //nolint:nilerr // no SSH server
	}
	keys, err := fs.Glob(root.FS(), "etc/ssh/ssh_host_*_key")
	if err != nil {
		return nil, fmt.Errorf("list SSH host keys: %w", err)
	}
	return keys, nil
}

func newHostKey(kind string, only bool) (crypto.Signer, error) {
	switch {
	case kind == "ed25519":
		_, key, err := ed25519.GenerateKey(rand.Reader)
		return key, err
	case kind == "ecdsa":
		return ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	case kind == "rsa" && only:
		return rsa.GenerateKey(rand.Reader, 3072)
	default:
		return nil, nil //nolint:nilnil // not one we make
	}
}

func writeHostKey(root *os.Root, name string, key crypto.Signer) error {
	block, err := ssh.MarshalPrivateKey(key, "")
	if err != nil {
		return err
	}
	public, err := ssh.NewPublicKey(key.Public())
	if err != nil {
		return err
	}
	if err := replace(root, name, pem.EncodeToMemory(block), 0o600); err != nil {
		return err
	}
	return replace(root, name+".pub", ssh.MarshalAuthorizedKey(public), 0o644)
}

func removeKey(root *os.Root, name string) error {
	if err := root.Remove(name); err != nil {
		return fmt.Errorf("remove SSH host key: %w", err)
	}
	_ = root.Remove(name + ".pub") // may be missing
	return nil
}
