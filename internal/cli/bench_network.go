package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/proc"
)

// networkReport is what `bench network --json` prints.
type networkReport struct {
	Host    *api.HostInfo  `json:"host"`
	Tag     string         `json:"tag"`
	Rounds  int            `json:"rounds"`
	MiB     int            `json:"mib"` // moved each way in a round
	Forkd   networkFigures `json:"forkd"`
	QEMU    networkFigures `json:"qemu_user"`
	Ratios  networkRatios  `json:"ratios"` // of medians; above 1: forkd is better
	Samples struct {
		Forkd []networkSample `json:"forkd"`
		QEMU  []networkSample `json:"qemu_user"`
	} `json:"samples"`
}

// networkSample is what one sandbox measured.
type networkSample struct {
	RoundTripMS float64 `json:"round_trip_ms"` // median: one byte there and back, over a connection that is kept
	ConnectMS   float64 `json:"connect_ms"`    // median
	Up          float64 `json:"up_mib_s"`
	Down        float64 `json:"down_mib_s"`
}

type networkFigures struct {
	RoundTrip spread `json:"round_trip_ms"`
	Connect   spread `json:"connect_ms"`
	Up        spread `json:"up_mib_s"`
	Down      spread `json:"down_mib_s"`
}

type networkRatios struct {
	RoundTrip float64 `json:"round_trip"`
	Connect   float64 `json:"connect"`
	Up        float64 `json:"up"`
	Down      float64 `json:"down"`
}

func (a *App) benchNetwork() *cobra.Command {
	b := networkBencher{a: a}
	cmd := &cobra.Command{
		Use: "network", Short: "Measure sandboxes' network against QEMU's own, beside the host's facts", Args: cobra.NoArgs,
		Long: "Runs the same child of a snapshot behind forkd's network and behind QEMU's user networking, in turns, and has it\n" +
			"talk to a server of this command on an address of this host: round trips, connections, bytes each way.\n" +
			"Both need daemons of their own, so none may be running; each is stopped again. The snapshot needs python3.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if b.rounds < 1 || b.mib < 1 {
				return usage("--rounds and --mib are at least 1")
			}
			return b.run(cmd.Context())
		},
	}
	cmd.Flags().StringVar(&b.tag, "tag", quickstartTag, "the snapshot")
	cmd.Flags().IntVar(&b.rounds, "rounds", 5, "sandboxes measured of each kind")
	cmd.Flags().IntVar(&b.mib, "mib", 64, "MiB to move each way")
	cmd.Flags().StringVar(&b.address, "address", "", "an IPv4 `address` of this host, other than loopback (default: the first)")
	return cmd
}

type networkBencher struct {
	a           *App
	tag         string
	rounds, mib int
	address     string
	ports       []string // of the servers: echo, sink, source
}

// networkDevice is the daemon's setting that is only for this comparison.
const networkDevice = "FORKD_NETWORK_DEVICE"

func (b *networkBencher) run(ctx context.Context) error {
	st, err := b.a.status(ctx)
	if err != nil {
		return err
	}
	if st.Running {
		return &hinted{fmt.Errorf("a daemon is running (pid %d), and this measures with daemons of its own", st.PID), "forkd daemon stop, and this again"}
	}
	if b.a.Getenv("FORKD_HOST") != "" {
		return usage("FORKD_HOST is set, and this measures with daemons of its own: unset it")
	}
	if b.address == "" {
		if b.address, err = firstAddress(); err != nil {
			return err
		}
	}
	end, err := b.serve(ctx)
	if err != nil {
		return err
	}
	defer end()
	r := &networkReport{Tag: b.tag, Rounds: b.rounds, MiB: b.mib}
	for range b.rounds {
		for _, kind := range []string{"", "user"} {
			sample, host, err := b.round(ctx, kind)
			if err != nil {
				return err
			}
			r.Host = host
			if kind == "" {
				r.Samples.Forkd = append(r.Samples.Forkd, *sample)
			} else {
				r.Samples.QEMU = append(r.Samples.QEMU, *sample)
			}
		}
	}
	r.sum()
	return b.a.show(r, func(w io.Writer) error { return printNetwork(w, r) })
}

