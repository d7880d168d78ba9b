package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ErrUnavailable is wrapped by refusals of limits that cannot be held here.
var ErrUnavailable = errors.New("this host cannot hold that limit")

// Config is how to find a place for groups.
type Config struct {
	Name string // of the directory that all groups are made in; it must be this daemon's alone
	Off  bool   // make none
	Disk string // a file on the disk that IO is limited on
}

// Tree is the place where groups are made. It is safe for concurrent use.
type Tree struct {
	name    string
	version int                   // 0: there is none
	dirs    map[Controller]string // the directory in each hierarchy that groups are made in; the same for all in version 2
	mounts  map[Controller]mount  // to find groups elsewhere
	missing map[Controller]string // why a controller cannot be had
	device  string                // the disk's number

	mu        sync.Mutex
	shares    map[string]int64 // of version 1: what the groups weigh whose time is limited
	allShares int64
}

// Open finds a place, makes its directory, and never fails: Missing says what is not to be had, and why.
func Open(cfg Config) *Tree {
	t := &Tree{name: cfg.Name, dirs: map[Controller]string{}, mounts: map[Controller]mount{}, missing: map[Controller]string{}}
	if cfg.Off {
		t.lack("it was switched off", wanted()...)
		return t
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.lack(err.Error(), wanted()...)
		return t
	}
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.lack(err.Error(), wanted()...)
		return t
	}
	t.open(parseMounts(string(mounts)), parseGroups(string(groups)), cfg.Disk)
	return t
}

func (t *Tree) open(mounts []mount, own map[Controller]string, disk string) {
	byController := map[Controller]mount{}
	var unified *mount
	for _, m := range mounts {
		if m.version == 2 && unified == nil {
			unified = &m
		}
		for _, c := range m.controllers {
			if _, ok := byController[c]; !ok {
				byController[c] = m
			}
		}
	}
	_, memory1 := byController[Memory]
	switch {
	case memory1 || unified == nil && len(byController) > 0:
		t.open1(byController, own)
	case unified != nil:
		t.open2(*unified, own[""], disk)
	default:
		t.lack("no control groups are mounted", wanted()...)
	}
}

func (t *Tree) lack(why string, controllers ...Controller) {
	for _, c := range controllers {
		t.missing[c] = why
	}
}

// open1 makes the place below the daemon's own groups: what bounds the daemon bounds them.
func (t *Tree) open1(mounts map[Controller]mount, own map[Controller]string) {
	t.lack("control groups of version 1 hold up no writes that the kernel does later", IO)
	for _, c := range []Controller{Memory, CPU, PIDs, usage} {
		m, ok := mounts[c]
		if !ok {
			t.lack("its controller is not mounted", c)
			continue
		}
		t.mounts[c] = m
		dir, ok := m.dir(own[c])
		if !ok {
			t.lack(fmt.Sprintf("the daemon's group %s is outside of what is mounted at %s", own[c], m.at), c)
			continue
		}
		dir = filepath.Join(dir, t.name)
		if err := makeDir(dir); err != nil {
			t.lack(refused(err), c)
			continue
		}
		t.dirs[c] = dir
	}
	if len(t.dirs) > 0 {
		t.version = 1
	}
}

