package systemd

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// enter makes a thread that is in the namespaces of a process: in its mounts, and what it starts in its pids. It returns
// the way to run something on it. The thread lives as long as the program does.
func enter(pid int) (run func(func()), err error) {
	work, ready := make(chan func()), make(chan error)
	go func() {
		// Never unlocked: a thread that is elsewhere must not run anything else.
		runtime.LockOSThread()
		err := move(pid)
		ready <- err
		if err != nil {
			return // the thread ends with it
		}
		for f := range work {
			f()
		}
	}()
	if err := <-ready; err != nil {
		return nil, err
	}
	return func(f func()) {
		done := make(chan struct{})
		work <- func() {
			defer close(done)
			f()
		}
		<-done
	}, nil
}

// move takes the calling thread into the namespaces.
func move(pid int) error {
	// A thread that shares its working directory with others cannot change its mounts.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("enter systemd's namespaces: %w", err)
	}
	for _, ns := range []struct {
		name string
		kind int
	}{{"pid", unix.CLONE_NEWPID}, {"mnt", unix.CLONE_NEWNS}} {
		path := fmt.Sprintf("/proc/%d/ns/%s", pid, ns.name)
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open %s: %w", path, err)
		}
		err = unix.Setns(fd, ns.kind)
		_ = unix.Close(fd)
		if err != nil {
			return fmt.Errorf("enter systemd's %s namespace: %w", ns.name, err)
		}
	}
	return nil
}
