package mux

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/yamux"
)

// peers are what the host's side talks to: the agent's, and the yamux that agents of version 1 have.
func peers() map[string]func(t *testing.T, conn net.Conn) {
	return map[string]func(t *testing.T, conn net.Conn){
		"server": func(t *testing.T, conn net.Conn) {
			t.Helper()
			var running sync.WaitGroup
			s := NewServer(conn, 64, func(st *Stream) {
				running.Go(func() {
					defer st.Close()
					_, _ = io.Copy(st, st)
				})
			})
			running.Go(func() {
				defer s.Close()
				buf := make([]byte, 1000)
				for {
					n, err := conn.Read(buf)
					if err != nil || s.Feed(buf[:n]) != nil {
						return
					}
				}
			})
			t.Cleanup(running.Wait)
		},
		"yamux": func(t *testing.T, conn net.Conn) {
			t.Helper()
			s, err := yamux.Server(conn, &yamux.Config{
				AcceptBacklog: 64, KeepAliveInterval: time.Hour, ConnectionWriteTimeout: time.Hour, MaxStreamWindowSize: window,
				LogOutput: io.Discard,
			})
			if err != nil {
				t.Fatal(err)
			}
			var running sync.WaitGroup
			running.Go(func() {
				for {
					st, err := s.AcceptStream()
					if err != nil {
						return
					}
					running.Go(func() {
						defer st.Close()
						_, _ = io.Copy(st, st)
					})
				}
			})
			t.Cleanup(func() {
				_ = s.Close()
				running.Wait()
			})
		},
	}
}

func TestClientSpeaksYamux(t *testing.T) {
	for name, peer := range peers() {
		t.Run(name, func(t *testing.T) {
			here, there := net.Pipe()
			peer(t, there)
			c := Client(here, 64)
			t.Cleanup(func() { _ = c.Close() })
			var wg sync.WaitGroup
			for round := range 3 {
				for i := range 16 {
					wg.Go(func() { echoes(t, c, bytes.Repeat([]byte{byte(i)}, round*window+i)) })
				}
				wg.Wait()
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.err != nil {
				t.Fatal(c.err)
			}
		})
	}
}

func echoes(t *testing.T, c *Session, want []byte) {
	t.Helper()
	st, err := c.Open(t.Context())
	if err != nil {
		t.Error(err)
		return
	}
	written := make(chan error, 1)
	go func() {
		_, err := st.Write(want)
		written <- err
	}()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(st, got); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes: %v", len(want), err)
	}
	if err := <-written; err != nil {
		t.Error(err)
	}
	if err := st.Close(); err != nil {
		t.Error(err)
	}
}

// A guest that takes no byte holds up nobody beyond their deadlines, and the session can be closed.
func TestClientOfAGuestThatTakesNothing(t *testing.T) {
	here, _ := net.Pipe()
	c := Client(here, 2)
	var open []*ClientStream
	for range 2 {
		st, err := c.Open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, st)
		_ = st.SetDeadline(time.Now().Add(20 * time.Millisecond))
		if n, err := st.Write(make([]byte, 4*window)); !errors.Is(err, os.ErrDeadlineExceeded) || n > window {
			t.Errorf("wrote %d bytes: %v", n, err)
		}
		if _, err := st.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error(err)
		}
		if kept := len(st.out); kept > maxOut {
			t.Errorf("%d bytes are kept", kept)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := c.Open(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("one stream too many: %v", err)
	}
	for _, st := range open {
		_ = st.Close()
	}
	_ = c.Close()
	if _, err := c.Open(t.Context()); !errors.Is(err, ErrSessionEnd) {
		t.Error(err)
	}
}

// header is a frame's.
func header(kind, flags byte, id, length uint32) []byte {
	b := []byte{version, kind, 0, flags}
	b = binary.BigEndian.AppendUint32(b, id)
	return binary.BigEndian.AppendUint32(b, length)
}

