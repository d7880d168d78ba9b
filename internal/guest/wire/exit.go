package wire

// Code is the exit code a shell would report: the program's own, or 128 plus the signal that ended it.
func (e *ProcessEnd) Code() int {
	if e.Signal != 0 {
		return 128 + e.Signal
	}
	return e.ExitCode
}
