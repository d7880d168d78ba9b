package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

type buffer struct{ bytes.Buffer }

func (*buffer) Close() error { return nil }

func TestStreamRoundTrip(t *testing.T) {
	b := &buffer{}
	s := NewStream(b)
	big := strings.Repeat("x", 3*MaxPayload+7)
	for _, err := range []error{
		s.SendRequest("a.B", map[string]string{"code": big}),
		s.Send(KindStdout, []byte("hello")),
		s.SendMessage([]int{1, 2}),
		s.HalfClose(),
		s.End(),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	r := NewStream(b)
	kind, p, err := r.Recv()
	if err != nil || kind != KindRequest {
		t.Fatalf("got %q, %v", kind, err)
	}
	method, body, err := SplitRequest(p)
	if err != nil || method != "a.B" || len(body) != len(big)+len(`{"code":""}`) {
		t.Fatalf("method %q, %d bytes, %v", method, len(body), err)
	}
	if kind, p, err = r.Recv(); err != nil || kind != KindStdout || string(p) != "hello" {
		t.Fatalf("got %q %q %v", kind, p, err)
	}
	var got []int
	if err := r.RecvMessage(&got); err != nil || !cmp.Equal(got, []int{1, 2}) {
		t.Fatalf("got %v, %v", got, err)
	}
	if kind, _, err = r.Recv(); err != nil || kind != KindHalfClose {
		t.Fatalf("got %q, %v", kind, err)
	}
	for range 2 {
		if _, _, err = r.Recv(); !errors.Is(err, io.EOF) {
			t.Fatalf("got %v, want EOF", err)
		}
	}
}

func TestStreamError(t *testing.T) {
	b := &buffer{}
	if err := NewStream(b).SendError(CodeNotFound, "no such thing"); err != nil {
		t.Fatal(err)
	}
	_, _, err := NewStream(b).Recv()
	if diff := cmp.Diff(&Error{Code: CodeNotFound, Message: "no such thing"}, err); diff != "" {
		t.Fatal(diff)
	}
}

func TestStreamRefuses(t *testing.T) {
	header := func(k byte, n uint32) string {
		return string(binary.BigEndian.AppendUint32([]byte{k}, n))
	}
	endless := strings.Repeat(header('m', MaxPayload)+strings.Repeat("x", MaxPayload), MaxMessage/MaxPayload+1)
	for name, in := range map[string]string{
		"unknown kind":     header('?', 0),
		"part of data":     header('d', 0),
		"too long":         header('D', MaxPayload+1),
		"endless message":  endless,
		"cut header":       "D\x00",
		"cut payload":      header('D', 5) + "abc",
		"nothing":          "",
		"unreadable error": header('X', 3) + "abc",
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := NewStream(&buffer{*bytes.NewBufferString(in)}).Recv()
			if err == nil || errors.Is(err, io.EOF) {
				t.Fatalf("got %v", err)
			}
		})
	}
}

func TestReadAheadTellsThatThePeerIsGone(t *testing.T) {
	here, there := net.Pipe()
	s := NewStream(here)
	s.StartReadAhead()
	gone := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		once := false
		s.ReadAhead(func() {
			if !once {
				once = true
				close(gone)
			}
		})
	}()
	peer := NewStream(there)
	go func() {
		for _, p := range []string{"one", "two", "three"} {
			_ = peer.Send(KindData, []byte(p))
		}
		_ = peer.Close()
	}()
	for _, want := range []string{"one", "two", "three"} {
		if _, p, err := s.Recv(); err != nil || string(p) != want {
			t.Fatalf("got %q, %v", p, err)
		}
	}
	<-gone // without a Recv
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	<-done
}

func FuzzStream(f *testing.F) {
	b := &buffer{}
	s := NewStream(b)
	_ = s.SendRequest("a.B", 1)
	_ = s.Send(KindStdin, make([]byte, 100))
	_ = s.End()
	f.Add(b.Bytes())
	f.Add([]byte("m\x00\x00\x00\x01{M\x00\x00\x00\x01}"))
	f.Fuzz(func(t *testing.T, in []byte) {
		s := NewStream(&buffer{*bytes.NewBuffer(in)})
		for total := 0; ; {
			_, p, err := s.Recv()
			if err != nil {
				return
			}
			if total += len(p); total > len(in) {
				t.Fatalf("%d payload bytes out of %d", total, len(in))
			}
		}
	})
}
