package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/layout"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/proc"
	"forkd.dev/forkd/internal/store"
)

// recordVersion changes when an older record cannot be read any more; then machines of older daemons are buried.
const recordVersion = 1

// keptSandbox is what a sandbox is besides its machine: what outlives its daemon, running or suspended.
type keptSandbox struct {
	Tag      string             `json:"tag"`
	Index    int                `json:"index"`
	Count    int                `json:"count"`
	Hostname string             `json:"hostname"`
	Labels   map[string]string  `json:"labels,omitempty"`
	Env      map[string]string  `json:"env,omitempty"`
	Created  time.Time          `json:"created"`
	Expires  time.Time          `json:"expires"`
	Report   *wire.AwakenReport `json:"report"`
	Ready    time.Duration      `json:"ready"`
	Branches int                `json:"branches"`

	Public    []int  `json:"public_ports,omitempty"` // in order
	Workspace string `json:"workspace,omitempty"`    // that it is, if it is one
	Limits    Limits `json:"limits,omitzero"`
	Life      Life   `json:"life,omitzero"`

	Egress egress.Policy `json:"egress,omitzero"` // what it may reach
	Talked bool          `json:"talked,omitempty"`
	// NetSpent is what networks carried that it had before.
	NetSpent network.Totals `json:"net_spent,omitzero"`

	Spent proc.Consumption `json:"spent"` // of machines it had before

	Ran store.Ran `json:"ran,omitzero"` // in it, when this was written
}

// kept describes a sandbox. The caller holds its lock.
func (s *sandbox) kept() keptSandbox {
	return keptSandbox{
		Tag: s.tag, Index: s.index, Count: s.count, Hostname: s.hostname, Labels: s.labels, Env: s.env, Created: s.created, Expires: s.expires,
		Report: s.report, Ready: s.ready, Branches: s.branches, Public: s.public, Workspace: s.workspace,
		Limits: s.limits, Life: s.life, Egress: s.egress.Clone(), Talked: s.talked, NetSpent: s.netSpent,
		Spent: s.spent, Ran: s.ran,
	}
}

// sandbox is what was described, without a machine.
func (k *keptSandbox) sandbox(id string) *sandbox {
	return &sandbox{
		id: id, tag: k.Tag, index: k.Index, count: k.Count, hostname: k.Hostname, labels: k.Labels, env: k.Env, created: k.Created,
		expires: k.Expires, report: k.Report, ready: k.Ready, branches: k.Branches, public: k.Public, workspace: k.Workspace,
		limits: k.Limits, life: k.Life, egress: k.Egress, talked: k.Talked, netSpent: k.NetSpent,
		spent: k.Spent, ran: k.Ran,
	}
}

// machineRecord is what a later daemon needs to go on with a running sandbox. It lies in the machine's directory, where
// the VM process cannot open it. It is of this boot only, so nothing is synced.
type machineRecord struct {
	FormatVersion int    `json:"format_version"`
	BootID        string `json:"boot_id"` // of the host

	ID string `json:"id"`
	keptSandbox
	State      lineage.State `json:"state"`
	Generation uint64        `json:"generation"`

	Ref    engine.Ref    `json:"ref"`
	Format engine.Format `json:"format"`
	Disks  []string      `json:"disks"`
	Mapped memory.ID     `json:"mapped"` // the memory file it was restored from

	From   store.Snapshot `json:"from"`
	Latest string         `json:"latest,omitempty"` // id of its latest branch that became ready
	Cut    int            `json:"cut"`

	Hot    string        `json:"hot"`    // key of the image it was restored from
	Images []imageRecord `json:"images"` // that one and those below it, each after what it stands on
}

// imageRecord is a hot image.
type imageRecord struct {
	Key    string        `json:"key"`
	Tag    string        `json:"tag"`
	Image  string        `json:"image"`
	Bytes  int64         `json:"bytes"`
	Layer  layer.Digest  `json:"layer"`
	Own    string        `json:"own"`
	Disks  []string      `json:"disks"`
	Below  []string      `json:"below,omitempty"`
	Format engine.Format `json:"format"`
	Memory memory.ID     `json:"memory"`
	Pages  bool          `json:"pages"` // it has pages over that memory, which end with their daemon
}

// generationBlock is how many connections to an agent a daemon may make before it runs into its successor's: those of a
// later daemon must count on.
const generationBlock = 1 << 20

// record writes down what has changed of a sandbox. A failure is only logged: a later daemon knows an older state of it.
func (h *Host) record(s *sandbox) {
	if err := h.remember(s); err != nil {
		h.log.Warn("record a sandbox", "sandbox", s.id, "error", err)
	}
}

// remember writes the record of a sandbox, unless it has no machine.
func (h *Host) remember(s *sandbox) error {
	if s.builder { // a later daemon buries it: who asked for the build is gone
		return nil
	}
	s.recording.Lock() // so that the newest is written last
	defer s.recording.Unlock()
	boot, err := bootID()
	if err != nil {
		return err
	}
	rec, dir, err := h.describe(s)
	if err != nil || dir == "" {
		return err
	}
	rec.FormatVersion, rec.BootID = recordVersion, boot
	text, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	path := layout.MachineRecord(dir)
	if err := os.WriteFile(path+".tmp", append(text, '\n'), 0o600); err != nil {
		return fmt.Errorf("record sandbox %s: %w", s.id, err)
	}
	if err := os.Rename(path+".tmp", path); err != nil {
		return fmt.Errorf("record sandbox %s: %w", s.id, err)
	}
	return nil
}

