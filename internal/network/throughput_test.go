package network_test

import (
	"io"
	"net"
	"testing"

	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/networktest"
)

// BenchmarkThroughput moves bytes between a guest in this process and a server on loopback, which costs a second stack.
func BenchmarkThroughput(b *testing.B) {
	const block = 1 << 20
	discard := serve(b, func(conn net.Conn) {
		_, _ = io.Copy(io.Discard, conn)
	})
	source := serve(b, func(conn net.Conn) {
		buf := make([]byte, block)
		for {
			if _, err := conn.Write(buf); err != nil {
				return
			}
		}
	})
	outer := &networktest.Outer{Hosts: map[string]string{"203.0.114.1:1": discard, "203.0.114.1:2": source, "203.0.114.1:3": echo(b)}}
	w := start(b, network.Config{Outer: outer, Policy: policy(b, "203.0.114.0/24"), Limits: network.Limits{FlowsPerSecond: 1e6}})
	buf := make([]byte, block)
	b.Run("up", func(b *testing.B) {
		conn, err := w.DialTCP(b.Context(), "203.0.114.1:1")
		if err != nil {
			b.Fatal(err)
		}
		b.SetBytes(block)
		for b.Loop() {
			if _, err := conn.Write(buf); err != nil {
				b.Fatal(err)
			}
		}
		_ = conn.CloseWrite()
		_, _ = io.ReadAll(conn)
		_ = conn.Close()
	})
	b.Run("down", func(b *testing.B) {
		conn, err := w.DialTCP(b.Context(), "203.0.114.1:2")
		if err != nil {
			b.Fatal(err)
		}
		b.SetBytes(block)
		for b.Loop() {
			if _, err := io.ReadFull(conn, buf); err != nil {
				b.Fatal(err)
			}
		}
		_ = conn.Close()
	})
	b.Run("round-trip", func(b *testing.B) {
		conn, err := w.DialTCP(b.Context(), "203.0.114.1:3")
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			if _, err := conn.Write(buf[:1]); err != nil {
				b.Fatal(err)
			}
			if _, err := io.ReadFull(conn, buf[:1]); err != nil {
				b.Fatal(err)
			}
		}
		_ = conn.Close()
	})
	b.Run("connect", func(b *testing.B) {
		for b.Loop() {
			conn, err := w.DialTCP(b.Context(), "203.0.114.1:3")
			if err != nil {
				b.Fatal(err)
			}
			_ = conn.Close()
		}
	})
	b.Logf("%+v", w.Totals())
}
