package cli

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/recipes"
)

func (a *App) build() *cobra.Command {
	var opts client.BuildOptions
	var file string
	var machine machineFlags
	cmd := &cobra.Command{
		Use: "build RECIPE|BASE|-f DOCKERFILE [DIRECTORY] -t TAG", Short: "Make a snapshot: build the image, boot, warm up, freeze",
		Long: "Make a snapshot from a recipe: a directory with a recipe.yaml, such a file itself, or the name of one that\n" +
			"comes with forkd (" + strings.Join(recipes.Names(), ", ") + "). Or straight from a base, as a recipe would\n" +
			"name it, such as oci:alpine or snapshot:TAG. Or, with -f, from a Dockerfile and the directory of its context, by\n" +
			"default the present one. Needs no root. What is already built is used: each finished step is kept as a snapshot,\n" +
			"and the next build goes on from the last that has not changed.",
		Example: "  forkd build recipes/python-numpy -t python-numpy\n  forkd build ./my-recipe -t mine --replace\n" +
			"  forkd build oci:alpine -t alpine\n  forkd build -f Dockerfile --build-arg VERSION=3 -t app .",
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if opts.Tag == "" {
				return usage("name the snapshot with -t TAG")
			}
			if opts.Kernel != "" {
				if opts.Kernel, err = filepath.Abs(opts.Kernel); err != nil {
					return err
				}
			}
			build, err := a.buildOf(args, file, &machine, &opts)
			if err != nil {
				return err
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				snap, err := build(cmd.Context(), c)
				if err != nil {
					return err
				}
				return a.show(api.Build{Snapshot: *snap, Steps: a.steps}, func(w io.Writer) error {
					_, err := fmt.Fprintln(w, snap.Tag)
					return err
				})
			})
		},
	}
	cmd.Flags().StringVarP(&file, "file", "f", "", "build this Dockerfile; - reads it from standard input")
	cmd.Flags().StringArrayVar(&opts.BuildArgs, "build-arg", nil, "NAME=VALUE for an ARG of the Dockerfile")
	cmd.Flags().StringVar(&opts.Target, "target", "", "stop at this stage of the Dockerfile")
	cmd.Flags().BoolVar(&opts.NoCache, "no-cache", false, "do all steps again")
	cmd.Flags().IntVar(&machine.cpus, "cpus", 0, "CPUs of the machine, for a Dockerfile or a base")
	cmd.Flags().StringVar(&machine.memory, "memory", "", "memory of the machine, such as 1GiB, for a Dockerfile or a base")
	cmd.Flags().StringVar(&machine.disk, "disk", "", "what its disk can grow to, such as 16GiB, for a Dockerfile or a base")
	cmd.Flags().StringVar(&opts.Network, "network", "", "what the sandboxes and the build's commands may reach, for a Dockerfile or a base, as a\n"+
		"recipe has it: a preset, or e.g. '{build: packages}' for the commands alone")
	cmd.Flags().StringVarP(&opts.Tag, "tag", "t", "", "name of the snapshot")
	cmd.Flags().StringVar(&opts.Kernel, "kernel", "", "boot this kernel instead of Debian's")
	cmd.Flags().BoolVar(&opts.Replace, "replace", false, "build anew, and replace a snapshot of that tag")
	return cmd
}

// openRecipe finds a recipe: a directory, a file, or the name of one that comes with forkd.
func openRecipe(arg string) (dir fs.FS, file string, err error) {
	info, err := os.Stat(arg)
	switch {
	case err == nil && info.IsDir():
		return recipeDir{os.DirFS(arg), arg}, "recipe.yaml", nil
	case err == nil:
		return recipeDir{os.DirFS(filepath.Dir(arg)), filepath.Dir(arg)}, filepath.Base(arg), nil
	case !errors.Is(err, fs.ErrNotExist):
		return nil, "", err
	}
	if sub, ok := recipes.Find(arg); ok {
		return sub, "recipe.yaml", nil
	}
	return nil, "", &hinted{
		fmt.Errorf("recipe %s: no such file or directory", arg),
		"a directory with a recipe.yaml, or one of: " + strings.Join(recipes.Names(), ", "),
	}
}

