package image

import (
	"fmt"
	"strings"
)

// Fault is one thing wrong with a recipe or a Dockerfile.
type Fault struct {
	Line, Column int // 1-based; 0: the file as a whole, or no certain column
	Message      string
}

// FileError lists everything wrong with a recipe or a Dockerfile, in the order of its lines.
type FileError struct {
	Name   string
	Faults []Fault
}

func (e *FileError) Error() string {
	lines := make([]string, 0, len(e.Faults))
	for _, f := range e.Faults {
		if f.Line == 0 {
			lines = append(lines, fmt.Sprintf("%s: %s", e.Name, f.Message))
			continue
		}
		lines = append(lines, fmt.Sprintf("%s:%d: %s", e.Name, f.Line, f.Message))
	}
	return strings.Join(lines, "\n")
}
