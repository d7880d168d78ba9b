// Package account knows the guest's users and what a process of one of them starts with: home, groups, environment,
// working directory. It reads /etc/passwd and /etc/group itself, because the agent is static and a guest need not have
// NSS. It starts nothing and changes nothing. Only the agent's services import it.
package account

import (
	"bufio"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"forkd.dev/forkd/internal/guest/wire"
)

const (
	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	// maxDatabase bounds what is read of passwd and group: a guest may make them as large as it likes.
	maxDatabase = 4 << 20
)

// User is one account.
type User struct {
	Name   string
	UID    uint32
	GID    uint32
	Groups []uint32 // supplementary, without GID
	Home   string
	Shell  string // of /etc/passwd; may be empty, or not exist
}

// Defaults are the image's.
type Defaults struct {
	User    string            // name or number; empty: root
	Workdir string            // empty: the user's home
	Env     map[string]string // below the sandbox's own
}

// Table answers who a user is and what its processes get. It is safe for concurrent use.
type Table struct {
	root string

	mu       sync.Mutex
	defaults Defaults
	env      map[string]string
}

// New makes a table over the file system at root ("/" in a guest).
func New(root string, d Defaults) *Table {
	return &Table{root: root, defaults: d}
}

// SetDefaults replaces the image's defaults.
func (t *Table) SetDefaults(d Defaults) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.defaults = d
}

// SetEnv replaces the sandbox's environment, which processes started from now on get on top of the image's.
func (t *Table) SetEnv(env map[string]string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.env = env
}

// User looks an account up by name or number; an empty name is the image's default user. A group's name or number may
// follow after a colon, as in images: it is then the only group. An unknown name has envd's code for it. A number without
// an entry is a user without a name, of the group 0 unless one is given, whose home is /. Root exists always.
func (t *Table) User(name string) (*User, error) {
	if name == "" {
		t.mu.Lock()
		name = t.defaults.User
		t.mu.Unlock()
	}
	if name == "" {
		name = "root"
	}
	name, group, withGroup := strings.Cut(name, ":")
	u, err := t.find(name)
	if err != nil {
		return nil, wire.Errorf(wire.CodeInternal, "look up user %q: %v", name, err)
	}
	if u == nil {
		return nil, wire.Errorf(wire.CodeUnknownUser, "no user %q in this sandbox; name one of its /etc/passwd, or a number", name)
	}
	if withGroup {
		if u.GID, err = t.group(group); err != nil {
			return nil, err
		}
		u.Groups = nil
	}
	return u, nil
}

func (t *Table) group(name string) (uint32, error) {
	number, numeric := parseID(name)
	found := false
	err := t.each("etc/group", 3, func(f []string) bool {
		gid, ok := parseID(f[2])
		if found = ok && f[0] == name; found {
			number = gid
		}
		return !found
	})
	switch {
	case err != nil:
		return 0, wire.Errorf(wire.CodeInternal, "look up group %q: %v", name, err)
	case !found && !numeric:
		return 0, wire.Errorf(wire.CodeUnknownUser, "no group %q in this sandbox; name one of its /etc/group, or a number", name)
	}
	return number, nil
}

func (t *Table) find(name string) (*User, error) {
	number, numeric := parseID(name)
	var found *User
	err := t.each("etc/passwd", 7, func(f []string) bool {
		uid, ok1 := parseID(f[2])
		gid, ok2 := parseID(f[3])
		if !ok1 || !ok2 || f[0] != name && (!numeric || uid != number) {
			return true
		}
		found = &User{Name: f[0], UID: uid, GID: gid, Home: f[5], Shell: f[6]}
		return false
	})
	if err != nil {
		return nil, err
	}
	switch {
	case found != nil:
	case name == "root" || numeric && number == 0:
		found = &User{Name: "root", Home: "/root"}
	case numeric:
		found = &User{Name: name, UID: number, Home: "/"}
	default:
		return nil, nil //nolint:nilnil // no such user is not a failure to look
	}
	if !filepath.IsAbs(found.Home) {
		found.Home = "/"
	}
	err = t.each("etc/group", 4, func(f []string) bool {
		gid, ok := parseID(f[2])
		if ok && gid != found.GID && slices.Contains(strings.Split(f[3], ","), found.Name) {
			found.Groups = append(found.Groups, gid)
		}
		return true
	})
	return found, err
}

// Names maps numbers to names, for listings. Files that cannot be read leave it empty.
func (t *Table) Names() (users, groups map[uint32]string) {
	users, groups = map[uint32]string{}, map[uint32]string{}
	collect := func(path string, fields int, into map[uint32]string) {
		_ = t.each(path, fields, func(f []string) bool {
			if id, ok := parseID(f[2]); ok {
				if _, known := into[id]; !known {
					into[id] = f[0]
				}
			}
			return true
		})
	}
	collect("etc/passwd", 7, users)
	collect("etc/group", 4, groups)
	return users, groups
}

