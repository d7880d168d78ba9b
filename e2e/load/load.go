// Package load is what tests run in a sandbox as a user's program, to be captured with it: it rewrites memory and appends
// records to files without a pause, so that a copy of it that mixes two instants shows it. The tests' own binary is this
// program, too: where there are no privileges there is no compiler to build another. Only package e2e imports it.
package load

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Word is the first argument that makes the tests' binary this program.
const Word = "load"

// Socket is where a running program answers.
const Socket = "/run/forkd-load.sock"

// Report is an answer. Generation and Cursor say how far memory is: the pages before Cursor are of Generation, the others
// of the one before.
type Report struct {
	Error      string   `json:"error,omitempty"` // what was found wrong, ever
	PID        int      `json:"pid"`
	Generation uint64   `json:"generation"`
	Cursor     int      `json:"cursor"`
	Pages      int      `json:"pages"`
	Records    uint64   `json:"records"`          // written
	Chains     []string `json:"chains,omitempty"` // of the records from the one asked for
	GapMS      float64  `json:"gap_ms"`           // the ticker's longest since the last answer
	Ticks      int      `json:"ticks"`            // in that time
}

// Main is the program: start MIB RATE, which returns when it answers; serve MIB RATE, which is what start starts; ask
// WORDS. It rewrites so many MiB, at so many a second, 0 for as fast as it goes.
func Main(ctx context.Context, args []string, out io.Writer) error {
	if len(args) < 2 {
		return errors.New("give start MIB RATE, serve MIB RATE or ask WORDS")
	}
	switch args[0] {
	case "start":
		if err := start(args[1:]); err != nil {
			return err
		}
		return ask(ctx, "report 0", out)
	case "serve":
		return serve(ctx, args[1:])
	case "ask":
		return ask(ctx, strings.Join(args[1:], " "), out)
	default:
		return fmt.Errorf("verb %q: there are start, serve and ask", args[0])
	}
}

// start runs serve in a session of its own, as a user's daemon would be.
func start(args []string) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd := exec.Command("/proc/self/exe", append([]string{Word, "serve"}, args...)...) //nolint:forbidigo,noctx // it is to outlive us.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.ExtraFiles = []*os.File{w}
	err = cmd.Start()
	_ = w.Close()
	if err != nil {
		return err
	}
	said, err := io.ReadAll(r) // until it answers, or is gone
	if err == nil && string(said) != ready {
		err = fmt.Errorf("it did not begin: %s", said)
	}
	return err
}

const ready = "ready"

func serve(ctx context.Context, args []string) error {
	parent := os.NewFile(3, "parent")
	mib, rate, err := sizes(args)
	if err != nil {
		return err
	}
	c, err := newChurn(mib << 20)
	if err != nil {
		_, _ = fmt.Fprint(parent, err)
		return err
	}
	_ = os.Remove(Socket)
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "unix", Socket)
	if err != nil {
		_, _ = fmt.Fprint(parent, err)
		return err
	}
	t := startTicker()
	go c.run(rate)
	if _, err := parent.WriteString(ready); err != nil {
		return err
	}
	if err := parent.Close(); err != nil {
		return err
	}
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		go answer(conn, c, t)
	}
}

func sizes(args []string) (mib, rate int, err error) {
	if len(args) != 2 {
		return 0, 0, fmt.Errorf("serve %v: give MIB and RATE", args)
	}
	if mib, err = strconv.Atoi(args[0]); err != nil {
		return 0, 0, err
	}
	rate, err = strconv.Atoi(args[1])
	return mib, rate, err
}

// answer reads one line, "report N" or "check N", and answers with one. N is the first record whose chain is wanted.
func answer(conn net.Conn, c *churn, t *ticker) {
	defer conn.Close()
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return
	}
	words := strings.Fields(line)
	r := Report{Error: fmt.Sprintf("asked for %q", line)}
	if len(words) == 2 {
		from, err := strconv.ParseUint(words[1], 10, 64)
		if err == nil {
			r = c.report(words[0] == "check", from)
		}
	}
	r.PID = os.Getpid()
	gap, ticks := t.take()
	r.GapMS, r.Ticks = float64(gap.Microseconds())/1000, ticks
	_ = json.NewEncoder(conn).Encode(r)
}

func ask(ctx context.Context, words string, out io.Writer) error {
	dialer := net.Dialer{Timeout: 10 * time.Second}
	conn, err := dialer.DialContext(ctx, "unix", Socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := fmt.Fprintln(conn, words); err != nil {
		return err
	}
	n, err := io.Copy(out, conn)
	if err == nil && n == 0 {
		err = errors.New("no answer")
	}
	return err
}
