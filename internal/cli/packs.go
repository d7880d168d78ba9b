package cli

import (
	"bytes"
	"context"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/pack"
)

// packSuffix is what a pack's name ends with, unless the user gives another.
const packSuffix = ".forkd"

func (a *App) pack() *cobra.Command {
	var out string
	var noScrub, force bool
	cmd := &cobra.Command{
		Use: "pack SNAPSHOT [-o FILE]", Short: "Write a snapshot with all it stands on to one file", Args: cobra.ExactArgs(1),
		Long: "Write a snapshot to one file: its memory, devices and disk, those of all the snapshots it stands on, and their images.\n" +
			"Another host makes snapshots of it with forkd unpack.\n\n" +
			"Secrets are looked for first: a child of each snapshot is asked for shell histories, private keys, the credential files\n" +
			"of known programs, and tokens in the files of its users. If there are any, a child is forked, they are overwritten and\n" +
			"removed in it, and what it is then is packed, without the snapshots below, whose disks hold them. It is told where else in\n" +
			"memory and on the disk they are: programs that have read a secret still have it. With --no-scrub the snapshot is packed as\n" +
			"it is.",
		Example:           "  forkd pack python-numpy -o py.forkd\n  forkd pack python-numpy -o - | ssh host forkd unpack -",
		ValidArgsFunction: a.completeTags(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if out == "" {
				out = args[0] + packSuffix
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				return a.doPack(cmd.Context(), c, args[0], out, !noScrub, force)
			})
		},
	}
	cmd.Flags().StringVarP(&out, "output", "o", "", "file to write, - for standard output (default: SNAPSHOT.forkd)")
	cmd.Flags().BoolVar(&noScrub, "no-scrub", false, "pack it as it is, without looking for secrets")
	cmd.Flags().BoolVarP(&force, "force", "f", false, "replace the file if it is there")
	return cmd
}

func (a *App) doPack(ctx context.Context, c *client.Client, tag, out string, scrub, force bool) error {
	if err := checkOutput(out, force); err != nil {
		return fmt.Errorf("pack %s: %w", tag, err)
	}
	p, err := c.Pack(ctx, tag, scrub)
	if err != nil {
		return a.elsewhere(err, c, tag)
	}
	defer p.Close()
	m := &meter{}
	m.name(tag)
	stop := sync.OnceFunc(m.show(a))
	defer stop()
	if out == "-" {
		return sized(p, m.writer(a.Out), tag)
	}
	return a.writePack(p, m, stop, tag, out, force)
}

// checkOutput refuses before anything is packed what could not be written then.
func checkOutput(out string, force bool) error {
	if out == "-" {
		return nil
	}
	info, err := os.Lstat(out)
	switch {
	case err == nil && info.IsDir():
		return &hinted{fmt.Errorf("%s is a directory", out), "a file's name with -o, such as " + filepath.Join(out, "NAME"+packSuffix)}
	case err == nil && info.Mode()&^fs.ModePerm&^fs.ModeSymlink != 0: // a device would be replaced by a file
		return &hinted{fmt.Errorf("%s is no regular file", out), "to write there without replacing it, -o - and the shell's >"}
	case err == nil && !force:
		return &hinted{fmt.Errorf("%s is there already", out), "another name with -o, or replace it with --force"}
	case err == nil:
		return nil
	}
	if info, err = os.Stat(filepath.Dir(out)); err != nil {
		return fmt.Errorf("%s: %w", filepath.Dir(out), withoutName(err))
	}
	if !info.IsDir() {
		return fmt.Errorf("%s is no directory", filepath.Dir(out))
	}
	return nil
}

// sized copies a pack and makes sure that it is whole.
func sized(p *client.Pack, w io.Writer, tag string) error {
	n, err := io.Copy(w, p)
	if err == nil && n == p.Size {
		return nil
	}
	if err == nil || errors.Is(err, io.ErrUnexpectedEOF) {
		err = fmt.Errorf("the daemon broke it off after %d of %d bytes", n, p.Size)
	}
	return &hinted{fmt.Errorf("pack %s: %w", tag, err), "look for damage with: forkd verify " + tag}
}