// doBuild sends the recipe with the files it names and prints progress.
func (a *App) doBuild(ctx context.Context, c *client.Client, dir fs.FS, file string, opts client.BuildOptions) (*api.Snapshot, error) {
	text, err := fs.ReadFile(dir, file)
	if err != nil {
		return nil, err
	}
	return a.buildText(ctx, c, dir, file, text, opts)
}

// buildText is doBuild of a recipe that is in memory; dir may be nil when it names no files.
func (a *App) buildText(ctx context.Context, c *client.Client, dir fs.FS, file string, text []byte, opts client.BuildOptions) (*api.Snapshot, error) {
	recipe, err := image.ParseRecipe(file, text)
	if err != nil {
		return nil, err
	}
	return a.sendBuild(ctx, c, opts, func(w io.Writer) error { return packRecipe(w, dir, text, recipe) })
}

// sendBuild sends what pack writes. What pack could not read is the user's to hear of, not that the request broke off.
func (a *App) sendBuild(ctx context.Context, c *client.Client, opts client.BuildOptions, pack func(io.Writer) error) (*api.Snapshot, error) {
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := pack(w)
		packed <- err
		_ = w.CloseWithError(err)
	}()
	snap, err := c.Build(ctx, opts, r, a.printEvent)
	_ = r.Close()
	if packErr := <-packed; err != nil && packErr != nil && !errors.Is(packErr, io.ErrClosedPipe) {
		return nil, packErr
	}
	return snap, err
}

func (a *App) printEvent(e api.BuildEvent) {
	mark := ""
	if e.Cached {
		mark = " (cached)"
	}
	if e.Title != "" {
		a.steps = append(a.steps, api.BuildStep{Title: e.Title, Cached: e.Cached, Seconds: e.Seconds})
	}
	if e.Step == "output" { // of a command: the lines are its own
		a.progress("          | %s", printable(e.Message))
		return
	}
	a.progress("%s  %-9s %s%s", e.Time.Local().Format("15:04:05"), e.Step, printable(e.Message), mark)
}

// packRecipe writes the recipe and only the files it names: its directory may hold anything.
func packRecipe(w io.Writer, dir fs.FS, text []byte, recipe *image.Recipe) error {
	t := tar.NewWriter(w)
	if err := t.WriteHeader(&tar.Header{Name: "recipe.yaml", Size: int64(len(text)), Mode: 0o644, Typeflag: tar.TypeReg}); err != nil {
		return err
	}
	if _, err := t.Write(text); err != nil {
		return err
	}
	if err := packBase(t, dir, recipe.From); err != nil {
		return err
	}
	var sources []string
	for _, f := range recipe.Files {
		if f.Source != "" {
			sources = append(sources, f.Source)
		}
	}
	if recipe.Warmup != nil && recipe.Warmup.CodeFile != "" {
		sources = append(sources, recipe.Warmup.CodeFile)
	}
	sent := map[string]bool{}
	for _, src := range sources {
		if err := packSource(t, dir, src, sent); err != nil {
			return err
		}
	}
	return t.Close()
}

func packSource(t *tar.Writer, dir fs.FS, src string, sent map[string]bool) error {
	return fs.WalkDir(dir, src, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return fmt.Errorf("recipe file: %w", err)
		}
		if sent[name] {
			return nil
		}
		sent[name] = true
		info, err := d.Info()
		if err != nil {
			return err
		}
		switch {
		case d.IsDir():
			return t.WriteHeader(&tar.Header{Name: name + "/", Mode: 0o755, Typeflag: tar.TypeDir})
		case !info.Mode().IsRegular():
			return fmt.Errorf("recipe file %s is neither a file nor a directory", name)
		}
		f, err := dir.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		h := &tar.Header{Name: name, Size: info.Size(), Mode: int64(info.Mode().Perm()), Typeflag: tar.TypeReg}
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		_, err = io.CopyN(t, f, info.Size())
		return err
	})
}
