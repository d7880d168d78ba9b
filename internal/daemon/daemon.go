// Package daemon wires a forkd daemon: configuration → engine and host → listener, in this order, and takes them down
// in the reverse. It decides nothing itself. The command line's `serve` calls Run.
package daemon

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/agentbin"
	"forkd.dev/forkd/internal/cgroup"
	"forkd.dev/forkd/internal/engine/qemu"
	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/httpapi"
	"forkd.dev/forkd/internal/layout"
	"forkd.dev/forkd/internal/network/egress"
)

// Config is everything a daemon can be told.
type Config struct {
	Home         layout.Home
	Version      string
	Accelerator  string // auto, tcg, kvm
	Jail         string // auto, on, off
	JailIDs      qemu.IDs
	NetworkStage string // the outside of the sandboxes' networks in tests; "": the world
	UserNetwork  bool   // QEMU's own network, without any policy, to be compared with (forkd bench network)
	AllLibraries bool   // start QEMU with all its libraries
	Cgroups      string // auto, off
	MaxSandboxes int
	MaxForks     int
	MemoryKept   int64
	DiskKept     int64
	HotMaxBytes  int64
	StepMaxBytes int64
	Keep         host.Keeping
	Patience     time.Duration // with a guest that awakens
	Network      Network
	Domain       string   // below which ports of sandboxes are served by name; "": they are not
	Origins      []string // of pages in browsers that may read answers
	EgressWiden  string   // who may let sandboxes reach more than their snapshots say: admin, manage
	E2BEgress    string   // what the sandboxes of E2B's clients may reach that say nothing of it: a preset
	Audit        Audit
	Hangup       <-chan os.Signal // at each the files that are written on and on are opened again; may be nil
	Notify       string           // the socket of the service manager that started it; "": there is none
	Log          *slog.Logger
}

// maxKeep is more of anything than a store ever holds, and of seconds a duration can have.
const maxKeep = 1 << 31

// maxPatience with a guest is a day, in seconds.
const maxPatience = 24 * 60 * 60

