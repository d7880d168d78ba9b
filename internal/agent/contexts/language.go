package contexts

import (
	_ "embed"
	"encoding/binary"
	"os"
	"path/filepath"
	"strconv"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/process"
	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/guest/wire"
)

//go:embed driver.py
var pythonDriver string

//go:embed rich.py
var pythonRich string

//go:embed driver.js
var nodeDriver string

// The drivers are taken from the control channel: they need no file that the user could read or change, and the command
// line stays short. Python's has builtins of its own, whatever code does to the others. No -u for Python: unbuffered, print writes every argument and the line end by itself; the driver makes
// the streams line-buffered instead.
const (
	pythonBoot = `import os; exec(compile(os.read(3, 1 << 18), "<forkd>", "exec"), {"__name__": "forkd", "__builtins__": vars(__builtins__).copy()})`
	nodeBoot   = `{const fs = require("fs"), read = (n) => { const b = Buffer.alloc(n); for (let i = 0; i < n;) { ` +
		`const k = fs.readSync(3, b, i, n - i); if (!k) process.exit(1); i += k } return b }; ` +
		`require("vm").runInThisContext(read(read(4).readUInt32BE()).toString(), "<forkd>")(require, (s) => import(s))}`
)

const (
	python     = "python"
	javascript = "javascript"
	typescript = "typescript"
	shellName  = "shell"
)

// interpreter is how a context is started and talked to.
type interpreter struct {
	name    string // for messages
	path    string
	args    []string
	env     []string
	dialect dialect
	driver  []byte // what is sent first
	stdin   bool   // the control channel is its standard input
	group   bool   // an interrupt goes to its children, too
	quiet   bool   // what it prints while it starts is no output of code
}

// driverDirs are where an image has drivers of further languages.
func driverDirs() []string { return []string{"/etc/forkd/contexts.d", "/usr/lib/forkd/contexts.d"} }

// interpreter finds the one of a language.
func (m *Manager) interpreter(cfg wire.ContextConfig, dir string, env []string) (*interpreter, error) {
	search := account.Getenv(env, "PATH")
	find := func(name, hint string) (string, error) {
		path, err := process.LookPath(name, dir, search)
		if err != nil {
			return "", wire.Errorf(wire.CodePrecondition, "context %s: no %s in this image: add %s to the recipe's packages (looked in PATH=%s)",
				cfg.ID, name, hint, search)
		}
		return path, nil
	}
	switch cfg.Language {
	case python:
		path, err := find("python3", "it")
		if err != nil {
			return nil, err
		}
		driver := pythonDriver + "\n\ndriver(" + strconv.QuoteToASCII(pythonRich) + ")\n"
		return &interpreter{name: "python3", path: path, args: []string{"python3", "-c", pythonBoot}, dialect: marshalled{}, driver: []byte(driver)}, nil
	case javascript, typescript:
		path, err := find("node", "nodejs")
		if err != nil {
			return nil, err
		}
		driver := append(binary.BigEndian.AppendUint32(nil, uint32(len(nodeDriver))), nodeDriver...)
		return &interpreter{
			name: "node", path: path, args: []string{"node", "--experimental-vm-modules", "-e", nodeBoot}, dialect: spoken{}, driver: driver,
		}, nil
	case shellName:
		in := &interpreter{name: "bash", env: []string{"PS1=", "PS2="}, stdin: true, group: true, quiet: true}
		path, err := process.LookPath("bash", dir, search)
		s := shell{bash: err == nil}
		in.args = []string{"bash", "--norc", "--noprofile", "--noediting", "-i"}
		if err != nil {
			if path, err = find("sh", "bash"); err != nil {
				return nil, err
			}
			in.name, in.args = "sh", []string{"sh", "-i"}
		}
		in.path, in.dialect, in.driver = path, s, s.greeting()
		return in, nil
	}
	dirs := m.cfg.DriverDirs
	if dirs == nil {
		dirs = driverDirs()
	}
	for _, d := range dirs {
		path := filepath.Join(d, cfg.Language)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return &interpreter{name: path, path: path, args: []string{path}, dialect: spoken{}}, nil
		}
	}
	return nil, wire.Errorf(wire.CodeUnimplemented,
		"context %s: no interpreter for language %q here; there are python, shell, javascript, typescript, and what has a driver in %s",
		cfg.ID, cfg.Language, dirs[0])
}

func (in *interpreter) command(env []string, dir string) *reap.Command {
	return &reap.Command{Path: in.path, Args: in.args, Env: append(env, in.env...), Dir: dir}
}
