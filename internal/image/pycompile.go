package image

// py3compileHelper stands before Debian's py3compile while packages are configured. Each package with Python code calls
// it, and each call starts two interpreters, one after the other: seconds of an emulated machine's time for each of a
// hundred packages. It notes the directories it is told of; compileScript does the work for all packages at once.
const py3compileHelper = `#!/bin/sh
for arg; do
	case $arg in
	/*) echo "$arg" ;;
	esac
done >>/` + pycompileDirs + `
`

const pycompileDirs = buildDir + "/py3compile"

// compileScript compiles the Python code of packages, on all processors. Tests of libraries are left out: there are more
// of them than of anything else, and who imports one has it compiled then. A file that is no valid Python for this
// version is left as it is, as py3compile does.
const compileScript = `[ -e /` + pycompileDirs + ` ] || exit 0
exec python3 -E -S - <<'EOF'
import os, py_compile
roots = {"/usr/lib/python3/dist-packages"}
with open("/` + pycompileDirs + `") as f:
    roots.update(f.read().split("\n"))
files = set()
for root in roots - {""}:
    if root.endswith(".py"):
        files.add(root)
    for at, dirs, names in os.walk(root):
        dirs[:] = [d for d in dirs if d not in ("tests", "test", "__pycache__")]
        files.update(os.path.join(at, n) for n in names if n.endswith(".py"))
files = sorted(files, key=os.path.getsize)
workers = os.cpu_count() or 1
for i in range(workers):
    if os.fork() == 0:
        for name in files[i::workers]:
            try:
                py_compile.compile(name, doraise=True)
            except (py_compile.PyCompileError, OSError, ValueError):
                pass
        os._exit(0)
for i in range(workers):
    os.wait()
EOF
`
