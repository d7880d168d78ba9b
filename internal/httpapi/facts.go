package httpapi

import (
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"forkd.dev/forkd/api"
)

// addFacts adds what a measurement depends on and the host's check does not look at. What cannot be read stays empty.
func (s *Server) addFacts(info *api.HostInfo) {
	if mounts, err := os.Open("/proc/self/mountinfo"); err == nil {
		defer mounts.Close()
		if text, err := io.ReadAll(mounts); err == nil {
			info.StoreFilesystem = fileSystem(string(text), resolved(s.Version.Home))
			info.RuntimeFilesystem = fileSystem(string(text), resolved(filepath.Dir(s.Version.Socket)))
		}
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
func fileSystem(mountinfo, path string) string {
	kind, longest := "", -1
	for line := range strings.Lines(mountinfo) {
		before, after, ok := strings.Cut(line, " - ")
		fields, rest := strings.Fields(before), strings.Fields(after)
		if !ok || len(fields) < 5 || len(rest) < 1 {
			continue
		}
		at := unescape(fields[4])
		if !below(path, at) || len(at) < longest {
			continue
		}
		kind, longest = rest[0], len(at)
	}
	return kind
}

func below(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

// unescape undoes the kernel's octal escapes of spaces and the like.
func unescape(s string) string {
	var b strings.Builder
	for len(s) > 0 {
		if s[0] == '\\' && len(s) >= 4 {
			if n, err := strconv.ParseUint(s[1:4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				s = s[4:]
				continue
			}
		}
		b.WriteByte(s[0])
		s = s[1:]
	}
	return b.String()
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
