package pin

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func at(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }

func addrs(texts ...string) []netip.Addr {
	var out []netip.Addr
	for _, text := range texts {
		out = append(out, netip.MustParseAddr(text))
	}
	return out
}

func TestTable(t *testing.T) {
	table := New(0)
	table.Add("a.example", addrs("8.8.8.8", "2600::1"), at(0), at(10))
	table.Add("b.example", addrs("8.8.8.8"), at(1), at(20))
	table.Add("a.example", addrs("8.8.8.8"), at(2), at(5)) // no earlier than was promised
	for _, c := range []struct {
		addr   string
		second int
		want   []string
	}{
		{"8.8.8.8", 3, []string{"b.example", "a.example"}},
		{"8.8.8.8", 9, []string{"b.example", "a.example"}},
		{"8.8.8.8", 10, []string{"b.example"}},
		{"8.8.8.8", 20, nil},
		{"2600::1", 9, []string{"a.example"}},
		{"2600::1", 10, nil},
		{"9.9.9.9", 0, nil},
	} {
		if got := table.Names(netip.MustParseAddr(c.addr), at(c.second)); !slices.Equal(got, c.want) {
			t.Errorf("%s after %d s: %v, want %v", c.addr, c.second, got, c.want)
		}
	}
}

// TestBounds: neither many addresses nor many names of one make a table grow, and what was given last is what stays.
func TestBounds(t *testing.T) {
	table := New(100)
	for i := range 5000 {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], uint32(i)+1<<24)
		a := netip.AddrFrom4(b)
		table.Add("a.example", []netip.Addr{a}, at(i), at(i+3600))
		if table.Len() > 100 {
			t.Fatalf("%d addresses after %d", table.Len(), i)
		}
		if len(table.Names(a, at(i))) != 1 {
			t.Fatal("what was just given is forgotten")
		}
	}
	for i := range 500 {
		table.Add(fmt.Sprintf("%d.example", i), addrs("8.8.8.8"), at(6000), at(9000))
	}
	names := table.Names(netip.MustParseAddr("8.8.8.8"), at(6000))
	if len(names) != MaxNames || names[len(names)-1] != "499.example" {
		t.Errorf("%d names, the last %q", len(names), names[len(names)-1])
	}
	// Nor do many names of many addresses.
	full := New(100)
	for i := range 5000 {
		a := netip.AddrFrom4([4]byte{8, 8, 8, byte(i % 100)})
		full.Add(fmt.Sprintf("%d.example", i), []netip.Addr{a}, at(0), at(9000))
		if got := full.Names(a, at(0)); len(got) == 0 || got[len(got)-1] != fmt.Sprintf("%d.example", i) {
			t.Fatal("what was just given is forgotten")
		}
	}
	held := 0
	for i := range 100 {
		held += len(full.Names(netip.AddrFrom4([4]byte{8, 8, 8, byte(i)}), at(0)))
	}
	if held > 400 || held != full.names {
		t.Errorf("%d names are held, %d are counted", held, full.names)
	}
	// What has expired makes room for itself.
	late := New(2)
	late.Add("a.example", addrs("8.8.8.8", "8.8.4.4"), at(0), at(1))
	late.Add("b.example", addrs("9.9.9.9"), at(5), at(9))
	if late.Len() != 1 {
		t.Errorf("%d addresses are held, of which one is alive", late.Len())
	}
}

// TestList: what is told is what is remembered, and where that is too much, what lasts longest.
func TestList(t *testing.T) {
	now := time.Unix(1000, 0)
	table := New(0)
	a, b := netip.MustParseAddr("203.0.114.1"), netip.MustParseAddr("203.0.114.2")
	table.Add("old.example", []netip.Addr{a}, now, now.Add(time.Second))
	table.Add("one.example", []netip.Addr{a, b}, now, now.Add(time.Minute))
	table.Add("two.example", []netip.Addr{b}, now, now.Add(time.Hour))
	later := now.Add(2 * time.Second)
	want := []Pin{
		{Addr: b, Name: "two.example", Until: now.Add(time.Hour)},
		{Addr: a, Name: "one.example", Until: now.Add(time.Minute)},
		{Addr: b, Name: "one.example", Until: now.Add(time.Minute)},
	}
	if got := table.List(later, 10); !slices.Equal(got, want) {
		t.Errorf("%+v", got)
	}
	if got := table.List(later, 1); !slices.Equal(got, want[:1]) {
		t.Errorf("%+v", got)
	}
}
