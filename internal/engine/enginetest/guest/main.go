// Command guest is PID 1 of the tiny machine that the engine contract tests boot: it loads the virtio modules it finds
// in its initramfs and answers one-line requests on the control port. It is not the product's agent, so that engines
// can be tested without it. Only package enginetest builds it.
package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// portName is the product's: the same device must carry both.
const portName = "forkd.control"

func main() {
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "guest: this program is the init of a test machine")
		os.Exit(2)
	}
	// More threads than CPUs: the kernel is fairer to who answers than the runtime is beside threads that never pause.
	runtime.GOMAXPROCS(4)
	err := serve()
	fmt.Println("guest: ended:", err)
	// The kernel panics when its init ends, which ends the machine: a test sees the reason on the console.
	os.Exit(1)
}

func serve() error {
	for _, m := range [][2]string{{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs", "/tmp"}} {
		if err := os.MkdirAll(m[1], 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m[0], m[1], m[0], 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s: %w", m[1], err)
		}
	}
	order, err := os.ReadFile("/forkd/modules.order")
	if err != nil {
		return err
	}
	for name := range strings.FieldsSeq(string(order)) {
		f, err := os.Open(filepath.Join("/forkd/modules", name))
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("load %s: %w", name, err)
		}
	}
	port, err := openPort()
	if err != nil {
		return err
	}
	fmt.Println("guest: ready", readTrim("/sys/devices/system/clocksource/clocksource0/current_clocksource"))
	g := &guest{memory: map[string][]byte{}}
	return g.answer(port)
}

func openPort() (*os.File, error) {
	for {
		names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, n := range names {
			if readTrim(n) == portName {
				return os.OpenFile("/dev/"+filepath.Base(filepath.Dir(n)), os.O_RDWR, 0)
			}
		}
		<-time.After(2 * time.Millisecond) // The port appears when the host's side of the device has been probed.
	}
}

type guest struct {
	memory map[string][]byte
	churn  *churn
	ticker *ticker
	link   *net.UDPConn
}

// answer serves lines for ever. The port reads as ended while no host is connected, which is no error.
func (g *guest) answer(port *os.File) error {
	r := bufio.NewReaderSize(port, 64<<10)
	var partial string
	for {
		line, err := r.ReadString('\n')
		partial += line
		if errors.Is(err, io.EOF) {
			<-time.After(time.Millisecond)
			continue
		}
		if err != nil {
			return err
		}
		fields := strings.Fields(partial)
		partial = ""
		if len(fields) == 0 {
			continue
		}
		reply, err := g.do(fields[0], fields[1:])
		if err != nil {
			reply = "error " + strings.ReplaceAll(err.Error(), "\n", " ")
		}
		if _, err := fmt.Fprintf(port, "%s\n", reply); err != nil {
			return err
		}
	}
}

