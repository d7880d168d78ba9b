// Package recipes holds the recipes that come with forkd, so that quickstart works from the binary alone.
package recipes

import (
	"embed"
	"io/fs"
	"slices"
)

//go:embed */*
var files embed.FS

// Names lists them, sorted.
func Names() []string {
	entries, err := files.ReadDir(".")
	if err != nil {
		return nil // an embedded file system always reads
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	slices.Sort(names)
	return names
}

// Find returns the directory of a recipe.
func Find(name string) (fs.FS, bool) {
	if !slices.Contains(Names(), name) {
		return nil, false
	}
	sub, err := fs.Sub(files, name)
	return sub, err == nil
}
