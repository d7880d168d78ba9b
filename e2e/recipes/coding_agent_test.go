package recipes

import "testing"

// upstream makes a repository and a bundle of it, as it would be uploaded.
const upstream = `
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
git init -q -b main /tmp/upstream
cd /tmp/upstream
cat > sum.c <<'EOF'
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) { int s = 0; for (int i = 1; i < argc; i++) s += atoi(argv[i]); printf("%d\n", s); }
EOF
cat > Makefile <<'EOF'
sum: sum.c
	$(CC) -O2 -Wall -Werror -o $@ $<
EOF
cat > test_sum.py <<'EOF'
import subprocess, pytest
@pytest.mark.parametrize("n", [0, 1, 5])
def test_sum(n):
    assert int(subprocess.check_output(["./sum"] + [str(i) for i in range(n)])) == sum(range(n))
def test_fails():
    assert 1 == 2, "as it should"
EOF
git add . && git commit -qm first && git bundle create -q /tmp/repo.bundle main
`

// work is what an agent does: clone, build, test, search, change, commit.
const work = `
git clone -q /tmp/repo.bundle -b main /root/repo
cd /root/repo
make -s
./sum 40 2
python3 -m pytest -q 2>&1 | tail -n 1 | grep -o '. failed, . passed' || exit 1
rg -l parametrize
curl -sS file:///root/repo/Makefile | head -n 1
cp -r /usr/include/stdio.h . && git add . && git -c user.name=a -c user.email=a@b commit -qm second && git rev-list --count HEAD
less -FX Makefile | wc -l
g++ --version | head -n 1 | cut -c1-3
`

// TestCodingAgent: children clone, compile, test, search and commit.
func TestCodingAgent(t *testing.T) {
	heavy(t)
	f := built(t, "coding-agent")
	children := f.fork("coding-agent", 2)
	each(children, func(i int, id string) {
		f.exec(id, upstream)
		want := "42\n1 failed, 3 passed\ntest_sum.py\nsum: sum.c\n2\n2\ng++"
		if got := f.exec(id, work); got != want {
			t.Errorf("child %d: got %q, want %q", i, got, want)
		}
		// The warm interpreter has pytest imported.
		got := f.eval(id, `import io, contextlib, os
os.chdir("/root/repo")
with contextlib.redirect_stdout(io.StringIO()) as out:
    code = pytest.main(["-q", "-k", "sum and not fails", "-p", "no:cacheprovider"])
int(code), "3 passed" in out.getvalue()`)
		if got != "(0, True)" {
			t.Errorf("child %d: pytest in the warm interpreter: %q", i, got)
		}
	})
}
