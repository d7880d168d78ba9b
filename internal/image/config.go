package image

// Config is how the programs of an image are started: what its base says, with the recipe's own values on top. The
// fields of an OCI image's configuration that mean something to a machine. It is stored with the image and with every
// snapshot of it.
type Config struct {
	Env        map[string]string `json:"env,omitempty"`
	WorkDir    string            `json:"workdir,omitempty"` // "": the user's home
	User       string            `json:"user,omitempty"`    // name, number, name:group or uid:gid; "": root
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Ports      []string          `json:"ports,omitempty"` // "8080/tcp", sorted
}
