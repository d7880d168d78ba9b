package agent

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// maxSettle bounds what is read into the page cache: it becomes part of the snapshot.
const maxSettle = 256 << 20

// settleLimit bounds the rehearsal: an interpreter that does not answer here would not in a fork.
const settleLimit = 10 * time.Second

// settle does once, before a parent is frozen for good, what every child would otherwise do for itself: write dirty
// pages back, read the rest of the programs and libraries that interpreters have mapped, and rehearse their renewal, so
// that the pages it touches are there.
func (a *Agent) settle(ctx context.Context) error {
	left := int64(maxSettle)
	seen := map[string]bool{}
	for pid := range a.cfg.Contexts.PIDs() {
		for _, name := range mappedFiles(pid) {
			if left > 0 && !seen[name] {
				seen[name] = true
				left -= readIn(filepath.Join("/proc", strconv.Itoa(pid), "root", name), left)
			}
		}
	}
	// Nothing is frozen yet, so there is nothing to thaw.
	ctx, cancel := context.WithTimeout(ctx, settleLimit)
	defer cancel()
	_, _, err := a.cfg.Contexts.Renew(ctx, nil, func(string) error { return nil })
	a.cfg.System.Sync()
	return err
}

// mappedFiles are the files of which a process has code mapped. A process that ended meanwhile has none.
func mappedFiles(pid int) []string {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "maps"))
	if err != nil {
		return nil
	}
	var files []string
	for line := range strings.Lines(string(text)) {
		// "address perms offset dev inode path"; a path may hold blanks, anonymous mappings have none.
		f := strings.SplitN(strings.TrimSpace(line), " ", 6)
		if len(f) < 6 || !strings.Contains(f[1], "x") {
			continue
		}
		if name := strings.TrimSpace(f[5]); strings.HasPrefix(name, "/") {
			files = append(files, name)
		}
	}
	return files
}

// readIn reads a file for its effect on the page cache. Nothing depends on it, so nothing is said when it fails.
func readIn(name string, most int64) int64 {
	f, err := os.Open(name)
	if err != nil {
		return 0
	}
	defer f.Close()
	n, _ := io.CopyN(io.Discard, f, most)
	return n
}
