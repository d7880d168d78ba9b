package files

import (
	"bufio"
	"context"
	"errors"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/guest/tree"
	"forkd.dev/forkd/internal/guest/wire"
)

// tree sends a file or directory as a tar stream.
func (s *Service) tree(ctx context.Context, st *wire.Stream, req *wire.TreeRequest) error {
	u, path, err := s.locate(req.User, req.Path)
	if err != nil {
		return err
	}
	name, err := wire.DecodeName(req.Name)
	if err != nil {
		return err
	}
	err = account.As(u, func() error {
		w := bufio.NewWriterSize(st.Data(wire.KindData), wire.MaxPayload)
		if err := tree.Pack(ctx, w, path, tree.PackOptions{Follow: req.Follow, Name: name, NoRoot: req.NoRoot}); err != nil {
			return err
		}
		return w.Flush()
	})
	if errors.Is(err, tree.ErrLoop) {
		return wire.Errorf(wire.CodePrecondition, "send %s: %v", path, err)
	}
	if err != nil {
		return failure("send", path, err)
	}
	return nil
}
