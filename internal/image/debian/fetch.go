package debian

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"time"
)

// Progress is told about downloads; calls may come from several goroutines at once.
type Progress func(what string, done, total int64)

// Fetcher downloads into a cache addressed by SHA-256. It is safe for concurrent use, also by several processes on one
// directory: a file appears under its digest complete or not at all.
type Fetcher struct {
	dir      string
	client   *http.Client
	progress Progress
	retryGap time.Duration
}

// NewFetcher makes a fetcher whose downloads go below dir, which is made when missing, through the proxies and with
// the certificate authorities that conf names. root is where conf's absolute paths are looked up.
func NewFetcher(dir string, conf AptConf, root fs.FS, progress Progress) (*Fetcher, error) {
	tmp := filepath.Join(dir, "tmp")
	if err := os.MkdirAll(tmp, 0o700); err != nil {
		return nil, fmt.Errorf("make download cache: %w", err)
	}
	RemoveStale(tmp, "*")
	tlsConfig, err := tlsConfigOf(conf, root)
	if err != nil {
		return nil, err
	}
	if progress == nil {
		progress = func(string, int64, int64) {}
	}
	transport := &http.Transport{
		Proxy:                 conf.ProxyFunc(http.ProxyFromEnvironment),
		TLSClientConfig:       tlsConfig,
		MaxIdleConnsPerHost:   parallelDownloads,
		IdleConnTimeout:       30 * time.Second,
		TLSHandshakeTimeout:   20 * time.Second,
		ResponseHeaderTimeout: 60 * time.Second,
		DisableCompression:    true, // a digest is of the bytes the archive serves.
		ForceAttemptHTTP2:     true,
	}
	return &Fetcher{dir: dir, client: &http.Client{Transport: transport}, progress: progress, retryGap: time.Second}, nil
}

// RemoveStale removes what an interrupted process left behind in a directory of temporary files. What another process
// is writing just now is younger. A failure costs only space.
func RemoveStale(dir, pattern string) {
	names, _ := filepath.Glob(filepath.Join(dir, pattern))
	for _, name := range names {
		if info, err := os.Lstat(name); err == nil && time.Since(info.ModTime()) > staleAge {
			_ = os.RemoveAll(name)
		}
	}
}

// staleAge is longer than any download or extraction takes without touching its file.
const staleAge = 24 * time.Hour

const (
	parallelDownloads = 4
	attempts          = 4
	stallTimeout      = 60 * time.Second
)

func tlsConfigOf(conf AptConf, root fs.FS) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if file := conf.Get("Acquire::https::CAInfo"); filepath.IsAbs(file) {
		pem, err := readSmall(root, file[1:], maxKeyring)
		if err != nil {
			return nil, fmt.Errorf("read apt's Acquire::https::CAInfo: %w", err)
		}
		pool, err := x509.SystemCertPool()
		if err != nil {
			pool = x509.NewCertPool()
		}
		pool.AppendCertsFromPEM(pem)
		config.RootCAs = pool
	}
	return config, nil
}

// Close ends idle connections.
func (f *Fetcher) Close() { f.client.CloseIdleConnections() }

// statusError is an HTTP answer that is not the file.
type statusError struct {
	url  string
	code int
}

func (e *statusError) Error() string {
	return fmt.Sprintf("GET %s: %d %s", e.url, e.code, http.StatusText(e.code))
}

// missing reports whether err says that the server does not have the file.
func missing(err error) bool {
	s, ok := errors.AsType[*statusError](err)
	return ok && (s.code == http.StatusNotFound || s.code == http.StatusGone)
}

// Path is where the content of that digest is, or would be, cached.
func (f *Fetcher) Path(sha string) string { return filepath.Join(f.dir, "sha256", sha[:2], sha) }

