package testenv

import (
	"bytes"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// envRun marks the processes of one test run: a helper process that a test starts from its own binary must not check
// for leaks by itself, and whatever survives the tests is recognised by it.
const envRun = "FORKD_TEST_RUN"

// Main runs a package's tests and ends the process. It fails when the tests leave behind a process, a descriptor, a
// goroutine, a memfd mapping, a mount, or a file in the directory for temporary files, which is the run's own. Further
// directories that must be empty afterwards can be named. Use it as TestMain's only statement:
//
//	func TestMain(m *testing.M) { testenv.Main(m.Run) }
//
// A package that shares a fixture between tests closes it inside run.
func Main(run func() int, dirs ...string) {
	if os.Getenv(envRun) != "" {
		os.Exit(run()) //nolint:forbidigo // it stands in for TestMain, whose job this is.
	}
	os.Exit(mainChecked(run, dirs)) //nolint:forbidigo // it stands in for TestMain, whose job this is.
}

func mainChecked(run func() int, dirs []string) int {
	scratch, err := os.MkdirTemp("", "ft")
	if err != nil {
		fmt.Fprintln(os.Stderr, "testenv:", err)
		return 1
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	env := map[string]string{"TMPDIR": scratch, envRun: scratch}
	maps.Copy(env, nodeEnv())
	for name, value := range env {
		if err := os.Setenv(name, value); err != nil {
			fmt.Fprintln(os.Stderr, "testenv:", err)
			return 1
		}
	}
	dirs = append(dirs, scratch)
	before := look(scratch, dirs)
	code := run()
	leaks := settle(before, scratch, dirs, Timeout(5*time.Second))
	if len(leaks) == 0 {
		return code
	}
	fmt.Fprintf(os.Stderr, "FAIL: the tests left behind:\n\t%s\n", strings.Join(leaks, "\n\t"))
	return max(code, 1)
}

// nodeEnv has programs of Node's leave no cache of theirs among temporary files, and trust whom this machine trusts: Node
// brings a list of its own, which does not know a proxy's.
func nodeEnv() map[string]string {
	env := map[string]string{"NODE_DISABLE_COMPILE_CACHE": "1"}
	const trusted = "/etc/ssl/certs/ca-certificates.crt"
	if info, err := os.Stat(trusted); err == nil && info.Size() > 0 && os.Getenv("NODE_EXTRA_CA_CERTS") == "" {
		env["NODE_EXTRA_CA_CERTS"] = trusted
	}
	return env
}

// settle waits until nothing is left behind, and says what still is after the patience is gone. Closing is often
// asynchronous: a process dies a moment after its kill, a goroutine ends a moment after its connection.
func settle(before *trace, scratch string, dirs []string, patience time.Duration) []string {
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	deadline := time.After(patience)
	for {
		runtime.GC() // an unreferenced os.File closes in its finalizer; only what is still held is a leak
		leaks := look(scratch, dirs).beyond(before)
		if len(leaks) == 0 {
			return nil
		}
		select {
		case <-ticker.C:
		case <-deadline:
			return leaks
		}
	}
}

// trace is what a process has at one instant, each kind as text → how often.
type trace struct {
	processes, descriptors, goroutines, mappings, mounts, files map[string]int
}

func look(scratch string, dirs []string) *trace {
	return &trace{
		processes:   processes(scratch),
		descriptors: descriptors(),
		goroutines:  goroutines(),
		mappings:    linesWith("/proc/self/maps", "/memfd:", mappingKey),
		mounts:      linesWith("/proc/self/mountinfo", scratch, strings.TrimSpace),
		files:       files(dirs),
	}
}

// beyond says what t has more than before.
func (t *trace) beyond(before *trace) []string {
	var leaks []string
	add := func(kind string, now, then map[string]int) {
		for what, n := range now {
			if extra := n - then[what]; extra > 0 {
				leaks = append(leaks, fmt.Sprintf("%s (%d): %s", kind, extra, what))
			}
		}
	}
	add("process", t.processes, before.processes)
	add("descriptor", t.descriptors, before.descriptors)
	add("goroutine", t.goroutines, before.goroutines)
	add("mapping", t.mappings, before.mappings)
	add("mount", t.mounts, before.mounts)
	add("file", t.files, before.files)
	slices.Sort(leaks)
	return leaks
}

// processes are our children, and every process that the run is written into: its environment, arguments, working
// directory or open files name the run's directory. The second kind has left us for another parent.
func processes(scratch string) map[string]int {
	found := map[string]int{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return found
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		state, parent := processState(pid)
		mine := parent == os.Getpid()
		if mine && state == "Z" {
			// Adopted or forgotten by its exec.Cmd: nobody else can reap it, and a zombie holds nothing.
			var status unix.WaitStatus
			_, _ = unix.Wait4(pid, &status, unix.WNOHANG, nil)
			continue
		}
		if mine || state != "Z" && belongs(pid, scratch) {
			found[fmt.Sprintf("%d %s", pid, commandLine(pid))]++
		}
	}
	return found
}

func processState(pid int) (state string, parent int) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", 0
	}
	// The name may hold blanks and brackets; the last bracket ends it.
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	if len(fields) < 2 {
		return "", 0
	}
	parent, _ = strconv.Atoi(fields[1])
	return fields[0], parent
}

