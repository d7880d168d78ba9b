package files

import (
	"context"
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/guest/wire"
)

// maxSources bounds one composition.
const maxSources = 10000

// compose joins files into one and removes them. Until the new one is complete nothing has changed.
func (s *Service) compose(ctx context.Context, st *wire.Stream, req *wire.ComposeRequest) error {
	u, destination, err := s.locate(req.User, req.Destination)
	if err != nil {
		return err
	}
	if len(req.Sources) == 0 || len(req.Sources) > maxSources {
		return wire.Errorf(wire.CodeInvalid, "compose %s of %d files; 1 to %d can be joined", destination, len(req.Sources), maxSources)
	}
	sources := make([]string, len(req.Sources))
	for i, name := range req.Sources {
		if sources[i], err = resolvePath(u, name); err != nil {
			return err
		}
		if sources[i] == destination {
			return wire.Errorf(wire.CodeInvalid, "compose %s: it is one of its own sources", destination)
		}
	}
	var entry wire.EntryInfo
	err = account.As(u, func() error {
		for _, source := range sources { // before anything is made
			if err := regular(source); err != nil {
				return failure("compose from", source, err)
			}
		}
		w, err := create(destination, nil, false)
		if err != nil {
			return err
		}
		for _, source := range sources {
			if err := w.take(ctx, source); err != nil {
				w.abort()
				return failure("compose from", source, err)
			}
		}
		if err := w.commit(); err != nil {
			return err
		}
		for _, source := range sources {
			_ = os.Remove(source) // the result is there; one that stays does no harm
		}
		entry, err = s.entry(destination)
		return err
	})
	if err != nil {
		return failure("compose", destination, err)
	}
	return st.SendMessage(wire.EntryReply{Entry: entry})
}

// take appends a file, inside the kernel where it can.
func (w *writer) take(ctx context.Context, source string) error {
	fd, err := openRegular(source)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), source)
	defer f.Close()
	const step = 16 << 20 // between two looks whether anybody still waits
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		_, err := io.CopyN(w.file, f, step)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// regular says what is wrong with a path that is to be read.
func regular(path string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return err
	}
	return readable(st.Mode)
}

func readable(mode uint32) error {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return nil
	case unix.S_IFDIR:
		return unix.EISDIR
	default:
		return errSpecial
	}
}
