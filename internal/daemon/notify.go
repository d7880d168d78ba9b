package daemon

import (
	"context"
	"fmt"
	"net"
)

// What a service manager is told.
const (
	tellReady    = "READY=1"
	tellStopping = "STOPPING=1"
)

// notify tells the service manager that started the daemon how it is, through the socket that it named in NOTIFY_SOCKET; it does
// nothing where there is none.
func notify(ctx context.Context, socket, word string) error {
	if socket == "" {
		return nil
	}
	if socket[0] == '@' { // The abstract ones begin with a NUL.
		socket = "\x00" + socket[1:]
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unixgram", socket)
	if err != nil {
		return fmt.Errorf("tell the service manager: %w", err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(word)); err != nil {
		return fmt.Errorf("tell the service manager: %w", err)
	}
	return nil
}
