package access

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base32"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// Errors of tokens.
var (
	ErrUnknown = errors.New("the token is unknown or revoked")
	ErrExpired = errors.New("the token has expired")
	ErrInvalid = errors.New("invalid")
	ErrDenied  = errors.New("denied")
	ErrMissing = errors.New("no such token")
	ErrTooMany = errors.New("too many tokens")
	ErrCorrupt = errors.New("the file of tokens is damaged")
)

const (
	maxTokens    = 10_000
	maxFile      = 16 << 20
	keepExpired  = 30 * 24 * time.Hour // an expired token is listed so long, so that one can see why a client is refused
	maxTTL       = 100 * 365 * 24 * time.Hour
	maxTokenText = 256
	prefix       = "fkd_"
	e2bPrefix    = "e2b_" // then the digits of the id, then the secret's
)

// Token is what is known of a token. The token itself is not: it is shown once, when it is made.
type Token struct {
	ID      string
	Name    string
	Scope   Scope
	Sandbox string // it opens this one and nothing else; "": any
	Created time.Time
	Expires time.Time // zero: never
	Parent  string    // id of the token that made it: it is revoked with that one; "": none
	Used    time.Time // since the daemon started; zero: not
}

// Principal is who shows the token.
func (t *Token) Principal() Principal {
	return Principal{Name: t.Name, Scope: t.Scope, Sandbox: t.Sandbox, TokenID: t.ID}
}

// Expired reports whether its time is over.
func (t *Token) Expired(now time.Time) bool { return !t.Expires.IsZero() && !now.Before(t.Expires) }

// record is a token as it is stored: a digest stands for the token, which is random enough that none can be found for a
// digest by trying.
type record struct {
	Token

	hash    [sha256.Size]byte
	revoked chan struct{}
}

// Store keeps tokens in one file. It is safe for concurrent use by one process.
type Store struct {
	path string
	now  func() time.Time

	mu     sync.Mutex
	byID   map[string]*record
	byHash map[[sha256.Size]byte]*record
}

// Open reads the tokens at path; there need not be any.
func Open(path string) (*Store, error) { return open(path, time.Now) }

func open(path string, now func() time.Time) (*Store, error) {
	s := &Store{path: path, now: now, byID: map[string]*record{}, byHash: map[[sha256.Size]byte]*record{}}
	if err := sweep(path); err != nil {
		return nil, err
	}
	text, err := readFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read tokens: %w", err)
	}
	records, err := decode(text)
	if err != nil {
		return nil, fmt.Errorf("read tokens: %w: %s: %w; move the file away and create the tokens anew", ErrCorrupt, path, err)
	}
	for _, r := range records {
		s.add(r)
	}
	return s, nil
}

func readFile(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Size() > maxFile {
		return nil, fmt.Errorf("%w: %s has more than %d bytes", ErrCorrupt, path, maxFile)
	}
	return os.ReadFile(path)
}

func (s *Store) add(r *record) {
	s.byID[r.ID], s.byHash[r.hash] = r, r
}

func (s *Store) drop(r *record) {
	delete(s.byID, r.ID)
	delete(s.byHash, r.hash)
}

// Spec is a token to make.
type Spec struct {
	Name    string
	Scope   Scope
	Sandbox string
	TTL     time.Duration // 0: for ever
	By      Principal     // who makes it; it cannot have more than he has
	E2B     bool          // in the form that E2B's clients demand
}

