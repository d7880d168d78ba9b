// Package layout names every file, directory and socket of a daemon, and is the only place that joins such paths.
// It reads nothing but environment variables given to it; Make creates the directories.
package layout

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Home is one daemon's place: all of its state below one directory, its socket beside or outside it.
type Home struct {
	Root    string // absolute
	Runtime string // holds the socket and the advertisement of this daemon
	Socket  string
}

// Find chooses the home. explicit is --home or FORKD_HOME: then everything lives below it, so that several daemons
// can live side by side. Otherwise root has /var/lib/forkd and /run/forkd, a user the XDG directories.
func Find(explicit string, uid int, getenv func(string) string) (Home, error) {
	if explicit != "" {
		root, err := filepath.Abs(explicit)
		if err != nil {
			return Home{}, fmt.Errorf("find home %q: %w", explicit, err)
		}
		return Home{Root: root, Runtime: runtimeDir(uid, getenv), Socket: filepath.Join(root, "forkd.sock")}, nil
	}
	run := runtimeDir(uid, getenv)
	if uid == 0 {
		return Home{Root: "/var/lib/forkd", Runtime: run, Socket: filepath.Join(run, "forkd.sock")}, nil
	}
	data := getenv("XDG_DATA_HOME")
	if data == "" {
		home := getenv("HOME")
		if home == "" {
			return Home{}, errors.New("find home: neither HOME nor XDG_DATA_HOME is set; set one, or give --home DIR")
		}
		data = filepath.Join(home, ".local", "share")
	}
	return Home{Root: filepath.Join(data, "forkd"), Runtime: run, Socket: filepath.Join(run, "forkd.sock")}, nil
}

func runtimeDir(uid int, getenv func(string) string) string {
	if uid == 0 {
		return "/run/forkd"
	}
	if dir := getenv("XDG_RUNTIME_DIR"); dir != "" {
		return filepath.Join(dir, "forkd")
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("forkd-%d", uid))
}

// Below the root.

// Lock is held by the living daemon (flock).
func (h Home) Lock() string { return filepath.Join(h.Root, "daemon.lock") }

// NetworkSocket is where the process of the sandboxes' networks listens, for the daemon alone; NetworkRecord says which
// process that is.
func (h Home) NetworkSocket() string { return filepath.Join(h.Root, "network.sock") }

// NetworkRecord is beside it.
func (h Home) NetworkRecord() string { return filepath.Join(h.Root, "network.json") }

// DaemonLog is what a daemon started in the background writes.
func (h Home) DaemonLog() string { return filepath.Join(h.Root, "daemon.log") }

// Tokens has the digests of the tokens that open the API over TCP.
func (h Home) Tokens() string { return filepath.Join(h.Root, "tokens.json") }

// Replies are those to requests with an Idempotency-Key.
func (h Home) Replies() string { return filepath.Join(h.Root, "replies.jsonl") }

// Seed is of what the tokens of sandboxes are made that E2B's clients show.
func (h Home) Seed() string { return filepath.Join(h.Root, "e2b.seed") }

// Certificate is the daemon's own, made by itself, for TCP; its key is beside it.
func (h Home) Certificate() (cert, key string) {
	return filepath.Join(h.Root, "tls", "cert.pem"), filepath.Join(h.Root, "tls", "key.pem")
}

// AuditLog is who asked the daemon for what, unless it is written elsewhere.
func (h Home) AuditLog() string { return filepath.Join(h.Root, "audit.log") }

// Layers is the store of memory and disk layers.
func (h Home) Layers() string { return filepath.Join(h.Root, "layers") }

// Images has a directory an image.
func (h Home) Images() string { return filepath.Join(h.Root, "images") }

// Image is one of them.
func (h Home) Image(id string) string { return filepath.Join(h.Images(), id) }

// Snapshots has a directory a tag.
func (h Home) Snapshots() string { return filepath.Join(h.Root, "snapshots") }

// Snapshot is one of them.
func (h Home) Snapshot(tag string) string { return filepath.Join(h.Snapshots(), tag) }

// Unfinished has a note for every snapshot that is being written.
func (h Home) Unfinished() string { return filepath.Join(h.Root, "unfinished") }

