package mux

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/yamux"
)

// echo is a session of the real yamux with a server whose streams send back what they get.
func echo(t *testing.T, maxStreams int) *yamux.Session {
	t.Helper()
	here, there := net.Pipe()
	var running sync.WaitGroup
	s := NewServer(there, maxStreams, func(st *Stream) {
		running.Go(func() {
			defer st.Close()
			_, _ = io.Copy(st, st)
		})
	})
	running.Go(func() {
		defer s.Close()
		buf := make([]byte, 1000)
		for {
			n, err := there.Read(buf)
			if err != nil || s.Feed(buf[:n]) != nil {
				return
			}
		}
	})
	c, err := yamux.Client(here, &yamux.Config{
		AcceptBacklog: 64, KeepAliveInterval: time.Hour, ConnectionWriteTimeout: time.Hour, MaxStreamWindowSize: window,
		StreamCloseTimeout: 10 * time.Second, LogOutput: io.Discard,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Close()
		_ = there.Close()
		running.Wait()
	})
	return c
}

func TestServerSpeaksYamux(t *testing.T) {
	c := echo(t, 64)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			st, err := c.OpenStream()
			if err != nil {
				t.Error(err)
				return
			}
			want := bytes.Repeat([]byte{byte(i)}, 3*window+i)
			wg.Go(func() {
				if _, err := st.Write(want); err != nil {
					t.Error(err)
				}
			})
			got := make([]byte, len(want))
			if _, err := io.ReadFull(st, got); err != nil || !bytes.Equal(got, want) {
				t.Errorf("stream %d: %v", i, err)
			}
			if err := st.Close(); err != nil {
				t.Error(err)
			}
			if n, err := st.Read(got); n != 0 || !errors.Is(err, io.EOF) {
				t.Errorf("after the end: %d, %v", n, err)
			}
		})
	}
	wg.Wait()
}

func TestServerResetsTooManyStreams(t *testing.T) {
	c := echo(t, 1)
	first, err := c.OpenStream()
	if err != nil {
		t.Fatal(err)
	}
	second, err := c.OpenStream()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := second.Read(make([]byte, 1)); !errors.Is(err, yamux.ErrConnectionReset) {
		t.Errorf("second: %v", err)
	}
	if _, err := first.Write([]byte("x")); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(first, make([]byte, 1)); err != nil {
		t.Error(err)
	}
}

// Whoever waits when a session ends waits no longer, and is told.
func TestServerEnds(t *testing.T) {
	var st *Stream
	gone := make(chan struct{})
	s := NewServer(io.Discard, 4, func(x *Stream) {
		st = x
		x.OnGone(func() { close(gone) })
	})
	if err := s.Feed([]byte{0, typeWindow, 0, flagSYN, 0, 0, 0, 1, 0, 0, 0, 0}); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 2)
	go func() {
		_, err := st.Read(make([]byte, 1))
		done <- err
	}()
	go func() {
		_, err := st.Write(make([]byte, 2*window))
		done <- err
	}()
	s.Close()
	<-gone
	for range 2 {
		if err := <-done; !errors.Is(err, ErrSessionEnd) {
			t.Error(err)
		}
	}
}

// FuzzServer: no bytes of a host make the agent panic, or keep more than the windows of its streams.
func FuzzServer(f *testing.F) {
	open := []byte{0, typeWindow, 0, flagSYN, 0, 0, 0, 1, 0, 0, 0, 0}
	f.Add(open)
	f.Add(append(open, 0, typeData, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 'h', 'i'))
	f.Add(append(open, 0, typeData, 0, flagFIN, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff, 'x'))
	f.Add([]byte{0, typePing, 0, flagSYN, 0, 0, 0, 0, 0, 0, 0, 7})
	f.Fuzz(func(t *testing.T, b []byte) {
		var streams []*Stream
		s := NewServer(io.Discard, 4, func(st *Stream) { streams = append(streams, st) })
		_ = s.Feed(b)
		for _, st := range streams {
			if n := len(st.in) - st.read; n > window {
				t.Errorf("%d bytes are kept", n)
			}
		}
		s.Close()
	})
}
