package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
)

const defaultHosts = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"

// hostsAddress is Debian's custom for the line of /etc/hosts that names the machine itself.
const hostsAddress = "127.0.1.1"

// identityFiles are the files that name the machine. They are opened before the machine is captured and written in
// each fork through these descriptors or, where their size stays the same, in memory: a fork starts with a cold
// translation cache, in which opening, creating, writing, truncating and renaming would each cost a millisecond or more
// of code never run before. Nothing can replace the files in between, because all processes are frozen.
type identityFiles struct {
	hostname, hosts, machineID, dbusID, bootID, identity *slot

	mapped    bool   // where they can be
	hostsRest []byte // /etc/hosts without the machine's own line
}

// slot is a file that is overwritten in place.
type slot struct {
	fd   int
	size int
	mem  []byte // the whole file, mapped; nil if it is not
}

// openIdentity opens the files, makes those that are missing, and removes a seed that every sibling would start from.
// Mapped ones are dirty and have new times then.
func openIdentity(sys *System, mapped bool) (*identityFiles, error) {
	f := &identityFiles{mapped: mapped}
	if err := f.open(sys); err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

func (f *identityFiles) open(sys *System) (err error) {
	for _, dir := range []string{"etc", "run/forkd"} {
		if err := os.MkdirAll(filepath.Join(sys.Root, dir), 0o755); err != nil {
			return fmt.Errorf("prepare identity: %w", err)
		}
	}
	dbus := filepath.Join(sys.Root, "var/lib/dbus/machine-id")
	for _, file := range []struct {
		slot **slot
		path string
		mode uint32
		skip bool
	}{
		{&f.hostname, filepath.Join(sys.Root, "etc/hostname"), 0o644, false},
		{&f.hosts, filepath.Join(sys.Root, "etc/hosts"), 0o644, false},
		{&f.machineID, filepath.Join(sys.Root, "etc/machine-id"), 0o444, false},
		{&f.dbusID, dbus, 0o444, !regular(dbus)},
		{&f.bootID, sys.BootIDFile, 0o444, false},
		{&f.identity, filepath.Join(sys.Root, "run/forkd/identity.json"), 0o644, false},
	} {
		if file.skip {
			continue
		}
		if *file.slot, err = openSlot(file.path, file.mode, f.mapped); err != nil {
			return fmt.Errorf("prepare identity: open %s: %w", file.path, err)
		}
	}
	if err := f.readHosts(); err != nil {
		return fmt.Errorf("prepare identity: read /etc/hosts: %w", err)
	}
	err = unix.Unlink(filepath.Join(sys.Root, "var/lib/systemd/random-seed"))
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR) {
		return fmt.Errorf("remove random seed: %w", err)
	}
	return nil
}

func regular(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode().IsRegular()
}

// openSlot opens the file itself: a link in its place, to somewhere that is not the machine's, is replaced.
func openSlot(path string, mode uint32, mapped bool) (*slot, error) {
	const flags = unix.O_RDWR | unix.O_CREAT | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Open(path, flags, mode)
	if errors.Is(err, unix.ELOOP) {
		if err = unix.Unlink(path); err == nil {
			fd, err = unix.Open(path, flags, mode)
		}
	}
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	s := &slot{fd: fd, size: int(st.Size)}
	if mapped {
		s.mem = mapFile(fd, s.size)
	}
	return s, nil
}

// put replaces the content. Where the file allows padding, what is shorter than before is filled up with pad instead of
// being cut; 0 cuts.
func (s *slot) put(content []byte, pad byte) error {
	if pad != 0 && len(content) < s.size && len(content) > 0 {
		last := content[len(content)-1]
		content = content[:len(content)-1]
		for len(content) < s.size-1 {
			content = append(content, pad)
		}
		content = append(content, last)
	}
	if len(content) == len(s.mem) && poke(s.mem, content) == nil {
		return nil
	}
	n, err := unix.Pwrite(s.fd, content, 0)
	if err == nil && n < len(content) {
		err = unix.ENOSPC
	}
	if err == nil && s.size > len(content) {
		err = unix.Ftruncate(s.fd, int64(len(content)))
	}
	s.size = len(content)
	return err
}

func (f *identityFiles) close() {
	for _, s := range []*slot{f.hostname, f.hosts, f.machineID, f.dbusID, f.bootID, f.identity} {
		if s != nil {
			unmap(s.mem)
			_ = unix.Close(s.fd)
		}
	}
}

func (f *identityFiles) readHosts() error {
	old := []byte(defaultHosts)
	if f.hosts.size > 0 {
		old = make([]byte, min(f.hosts.size, 1<<20))
		n, err := unix.Pread(f.hosts.fd, old, 0)
		if err != nil {
			return err
		}
		old = old[:n]
	}
	for line := range strings.Lines(string(old)) {
		if fields := strings.Fields(line); len(fields) > 0 && fields[0] == hostsAddress {
			continue
		}
		f.hostsRest = append(f.hostsRest, strings.TrimRight(line, "\n")...)
		f.hostsRest = append(f.hostsRest, '\n')
	}
	return nil
}

// renew writes what makes the machine one of its own. Identity is the content of that file.
func (f *identityFiles) renew(req *wire.AwakenRequest, identity []byte) error {
	hosts := append([]byte(nil), f.hostsRest...)
	hosts = append(hosts, hostsAddress+"\t"+req.Hostname+"\n"...)
	for _, file := range []struct {
		slot    *slot
		content []byte
		pad     byte
	}{
		{f.hostname, []byte(req.Hostname + "\n"), 0},
		{f.hosts, hosts, '\n'},
		{f.machineID, []byte(req.MachineID + "\n"), 0},
		{f.dbusID, []byte(req.MachineID + "\n"), 0},
		{f.bootID, []byte(req.BootID + "\n"), 0},
		{f.identity, identity, ' '},
	} {
		if file.slot == nil {
			continue
		}
		if err := file.slot.put(file.content, file.pad); err != nil {
			return fmt.Errorf("renew identity: %w", err)
		}
	}
	return nil
}
