package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// Errors that callers tell apart.
var (
	// ErrReference: what was given names nothing in any registry.
	ErrReference = errors.New("not a reference of a registry")
	// ErrNotFound: the registry has nothing of that name, or does not show it.
	ErrNotFound = errors.New("not found in the registry")
	// ErrDenied: it wants other credentials.
	ErrDenied = errors.New("the registry does not allow it")
	// ErrRegistry: it answers what it must not, or not at all.
	ErrRegistry = errors.New("the registry fails")
)

// Credentials open a registry. With a name and a password, or a token alone.
type Credentials struct{ Username, Password, Token string }

// Options of a connection.
type Options struct {
	Credentials *Credentials // nil: those of this user's docker configuration
	Fingerprint string       // of the registry's certificate, where nobody that the system trusts has signed it
	Push        bool         // it will be written to

	Stall, RetryGap time.Duration // 0: as is sensible
}

// Repository is one repository of a registry. It is safe for concurrent use.
type Repository struct {
	ref  name.Reference
	base string // of its addresses, up to the repository's name
	http *http.Client
	wire *wire
	gap  time.Duration
}

// Reference is what a user calls something in a registry, understood.
func Reference(text string) (name.Reference, error) {
	if !strings.ContainsRune(text, '/') || strings.Contains(text, "://") {
		return nil, fmt.Errorf("%w: %.200q; give it as REGISTRY/NAME:TAG, such as ghcr.io/me/warm:1 or localhost:5000/warm", ErrReference, text)
	}
	// Where no registry is named others mean Docker's: nothing goes there by a slip.
	ref, err := name.ParseReference(text, name.WithDefaultRegistry(""))
	if err != nil {
		if _, digest, ok := strings.Cut(text, "@"); ok {
			return nil, fmt.Errorf("%w: %.200q: %.80q is no digest, which is sha256: and 64 hexadecimal digits", ErrReference, text, digest)
		}
		return nil, fmt.Errorf("%w: %.200q; give it as REGISTRY/NAME:TAG, the name in lower case, such as ghcr.io/me/warm:1 or localhost:5000/warm", ErrReference, text)
	}
	if ref.Context().RegistryStr() == "" {
		return nil, fmt.Errorf("%w: %.200q names no registry; give it as REGISTRY/NAME:TAG, such as ghcr.io/me/warm:1 or localhost:5000/warm", ErrReference, text)
	}
	return ref, nil
}

// Open connects to the registry that a reference names, and shows it the credentials it asks for.
func Open(ctx context.Context, text string, opts Options) (*Repository, error) {
	ref, err := Reference(text)
	if err != nil {
		return nil, err
	}
	reg := ref.Context().Registry
	cfg, err := trust(reg.RegistryStr(), opts.Fingerprint)
	if err != nil {
		return nil, err
	}
	if opts.Stall == 0 {
		opts.Stall = patience
	}
	if opts.RetryGap == 0 {
		opts.RetryGap = time.Second
	}
	auth, err := authenticator(ref, opts.Credentials)
	if err != nil {
		return nil, err
	}
	r := &Repository{ref: ref, wire: newWire(reg.RegistryStr(), cfg, opts.Stall), gap: opts.RetryGap}
	scopes := []string{ref.Scope(transport.PullScope)}
	if opts.Push {
		scopes = []string{ref.Scope(transport.PushScope)}
	}
	if loopback(hostname(reg.RegistryStr())) && opts.Fingerprint == "" {
		// Encrypted where it is, as everywhere; name.Registry alone would try plain HTTP in private networks, too.
		reg, err = name.NewRegistry(reg.RegistryStr(), name.Insecure)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrReference, err)
		}
	}
	var base string
	err = r.retry(ctx, nil, func() error {
		rt, err := transport.NewWithContext(ctx, reg, auth, r.wire, scopes)
		if err != nil {
			return handshake(err)
		}
		r.http = &http.Client{Transport: rt, CheckRedirect: checkRedirect}
		base = "https"
		if reg.Scheme() == "http" {
			base = "http" // the transport knows which of the two it was
		}
		return nil
	})
	if err != nil {
		r.Close()
		return nil, r.explain(err)
	}
	r.base = base + "://" + reg.RegistryStr() + "/v2/" + ref.Context().RepositoryStr()
	return r, nil
}

func authenticator(ref name.Reference, c *Credentials) (authn.Authenticator, error) {
	if c != nil {
		return authn.FromConfig(authn.AuthConfig{Username: c.Username, Password: c.Password, RegistryToken: c.Token}), nil
	}
	auth, err := authn.DefaultKeychain.Resolve(ref.Context())
	if err != nil {
		return nil, fmt.Errorf("read credentials for %s from the docker configuration: %w", ref.Context().RegistryStr(), err)
	}
	return auth, nil
}

// DockerCredentials are those of this user's docker configuration for a reference, or nil if there are none.
func DockerCredentials(ctx context.Context, text string) (*Credentials, error) {
	ref, err := Reference(text)
	if err != nil {
		return nil, err
	}
	auth, err := authenticator(ref, nil)
	if err != nil || auth == authn.Anonymous {
		return nil, err
	}
	c, err := authn.Authorization(ctx, auth)
	if err != nil {
		return nil, fmt.Errorf("read credentials for %s from the docker configuration: %w", ref.Context().RegistryStr(), err)
	}
	out := &Credentials{Username: c.Username, Password: c.Password, Token: c.RegistryToken}
	if out.Token == "" && c.IdentityToken != "" {
		// What some registries give in the place of a password is exchanged by the same protocol.
		out.Username, out.Password = "<token>", c.IdentityToken
	}
	return out, nil
}

