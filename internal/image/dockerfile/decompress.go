package dockerfile

import (
	"bufio"
	"compress/bzip2"
	"fmt"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

// maxWindow bounds what an archive makes its reader allocate.
const maxWindow = 128 << 20

// decompress finds out by its first bytes how a stream is compressed, if it is.
func decompress(r io.Reader) (io.Reader, func(), error) {
	b := bufio.NewReaderSize(r, 64<<10)
	head, err := b.Peek(8)
	if err != nil && len(head) == 0 {
		return nil, nil, fmt.Errorf("read: %w", err)
	}
	none := func() {}
	switch compression(head) {
	case "gzip":
		z, err := gzip.NewReader(b)
		return z, none, err
	case "bzip2":
		return bzip2.NewReader(b), none, nil
	case "xz":
		z, err := xz.ReaderConfig{DictCap: maxWindow}.NewReader(b)
		return z, none, err
	case "zstd":
		z, err := zstd.NewReader(b, zstd.WithDecoderMaxMemory(maxWindow), zstd.WithDecoderConcurrency(1))
		if err != nil {
			return nil, nil, err
		}
		return z, z.Close, nil
	}
	return b, none, nil
}