func (g *guest) do(cmd string, args []string) (string, error) {
	switch {
	case cmd == "ping" && len(args) == 1:
		return "pong " + args[0], nil
	case cmd == "set" && len(args) == 2:
		g.memory[args[0]] = []byte(args[1])
		return "ok", nil
	case cmd == "get" && len(args) == 1:
		return "ok " + string(g.memory[args[0]]), nil
	case cmd == "fill" && len(args) == 2: // fill NAME MIB: incompressible memory.
		return g.fill(args[0], args[1])
	case cmd == "sum" && len(args) == 1:
		s := sha256.Sum256(g.memory[args[0]])
		return "ok " + hex.EncodeToString(s[:]), nil
	case cmd == "write" && len(args) == 2: // write OFFSET TEXT on the disk.
		return disk(args[0], []byte(args[1]), true)
	case cmd == "read" && len(args) == 2: // read OFFSET LENGTH.
		n, err := strconv.Atoi(args[1])
		if err != nil {
			return "", err
		}
		return disk(args[0], make([]byte, n), false)
	case cmd == "churn" && len(args) == 2: // churn MIB RATE: rewrite memory without end; "check" looks whether it is whole.
		c, err := startChurn(args[0], args[1])
		if err != nil {
			return "", err
		}
		g.churn = c
		return "ok", nil
	case cmd == "check" && g.churn != nil:
		return g.churn.check()
	case cmd == "tick":
		if g.ticker == nil {
			g.ticker = startTicker()
		}
		return fmt.Sprintf("ok %d", g.ticker.take()), nil
	case cmd == "time":
		var mono unix.Timespec
		now := time.Now()
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &mono); err != nil {
			return "", err
		}
		return fmt.Sprintf("ok %d %d", now.UnixNano(), mono.Nano()), nil
	case cmd == "link": // bring the network up
		var err error
		g.link, err = openLink()
		return "ok", err
	case cmd == "send" && len(args) == 2 && g.link != nil: // send COUNT TEXT: a datagram of so many texts; what is answered.
		return exchange(g.link, args[0], args[1])
	case cmd == "flood" && len(args) == 1 && g.link != nil: // flood COUNT: so many large datagrams, meanwhile
		return flood(g.link, args[0])
	case cmd == "facts":
		return "ok " + facts(), nil
	case cmd == "clockcost":
		return clockCost()
	case cmd == "sleep" && len(args) == 1:
		return sleep(args[0])
	case cmd == "cat" && len(args) == 1:
		return "ok " + strconv.Quote(readTrim(args[0])), nil
	case cmd == "print" && len(args) == 2: // print COUNT TEXT on the console.
		n, err := strconv.Atoi(args[0])
		if err != nil {
			return "", err
		}
		for range n {
			fmt.Println(args[1])
		}
		return "ok", nil
	case cmd == "poweroff":
		return "", unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	case cmd == "reboot":
		return "", unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	}
	return "", fmt.Errorf("no such request: %s %q", cmd, args)
}

func (g *guest) fill(name, mib string) (string, error) {
	n, err := strconv.Atoi(mib)
	if err != nil {
		return "", err
	}
	b := make([]byte, n<<20)
	x := uint64(0x9e3779b97f4a7c15)
	for i := 0; i+8 <= len(b); i += 8 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		for j := range 8 {
			b[i+j] = byte(x >> (8 * j))
		}
	}
	g.memory[name] = b
	return "ok", nil
}

func disk(offset string, data []byte, write bool) (string, error) {
	off, err := strconv.ParseInt(offset, 10, 64)
	if err != nil {
		return "", err
	}
	f, err := os.OpenFile("/dev/vda", os.O_RDWR|syscall.O_SYNC, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if write {
		_, err = f.WriteAt(data, off)
		return "ok", err
	}
	_, err = f.ReadAt(data, off)
	return "ok " + strings.TrimRight(string(data), "\x00"), err
}

func facts() string {
	return fmt.Sprintf("clocksource=%s available=%q cpus=%s kernel=%s cmdline=%q",
		readTrim("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
		readTrim("/sys/devices/system/clocksource/clocksource0/available_clocksource"),
		readTrim("/sys/devices/system/cpu/online"), readTrim("/proc/sys/kernel/osrelease"), readTrim("/proc/cmdline"))
}

// clockCost is what reading the clock costs, the price of a clock source.
func clockCost() (string, error) {
	const n = 20000
	start := time.Now()
	var last time.Time
	for range n {
		last = time.Now()
	}
	_ = last
	return fmt.Sprintf("ok %d", time.Since(start).Nanoseconds()/n), nil
}

// sleep is how long a sleep of that many milliseconds takes by the guest's own clock.
func sleep(ms string) (string, error) {
	n, err := strconv.Atoi(ms)
	if err != nil {
		return "", err
	}
	start := time.Now()
	<-time.After(time.Duration(n) * time.Millisecond)
	return fmt.Sprintf("ok %d", time.Since(start).Nanoseconds()), nil
}

func readTrim(path string) string {
	b, _ := os.ReadFile(path)
	return strings.TrimSpace(string(b))
}
