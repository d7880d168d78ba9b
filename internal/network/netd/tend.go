package netd

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/layout"
	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/proc"
)

// tend looks after the process while there are links: starts it, hands the links over, and starts another when it has died
// or hangs. p and first are those that are there already, or nil.
func (c *Client) tend(p *proc.Process, first *conn) {
	pause := firstPause
	reason := ""
	for {
		began := time.Now()
		if p == nil {
			var err error
			if p, first, err = c.begin(); err != nil {
				c.mu.Lock()
				c.why = err
				c.mu.Unlock()
				c.cfg.Log.Error("start the process of the sandboxes' networks", "error", err)
				if !c.wait(&pause) {
					return
				}
				continue
			}
		}
		if reason != "" {
			c.tellRestarted(reason)
		}
		c.enter(first)
		err := c.watch(p, first)
		c.leaveConn(first)
		if c.leaving() {
			c.give(p)
			return
		}
		if killErr := p.Kill(); killErr != nil {
			c.cfg.Log.Error("end the process of the sandboxes' networks", "error", killErr)
		}
		reason = why(p, err)
		p.Release()
		p, first = nil, nil
		c.cfg.Log.Error("the process of the sandboxes' networks ended", "reason", reason)
		if time.Since(began) > time.Minute {
			pause = firstPause
		}
		if c.rest() || !c.wait(&pause) {
			return
		}
	}
}

// leaving says whether this daemon has no more to do with the process.
func (c *Client) leaving() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.left
}

// give leaves the process to a later daemon, or ends it if there is nothing that one would find.
func (c *Client) give(p *proc.Process) {
	defer p.Release()
	c.mu.Lock()
	last := c.last
	c.mu.Unlock()
	if !last {
		p.Detach()
		return
	}
	select {
	case <-p.Done():
	case <-time.After(graceLimit):
	}
	if err := p.Kill(); err != nil {
		c.cfg.Log.Error("end the process of the sandboxes' networks", "error", err)
	}
}

// why says in a line what ended a process.
func why(p *proc.Process, err error) string {
	if ended := p.Err(); ended != nil {
		err = ended
	}
	text := fmt.Sprint(cmp.Or(err, errClosed))
	if said := strings.TrimSpace(string(p.Output())); said != "" && !strings.Contains(text, said) {
		first, _, _ := strings.Cut(said, "\n")
		text += ": " + first
	}
	const most = 500
	return strings.ToValidUTF8(text[:min(len(text), most)], "")
}

// rest ends the tending if there is nothing to tend.
func (c *Client) rest() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.links) > 0 && !c.left {
		return false
	}
	c.tended = false
	return true
}

// wait lets some time pass, more each time.
func (c *Client) wait(pause *time.Duration) bool {
	timer := time.NewTimer(*pause)
	defer timer.Stop()
	*pause = min(*pause*4, lastPause)
	select {
	case <-timer.C:
		return true
	case <-c.life.Done():
		return false
	}
}

// tellRestarted says whose flows are gone, before anybody can ask the new process, which has seen nothing of them.
func (c *Client) tellRestarted(reason string) {
	c.mu.Lock()
	ids := c.ids()
	c.mu.Unlock()
	if c.cfg.Restarted != nil {
		c.cfg.Restarted(ids, reason)
	}
}

// enter hands all links over and lets others use the connection, in an order in which none is missed.
func (c *Client) enter(conn *conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, id := range c.ids() {
		if h := c.links[id]; conn.fresh || !conn.has[id] {
			h.spent, h.last = h.spent+h.last.Sent+h.last.Received, network.Totals{}
			conn.tell(h.attach(id), h.file)
		} else { // What it was told of it may be older than what is to be.
			policy := h.policy.Clone()
			conn.tell(&request{Op: opPolicy, ID: id, Policy: &policy})
			conn.tell(&request{Op: opOpen, ID: id, Open: h.open})
		}
		if len(c.watchers[id]) > 0 {
			conn.tell(&request{Op: opWatch, ID: id})
		}
	}
	c.conn, c.why = conn, nil
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *Client) leaveConn(conn *conn) {
	c.mu.Lock()
	if c.conn == conn {
		c.conn = nil
	}
	c.mu.Unlock()
	conn.end()
}

