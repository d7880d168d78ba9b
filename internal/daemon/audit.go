package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"

	"forkd.dev/forkd/internal/audit"
	"forkd.dev/forkd/internal/layout"
)

// Audit is where the audit log goes, and how much of it is kept.
type Audit struct {
	Path     string // "": in the home; "off": nowhere
	MaxBytes int64
	Keep     int
	Argv     audit.Argv
	Required bool
}

const (
	auditOff      = "off"
	auditMaxBytes = 16 << 20
	auditKeep     = 5
)

// fromEnv fills what the environment says.
func (a *Audit) fromEnv(getenv func(string) string) error {
	*a = Audit{Path: getenv("FORKD_AUDIT_LOG"), MaxBytes: auditMaxBytes, Keep: auditKeep, Argv: audit.Argv(getenv("FORKD_AUDIT_ARGV"))}
	var errs []error
	if a.Path != "" && a.Path != auditOff && !filepath.IsAbs(a.Path) {
		errs = append(errs, fmt.Errorf("FORKD_AUDIT_LOG is %q: give an absolute path, or off", a.Path))
	}
	if text := getenv("FORKD_AUDIT_MAX_BYTES"); text != "" {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n != 0 && n < 4096 {
			errs = append(errs, fmt.Errorf("FORKD_AUDIT_MAX_BYTES is %q: give at least 4096, or 0 to never rotate", text))
		}
		a.MaxBytes = n
	}
	if text := getenv("FORKD_AUDIT_KEEP"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 || n > 1000 {
			errs = append(errs, fmt.Errorf("FORKD_AUDIT_KEEP is %q: give how many older files to keep, 0 to 1000", text))
		}
		a.Keep = n
	}
	switch a.Argv {
	case "":
		a.Argv = audit.Full
	case audit.Full, audit.Program, audit.None:
	default:
		errs = append(errs, fmt.Errorf("FORKD_AUDIT_ARGV is %q: give full, program or none", a.Argv))
	}
	if text := getenv("FORKD_AUDIT_REQUIRED"); text != "" {
		required, err := strconv.ParseBool(text)
		if err != nil {
			errs = append(errs, fmt.Errorf("FORKD_AUDIT_REQUIRED is %q: give true or false", text))
		}
		a.Required = required
	}
	if a.Required && a.Path == auditOff {
		errs = append(errs, errors.New("FORKD_AUDIT_LOG is off, and FORKD_AUDIT_REQUIRED says that it must be written"))
	}
	return errors.Join(errs...)
}

// open opens the log; nil: there is none.
func (a *Audit) open(home layout.Home, log *slog.Logger) (*audit.Log, error) {
	path := a.Path
	switch path {
	case auditOff:
		return nil, nil //nolint:nilnil // None is wanted.
	case "":
		path = home.AuditLog()
	}
	return audit.Open(audit.Config{
		Path: path, MaxBytes: a.MaxBytes, Keep: a.Keep, Argv: a.Argv, Required: a.Required,
		Trouble: func(err error) { log.Error("audit log", "error", err) },
	})
}

// onHangup opens the log again whenever somebody asks for it, until ctx ends or stop is called.
func onHangup(ctx context.Context, hangups <-chan os.Signal, l *audit.Log, log *slog.Logger) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-hangups:
			case <-ctx.Done():
				return
			}
			if l == nil {
				continue
			}
			if err := l.Reopen(); err != nil {
				log.Error("audit log", "error", err)
				continue
			}
			log.Info("opened the audit log again")
		}
	}()
	return func() { cancel(); <-done }
}
