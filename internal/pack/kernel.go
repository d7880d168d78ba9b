package pack

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/store"
)

// Kernel says which member has the kernel that records call by a name. The name is a claim, as records are: what counts is
// the content.
type Kernel struct {
	Name    string       `json:"name"`    // as the records have it: version and digest of the package it came from
	Content layer.Digest `json:"content"` // of the member
}

// KernelFile is the content of a kernel's member: what boots an image, but for the agent, which is that of the forkd that
// boots it.
type KernelFile struct {
	Version string         // of its package; may be empty
	Release string         // uname -r; may be empty
	Image   []byte         // what the machine is given
	Modules []KernelModule // in the order they are loaded in
}

// KernelModule is an uncompressed module.
type KernelModule struct {
	Name string
	Data []byte
}

// Bounds of a kernel.
const (
	MaxKernelBytes   = 128 << 20 // content: Debian's is 52 MiB
	maxKernelHeader  = 64 << 10
	maxKernelModules = 256
	kernelVersion    = 1
)

// kernelHeader is the first line. The image follows it, then each module.
type kernelHeader struct {
	FormatVersion int                  `json:"format_version"` // first, so that any reader finds it
	Version       string               `json:"version"`
	Release       string               `json:"release"`
	Image         int64                `json:"image"` // bytes
	Modules       []kernelHeaderModule `json:"modules"`
}

type kernelHeaderModule struct {
	Name  string `json:"name"`
	Bytes int64  `json:"bytes"`
}

// ErrKernelSize is wrapped where a kernel is too large to be packed.
var ErrKernelSize = errors.New("kernel too large")

var kernelModuleName = regexp.MustCompile(`^[A-Za-z0-9_]{1,100}$`)

// Encode is the content of the member: that of one kernel is always the same.
func (k *KernelFile) Encode() ([]byte, error) {
	h := kernelHeader{FormatVersion: kernelVersion, Version: k.Version, Release: k.Release, Image: int64(len(k.Image)), Modules: []kernelHeaderModule{}}
	size := len(k.Image)
	for _, m := range k.Modules {
		h.Modules = append(h.Modules, kernelHeaderModule{m.Name, int64(len(m.Data))})
		size += len(m.Data)
	}
	line, err := h.line()
	if err != nil {
		return nil, err
	}
	if size += len(line); size > MaxKernelBytes {
		return nil, fmt.Errorf("%w: it has %d bytes, at most %d are packed", ErrKernelSize, size, MaxKernelBytes)
	}
	b := append(make([]byte, 0, size), line...)
	b = append(b, k.Image...)
	for _, m := range k.Modules {
		b = append(b, m.Data...)
	}
	if _, err := DecodeKernel(b); err != nil {
		return nil, err
	}
	return b, nil
}

func (h *kernelHeader) line() ([]byte, error) {
	line, err := json.Marshal(h)
	if err != nil {
		return nil, fmt.Errorf("encode kernel: %w", err)
	}
	return append(line, '\n'), nil
}

// DecodeKernel reads the content of a kernel's member. What it returns is parts of b. There is one encoding of a kernel.
func DecodeKernel(b []byte) (*KernelFile, error) {
	if len(b) > MaxKernelBytes {
		return nil, fmt.Errorf("kernel of %d bytes, at most %d are allowed", len(b), MaxKernelBytes)
	}
	end := bytes.IndexByte(b[:min(len(b), maxKernelHeader)], '\n')
	if end < 0 {
		return nil, errors.New("kernel without a header")
	}
	line, rest := b[:end+1], b[end+1:]
	h, err := readKernelHeader(line)
	if err != nil {
		return nil, err
	}
	k := &KernelFile{Version: h.Version, Release: h.Release}
	take := func(n int64) ([]byte, error) {
		if n <= 0 || n > int64(len(rest)) {
			return nil, fmt.Errorf("kernel whose header says that %d bytes follow where there are %d", n, len(rest))
		}
		part := rest[:n]
		rest = rest[n:]
		return part, nil
	}
	if k.Image, err = take(h.Image); err != nil {
		return nil, err
	}
	for _, m := range h.Modules {
		data, err := take(m.Bytes)
		if err != nil {
			return nil, err
		}
		k.Modules = append(k.Modules, KernelModule{m.Name, data})
	}
	if len(rest) > 0 {
		return nil, fmt.Errorf("kernel with %d bytes more than its header says", len(rest))
	}
	return k, nil
}

func readKernelHeader(line []byte) (*kernelHeader, error) {
	h := &kernelHeader{}
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	if err := d.Decode(h); err != nil {
		return nil, fmt.Errorf("kernel whose header cannot be read: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("kernel with two headers")
	}
	if h.FormatVersion != kernelVersion {
		return nil, fmt.Errorf("kernel of format version %d, this forkd reads %d", h.FormatVersion, kernelVersion)
	}
	for _, text := range []string{h.Version, h.Release} {
		if len(text) > 200 || !utf8.ValidString(text) || strings.ContainsFunc(text, unicode.IsControl) {
			return nil, fmt.Errorf("kernel of version %.60q", text)
		}
	}
	if len(h.Modules) > maxKernelModules {
		return nil, fmt.Errorf("kernel with %d modules, at most %d are allowed", len(h.Modules), maxKernelModules)
	}
	seen := map[string]bool{}
	for _, m := range h.Modules {
		if !kernelModuleName.MatchString(m.Name) || seen[m.Name] {
			return nil, fmt.Errorf("kernel with a module %.120q, twice or of a name that is none", m.Name)
		}
		seen[m.Name] = true
	}
	if h.Modules == nil {
		h.Modules = []kernelHeaderModule{}
	}
	again, err := h.line()
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(again, line) {
		return nil, errors.New("kernel whose header is not in the form that it has")
	}
	return h, nil
}

// checkKernels: each that is listed is a member and some record's; a pack of version 1 has none.
func (m *Manifest) checkKernels() error {
	if m.FormatVersion == 1 && (len(m.Kernels) > 0 || m.kernelMembers() > 0) {
		return errors.New("its manifest has a kernel, which none of version 1 has")
	}
	if len(m.Kernels) > len(m.Snapshots) {
		return fmt.Errorf("its manifest has %d kernels for %d snapshots", len(m.Kernels), len(m.Snapshots))
	}
	seen := map[string]bool{}
	for _, k := range m.Kernels {
		if k.Name == "" || !slices.ContainsFunc(m.Snapshots, func(s store.Snapshot) bool { return s.Kernel == k.Name }) {
			return fmt.Errorf("no snapshot of its manifest was made with kernel %.120q", k.Name)
		}
		if seen[k.Name] {
			return fmt.Errorf("its manifest has kernel %.120q twice", k.Name)
		}
		seen[k.Name] = true
		if _, ok := m.member(KernelMember, k.Content); !ok {
			return fmt.Errorf("its kernel %s is no member of the pack", k.Content)
		}
	}
	return nil
}

func (m *Manifest) kernelMembers() (n int) {
	for _, x := range m.Members {
		if x.Kind == KernelMember {
			n++
		}
	}
	return n
}

// Kernel is the content of the kernel that a record names, if the pack has it.
func (m *Manifest) Kernel(name string) (layer.Digest, bool) {
	for _, k := range m.Kernels {
		if k.Name == name {
			return k.Content, true
		}
	}
	return layer.Digest{}, false
}