// errHangs ends a process that does not answer any more.
var errHangs = errors.New("it did not answer any more")

// watch returns when the process has ended, or hangs, or this daemon leaves.
func (c *Client) watch(p *proc.Process, conn *conn) error {
	tick := time.NewTicker(c.pingEvery)
	defer tick.Stop()
	for {
		select {
		case <-p.Done():
			return nil
		case <-conn.closed:
			// It ends, or has given this daemon up.
			select {
			case <-p.Done():
			case <-time.After(graceLimit):
			}
			return errClosed
		case <-c.life.Done():
			return nil
		case <-tick.C:
		}
		ctx, cancel := context.WithTimeoutCause(c.life, c.pingLimit, errHangs)
		// What is noted now counts against budgets in the process after this one.
		_, err := c.look(ctx, conn)
		cancel()
		if errors.Is(err, errHangs) {
			return err
		}
	}
}

// record says which process has the socket.
type record struct {
	BootID    string `json:"boot_id"`
	PID       int    `json:"pid"`
	StartTime uint64 `json:"start_time"`
}

func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// begin starts a process.
func (c *Client) begin() (*proc.Process, *conn, error) {
	ctx, cancel := context.WithTimeout(c.life, callLimit)
	defer cancel()
	if err := os.Remove(c.cfg.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, nil, err
	}
	l, err := layout.ListenSocket(ctx, c.cfg.Socket)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = l.Close() }()
	p, err := c.start(ctx, l)
	if err != nil {
		return nil, nil, err
	}
	text, err := json.Marshal(record{BootID: bootID(), PID: p.PID(), StartTime: p.StartTime()})
	if err == nil {
		err = os.WriteFile(c.cfg.Record+".tmp", text, 0o600)
	}
	if err == nil {
		err = os.Rename(c.cfg.Record+".tmp", c.cfg.Record)
	}
	var conn *conn
	if err == nil {
		conn, err = c.dial(ctx, p)
	}
	if err != nil {
		err = errors.Join(err, p.Kill())
		p.Release()
		return nil, nil, err
	}
	conn.fresh = true
	return p, conn, nil
}

// start runs this program again, as the process.
func (c *Client) start(ctx context.Context, l net.Listener) (*proc.Process, error) {
	ul, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.New("the socket is no unix socket")
	}
	listener, err := ul.File()
	if err != nil {
		return nil, err
	}
	files := []*os.File{listener}
	defer func() { closeAll(files) }()
	args := []string{"netd"}
	if c.cfg.Stage != "" {
		staged, err := openStage(c.cfg.Stage)
		if err != nil {
			return nil, err
		}
		files, args = append(files, staged...), append(args, "--outer")
	}
	return c.run(ctx, args, files)
}

// run starts this program with nothing but what the process needs.
func (c *Client) run(ctx context.Context, args []string, files []*os.File) (*proc.Process, error) {
	path, name := self()
	cmd := &proc.Command{
		Path: path, Name: name, Args: args, Files: files,
		// Whatever goes wrong in it, one line says where.
		Env:         []string{"GOTRACEBACK=single"},
		Confine:     &proc.Confine{ReadOnly: existing(readable()), ReadWrite: []string{os.DevNull}},
		RefuseCalls: true, Dials: true, Bare: &proc.Bare{}, MaxFiles: maxFilesOf(),
	}
	if os.Geteuid() != 0 || c.cfg.Last == 0 {
		return proc.Start(ctx, cmd)
	}
	var err error
	if cmd.Bare.ID, err = freeID(c.cfg.First, c.cfg.Last); err != nil {
		return nil, err
	}
	p, err := proc.Start(ctx, cmd)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) {
		// In a user namespace without a place for it. It has no capabilities all the same.
		c.cfg.Log.Warn("the process of the sandboxes' networks gets no user of its own", "error", err)
		cmd.Bare.ID = 0
		return proc.Start(ctx, cmd)
	}
	if errors.Is(err, unix.EACCES) {
		err = fmt.Errorf("%w (it runs as a user of its own, which must be let run %s: chmod o+rx)", err, path)
	}
	return p, err
}