// firstAddress is one of this host's that a sandbox can be let reach.
func firstAddress() (string, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return "", fmt.Errorf("look for an address of this host: %w", err)
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() && !p.Addr().IsLoopback() && !p.Addr().IsLinkLocalUnicast() {
			return p.Addr().String(), nil
		}
	}
	return "", &hinted{errors.New("this host has no IPv4 address but loopback, which sandboxes cannot reach"), "give an interface one, and --address"}
}

// serve starts what the sandboxes talk to.
func (b *networkBencher) serve(ctx context.Context) (end func(), err error) {
	var listeners []net.Listener
	end = func() {
		for _, l := range listeners {
			_ = l.Close()
		}
	}
	block := make([]byte, 1<<20)
	for _, handle := range []func(net.Conn){
		func(c net.Conn) { _, _ = io.Copy(c, c) },
		func(c net.Conn) { _, _ = io.Copy(io.Discard, c) },
		func(c net.Conn) {
			for {
				if _, err := c.Write(block); err != nil {
					return
				}
			}
		},
	} {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp4", net.JoinHostPort(b.address, "0"))
		if err != nil {
			end()
			return nil, fmt.Errorf("serve sandboxes on %s: %w", b.address, err)
		}
		listeners = append(listeners, l)
		_, port, err := net.SplitHostPort(l.Addr().String())
		if err != nil {
			end()
			return nil, err
		}
		b.ports = append(b.ports, port)
		go accept(l, handle)
	}
	return end, nil
}

func accept(l net.Listener, handle func(net.Conn)) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = conn.Close() }()
			handle(conn)
		}()
	}
}

// round measures one sandbox of a daemon of its own.
func (b *networkBencher) round(ctx context.Context, kind string) (sample *networkSample, host *api.HostInfo, err error) {
	settings := b.a.settings
	defer func() { b.a.settings = settings }()
	always := func() bool { return true }
	// A jail has a network of its own, in which QEMU could reach nobody; neither kind gets one.
	b.a.settings = append(slices.Clone(settings), &setting{variable: networkDevice, value: kind, given: always},
		&setting{variable: "FORKD_JAIL", value: "off", given: always})
	home, err := b.a.layout()
	if err != nil {
		return nil, nil, err
	}
	if err := b.a.startDaemon(ctx, home); err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, b.stop(context.WithoutCancel(ctx))) }()
	c, err := client.New("unix://" + home.Socket)
	if err != nil {
		return nil, nil, err
	}
	defer c.Close()
	if host, err = c.Host(ctx); err != nil {
		return nil, nil, err
	}
	if sample, err = b.measure(ctx, c); err != nil {
		return nil, nil, errors.Join(err, endBenchmarked(context.WithoutCancel(ctx), c))
	}
	name := "forkd"
	if kind != "" {
		name = "QEMU's " + kind
	}
	b.a.progress("%-11s  round trip %.2f ms, connect %.2f ms, up %.0f MiB/s, down %.0f MiB/s", name,
		sample.RoundTripMS, sample.ConnectMS, sample.Up, sample.Down)
	return sample, host, endBenchmarked(ctx, c)
}

// stop ends the daemon that round started.
func (b *networkBencher) stop(ctx context.Context) error {
	st, err := b.a.status(ctx)
	if err != nil || !st.Running {
		return err
	}
	return proc.Terminate(ctx, st.PID, unix.SIGUSR1)
}

func (b *networkBencher) measure(ctx context.Context, c *client.Client) (*networkSample, error) {
	req := api.ForkRequest{SnapshotTag: b.tag, Labels: benchLabels(), Egress: &api.Egress{}}
	for _, port := range b.ports {
		req.Egress.Allow = append(req.Egress.Allow, net.JoinHostPort(b.address, port))
	}
	children, err := c.Fork(ctx, req)
	if err != nil {
		return nil, b.a.elsewhere(err, c, b.tag)
	}
	args := append([]string{"python3", "-c", networkScript, b.address}, b.ports...)
	res, err := c.Exec(ctx, children[0].ID, api.ExecRequest{Args: append(args, strconv.Itoa(b.mib)), TimeoutSecs: (10 * time.Minute).Seconds()})
	if err != nil {
		return nil, err
	}
	if res.ExitCode != 0 {
		return nil, fmt.Errorf("measure in the sandbox: exit code %d: %s", res.ExitCode, res.Stderr)
	}
	sample := &networkSample{}
	if err := json.Unmarshal([]byte(res.Stdout), sample); err != nil {
		return nil, fmt.Errorf("measure in the sandbox: %w: %q", err, res.Stdout)
	}
	return sample, nil
}

