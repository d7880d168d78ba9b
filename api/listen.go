package api

// ListenRequest is the body of POST /v1/listener: have the daemon serve TCP, until it ends. A daemon that does so already is
// left as it is. The reply is that of GET /version.
type ListenRequest struct {
	Bind string `json:"bind" pattern:"^.{1,300}:[0-9]{1,5}$"` // HOST:PORT; port 0: any
}