// weigh notes what a group of version 1 weighs, 0 for one that is gone, and lets all together weigh as much as each does. The
// place has a part of a processor beside each single process outside: as much as one, however many groups are in it, would
// starve these, and as much as many would have a few that are limited to little come before all others.
func (t *Tree) weigh(id string, shares int64) {
	dir := t.dirs[CPU]
	if t.version != 1 || dir == "" {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.shares == nil {
		t.shares = map[string]int64{}
	}
	t.allShares += shares - t.shares[id]
	t.shares[id] = shares
	if shares == 0 {
		delete(t.shares, id)
	}
	// A kernel without them shares out by processes.
	_ = writeFile(filepath.Join(dir, "cpu.shares"), strconv.FormatInt(min(max(t.allShares, leastShares), mostShares), 10))
}

// Bounds of what a group of version 1 can weigh.
const (
	leastShares = 2
	mostShares  = 1 << 18
)

// refused says what to think of a group that cannot be made.
func refused(err error) string {
	switch {
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fmt.Sprintf("%v (only root, or a user whom a part of the tree was delegated to, may make groups)", err)
	case errors.Is(err, unix.EROFS):
		return fmt.Sprintf("%v (control groups are read-only here, as in a container or under ProtectControlGroups=)", err)
	}
	return err.Error()
}

func makeDir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// open2 looks for a place above the daemon's own group: a group with processes can hand down nothing.
func (t *Tree) open2(m mount, own, disk string) {
	for _, c := range wanted() {
		t.mounts[c] = m
	}
	dir, ok := m.dir(own)
	if !ok {
		t.lack(fmt.Sprintf("the daemon's group %s is outside of what is mounted at %s", own, m.at), wanted()...)
		return
	}
	up := ancestors(m.at, dir)
	for i := range up {
		_, err := os.Stat(filepath.Join(up[i].dir, t.name))
		up[i].taken = err == nil
	}
	i, why := choose(up)
	if i < 0 {
		t.lack(why, wanted()...)
		return
	}
	place := up[i]
	if place.own && !place.root {
		if err := moveInto(filepath.Join(place.dir, t.name+"-daemon")); err != nil {
			t.lack("move the daemon out of its own group: "+refused(err), wanted()...)
			return
		}
	}
	dir = filepath.Join(place.dir, t.name)
	if err := makeDir(dir); err != nil {
		t.lack(refused(err), wanted()...)
		return
	}
	for _, c := range wanted() {
		if err := enable(c, place.dir, dir); err != nil {
			t.lack(refused(err), c)
			continue
		}
		t.dirs[c] = dir
	}
	if len(t.dirs) == 0 {
		_ = os.Remove(dir)
		return
	}
	t.version = 2
	if t.missing[IO] != "" {
		return
	}
	var err error
	if t.device, err = diskOf(disk); err != nil {
		t.lack(err.Error(), IO)
		delete(t.dirs, IO)
	}
}

// enable hands a controller down from place to dir and on to what is in that.
func enable(c Controller, place, dir string) error {
	for _, d := range []string{place, dir} {
		if err := writeFile(filepath.Join(d, "cgroup.subtree_control"), "+"+string(c)); err != nil {
			return err
		}
	}
	return nil
}

func moveInto(dir string) error {
	if err := makeDir(dir); err != nil {
		return err
	}
	return writeFile(filepath.Join(dir, "cgroup.procs"), "0")
}

// ancestors are the groups above one, the nearest first, and it at the end.
func ancestors(top, dir string) []ancestor {
	var up []ancestor
	for d := dir; d != top; {
		d = filepath.Dir(d)
		up = append(up, look(d, false))
	}
	return append(up, look(dir, true))
}

func look(dir string, own bool) ancestor {
	a := ancestor{dir: dir, own: own}
	a.writable = unix.Access(dir, unix.W_OK) == nil && unix.Access(filepath.Join(dir, "cgroup.subtree_control"), unix.W_OK) == nil
	kind, err := os.ReadFile(filepath.Join(dir, "cgroup.type")) // The root has none.
	a.root = errors.Is(err, fs.ErrNotExist)
	a.threaded = err == nil && strings.TrimSpace(string(kind)) == "threaded"
	controllers, _ := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	for c := range strings.FieldsSeq(string(controllers)) {
		a.controllers = append(a.controllers, Controller(c))
	}
	procs, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	a.others = err != nil || slices.ContainsFunc(strings.Fields(string(procs)), func(pid string) bool { return pid != strconv.Itoa(os.Getpid()) })
	return a
}

// diskOf is the number of the disk that a file is on: limits are kept by disks, not by their partitions.
func diskOf(file string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		return "", fmt.Errorf("find the disk of %s: %w", file, err)
	}
	name := fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
	dir, err := filepath.EvalSymlinks("/sys/dev/block/" + name)
	if err != nil {
		return "", fmt.Errorf("%s is on a file system that is on no disk of its own", file)
	}
	if _, err := os.Stat(filepath.Join(dir, "partition")); errors.Is(err, fs.ErrNotExist) {
		return name, nil
	}
	number, err := os.ReadFile(filepath.Join(filepath.Dir(dir), "dev"))
	if err != nil {
		return "", fmt.Errorf("find the disk of %s: %w", file, err)
	}
	return strings.TrimSpace(string(number)), nil
}

