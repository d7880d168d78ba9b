package inspect

import (
	"bytes"
	"strconv"
	"strings"
)

const (
	// maxEmpty lines before a request: clients of old send one after a body.
	maxEmpty = 2
	// maxChunkLine is a chunk's size and its extensions.
	maxChunkLine = 4 << 10
	// maxTunnels that one flow may open inside one another.
	maxTunnels = 2
)

type guess int

const (
	unclear guess = iota
	secure        // TLS
	http
	other
)

// known tells whether text could be the beginning of a request by one of the usual methods.
func known(text string) bool {
	for _, method := range []string{"GET ", "HEAD ", "POST ", "PUT ", "DELETE ", "CONNECT ", "OPTIONS ", "TRACE ", "PATCH ", "PRI "} {
		n := min(len(text), len(method))
		if strings.EqualFold(text[:n], method[:n]) {
			return true
		}
	}
	return false
}

// classify tells what a flow's first bytes begin. HTTP is what the kindest of servers would take for it: a word, white
// space, and "HTTP/" in the same line. b[:seen] is known to have no end of a line beyond its first word.
func classify(b []byte, seen int) (guess, error) {
	if recordChangeCipher <= b[0] && b[0] <= recordData {
		return classifyRecord(b)
	}
	if bytes.HasPrefix(b, []byte("\r\n\r\n\x00")) || bytes.HasPrefix(b, []byte("PROXY ")) {
		return other, malformed("the header of a proxy's connection, behind which anything may follow")
	}
	start := 0
	for start < len(b) && (isBlank(b[start]) || b[start] == '\n') {
		start++
	}
	end := start
	for end < len(b) && isToken(b[end]) {
		end++
	}
	switch {
	case end == len(b):
		return unclear, nil
	case end == start, !isBlank(b[end]), b[end] == '\r':
		return other, nil
	}
	from := max(seen, end)
	n := bytes.IndexAny(b[from:], "\n\x00")
	if n < 0 {
		return unclear, nil
	}
	if from+n > MaxHeld {
		return other, malformed("a first line of more than %d bytes", MaxHeld)
	}
	if b[from+n] == 0 {
		return other, nil
	}
	line := bytes.ToUpper(b[start : from+n])
	if bytes.Contains(line, []byte("HTTP/")) {
		return http, nil
	}
	if fields := bytes.Fields(line); len(fields) == 2 && string(fields[0]) == "GET" {
		return other, malformed("HTTP/0.9, which names no host")
	}
	return other, nil
}

// isBlank: white space within a line, as somebody might see it.
func isBlank(c byte) bool { return c == ' ' || c == '\t' || c == '\v' || c == '\f' || c == '\r' }

func isToken(c byte) bool {
	switch {
	case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		return true
	}
	return strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0
}

// request is what is known of one before its head is complete.
type request struct {
	begun     bool
	empty     int // lines before it
	method    string
	minor     byte
	authority string // of the target; empty: it has none
	host      string
	hosts     int
	length    int64
	lengths   int
	chunked   bool
	encodings int
	websocket bool
	upgrade   bool
}

// nextLine is the line at pos, without its end, once that is there.
func (s *Scanner) nextLine() (line []byte, ok bool, err error) {
	s.line = max(s.line, s.pos)
	n := bytes.IndexByte(s.held[s.line:], '\n')
	if n < 0 {
		s.line = len(s.held)
		return nil, false, nil
	}
	line = s.held[s.pos : s.line+n]
	s.line += n + 1
	s.pos = s.line
	if len(line) == 0 || line[len(line)-1] != '\r' {
		return nil, false, malformed("a line of HTTP that does not end in CR LF")
	}
	line = line[:len(line)-1]
	for _, c := range line {
		if c < ' ' && c != '\t' || c == 0x7f {
			return nil, false, malformed("HTTP with a control character")
		}
	}
	return line, true, nil
}

// head reads a request's lines up to the empty one. Nothing of it passes before it is complete.
func (s *Scanner) head() (more bool, err error) {
	if s.upgrading.Load() && s.pos == s.off && len(s.held) > s.off {
		// The answer came before what the client says next, or this is a request like any other.
		if s.answered.Load() == int32(len(switching)) {
			s.step = nil
			return true, nil
		}
		s.upgrading.Store(false)
	}
	line, ok, err := s.nextLine()
	if err != nil || !ok {
		return false, err
	}
	r := &s.request
	switch {
	case len(line) == 0 && !r.begun:
		if r.empty++; r.empty > maxEmpty {
			err = malformed("empty lines before a request")
		}
	case len(line) == 0:
		return true, s.endHead()
	case !r.begun:
		err = r.first(string(line))
	default:
		unexpect(line)
		err = r.header(string(line))
	}
	return true, err
}

