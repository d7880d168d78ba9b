package inspect

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	nethttp "net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// result is what a Scanner made of a flow.
type result struct {
	found  []Finding
	passed []byte
	err    error
}

// scan gives a flow to a Scanner in pieces of the given sizes, over and over.
func scan(t testing.TB, input []byte, sizes ...int) result {
	var r result
	s := NewScanner(func(f Finding) error {
		r.found = append(r.found, f)
		return nil
	})
	for i := 0; len(input) > 0; i++ {
		n := min(max(sizes[i%len(sizes)], 1), len(input))
		pass, err := s.Scan(input[:n])
		r.passed = append(r.passed, pass...)
		if len(pass) > 0 && len(r.found) == 0 {
			t.Fatalf("%q passes before anything was asked", pass)
		}
		if len(s.rest) > MaxHeld {
			t.Fatalf("%d bytes are held", len(s.rest))
		}
		if err != nil {
			r.err = err
			if again, same := s.Scan([]byte("more")); again != nil || same == nil {
				t.Fatal("something passes after an error")
			}
			return r
		}
		input = input[n:]
	}
	pass, err := s.End()
	r.passed, r.err = append(r.passed, pass...), err
	return r
}

func names(found []Finding) string {
	var out []string
	for _, f := range found {
		text := map[Kind]string{TLS: "tls", HTTP: "http", Opaque: "opaque"}[f.Kind] + ":" + f.Name
		if f.Hidden {
			text += " hidden"
		}
		out = append(out, text)
	}
	return strings.Join(out, ", ")
}

// check scans whole, in single bytes, and in odd pieces, and wants the same of each.
func check(t *testing.T, name, input, found, problem string) {
	t.Helper()
	for _, sizes := range [][]int{{1 << 20}, {1}, {7, 1, 3}} {
		r := scan(t, []byte(input), sizes...)
		if got := names(r.found); got != found {
			t.Errorf("%s in pieces of %v: found %q, want %q", name, sizes, got, found)
		}
		switch {
		case problem == "" && r.err != nil:
			t.Errorf("%s in pieces of %v: %v", name, sizes, r.err)
		case problem == "" && string(r.passed) != input:
			t.Errorf("%s in pieces of %v: passed %q", name, sizes, r.passed)
		case problem != "" && (r.err == nil || !strings.Contains(r.err.Error(), problem) || !errors.Is(r.err, ErrMalformed)):
			t.Errorf("%s in pieces of %v: the error is %v, want %q", name, sizes, r.err, problem)
		case !strings.HasPrefix(input, string(r.passed)):
			t.Errorf("%s in pieces of %v: what passed is not what came: %q", name, sizes, r.passed)
		}
	}
}

