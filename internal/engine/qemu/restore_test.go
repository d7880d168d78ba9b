package qemu

import (
	"bytes"
	"slices"
	"testing"
)

// section is one of a device state with the payload of one byte.
func section(kind, id byte, name string) []byte {
	s := []byte{kind, 0, 0, 0, id, byte(len(name))}
	s = append(s, name...)
	return append(s, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0x7e, 0, 0, 0, id)
}

func TestWithoutACPI(t *testing.T) {
	before, after := section(4, 7, "timer"), section(4, 9, "fw_cfg")
	acpi := section(4, 8, "acpi_build")
	for name, c := range map[string]struct{ state, want []byte }{
		"between":      {slices.Concat(before, acpi, after), slices.Concat(before, after)},
		"last":         {slices.Concat(before, acpi), before},
		"none":         {slices.Concat(before, after), slices.Concat(before, after)},
		"cut":          {acpi[:len(acpi)-1], acpi[:len(acpi)-1]},
		"another kind": {section(1, 8, "acpi_build"), section(1, 8, "acpi_build")},
		"empty":        {nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			given := slices.Clone(c.state)
			if got := withoutACPI(c.state); !bytes.Equal(got, c.want) {
				t.Errorf("got %q, want %q", got, c.want)
			}
			if !bytes.Equal(c.state, given) {
				t.Error("the checkpoint's state was changed")
			}
		})
	}
}
