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
func (a *Agent) renewHostKeys(ctx context.Context, report *wire.AwakenReport) error {
	keys := a.prepared.hostKeys
	if len(keys) == 0 {
		return nil
	}
	root, err := os.OpenRoot(a.cfg.System.Root)
	if err != nil {
		return fmt.Errorf("renew SSH host keys: %w", err)
	}
	defer root.Close()
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

// listHostKeys finds the private keys, relative to root.
func listHostKeys(root string) []string {
	keys, err := fs.Glob(os.DirFS(root), "etc/ssh/ssh_host_*_key")
	if err != nil {
		return nil // the pattern is fine
	}
	return keys
}

// replace puts a file in place of whatever has the name, without following a link there.
func replace(root *os.Root, path string, content []byte, mode fs.FileMode) error {
	tmp := path + ".forkd-new"
	if err := root.WriteFile(tmp, content, mode); err != nil {
		return err
	}
	return root.Rename(tmp, path)
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
