package wire

// Problem is what went wrong with the process besides its exit: a time limit, say. Envd's Error repeats the status of a
// process that failed, which is no news.
func (e *ProcessEnd) Problem() string {
	if e.Error == e.Status {
		return ""
	}
	return e.Error
}

// Code is the exit code a shell would report: the program's own, or 128 plus the signal that ended it.
func (e *ProcessEnd) Code() int {
	if e.Signal != 0 {
		return 128 + e.Signal
	}
	return e.ExitCode
}
