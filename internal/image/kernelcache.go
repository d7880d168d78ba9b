package image

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Kernels of the cache that nobody asks Debian about: those that records name. What came with a snapshot from elsewhere is kept
// by the digest of its content, so none can have the place of one that builds fetch, whose digest is of the package it came from.

var kernelDigestForm = regexp.MustCompile(`^[0-9a-f]{64}$`)

// CachedKernel loads a kernel of the cache by its digest and verifies its files. Without one the error wraps fs.ErrNotExist.
func CachedKernel(cacheDir, digest string) (*Kernel, error) {
	dir, err := kernelDir(cacheDir, digest)
	if err != nil {
		return nil, err
	}
	k, err := loadKernel(dir, digest)
	if _, statErr := os.Lstat(dir); errors.Is(statErr, fs.ErrNotExist) {
		return nil, statErr
	}
	if err != nil {
		return nil, fmt.Errorf("kernel %.12s: %w", digest, err)
	}
	return k, nil
}

func kernelDir(cacheDir, digest string) (string, error) {
	if !kernelDigestForm.MatchString(digest) {
		return "", fmt.Errorf("kernel %.80q: %w: no digest", digest, fs.ErrNotExist)
	}
	return filepath.Join(cacheDir, "kernels", digest), nil
}

// ModuleFile is a module that is to be kept.
type ModuleFile struct {
	Name string // letters, digits and underscores
	Data []byte
}

// keeping begins the name of a directory that is being filled.
const keeping = "keep-"

// KeepKernel puts a kernel that was not fetched into the cache, under a digest that the caller has made of its content. One that
// is there and sound stays as it is. It reports whether it is new.
func KeepKernel(cacheDir, content, version, release string, boot []byte, modules []ModuleFile) (isNew bool, err error) {
	dir, err := kernelDir(cacheDir, content)
	if err != nil {
		return false, err
	}
	if _, err := loadKernel(dir, content); err == nil {
		return false, nil
	}
	if err := keepKernel(dir, kernelRecord{Kernel: Kernel{Digest: content, Version: version, Release: release}, Kept: true}, boot, modules); err != nil {
		return false, fmt.Errorf("keep kernel %.12s: %w", content, err)
	}
	return true, nil
}

func keepKernel(dir string, rec kernelRecord, boot []byte, modules []ModuleFile) error {
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), keeping)
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	rec.Boot, rec.Files = "kernel", map[string]string{}
	if err := rec.add(tmp, rec.Boot, boot); err != nil {
		return err
	}
	for _, m := range modules {
		if name, _ := moduleName(m.Name + ".ko"); name != m.Name {
			return fmt.Errorf("a module %.80q", m.Name)
		}
		if err := rec.add(tmp, m.Name+".ko", m.Data); err != nil {
			return err
		}
		rec.Modules = append(rec.Modules, Module{Name: m.Name})
	}
	data, err := json.MarshalIndent(rec, "", "\t")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(tmp, recordName), data, 0o600); err != nil {
		return err
	}
	return placeKernel(tmp, dir, rec.Digest)
}

// TrimKernels removes those that were not fetched and are not to stay, and what a daemon that died has not kept to its end. Nobody may
// keep one meanwhile.
func TrimKernels(cacheDir string, stays func(digest string) bool) error {
	entries, err := os.ReadDir(filepath.Join(cacheDir, "kernels"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		dir := filepath.Join(cacheDir, "kernels", e.Name())
		if strings.HasPrefix(e.Name(), keeping) {
			err = errors.Join(err, os.RemoveAll(dir))
		}
		if !kernelDigestForm.MatchString(e.Name()) || stays(e.Name()) {
			continue
		}
		var rec kernelRecord
		data, readErr := os.ReadFile(filepath.Join(dir, recordName))
		if readErr != nil || json.Unmarshal(data, &rec) != nil || !rec.Kept {
			continue
		}
		err = errors.Join(err, os.RemoveAll(dir))
	}
	return err
}
