package wire

// parseJSON reads by hand what a host sends: user processes stand still meanwhile, and encoding/json may never have run
// in their machine.
func (r *ThawRequest) parseJSON(b []byte) bool {
	s := scanner{b: b}
	v := ThawRequest{}
	s.object(func(key string) {
		switch key {
		case "freeze":
			s.failed = s.failed || len(s.b) > 0 && s.b[0] == '-'
			n := s.int()
			v.Freeze = uint64(n)
		case "sandboxId":
			v.SandboxID = s.string()
		case "unixNano":
			v.UnixNano = s.int()
		default:
			s.failed = true
		}
	})
	if s.done() {
		*r = v
	}
	return s.done()
}
