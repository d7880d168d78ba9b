package wire

import "math"

// parseJSON reads by hand what a host sends: user processes stand still meanwhile, and encoding/json may never have run
// in their machine.
func (r *ThawRequest) parseJSON(b []byte) bool {
	s := scanner{b: b}
	v := ThawRequest{}
	s.object(func(key string) {
		switch key {
		case "freeze":
			s.failed = s.failed || len(s.b) > 0 && s.b[0] == '-'
			n := s.long()
			v.Freeze = uint64(n)
		case "sandboxId":
			v.SandboxID = s.string()
		case "unixNano":
			v.UnixNano = s.long()
		default:
			s.failed = true
		}
	})
	if s.done() {
		*r = v
	}
	return s.done()
}

// long reads any whole number an int64 can hold, but for the smallest.
func (s *scanner) long() int64 {
	negative := s.byte('-')
	var n int64
	i := 0
	for ; i < len(s.b) && s.b[i] >= '0' && s.b[i] <= '9'; i++ {
		digit := int64(s.b[i] - '0')
		if n > (math.MaxInt64-digit)/10 {
			s.failed = true
			return 0
		}
		n = n*10 + digit
	}
	if i == 0 || i > 1 && s.b[0] == '0' {
		s.failed = true
		return 0
	}
	s.b = s.b[i:]
	if negative {
		return -n
	}
	return n
}