// Suspended has a directory a suspended sandbox.
func (h Home) Suspended() string { return filepath.Join(h.Root, "suspended") }

// SuspendedSandbox is one of them.
func (h Home) SuspendedSandbox(id string) string { return filepath.Join(h.Suspended(), id) }

// Workspaces has a directory a named sandbox.
func (h Home) Workspaces() string { return filepath.Join(h.Root, "workspaces") }

// Workspace is one of them.
func (h Home) Workspace(name string) string { return filepath.Join(h.Workspaces(), name) }

// Cache holds downloads and kernels, each verified by digest when used; it may be deleted while no build runs.
func (h Home) Cache() string { return filepath.Join(h.Root, "cache") }

// Hot holds disks unpacked from their layers for running children; emptied when a daemon starts.
func (h Home) Hot() string { return filepath.Join(h.Root, "hot") }

// Libraries are what stands in for libraries of QEMU's that machines do not need.
func (h Home) Libraries() string { return filepath.Join(h.Root, "libraries") }

// HotBase is the unpacked disk of an image.
func (h Home) HotBase(image string) string { return filepath.Join(h.Hot(), "image-"+image+".raw") }

// HotDisk is the unpacked disk layer of a snapshot, by its id and not its tag: a tag removed and made anew must not
// meet its predecessor's disk.
func (h Home) HotDisk(snapshotID string) string {
	return filepath.Join(h.Hot(), "disk-"+snapshotID+".qcow2")
}

// Machines has a private directory of random name for every VM process, its working directory. A process whose
// working directory is below it is one of ours: so a restarted daemon finds what an earlier one left.
func (h Home) Machines() string { return filepath.Join(h.Root, "machines") }

// MachineRecord says what a running machine is, in its directory.
func MachineRecord(dir string) string { return filepath.Join(dir, "sandbox.json") }

// MachineDisks holds the disk files of a machine. It is all of the machine's directory that the VM process may open.
func MachineDisks(dir string) string { return filepath.Join(dir, "disk") }

// Temp is for files on their way into the directories above; emptied when a daemon starts.
func (h Home) Temp() string { return filepath.Join(h.Root, "tmp") }

// Advert is where this daemon tells other users of the host which tags it has, under a name of its own.
func (h Home) Advert() string {
	return filepath.Join(h.Runtime, "daemons", fmt.Sprintf("%x.json", hash(h.Socket)))
}

// AdvertDirs are the places where daemons of this host advertise.
func AdvertDirs() []string {
	return []string{"/run/forkd/daemons", "/run/user/*/forkd/daemons", filepath.Join(os.TempDir(), "forkd-*", "daemons")}
}

func hash(s string) uint64 { // FNV-1a: stable file names, no secrets
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return h
}

// Pulls has a directory for each pull from a registry that was broken off, by the digest of what was pulled.
func (h Home) Pulls() string { return filepath.Join(h.Root, "pulls") }

// Pins has an empty file for each tag that is pinned.
func (h Home) Pins() string { return filepath.Join(h.Root, "pins") }

// Make creates the directories: the root 0700, because snapshots hold what the guest's memory held.
func (h Home) Make() error {
	if err := os.MkdirAll(h.Root, 0o700); err != nil {
		return fmt.Errorf("make home: %w", err)
	}
	for _, dir := range []string{
		h.Layers(), h.Images(), h.Snapshots(), h.Unfinished(), h.Suspended(), h.Workspaces(), h.Cache(), h.Hot(), h.Machines(), h.Temp(),
	} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make home: %w", err)
		}
	}
	if err := makePrivate(h.Runtime); err != nil {
		return err
	}
	return nil
}

// makePrivate makes the runtime directory and refuses one that another user made: in a shared temporary directory
// somebody else could otherwise own our socket's place.
func makePrivate(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make runtime directory: %w", err)
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("make runtime directory: %w", err)
	}
	if !info.IsDir() || !ownedByUs(info) {
		return fmt.Errorf("runtime directory %s belongs to someone else; set XDG_RUNTIME_DIR to a directory of yours", dir)
	}
	if err := os.MkdirAll(filepath.Join(dir, "daemons"), 0o755); err != nil {
		return fmt.Errorf("make runtime directory: %w", err)
	}
	return nil
}