// FromEnv fills what the environment says. Every fault is named.
func (c *Config) FromEnv(getenv func(string) string) error {
	var errs []error
	number := func(name string, low int64) int64 {
		text := getenv(name)
		if text == "" {
			return 0
		}
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n < low {
			errs = append(errs, fmt.Errorf("%s is %q: give a whole number, at least %d", name, text, low))
		}
		return n
	}
	c.Notify = getenv("NOTIFY_SOCKET")
	c.MaxSandboxes = int(number("FORKD_MAX_SANDBOXES", 1))
	c.MaxForks = int(number("FORKD_MAX_FORKS", 1))
	c.MemoryKept = number("FORKD_MEMORY_RESERVE_BYTES", 1)
	c.DiskKept = number("FORKD_DISK_RESERVE_BYTES", 1)
	c.HotMaxBytes = number("FORKD_HOT_MAX_BYTES", 1)
	c.StepMaxBytes = number("FORKD_STEP_MAX_BYTES", 1)
	c.Keep.MaxBytes = number("FORKD_STORE_MAX_BYTES", 1)
	c.Keep.KeepLast = int(min(number("FORKD_STORE_KEEP_LAST", 1), maxKeep))
	c.Keep.OlderThan = time.Duration(min(number("FORKD_STORE_MAX_AGE_SECONDS", 1), maxKeep)) * time.Second
	c.Patience = time.Duration(min(number("FORKD_GUEST_PATIENCE_SECONDS", 1), maxPatience)) * time.Second
	c.Accelerator = getenv("FORKD_ACCELERATOR")
	switch c.Accelerator {
	case "":
		c.Accelerator = "auto"
	case "auto", "tcg", "kvm":
	default:
		errs = append(errs, fmt.Errorf("FORKD_ACCELERATOR is %q: give auto, tcg or kvm", c.Accelerator))
	}
	c.Jail = getenv("FORKD_JAIL")
	switch c.Jail {
	case "":
		c.Jail = qemu.JailAuto
	case qemu.JailAuto, qemu.JailOn, qemu.JailOff:
	default:
		errs = append(errs, fmt.Errorf("FORKD_JAIL is %q: give auto, on or off", c.Jail))
	}
	if text := getenv("FORKD_JAIL_UIDS"); text != "" {
		ids, err := qemu.ParseIDs(text)
		if err != nil {
			errs = append(errs, fmt.Errorf("FORKD_JAIL_UIDS: %w", err))
		}
		c.JailIDs = ids
	}
	switch text := getenv("FORKD_QEMU_LIBRARIES"); text {
	case "", "needed":
	case "all":
		c.AllLibraries = true
	default:
		errs = append(errs, fmt.Errorf("FORKD_QEMU_LIBRARIES is %q: give needed or all", text))
	}
	c.NetworkStage = getenv("FORKD_NETWORK_OUTER")
	switch text := getenv("FORKD_NETWORK_DEVICE"); text {
	case "":
	case "user":
		c.UserNetwork = true
	default:
		errs = append(errs, fmt.Errorf("FORKD_NETWORK_DEVICE is %q: it is for forkd bench network alone; unset it", text))
	}
	switch c.Cgroups = getenv("FORKD_CGROUPS"); c.Cgroups {
	case "", cgroupsAuto, cgroupsOff:
	default:
		errs = append(errs, fmt.Errorf("FORKD_CGROUPS is %q: give auto or off", c.Cgroups))
	}
	switch c.EgressWiden = getenv("FORKD_EGRESS_WIDEN"); c.EgressWiden {
	case "", widenAdmin, widenManage:
	default:
		errs = append(errs, fmt.Errorf("FORKD_EGRESS_WIDEN is %q: give admin or manage", c.EgressWiden))
	}
	c.Domain = strings.ToLower(strings.Trim(getenv("FORKD_DOMAIN"), "."))
	if !domainName.MatchString(c.Domain) {
		errs = append(errs, fmt.Errorf("FORKD_DOMAIN is %q: give a name such as sandboxes.example.com", c.Domain))
	}
	for text := range strings.FieldsFuncSeq(getenv("FORKD_ORIGINS"), func(r rune) bool { return r == ',' || r == ' ' }) {
		if err := httpapi.CheckOrigin(text); err != nil {
			errs = append(errs, fmt.Errorf("FORKD_ORIGINS: %w", err))
		}
		c.Origins = append(c.Origins, text)
	}
	c.E2BEgress = getenv("FORKD_E2B_EGRESS")
	switch {
	case c.E2BEgress == "":
		c.E2BEgress = egress.Packages
	case !slices.Contains(egress.Presets(), c.E2BEgress):
		errs = append(errs, fmt.Errorf("FORKD_E2B_EGRESS is %q: give %s", c.E2BEgress, strings.Join(egress.Presets(), ", ")))
	}
	c.Network = Network{Bind: getenv("FORKD_BIND"), TLSCert: getenv("FORKD_TLS_CERT"), TLSKey: getenv("FORKD_TLS_KEY")}
	errs = append(errs, c.Network.check(), c.Audit.fromEnv(getenv))
	return errors.Join(errs...)
}

// domainName is one, or nothing.
var domainName = regexp.MustCompile(`^([a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*)?$`)

// What FORKD_CGROUPS can be.
const (
	cgroupsAuto = "auto"
	cgroupsOff  = "off"
)

// What FORKD_EGRESS_WIDEN can be.
const (
	widenAdmin  = "admin"
	widenManage = "manage"
)

// groups are the control groups of VM processes. Their name is of this home: other daemons have others.
func (c *Config) groups() *cgroup.Tree {
	root := c.Home.Root
	if resolved, err := filepath.EvalSymlinks(root); err == nil {
		root = resolved
	}
	sum := sha256.Sum256([]byte(root))
	return cgroup.Open(cgroup.Config{
		Name: "forkd-" + hex.EncodeToString(sum[:6]), Off: c.Cgroups == cgroupsOff, Disk: root,
	})
}

// ErrRunning means that another daemon has this home.
var ErrRunning = errors.New("a daemon is already running")

// ErrEndSandboxes as the cause that ends Run's context has it end its sandboxes. Otherwise they run on, and the next
// daemon of the home adopts them.
var ErrEndSandboxes = errors.New("stop, and end the sandboxes")

