// Package flatten makes one file system out of the layers of a container image, as a tar stream that says every name
// once and in an order in which it can be unpacked without care. It reads each layer twice, first for an index of names
// that is kept in memory, then for the contents that are still there under the layers above, and holds no content
// itself. Layers are hostile: names, links, counts and sizes are bounded, and no name leads out. It fetches nothing and
// runs nothing. Only package image and those below it may import it.
package flatten
