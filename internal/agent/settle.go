package agent

import (
	"context"
	"fmt"
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
	var files []string
	for _, m := range mappings(pid) {
		if strings.Contains(m.access, "x") {
			files = append(files, m.file)
		}
	}
	return files
}

// maxVariables is the size of an anonymous mapping behind a file's that is taken for a part of it.
const maxVariables = 1 << 20

// mapping is a part of a file in a process's memory.
type mapping struct {
	from, to int64
	access   string // as "rw-p"
	file     string
}

func mappings(pid int) []mapping {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "maps"))
	if err != nil {
		return nil
	}
	var list []mapping
	for line := range strings.Lines(string(text)) {
		// "address perms offset dev inode path"; a path may hold blanks, anonymous mappings have none.
		f := strings.SplitN(strings.TrimSpace(line), " ", 6)
		if len(f) < 5 {
			continue
		}
		m := mapping{access: f[1]}
		if n, _ := fmt.Sscanf(f[0], "%x-%x", &m.from, &m.to); n != 2 || len(m.access) != 4 {
			continue
		}
		if len(f) == 6 && strings.HasPrefix(strings.TrimSpace(f[5]), "/") {
			m.file = strings.TrimSpace(f[5])
		} else if n := len(list); n > 0 && list[n-1].to == m.from && list[n-1].access == m.access && m.to-m.from <= maxVariables {
			m.file = list[n-1].file // its variables without an initial value come after those with one
		}
		if m.file != "" {
			list = append(list, m)
		}
	}
	return list
}

// populate maps the pages of a frozen process's programs and libraries and gives it its own copies of their variables,
// as it would have if it had used all of them before: in a fork the first page fault takes 400 blocks of kernel code.
// Nothing depends on it, so nothing is said when it fails.
func populate(pid int) {
	f, err := os.OpenFile(filepath.Join("/proc", strconv.Itoa(pid), "mem"), os.O_RDWR, 0)
	if err != nil {
		return
	}
	defer f.Close()
	left := int64(maxSettle)
	page := make([]byte, 4<<10)
	for _, m := range mappings(pid) {
		if m.access[0] != 'r' || m.access[3] != 'p' {
			continue
		}
		for at := m.from; at < m.to && left > 0; at += int64(len(page)) {
			left -= int64(len(page))
			if _, err := f.ReadAt(page, at); err != nil {
				break // behind the end of the file
			}
			if m.access[1] == 'w' {
				_, _ = f.WriteAt(page, at)
			}
		}
	}
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
