package httpapi

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/mountinfo"
)

// addFacts adds what a measurement depends on and the host's check does not look at. What cannot be read stays empty.
func (s *Server) addFacts(info *api.HostInfo) {
	if text, err := os.ReadFile("/proc/self/mountinfo"); err == nil {
		mounts := mountinfo.Parse(string(text))
		info.StoreFilesystem = fileSystem(mounts, resolved(s.Version.Home))
		info.RuntimeFilesystem = fileSystem(mounts, resolved(filepath.Dir(s.Version.Socket)))
	}
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		info.LoadAverage = loadAverage(string(text))
	}
}

func resolved(path string) string {
	if at, err := filepath.EvalSymlinks(path); err == nil {
		return at
	}
	return path
}

// fileSystem is the type of the file system a path is on: that of the longest mount point above it, and of those the
// last, which covers the others.
func fileSystem(mounts []mountinfo.Mount, path string) string {
	kind, longest := "", -1
	for _, m := range mounts {
		if below(path, m.At) && len(m.At) >= longest {
			kind, longest = m.Type, len(m.At)
		}
	}
	return kind
}

func below(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

func loadAverage(text string) []float64 {
	fields := strings.Fields(text)
	if len(fields) < 3 {
		return nil
	}
	var out []float64
	for _, f := range fields[:3] {
		v, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return nil
		}
		out = append(out, v)
	}
	return out
}