const stopTimeout = 30 * time.Second

// Run serves until ctx ends. ready is called once the socket answers.
func Run(ctx context.Context, cfg Config, ready func()) (err error) {
	if err := cfg.Home.Make(); err != nil {
		return err
	}
	lock, err := takeLock(cfg.Home)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	raiseFileLimit()
	answerMeanwhile()

	log, err := cfg.Audit.open(cfg.Home, cfg.Log)
	if err != nil {
		return err
	}
	if log != nil {
		defer func() { err = errors.Join(err, log.Close()) }()
	}
	defer onHangup(ctx, cfg.Hangup, log, cfg.Log)()

	ad := advert{home: cfg.Home}
	m := newMeters(cfg.Version, log)
	h, err := openHost(ctx, cfg, ad, m)
	if ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) { // It did as it was told, before it was up.
		cfg.Log.Info("stopped while it started")
		return nil
	}
	if err != nil {
		return err
	}
	m.host = h
	defer func() {
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		leave := h.Leave
		if errors.Is(context.Cause(ctx), ErrEndSandboxes) {
			leave = h.Close
		}
		err = errors.Join(err, leave(cleanup), ad.remove())
	}()
	tokens, err := access.Open(cfg.Home.Tokens())
	if err != nil {
		return err
	}
	var tcp *public
	if cfg.Network.Bind != "" {
		if tcp, err = listenTCP(ctx, cfg.Network, cfg.Home, tokens); err != nil {
			return err
		}
		defer tcp.Close()
	}
	listener, err := listen(ctx, cfg.Home)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, removeSocket(cfg.Home.Socket)) }()
	layout.SweepAdverts(filepath.Dir(cfg.Home.Advert()))
	if err := ad.write(h.Tags()); err != nil {
		cfg.Log.Warn("not advertised to other users of this host", "error", err)
	}
	server := &httpapi.Server{
		Host: h, Log: cfg.Log, Tokens: tokens, Audit: log, Metrics: m.Metrics, ManageWidens: cfg.EgressWiden == widenManage,
		Domain: cfg.Domain,
	}
	server.Shelf = h.Shelf()
	defer server.Shelf.Close()
	server.KeepReplies(cfg.Home.Replies(), cfg.Log)
	return serve(ctx, cfg, server, listener, tcp, ready)
}

func openHost(ctx context.Context, cfg Config, ad advert, m *meters) (*host.Host, error) {
	libraries := cfg.Home.Libraries()
	if cfg.AllLibraries {
		libraries = ""
	}
	eng, err := qemu.New(qemu.Config{
		Accelerator: cfg.Accelerator, Jail: cfg.Jail, JailIDs: cfg.JailIDs, UserNetwork: cfg.UserNetwork, Libraries: libraries,
	})
	if err != nil {
		return nil, err
	}
	agent, err := agentbin.Agent(runtime.GOARCH)
	if err != nil {
		cfg.Log.Warn("no guest agent", "error", err) // doctor says so too; what needs it is refused
	}
	var opened atomic.Pointer[host.Host]
	networks := cfg.networks(ctx, &opened)
	h, err := host.Open(ctx, host.Config{
		Networks: networks, Version: cfg.Version,
		Home: cfg.Home, Engine: eng, Agent: agent, Log: cfg.Log, MaxSandboxes: cfg.MaxSandboxes, HotMaxBytes: cfg.HotMaxBytes,
		StepMaxBytes: cfg.StepMaxBytes, Keep: cfg.Keep, Took: m.took, Groups: cfg.groups(),
		MaxForks: cfg.MaxForks, MemoryReserve: cfg.MemoryKept, DiskReserve: cfg.DiskKept, Patience: cfg.Patience,
		Changed: func(tags []string) {
			if err := ad.write(tags); err != nil {
				cfg.Log.Warn("advertise tags", "error", err)
			}
		},
	})
	if err != nil {
		return nil, errors.Join(err, networks.Leave(context.WithoutCancel(ctx)))
	}
	opened.Store(h)
	return h, nil
}