// unexpect takes Expect away from a request, under another name of its length: a server that answers for good before the body
// may take that for the next request. Clients that get no leave to send one send it after a while.
func unexpect(line []byte) {
	const name = "expect:"
	if len(line) >= len(name) && strings.EqualFold(string(line[:len(name)]), name) {
		copy(line, "Ignore")
	}
}

// first reads a request line.
func (r *request) first(line string) error {
	method, rest, _ := strings.Cut(line, " ")
	target, version, ok := strings.Cut(rest, " ")
	if !ok || method == "" || target == "" || strings.ContainsAny(line, "\t") || strings.Contains(version, " ") {
		return malformed("a request line that is not METHOD TARGET VERSION")
	}
	for i := range len(method) {
		if !isToken(method[i]) {
			return malformed("a request's method is no word")
		}
	}
	switch version {
	case "HTTP/1.0", "HTTP/1.1":
		r.minor = version[len(version)-1] - '0'
	case "HTTP/2.0":
		return malformed("HTTP/2 without TLS, whose hosts are not read")
	default:
		return malformed("a request of a version other than HTTP/1.0 and 1.1")
	}
	r.begun, r.method = true, method
	return r.target(target)
}

func (r *request) target(target string) error {
	if r.method == "CONNECT" {
		r.authority = target
		return nil
	}
	if target[0] == '/' || target == "*" && r.method == "OPTIONS" {
		return nil
	}
	scheme, rest, ok := strings.Cut(target, "://")
	if !ok || !strings.EqualFold(scheme, "http") && !strings.EqualFold(scheme, "https") {
		return malformed("a request's target is neither a path nor a URL")
	}
	if end := strings.IndexAny(rest, `/?#\`); end >= 0 {
		rest = rest[:end]
	}
	if rest == "" {
		return malformed("a request's URL has no host")
	}
	r.authority = rest
	return nil
}

// header reads one, of which only those matter that say where a request goes and where it ends.
func (r *request) header(line string) error {
	name, value, ok := strings.Cut(line, ":")
	if !ok || name == "" {
		return malformed("a header without a name")
	}
	for i := range len(name) {
		if !isToken(name[i]) {
			return malformed("a header's name with a character that no name has")
		}
	}
	value = strings.Trim(value, " \t")
	switch strings.ToLower(name) {
	case "host":
		r.host = value
		r.hosts++
	case "content-length":
		n, err := strconv.ParseUint(value, 10, 62)
		if err != nil || value[0] == '+' {
			return malformed("a Content-Length that is no number")
		}
		r.length = int64(n)
		r.lengths++
	case "transfer-encoding":
		if !strings.EqualFold(value, "chunked") {
			return malformed("a Transfer-Encoding other than chunked")
		}
		r.chunked = true
		r.encodings++
	case "upgrade":
		r.websocket = strings.EqualFold(value, "websocket")
	case "connection":
		for part := range strings.SplitSeq(value, ",") {
			r.upgrade = r.upgrade || strings.EqualFold(strings.Trim(part, " \t"), "upgrade")
		}
	}
	return nil
}

// server is the name that the request is for.
func (r *request) server() (string, error) {
	if r.hosts > 1 {
		return "", malformed("a request with %d Host headers", r.hosts)
	}
	host, err := hostOf(r.host)
	if err != nil || r.authority == "" {
		return host, err
	}
	authority, err := hostOf(r.authority)
	if err != nil {
		return "", err
	}
	if r.hosts == 1 && !strings.EqualFold(authority, host) {
		return "", malformed("a request whose target and Host header differ")
	}
	return authority, nil
}

// hostOf is an authority without its port.
func hostOf(authority string) (string, error) {
	host, port := authority, ""
	if strings.HasPrefix(authority, "[") {
		end := strings.IndexByte(authority, ']')
		if end < 0 {
			return "", malformed("a host with a [ that is not closed")
		}
		host, port = authority[1:end], authority[end+1:]
	} else if i := strings.IndexByte(authority, ':'); i >= 0 {
		host, port = authority[:i], authority[i:]
	}
	if port != "" && (port[0] != ':' || len(port) > 6 || strings.Trim(port[1:], "0123456789") != "") {
		return "", malformed("a host whose port is no number")
	}
	if len(host) > maxName || !visible(host) || strings.ContainsAny(host, "@/\\?#,") {
		return "", malformed("a host that is none")
	}
	return host, nil
}

// endHead asks about a complete head, and says what follows it.
func (s *Scanner) endHead() error {
	r := &s.request
	name, err := r.server()
	if err != nil {
		return err
	}
	if r.lengths > 1 || r.encodings > 1 || r.lengths > 0 && r.chunked || r.chunked && r.minor == 0 {
		return malformed("a request with more than one way to find its end")
	}
	if (r.length > 0 || r.chunked) && (r.method == "GET" || r.method == "HEAD" || r.method == "TRACE") {
		return malformed("a %s with a body, which some servers take for the next request", r.method)
	}
	if err := s.found(Finding{Kind: HTTP, Name: name}); err != nil {
		return err
	}
	s.release(s.pos)
	s.requests++
	switch {
	case r.method == "CONNECT":
		// What follows is a flow of its own, or the next request, should the server not want to be a tunnel.
		if s.tunnels++; s.tunnels > maxTunnels || r.lengths > 0 || r.chunked {
			return malformed("tunnels within tunnels")
		}
		s.step, s.named = (*Scanner).begin, Finding{}
		return nil
	case r.chunked:
		s.step = (*Scanner).chunk
	default:
		s.skip = r.length
		// Only the first answer can be told from others without reading all of them.
		if s.requests == 1 && r.websocket && r.upgrade && r.method == "GET" && r.length == 0 {
			s.upgrading.Store(true)
		}
	}
	if s.step != nil && !r.chunked {
		s.step = (*Scanner).head
	}
	s.request = request{}
	return nil
}

// chunk reads the line before a chunk's data.
func (s *Scanner) chunk() (more bool, err error) {
	line, ok, err := s.nextLine()
	if err != nil || !ok {
		if err == nil && len(s.held)-s.off > maxChunkLine {
			err = malformed("a chunk's size in more than %d bytes", maxChunkLine)
		}
		return false, err
	}
	text, _, _ := strings.Cut(string(line), ";")
	text = strings.TrimRight(text, " \t")
	if text == "" || len(text) > 15 || strings.Trim(text, "0123456789abcdefABCDEF") != "" {
		return false, malformed("a chunk's size that is no number")
	}
	size, err := strconv.ParseInt(text, 16, 64)
	if err != nil {
		return false, malformed("a chunk's size that is no number")
	}
	s.release(s.pos)
	if size == 0 {
		s.step = (*Scanner).trailer
		return true, nil
	}
	s.skip, s.step = size, (*Scanner).chunkEnd
	return true, nil
}

func (s *Scanner) chunkEnd() (more bool, err error) {
	if len(s.held)-s.off < 2 {
		return false, nil
	}
	if s.held[s.off] != '\r' || s.held[s.off+1] != '\n' {
		return false, malformed("a chunk that is longer than it said")
	}
	s.release(s.off + 2)
	s.step = (*Scanner).chunk
	return true, nil
}

// trailer reads headers after the last chunk; none of them may say what only a head says.
func (s *Scanner) trailer() (more bool, err error) {
	line, ok, err := s.nextLine()
	if err != nil || !ok {
		return false, err
	}
	if len(line) == 0 {
		s.release(s.pos)
		s.step = (*Scanner).head
		return true, nil
	}
	var r request
	if err := r.header(string(line)); err != nil {
		return false, err
	}
	if r.hosts+r.lengths+r.encodings > 0 {
		return false, malformed("a trailer that names a host or a length")
	}
	return true, nil
}

// switching is how an answer begins that makes an HTTP connection a WebSocket's.
const switching = "HTTP/1.1 101 "

// Answered is told what the server sends, before the client is. It may be called while Scan runs.
func (s *Scanner) Answered(p []byte) {
	n := s.answered.Load()
	if n < 0 || int(n) == len(switching) || len(p) == 0 {
		return
	}
	want := switching[n:]
	got := p[:min(len(p), len(want))]
	if string(got) != want[:len(got)] {
		s.answered.Store(-1)
		return
	}
	s.answered.Store(n + int32(len(got))) //nolint:gosec // at most the line's length
}