// networkScript runs in the sandbox. Everything is done once before it counts: emulated code is translated at its first use.
const networkScript = `
import json, socket, sys, time
host, echo, sink, source, mib = sys.argv[1], *map(int, sys.argv[2:])
block = bytes(1 << 20)

def connect(port):
    s = socket.create_connection((host, port), 30)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s

def median(f, n):
    times = []
    for _ in range(n):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return sorted(times)[n // 2] * 1000

def round_trips(n):
    with connect(echo) as s:
        def one():
            s.send(b"x")
            s.recv(1)
        return median(one, n)

def connects(n):
    kept = []
    took = median(lambda: kept.append(connect(echo)), n)
    for s in kept:
        s.close()
    return took

def up(mib):
    with connect(sink) as s:
        start = time.perf_counter()
        for _ in range(mib):
            s.sendall(block)
        s.shutdown(socket.SHUT_WR)
        s.recv(1)
        return mib / (time.perf_counter() - start)

def down(mib):
    buf = bytearray(1 << 20)
    with connect(source) as s:
        start, got = time.perf_counter(), 0
        while got < mib << 20:
            got += s.recv_into(buf)
        return mib / (time.perf_counter() - start)

round_trips(200), connects(20), up(8), down(8)
print(json.dumps({"round_trip_ms": round_trips(500), "connect_ms": connects(100), "up_mib_s": up(mib), "down_mib_s": down(mib)}))
`

func (r *networkReport) sum() {
	r.Forkd, r.QEMU = figuresOf(r.Samples.Forkd), figuresOf(r.Samples.QEMU)
	r.Ratios = networkRatios{
		RoundTrip: r.QEMU.RoundTrip.P50 / r.Forkd.RoundTrip.P50, Connect: r.QEMU.Connect.P50 / r.Forkd.Connect.P50,
		Up: r.Forkd.Up.P50 / r.QEMU.Up.P50, Down: r.Forkd.Down.P50 / r.QEMU.Down.P50,
	}
}

func figuresOf(samples []networkSample) networkFigures {
	of := func(get func(networkSample) float64) spread {
		values := make([]float64, 0, len(samples))
		for _, s := range samples {
			values = append(values, get(s))
		}
		return spreadOf(values)
	}
	return networkFigures{
		RoundTrip: of(func(s networkSample) float64 { return s.RoundTripMS }), Connect: of(func(s networkSample) float64 { return s.ConnectMS }),
		Up: of(func(s networkSample) float64 { return s.Up }), Down: of(func(s networkSample) float64 { return s.Down }),
	}
}

func printNetwork(w io.Writer, r *networkReport) error {
	fmt.Fprintf(w, "%s\n%d rounds of each, in turns; medians, and the least and most\n\n", hostLine(r.Host), r.Rounds)
	fmt.Fprintf(w, "%-14s %28s %28s   %s\n", "", "forkd", "QEMU's user networking", "forkd is better by")
	line := func(name, unit string, ours, theirs spread, ratio float64) {
		text := func(s spread) string { return fmt.Sprintf("%.2f (%.2f-%.2f) %s", s.P50, s.Min, s.Max, unit) }
		fmt.Fprintf(w, "%-14s %28s %28s   × %.2f\n", name, text(ours), text(theirs), ratio)
	}
	line("round trip", "ms", r.Forkd.RoundTrip, r.QEMU.RoundTrip, r.Ratios.RoundTrip)
	line("connect", "ms", r.Forkd.Connect, r.QEMU.Connect, r.Ratios.Connect)
	line("out", "MiB/s", r.Forkd.Up, r.QEMU.Up, r.Ratios.Up)
	line("in", "MiB/s", r.Forkd.Down, r.QEMU.Down, r.Ratios.Down)
	return nil
}
