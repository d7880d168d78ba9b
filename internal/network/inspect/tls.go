package inspect

import (
	"encoding/binary"
)

// Types of TLS's records.
const (
	recordChangeCipher = 20
	recordAlert        = 21
	recordHandshake    = 22
	recordData         = 23
)

const (
	recordHeader = 5
	maxRecord    = 16 << 10
	// maxHello is several times what clients send, post-quantum keys included.
	maxHello = 32 << 10
	// maxRecords that are not data, after the hello: servers take fewer.
	maxRecords = 100
)

// Extensions of a client hello.
const (
	extensionServerName = 0
	extensionECH        = 0xfe0d
	extensionESNI       = 0xffce // what ECH was before
)

// classifyRecord tells whether a flow that begins with the type of a record begins TLS. Some servers (Go's) take any version
// below 16 for TLS at first, and warnings before the hello.
func classifyRecord(b []byte) (guess, error) {
	switch {
	case len(b) < 2:
		return unclear, nil
	case b[1] == 3 && b[0] == recordHandshake:
		return secure, nil
	case b[1] == 3:
		return other, malformed("TLS that does not begin with a client hello")
	case b[1] >= 16 || b[0] != recordHandshake && b[0] != recordAlert:
		return other, nil
	case len(b) < 6:
		return unclear, nil
	case b[0] == recordHandshake && b[5] == 1, b[0] == recordAlert && b[3] == 0 && b[4] == 2:
		return other, malformed("TLS of version %d", b[1])
	}
	return other, nil
}

// nextRecord is the record at pos, if it is there as a whole.
func (s *Scanner) nextRecord() (kind byte, payload []byte, whole bool, err error) {
	b := s.held[s.pos:]
	if len(b) < recordHeader {
		return 0, nil, false, nil
	}
	size := int(binary.BigEndian.Uint16(b[3:5]))
	if b[1] != 3 || size == 0 || size > maxRecord+256 {
		return 0, nil, false, malformed("a TLS record of version %d.%d and %d bytes", b[1], b[2], size)
	}
	if len(b) < recordHeader+size {
		return b[0], b[recordHeader:], false, nil
	}
	return b[0], b[recordHeader : recordHeader+size], true, nil
}

// clientHello gathers the first message, over as many records as it takes.
func (s *Scanner) clientHello() (more bool, err error) {
	kind, payload, whole, err := s.nextRecord()
	if err != nil || !whole {
		return false, err
	}
	if kind != recordHandshake {
		return false, malformed("a TLS record of type %d within the client hello", kind)
	}
	s.pos += recordHeader + len(payload)
	s.hello = append(s.hello, payload...)
	if len(s.hello) < 4 {
		return true, nil
	}
	size := int(s.hello[1])<<16 | int(s.hello[2])<<8 | int(s.hello[3])
	if s.hello[0] != 1 || size > maxHello {
		return false, malformed("a TLS handshake that begins with message %d of %d bytes", s.hello[0], size)
	}
	if len(s.hello) < 4+size {
		return true, nil
	}
	if len(s.hello) > 4+size {
		return false, malformed("bytes after the client hello in its record")
	}
	f, err := parseHello(s.hello[4:])
	if err != nil {
		return false, err
	}
	s.hello = nil
	switch {
	case s.named.Kind != TLS:
		if err := s.found(f); err != nil {
			return false, err
		}
	case f != s.named:
		return false, malformed("a second client hello for another server")
	}
	s.release(s.pos)
	s.step = (*Scanner).afterHello
	return true, nil
}

// afterHello watches for a second client hello, which a server may ask for, until data comes.
func (s *Scanner) afterHello() (more bool, err error) {
	if s.records++; s.records > maxRecords {
		return false, malformed("more than %d TLS records before any data", maxRecords)
	}
	kind, payload, whole, err := s.nextRecord()
	if err != nil {
		return false, err
	}
	if kind == recordHandshake && !whole && len(payload) < 6 || kind == 0 {
		s.records--
		return false, nil
	}
	size := int64(binary.BigEndian.Uint16(s.held[s.pos+3:]))
	switch {
	case kind == recordData:
		s.step = nil
	case kind != recordHandshake:
		s.skip = recordHeader + size
	case size < 6:
		return false, malformed("a TLS handshake in pieces of %d bytes", size)
	// A hello, and not what is encrypted and looks like one: type 1, less than 64 KiB, a version of TLS.
	case payload[0] == 1 && payload[1] == 0 && payload[4] == 3 && payload[5] <= 4:
		s.step = (*Scanner).clientHello
	default:
		s.skip = recordHeader + size
	}
	return true, nil
}

// A cursor takes a message apart; once it has run out it stays so.
type cursor struct {
	b   []byte
	bad bool
}

func (c *cursor) take(n int) []byte {
	if c.bad || n > len(c.b) {
		c.bad = true
		return nil
	}
	b := c.b[:n]
	c.b = c.b[n:]
	return b
}

func (c *cursor) number(size int) (n int) {
	for _, b := range c.take(size) {
		n = n<<8 | int(b)
	}
	return n
}

// vector takes what has its length, of so many bytes, before it.
func (c *cursor) vector(size int) *cursor {
	b := c.take(c.number(size))
	return &cursor{b: b, bad: c.bad}
}

func (c *cursor) done() bool { return !c.bad && len(c.b) == 0 }

func parseHello(body []byte) (Finding, error) {
	c := &cursor{b: body}
	version := c.number(2)
	c.take(32)
	session, suites, compression := c.vector(1), c.vector(2), c.vector(1)
	f := Finding{Kind: TLS}
	if c.bad || version>>8 != 3 || len(session.b) > 32 || len(suites.b) < 2 || len(suites.b)%2 != 0 || len(compression.b) == 0 {
		return f, malformed("a client hello that cannot be read")
	}
	if c.done() {
		return f, nil // SSL 3 and the first TLS have no extensions
	}
	extensions := c.vector(2)
	if !c.done() {
		return f, malformed("a client hello that cannot be read")
	}
	seen := map[int]bool{}
	for !extensions.done() {
		kind := extensions.number(2)
		body := extensions.vector(2)
		if extensions.bad || seen[kind] {
			return f, malformed("a client hello with a broken or repeated extension")
		}
		seen[kind] = true
		switch kind {
		case extensionServerName:
			name, ok := serverName(body)
			if !ok {
				return f, malformed("a client hello with a broken server name")
			}
			f.Name = name
		case extensionECH, extensionESNI:
			f.Hidden = true
		}
	}
	return f, nil
}

func serverName(c *cursor) (string, bool) {
	list := c.vector(2)
	kind := list.number(1)
	name := string(list.vector(2).b)
	return name, c.done() && list.done() && kind == 0 && name != "" && len(name) <= maxName && visible(name)
}

func visible(text string) bool {
	for i := range len(text) {
		if text[i] <= ' ' || text[i] >= 0x7f {
			return false
		}
	}
	return true
}
