package files

import (
	"io/fs"
	"strconv"
	"syscall"

	"forkd.dev/forkd/internal/guest/wire"
)

type sysStat = syscall.Stat_t

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