func TestHostileFrames(t *testing.T) {
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	for name, frames := range map[string][]byte{
		"ping":                        header(2, flagSYN, 0, 1),
		"ping answer":                 header(2, flagACK, 0, 1),
		"go away":                     header(typeGoAway, 0, 0, 0),
		"opens a stream":              header(typeWindow, flagSYN, 2, 0),
		"opens one of the host's":     header(typeWindow, flagSYN, 1, 0),
		"unknown kind":                header(9, 0, 1, 0),
		"unknown version":             {9, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0},
		"unknown flag":                header(typeData, 0x40, 1, 0),
		"high flags":                  {0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0},
		"a stream that never was":     header(typeData, 0, 101, 0),
		"an even stream":              header(typeData, 0, 2, 0),
		"stream zero":                 header(typeData, 0, 0, 0),
		"the highest stream":          header(typeData, 0, 1<<32-1, 0),
		"beyond its window":           header(typeData, 0, 1, window+1),
		"four gigabytes":              header(typeData, 0, 1, 1<<32-1),
		"more than its window":        join(header(typeData, 0, 1, window), make([]byte, window), header(typeData, 0, 1, 1)),
		"grants too much":             header(typeWindow, 0, 1, 100),
		"grants four gigabytes":       header(typeWindow, 0, 1, 1<<32-1),
		"ends twice":                  join(header(typeWindow, flagFIN, 1, 0), header(typeWindow, flagFIN, 1, 0)),
		"data after the end":          join(header(typeWindow, flagFIN, 1, 0), header(typeData, 0, 1, 1), []byte{1}),
		"empty frames":                bytes.Repeat(header(typeData, 0, 1, 0), 1000),
		"empty grants":                bytes.Repeat(header(typeWindow, flagACK, 1, 0), 1000),
		"four gigabytes for nobody":   join(header(typeWindow, flagRST, 1, 0), header(typeData, 0, 1, 1<<32-1), make([]byte, 1<<20)),
		"window after window":         join(header(typeWindow, flagRST, 1, 0), bytes.Repeat(join(header(typeData, 0, 1, 1<<10), make([]byte, 1<<10)), 1000)),
		"resets for nobody for ever":  bytes.Repeat(header(typeWindow, flagRST, 1, 0), 1000),
		"half a frame, then an ended": join(header(typeData, 0, 1, 10), []byte("half")),
	} {
		t.Run(name, func(t *testing.T) {
			here, there := net.Pipe()
			c := Client(here, 4)
			t.Cleanup(func() { _ = c.Close() })
			st, err := c.Open(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := st.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(there, make([]byte, headerSize+1)); err != nil {
				t.Fatal(err)
			}
			go func() {
				_, _ = there.Write(frames)
				_ = there.Close()
			}()
			<-c.Done()
			want := ErrHostile
			if name == "half a frame, then an ended" {
				want = io.ErrUnexpectedEOF
			}
			if !errors.Is(c.Err(), want) {
				t.Errorf("ended with %v", c.Err())
			}
			if n := len(st.in); n > window {
				t.Errorf("%d bytes are kept", n)
			}
			for err = nil; err == nil; {
				_, err = st.Read(make([]byte, window))
			}
		})
	}
}

// A guest that never closes a stream of ours is told after a while, and the stream makes room.
func TestClientGivesUp(t *testing.T) {
	here, there := net.Pipe()
	go func() { _, _ = io.Copy(io.Discard, there) }()
	c := Client(here, 1)
	t.Cleanup(func() { _ = c.Close() })
	st, err := c.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	_ = st.Close()
	st.patience.Reset(time.Millisecond)
	if _, err := c.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// FuzzClient: no bytes of a guest make the host panic, or keep more than the windows of its streams.
func FuzzClient(f *testing.F) {
	f.Add(header(typeWindow, flagACK, 1, 0))
	f.Add(append(header(typeData, flagACK, 1, 2), 'h', 'i'))
	f.Add(append(header(typeData, flagFIN, 1, 1), 'x', 0))
	f.Add(header(typeWindow, flagRST, 3, 1))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := &Session{
			conn: nopCloser{}, slots: make(chan struct{}, 4), kick: make(chan struct{}, 1), done: make(chan struct{}),
			streams: map[uint32]*ClientStream{}, nextID: 1, mayWaste: window,
		}
		var streams []*ClientStream
		for range 2 {
			st, err := s.Open(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			_, _ = st.Write([]byte("request"))
			streams = append(streams, st)
		}
		s.batch(nil)
		err := s.feed(b)
		for _, st := range streams {
			if n := len(st.in) - st.read; n > window {
				t.Errorf("%d bytes are kept", n)
			}
			if st.room > window {
				t.Errorf("the guest may be sent %d bytes", st.room)
			}
			_ = st.Close()
		}
		s.end(err)
	})
}

type nopCloser struct{ io.ReadWriter }

func (nopCloser) Close() error { return nil }