// Headroom is how much memory a new group may take before a limit of a group above it is reached; false: there is no limit.
// The kernel's cache of files counts as free, as far as it was not used lately.
func (t *Tree) Headroom() (bytes int64, limited bool) {
	dir, top := t.dirs[Memory], t.mounts[Memory].at
	if dir == "" {
		return 0, false
	}
	limit, now, cache := "memory.max", "memory.current", "inactive_file"
	if t.version == 1 {
		limit, now, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
	}
	for d := dir; len(d) > len(top); d = filepath.Dir(d) {
		most, err := number(filepath.Join(d, limit))
		if err != nil || most >= noLimit {
			continue
		}
		used, err := number(filepath.Join(d, now))
		if err != nil {
			continue
		}
		stat, _ := os.ReadFile(filepath.Join(d, "memory.stat"))
		left := max(most-used+fields(string(stat))[cache], 0)
		if !limited || left < bytes {
			bytes, limited = left, true
		}
	}
	return bytes, limited
}

// noLimit is what version 1 shows where there is none: the most that it can count, in whole pages.
const noLimit = 1 << 62

func number(path string) (int64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64) // "max" is none
}

// Version of the control groups that are used: 2, 1, or 0 for none.
func (t *Tree) Version() int { return t.version }

// Place is where groups are made, for people to look at.
func (t *Tree) Place() string {
	for _, c := range wanted() {
		if d := t.dirs[c]; d != "" {
			return d
		}
	}
	return ""
}

// Missing says why a controller cannot be had; "": it can.
func (t *Tree) Missing(c Controller) string { return t.missing[c] }

// Has are the controllers that can be had.
func (t *Tree) Has() []Controller {
	return slices.DeleteFunc(wanted(), func(c Controller) bool { return t.missing[c] != "" })
}

// Check says whether limits can be held. The error wraps ErrUnavailable, names the first that cannot, and why.
func (t *Tree) Check(l Limits) error {
	for _, c := range l.controllers() {
		if why := t.missing[c]; why != "" {
			return fmt.Errorf("%w: %s: %s", ErrUnavailable, c, why)
		}
	}
	return nil
}

// dirsOf are the directories of a group, with the controllers there. Groups of processor time in version 1 are for those
// alone whose time is limited: all in them share one part of it with everything outside, which has a part for each process.
func (t *Tree) dirsOf(id string, timed bool) map[Controller]string {
	dirs := map[Controller]string{}
	for c, d := range t.dirs {
		if t.version == 1 && !timed && d == t.dirs[CPU] {
			continue
		}
		dirs[c] = filepath.Join(d, id)
	}
	return dirs
}

// Make makes a group of a name that is no other's, bounded by l now and maybe by what later has with Set. Of limits those
// are kept that can be: see Check. Nil without a place.
func (t *Tree) Make(id string, l, later Limits) (*Group, error) {
	if t.version == 0 {
		return nil, nil
	}
	g := &Group{tree: t, id: id, dirs: t.dirsOf(id, l.CPUs > 0 || later.CPUs > 0)}
	for _, dir := range g.each() {
		if err := makeDir(dir); err != nil {
			return nil, errors.Join(fmt.Errorf("make control group: %w", err), g.Remove())
		}
	}
	if g.dirs[CPU] != "" { // until it is limited
		t.weigh(id, defaultShares)
	}
	if err := g.Set(l); err != nil {
		return nil, errors.Join(err, g.Remove())
	}
	return g, nil
}

