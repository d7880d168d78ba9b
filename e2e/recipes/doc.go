// Package recipes builds each recipe that comes with forkd, once, and uses its children for what the recipe is for.
package recipes
