package image

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/ulikunitz/xz"
)

const maxVmlinux = 512 << 20

// unpackKernel finds the compressed vmlinux inside an x86 bzImage (Documentation/arch/x86/boot.rst: payload_offset and
// payload_length, from protocol 2.08 on).
func unpackKernel(image []byte) ([]byte, error) {
	if len(image) < 0x260 || string(image[0x202:0x206]) != "HdrS" {
		return nil, errors.New("not a bzImage")
	}
	if binary.LittleEndian.Uint16(image[0x206:]) < 0x208 {
		return nil, errors.New("boot protocol is older than 2.08")
	}
	sectors := int64(image[0x1f1])
	if sectors == 0 {
		sectors = 4
	}
	start := (sectors+1)*512 + int64(binary.LittleEndian.Uint32(image[0x248:]))
	end := start + int64(binary.LittleEndian.Uint32(image[0x24c:]))
	if start >= end || end > int64(len(image)) {
		return nil, errors.New("payload lies outside the image")
	}
	return unpackPayload(image[start:end])
}

func unpackPayload(payload []byte) ([]byte, error) {
	var r io.Reader
	var err error
	switch {
	case bytes.HasPrefix(payload, []byte{0x02, 0x21, 0x4c, 0x18}):
		return unpackLZ4(payload[4:])
	case bytes.HasPrefix(payload, []byte{0x1f, 0x8b}):
		var z *gzip.Reader
		if z, err = gzip.NewReader(bytes.NewReader(payload)); err == nil {
			z.Multistream(false)
			r = z
		}
	case bytes.HasPrefix(payload, []byte{0xfd, '7', 'z', 'X', 'Z', 0}):
		r, err = xz.ReaderConfig{SingleStream: true}.NewReader(bytes.NewReader(payload))
	case bytes.HasPrefix(payload, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		// The four bytes after the frame are the size, which the decoder would take for another frame.
		r, err = zstd.NewReader(bytes.NewReader(payload[:max(4, len(payload)-4)]), zstd.WithDecoderConcurrency(1))
	default:
		return nil, errors.New("unknown compression")
	}
	if err != nil {
		return nil, err
	}
	return readAtMost(r, maxVmlinux)
}

// lz4Block is the block size of the legacy format, which is what the kernel's build uses.
const lz4Block = 8 << 20

// unpackLZ4 reads legacy LZ4: blocks preceded by their packed size; the kernel appends the unpacked size of all.
func unpackLZ4(data []byte) ([]byte, error) {
	if len(data) < 4 {
		return nil, io.ErrUnexpectedEOF
	}
	total := int(binary.LittleEndian.Uint32(data[len(data)-4:]))
	data = data[:len(data)-4]
	if total > maxVmlinux {
		return nil, fmt.Errorf("larger than %d bytes", maxVmlinux)
	}
	out := make([]byte, 0, total)
	for len(data) >= 4 {
		n := int(binary.LittleEndian.Uint32(data))
		data = data[4:]
		if n <= 0 || n > len(data) {
			return nil, io.ErrUnexpectedEOF
		}
		room := min(lz4Block, total-len(out))
		k, err := lz4.UncompressBlock(data[:n], out[len(out):len(out)+room])
		if err != nil {
			return nil, err
		}
		out = out[:len(out)+k]
		data = data[n:]
	}
	if len(out) != total {
		return nil, fmt.Errorf("unpacks to %d bytes, not %d", len(out), total)
	}
	return out, nil
}

// hasPVHNote reports whether a vmlinux tells its 32-bit entry point (XEN_ELFNOTE_PHYS32_ENTRY), without which QEMU
// refuses to boot it directly.
func hasPVHNote(vmlinux []byte) bool {
	f, err := elf.NewFile(bytes.NewReader(vmlinux))
	if err != nil {
		return false
	}
	for _, p := range f.Progs {
		if p.Type != elf.PT_NOTE || p.Filesz > 1<<20 {
			continue
		}
		notes, err := readAtMost(p.Open(), 1<<20)
		if err == nil && findNote(notes, f.ByteOrder, "Xen\x00", 18) {
			return true
		}
	}
	return false
}

func findNote(notes []byte, order binary.ByteOrder, name string, kind uint32) bool {
	align := func(n uint32) int { return int(n+3) &^ 3 }
	for len(notes) >= 12 {
		nameSize, descSize, k := order.Uint32(notes), order.Uint32(notes[4:]), order.Uint32(notes[8:])
		notes = notes[12:]
		if nameSize > 1<<20 || descSize > 1<<20 || align(nameSize)+align(descSize) > len(notes) {
			return false
		}
		if k == kind && string(notes[:nameSize]) == name {
			return true
		}
		notes = notes[align(nameSize)+align(descSize):]
	}
	return false
}
