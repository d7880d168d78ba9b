package host

import "context"

// lateError says what was not done in time. It is a context.DeadlineExceeded, and says that in its own words.
type lateError struct{ what string }

func (e *lateError) Error() string { return e.what }

func (e *lateError) Unwrap() error { return context.DeadlineExceeded }
