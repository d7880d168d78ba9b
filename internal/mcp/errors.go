package mcp

import (
	"errors"
	"fmt"
	"strings"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

// explain makes an error one that a model can act on: what happened, by its code, and which tool helps.
func explain(err error) error {
	if errors.Is(err, client.ErrNoDaemon) {
		return fmt.Errorf("%w\nWhat to do: tell the user that the forkd daemon does not run (forkd daemon start)", err)
	}
	e, ok := errors.AsType[*api.Error](err)
	if !ok {
		return err
	}
	text := fmt.Sprintf("%d %s: %s", e.Status, e.Code, e.Message)
	if e.Status == 0 {
		text = fmt.Sprintf("%s: %s", e.Code, e.Message)
	}
	if e.Console != "" {
		text += "\nThe end of the sandbox's console:\n" + tail(e.Console, 2000)
	}
	if advice := advice(e); advice != "" {
		text += "\nWhat to do: " + advice
	}
	return errors.New(text)
}

// advice names tools, where the daemon's own names verbs of the command line.
func advice(e *api.Error) string {
	switch e.Code {
	case api.CodeNotFound:
		switch {
		case strings.HasPrefix(e.Message, "sandbox"):
			return "call list_sandboxes for those there are; one that is gone can be made anew with spawn_sandboxes"
		case strings.HasPrefix(e.Message, "snapshot"):
			return "call list_snapshots for those there are"
		}
		return "look first: list_files for files, list_contexts for interpreters, list_processes for processes"
	case api.CodeWrongState:
		return "call get_sandbox for its state: resume_sandbox if it is paused, wake_sandbox if it is suspended; a snapshot that is being written gets ready by itself"
	case api.CodeNoCapacity:
		return "make room: kill_sandbox or suspend_sandbox what is not needed now, or ask for fewer"
	case api.CodeExists:
		return "choose another name, or remove what has it"
	case api.CodeBusy:
		return "try again in a moment; a snapshot that others stand on needs cascade or force"
	case api.CodeExhausted:
		return "something inside the sandbox is used up: remove files or end processes there, or use a fresh sandbox"
	case api.CodeTimeout:
		return "give a longer timeout_secs, or start_process and look again later"
	case api.CodeIncompatible:
		return "leave mode away: the daemon then takes one that this host can"
	case api.CodeDenied, api.CodeUnauthorized:
		return "this server's token does not allow it: tell the user"
	case api.CodeInvalid, api.CodeKeyReused, api.CodeMethod, api.CodeUnacceptable, api.CodeThrottled, api.CodeUnsupported,
		api.CodeUnavailable, api.CodeCorrupt, api.CodeInternal, api.CodeBadGateway:
	}
	if strings.Contains(e.Hint, "forkd ") {
		return "" // It is for the command line.
	}
	return e.Hint
}

func tail(text string, n int) string { return strings.ToValidUTF8(text[max(0, len(text)-n):], "") }
