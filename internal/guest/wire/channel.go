package wire

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
)

// A fork leaves the guest's end of the control channel in the middle of whatever its parent was receiving. So the
// bytes of a session travel in chunks, [4-byte big-endian length][payload], whose writer sees to it that magic never
// occurs in them; a preamble, which begins with magic, can therefore be found at any point of the byte stream, and
// nothing a user sends can look like one. Magic has no zero byte and a chunk header begins with one, so an
// occurrence cannot span a header. Its first byte occurs once, which makes matching it a matter of one counter.
const magic = "\xf9forkd\xa7\x5e\xc3\x91\xe8\xb4\x8d\xd2\x9f\xab"

const (
	// NonceSize is the length of a connection's nonce.
	NonceSize = 16
	// MaxHello bounds the JSON of a Hello.
	MaxHello = 64 << 10

	preambleSize = len(magic) + 1 + NonceSize + 8 + 8
	chunkHeader  = 4
	// maxChunk fits a chunk into one write of the guest's driver, which takes at most 32 KiB at a time.
	maxChunk = 32<<10 - chunkHeader
	// maxHostileChunk is what a reader accepts.
	maxHostileChunk = 64 << 10
)

// Results of Receiver.Read that end a session.
var (
	ErrTakeover = errors.New("taken over by a newer connection")
	ErrLost     = errors.New("control channel out of step")
)

// Preamble opens a connection from the host to the agent.
type Preamble struct {
	Version byte
	// Awaken says that the session begins with an AwakenRequest, whose report comes with the agent's answer: since
	// version 2.
	Awaken     bool
	Nonce      [NonceSize]byte
	Generation uint64
}

// awakenBit is set in the byte of the version.
const awakenBit = 0x80

// Append adds the encoding to b.
func (p *Preamble) Append(b []byte) []byte {
	at := len(b)
	b = append(b, magic...)
	version := p.Version
	if p.Awaken {
		version |= awakenBit
	}
	b = append(b, version)
	b = append(b, p.Nonce[:]...)
	b = binary.BigEndian.AppendUint64(b, p.Generation)
	return binary.BigEndian.AppendUint64(b, checksum(b[at:]))
}

// parsePreamble decodes exactly preambleSize bytes.
func parsePreamble(b []byte) (Preamble, bool) {
	var p Preamble
	sum := len(b) - 8
	if binary.BigEndian.Uint64(b[sum:]) != checksum(b[:sum]) {
		return p, false
	}
	b = b[len(magic):]
	p.Version, p.Awaken = b[0]&^awakenBit, b[0]&awakenBit != 0
	copy(p.Nonce[:], b[1:])
	p.Generation = binary.BigEndian.Uint64(b[1+NonceSize:])
	return p, true
}

// checksum is FNV-1a: it guards against truncation, not malice, and a fresh fork runs it with a cold translation
// cache, where the tables of a CRC would cost more than the sum.
func checksum(b []byte) uint64 {
	h := uint64(14695981039346656037)
	for _, c := range b {
		h = (h ^ uint64(c)) * 1099511628211
	}
	return h
}

// AppendAnswer adds the agent's answer to a preamble: magic, its nonce, length, Hello as JSON. The plain bytes of the
// session follow it. The nonce is fresh, so nothing of an earlier session can look like the answer to it.
func AppendAnswer(b []byte, nonce [NonceSize]byte, hello []byte) []byte {
	b = append(b, magic...)
	b = append(b, nonce[:]...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(hello)))
	return append(b, hello...)
}

// ReadAnswer skips what an earlier session left in r and returns the JSON of the answer to nonce.
func ReadAnswer(r *bufio.Reader, nonce [NonceSize]byte) ([]byte, error) {
	want := append([]byte(magic), nonce[:]...)
	seen := make([]byte, 0, len(want)+1) // what matches so far
	for len(seen) < len(want) {
		b, err := r.ReadByte()
		if err != nil {
			return nil, unexpected(err)
		}
		seen = append(seen, b)
		if b != want[len(seen)-1] {
			n := overlap(seen, want)
			seen = append(seen[:0], want[:n]...)
		}
	}
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, unexpected(err)
	}
	n := binary.BigEndian.Uint32(size[:])
	if n > MaxHello {
		return nil, Errorf(CodeInvalid, "agent's hello of %d bytes; at most %d are allowed", n, MaxHello)
	}
	hello := make([]byte, n)
	if _, err := io.ReadFull(r, hello); err != nil {
		return nil, unexpected(err)
	}
	return hello, nil
}

// overlap is the length of the longest proper prefix of want that ends b.
func overlap(b, want []byte) int {
	for n := min(len(b), len(want)-1); n > 0; n-- {
		if bytes.HasSuffix(b, want[:n]) {
			return n
		}
	}
	return 0
}

// ChunkWriter is the host's sending side of a session. It is not safe for concurrent use.
type ChunkWriter struct {
	w   io.Writer
	buf []byte
}

// NewChunkWriter writes chunks to w.
func NewChunkWriter(w io.Writer) *ChunkWriter { return &ChunkWriter{w: w} }

// Write sends p as one or more chunks in one write.
func (c *ChunkWriter) Write(p []byte) (int, error) {
	b := c.buf[:0]
	for rest := p; len(rest) > 0; {
		n := min(len(rest), maxChunk)
		if i := bytes.Index(rest[:n], []byte(magic)); i >= 0 {
			n = i + len(magic)/2
		}
		b = appendChunk(b, rest[:n])
		rest = rest[n:]
	}
	if overlap(p, []byte(magic)) > 0 {
		// The receiver holds back what may be the beginning of a preamble; the zeros of an empty chunk release it.
		b = appendChunk(b, nil)
	}
	c.buf = b[:0]
	if cap(b) > 4*maxChunk {
		c.buf = nil
	}
	if _, err := c.w.Write(b); err != nil {
		return 0, err
	}
	return len(p), nil
}