// writePack writes beside the destination and renames, so that a pack that breaks off leaves nothing.
func (a *App) writePack(p *client.Pack, m *meter, stop func(), tag, out string, force bool) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(out), ".forkd-pack-")
	if err != nil {
		return fmt.Errorf("pack %s: write below %s: %w", tag, filepath.Dir(out), withoutName(err))
	}
	defer func() {
		if err != nil {
			_ = os.Remove(tmp.Name())
		}
	}()
	err = sized(p, m.writer(tmp), tag)
	if err = errors.Join(err, tmp.Close()); err != nil {
		return err
	}
	manifest, err := readManifest(tmp.Name())
	if err != nil {
		return err
	}
	if force {
		err = os.Rename(tmp.Name(), out)
	} else if err = os.Link(tmp.Name(), out); err == nil { // unlike a rename it replaces nothing
		err = os.Remove(tmp.Name())
	}
	if err != nil {
		return err
	}
	stop()
	s := packSummary(manifest.Manifest(), p.Digest, p.Size)
	return a.show(s, func(w io.Writer) error { return printPack(w, out, s) })
}

func readManifest(file string) (*pack.Reader, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return pack.NewReader(f)
}

// packInfo is what is said of a pack file.
type packInfo struct {
	Digest    string      `json:"digest"`
	Bytes     int64       `json:"bytes"`
	Tag       string      `json:"tag"`
	Snapshots []string    `json:"snapshots"`
	Members   int         `json:"members"`
	Kernels   []string    `json:"kernels"` // that it has
	PackedAt  string      `json:"packed_at"`
	Tool      string      `json:"tool"`
	Scrub     *pack.Scrub `json:"scrub,omitempty"`
}

func packSummary(m *pack.Manifest, digest string, bytes int64) packInfo {
	s := packInfo{
		Digest: digest, Bytes: bytes, Tag: m.Head().Tag, Members: len(m.Members), Tool: m.Tool, Scrub: m.Scrub,
		PackedAt: m.PackedAt.UTC().Format("2006-01-02T15:04:05Z"),
	}
	for _, x := range m.Snapshots {
		s.Snapshots = append(s.Snapshots, x.Tag)
	}
	s.Kernels = []string{}
	for _, k := range m.Kernels {
		s.Kernels = append(s.Kernels, k.Name)
	}
	return s
}

func printPack(w io.Writer, file string, s packInfo) error {
	rows := [][]string{
		{"snapshots", strings.Join(s.Snapshots, " → ")},
		{"digest", "sha256:" + s.Digest},
		{"size", size(s.Bytes) + fmt.Sprintf(" in %d members", s.Members)},
		{"packed", s.PackedAt + " by forkd " + s.Tool},
		{"kernel", kernels(s.Kernels)},
	}
	rows = append(rows, scrubRows(s.Scrub)...)
	return table(w, "pack | "+file, rows)
}

// kernels says which a pack has, by their versions.
func kernels(names []string) string {
	if len(names) == 0 {
		return "none; builds on its images take another"
	}
	versions := make([]string, len(names))
	for i, n := range names {
		if versions[i], _, _ = strings.Cut(n, " "); versions[i] == "" {
			versions[i] = strings.TrimSpace(n) // one that was given by path has no version
		}
	}
	return strings.Join(versions, ", ")
}

func scrubRows(s *pack.Scrub) [][]string {
	switch {
	case s == nil:
		return [][]string{{"secrets", "nobody looked for them"}}
	case s.Skipped != "":
		return [][]string{{"secrets", "nobody looked for them: " + s.Skipped}}
	case len(s.Found) == 0:
		return [][]string{{"secrets", "none found in the files of " + strings.Join(s.Looked, ", ")}}
	}
	var rows [][]string
	for _, f := range s.Found {
		rows = append(rows, []string{"removed", fmt.Sprintf("%s: %s (%s, %s)%s", f.Snapshot, oneLine(f.Path), f.What, size(f.Bytes), left(f.Left.Memory, f.Left.Disk))})
	}
	for _, l := range s.Limits {
		rows = append(rows, []string{"but", l})
	}
	return rows
}

// left says where else what was removed still is.
func left(memory, disk int) string {
	var where []string
	if memory > 0 {
		where = append(where, fmt.Sprintf("in memory (%d times)", memory))
	}
	if disk > 0 {
		where = append(where, fmt.Sprintf("on the disk (%d times)", disk))
	}
	if len(where) == 0 {
		return ""
	}
	return "; what it held is STILL " + strings.Join(where, " and ")
}

