package httpapi

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"syscall"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/host"
)

func (s *Server) processes(w http.ResponseWriter, r *http.Request) error {
	ended, err := flag(r, "ended")
	if err != nil {
		return err
	}
	conn, err := s.Host.Look(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	list := call.Processes
	if ended {
		list = call.AllProcesses
	}
	infos, err := list(r.Context(), conn)
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	out := make([]api.Process, 0, len(infos))
	for _, info := range infos {
		out = append(out, process(info))
	}
	return Reply(w, http.StatusOK, out)
}

func process(info wire.ProcessInfo) api.Process {
	p := api.Process{
		PID: info.PID, Command: info.Config.Cmd, Args: info.Config.Args, Env: info.Config.Envs, User: info.User, TTY: info.PTY,
		AgeMS: info.AgeMS, Attached: info.Readers, Output: info.Output, Running: info.End == nil,
	}
	if info.Tag != nil {
		p.Tag = *info.Tag
	}
	if info.Config.Cwd != nil {
		p.Cwd = *info.Config.Cwd
	}
	if end := info.End; end != nil {
		code := end.Code()
		p.ExitCode, p.Signal, p.Status, p.TimedOut = &code, end.Signal, end.Status, end.TimedOut
	}
	return p
}

func (s *Server) signal(w http.ResponseWriter, r *http.Request) error {
	var req api.SignalRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	process := call.Select(r.PathValue("process"))
	if process == (wire.ProcessSelector{}) { // 0, which the guest takes for none
		return fmt.Errorf("signal process 0: %w; give a pid or a tag", host.ErrNotFound)
	}
	number, err := signalNumber(req.Signal)
	if err != nil {
		return err
	}
	conn, err := s.Host.Guest(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	err = call.Signal(r.Context(), conn, wire.SendSignalRequest{
		Process: process, Signal: number, Group: req.Group, Tree: req.Tree,
	})
	if err != nil {
		return fmt.Errorf("signal: %w", err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func signalNumber(text string) (int, error) {
	if text == "" {
		return int(syscall.SIGTERM), nil
	}
	if n, ok := call.SignalNumber(text); ok {
		return n, nil
	}
	return 0, fmt.Errorf("%w: signal is %.20q; give a name (TERM, HUP, USR1 …) or a number from 1 to 64", host.ErrInvalid, text)
}

// followLogs sends the console as it is printed.
func (s *Server) followLogs(w http.ResponseWriter, r *http.Request) error {
	text := &flushed{w: w}
	err := s.Host.FollowLogs(r.Context(), r.PathValue("id"), text)
	if r.Context().Err() != nil {
		return nil //nolint:nilerr // That is how a client ends it.
	}
	return errors.Join(err, text.text.Flush())
}

// flushed is a text that arrives while it is being written.
type flushed struct {
	w     http.ResponseWriter
	begun bool
	text  call.Text
}

func (f *flushed) Write(p []byte) (int, error) {
	if !f.begun {
		f.begun = true
		f.text.Pass = func(text string) error {
			_, err := io.WriteString(f.w, text)
			return err
		}
		f.w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		f.w.WriteHeader(http.StatusOK)
	}
	if n, err := f.text.Write(p); err != nil {
		return n, err
	}
	return len(p), http.NewResponseController(f.w).Flush()
}