// Create makes a token and returns it. Only its digest is kept: nobody can be told it again.
func (s *Store) Create(spec Spec) (Token, string, error) {
	if err := spec.check(); err != nil {
		return Token{}, "", err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	s.forgetOld(now)
	if len(s.byID) >= maxTokens {
		return Token{}, "", fmt.Errorf("%w: there are %d, the most allowed; revoke some", ErrTooMany, len(s.byID))
	}
	r := &record{revoked: make(chan struct{})}
	r.ID = s.newID()
	r.Name, r.Scope, r.Sandbox, r.Created = spec.Name, spec.Scope, spec.Sandbox, now.Truncate(time.Second)
	if r.Name == "" {
		r.Name = r.ID
	}
	if spec.TTL > 0 {
		r.Expires = now.Add(spec.TTL)
	}
	if err := s.inherit(r, spec.By); err != nil {
		return Token{}, "", err
	}
	secret := prefix + r.ID + "_" + randomText()
	if spec.E2B {
		secret = e2bPrefix + strings.TrimPrefix(r.ID, idPrefix) + randomHex()
	}
	r.hash = sha256.Sum256([]byte(secret))
	s.add(r)
	if err := s.save(); err != nil {
		s.drop(r)
		return Token{}, "", err
	}
	return r.Token, secret, nil
}

func (spec *Spec) check() error {
	switch {
	case spec.Scope <= None || spec.Scope > Admin:
		return fmt.Errorf("%w: scope %s: give pull, read, use, manage or admin", ErrInvalid, spec.Scope)
	case spec.Sandbox != "" && spec.Scope == Admin:
		return fmt.Errorf("%w: a token of one sandbox cannot be admin, which is about the host; give read, use or manage", ErrInvalid)
	case spec.Sandbox != "" && spec.Scope == Pull:
		return fmt.Errorf("%w: a token of one sandbox takes no snapshots; give read, use or manage", ErrInvalid)
	case spec.TTL < 0 || spec.TTL > maxTTL:
		return fmt.Errorf("%w: the time to live is %s", ErrInvalid, spec.TTL)
	case spec.By.Sandbox != "":
		return fmt.Errorf("%w: a token of one sandbox makes no tokens", ErrDenied)
	case spec.Scope > spec.By.Scope, spec.Scope == Pull && !spec.By.May(Pull, ""):
		return fmt.Errorf("%w: scope %s is more than that of who asks, %s", ErrDenied, spec.Scope, spec.By.Scope)
	}
	return checkName(spec.Name)
}

// checkName keeps names fit for logs and tables, and from being taken for the owner's or another token's id.
func checkName(name string) error {
	if len(name) > 64 {
		return fmt.Errorf("%w: name %.80q has more than 64 characters", ErrInvalid, name)
	}
	for i, c := range []byte(name) {
		ok := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || i > 0 && strings.IndexByte("._-@/", c) >= 0
		if !ok {
			return fmt.Errorf("%w: name %.80q: give letters, digits and . _ - @ /, a letter or digit first", ErrInvalid, name)
		}
	}
	if name == Owner().Name || name == "root" || strings.HasPrefix(name, idPrefix) {
		return fmt.Errorf("%w: name %q would be taken for something else", ErrInvalid, name)
	}
	return nil
}

// inherit binds a token to the one that makes it: revoking a token that leaked must not leave others that it made. What an
// administrator makes stands for itself.
func (s *Store) inherit(r *record, by Principal) error {
	if by.TokenID == "" || by.Scope == Admin {
		return nil
	}
	parent := s.byID[by.TokenID]
	if parent == nil {
		return ErrUnknown
	}
	r.Parent = parent.ID
	if !parent.Expires.IsZero() && (r.Expires.IsZero() || r.Expires.After(parent.Expires)) {
		r.Expires = parent.Expires
	}
	return nil
}

const idPrefix = "tk"

func (s *Store) newID() string {
	for {
		var b [4]byte
		_, _ = rand.Read(b[:]) // never fails: it aborts the program instead
		id := idPrefix + hex.EncodeToString(b[:])
		if s.byID[id] == nil {
			return id
		}
	}
}

// randomText has letters and digits alone, so that a click selects all of it.
func randomText() string {
	var b [32]byte
	_, _ = rand.Read(b[:])
	return strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(b[:]))
}

