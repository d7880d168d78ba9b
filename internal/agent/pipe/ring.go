package pipe

// Ring keeps the newest output while nobody takes it, in order, of all kinds together.
type Ring[K comparable] struct {
	Max int // bytes

	chunks []chunk[K]
	size   int
}

type chunk[K comparable] struct {
	kind K
	data []byte
}

// joinBytes is up to what size small writes share a slice.
const joinBytes = 32 << 10

// Add appends a copy of data and forgets the oldest beyond Max.
func (r *Ring[K]) Add(kind K, data []byte) {
	if n := len(r.chunks); n > 0 && r.chunks[n-1].kind == kind && len(r.chunks[n-1].data)+len(data) <= joinBytes {
		r.chunks[n-1].data = append(r.chunks[n-1].data, data...)
	} else {
		r.chunks = append(r.chunks, chunk[K]{kind, append([]byte(nil), data...)})
	}
	r.size += len(data)
	for r.size > r.Max {
		first := &r.chunks[0]
		if over := r.size - r.Max; over < len(first.data) {
			first.data = first.data[over:]
			r.size -= over
			return
		}
		r.size -= len(first.data)
		*first = chunk[K]{} // the array behind the slice still refers to it
		r.chunks = r.chunks[1:]
	}
}

// Flush hands everything over and empties the ring; what could not be handed over stays.
func (r *Ring[K]) Flush(take func(K, []byte) error) error {
	for len(r.chunks) > 0 {
		if err := take(r.chunks[0].kind, r.chunks[0].data); err != nil {
			return err
		}
		r.size -= len(r.chunks[0].data)
		r.chunks = r.chunks[1:]
	}
	r.chunks = nil
	return nil
}

// Clear empties the ring.
func (r *Ring[K]) Clear() { r.chunks, r.size = nil, 0 }

// Len is the number of bytes kept.
func (r *Ring[K]) Len() int { return r.size }