// Adopt is the group that a process is in, if one of this daemon's name and that id was made for it, here or at
// another place of an earlier daemon.
func (t *Tree) Adopt(id string, pid int) (*Group, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return nil, fmt.Errorf("find control group: %w", err)
	}
	own := parseGroups(string(text))
	g := &Group{tree: t, id: id, dirs: map[Controller]string{}}
	for c, m := range t.mounts {
		group := own[c]
		if m.version == 2 {
			group = own[""]
		}
		dir, ok := m.dir(group)
		if ok && filepath.Base(dir) == id && filepath.Base(filepath.Dir(dir)) == t.name {
			g.dirs[c] = dir
		}
	}
	if len(g.dirs) == 0 {
		return nil, nil
	}
	if dir := g.dirs[CPU]; dir != "" && filepath.Dir(dir) == t.dirs[CPU] {
		if n, err := number(filepath.Join(dir, "cpu.shares")); err == nil {
			t.weigh(id, n)
		}
	}
	return g, nil
}

// Sweep removes groups of this daemon's name, wherever they are, but for those kept. One with processes in it is left
// alone and named in the error.
func (t *Tree) Sweep(keep map[string]bool) error {
	var errs []error
	for _, dir := range t.Left(keep) {
		if err := Remove(dir); err != nil {
			errs = append(errs, err)
		}
	}
	for _, place := range t.places() {
		if !slices.Contains(t.each(), place) {
			_ = unix.Rmdir(place) // refused while something is in it
		}
	}
	return errors.Join(errs...)
}

// Left are the directories of groups of this daemon's name, wherever they are, but for those kept.
func (t *Tree) Left(keep map[string]bool) []string {
	var left []string
	for _, place := range t.places() {
		entries, _ := os.ReadDir(place)
		for _, e := range entries {
			if e.IsDir() && !keep[e.Name()] {
				left = append(left, filepath.Join(place, e.Name()))
			}
		}
	}
	return left
}

func (t *Tree) each() []string {
	var dirs []string
	for _, d := range t.dirs {
		if !slices.Contains(dirs, d) {
			dirs = append(dirs, d)
		}
	}
	slices.Sort(dirs)
	return dirs
}

// places are the directories of this daemon's name in all hierarchies: an earlier one may have run in another group.
func (t *Tree) places() []string {
	var found, seen []string
	for _, m := range t.mounts {
		if slices.Contains(seen, m.at) {
			continue
		}
		seen = append(seen, m.at)
		_ = filepath.WalkDir(m.at, func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil || !d.IsDir():
				return nil //nolint:nilerr // It is gone, or not for us.
			case d.Name() == t.name:
				found = append(found, path)
				return fs.SkipDir
			}
			return nil
		})
	}
	slices.Sort(found)
	return found
}

// Close removes the place if nothing is in it.
func (t *Tree) Close() {
	for _, d := range t.each() {
		_ = unix.Rmdir(d)
	}
}

// Remove takes the group of a directory away, which Left has named. Its last process may be still on its way out.
func Remove(dir string) error {
	const patience = 2 * time.Second
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := unix.Rmdir(dir)
		if err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return fmt.Errorf("remove control group %s: %w", dir, err)
		}
		<-tick.C
	}
}

// writeFile writes at once, as the kernel wants it, and makes no file.
func writeFile(path, value string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	_, err = unix.Write(fd, []byte(value))
	if err = errors.Join(err, unix.Close(fd)); err != nil {
		return fmt.Errorf("write %q to %s: %w", value, path, err)
	}
	return nil
}
