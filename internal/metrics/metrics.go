// Package metrics counts and times what the daemon does, in Prometheus' format and by its naming rules. What is a state, such
// as the number of sandboxes, is asked for when somebody reads; what is a duration is told when it is over. It knows neither
// HTTP routes nor sandboxes: package daemon wires it to those that do.
package metrics

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Operation is what was timed.
type Operation string

// Operations, and the modes of those that have some.
const (
	Fork      Operation = "fork"       // a request, all its children: "hot", "cold" (its image had to be unpacked), "writing" (it waited for a branch)
	ForkChild Operation = "fork_child" // one of them, from its process to its confirmed identity
	Branch    Operation = "branch"     // until the snapshot is ready: "live", "diff", "full"
	Boot      Operation = "boot"       // a cold start in a build
	Build     Operation = "build"      // "recipe", "dockerfile"
	Pause     Operation = "pause"
	Resume    Operation = "resume"
	Suspend   Operation = "suspend"
	Wake      Operation = "wake"
	Exec      Operation = "exec" // "exec", "stream" (as long as the connection lasts), "eval"

	// How long a machine, and the processes in it, stood still for a branch or a suspend.
	BranchPause  Operation = "branch_pause"
	BranchFrozen Operation = "branch_frozen"
)

// Result is how an operation ended.
type Result string

// Results.
const (
	OK       Result = "ok"
	Refused  Result = "refused" // what was asked for could not be meant, or not now
	Canceled Result = "canceled"
	Failed   Result = "error"
)

// State is what there is when somebody reads.
type State struct {
	Sandboxes    map[string]int // by state
	SandboxesMax int
	Snapshots    map[string]int // by status
	Images       int

	MemoryOwn, MemoryShared       int64 // of all VM processes
	Hot, HotReserved, HotMax      int64 // images that children map
	MemoryAvailable               int64 // of the host
	DiskSandboxes, DiskSnapshots  int64
	DiskImages, DiskFree          int64
	Forking, Branching, Building  int // in progress
	EventsTold, AuditWriteFailure int64

	NetworkOpen                                  int   // flows of all sandboxes
	NetworkFlows, NetworkRefused, NetworkCut     int64 // since the daemon started, like the rest
	NetworkSent, NetworkReceived, NetworkQueries int64 // bytes by the guests, bytes to them, names asked for
	NetworkFramesDropped, NetworkFramesRefused   int64
	NetworkLost                                  int64 // refusals that are counted and not written down
	NetworkMemory, NetworkMemoryMax              int64 // of the process that has all networks
	NetworkOpenMax                               int   // flows
}

// Metrics is safe for concurrent use.
type Metrics struct {
	registry *prometheus.Registry
	handler  http.Handler

	timed     map[Operation]*prometheus.HistogramVec
	children  *prometheus.CounterVec
	requests  *prometheus.CounterVec
	durations *prometheus.HistogramVec
	inFlight  prometheus.Gauge
}

// seconds from a millisecond to a minute; forks are some ten to some hundred milliseconds.
func seconds() []float64 {
	return []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}
}

// wide is for what takes some milliseconds, or as long as somebody likes.
func wide() []float64 {
	return []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800}
}

// long is for what takes minutes.
func long() []float64 { return []float64{.1, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600} }

// still is for how long a machine stands still.
func still() []float64 {
	return []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
}

// New makes them. state is asked whenever somebody reads, one at a time.
func New(version string, state func() State) *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry(), timed: map[Operation]*prometheus.HistogramVec{}}
	for _, h := range []struct {
		of      Operation
		help    string
		buckets []float64
		labels  []string
	}{
		{Fork, "Time from a request for children to all of them being ready", seconds(), []string{"result", "mode"}},
		{ForkChild, "Time from the start of one child's process to its confirmed identity", seconds(), []string{"result"}},
		{Branch, "Time from a request for a branch to its snapshot being ready", wide(), []string{"result", "mode"}},
		{BranchPause, "Time for which a machine stood still to be captured", still(), []string{"mode"}},
		{BranchFrozen, "Time for which the processes of a machine stood still for its capture", still(), []string{"mode"}},
		{Boot, "Time from the start of a machine that boots to its agent's answer", long(), []string{"result"}},
		{Build, "Time of a build", long(), []string{"result", "mode"}},
		{Pause, "Time of a pause of a sandbox", seconds(), []string{"result"}},
		{Resume, "Time of a resume of a sandbox", seconds(), []string{"result"}},
		{Suspend, "Time of storing a sandbox", seconds(), []string{"result"}},
		{Wake, "Time of bringing a stored sandbox back", seconds(), []string{"result"}},
		{Exec, "Time of commands and evaluations in sandboxes, as long as they ran", wide(), []string{"result", "mode"}},
	} {
		v := prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "forkd_" + string(h.of) + "_duration_seconds", Help: h.help + ".", Buckets: h.buckets,
		}, h.labels)
		m.timed[h.of] = v
		m.registry.MustRegister(v)
	}
	m.children = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "forkd_fork_children_total", Help: "Children asked for, by what became of them.",
	}, []string{"result"})
	m.requests = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "forkd_http_requests_total", Help: "Requests answered, by route and status.",
	}, []string{"method", "route", "code"})
	m.durations = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "forkd_http_request_duration_seconds", Help: "Time of requests; those that stream last as long as their readers like.", Buckets: seconds(),
	}, []string{"method", "route"})
	m.inFlight = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "forkd_http_requests_in_flight", Help: "Requests that are being answered.",
	})
	built := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "forkd_build_info", Help: "1, with the daemon's version.", ConstLabels: prometheus.Labels{"version": version},
	}, func() float64 { return 1 })
	m.registry.MustRegister(
		m.children, m.requests, m.durations, m.inFlight, built, &stateCollector{state: state, descs: descriptions()},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	m.handler = promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{Registry: m.registry, MaxRequestsInFlight: maxReaders})
	return m
}

// maxReaders bounds how many read at once: each makes the daemon look at every sandbox.
const maxReaders = 4

// Handler serves them.
func (m *Metrics) Handler() http.Handler { return m.handler }

// Took notes an operation that is over. Mode is for those that have one.
func (m *Metrics) Took(what Operation, mode string, result Result, took time.Duration) {
	v, ok := m.timed[what]
	if !ok {
		return
	}
	labels := prometheus.Labels{}
	switch what {
	case BranchPause, BranchFrozen:
		labels["mode"] = mode
	case Fork, Branch, Build, Exec:
		labels["mode"], labels["result"] = mode, string(result)
	default:
		labels["result"] = string(result)
	}
	v.With(labels).Observe(took.Seconds())
	if what == ForkChild {
		m.children.WithLabelValues(string(result)).Inc()
	}
}

// Begin notes a request that is being answered; end says how it was. Method and route are of a table, not the client's words.
func (m *Metrics) Begin(method, route string) (end func(status int, took time.Duration)) {
	m.inFlight.Inc()
	return func(status int, took time.Duration) {
		m.inFlight.Dec()
		code := "none" // nothing was answered: the client went away, or the handler broke down
		if status > 0 {
			code = strconv.Itoa(status)
		}
		m.requests.WithLabelValues(method, route, code).Inc()
		m.durations.WithLabelValues(method, route).Observe(took.Seconds())
	}
}