func httpCases() map[string][3]string {
	const get = "GET / HTTP/1.1\r\nHost: a.example\r\n\r\n"
	return map[string][3]string{
		"plain":                  {get, "http:a.example", ""},
		"port":                   {"GET / HTTP/1.1\r\nHost: a.example:8080\r\n\r\n", "http:a.example", ""},
		"case of header":         {"GET / HTTP/1.1\r\nhOsT:a.example\t\r\n\r\n", "http:a.example", ""},
		"IPv6":                   {"GET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", "http:::1", ""},
		"address":                {"GET / HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n", "http:169.254.169.254", ""},
		"old without host":       {"GET / HTTP/1.0\r\n\r\n", "http:", ""},
		"without host":           {"GET / HTTP/1.1\r\n\r\n", "http:", ""},
		"empty host":             {"GET / HTTP/1.1\r\nHost:\r\n\r\n", "http:", ""},
		"pipelined":              {get + "HEAD /x HTTP/1.1\r\nHost: b.example\r\n\r\n", "http:a.example, http:b.example", ""},
		"body, then another":     {"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 4\r\n\r\nGET " + get, "http:a.example, http:a.example", ""},
		"body like a request":    {"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 37\r\n\r\nGET / HTTP/1.1\r\nHost: evil.example\r\n\r", "http:a.example", ""},
		"chunks, then another":   {"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nGET \r\nA;x=y\r\n0123456789\r\n0\r\nX: y\r\n\r\n" + get, "http:a.example, http:a.example", ""},
		"absolute":               {"GET http://a.example/x HTTP/1.1\r\nHost: A.example\r\n\r\n", "http:a.example", ""},
		"absolute, old":          {"GET http://a.example:80 HTTP/1.0\r\n\r\n", "http:a.example", ""},
		"options of all":         {"OPTIONS * HTTP/1.1\r\nHost: a.example\r\n\r\n", "http:a.example", ""},
		"empty line first":       {"\r\n" + get, "http:a.example", ""},
		"tunnel":                 {"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\n\r\n", "http:a.example", ""},
		"tunnel to another":      {"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n", "http:evil.example", ""},
		"request in a tunnel":    {"CONNECT a.example:80 HTTP/1.1\r\n\r\n" + get, "http:a.example, http:a.example", ""},
		"other method":           {"PROPFIND / HTTP/1.1\r\nHost: a.example\r\n\r\n", "http:a.example", ""},
		"upgrade without answer": {"GET / HTTP/1.1\r\nHost: a.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + get, "http:a.example, http:a.example", ""},

		"target and host differ":     {"GET http://evil.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", "", "differ"},
		"tunnel and host differ":     {"CONNECT evil.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n", "", "differ"},
		"two hosts":                  {"GET / HTTP/1.1\r\nHost: a.example\r\nHost: evil.example\r\n\r\n", "", "2 Host headers"},
		"host after a folded line":   {"GET / HTTP/1.1\r\nX: y\r\n Host: evil.example\r\nHost: a.example\r\n\r\n", "", "header's name"},
		"space before colon":         {"GET / HTTP/1.1\r\nHost : evil.example\r\nHost: a.example\r\n\r\n", "", "header's name"},
		"bare line feeds":            {"GET / HTTP/1.1\nHost: a.example\n\n", "", "CR LF"},
		"bare line feed in a header": {"GET / HTTP/1.1\r\nX: y\nHost: evil.example\r\nHost: a.example\r\n\r\n", "", "CR LF"},
		"bare carriage return":       {"GET / HTTP/1.1\r\nX: y\rHost: evil.example\r\nHost: a.example\r\n\r\n", "", "control character"},
		"NUL":                        {"GET / HTTP/1.1\r\nHost: a.example\x00.evil.example\r\n\r\n", "", "control character"},
		"userinfo":                   {"GET / HTTP/1.1\r\nHost: a.example@evil.example\r\n\r\n", "", "a host that is none"},
		"userinfo with password":     {"GET / HTTP/1.1\r\nHost: a.example:80@evil.example\r\n\r\n", "", "port is no number"},
		"userinfo in target":         {"GET http://a.example@evil.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", "", "a host that is none"},
		"list of hosts":              {"GET / HTTP/1.1\r\nHost: a.example, evil.example\r\n\r\n", "", "a host that is none"},
		"path in host":               {"GET / HTTP/1.1\r\nHost: a.example/evil\r\n\r\n", "", "a host that is none"},
		"backslash in URL":           {"GET http://evil.example\\@a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", "", "differ"},
		"other scheme":               {"GET gopher://evil.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", "", "neither a path nor a URL"},
		"neither path nor URL":       {"GET evil.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", "", "neither a path nor a URL"},
		"length and chunks":          {"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "", "more than one way"},
		"GET with a body":            {"GET / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 40\r\n\r\n" + get, "", "a GET with a body"},
		"HEAD with chunks":           {"HEAD / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "", "a HEAD with a body"},
		"GET with an empty body":     {"GET / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 0\r\n\r\n" + strings.Replace(get, "a.", "b.", 1), "http:a.example, http:b.example", ""},
		"two lengths":                {"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 4\r\nContent-Length: 4\r\n\r\n1234", "", "more than one way"},
		"list of lengths":            {"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 4, 4\r\n\r\n1234", "", "no number"},
		"signed length":              {"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: +4\r\n\r\n1234", "", "no number"},
		"huge length":                {"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 18446744073709551616\r\n\r\n1234", "", "no number"},
		"chunks of 1.0":              {"POST / HTTP/1.0\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "", "more than one way"},
		"other encoding":             {"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: xchunked\r\n\r\n", "", "other than chunked"},
		"encodings":                  {"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked, identity\r\n\r\n", "", "other than chunked"},
		"encoding with a tab":        {"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding:\vchunked\r\n\r\n", "", "control character"},
		"chunk with a sign":          {"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n+4\r\n", "http:a.example", "no number"},
		"chunk with a prefix":        {"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n0x4\r\n", "http:a.example", "no number"},
		"chunk too large":            {"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", "http:a.example", "no number"},
		"chunk longer than it said":  {"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n", "http:a.example", "longer than it said"},
		"host in a trailer":          {"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nHost: evil.example\r\n\r\n", "http:a.example", "trailer"},
		"second is no request":       {get + "\x16\x03\x01", "http:a.example", ""},
		"HTTP/0.9":                   {"GET /\r\n", "", "HTTP/0.9"},
		"HTTP/2":                     {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "", "HTTP/2"},
		"HTTP/3":                     {"GET / HTTP/3.0\r\nHost: a.example\r\n\r\n", "", "a version other"},
		"lower version":              {"GET / http/1.1\r\nHost: a.example\r\n\r\n", "", "a version other"},
		"tab for space":              {"GET\t/ HTTP/1.1\r\nHost: a.example\r\n\r\n", "", "METHOD TARGET VERSION"},
		"two spaces":                 {"GET  / HTTP/1.1\r\nHost: a.example\r\n\r\n", "", "METHOD TARGET VERSION"},
		"space in target":            {"GET /x y HTTP/1.1\r\nHost: a.example\r\n\r\n", "", "METHOD TARGET VERSION"},
		"space first":                {" GET / HTTP/1.1\r\nHost: a.example\r\n\r\n", "", "METHOD TARGET VERSION"},
		"line feed first":            {"\n" + get, "", "CR LF"},
		"many empty lines":           {"\r\n\r\n\r\n" + get, "", "empty lines"},
		"proxy's header":             {"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n" + get, "", "proxy's connection"},
		"proxy's header, binary":     {"\r\n\r\n\x00\r\nQUIT\n!" + get, "", "proxy's connection"},
		"tunnels":                    {strings.Repeat("CONNECT a.example:80 HTTP/1.1\r\n\r\n", 3), strings.Repeat("http:a.example, ", 2) + "http:a.example", "tunnels within tunnels"},
		"head too large":             {"GET / HTTP/1.1\r\nX: " + strings.Repeat("y", MaxHeld) + "\r\n\r\n", "", "do not say which server"},
		"long host":                  {"GET / HTTP/1.1\r\nHost: " + strings.Repeat("a", 256) + "\r\n\r\n", "", "a host that is none"},
		"long host of a URL":         {"GET http://" + strings.Repeat("a", 256) + "/ HTTP/1.1\r\n\r\n", "", "a host that is none"},
		"head without end":           {"GET / HTTP/1.1\r\nHost: a.example\r\n", "", "ends before"},
		"line without end":           {"GET ", "", "ends before"},
	}
}

func TestHTTP(t *testing.T) {
	for name, c := range httpCases() {
		if name == "second is no request" {
			continue // what is held at the end does not pass
		}
		check(t, name, c[0], c[1], c[2])
	}
	r := scan(t, []byte(httpCases()["second is no request"][0]), 1)
	if r.err != nil || names(r.found) != "http:a.example" || bytes.Contains(r.passed, []byte{0x16}) {
		t.Errorf("what is no request after one: %v, passed %q", r.err, r.passed)
	}
}

func TestOpaque(t *testing.T) {
	for name, input := range map[string]string{
		"ssh": "SSH-2.0-OpenSSH_9.2\r\n", "smtp": "EHLO x.example\r\n", "redis": "*1\r\n$4\r\nPING\r\n", "redis, inline": "PING\r\n",
		"postgres": "\x00\x00\x00\x08\x04\xd2\x16\x2f", "amqp": "AMQP\x00\x00\x09\x01", "one byte": "x", "irc": "NICK x\r\n", "nul": "GET x\x00",
		"length": "\x16\x00\x00\x00\x01\x02\x03", "old TLS": "\x80\x2e\x01\x03\x01", "word": "hello", "bittorrent": "\x13BitTorrent protocol", "git": "0032git-upload-pack /x\x00host=a\x00",
	} {
		check(t, name, input, "opaque:", "")
	}
}

// hello is a client hello's record.
func hello(name string, extensions ...[]byte) []byte {
	var all []byte
	if name != "" {
		all = append(all, extension(extensionServerName, prefixed(2, slices.Concat([]byte{0}, prefixed(2, []byte(name)))))...)
	}
	for _, e := range extensions {
		all = append(all, e...)
	}
	body := slices.Concat([]byte{3, 3}, make([]byte, 32), []byte{0}, []byte{0, 2, 0x13, 1}, []byte{1, 0}, prefixed(2, all))
	return record(recordHandshake, slices.Concat([]byte{1}, prefixed(3, body)))
}

func extension(kind uint16, body []byte) []byte {
	return slices.Concat(binary.BigEndian.AppendUint16(nil, kind), prefixed(2, body))
}

func prefixed(size int, b []byte) []byte {
	length := binary.BigEndian.AppendUint32(nil, uint32(len(b)))
	return slices.Concat(length[4-size:], b)
}

func record(kind byte, payload []byte) []byte {
	return slices.Concat([]byte{kind, 3, 1}, prefixed(2, payload))
}

// split makes records of n bytes of one record.
func split(one []byte, n int) []byte {
	var out []byte
	for part := range slices.Chunk(one[recordHeader:], n) {
		out = append(out, record(one[0], part)...)
	}
	return out
}

func tlsCases() map[string][3]string {
	a := string(hello("a.example"))
	data := string(record(recordData, []byte("secret")))
	changed := string(record(recordChangeCipher, []byte{1}))
	key := string(record(recordHandshake, []byte("\x10\x00\x00\x04abcd")))
	grease := extension(0x0a0a, nil)
	return map[string][3]string{
		"plain":              {a + data, "tls:a.example", ""},
		"alone":              {a, "tls:a.example", ""},
		"case":               {string(hello("A.Example.")), "tls:A.Example.", ""},
		"in records of one":  {string(split(hello("a.example"), 1)) + data, "tls:a.example", ""},
		"in two records":     {string(split(hello("a.example"), 50)) + data, "tls:a.example", ""},
		"no name":            {string(hello("")), "tls:", ""},
		"no extensions":      {string(record(22, slices.Concat([]byte{1}, prefixed(3, slices.Concat([]byte{3, 1}, make([]byte, 32), []byte{0, 0, 2, 0, 5, 1, 0}))))), "tls:", ""},
		"address":            {string(hello("169.254.169.254")), "tls:169.254.169.254", ""},
		"grease":             {string(hello("a.example", grease)), "tls:a.example", ""},
		"ECH":                {string(hello("a.example", extension(extensionECH, []byte{0, 0}))), "tls:a.example hidden", ""},
		"ESNI":               {string(hello("", extension(extensionESNI, []byte{0, 0}))), "tls: hidden", ""},
		"TLS 1.2":            {a + key + changed + string(record(22, bytes.Repeat([]byte{9}, 40))) + data, "tls:a.example", ""},
		"like a hello":       {a + changed + string(record(22, bytes.Repeat([]byte{1}, 40))) + data, "tls:a.example", ""},
		"again, as it was":   {a + changed + a + data, "tls:a.example", ""},
		"data is not looked": {a + data + "GET / HTTP/1.1\r\n", "tls:a.example", ""},
		"after an alert":     {a + string(record(21, []byte{1, 0})) + "", "tls:a.example", ""},

		"again, for another":       {a + changed + string(hello("evil.example")) + data, "tls:a.example", "another server"},
		"again, in pieces":         {a + string(split(hello("evil.example"), 20)), "tls:a.example", "another server"},
		"again, in tiny pieces":    {a + string(split(hello("evil.example"), 3)), "tls:a.example", "in pieces of 3"},
		"again, hidden":            {a + string(hello("a.example", extension(extensionECH, []byte{0, 0}))), "tls:a.example", "another server"},
		"two names":                {string(hello("a.example", extension(0, prefixed(2, slices.Concat([]byte{0}, prefixed(2, []byte("evil.example"))))))), "", "repeated extension"},
		"two names in a list":      {string(hello("", extension(0, prefixed(2, slices.Concat([]byte{0}, prefixed(2, []byte("a.example")), []byte{0}, prefixed(2, []byte("evil.example"))))))), "", "server name"},
		"other kind of name":       {string(hello("", extension(0, prefixed(2, slices.Concat([]byte{1}, prefixed(2, []byte("a.example"))))))), "", "server name"},
		"empty name":               {string(hello("", extension(0, prefixed(2, []byte{0, 0, 0})))), "", "server name"},
		"NUL in name":              {string(hello("a.example\x00.evil.example")), "", "server name"},
		"long name":                {string(hello(strings.Repeat("a", 256))), "", "server name"},
		"bytes after the name":     {string(hello("", extension(0, slices.Concat(prefixed(2, slices.Concat([]byte{0}, prefixed(2, []byte("a.example")))), []byte{0})))), "", "server name"},
		"alert first":              {string(record(21, []byte{1, 0})) + string(hello("evil.example")), "", "begin with a client hello"},
		"data first":               {data + a, "", "begin with a client hello"},
		"change of cipher first":   {changed + a, "", "begin with a client hello"},
		"alert within":             {string(split(hello("a.example"), 50)[:55]) + string(record(21, []byte{1, 0})), "", "within the client hello"},
		"empty record":             {"\x16\x03\x01\x00\x00" + a, "", "0 bytes"},
		"large record":             {"\x16\x03\x01\xff\xff" + a, "", "65535 bytes"},
		"server hello":             {string(record(22, []byte{2, 0, 0, 2, 3, 3})), "", "message 2"},
		"huge hello":               {string(record(22, []byte{1, 0xff, 0xff, 0xff, 3, 3})), "", "16777215 bytes"},
		"bytes after the hello":    {string(record(22, append(hello("a.example")[5:], 1, 2))), "", "bytes after"},
		"cut in an extension":      {string(record(22, append([]byte{1, 0, 0, 47}, hello("a.example")[9:56]...))), "", "cannot be read"},
		"without an end":           {a[:30], "", "ends before"},
		"one byte":                 {"\x16", "", "ends before"},
		"records without data":     {a + strings.Repeat(changed, maxRecords+1), "tls:a.example", "before any data"},
		"in a tunnel":              {"CONNECT a.example:443 HTTP/1.1\r\n\r\n" + string(hello("evil.example")) + data, "http:a.example, tls:evil.example", ""},
		"broken in a tunnel":       {"CONNECT a.example:443 HTTP/1.1\r\n\r\n" + data, "http:a.example", "begin with a client hello"},
		"version of nobody's":      {"\x16\x01" + a[2:], "", "TLS of version 1"},
		"alert of nobody's":        {"\x15\x00\x00\x00\x02\x01\x00" + a, "", "TLS of version 0"},
		"version of another world": {"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x09", "", "cannot be read"},
	}
}

func TestTLS(t *testing.T) {
	for name, c := range tlsCases() {
		check(t, name, c[0], c[1], c[2])
	}
}

// TestRealClients: what Go's own client sends is understood, with and without a name.
func TestRealClients(t *testing.T) {
	for _, c := range []struct {
		config *tls.Config
		want   string
	}{
		{&tls.Config{ServerName: "a.example"}, "tls:a.example"},
		{&tls.Config{InsecureSkipVerify: true}, "tls:"}, //nolint:gosec // so that it names none
		{&tls.Config{ServerName: "a.example", MaxVersion: tls.VersionTLS12}, "tls:a.example"},
	} {
		if got := scan(t, firstFlight(t, c.config), 100); names(got.found) != c.want || got.err != nil {
			t.Errorf("found %q (%v), want %q", names(got.found), got.err, c.want)
		}
	}
}

func firstFlight(t *testing.T, config *tls.Config) []byte {
	here, there := net.Pipe()
	defer there.Close()
	go func() {
		_ = tls.Client(here, config).HandshakeContext(context.WithoutCancel(t.Context()))
		_ = here.Close()
	}()
	buffer := make([]byte, 1<<16)
	n, err := there.Read(buffer)
	if err != nil {
		t.Fatal(err)
	}
	return buffer[:n]
}

// TestAskRefuses: the refusal is what Scan returns, and nothing of what was refused passes.
func TestAskRefuses(t *testing.T) {
	no := errors.New("no")
	for _, input := range []string{string(hello("evil.example")), "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", "\x00\x01", "one\r\n"} {
		s := NewScanner(func(Finding) error { return no })
		pass, err := s.Scan([]byte(input))
		if len(pass) != 0 || !errors.Is(err, no) {
			t.Errorf("%q: passed %q, %v", input, pass, err)
		}
	}
	// A second request's refusal does not let its own bytes through, the first's may have left.
	const first = "GET / HTTP/1.1\r\nHost: a.example\r\n\r\n"
	s := NewScanner(func(f Finding) error {
		if f.Name != "a.example" {
			return no
		}
		return nil
	})
	if pass, err := s.Scan([]byte(first)); err != nil || string(pass) != first {
		t.Fatalf("passed %q, %v", pass, err)
	}
	if pass, err := s.Scan([]byte("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")); len(pass) != 0 || !errors.Is(err, no) {
		t.Errorf("passed %q, %v", pass, err)
	}
}

// TestWebSocket: after the server's own 101 the flow is no longer read as requests; without it, it is.
func TestWebSocket(t *testing.T) {
	const up = "GET / HTTP/1.1\r\nHost: a.example\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n\r\n"
	const smuggled = "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"
	for name, c := range map[string]struct {
		before string
		answer []string
		want   string
	}{
		"switched":           {up, []string{"HTTP/1.1 101 Switching Protocols\r\n"}, "http:a.example"},
		"switched in pieces": {up, []string{"HTTP/1.", "1 101", " x"}, "http:a.example"},
		"refused":            {up, []string{"HTTP/1.1 200 OK\r\n"}, "http:a.example, http:evil.example"},
		"not yet":            {up, nil, "http:a.example, http:evil.example"},
		"not asked for":      {"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n", []string{"HTTP/1.1 101 x\r\n"}, "http:a.example, http:evil.example"},
		"h2c":                {strings.Replace(up, "WebSocket", "h2c", 1), []string{"HTTP/1.1 101 x\r\n"}, "http:a.example, http:evil.example"},
		"an earlier answer":  {"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n" + up, []string{"HTTP/1.1 101 x\r\n"}, strings.Repeat("http:a.example, ", 2) + "http:evil.example"},
	} {
		var found []Finding
		s := NewScanner(func(f Finding) error { found = append(found, f); return nil })
		if _, err := s.Scan([]byte(c.before)); err != nil {
			t.Fatal(err)
		}
		for _, part := range c.answer {
			s.Answered([]byte(part))
		}
		pass, err := s.Scan([]byte(smuggled))
		if err != nil || string(pass) != smuggled || names(found) != c.want {
			t.Errorf("%s: passed %q, %v, found %q, want %q", name, pass, err, names(found), c.want)
		}
	}
}

func TestHolding(t *testing.T) {
	s := NewScanner(func(Finding) error { return nil })
	if _, err := s.Scan([]byte("hel")); err != nil || !s.Holding() || s.Passing() {
		t.Errorf("of three letters: %v, holding %v, passing %v", err, s.Holding(), s.Passing())
	}
	if pass, err := s.End(); err != nil || string(pass) != "hel" || s.Holding() || s.Passing() {
		t.Errorf("at the end: %q, %v, holding %v, passing %v", pass, err, s.Holding(), s.Passing())
	}
	if pass, err := s.Scan([]byte("lo\r\n")); err != nil || string(pass) != "lo\r\n" || !s.Passing() {
		t.Errorf("after that: %q, %v, passing %v", pass, err, s.Passing())
	}
}

// TestSlow: who waits until the beginning of a line has passed for want of more cannot make a request or a hello of it.
func TestSlow(t *testing.T) {
	for _, c := range []struct {
		pieces  []string
		problem string
	}{
		{[]string{"l", "s", "\r\n", "GET / HTTP/1.1\r\n"}, ""},
		{[]string{"login", ": ", "me\n"}, ""},
		{[]string{"PROPF", "IND / HTTP/1.1\r\nHost: evil.example\r\n\r\n"}, "takes its time"},
		{[]string{"PROPF", "IND", " ", "/", " HTTP/1.1\r\n"}, "takes its time"},
		{[]string{"\r\n", "X / HTTP/1.1\r\n"}, "ends before"},
		{[]string{"GE", "T / HTTP/1.1\r\n"}, "ends before"},
		{[]string{" ", "GET /\r\n"}, "ends before"},
		{[]string{"\x15", string(record(21, []byte{1, 0})[1:]) + string(hello("evil.example"))}, "client hello"},
		{[]string{"\x17", "\x04"}, ""},
		{[]string{"\x16", "\x03"}, "ends before"},
		{[]string{"x", strings.Repeat("y", maxEarly)}, "takes its time"},
	} {
		s := NewScanner(func(Finding) error { return nil })
		var err error
		for _, piece := range c.pieces {
			if _, err = s.Scan([]byte(piece)); err == nil {
				_, err = s.End()
			}
			if err != nil {
				break
			}
		}
		if (c.problem == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.problem) {
			t.Errorf("%q: %v, want %q", c.pieces, err, c.problem)
		}
	}
}

// TestExpect: no server is asked whether it wants a body, in whatever pieces the question comes; what follows is the body.
func TestExpect(t *testing.T) {
	const ask = "POST / HTTP/1.1\r\nHost: a.example\r\n%s: 100-continue\r\nContent-Length: 36\r\n\r\nGET / HTTP/1.1\r\nHost: evil.example\r\n"
	for _, sizes := range [][]int{{1 << 20}, {1}, {7, 1, 3}} {
		for _, name := range []string{"Expect", "eXPECT"} {
			input := fmt.Sprintf(ask, name)
			r := scan(t, []byte(input), sizes...)
			if want := fmt.Sprintf(ask, "Ignore"); r.err != nil || string(r.passed) != want || names(r.found) != "http:a.example" {
				t.Errorf("in pieces of %v: %v, found %v, passed %q", sizes, r.err, names(r.found), r.passed)
			}
		}
	}
}

// TestIdle: between calls a flow costs what it holds back, whatever has passed.
func TestIdle(t *testing.T) {
	s := NewScanner(func(Finding) error { return nil })
	body := strings.Repeat("x", 1<<20)
	for _, part := range []string{"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 1048576\r\n\r\n", body, "GET / "} {
		if _, err := s.Scan([]byte(part)); err != nil {
			t.Fatal(err)
		}
		if cap(s.rest) > 100 || s.held != nil {
			t.Errorf("after %d bytes %d are kept", len(part), cap(s.rest))
		}
	}
}

func TestQUIC(t *testing.T) {
	initial := func(version uint32) []byte {
		return append(binary.BigEndian.AppendUint32([]byte{0xc3}, version), make([]byte, 1300)...)
	}
	for _, version := range []uint32{1, 0x6b3343cf, 0xff00001d, 0x1a2a3a4a, 'Q'<<24 | '0'<<16 | '4'<<8 | '6'} {
		if !QUIC(initial(version)) {
			t.Errorf("version %x is not found", version)
		}
	}
	for name, b := range map[string][]byte{"empty": nil, "short": initial(1)[:1000], "version 0": initial(0), "dns": append([]byte{0x12}, make([]byte, 1300)...)} {
		if QUIC(b) {
			t.Errorf("%s is taken for one", name)
		}
	}
}

// FuzzScanner: nothing passes unasked, what passes is what came, pieces make no difference, and Go's own servers read the
// same names in what passed.
func FuzzScanner(f *testing.F) {
	for _, c := range httpCases() {
		f.Add([]byte(c[0]), uint8(1), uint8(9))
	}
	for _, c := range tlsCases() {
		f.Add([]byte(c[0]), uint8(3), uint8(200))
	}
	f.Fuzz(func(t *testing.T, input []byte, a, b uint8) {
		whole, pieces := scan(t, bytes.Clone(input), 1<<30), scan(t, bytes.Clone(input), int(a), int(b))
		if !slices.Equal(whole.found, pieces.found) || (whole.err == nil) != (pieces.err == nil) || !samePrefix(input, pieces.passed) {
			t.Fatalf("%q as a whole: %v %v; in pieces: %v %v", input, whole.found, whole.err, pieces.found, pieces.err)
		}
		if len(pieces.found) == 0 {
			return
		}
		switch pieces.found[0].Kind {
		case HTTP:
			asServer(t, pieces)
		case TLS:
			asTLSServer(t, pieces)
		case Opaque:
			noServer(t, pieces.passed)
		}
		// The same, from one who lets some time pass after the first piece.
		slow := stall(bytes.Clone(input), max(1, int(a)))
		noServer(t, slow)
	})
}

// samePrefix: what passed is what came, but for the name of a header.
func samePrefix(input, passed []byte) bool {
	if len(passed) > len(input) {
		return false
	}
	for i := range passed {
		if passed[i] != input[i] && !strings.Contains("Ignore", string(passed[i])) {
			return false
		}
	}
	return true
}

// stall scans a flow whose client makes a pause after its first bytes, and returns what passes if it is taken for opaque.
func stall(input []byte, first int) (passed []byte) {
	var found []Finding
	s := NewScanner(func(f Finding) error {
		found = append(found, f)
		return nil
	})
	first = min(first, len(input))
	for _, part := range [][]byte{input[:first], input[first:]} {
		pass, err := s.Scan(part)
		if err != nil {
			return nil
		}
		passed = append(passed, pass...)
		if pass, err = s.End(); err != nil {
			return nil
		}
		passed = append(passed, pass...)
	}
	if len(found) != 1 || found[0].Kind != Opaque {
		return nil
	}
	return passed
}

// noServer: what is taken for neither is a request to no server.
func noServer(t *testing.T, passed []byte) {
	if req, err := nethttp.ReadRequest(bufio.NewReader(bytes.NewReader(passed))); err == nil {
		t.Fatalf("%q is taken for no request, but is one to %q", passed, req.Host)
	}
	conn := &flow{Reader: bytes.NewReader(passed)}
	_ = tls.Server(conn, &tls.Config{GetConfigForClient: func(info *tls.ClientHelloInfo) (*tls.Config, error) { //nolint:gosec // it answers nothing
		t.Fatalf("%x is taken for no hello, but is one to %q", passed, info.ServerName)
		return nil, nil
	}}).HandshakeContext(context.WithoutCancel(t.Context()))
}

// asServer reads what passed as net/http does.
func asServer(t *testing.T, r result) {
	in := bufio.NewReader(bytes.NewReader(r.passed))
	for i := 0; ; i++ {
		req, err := nethttp.ReadRequest(in)
		if err != nil {
			return
		}
		if i >= len(r.found) {
			t.Fatalf("%q: request %d for %q was not asked about", r.passed, i, req.Host)
		}
		if r.found[i].Kind != HTTP {
			return
		}
		host, err := hostOf(req.Host)
		if err != nil || !strings.EqualFold(host, r.found[i].Name) {
			t.Fatalf("%q: request %d is for %q, asked was %q", r.passed, i, req.Host, r.found[i].Name)
		}
		if req.Method == nethttp.MethodConnect {
			return
		}
		if _, err := io.Copy(io.Discard, req.Body); err != nil {
			return
		}
	}
}

// asTLSServer reads what passed as crypto/tls does.
func asTLSServer(t *testing.T, r result) {
	stop := errors.New("read")
	conn := &flow{Reader: bytes.NewReader(r.passed)}
	_ = tls.Server(conn, &tls.Config{GetConfigForClient: func(info *tls.ClientHelloInfo) (*tls.Config, error) { //nolint:gosec // it answers nothing
		if !strings.EqualFold(strings.TrimSuffix(info.ServerName, "."), strings.TrimSuffix(r.found[0].Name, ".")) {
			t.Fatalf("%x: the server sees %q, asked was %q", r.passed, info.ServerName, r.found[0].Name)
		}
		return nil, stop
	}}).HandshakeContext(context.WithoutCancel(t.Context()))
}

// flow is a connection from which there is something to read, and no more.
type flow struct{ io.Reader }

func (*flow) Write(p []byte) (int, error)      { return len(p), nil }
func (*flow) Close() error                     { return nil }
func (*flow) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (*flow) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (*flow) SetDeadline(time.Time) error      { return nil }
func (*flow) SetReadDeadline(time.Time) error  { return nil }
func (*flow) SetWriteDeadline(time.Time) error { return nil }
