package agent

import (
	"bufio"
	"context"
	"io"
	"path/filepath"

	"forkd.dev/forkd/internal/guest/tree"
	"forkd.dev/forkd/internal/guest/wire"
)

// archive sends a file or directory as a tar stream. Sockets are left out, as tar does.
func (a *Agent) archive(ctx context.Context, s *wire.Stream, request []byte) error {
	req := &wire.ArchiveRequest{}
	if err := decode(request, req); err != nil {
		return err
	}
	if !filepath.IsAbs(req.Path) {
		return wire.Errorf(wire.CodeInvalid, "archive %q: an absolute path is needed", req.Path)
	}
	w := bufio.NewWriterSize(s.Data(wire.KindData), wire.MaxPayload)
	err := pack(ctx, filepath.Clean(req.Path), w)
	if err == nil {
		err = w.Flush()
	}
	return tarError("archive "+req.Path, err)
}

// pack writes names relative to the path's parent.
func pack(ctx context.Context, path string, w io.Writer) error {
	name := filepath.Base(path)
	if name == "/" {
		name = "."
	}
	return tree.Pack(ctx, w, path, tree.PackOptions{Name: name})
}
