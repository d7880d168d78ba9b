package inspect

import "encoding/binary"

// minQUIC is what a client's first datagram is at least, so that servers are no amplifiers.
const minQUIC = 1200

// QUIC tells whether a datagram begins a QUIC connection, whose server's name cannot be read, on whatever port.
func QUIC(datagram []byte) bool {
	if len(datagram) < minQUIC || datagram[0]&0x80 == 0 {
		return false
	}
	version := binary.BigEndian.Uint32(datagram[1:5])
	switch {
	case version == 1, version == 0x6b3343cf, // 1 and 2
		version>>8 == 0xff0000,                   // drafts
		version&0x0f0f0f0f == 0x0a0a0a0a,         // to have versions negotiated
		version>>24 == 'Q' && datagram[2] == '0': // Google's
		return datagram[5] <= 20
	}
	return false
}
