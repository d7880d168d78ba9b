package layer

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/klauspost/compress/zstd"
)

// maxStoredChunk bounds a chunk's file: zstd stores what it cannot compress with a few bytes of framing.
const maxStoredChunk = maxChunk + 64<<10

func newEncoder() (*zstd.Encoder, error) {
	// No checksum in the frame: the chunk's name is one.
	e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithEncoderConcurrency(1),
		zstd.WithWindowSize(maxChunk), zstd.WithEncoderCRC(false))
	if err != nil {
		return nil, fmt.Errorf("prepare compression: %w", err)
	}
	return e, nil
}

func newDecoder() (*zstd.Decoder, error) {
	// The limits make a hostile chunk an error instead of an allocation.
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxChunk),
		zstd.WithDecodeAllCapLimit(true))
	if err != nil {
		return nil, fmt.Errorf("prepare decompression: %w", err)
	}
	return d, nil
}

// chunkReader reads and verifies chunks, one at a time, into one buffer.
type chunkReader struct {
	store   *Store
	decoder *zstd.Decoder
	stored  []byte
	plain   []byte
}

func (s *Store) newChunkReader() (*chunkReader, error) {
	d, err := newDecoder()
	if err != nil {
		return nil, err
	}
	return &chunkReader{store: s, decoder: d, stored: make([]byte, maxStoredChunk), plain: make([]byte, maxChunk)}, nil
}

func (r *chunkReader) close() { r.decoder.Close() }

// read returns the content of a chunk, valid until the next call. The error wraps ErrCorrupt unless reading failed.
func (r *chunkReader) read(c chunkRef) ([]byte, error) {
	f, err := os.Open(r.store.chunkPath(c.digest))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, corrupt(c.digest, "chunk %s is missing", c.digest)
	}
	if err != nil {
		return nil, fmt.Errorf("read chunk %s: %w", c.digest, err)
	}
	defer f.Close()
	n, err := io.ReadFull(f, r.stored)
	if err == nil {
		return nil, corrupt(c.digest, "chunk %s: %w", c.digest, errTooLarge)
	}
	if !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read chunk %s: %w", c.digest, err)
	}
	plain, err := r.decoder.DecodeAll(r.stored[:n], r.plain[:0:c.length])
	if err != nil {
		return nil, corrupt(c.digest, "chunk %s cannot be decompressed: %w", c.digest, err)
	}
	if int64(len(plain)) != c.length || sha256.Sum256(plain) != c.digest {
		return nil, corrupt(c.digest, "chunk %s does not match its digest", c.digest)
	}
	return plain, nil
}

// chunkWriter compresses and stores chunks, one at a time.
type chunkWriter struct {
	store   *Store
	encoder *zstd.Encoder
	reader  *chunkReader
	packed  []byte
}

func (s *Store) newChunkWriter() (*chunkWriter, error) {
	e, err := newEncoder()
	if err != nil {
		return nil, err
	}
	r, err := s.newChunkReader()
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return &chunkWriter{store: s, encoder: e, reader: r}, nil
}

func (w *chunkWriter) close() {
	w.reader.close()
	_ = w.encoder.Close() // it was never given a stream to flush
}

// write stores plain unless an intact chunk of this content is there. It is not durable yet.
func (w *chunkWriter) write(plain []byte) (chunkRef, error) {
	c := chunkRef{digest: sha256.Sum256(plain), length: int64(len(plain))}
	_, err := w.reader.read(c)
	if err == nil {
		return c, nil
	}
	if !errors.Is(err, ErrCorrupt) {
		return chunkRef{}, err
	}
	// Missing, or damaged (say by a power cut before an earlier Write ended): store it anew.
	w.packed = w.encoder.EncodeAll(plain, w.packed[:0])
	path := w.store.chunkPath(c.digest)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return chunkRef{}, w.store.writeError(err)
	}
	if err := w.store.writeFile(path, w.packed, nil); err != nil {
		return chunkRef{}, err
	}
	return c, nil
}

// writeFile puts a whole file in place by rename; sync, if any, is called on the file before that. On error nothing is
// left.
func (s *Store) writeFile(path string, b []byte, sync func(*os.File) error) error {
	f, err := os.CreateTemp(filepath.Join(s.dir, "tmp"), "*")
	if err != nil {
		return s.writeError(err)
	}
	_, err = f.Write(b)
	if err == nil && sync != nil {
		err = sync(f)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return s.writeError(errors.Join(err, os.Remove(f.Name())))
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return s.writeError(errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}