// takeLock makes this process the one daemon of its home. The kernel releases the lock when the process ends,
// however it ends.
func takeLock(home layout.Home) (*os.File, error) {
	f, err := os.OpenFile(home.Lock(), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w in %s", ErrRunning, home.Root)
		}
		return nil, fmt.Errorf("lock %s: %w", home.Root, err)
	}
	return f, nil
}

// raiseFileLimit lifts the soft limit to the hard one: a sandbox takes several descriptors, and the usual soft limit
// of 1024 is for programs that use select. A refusal is shown by doctor.
func raiseFileLimit() {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil && lim.Cur < lim.Max {
		lim.Cur = lim.Max
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &lim)
	}
}

// answerMeanwhile has the Go scheduler run more goroutines at a time than there are processors, unless the environment says
// how many: while as many compare and compress memory, one that has a request to pass on waits for the end of another's 10
// ms at each of its steps otherwise, and a client of a sandbox 40 ms. The kernel gives it a processor at once.
func answerMeanwhile() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(max(8, 2*runtime.NumCPU()))
	}
}

// listen takes the socket's place. Who holds the lock may remove a socket left by a daemon that was killed.
func listen(ctx context.Context, home layout.Home) (net.Listener, error) {
	if err := removeSocket(home.Socket); err != nil {
		return nil, err
	}
	return layout.ListenSocket(ctx, home.Socket)
}

func removeSocket(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove socket: %w", err)
	}
	return nil
}

// protocols are what clients may begin with. HTTP/2 is for gRPC services in sandboxes, whose clients speak nothing else; without
// encryption it is for who begins with it.
func protocols() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetHTTP2(true)
	p.SetUnencryptedHTTP2(true)
	return p
}

func serve(ctx context.Context, cfg Config, s *httpapi.Server, l net.Listener, tcp *public, ready func()) error {
	s.Version = api.VersionInfo{
		Version: cfg.Version, API: api.Version, PID: os.Getpid(), Home: cfg.Home.Root, Socket: cfg.Home.Socket,
	}
	listeners := []net.Listener{l}
	if tcp != nil {
		listeners = append(listeners, tcp)
	}
	other := &tcpListener{home: cfg.Home, tokens: s.Tokens, log: cfg.Log, open: tcp}
	s.TCP = other
	requests, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	handler, wait, err := withE2B(requests, cfg, s)
	if err != nil {
		return err
	}
	defer func() { cancel(); wait() }()
	server := &http.Server{
		Handler: httpapi.Origins(cfg.Origins, cfg.Domain, handler), ReadHeaderTimeout: 30 * time.Second, IdleTimeout: 3 * time.Minute,
		BaseContext: func(net.Listener) context.Context { return requests }, ConnContext: whose,
		ErrorLog: slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug), Protocols: protocols(),
	}
	other.begin(server)
	failed := serveAll(server, listeners)
	cfg.Log.Info("serving", "socket", cfg.Home.Socket, "home", cfg.Home.Root, "pid", os.Getpid())
	if tcp != nil {
		cfg.Log.Info("serving TCP", "address", tcp.url, "fingerprint", tcp.pin)
	}
	ready()
	tell := func(word string) {
		if err := notify(context.WithoutCancel(ctx), cfg.Notify, word); err != nil {
			cfg.Log.Warn("the service manager does not know", "what", word, "error", err)
		}
	}
	tell(tellReady)
	select {
	case err := <-failed:
		return fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	}
	cfg.Log.Info("stopping")
	reason := "its sandboxes run on"
	if errors.Is(context.Cause(ctx), ErrEndSandboxes) {
		reason = "its sandboxes end"
	}
	s.Host.Events().Emit(events.Event{Type: events.DaemonStopping, Reason: reason}) // while somebody listens
	tell(tellStopping)
	// Calls into guests last as long as the guest likes: they are cut, not waited for.
	cancel()
	stopCtx, stop := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer stop()
	if err := server.Shutdown(stopCtx); err != nil {
		_ = server.Close()
	}
	for range listeners {
		if err := <-failed; !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve: %w", err)
		}
	}
	if err := other.end(); err != nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve: %w", err)
	}
	return nil
}
