package recipes

import (
	"io/fs"
	"testing"

	"forkd.dev/forkd/internal/image"
)

// TestRecipes: each can be read, and the program has every file that it names.
func TestRecipes(t *testing.T) {
	if len(Names()) < 9 {
		t.Errorf("recipes: %q", Names())
	}
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) {
			dir, ok := Find(name)
			if !ok {
				t.Fatal("not found")
			}
			text, err := fs.ReadFile(dir, "recipe.yaml")
			if err != nil {
				t.Fatal(err)
			}
			r, err := image.ParseRecipe("recipe.yaml", text)
			if err != nil {
				t.Fatal(err)
			}
			if r.Name != name {
				t.Errorf("it is named %q", r.Name)
			}
			files := []string{"README.md"}
			for _, f := range r.Files {
				if f.Source != "" {
					files = append(files, f.Source)
				}
			}
			if r.Warmup != nil && r.Warmup.CodeFile != "" {
				files = append(files, r.Warmup.CodeFile)
			}
			for _, f := range files {
				if _, err := fs.Stat(dir, f); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
