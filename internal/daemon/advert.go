package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"forkd.dev/forkd/internal/layout"
)

// advert is a small file that tells other users of this host which tags this daemon has, so that an unknown tag can
// name the daemon that knows it. Everyone may read it; the daemon itself answers its owner only.
type advert struct {
	home layout.Home
}

func (a advert) write(tags []string) error {
	path := a.home.Advert()
	text, err := json.Marshal(layout.AdvertFile{Host: "unix://" + a.home.Socket, PID: os.Getpid(), UID: os.Getuid(), Tags: tags})
	if err != nil {
		return fmt.Errorf("encode advertisement: %w", err)
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".new-")
	if err != nil {
		return fmt.Errorf("write advertisement: %w", err)
	}
	_, err = tmp.Write(text)
	err = errors.Join(err, tmp.Chmod(0o644), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write advertisement: %w", errors.Join(err, os.Remove(tmp.Name())))
	}
	return nil
}

func (a advert) remove() error {
	if err := os.Remove(a.home.Advert()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove advertisement: %w", err)
	}
	return nil
}