// randomHex is for clients that take hexadecimal digits alone.
func randomHex() string {
	var b [32]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// Check finds who shows a token. The time that it takes tells nothing of the tokens that there are: they are found by the
// digest of what was shown. gone is closed when the token is revoked.
func (s *Store) Check(shown string) (t Token, gone <-chan struct{}, err error) {
	if len(shown) > maxTokenText {
		return Token{}, nil, ErrUnknown
	}
	hash := sha256.Sum256([]byte(shown))
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.byHash[hash]
	if r == nil || subtle.ConstantTimeCompare(r.hash[:], hash[:]) != 1 {
		return Token{}, nil, ErrUnknown
	}
	now := s.now()
	if r.Expired(now) {
		return Token{}, nil, fmt.Errorf("%w: at %s", ErrExpired, r.Expires.UTC().Format(time.RFC3339))
	}
	r.Used = now
	return r.Token, r.revoked, nil
}

// List returns the tokens, oldest first; of one sandbox, or, with "", all.
func (s *Store) List(sandbox string) []Token {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []Token
	for _, r := range s.byID {
		if sandbox == "" || r.Sandbox == sandbox {
			list = append(list, r.Token)
		}
	}
	slices.SortFunc(list, func(a, b Token) int {
		if c := a.Created.Compare(b.Created); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list
}

// Usable reports whether anybody could be let in.
func (s *Store) Usable() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	for _, r := range s.byID {
		if !r.Expired(now) {
			return true
		}
	}
	return false
}

// Revoke ends a token and those that it made. With a sandbox it must be one of that sandbox.
func (s *Store) Revoke(id, sandbox string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.byID[id]
	if r == nil || sandbox != "" && r.Sandbox != sandbox {
		return fmt.Errorf("%w: %.80q", ErrMissing, id)
	}
	return s.end(func(other *record) bool { return other == r || other.Parent == r.ID })
}

// Prune ends the tokens of sandboxes that are gone.
func (s *Store) Prune(gone func(sandbox string) bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.end(func(r *record) bool { return r.Sandbox != "" && gone(r.Sandbox) })
}

// end removes some. They are refused from now on even when the file cannot be written, but then the error says so: the next
// daemon would know them again.
func (s *Store) end(which func(*record) bool) error {
	var ended []*record
	for _, r := range s.byID {
		if which(r) {
			ended = append(ended, r)
		}
	}
	if len(ended) == 0 {
		return nil
	}
	for _, r := range ended {
		s.drop(r)
		close(r.revoked)
	}
	if err := s.save(); err != nil {
		return fmt.Errorf("revoked until this daemon ends, but %w", err)
	}
	return nil
}

func (s *Store) forgetOld(now time.Time) {
	for _, r := range s.byID {
		if r.Expired(now.Add(-keepExpired)) {
			s.drop(r)
		}
	}
}

// The file.

type file struct {
	Version int      `json:"version"`
	Tokens  []stored `json:"tokens"`
}

type stored struct {
	ID      string     `json:"id"`
	Name    string     `json:"name"`
	Scope   string     `json:"scope"`
	Sandbox string     `json:"sandbox,omitempty"`
	Created time.Time  `json:"created"`
	Expires *time.Time `json:"expires,omitempty"`
	Parent  string     `json:"parent,omitempty"`
	SHA256  string     `json:"sha256"` // of the token
}

func decode(text []byte) ([]*record, error) {
	var f file
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("there is more behind it")
	}
	if f.Version != 1 {
		return nil, fmt.Errorf("version %d, and this program knows 1", f.Version)
	}
	if len(f.Tokens) > maxTokens {
		return nil, fmt.Errorf("%d tokens", len(f.Tokens))
	}
	seen := map[string]bool{}
	var records []*record
	for i, t := range f.Tokens {
		r, err := t.record()
		if err != nil {
			return nil, fmt.Errorf("token %d: %w", i, err)
		}
		if seen[r.ID] || seen[t.SHA256] {
			return nil, fmt.Errorf("token %d is there twice", i)
		}
		seen[r.ID], seen[t.SHA256] = true, true
		records = append(records, r)
	}
	return records, nil
}

func (t *stored) record() (*record, error) {
	scope, err := ParseScope(t.Scope)
	if err != nil {
		return nil, err
	}
	if t.ID == "" {
		return nil, errors.New("no id")
	}
	r := &record{revoked: make(chan struct{})}
	r.Token = Token{ID: t.ID, Name: t.Name, Scope: scope, Sandbox: t.Sandbox, Created: t.Created, Parent: t.Parent}
	if t.Expires != nil {
		r.Expires = *t.Expires
	}
	hash, err := hex.DecodeString(t.SHA256)
	if err != nil || len(hash) != sha256.Size || t.SHA256 != strings.ToLower(t.SHA256) {
		return nil, fmt.Errorf("%.80q is no SHA-256", t.SHA256)
	}
	copy(r.hash[:], hash)
	return r, nil
}

func (s *Store) save() error {
	f := file{Version: 1, Tokens: []stored{}}
	for _, r := range s.byID {
		t := stored{
			ID: r.ID, Name: r.Name, Scope: r.Scope.String(), Sandbox: r.Sandbox, Created: r.Created, Parent: r.Parent,
			SHA256: hex.EncodeToString(r.hash[:]),
		}
		if !r.Expires.IsZero() {
			t.Expires = &r.Expires
		}
		f.Tokens = append(f.Tokens, t)
	}
	slices.SortFunc(f.Tokens, func(a, b stored) int { return strings.Compare(a.ID, b.ID) })
	text, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return fmt.Errorf("encode tokens: %w", err)
	}
	if err := replaceFile(s.path, append(text, '\n')); err != nil {
		return fmt.Errorf("write tokens: %w", err)
	}
	return nil
}

// sweep removes what a daemon that was killed has left of replaceFile.
func sweep(path string) error {
	left, err := filepath.Glob(filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+"-*"))
	for _, name := range left {
		err = errors.Join(err, os.Remove(name))
	}
	if err != nil {
		return fmt.Errorf("read tokens: %w", err)
	}
	return nil
}

// replaceFile leaves either the old content or the new one, whenever the host dies.
func replaceFile(path string, text []byte) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(tmp.Name()))
		}
	}()
	_, err = tmp.Write(text)
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err != nil {
		return err
	}
	if err = os.Rename(tmp.Name(), path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil // the new content is there; only its survival of a power cut now is open
	}
	_ = dir.Sync()
	return dir.Close()
}
