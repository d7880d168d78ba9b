package host

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/image"
)

// service is a command that keeps running, watched from its start until it is ready.
type service struct {
	mu      sync.Mutex
	out     tail
	matches []logMatch
}

// startService starts a service and returns when it is ready. It goes on running then, in every child, as the process
// with its name as its tag.
func startService(ctx context.Context, conn *guest.Conn, cfg *image.Service) error {
	s := &service{}
	for _, r := range cfg.Ready {
		if r.Log == "" {
			continue
		}
		re, err := regexp.Compile(r.Log)
		if err != nil {
			return fmt.Errorf("%w: ready.log: %w", ErrInvalid, err)
		}
		s.matches = append(s.matches, logMatch{text: r.Log, re: re})
	}
	req := wire.StartRequest{
		Process: wire.ProcessConfig{Cmd: cfg.Command[0], Args: cfg.Command[1:], Envs: cfg.Env}, Tag: &cfg.Name, User: cfg.User,
	}
	if cfg.WorkDir != "" {
		req.Process.Cwd = &cfg.WorkDir
	}
	// The stream is given up when the service is ready; the process stays.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		end, err := call.Run(ctx, conn, req, nil, call.Output{Stdout: s, Stderr: s}, nil)
		if err == nil {
			err = fmt.Errorf("it ended before it was ready: %s", end.Status)
		}
		cancel(err)
	}()
	for i := range cfg.Ready {
		if err := s.await(ctx, conn, &cfg.Ready[i]); err != nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			return fmt.Errorf("%w%s", err, output(&s.out))
		}
	}
	return nil
}

func (s *service) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.matches {
		s.matches[i].add(p)
	}
	return s.out.Write(p)
}

// logMatch looks for a line of an output. What it keeps of an unfinished line is bounded.
type logMatch struct {
	text string
	re   *regexp.Regexp
	line []byte
	seen bool
}

func (m *logMatch) add(p []byte) {
	for len(p) > 0 && !m.seen {
		i := bytes.IndexByte(p, '\n')
		part := p
		if i >= 0 {
			part, p = p[:i], p[i+1:]
		} else {
			p = nil
		}
		m.line = append(m.line, part...)
		// An unfinished line counts too: a prompt has no end.
		m.seen = m.re.Match(m.line)
		if i >= 0 {
			m.line = m.line[:0]
		}
		if len(m.line) > maxTail {
			m.line = append(m.line[:0], m.line[len(m.line)-maxTail/2:]...)
		}
	}
}

func (s *service) logged(text string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.matches, func(m logMatch) bool { return m.text == text && m.seen })
}

// await repeats the checks until all hold at once. The error says which did not, and why, when they were last made.
func (s *service) await(ctx context.Context, conn *guest.Conn, r *image.Ready) error {
	deadline, cancel := context.WithTimeout(ctx, r.Timeout)
	defer cancel()
	tick := time.NewTicker(r.Interval)
	defer tick.Stop()
	problem := "it was not checked yet"
	for {
		now, err := s.check(deadline, conn, r)
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("%w (%s)", context.Cause(ctx), problem)
		case deadline.Err() != nil:
			return fmt.Errorf("it was not ready within %s: %s", r.Timeout, problem)
		case err != nil:
			return err
		case now == "":
			return nil
		}
		problem = now
		select {
		case <-tick.C:
		case <-deadline.Done():
		}
	}
}

// check makes the checks, the cheap ones first, and returns what is wrong: "" when all hold.
func (s *service) check(ctx context.Context, conn *guest.Conn, r *image.Ready) (problem string, err error) {
	if r.Log != "" && !s.logged(r.Log) {
		return fmt.Sprintf("no line of its output matches %q", r.Log), nil
	}
	for _, check := range []func(context.Context, *guest.Conn, *image.Ready) (string, error){checkFile, checkPort, checkHTTP, checkCommand} {
		if problem, err := check(ctx, conn, r); problem != "" || err != nil {
			return problem, err
		}
	}
	return "", nil
}

func checkFile(ctx context.Context, conn *guest.Conn, r *image.Ready) (string, error) {
	if r.File == "" {
		return "", nil
	}
	err := conn.Call(ctx, wire.MethodFileStat, wire.PathRequest{Path: r.File}, &wire.EntryReply{})
	if e, ok := errors.AsType[*wire.Error](err); ok && e.Code == wire.CodeNotFound {
		return r.File + " does not exist", nil
	}
	if err != nil {
		return "", fmt.Errorf("ready check: look for %s: %w", r.File, err)
	}
	return "", nil
}

