package mcp

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/modelcontextprotocol/go-sdk/auth"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

// sessionTimeout ends a session that has been silent; its client begins another.
const sessionTimeout = time.Hour

// HTTPConfig is what a server of several clients depends on.
type HTTPConfig struct {
	Version string
	// Connect finds the daemon for who has this token, which is the daemon's to judge.
	Connect func(ctx context.Context, token string) (*client.Client, error)
}

// Handler serves clients over streamable HTTP. Each shows a token of the daemon's as a bearer token with every request, and
// may do what that token may.
func Handler(cfg HTTPConfig) http.Handler {
	verify := func(ctx context.Context, token string, _ *http.Request) (*auth.TokenInfo, error) {
		c, err := cfg.Connect(ctx, token)
		if err != nil {
			return nil, refusedToken(err)
		}
		defer c.Close()
		sum := sha256.Sum256([]byte(token))
		return &auth.TokenInfo{
			UserID:     hex.EncodeToString(sum[:]), // A session is for who began it.
			Expiration: time.Now().Add(time.Hour),  // It is asked for again with every request.
			Extra:      map[string]any{tokenKey: token},
		}, nil
	}
	serve := mcp.NewStreamableHTTPHandler(func(r *http.Request) *mcp.Server {
		info := auth.TokenInfoFromContext(r.Context())
		if info == nil {
			return nil
		}
		token, _ := info.Extra[tokenKey].(string)
		return New(Config{Version: cfg.Version, Connect: func(ctx context.Context) (*client.Client, error) {
			return cfg.Connect(ctx, token)
		}})
	}, &mcp.StreamableHTTPOptions{SessionTimeout: sessionTimeout})
	guarded := auth.RequireBearerToken(verify, nil)(serve)
	return http.NewCrossOriginProtection().Handler(guarded)
}

const tokenKey = "forkd.token"

// refusedToken is an error as the protocol's: whether the token is bad, or the daemon.
func refusedToken(err error) error {
	if e, ok := errors.AsType[*api.Error](err); ok && (e.Code == api.CodeUnauthorized || e.Code == api.CodeDenied || e.Code == api.CodeThrottled) {
		return fmt.Errorf("%w: %s", auth.ErrInvalidToken, e.Message)
	}
	return err
}
