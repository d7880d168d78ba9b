package wire

// A tar stream to extract may leave out runs of zeros of a file. The file's header then has two more PAX records, and
// its size is that of the bytes which follow.
const (
	SparseSize  = "FORKD.sparse.size"  // of the file, in decimal
	SparseHoles = "FORKD.sparse.holes" // OFFSET+LENGTH, in order, separated by spaces
)