// maxTable is of the kernel's table of connections: some hundred thousand.
const maxTable = 32 << 20

// checkPort asks the guest's kernel and not a program: an image need not have one that could tell.
func checkPort(ctx context.Context, conn *guest.Conn, r *image.Ready) (string, error) {
	if !r.Port.IsValid() {
		return "", nil
	}
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		text, err := call.Fetch(ctx, conn, wire.MethodFileRead, wire.ReadRequest{Path: table}, maxTable)
		if err != nil {
			return "", fmt.Errorf("ready check: read %s: %w", table, err)
		}
		for line := range strings.Lines(string(text)) {
			if at, ok := listening(line); ok && covers(at, r.Port) {
				return "", nil
			}
		}
	}
	if r.Port.Addr().IsUnspecified() {
		return fmt.Sprintf("nothing listens on port %d", r.Port.Port()), nil
	}
	return fmt.Sprintf("nothing listens on %s", r.Port), nil
}

// covers reports whether who connects to want reaches the listener.
func covers(listener, want netip.AddrPort) bool {
	if listener.Port() != want.Port() {
		return false
	}
	have, addr := listener.Addr().Unmap(), want.Addr().Unmap()
	// A listener on :: takes IPv4 as well, unless it was told not to.
	return addr.IsUnspecified() || have == addr || have.IsUnspecified() && (have.Is6() || addr.Is4())
}

// listening reads a line of /proc/net/tcp or tcp6: "sl local_address rem_address st …", addresses as ip:port in hex, the
// ip in 32-bit words of the machine's byte order; 0A = listen.
func listening(line string) (netip.AddrPort, bool) {
	f := strings.Fields(line)
	if len(f) < 4 || f[3] != "0A" {
		return netip.AddrPort{}, false
	}
	host, port, _ := strings.Cut(f[1], ":")
	raw, err := hex.DecodeString(host)
	n, portErr := strconv.ParseUint(port, 16, 16)
	if err != nil || portErr != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for word := range slices.Chunk(raw, 4) {
		slices.Reverse(word) // both architectures are little-endian
	}
	addr, ok := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(addr, uint16(n)), ok
}

// probeTimeout bounds one question: a service that hangs while it starts is asked again.
const probeTimeout = 10 * time.Second

func checkHTTP(ctx context.Context, conn *guest.Conn, r *image.Ready) (string, error) {
	if r.HTTP == nil {
		return "", nil
	}
	var reply wire.ProbeReply
	err := conn.Call(ctx, wire.MethodProbe, wire.ProbeRequest{
		Address: r.HTTP.Address.String(), Host: r.HTTP.Host, Path: r.HTTP.Path, TimeoutMS: min(r.Timeout, probeTimeout).Milliseconds(),
	}, &reply)
	if e, ok := errors.AsType[*wire.Error](err); ok && e.Code == wire.CodeUnimplemented {
		return "", fmt.Errorf("%w: the agent of this base knows no HTTP check; build the base again, or check a port", ErrUnsupported)
	}
	switch {
	case err != nil:
		return "", fmt.Errorf("ready check: ask %s: %w", r.HTTP.URL(), err)
	case reply.Problem != "":
		return fmt.Sprintf("%s does not answer: %s", r.HTTP.URL(), reply.Problem), nil
	case r.HTTP.Status != 0 && reply.Status != r.HTTP.Status:
		return fmt.Sprintf("%s answers with status %d, not %d", r.HTTP.URL(), reply.Status, r.HTTP.Status), nil
	case r.HTTP.Status == 0 && reply.Status/100 != 2:
		return fmt.Sprintf("%s answers with status %d", r.HTTP.URL(), reply.Status), nil
	}
	return "", nil
}

func checkCommand(ctx context.Context, conn *guest.Conn, r *image.Ready) (string, error) {
	if len(r.Command) == 0 {
		return "", nil
	}
	what, out := strings.Join(r.Command, " "), &tail{}
	end, err := call.Run(ctx, conn, wire.StartRequest{
		Process: wire.ProcessConfig{Cmd: r.Command[0], Args: r.Command[1:]}, TimeoutMS: r.Timeout.Milliseconds(),
	}, nil, call.Output{Stdout: out, Stderr: out}, nil)
	if err != nil {
		return "", fmt.Errorf("ready check: %s: %w", what, err)
	}
	if end.Code() != 0 {
		return fmt.Sprintf("%q: %s%s", what, end.Status, output(out)), nil
	}
	return "", nil
}
