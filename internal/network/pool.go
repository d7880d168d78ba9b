package network

import (
	"fmt"
	"math/bits"
	"sync"
)

// Pool bounds what all Networks of a process may hold together, and shares it fairly: half is for whoever comes first, the
// other half in equal parts for each Network that has flows at all. So a guest that takes all it can take leaves each other one its part.
type Pool struct {
	memory int64 // bytes, of buffers of flows and of frames that wait
	flows  int

	mu      sync.Mutex
	open    int
	members map[*member]struct{}
}

// member is one Network's part in a Pool.
type member struct {
	pool   *Pool
	open   int        // guarded by the pool's mu
	shrink func(int)  // called without locks when each flow may have less, or more again
	order  sync.Mutex // of calls of shrink
}

const (
	// flowCost is the least that a flow is counted for: two buffers of minBuffer, what is in hand, and three goroutines.
	flowCost  = 128 << 10
	minBuffer = 16 << 10
	// leastFlows and leastMemory are what a process must be able to have.
	leastFlows  = 64
	leastMemory = 64 << 20
)

// NewPool makes one of so many bytes and descriptors, of which each flow has one.
func NewPool(memory int64, files int) *Pool {
	memory = max(memory, leastMemory)
	return &Pool{memory: memory, flows: max(leastFlows, min(int(memory/flowCost), files)), members: map[*member]struct{}{}}
}

// PoolUse is what of a Pool is in use.
type PoolUse struct {
	Memory int64 `json:"memory"` // that may be used, in bytes
	Flows  int   `json:"flows"`  // that may be open at once
	Open   int   `json:"open"`
	Among  int   `json:"among"` // Networks that share it
	Held   int64 `json:"held"`  // bytes that the process has of the system, whatever for; who asks it fills this in
}

// Use is what of it is in use.
func (p *Pool) Use() PoolUse {
	p.mu.Lock()
	defer p.mu.Unlock()
	return PoolUse{Memory: p.memory, Flows: p.flows, Open: p.open, Among: len(p.members)}
}

// join enters a Network; shrink hears how much buffer each of its flows may have.
func (p *Pool) join(shrink func(buffer int)) *member {
	m := &member{pool: p, shrink: shrink}
	p.mu.Lock()
	p.members[m] = struct{}{}
	p.mu.Unlock()
	p.share()
	return m
}

func (m *member) leave() {
	p := m.pool
	p.mu.Lock()
	delete(p.members, m)
	p.open -= m.open
	m.open = 0
	p.mu.Unlock()
	p.share()
}

// share tells every Network of its part.
func (p *Pool) share() {
	p.mu.Lock()
	all := make([]*member, 0, len(p.members))
	for m := range p.members {
		all = append(all, m)
	}
	p.mu.Unlock()
	for _, m := range all {
		m.tell()
	}
}

func (m *member) tell() {
	m.order.Lock()
	defer m.order.Unlock()
	m.pool.mu.Lock()
	buffer := m.bufferLocked()
	m.pool.mu.Unlock()
	m.shrink(buffer)
}

// take counts a flow; a reason says why there can be none.
func (m *member) take() (reason string) {
	p := m.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	part := max(1, p.flows/2/max(1, len(p.members)))
	switch {
	case p.open >= p.flows:
		return fmt.Sprintf("%d flows of all sandboxes are open, which is the limit of this host", p.flows)
	case p.open >= p.flows/2 && m.open >= part:
		return fmt.Sprintf("more than %d flows of all sandboxes are open, and this one has its part of what the host has", p.flows/2)
	}
	p.open++
	m.open++
	return ""
}

func (m *member) give() {
	p := m.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if m.open > 0 {
		m.open--
		p.open--
	}
}

// bufferLocked is how much each flow of a Network may have each way: its part of the memory, of all its flows, in powers of two
// so that it changes seldom.
func (m *member) bufferLocked() int {
	part := m.pool.memory / int64(max(1, len(m.pool.members)))
	each := part / int64(max(1, m.open)) / 4 // Two buffers and as much again in hand and in the collector's.
	if each >= tcpBufferMax {
		return tcpBufferMax
	}
	return max(minBuffer, 1<<(bits.Len64(uint64(each))-1)) //nolint:gosec // not negative.
}

// buffer is bufferLocked.
func (m *member) buffer() int {
	m.pool.mu.Lock()
	defer m.pool.mu.Unlock()
	return m.bufferLocked()
}

// queued is how many bytes of frames may wait for a guest.
func (m *member) queued() int {
	m.pool.mu.Lock()
	defer m.pool.mu.Unlock()
	part := m.pool.memory / 8 / int64(max(1, len(m.pool.members)))
	return int(min(maxQueuedBytes, max(4*FrameSize, part)))
}