func appendChunk(b, payload []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(len(payload)))
	return append(b, payload...)
}

// Receiver is the agent's receiving side of the channel: it finds preambles and takes the chunks between them apart.
// It never gives a session a byte of what came with or after the preamble that ended it. It is not safe for
// concurrent use.
type Receiver struct {
	r   io.Reader
	buf []byte
	// buf[pos:held] may be decoded, buf[held:scan] may be the beginning of a preamble, buf[scan:end] is unseen.
	pos, held, scan, end int

	nonce   [NonceSize]byte // of the session being read
	next    *Preamble       // found, and not yet taken by Await
	left    int             // payload bytes left of the current chunk
	header  [chunkHeader]byte
	nheader int
	lost    bool
}

// NewReceiver reads the channel from r.
func NewReceiver(r io.Reader) *Receiver {
	return &Receiver{r: r, buf: make([]byte, 16<<10)}
}

// Await discards everything up to the next preamble with a new nonce, after which Read returns its session's bytes.
func (c *Receiver) Await() (Preamble, error) {
	for c.next == nil {
		c.pos = c.held
		c.lost = true
		if err := c.fill(); err != nil {
			return Preamble{}, err
		}
	}
	p := *c.next
	c.next = nil
	c.nonce = p.Nonce
	c.left, c.nheader = 0, 0
	c.lost = false
	c.advance()
	return p, nil
}

// Read returns bytes of the session. ErrTakeover says that a preamble arrived, which Await then returns; ErrLost that
// what arrives makes no sense, so that only a preamble can help.
func (c *Receiver) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		if c.next != nil {
			return 0, ErrTakeover
		}
		n := c.decode(p)
		if c.lost {
			return 0, ErrLost
		}
		if n > 0 {
			return n, nil
		}
		if err := c.fill(); err != nil {
			return 0, err
		}
	}
}

// decode takes payload bytes out of buf[pos:held].
func (c *Receiver) decode(p []byte) int {
	total := 0
	for c.pos < c.held && total < len(p) && !c.lost {
		if c.left > 0 {
			n := copy(p[total:], c.buf[c.pos:min(c.held, c.pos+c.left)])
			c.pos += n
			c.left -= n
			total += n
			continue
		}
		c.header[c.nheader] = c.buf[c.pos]
		c.pos++
		c.nheader++
		if c.nheader < chunkHeader {
			continue
		}
		c.nheader = 0
		n := binary.BigEndian.Uint32(c.header[:])
		c.lost = n > maxHostileChunk
		c.left = int(n)
	}
	return total
}

// fill makes progress once everything before held is decoded: it looks at more of the buffer, or reads more into it.
func (c *Receiver) fill() error {
	waiting := c.scan-c.held == len(magic) && c.end-c.held < preambleSize
	if c.scan < c.end && !waiting {
		c.advance()
		return nil
	}
	if c.pos > 0 {
		n := copy(c.buf, c.buf[c.pos:c.end])
		c.held -= c.pos
		c.scan -= c.pos
		c.pos, c.end = 0, n
	}
	n, err := c.r.Read(c.buf[c.end:])
	c.end += n
	c.advance()
	if n > 0 {
		return nil
	}
	return err
}

// advance scans for preambles until one with a new nonce is found or the buffer ends.
func (c *Receiver) advance() {
	for c.next == nil {
		if !c.match() {
			return
		}
		if c.end-c.held < preambleSize {
			// No session contains the whole magic: what is held back here is a preamble still arriving.
			return
		}
		b := c.buf[c.held : c.held+preambleSize]
		p, ok := parsePreamble(b)
		switch {
		case ok && p.Nonce != c.nonce:
			c.next = &p
			c.drop(preambleSize)
			c.pos = c.held
		case ok && c.boundary():
			// The host repeats itself until it is answered.
			if c.pos != c.held {
				return // what comes before it has to be decoded first
			}
			c.drop(preambleSize)
			c.pos = c.held
		default:
			// Cut short, perhaps by another preamble, which may begin right after the magic.
			c.lost = true
			c.drop(len(magic))
			c.pos = c.held
		}
	}
}

// boundary reports whether the next byte to decode begins a chunk, once everything before held is decoded.
func (c *Receiver) boundary() bool {
	left, nheader, header := c.left, c.nheader, c.header
	for i := c.pos; i < c.held; {
		if left > 0 {
			n := min(left, c.held-i)
			i += n
			left -= n
			continue
		}
		header[nheader] = c.buf[i]
		i++
		if nheader++; nheader == chunkHeader {
			nheader = 0
			left = int(binary.BigEndian.Uint32(header[:]))
		}
	}
	return left == 0 && nheader == 0
}

// drop passes over n bytes from held and starts matching behind them.
func (c *Receiver) drop(n int) {
	c.held += n
	c.scan = c.held
}

// match extends the match of magic at held and reports whether it is complete.
func (c *Receiver) match() bool {
	for {
		n := c.scan - c.held
		if n >= len(magic) {
			return true
		}
		if c.scan == c.end {
			return false
		}
		switch {
		case n == 0:
			i := bytes.IndexByte(c.buf[c.scan:c.end], magic[0])
			if i < 0 {
				c.held, c.scan = c.end, c.end
				return false
			}
			c.held += i
			c.scan = c.held + 1
		case c.buf[c.scan] == magic[n]:
			c.scan++
		default:
			// The first byte of magic does not occur again in it, so no shorter match can be under way.
			c.held = c.scan
		}
	}
}
