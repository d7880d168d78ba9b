package agent

import (
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// mark tells whether a file is still the one that was looked at, and unchanged.
type mark struct {
	dev, ino, size uint64
	mode           uint32
	mtime, ctime   int64
}

// watched are the files and directories from which an awakening is prepared, relative to the root.
var watched = [...]string{
	"etc/hostname", "etc/hosts", "etc/machine-id", "var/lib/dbus/machine-id", "run/forkd/identity.json",
	"var/lib/systemd/random-seed", "etc/ssh", "etc/forkd/fork.d",
}

// marks looks at all of them; a file that is not there has the zero mark.
func (a *Agent) marks() []mark {
	list := make([]mark, 0, len(watched)+1)
	for _, name := range watched {
		list = append(list, markOf(filepath.Join(a.cfg.System.Root, name)))
	}
	return append(list, markOf(a.cfg.System.BootIDFile))
}

func markOf(path string) mark {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return mark{}
	}
	return mark{
		dev: st.Dev, ino: st.Ino, size: uint64(st.Size), mode: st.Mode,
		mtime: st.Mtim.Nano(), ctime: st.Ctim.Nano(),
	}
}

// fresh is more than the granularity of a file system's times: within it, a second change does not show.
const fresh = 20 * time.Millisecond

// recent reports whether one of the files was changed so shortly before t that a change since may not show.
func recent(marks []mark, t time.Time) bool {
	limit := t.Add(-fresh).UnixNano()
	for _, m := range marks {
		if m.ctime > limit {
			return true
		}
	}
	return false
}
