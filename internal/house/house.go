// Package house holds no code: its tests keep the rules of this repository that a linter cannot say. Every package has
// one doc comment; the imports between our packages are a table, so that a new arrow is a reviewed line; unsafe code
// lives in files named for it; nothing in the tree belongs to one person's machine; every module we depend on has its
// reason written down. Nothing may import it.
package house
