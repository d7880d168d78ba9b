package qemu

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"forkd.dev/forkd/internal/engine/qemu/qmp"
)

// CommitDisk implements engine.Committer.
func (m *machine) CommitDisk(ctx context.Context, top, base string) error {
	if err := m.commitDisk(ctx, top, base); err != nil {
		return fmt.Errorf("commit disk %s of machine %s into %s: %w", filepath.Base(top), m.spec.ID, filepath.Base(base), m.failed(err))
	}
	return nil
}

func (m *machine) commitDisk(ctx context.Context, top, base string) error {
	if isClosed(m.done) {
		return m.dead()
	}
	// Of the whole commit: a capture in between would switch the disk that the job walks.
	if err := m.acquire(ctx); err != nil {
		return err
	}
	defer m.release()
	present, err := m.topNode(ctx)
	if err != nil {
		return err
	}
	topNode, err := m.nodeOf(ctx, top)
	if err != nil {
		return err
	}
	baseNode, err := m.nodeOf(ctx, base)
	if err != nil {
		return err
	}
	if topNode == present || topNode == baseNode {
		return errors.New("it must be between the machine's present disk and the one it is committed into")
	}
	job := "commit-" + strings.ToLower(rand.Text()[:12])
	ofJob := func(data json.RawMessage) bool {
		var d struct {
			Device string `json:"device"`
		}
		return json.Unmarshal(data, &d) == nil && d.Device == job
	}
	done, cancelled := m.announced.expect("BLOCK_JOB_COMPLETED", ofJob), m.announced.expect("BLOCK_JOB_CANCELLED", ofJob)
	defer m.announced.drop(done)
	defer m.announced.drop(cancelled)
	err = m.monitor.Do(ctx, qmp.Command{Name: "block-commit", Args: map[string]any{
		"job-id": job, "device": present, "top-node": topNode, "base-node": baseNode,
		// What the file above then names in its header. Left out it may be a description in JSON.
		"backing-file": base,
	}}, nil)
	if err != nil {
		return err
	}
	if err := m.awaitJob(ctx, job, done, cancelled); err != nil {
		return err
	}
	// QEMU keeps what blockdev-add opened, also when it is no part of the disk any more: a descriptor and, of a file that
	// was removed, its blocks. A machine that was branched 200 times had no descriptors left.
	return m.dropLeft(ctx)
}

func (m *machine) awaitJob(ctx context.Context, job string, done, cancelled *announcement) error {
	select {
	case data := <-done.seen:
		return jobError(data)
	case <-cancelled.seen:
		return errors.New("it was cancelled")
	case <-m.done:
		return m.dead()
	case <-ctx.Done():
	}
	cause := context.Cause(ctx)
	ctx, cancel := pauseContext(ctx)
	defer cancel()
	err := m.monitor.Do(ctx, qmp.Command{Name: "block-job-cancel", Args: map[string]any{"device": job}}, nil)
	if _, ended := errors.AsType[*qmp.Error](err); ended {
		return cause
	}
	if err != nil {
		return errors.Join(cause, err)
	}
	select {
	case <-done.seen:
	case <-cancelled.seen:
	case <-m.done:
	case <-ctx.Done():
	}
	return cause
}

// jobError is what a job ended with.
func jobError(data json.RawMessage) error {
	var d struct {
		Error string `json:"error"`
	}
	if err := json.Unmarshal(data, &d); err != nil {
		return err
	}
	if d.Error != "" {
		return fmt.Errorf("QEMU says: %s", d.Error)
	}
	return nil
}

// nodeOf is the block node of a file of the machine's disk. A file that was opened as another's backing file has a name
// of QEMU's choosing.
func (m *machine) nodeOf(ctx context.Context, path string) (string, error) {
	var nodes []struct {
		Name   string `json:"node-name"`
		Driver string `json:"drv"`
		File   string `json:"file"`
	}
	err := m.monitor.Do(ctx, qmp.Command{Name: "query-named-block-nodes", Args: map[string]any{"flat": true}}, &nodes)
	if err != nil {
		return "", err
	}
	for _, n := range nodes {
		if n.Driver == "file" {
			continue // The file itself, not what its format makes of it.
		}
		if name, err := fileName(n.File); err == nil && name == path {
			return n.Name, nil
		}
	}
	return "", fmt.Errorf("%s is no part of the machine's disk", path)
}
