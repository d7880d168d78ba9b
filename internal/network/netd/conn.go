package netd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
)

// errClosed says that a connection has ended.
var errClosed = errors.New("the process of the sandboxes' networks has ended")

// conn is the daemon's connection to the process. What is told is sent in its order, by a goroutine of its own: a process
// that does not read stops nobody.
type conn struct {
	socket *socket
	told   func(*reply)
	ready  chan struct{}
	closed chan struct{}
	once   sync.Once
	work   sync.WaitGroup

	pid      int             // of the process
	protocol int             // it speaks
	fresh    bool            // it has no links yet
	has      map[string]bool // links that it had when it was found

	deaf atomic.Bool // a question was not answered in its time, and nothing has been answered since

	mu      sync.Mutex
	queue   []toSend
	seq     uint64
	waiting map[uint64]*waiter
}

type toSend struct {
	req  *request
	file *os.File // a copy, closed when sent
}

// waiter takes the answers to one request. done is closed after the last.
type waiter struct {
	each func(*reply, []*os.File)
	last *reply
	done chan struct{}
}

func newConn(s *socket, told func(*reply)) *conn {
	c := &conn{socket: s, told: told, ready: make(chan struct{}, 1), closed: make(chan struct{}), waiting: map[uint64]*waiter{}}
	c.work.Go(c.write)
	c.work.Go(c.read)
	return c
}

func (c *conn) close() {
	c.once.Do(func() {
		close(c.closed)
		c.socket.close()
	})
}

// end is close, and waits for the goroutines.
func (c *conn) end() {
	c.close()
	c.work.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.queue {
		if s.file != nil {
			_ = s.file.Close()
		}
	}
	c.queue = nil
	closeAll(c.socket.files)
}

// tell queues a request, with a copy of the file.
func (c *conn) tell(req *request, files ...*os.File) {
	s := toSend{req: req}
	if len(files) == 1 {
		var err error
		if s.file, err = duplicate(files[0]); err != nil { // no descriptors are left: the process is told again when it is started anew
			c.close()
			return
		}
	}
	c.mu.Lock()
	c.queue = append(c.queue, s)
	c.mu.Unlock()
	select {
	case c.ready <- struct{}{}:
	default:
	}
}

// do asks for something to be done.
func (c *conn) do(ctx context.Context, req *request) error { return c.ask(ctx, req, nil) }

// ask sends a request and calls each with its answers, one at a time. The files in them are each's to close.
func (c *conn) ask(ctx context.Context, req *request, each func(*reply, []*os.File)) error {
	w := &waiter{each: each, done: make(chan struct{})}
	c.mu.Lock()
	c.seq++
	req.Seq = c.seq
	c.waiting[req.Seq] = w
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.waiting, req.Seq)
	}()
	c.tell(req)
	select {
	case <-w.done:
		if w.last.Error != "" {
			return fmt.Errorf("%.500s", w.last.Error)
		}
		return nil
	case <-c.closed:
		return errClosed
	case <-ctx.Done():
		err := context.Cause(ctx)
		if errors.Is(err, ErrDown) {
			c.deaf.Store(true)
		}
		return err
	}
}

func (c *conn) write() {
	for {
		c.mu.Lock()
		queue := c.queue
		c.queue = nil
		c.mu.Unlock()
		for _, s := range queue {
			var files []*os.File
			if s.file != nil {
				files = []*os.File{s.file}
			}
			err := c.socket.send(s.req, files...)
			closeAll(files)
			if err != nil {
				c.close()
			}
		}
		select {
		case <-c.ready:
		case <-c.closed:
			return
		}
	}
}

func (c *conn) read() {
	defer c.close()
	for {
		r := &reply{}
		files, err := c.socket.receive(r)
		if err != nil {
			return
		}
		c.take(r, files)
	}
}

func (c *conn) take(r *reply, files []*os.File) {
	if r.Seq == 0 {
		closeAll(files)
		c.told(r)
		return
	}
	c.deaf.Store(false)
	c.mu.Lock()
	defer c.mu.Unlock() // Who has stopped waiting is not called any more.
	w := c.waiting[r.Seq]
	if w == nil || isClosed(w.done) {
		closeAll(files)
		return
	}
	if w.each == nil {
		closeAll(files)
	} else {
		w.each(r, files)
	}
	if !r.More {
		w.last = r
		close(w.done)
	}
}