// readable are the files by which a program finds hosts, whatever has written them; /etc as a whole, for they are replaced.
func readable() []string {
	return []string{
		"/proc/self/exe", "/usr", "/lib", "/lib64", "/etc", "/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager", "/run/connman",
	}
}

func existing(paths []string) []string {
	return slices.DeleteFunc(paths, func(p string) bool {
		_, err := os.Stat(p)
		return err != nil
	})
}

// self is this program and the name it was started by. Who may not get to its file is let run it by a link of the kernel's, and so is
// everybody once another version is in its place: that one speaks to its own daemon only.
func self() (path, name string) {
	path, err := os.Executable()
	if err != nil {
		return "/proc/self/exe", "forkd"
	}
	name = path
	runs, err1 := os.Stat("/proc/self/exe")
	there, err2 := os.Stat(path)
	if err1 != nil || err2 != nil || !os.SameFile(runs, there) {
		return "/proc/self/exe", name
	}
	for dir := path; ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err != nil || info.Mode()&0o001 == 0 {
			return "/proc/self/exe", name
		}
		if dir == "/" {
			return path, name
		}
	}
}

func maxFilesOf() uint64 {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return 0
	}
	return limit.Max
}

// freeID is a user that no process is of.
func freeID(first, last uint32) (uint32, error) {
	for range 1000 {
		id := first + uint32(rand.Uint64N(uint64(last)-uint64(first)+1))
		if _, err := unix.Getpriority(unix.PRIO_USER, int(id)); errors.Is(err, unix.ESRCH) {
			return id, nil
		}
	}
	return 0, fmt.Errorf("all user ids from %d to %d seem to be in use", first, last)
}

func openStage(path string) ([]*os.File, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("the outside of tests: %w", err)
	}
	s, err := ParseStage(text)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	log, err := os.OpenFile(cmp.Or(s.Log, os.DevNull), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return []*os.File{f, log}, nil
}

// dial connects to the process that has the socket.
func (c *Client) dial(ctx context.Context, p *proc.Process) (*conn, error) {
	raw, err := layout.DialSocket(ctx, c.cfg.Socket)
	if err != nil {
		return nil, err
	}
	uc, ok := raw.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(errors.New("the socket is no unix socket"), raw.Close())
	}
	conn := newConn(&socket{conn: uc}, c.told)
	conn.has, conn.pid = map[string]bool{}, p.PID()
	stop := make(chan struct{})
	go func() { // A connection to the socket of a process that dies now would never be taken.
		select {
		case <-p.Done():
			conn.close()
		case <-stop:
		}
	}()
	defer close(stop)
	err = conn.ask(ctx, &request{Op: opHello}, func(r *reply, files []*os.File) {
		closeAll(files)
		conn.protocol = r.Protocol
	})
	if err != nil {
		conn.end()
		return nil, fmt.Errorf("greet it: %w", err)
	}
	return conn, nil
}

// Adopt goes on with the links of an earlier daemon's machines and ends all others; lost are those whose flows are gone.
func (c *Client) Adopt(ctx context.Context, machines map[string]network.Attached) (lost []string, err error) {
	p, conn, have := c.found(ctx, machines)
	if conn != nil && conn.protocol != c.protocol { // What another forkd says is only understood as far as its links.
		conn.end()
		err = p.Kill()
		p.Release()
		p, conn = nil, nil
	}
	return c.adopt(p, conn, have, machines), err //nolint:contextcheck // What it starts lives until Leave.
}

// adopt is Adopt with what was found: a process and its connection, or neither, and copies of links.
func (c *Client) adopt(p *proc.Process, conn *conn, have *foundLinks, machines map[string]network.Attached) (lost []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, m := range machines {
		file := have.files[id]
		if file == nil {
			lost = append(lost, id)
			file = m.Link
		} else if m.Link != nil {
			_ = m.Link.Close()
		}
		if file == nil {
			c.cfg.Log.Warn("a sandbox has lost its network: the process that had its end of the link is gone, and so is the daemon", "sandbox", id)
			continue
		}
		c.links[id] = &held{file: file, policy: m.Policy.Clone(), spent: m.Spent, open: true}
	}
	for _, id := range have.others {
		if conn != nil {
			conn.tell(&request{Op: opDetach, ID: id})
		}
	}
	if p == nil { // It is gone, or was ended, and flows with it.
		lost = slices.AppendSeq(lost, maps.Keys(c.links))
	}
	if p != nil || len(c.links) > 0 {
		c.tended = true
		c.work.Go(func() { c.tend(p, conn) })
	}
	slices.Sort(lost)
	return slices.Compact(lost)
}

