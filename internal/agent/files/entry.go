package files

import (
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"forkd.dev/forkd/internal/guest/wire"
)

type sysStat = syscall.Stat_t

// entry describes a path; a link itself, with the type of what it points at.
func (s *Service) entry(path string) (wire.EntryInfo, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return wire.EntryInfo{}, err
	}
	return s.namer().describe(path, info), nil
}

func (s *Service) namer() namer {
	users, groups := s.accounts.Names()
	return namer{users: users, groups: groups}
}

type namer struct {
	users, groups map[uint32]string
}

// describe makes an entry as envd does: of a link, type and mode are those of its target, whose path is resolved; a link
// to nothing keeps its type and names what it points at.
func (n namer) describe(path string, info fs.FileInfo) wire.EntryInfo {
	entry := wire.EntryInfo{
		Name:         wire.EncodeName(filepath.Base(path)),
		Path:         wire.EncodeName(path),
		Type:         entryType(info.Mode()),
		Size:         info.Size(),
		Permissions:  permissions(info.Mode()),
		ModifiedTime: info.ModTime().UTC(),
	}
	if info.Mode()&(fs.ModeDevice|fs.ModeNamedPipe|fs.ModeSocket) == 0 {
		entry.Metadata = metadata(path)
	}
	if st, ok := info.Sys().(*sysStat); ok {
		entry.Mode = st.Mode & 0o7777
		entry.Owner = name(n.users, st.Uid)
		entry.Group = name(n.groups, st.Gid)
	}
	if info.Mode()&fs.ModeSymlink == 0 {
		return entry
	}
	if target, err := filepath.EvalSymlinks(path); err == nil {
		target = wire.EncodeName(target)
		entry.SymlinkTarget = &target
		if info, err := os.Stat(path); err == nil {
			entry.Type = entryType(info.Mode())
			if st, ok := info.Sys().(*sysStat); ok {
				entry.Mode = st.Mode & 0o7777
			}
		}
	} else if link, err := os.Readlink(path); err == nil {
		link = wire.EncodeName(link)
		entry.SymlinkTarget = &link
	}
	return entry
}

func entryType(m fs.FileMode) string {
	switch {
	case m.IsRegular():
		return wire.TypeFile
	case m.IsDir():
		return wire.TypeDirectory
	case m&fs.ModeSymlink != 0:
		return wire.TypeSymlink
	default:
		return wire.TypeOther
	}
}

func name(names map[uint32]string, id uint32) string {
	if n, ok := names[id]; ok {
		return n
	}
	return strconv.FormatUint(uint64(id), 10)
}

// permissions is the text of ls -l.
func permissions(m fs.FileMode) string {
	b := []byte("----------")
	switch {
	case m.IsDir():
		b[0] = 'd'
	case m&fs.ModeSymlink != 0:
		b[0] = 'l'
	case m&fs.ModeCharDevice != 0:
		b[0] = 'c'
	case m&fs.ModeDevice != 0:
		b[0] = 'b'
	case m&fs.ModeNamedPipe != 0:
		b[0] = 'p'
	case m&fs.ModeSocket != 0:
		b[0] = 's'
	}
	for i := range 9 {
		if m&(1<<(8-i)) != 0 {
			b[i+1] = "rwxrwxrwx"[i]
		}
	}
	special := func(bit fs.FileMode, at int, with, without byte) {
		if m&bit == 0 {
			return
		}
		if b[at] == 'x' {
			b[at] = with
		} else {
			b[at] = without
		}
	}
	special(fs.ModeSetuid, 3, 's', 'S')
	special(fs.ModeSetgid, 6, 's', 'S')
	special(fs.ModeSticky, 9, 't', 'T')
	return string(b)
}