// Fetch makes the content with the digest and size available and returns an open file of it. Content in the cache is
// verified again before it is used; urls are tried in turn. size < 0: not known, then at most -size bytes.
func (f *Fetcher) Fetch(ctx context.Context, what, sha string, size int64, urls ...string) (*os.File, error) {
	if file, err := f.cached(sha, size); err == nil {
		return file, nil
	}
	var first error
	for _, u := range urls {
		err := f.retry(ctx, func() error { return f.download(ctx, what, u, sha, size) })
		if err == nil {
			return f.cached(sha, size)
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if first == nil || missing(first) {
			first = err
		}
	}
	return nil, fmt.Errorf("download %s: %w", what, first)
}

// cached opens a verified file of the cache; one that does not match its name is removed.
func (f *Fetcher) cached(sha string, size int64) (*os.File, error) {
	file, err := os.Open(f.Path(sha))
	if err != nil {
		return nil, err
	}
	hash := sha256.New()
	n, err := io.Copy(hash, file)
	if err == nil {
		_, err = file.Seek(0, io.SeekStart)
	}
	if err == nil && (hex.EncodeToString(hash.Sum(nil)) != sha || size >= 0 && n != size) {
		err = fmt.Errorf("cached file %s does not match its digest", sha)
		_ = os.Remove(f.Path(sha))
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// retry repeats what failed for a reason that may pass: the network, or a server that says so.
func (f *Fetcher) retry(ctx context.Context, fn func() error) error {
	gap := f.retryGap
	for attempt := 1; ; attempt++ {
		err := fn()
		if err == nil || attempt == attempts || ctx.Err() != nil || !transient(err) {
			return err
		}
		timer := time.NewTimer(gap)
		select {
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-timer.C:
		}
		gap *= 3
	}
}

func transient(err error) bool {
	if s, ok := errors.AsType[*statusError](err); ok {
		return s.code >= 500 || s.code == http.StatusTooManyRequests || s.code == http.StatusRequestTimeout
	}
	if _, ok := errors.AsType[*fs.PathError](err); ok {
		return false // the local disk.
	}
	return true
}

func (f *Fetcher) download(ctx context.Context, what, from, sha string, size int64) error {
	body, err := f.get(ctx, from)
	if err != nil {
		return err
	}
	defer body.Close()
	tmp, err := os.CreateTemp(filepath.Join(f.dir, "tmp"), "download-")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	defer tmp.Close()
	limit := size
	if limit < 0 {
		limit = -size
	}
	hash := sha256.New()
	counter := &countingWriter{report: func(n int64) { f.progress(what, n, max(size, 0)) }}
	n, err := io.Copy(io.MultiWriter(tmp, hash, counter), io.LimitReader(body, limit+1))
	if err != nil {
		return fmt.Errorf("GET %s: %w", from, err)
	}
	if n > limit || size >= 0 && n != size {
		return fmt.Errorf("GET %s: got %d bytes, the index says %d", from, n, size)
	}
	if got := hex.EncodeToString(hash.Sum(nil)); got != sha {
		return fmt.Errorf("GET %s: content has digest %s, the index says %s", from, got, sha)
	}
	return f.commit(tmp, sha)
}

// commit gives a complete temporary file its name in the cache.
func (f *Fetcher) commit(tmp *os.File, sha string) error {
	if err := tmp.Sync(); err != nil {
		return err
	}
	if err := tmp.Close(); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(f.Path(sha)), 0o700); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), f.Path(sha))
}

// get starts a request; the body fails when no byte arrives for stallTimeout.
func (f *Fetcher) get(ctx context.Context, from string) (io.ReadCloser, error) {
	u, err := url.Parse(from)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("%q is not an http address", clip(from))
	}
	ctx, cancel := context.WithCancelCause(ctx)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, from, nil)
	if err != nil {
		cancel(nil)
		return nil, err
	}
	req.Header.Set("User-Agent", "forkd")
	resp, err := f.client.Do(req)
	if err != nil {
		cancel(nil)
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		cancel(nil)
		return nil, &statusError{url: from, code: resp.StatusCode}
	}
	stalled := errors.New("the server stopped sending")
	timer := time.AfterFunc(stallTimeout, func() { cancel(stalled) })
	return &stallReader{body: resp.Body, timer: timer, cause: func() error { return context.Cause(ctx) }, cancel: func() { cancel(nil) }}, nil
}

// small downloads a file of unknown digest into memory.
func (f *Fetcher) small(ctx context.Context, from string, limit int64) ([]byte, error) {
	var data []byte
	err := f.retry(ctx, func() error {
		body, err := f.get(ctx, from)
		if err != nil {
			return err
		}
		defer body.Close()
		data, err = io.ReadAll(io.LimitReader(body, limit+1))
		if err != nil {
			return fmt.Errorf("GET %s: %w", from, err)
		}
		if int64(len(data)) > limit {
			return &statusError{url: from, code: http.StatusRequestEntityTooLarge}
		}
		return nil
	})
	return data, err
}

type stallReader struct {
	body   io.ReadCloser
	timer  *time.Timer
	cause  func() error
	cancel func()
}

func (r *stallReader) Read(p []byte) (int, error) {
	n, err := r.body.Read(p)
	if n > 0 {
		r.timer.Reset(stallTimeout)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		if cause := r.cause(); cause != nil {
			err = cause
		}
	}
	return n, err
}

func (r *stallReader) Close() error {
	r.timer.Stop()
	err := r.body.Close()
	r.cancel()
	return err
}

// countingWriter reports every MiB.
type countingWriter struct {
	n, last int64
	report  func(int64)
}

func (w *countingWriter) Write(p []byte) (int, error) {
	w.n += int64(len(p))
	if w.n-w.last >= 1<<20 {
		w.last = w.n
		w.report(w.n)
	}
	return len(p), nil
}