// foundLinks are copies of a process's links, and the ids of those that are no machine's. The files of the others are not kept:
// a process that somebody has taken over may hand over as many as it likes.
type foundLinks struct {
	files  map[string]*os.File
	others []string
}

// maxOthers is more links than a daemon has.
const maxOthers = 1 << 16

// links asks for the links of machines.
func (c *conn) links(ctx context.Context, machines map[string]network.Attached) (*foundLinks, error) {
	have := &foundLinks{files: map[string]*os.File{}}
	err := c.ask(ctx, &request{Op: opLinks}, func(r *reply, files []*os.File) {
		for i, f := range files {
			id := ""
			if i < len(r.IDs) && len(r.IDs[i]) <= maxText {
				id = r.IDs[i]
			}
			if _, known := machines[id]; known && have.files[id] == nil && isLink(f) {
				have.files[id], c.has[id] = f, true
				continue
			} else if !known && id != "" && len(have.others) < maxOthers {
				have.others = append(have.others, id)
			}
			_ = f.Close()
		}
	})
	return have, err
}

// found is the process that an earlier daemon left, if it answers, and copies of its links. One that does not is ended.
func (c *Client) found(ctx context.Context, machines map[string]network.Attached) (*proc.Process, *conn, *foundLinks) {
	have := &foundLinks{}
	text, err := os.ReadFile(c.cfg.Record)
	if err != nil {
		return nil, nil, have
	}
	var rec record
	if json.Unmarshal(text, &rec) != nil || rec.BootID == "" || rec.BootID != bootID() {
		return nil, nil, have
	}
	_, name := self()
	p, err := proc.Adopt(ctx, rec.PID, rec.StartTime, filepath.Base(name), "forkd")
	if err != nil {
		if !errors.Is(err, proc.ErrGone) {
			c.cfg.Log.Warn("find the process of the sandboxes' networks", "error", err)
		}
		return nil, nil, have
	}
	ctx, cancel := context.WithTimeoutCause(ctx, callLimit, ErrDown)
	defer cancel()
	conn, err := c.dial(ctx, p)
	if err == nil {
		have, err = conn.links(ctx, machines)
	}
	if err == nil {
		return p, conn, have
	}
	c.cfg.Log.Error("the process of the sandboxes' networks does not answer, and is ended", "pid", rec.PID, "error", err)
	if conn != nil {
		conn.end()
	}
	if err := p.Kill(); err != nil {
		c.cfg.Log.Error("end the process of the sandboxes' networks", "error", err)
	}
	p.Release()
	return nil, nil, have
}

// Leave gives the links up for a later daemon. With none left the process ends, too.
func (c *Client) Leave(ctx context.Context) error {
	c.mu.Lock()
	if c.left {
		c.mu.Unlock()
		return nil
	}
	c.left, c.last = true, len(c.links) == 0
	last, conn := c.last, c.conn
	for _, h := range c.links {
		_ = h.file.Close()
	}
	clear(c.links)
	c.mu.Unlock()
	if last && conn != nil {
		if err := conn.finish(ctx); err != nil {
			c.cfg.Log.Warn("tell the process of the sandboxes' networks to end", "error", err)
		}
	}
	c.die()
	c.work.Wait()
	if !last {
		return nil
	}
	return errors.Join(ignoreMissing(os.Remove(c.cfg.Socket)), ignoreMissing(os.Remove(c.cfg.Record)))
}

// finish tells the process to end and waits until it does.
func (c *conn) finish(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, graceLimit, ErrDown)
	defer cancel()
	if err := c.do(ctx, &request{Op: opEnd}); err != nil && !errors.Is(err, errClosed) {
		return fmt.Errorf("end the process of the sandboxes' networks: %w", err)
	}
	select {
	case <-c.closed:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
