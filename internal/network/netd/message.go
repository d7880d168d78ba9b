package netd

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
)

// protocol is the version of what is said on the socket. A daemon that finds a process of another one starts its own, and
// takes only the links from it: hello, links and end stay as they are for ever.
const protocol = 1

// What a daemon asks for.
const (
	opHello  = "hello"  // who is there
	opAttach = "attach" // with a descriptor: go on with a link under an id, in the place of the one before
	opDetach = "detach"
	opPolicy = "policy"
	opOpen   = "open"
	opTotals = "totals" // of all, or of one
	opFlows  = "flows"  // of one
	opWatch  = "watch"  // tell of one's flows from now on
	opIgnore = "ignore" // and no more
	opLinks  = "links"  // all ids, with their descriptors, some at a time
	opEnd    = "end"    // with all links
	opPins   = "pins"   // what names one's guest knows
	opPin    = "pin"    // it knows these, too
)

// request is a message of the daemon's. Those of one connection are done in their order.
type request struct {
	Seq    uint64         `json:"seq,omitempty"` // of the answer; 0: none is wanted
	Op     string         `json:"op"`
	ID     string         `json:"id,omitempty"`
	Policy *egress.Policy `json:"policy,omitempty"`
	Spent  int64          `json:"spent,omitempty"`
	Open   bool           `json:"open,omitempty"`
	Pins   []network.Pin  `json:"pins,omitempty"`
}

// reply answers the request of its number, or tells of a flow, of the end of a link: then it has none.
type reply struct {
	Seq      uint64                    `json:"seq,omitempty"`
	Error    string                    `json:"error,omitempty"`
	More     bool                      `json:"more,omitempty"` // another follows with the same number
	Protocol int                       `json:"protocol,omitempty"`
	IDs      []string                  `json:"ids,omitempty"` // of the descriptors with it
	Totals   map[string]network.Totals `json:"totals,omitempty"`
	Use      *network.PoolUse          `json:"use,omitempty"` // with the totals of all
	Flows    []network.Flow            `json:"flows,omitempty"`
	Pins     []network.Pin             `json:"pins,omitempty"`

	ID   string        `json:"id,omitempty"`
	Flow *network.Flow `json:"flow,omitempty"`
	Gone bool          `json:"gone,omitempty"` // nobody is at the other end of the link any more
}

const (
	maxMessage = 4 << 20
	maxFiles   = 64 // of one message; the kernel allows 253
	flowsEach  = 200
)

// socket carries messages: four bytes of length, then JSON; descriptors come with the first byte.
type socket struct {
	conn  *net.UnixConn
	files []*os.File // that have come and belong to no message yet
}

func (s *socket) send(v any, files ...*os.File) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(text) > maxMessage {
		return fmt.Errorf("a message of %d bytes: at most %d can be sent", len(text), maxMessage)
	}
	var oob []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = descriptor(f)
		}
		oob = unix.UnixRights(fds...)
	}
	text = append(binary.BigEndian.AppendUint32(nil, uint32(len(text))), text...)
	n, _, err := s.conn.WriteMsgUnix(text, oob, nil)
	runtime.KeepAlive(files)
	if err == nil && n < len(text) {
		_, err = s.conn.Write(text[n:])
	}
	return err
}

// receive waits for the next message. The caller closes the files.
func (s *socket) receive(v any) ([]*os.File, error) {
	var head [4]byte
	if err := s.read(head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxMessage {
		return nil, fmt.Errorf("a message of %d bytes, at most %d are read", n, maxMessage)
	}
	text := make([]byte, n)
	if err := s.read(text); err != nil {
		return nil, err
	}
	files := s.files
	s.files = nil
	if err := json.Unmarshal(text, v); err != nil {
		closeAll(files)
		return nil, fmt.Errorf("decode message: %w", err)
	}
	return files, nil
}

// read fills p. The kernel ends a read where the next message's descriptors begin.
func (s *socket) read(p []byte) error {
	oob := make([]byte, unix.CmsgSpace(4*maxFiles))
	for len(p) > 0 {
		n, oobn, _, _, err := s.conn.ReadMsgUnix(p, oob)
		if oobn > 0 {
			if err := s.keep(oob[:oobn]); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return io.EOF
		}
		p = p[n:]
	}
	return nil
}

func (s *socket) keep(oob []byte) error {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return err
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue // something else
		}
		for _, fd := range fds {
			s.files = append(s.files, os.NewFile(uintptr(fd), "link"))
		}
	}
	if len(s.files) > maxFiles {
		return errors.New("more descriptors than a message may have")
	}
	return nil
}

func (s *socket) close() {
	_ = s.conn.Close()
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// descriptor is a file's, -1 if it is closed. File.Fd would make the link blocking, for all that have a copy of it.
func descriptor(f *os.File) int {
	n := -1
	if raw, err := f.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { n = int(fd) })
	}
	return n
}

// duplicate is a copy of a link.
func duplicate(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(descriptor(f)), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("copy a link: %w", err)
	}
	return os.NewFile(uintptr(fd), "link"), nil
}

// isLink says whether a descriptor is what a link is.
func isLink(f *os.File) bool {
	domain, err1 := unix.GetsockoptInt(descriptor(f), unix.SOL_SOCKET, unix.SO_DOMAIN)
	kind, err2 := unix.GetsockoptInt(descriptor(f), unix.SOL_SOCKET, unix.SO_TYPE)
	return err1 == nil && err2 == nil && domain == unix.AF_UNIX && kind == unix.SOCK_SEQPACKET
}