func (a *App) unpack() *cobra.Command {
	var tag string
	var rewarm bool
	cmd := &cobra.Command{
		Use: "unpack FILE [-t TAG]", Short: "Make snapshots of a packed one", Args: cobra.ExactArgs(1),
		Long: "Make snapshots of a file that forkd pack wrote; - is standard input. What this host cannot run is refused at once. Nothing\n" +
			"is registered until all of it is there and verified, and nothing that is here is changed: a snapshot below it whose name is\n" +
			"taken gets another. What is here already is not stored again. With --rewarm, what cannot run here is built from the recipe that\n" +
			"the pack has, if it was made of nothing else.\n\n" +
			"A snapshot is a running machine: unpack only what comes from somebody whose programs you would run.",
		Example: "  forkd unpack py.forkd\n  forkd unpack py.forkd -t python-from-alice",
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withDaemon(cmd.Context(), func(c *client.Client) error { return a.doUnpack(cmd.Context(), c, args[0], tag, rewarm) })
		},
	}
	cmd.Flags().StringVarP(&tag, "tag", "t", "", "name of the snapshot here (default: the one that it has in the pack)")
	cmd.Flags().BoolVar(&rewarm, "rewarm", false, "build it from its recipe if it cannot run here")
	return cmd
}

func (a *App) doUnpack(ctx context.Context, c *client.Client, file, tag string, rewarm bool) error {
	r, done, err := a.openPack(file)
	if err != nil {
		return fmt.Errorf("unpack %s: %w", file, err)
	}
	defer done()
	var begin bytes.Buffer // up to the end of the manifest, to be sent with the rest
	p, err := pack.NewReader(io.TeeReader(r, &begin))
	if err != nil {
		return fmt.Errorf("unpack %s: %w", file, err)
	}
	r = io.MultiReader(&begin, r)
	m := &meter{}
	m.name(file)
	stop := m.show(a)
	got, err := c.Unpack(ctx, tag, m.reader(r))
	stop()
	if refusal, ok := errors.AsType[*api.Error](err); ok && refusal.Code == api.CodeIncompatible && rewarm {
		return a.rewarm(ctx, c, p.Manifest(), tag, err)
	}
	if err != nil {
		return err
	}
	return a.show(got, func(w io.Writer) error { return printUnpacked(w, got) })
}

// rewarm builds what a pack was made of.
func (a *App) rewarm(ctx context.Context, c *client.Client, p *pack.Manifest, tag string, why error) error {
	m := p.Head()
	if m.Branch != nil || m.RecipeText == "" {
		return fmt.Errorf("%w; it cannot be built either: it is a branch of a sandbox, or has no recipe", why)
	}
	if err := image.StandsAlone([]byte(m.RecipeText)); err != nil {
		return fmt.Errorf("%w; it cannot be built either: %w", why, err)
	}
	if tag == "" {
		tag = m.Tag
	}
	if have, err := c.SnapshotInfo(ctx, tag); err == nil && a.builtOf(ctx, c, tag, m.RecipeText) {
		return a.show(have.Snapshot, func(w io.Writer) error { return hereAlready(w, tag) })
	}
	a.progress("it cannot run here, and is built from its recipe: %s", printable(why.Error()))
	snap, err := a.buildText(ctx, c, embed.FS{}, m.Recipe, []byte(m.RecipeText), client.BuildOptions{Tag: tag})
	if err != nil {
		return err
	}
	return a.show(snap, func(w io.Writer) error {
		_, err := fmt.Fprintln(w, snap.Tag)
		return err
	})
}

// builtOf reports whether a snapshot was built there, of nothing but that recipe.
func (a *App) builtOf(ctx context.Context, c *client.Client, tag, recipe string) bool {
	p, err := c.Provenance(ctx, tag)
	if err != nil || len(p.Snapshots) != 1 {
		return false
	}
	o := p.Snapshots[0]
	_, err = hex.DecodeString(o.Source) // what came from elsewhere says so instead
	return err == nil && o.BranchedFrom == "" && o.RecipeText == recipe
}

func (a *App) openPack(file string) (r io.Reader, done func(), err error) {
	if file == "-" {
		return a.In, func() {}, nil
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, nil, withoutName(err)
	}
	info, err := f.Stat()
	if err == nil && info.IsDir() {
		err = errors.New("it is a directory, and a pack is one file")
	}
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return f, func() { _ = f.Close() }, nil
}

// withoutName is why a file's name leads to nothing, without the name.
func withoutName(err error) error {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e.Err
	}
	return err
}

