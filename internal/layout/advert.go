package layout

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// AdvertFile is what a daemon tells other users of the host.
type AdvertFile struct {
	Host string   `json:"host"` // what FORKD_HOST must say
	PID  int      `json:"pid"`
	UID  int      `json:"uid"`
	Tags []string `json:"tags"`
}

const maxAdvert = 1 << 20

// Adverts reads what the daemons of this host advertise, also where home's does. A file counts only if its owner is who
// it says, and a daemon that is gone does not count; what cannot be read is passed over.
func Adverts(home Home) []AdvertFile {
	var all []AdvertFile
	dirs := AdvertDirs()
	if own := filepath.Dir(home.Advert()); !slices.Contains(dirs, own) {
		dirs = append(dirs, own)
	}
	for _, pattern := range dirs {
		paths, err := filepath.Glob(filepath.Join(pattern, "*.json"))
		if err != nil {
			continue
		}
		for _, path := range paths {
			a, ok := readAdvert(path)
			if ok && !slices.ContainsFunc(all, func(b AdvertFile) bool { return a.Host == b.Host }) {
				all = append(all, a)
			}
		}
	}
	return all
}

func readAdvert(path string) (AdvertFile, bool) {
	var a AdvertFile
	info, err := os.Lstat(path)
	if err != nil || !info.Mode().IsRegular() || info.Size() > maxAdvert {
		return a, false
	}
	text, err := os.ReadFile(path)
	if err != nil || json.Unmarshal(text, &a) != nil {
		return a, false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || int(st.Uid) != a.UID || a.PID < 1 {
		return a, false
	}
	return a, alive(a.PID)
}

// alive reports whether a process runs; one that only waits to be reaped does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(rest, "Z")
}

// SweepAdverts removes what daemons that were killed left in a directory of this user's.
func SweepAdverts(dir string) {
	for _, path := range DeadAdverts(dir) {
		_ = os.Remove(path) // somebody else's stays
	}
}

// DeadAdverts are the files of daemons that are gone.
func DeadAdverts(dir string) []string {
	paths, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return nil // only a malformed pattern
	}
	return slices.DeleteFunc(paths, func(path string) bool {
		_, ok := readAdvert(path)
		return ok
	})
}

// WithTag are the daemons, other than the one at host, that have a tag.
func WithTag(adverts []AdvertFile, tag, host string) []AdvertFile {
	return slices.DeleteFunc(slices.Clone(adverts), func(a AdvertFile) bool {
		return a.Host == host || !slices.Contains(a.Tags, tag)
	})
}
