package contexts

import (
	"time"

	"golang.org/x/sys/unix"
)

// late is a renewal that has to wait for the end of an evaluation: one that was in progress when the machine was frozen
// goes on in every copy of it, and only then can the interpreter be asked for anything.
type late struct{ env map[string]string }

// turnOrLater takes the turn, or leaves a renewal to the next evaluation. False for a dead interpreter, too.
func (c *Context) turnOrLater(env map[string]string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tryTurn() {
		return true
	}
	c.late = &late{env}
	return false
}

// renewLate does what was left. It needs the turn. An interpreter that does not confirm is ended: what comes next must
// not run with the random state of its siblings.
func (c *Context) renewLate() {
	c.mu.Lock()
	l := c.late
	c.late = nil
	c.mu.Unlock()
	if l == nil || !c.alive() {
		return
	}
	c.clock = false // others run, and would see it
	err := c.askRenewal(l.env)
	if err == nil {
		_, _, err = c.confirm(time.Now().Add(renewLimit))
	}
	if err != nil {
		_ = c.child.SignalGroup(unix.SIGKILL)
	}
}
