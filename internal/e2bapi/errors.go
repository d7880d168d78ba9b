package e2bapi

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/httpapi"
	"forkd.dev/forkd/internal/lineage"
)

// plainError is an error of the control plane, and of envd's routes for files.
type plainError struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

// edgeError is what E2B's proxy says when there is nobody behind it. Clients recognise it by its words.
type edgeError struct {
	sandbox string
	port    int // 0: no sandbox that runs
	because error
}

func (e *edgeError) Error() string {
	if e.port != 0 {
		return "The sandbox is running but port is not open"
	}
	return "The sandbox was not found"
}

// Unwrap is for the audit log.
func (e *edgeError) Unwrap() error {
	if e.because != nil {
		return e.because
	}
	return &api.Error{Code: api.CodeNotFound, Message: e.Error()}
}

func writeEdge(w http.ResponseWriter, e *edgeError) {
	body := map[string]any{"sandboxId": e.sandbox, "message": e.Error(), "code": http.StatusBadGateway}
	if e.port != 0 {
		body["port"] = e.port
	}
	replyJSON(w, http.StatusBadGateway, body)
}

func replyJSON(w http.ResponseWriter, status int, v any) {
	_ = httpapi.Reply(w, status, v) // a client that is gone cannot be told
}

// empty replies without a body, and without a type of one: clients would parse it.
func empty(w http.ResponseWriter, status int) error {
	if status != http.StatusNoContent {
		w.Header().Set("Content-Length", "0")
	}
	w.WriteHeader(status)
	return nil
}

// words are an error's message with what to try.
func words(e *api.Error) string {
	if e.Hint == "" {
		return e.Message
	}
	if message := strings.TrimRight(e.Message, "\n"); strings.Contains(message, "\n") { // it ends with what something printed
		return message + "\ntry: " + e.Hint
	}
	return e.Message + "; try: " + e.Hint
}

// failPlain replies with an error as the control plane and the routes for files do.
func failPlain(w http.ResponseWriter, err error, _ string) {
	if edge, ok := errors.AsType[*edgeError](err); ok {
		writeEdge(w, edge)
		return
	}
	e := httpapi.ToAPI(err)
	status := httpapi.Status(e.Code)
	replyJSON(w, status, plainError{Code: status, Message: words(e)})
}

// connectError is an error of Connect.
type connectError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// toConnect is an error as envd tells it: the guest's own keep their code.
func toConnect(err error) connectError {
	if e, ok := errors.AsType[*wire.Error](err); ok {
		return connectError{e.Code, e.Message}
	}
	if _, ok := errors.AsType[*edgeError](err); ok {
		return connectError{wire.CodeUnavailable, err.Error()}
	}
	e := httpapi.ToAPI(err)
	return connectError{connectCode(e.Code), words(e)}
}

func connectCode(code api.Code) string {
	switch code {
	case api.CodeInvalid, api.CodeKeyReused:
		return wire.CodeInvalid
	case api.CodeNotFound:
		return wire.CodeNotFound
	case api.CodeDenied:
		return wire.CodeDenied
	case api.CodeUnauthorized:
		return "unauthenticated"
	case api.CodeThrottled, api.CodeExhausted, api.CodeNoCapacity:
		return wire.CodeExhausted
	case api.CodeExists:
		return wire.CodeExists
	case api.CodeWrongState, api.CodeBusy, api.CodeIncompatible:
		return wire.CodePrecondition
	case api.CodeUnsupported, api.CodeMethod, api.CodeUnacceptable:
		return wire.CodeUnimplemented
	case api.CodeUnavailable, api.CodeBadGateway:
		return wire.CodeUnavailable
	case api.CodeTimeout:
		return wire.CodeDeadline
	case api.CodeInternal, api.CodeCorrupt:
		return wire.CodeInternal
	}
	return wire.CodeInternal
}

// connectStatus is the HTTP status that Connect has for a code.
func connectStatus(code string) int {
	switch code {
	case wire.CodeInvalid, wire.CodePrecondition:
		return http.StatusBadRequest
	case "unauthenticated":
		return http.StatusUnauthorized
	case wire.CodeDenied:
		return http.StatusForbidden
	case wire.CodeNotFound:
		return http.StatusNotFound
	case wire.CodeExists:
		return http.StatusConflict
	case wire.CodeExhausted:
		return http.StatusTooManyRequests
	case wire.CodeUnimplemented:
		return http.StatusNotImplemented
	case wire.CodeUnavailable:
		return http.StatusServiceUnavailable
	case wire.CodeDeadline:
		return http.StatusGatewayTimeout
	}
	return http.StatusInternalServerError
}

// failConnect replies with an error as Connect does before a stream has begun.
func failConnect(w http.ResponseWriter, err error, _ string) {
	if edge, ok := errors.AsType[*edgeError](err); ok {
		writeEdge(w, edge)
		return
	}
	e := toConnect(err)
	replyJSON(w, connectStatus(e.Code), e)
}

// reach explains why a sandbox cannot be called into: to a client one that stands still is not there.
func reach(id string, err error) error {
	if errors.Is(err, lineage.ErrState) || httpapi.ToAPI(err).Code == api.CodeNotFound {
		return &edgeError{sandbox: id, because: err}
	}
	return err
}

func invalid(format string, args ...any) error {
	return &api.Error{Code: api.CodeInvalid, Message: fmt.Sprintf(format, args...)}
}