// each calls f with the fields of every line that has at least that many; a missing file has none.
func (t *Table) each(path string, fields int, f func([]string) bool) error {
	file, err := os.Open(filepath.Join(t.root, path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	lines := bufio.NewScanner(io.LimitReader(file, maxDatabase))
	for lines.Scan() {
		parts := strings.Split(lines.Text(), ":")
		if len(parts) < fields || parts[0] == "" {
			continue
		}
		if !f(parts) {
			return nil
		}
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		return nil // the rest of a file that no libc would read either
	}
	return lines.Err()
}

// parseID takes 0…2³²-2: the largest number means "do not change" to the kernel.
func parseID(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err == nil && n != 1<<32-1
}

// Environ is the environment of a process of u: PATH, HOME, USER, LOGNAME, the image's, the sandbox's, then request; of
// a name given twice the later value counts, but what an image says of its own user's name and home is not for others. A name that is empty or contains "=" or NUL is invalid_argument.
func (t *Table) Environ(u *User, request map[string]string) ([]string, error) {
	t.mu.Lock()
	layers := []map[string]string{t.defaults.Env, t.env, request}
	t.mu.Unlock()
	env := []string{"PATH=" + defaultPath, "HOME=" + u.Home, "USER=" + u.Name, "LOGNAME=" + u.Name}
	index := map[string]int{"PATH": 0, "HOME": 1, "USER": 2, "LOGNAME": 3}
	for i, layer := range layers {
		for _, k := range sortedKeys(layer) {
			v := layer[k]
			if at, ok := index[k]; ok && i == 0 && at > 0 && at < 4 && !t.isDefault(u) {
				continue // HOME, USER and LOGNAME of an image are its own user's
			}
			if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
				return nil, wire.Errorf(wire.CodeInvalid, "environment variable %q: names are not empty and without = and NUL, values without NUL", k)
			}
			if i, ok := index[k]; ok {
				env[i] = k + "=" + v
				continue
			}
			index[k] = len(env)
			env = append(env, k+"="+v)
		}
	}
	return env, nil
}

func (t *Table) isDefault(u *User) bool {
	own, err := t.User("")
	return err == nil && own.UID == u.UID
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// Getenv is the value of a name in an environment list.
func Getenv(env []string, name string) string {
	for _, e := range slices.Backward(env) {
		if k, v, ok := strings.Cut(e, "="); ok && k == name {
			return v
		}
	}
	return ""
}

// Path makes a path of a request absolute: ~ and relative paths start at the user's home.
func Path(u *User, path string) string {
	switch {
	case path == "~":
		path = u.Home
	case strings.HasPrefix(path, "~/"):
		path = filepath.Join(u.Home, path[2:])
	case !filepath.IsAbs(path):
		path = filepath.Join(u.Home, path)
	}
	return filepath.Clean(path)
}

// Dir is the directory in which a process of u starts: the requested one, which must exist (else invalid_argument), or
// the image's working directory, or u's home, or / when there is neither that u may enter.
func (t *Table) Dir(u *User, requested string) (string, error) {
	if requested != "" {
		dir := Path(u, requested)
		switch info, err := os.Stat(dir); {
		case err != nil:
			return "", wire.Errorf(wire.CodeInvalid, "cwd '%s' does not exist; make it first", dir)
		case !info.IsDir():
			return "", wire.Errorf(wire.CodeInvalid, "cwd '%s' is not a directory", dir)
		}
		return dir, nil
	}
	t.mu.Lock()
	workdir := t.defaults.Workdir
	t.mu.Unlock()
	for _, dir := range []string{workdir, u.Home} {
		if dir == "" {
			continue
		}
		dir = Path(u, dir)
		if info, err := os.Stat(dir); err == nil && info.IsDir() && u.mayEnter(dir) {
			return dir, nil
		}
	}
	return "/", nil
}

// mayEnter says whether the modes of a directory and those above it let u in.
func (u *User) mayEnter(dir string) bool {
	if u.UID == 0 {
		return true
	}
	for ; ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err != nil {
			return false
		}
		bit := fs.FileMode(0o001)
		if owner, ok := info.Sys().(*syscall.Stat_t); ok {
			switch {
			case owner.Uid == u.UID:
				bit = 0o100
			case owner.Gid == u.GID || slices.Contains(u.Groups, owner.Gid):
				bit = 0o010
			}
		}
		if info.Mode()&bit == 0 {
			return false
		}
		if dir == "/" {
			return true
		}
	}
}
