package httpapi

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/registry"
	"forkd.dev/forkd/internal/store"
)

// kinds maps what the layers below decided on to a code; the first match counts.
func kinds() []struct {
	is   error
	code api.Code
} {
	return []struct {
		is   error
		code api.Code
	}{
		{layer.ErrCorrupt, api.CodeCorrupt},
		{store.ErrCorrupt, api.CodeCorrupt},
		{engine.ErrIncompatible, api.CodeIncompatible},
		{engine.ErrUnavailable, api.CodeUnavailable},
		{engine.ErrLiveUnavailable, api.CodeIncompatible},
		{registry.ErrReference, api.CodeInvalid},
		{registry.ErrForeign, api.CodeInvalid},
		{registry.ErrDenied, api.CodeDenied},
		{registry.ErrNotFound, api.CodeNotFound},
		{registry.ErrUnknown, api.CodeNotFound},
		{registry.ErrRegistry, api.CodeBadGateway},
		{pack.ErrVersion, api.CodeIncompatible},
		{pack.ErrFormat, api.CodeInvalid},
		{pack.ErrDamaged, api.CodeInvalid},
		{host.ErrPack, api.CodeInvalid},
		{host.ErrExhausted, api.CodeNoCapacity},
		{access.ErrUnknown, api.CodeUnauthorized},
		{access.ErrExpired, api.CodeUnauthorized},
		{access.ErrInvalid, api.CodeInvalid},
		{access.ErrDenied, api.CodeDenied},
		{access.ErrMissing, api.CodeNotFound},
		{access.ErrTooMany, api.CodeExhausted},
		{host.ErrWider, api.CodeDenied},
		{host.ErrInvalid, api.CodeInvalid},
		{host.ErrStep, api.CodeInvalid},
		{lineage.ErrName, api.CodeInvalid},
		{host.ErrUnsupported, api.CodeUnsupported},
		{host.ErrNoService, api.CodeBadGateway},
		{host.ErrNotFound, api.CodeNotFound},
		{store.ErrExists, api.CodeExists},
		{host.ErrBusy, api.CodeBusy},
		{lineage.ErrState, api.CodeWrongState},
		{host.ErrClosed, api.CodeUnavailable},
		{guest.ErrEnded, api.CodeUnavailable},
		{context.DeadlineExceeded, api.CodeTimeout},
	}
}

// status is the one table from code to HTTP status.
func status(code api.Code) int {
	switch code {
	case api.CodeInvalid, api.CodeKeyReused:
		return http.StatusBadRequest
	case api.CodeNotFound:
		return http.StatusNotFound
	case api.CodeDenied:
		return http.StatusForbidden
	case api.CodeUnauthorized:
		return http.StatusUnauthorized
	case api.CodeThrottled:
		return http.StatusTooManyRequests
	case api.CodeMethod:
		return http.StatusMethodNotAllowed
	case api.CodeUnacceptable:
		return http.StatusNotAcceptable
	case api.CodeExists, api.CodeWrongState, api.CodeBusy, api.CodeIncompatible:
		return http.StatusConflict
	case api.CodeUnsupported:
		return http.StatusNotImplemented
	case api.CodeUnavailable, api.CodeNoCapacity:
		return http.StatusServiceUnavailable
	case api.CodeBadGateway:
		return http.StatusBadGateway
	case api.CodeExhausted:
		return http.StatusInsufficientStorage
	case api.CodeTimeout:
		return http.StatusGatewayTimeout
	case api.CodeCorrupt, api.CodeInternal:
		return http.StatusInternalServerError
	}
	return http.StatusInternalServerError
}

// guestCodes are the codes of the guest's own refusals.
func guestCode(code string) api.Code {
	switch code {
	case wire.CodeInvalid, wire.CodeUnknownUser:
		return api.CodeInvalid
	case wire.CodeNotFound:
		return api.CodeNotFound
	case wire.CodeExists:
		return api.CodeExists
	case wire.CodeDenied:
		return api.CodeDenied
	case wire.CodeUnimplemented:
		return api.CodeUnsupported
	case wire.CodeExhausted:
		return api.CodeExhausted
	case wire.CodePrecondition:
		return api.CodeWrongState
	case wire.CodeDeadline:
		return api.CodeTimeout
	case wire.CodeUnavailable:
		return api.CodeUnavailable
	}
	return api.CodeInternal
}

// toAPI is an error as the client sees it.
func toAPI(err error) *api.Error {
	if e, ok := errors.AsType[*api.Error](err); ok {
		e.Text = e.Message
		return e
	}
	out := &api.Error{Text: err.Error(), Message: err.Error(), Code: api.CodeInternal}
	if h, ok := errors.AsType[*host.HintError](err); ok {
		out.Hint = h.Try
	}
	if c, ok := errors.AsType[*host.ConsoleError](err); ok {
		out.Console = c.Tail
	}
	if out.Hint == "" && errors.Is(err, engine.ErrLiveUnavailable) {
		out.Hint = "mode auto takes what this host can, mode diff works on every host; see what it offers with: forkd doctor"
	}
	for _, k := range kinds() {
		if errors.Is(err, k.is) {
			out.Code = k.code
			return out
		}
	}
	if e, ok := errors.AsType[*wire.Error](err); ok {
		out.Code = guestCode(e.Code)
	}
	return out
}

// because explains what nobody else could by the end of the sandbox that the request is about.
func (s *Server) because(r *http.Request, err error) error {
	id := r.PathValue("id")
	f := foreignOf(r)
	if f != nil {
		id = f.Sandbox(r)
	}
	if err == nil || id == "" || r.Context().Err() != nil || f == nil && !strings.HasPrefix(r.URL.Path, "/v1/sandboxes/") ||
		toAPI(err).Code != api.CodeInternal && !errors.Is(err, guest.ErrEnded) {
		return err
	}
	return s.Host.Because(id, err)
}

func writeError(w http.ResponseWriter, err error, id string) {
	e := toAPI(err)
	e.RequestID = id
	_ = Reply(w, status(e.Code), e) // a client that is gone cannot be told
}