func printUnpacked(w io.Writer, got *api.Unpacked) error {
	if len(got.New) == 0 {
		_, err := fmt.Fprintf(w, "%s is here already\n", got.Snapshot.Tag)
		return err
	}
	rows := [][]string{
		{"id", got.Snapshot.ID},
		{"pack", "sha256:" + got.Digest},
		{"new", strings.Join(got.New, ", ")},
	}
	if len(got.Present) > 0 {
		rows = append(rows, []string{"here before", strings.Join(got.Present, ", ")})
	}
	for _, from := range slices.Sorted(maps.Keys(got.Renamed)) {
		rows = append(rows, []string{"renamed", from + " is " + got.Renamed[from] + " here"})
	}
	stored := fmt.Sprintf("%s in %d members", size(got.Bytes), got.Members)
	if got.FetchedBytes < got.Bytes {
		stored = fmt.Sprintf("%s of %s; the rest was here", size(got.FetchedBytes), stored)
	}
	rows = append(rows,
		[]string{"stored", stored},
		[]string{"recipe", got.Snapshot.Recipe},
		[]string{"warm", strings.Join(got.Snapshot.Warm, ", ")},
	)
	return table(w, "tag | "+got.Snapshot.Tag, rows)
}

func (a *App) verify() *cobra.Command {
	var snapshot bool
	cmd := &cobra.Command{
		Use: "verify {FILE | REGISTRY/NAME:TAG | SNAPSHOT}", Short: "Read all of a pack or a snapshot and say what is damaged", Args: cobra.ExactArgs(1),
		Long: "Read all of a pack file, or all that a snapshot and those it stands on are made of, and check it against its digests. A name\n" +
			"that is a file's is taken for that. Exit code 1 if anything is damaged.",
		Example:           "  forkd verify py.forkd\n  forkd verify python-numpy",
		ValidArgsFunction: a.completeTags(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			info, err := os.Stat(args[0])
			named := strings.ContainsRune(args[0], filepath.Separator) || strings.HasSuffix(args[0], packSuffix)
			isFile := args[0] == "-" || err == nil && (named || !info.IsDir())
			switch {
			case !snapshot && isFile:
				return a.verifyFile(cmd.Context(), args[0])
			case !snapshot && remoteRef(args[0]):
				return a.withDaemon(cmd.Context(), func(c *client.Client) error { return a.verifyRemote(cmd.Context(), c, args[0]) })
			case !snapshot && named && errors.Is(err, fs.ErrNotExist):
				return fmt.Errorf("verify %s: %w", args[0], withoutName(err))
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error { return a.verifySnapshot(cmd.Context(), c, args[0]) })
		},
	}
	cmd.Flags().BoolVar(&snapshot, "snapshot", false, "it is a snapshot's name, also if a file has it")
	return cmd
}

// verifyFile needs no daemon.
func (a *App) verifyFile(ctx context.Context, file string) error {
	r, done, err := a.openPack(file)
	if err != nil {
		return fmt.Errorf("verify %s: %w", file, err)
	}
	defer done()
	m := &meter{}
	m.name(file)
	stop := m.show(a)
	p, err := pack.Inspect(ctx, m.reader(r))
	stop()
	if err != nil {
		return fmt.Errorf("verify %s: %w", file, err)
	}
	s := packSummary(p.Manifest(), p.Digest().String(), m.total())
	return a.show(s, func(w io.Writer) error {
		if err := printPack(w, file, s); err != nil {
			return err
		}
		_, err := fmt.Fprintln(w, "everything is as its digests say")
		return err
	})
}

func (a *App) verifySnapshot(ctx context.Context, c *client.Client, tag string) error {
	v, err := c.VerifySnapshot(ctx, tag)
	if err != nil {
		return a.elsewhere(err, c, tag)
	}
	err = a.show(v, func(w io.Writer) error {
		rows := [][]string{
			{"snapshots", strings.Join(v.Snapshots, " → ")},
			{"read", fmt.Sprintf("%s in %d chunks of %d layers", size(v.Bytes), v.Chunks, v.Layers)},
		}
		for _, d := range v.Damages {
			rows = append(rows, []string{"damaged", d.Reason}, []string{"breaks", strings.Join(d.Breaks, ", ")})
		}
		if v.OK {
			rows = append(rows, []string{"damaged", "nothing"})
		}
		return table(w, "tag | "+tag, rows)
	})
	if err == nil && !v.OK {
		return silentError(exitFailed)
	}
	return err
}