func belongs(pid int, scratch string) bool {
	for _, name := range []string{"environ", "cmdline"} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		if err == nil && bytes.Contains(text, []byte(scratch)) {
			return true
		}
	}
	links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	links = append(links, fmt.Sprintf("/proc/%d/cwd", pid))
	return slices.ContainsFunc(links, func(link string) bool {
		target, err := os.Readlink(link)
		return err == nil && strings.HasPrefix(target, scratch)
	})
}

func commandLine(pid int) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return strings.TrimSpace(string(bytes.ReplaceAll(text, []byte{0}, []byte{' '})))
}

func descriptors() map[string]int {
	found := map[string]int{}
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return found
	}
	for _, entry := range entries {
		target, err := os.Readlink("/proc/self/fd/" + entry.Name())
		switch {
		case err != nil: // the descriptor that read this directory
		case strings.HasSuffix(target, "/fd"):
		case target == "anon_inode:[eventpoll]", target == "anon_inode:[eventfd]": // Go's poller, made at first use
		default:
			found[target]++
		}
	}
	return found
}

// goroutines counts stacks by where they were started, which is what survives between two looks.
func goroutines() map[string]int {
	buffer := make([]byte, 1<<20)
	for {
		n := runtime.Stack(buffer, true)
		if n < len(buffer) {
			buffer = buffer[:n]
			break
		}
		buffer = make([]byte, 2*len(buffer))
	}
	found := map[string]int{}
	for stack := range strings.SplitSeq(string(buffer), "\n\n") {
		_, origin, ok := strings.Cut(stack, "created by ")
		if !ok || ofGo(stack, origin) {
			continue
		}
		origin, where, _ := strings.Cut(origin, "\n")
		origin, _, _ = strings.Cut(origin, " in goroutine")
		found[origin+" at "+strings.TrimSpace(where)+", now in "+top(stack)]++
	}
	return found
}

// ofGo says whether a goroutine is one that Go starts at the first use of something and keeps: signal handling, and what
// cleans up after collected objects.
func ofGo(stack, origin string) bool {
	return strings.Contains(stack, "os/signal.loop") ||
		strings.HasPrefix(origin, "runtime.") || strings.HasPrefix(origin, "unique.")
}

// top is the function a goroutine is in.
func top(stack string) string {
	lines := strings.SplitN(stack, "\n", 3)
	if len(lines) < 2 {
		return "?"
	}
	name, _, _ := strings.Cut(lines[1], "(0x")
	return strings.TrimSuffix(name, "(...)")
}

func linesWith(path, part string, key func(string) string) map[string]int {
	found := map[string]int{}
	text, err := os.ReadFile(path)
	if err != nil {
		return found
	}
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, part) {
			found[key(line)]++
		}
	}
	return found
}

// mappingKey drops the address: only what is mapped matters.
func mappingKey(line string) string {
	_, name, _ := strings.Cut(line, "/memfd:")
	return "memfd:" + strings.TrimSpace(name)
}

func files(dirs []string) map[string]int {
	found := map[string]int{}
	for _, dir := range dirs {
		_ = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err == nil && path != dir {
				found[path]++
			}
			return nil
		})
	}
	return found
}