// removeDir removes the directory of a sandbox's machine, which is not alive any more, with its record.
func (s *sandbox) removeDir(dir string) error {
	s.recording.Lock() // One that is being written would be in the way.
	defer s.recording.Unlock()
	return os.RemoveAll(dir)
}

// describe is the record of a sandbox and the directory it belongs into, "" if it has no living machine.
func (h *Host) describe(s *sandbox) (*machineRecord, string, error) {
	s.mu.Lock()
	rec := &machineRecord{
		ID: s.id, keptSandbox: s.kept(), State: s.state, Generation: s.generation, Format: s.format,
		Disks: append([]string(nil), s.disks...), Mapped: s.mapped, From: s.from.snapshot, Cut: s.cut,
	}
	if s.latest != nil {
		rec.Latest = s.latest.ID()
	}
	machine, hot, dir := s.machine, s.hot, s.dir
	alive := machine != nil && !s.ended && s.state != lineage.Failed
	s.mu.Unlock()
	if !alive {
		return nil, "", nil
	}
	rec.Ref = machine.Ref()
	rec.Hot = h.hot.key(hot)
	var err error
	rec.Images, err = h.hot.describe(hot)
	return rec, dir, err
}

func (c *hotCache) key(e *hotImage) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return e.key
}

// describe lists an image and those it stands on, each after what it stands on.
func (c *hotCache) describe(top *hotImage) ([]imageRecord, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var list []imageRecord
	seen := map[*hotImage]bool{}
	var visit func(e *hotImage) error
	visit = func(e *hotImage) error {
		if seen[e] {
			return nil
		}
		seen[e] = true
		for _, b := range e.below {
			if err := visit(b); err != nil {
				return err
			}
		}
		rec, err := e.record()
		list = append(list, rec)
		return err
	}
	err := visit(top)
	return list, err
}

// record describes one image. The caller holds the cache's lock.
func (e *hotImage) record() (imageRecord, error) {
	rec := imageRecord{
		Key: e.key, Tag: e.tag, Image: e.image, Bytes: e.bytes, Layer: e.layer, Own: e.own, Disks: e.disks,
	}
	for _, b := range e.below {
		rec.Below = append(rec.Below, b.key)
	}
	if e.checkpoint == nil { // Its memory ended with an earlier daemon; its disk is still stood on.
		return rec, nil
	}
	var err error
	rec.Format, rec.Pages = e.checkpoint.Format, e.checkpoint.Pages != nil
	if e.checkpoint.Memory != nil {
		rec.Memory, err = e.checkpoint.Memory.ID()
	}
	return rec, err
}

// bootID is another after each start of the host.
func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("tell this boot of the host from others: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

const maxRecord = 16 << 20

var errNoRecord = errors.New("nothing says what it was: its daemon ended before it had confirmed its identity")

// readRecord reads the record in a machine's directory and says whether it can be trusted.
func (h *Host) readRecord(_ context.Context, dir string) (*machineRecord, error) {
	path := layout.MachineRecord(dir)
	info, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, errNoRecord
	}
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxRecord {
		return nil, fmt.Errorf("%s is no record of ours", path)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	rec, err := parseRecord(text)
	if err != nil {
		return nil, fmt.Errorf("its record is damaged: %w", err)
	}
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	switch {
	case rec.BootID != boot:
		return nil, errors.New("its record is of another boot of this host")
	case rec.Ref.Dir != dir:
		return nil, fmt.Errorf("its record is of %s", rec.Ref.Dir)
	}
	return rec, rec.check(dir, h.cfg.Home.Hot())
}

func parseRecord(text []byte) (*machineRecord, error) {
	rec := &machineRecord{}
	if err := json.Unmarshal(text, rec); err != nil {
		return nil, err
	}
	if rec.FormatVersion != recordVersion {
		return nil, fmt.Errorf("it has version %d, this forkd reads %d", rec.FormatVersion, recordVersion)
	}
	return rec, nil
}

// check says whether a record names only what it may: files are removed by it later.
func (rec *machineRecord) check(dir, hot string) error {
	if err := lineage.CheckSandboxID(rec.ID); err != nil {
		return fmt.Errorf("its record is damaged: %w", err)
	}
	if rec.State != lineage.Running && rec.State != lineage.Paused {
		return fmt.Errorf("its record is damaged: a machine that is %q", rec.State)
	}
	files := append([]string(nil), rec.Disks...)
	for _, f := range files {
		if filepath.Dir(f) != layout.MachineDisks(dir) {
			return fmt.Errorf("its record is damaged: %s is none of its disks", f)
		}
	}
	found := false
	known := map[string]bool{}
	for _, img := range rec.Images {
		found = found || img.Key == rec.Hot
		for _, f := range append([]string{img.Own}, img.Disks...) {
			if f != "" && filepath.Dir(f) != hot {
				return fmt.Errorf("its record is damaged: %s is no disk of ours", f)
			}
		}
		for _, key := range img.Below {
			if !known[key] {
				return fmt.Errorf("its record is damaged: image %s stands on one that is not named before it", short(img.Key))
			}
		}
		known[img.Key] = true
	}
	if !found || rec.Format.MemoryBytes <= 0 || rec.Format.CPUs <= 0 {
		return errors.New("its record is damaged: it does not say what it was restored from")
	}
	return nil
}