// Close lets go of the connections.
func (r *Repository) Close() { r.wire.CloseIdleConnections() }

func checkRedirect(req *http.Request, via []*http.Request) error {
	if len(via) > maxRedirects {
		return fmt.Errorf("%w: it leads from one address to the next, more than %d times", ErrRegistry, maxRedirects)
	}
	if req.URL.Scheme != "https" && via[0].URL.Scheme == "https" {
		return fmt.Errorf("%s: %w", req.URL.Host, errPlain)
	}
	return nil
}

// handshake makes an error of the first request, which package transport has made, one of ours.
func handshake(err error) error {
	if answer, ok := errors.AsType[*transport.Error](err); ok {
		return &statusError{status: answer.StatusCode, what: "say hello"}
	}
	return err
}

// statusError is an answer that says no.
type statusError struct {
	status int
	what   string // was to be done
	said   string // in its own words, cleaned
}

func (e *statusError) Error() string {
	text := fmt.Sprintf("%s: it answers %d %s", e.what, e.status, http.StatusText(e.status))
	if e.said != "" {
		text += ": " + e.said
	}
	return text
}

// check makes an answer that is none of those wanted an error.
func check(what string, answer *http.Response, want ...int) error {
	if slices.Contains(want, answer.StatusCode) {
		return nil
	}
	e := &statusError{status: answer.StatusCode, what: what}
	text, _ := io.ReadAll(io.LimitReader(answer.Body, 8<<10))
	var body struct {
		Errors []struct{ Code, Message string } `json:"errors"`
	}
	if json.Unmarshal(text, &body) == nil && len(body.Errors) > 0 {
		e.said = fmt.Sprintf("%.60q: %.200q", body.Errors[0].Code, body.Errors[0].Message)
	}
	return e
}

// do sends a request and returns an answer that is one of those wanted. The caller closes its body.
func (r *Repository) do(req *http.Request, what string, want ...int) (*http.Response, error) {
	req.Header.Set("User-Agent", "forkd")
	answer, err := r.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, cause(err))
	}
	if err := check(what, answer, want...); err != nil {
		_ = answer.Body.Close()
		return nil, err
	}
	return answer, nil
}

// cause leaves out addresses, which may have secrets in them.
func cause(err error) error {
	if u, ok := errors.AsType[*url.Error](err); ok {
		return u.Err
	}
	return err
}

const attempts = 4

// retry does something until it succeeds, another attempt would not mend it, or attempts have got nowhere. moved counts
// what has come so far; nil: nothing does.
func (r *Repository) retry(ctx context.Context, moved func() int64, do func() error) error {
	before := int64(-1)
	for n := 1; ; n++ {
		err := do()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if moved != nil {
			if now := moved(); now > before && before >= 0 {
				n = 1
				before = now
			} else {
				before = now
			}
		}
		if n >= attempts || !passing(err) {
			return err
		}
		timer := time.NewTimer(r.gap << (n - 1))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		}
	}
}

// errPassing marks what another attempt may mend though it is none of the network's errors.
var errPassing = errors.New("")

// passing reports whether another attempt may mend it.
func passing(err error) bool {
	if s, ok := errors.AsType[*statusError](err); ok {
		return s.status >= 500 || s.status == http.StatusTooManyRequests || s.status == http.StatusRequestTimeout
	}
	for _, lasting := range []error{errPlain, errInside, errEndless, ErrRegistry, ErrReference, ErrDenied, ErrNotFound} {
		if errors.Is(err, lasting) {
			return false
		}
	}
	if errors.Is(err, errStalled) || errors.Is(err, errPassing) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		return true
	}
	_, network := errors.AsType[interface {
		error
		Timeout() bool
	}](err)
	return network
}

// explain says whose fault it is and what to do.
func (r *Repository) explain(err error) error {
	if err == nil {
		return nil
	}
	reg, repo := r.ref.Context().RegistryStr(), r.ref.Context().RepositoryStr()
	if errors.Is(err, errNoUploads) {
		return fmt.Errorf("%w: %s takes no uploads for %s: it is read only, as another forkd is, or has to be told first that there is one (%w)", ErrUpload, reg, repo, err)
	}
	if s, ok := errors.AsType[*statusError](err); ok {
		switch s.status {
		case http.StatusUnauthorized, http.StatusForbidden:
			return fmt.Errorf("%w: %s with %s: log in there with: docker login %s (%w)", ErrDenied, reg, repo, reg, err)
		case http.StatusNotFound:
			return fmt.Errorf("%w: %s has no %s in %s, or does not show it to us (%w)", ErrNotFound, reg, r.ref.Identifier(), repo, err)
		}
		return fmt.Errorf("%w: %s: %w", ErrRegistry, reg, err)
	}
	if _, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](err); ok || errors.Is(err, errStalled) || errors.Is(err, errEndless) || errors.Is(err, errPlain) || errors.Is(err, errInside) ||
		errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: %s: %w", ErrRegistry, reg, err)
	}
	return fmt.Errorf("%s: %w", reg, err)
}
