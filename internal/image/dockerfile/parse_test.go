package dockerfile

import (
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/image"
)

func parsed(t *testing.T, text string) *File {
	t.Helper()
	f, err := Parse("Dockerfile", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// evaluated is the last stage on a base with that configuration.
func evaluated(t *testing.T, text string, base image.Config, args map[string]string) ([]Op, image.Config) {
	t.Helper()
	b, err := parsed(t, text).Target(Options{Args: args})
	if err != nil {
		t.Fatal(err)
	}
	ops, config, err := b.Eval(base)
	if err != nil {
		t.Fatal(err)
	}
	return ops, config
}

func TestParse(t *testing.T) {
	f := parsed(t, "# syntax=docker/dockerfile:1\n\n# a comment\nARG V=1\nfrom debian:$V as Build\n"+
		"RUN echo a \\\n  # inside\n\n  && echo b\nRUN --network=none [\"/bin/x\", \"a b\"]\n"+
		"COPY --from=0 --chown=1:2 a b/\nFROM build\nCMD [not json\n")
	type line struct {
		Line       int
		Name, Rest string
		JSON       []string
		Flags      []Flag
	}
	var got [][]line
	for _, s := range f.Stages {
		var lines []line
		for _, in := range append([]Instruction{s.From}, s.Instructions...) {
			lines = append(lines, line{in.Line, in.Name, in.Rest, in.JSON, in.Flags})
		}
		got = append(got, lines)
	}
	want := [][]line{
		{
			{5, "FROM", "debian:$V as Build", nil, nil},
			{6, "RUN", "echo a   && echo b", nil, nil},
			{10, "RUN", `["/bin/x", "a b"]`, []string{"/bin/x", "a b"}, []Flag{{"network", "none"}}},
			{11, "COPY", "a b/", nil, []Flag{{"from", "0"}, {"chown", "1:2"}}},
		},
		{{12, "FROM", "build", nil, nil}, {13, "CMD", "[not json", nil, nil}},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if f.Stages[0].Name != "build" || len(f.Args) != 1 {
		t.Errorf("stage %q, %d arguments", f.Stages[0].Name, len(f.Args))
	}
}

func TestHeredocs(t *testing.T) {
	ops, _ := evaluated(t, "FROM scratch\nARG X=v\nRUN <<EOF\necho $X\nEOF\nRUN cat <<-A >/a && cat <<'B' >/b\n\tone\n\tA\ntwo $X\nB\n"+
		"RUN <<EOF\n#!/usr/bin/python3\nprint(1)\nEOF\nCOPY <<one <<\"two\" /d/\nis $X\none\nis $X\ntwo\nRUN echo \"a <<b\"\n", image.Config{}, nil)
	if got := ops[0].Run.Argv; !cmp.Equal(got, []string{"/bin/sh", "-c", "echo $X\n"}) {
		t.Errorf("a document alone: %q", got)
	}
	if got := ops[1].Run.Argv[2]; got != "cat <<-A >/a && cat <<'B' >/b\none\nA\ntwo $X\nB\n" {
		t.Errorf("documents of a command: %q", got)
	}
	if got := ops[2].Run.Argv; got[len(got)-1] != "#!/usr/bin/python3\nprint(1)\n" || got[2] != scriptRunner {
		t.Errorf("a script with an interpreter: %q", got)
	}
	if d := cmp.Diff([]Inline{{"one", "is v\n"}, {"two", "is $X\n"}}, ops[3].Copy.Inline); d != "" {
		t.Error(d)
	}
	if got := ops[4].Run.Argv[2]; got != `echo "a <<b"` {
		t.Errorf("what only looks like one: %q", got)
	}
}

// TestFaults: what cannot be had is named with its line, and all of it at once.
func TestFaults(t *testing.T) {
	tests := []struct{ name, text, want string }{
		{"empty", "", "no FROM"},
		{"before FROM", "RUN x\nFROM a", "Dockerfile:1: RUN before the first FROM"},
		{"unknown", "FROM a\nRNU x", `Dockerfile:2: unknown instruction "RNU"`},
		{"no arguments", "FROM a\nRUN", "Dockerfile:2: RUN needs arguments"},
		{"health check", "FROM a\n\nHEALTHCHECK NONE", "Dockerfile:3: HEALTHCHECK: "},
		{"trigger", "FROM a\nONBUILD RUN x", "Dockerfile:2: ONBUILD"},
		{"volume", "FROM a\nVOLUME /x", "Dockerfile:2: VOLUME"},
		{"signal", "FROM a\nSTOPSIGNAL 9", "Dockerfile:2: STOPSIGNAL"},
		{"mount", "FROM a\nRUN --mount=type=cache,target=/x y", "Dockerfile:2: RUN --mount: mounts are not supported"},
		{"flag", "FROM a\nCOPY --nothing a b", "Dockerfile:2: COPY has no flag --nothing"},
		{"network", "FROM a\nRUN --network=host a", "Dockerfile:2: RUN --network=host"},
		{"open document", "FROM a\nRUN <<EOF\nx", "Dockerfile:2: the document EOF does not end"},
		{"twice", "FROM a AS x\nFROM b AS X", "Dockerfile:2: stage x is there already, in line 1"},
		{"stage's name", "FROM a AS 1x", "Dockerfile:1: stage"},
		{"from", "FROM a b", "Dockerfile:1: write FROM IMAGE"},
		{"not text", "FROM a\x00", "not a text file"},
		{"all", "FROM a\nRNU x\nVOLUME x", "Dockerfile:3: VOLUME"},
		{"escape", "# escape=x\nFROM a", "Dockerfile:1: escape"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Parse("Dockerfile", []byte(tt.text))
			e, ok := errors.AsType[*image.FileError](err)
			if !ok || !strings.Contains(e.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestEvaluationFaults(t *testing.T) {
	tests := []struct{ name, text, want string }{
		{"url", "FROM a\nADD https://x/y /z", "Dockerfile:2: ADD: https://x/y"},
		{"repository", "FROM a\nADD git@x:y.git /z", "Dockerfile:2: ADD"},
		{"sources", "FROM a\nCOPY a b /c", "Dockerfile:2: COPY: the destination of several sources is a directory"},
		{"no destination", "FROM a\nCOPY a", "Dockerfile:2: COPY: it needs a source and a destination"},
		{"mode", "FROM a\nCOPY --chmod=9 a b", "Dockerfile:2: COPY: --chmod=9"},
		{"owner", "FROM a\nCOPY --chown=a/b a b", "Dockerfile:2: COPY: --chown"},
		{"user", "FROM a\nUSER a b", "Dockerfile:2: USER"},
		{"shell", "FROM a\nSHELL /bin/sh", "Dockerfile:2: SHELL"},
		{"port", "FROM a\nEXPOSE 99999", "Dockerfile:2: EXPOSE"},
		{"quote", "FROM a\nENV A=\"x", `Dockerfile:2: ENV: a " is not closed`},
		{"brace", "FROM a\nENV A=${x", "Dockerfile:2: ENV: a ${ has no }"},
		{"doubling", "FROM a\nENV A=aaaaaaaaaaaaaaaa\n" + strings.Repeat("ENV A=$A$A\n", 40), "longer than"},
		{"many", "FROM a\n" + strings.Repeat("ENV A$A=1 A=x$A\n", 1100), "more than 1000 variables"},
		{"required", "FROM a\nENV A=${x:?required}", "Dockerfile:2: ENV: x: required"},
		{"value", "FROM a\nENV A", "Dockerfile:2: ENV: A has no value"},
		{"argument", "FROM a\nARG 1=2", "Dockerfile:2: ARG 1=2"},
		{"later stage", "FROM a\nCOPY --from=x a b\nFROM b AS x\n", "Dockerfile:2: COPY: --from=x: that stage comes later"},
		{"all", "FROM a\nUSER a b\nSHELL x\n", "Dockerfile:3: SHELL"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b, err := parsed(t, tt.text).Target(Options{Target: "0"})
			if err == nil {
				_, _, err = b.Eval(image.Config{})
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestExpand(t *testing.T) {
	vars := map[string]string{"A": "a", "E": "", "P": "/x/y"}
	get := func(name string) (string, bool) { v, ok := vars[name]; return v, ok }
	tests := []struct{ in, want string }{
		{"$A$A", "aa"},
		{"${A}b", "ab"},
		{"$Ab$A", "a"},
		{`\$A`, "$A"},
		{`"$A b"`, "a b"},
		{`'$A b'`, "$A b"},
		{`"a\"b\$c\d"`, `a"b$c\d`},
		{"${U:-d}", "d"},
		{"${E:-d}", "d"},
		{"${E-d}", ""},
		{"${U-d}", "d"},
		{"${A:+d}", "d"},
		{"${E:+d}", ""},
		{"${E+d}", "d"},
		{"${U+d}", ""},
		{"${U:-${A}x}", "ax"},
		{"${U:-'$A'}", "$A"},
		{"${A:?no}", "a"},
		{"$", "$"},
		{"$1", "$1"},
		{"a$/", "a$/"},
		{`a\ b`, "a b"},
	}
	for _, tt := range tests {
		got, err := expand(tt.in, '\\', get)
		if err != nil || got != tt.want {
			t.Errorf("%s is %q (%v), want %q", tt.in, got, err, tt.want)
		}
	}
	if got, err := expandDocument(`"$A" '$A' \$A \n`, '\\', get); err != nil || got != `"a" 'a' $A \n` {
		t.Errorf("a document is %q (%v)", got, err)
	}
	if _, err := expand(strings.Repeat("${U:-", 1000), '\\', get); err == nil {
		t.Error("endless nesting is taken")
	}
}

// TestScopes: arguments before FROM, in a stage, and what ENV does to them.
func TestScopes(t *testing.T) {
	text := "ARG V=1\nARG W=w-$V\nFROM debian:$V\nARG V\nARG L=$V-x\nARG TARGETARCH\nENV V2=$V W2=${W:-none} V=env\nENV OLD some $V text\n" +
		"RUN x\nARG L=later\nRUN y\n"
	base := image.Config{Env: map[string]string{"PATH": "/bin"}}
	ops, config := evaluated(t, text, base, nil)
	want := map[string]string{"PATH": "/bin", "V2": "1", "W2": "none", "V": "env", "OLD": "some env text"}
	if d := cmp.Diff(want, config.Env); d != "" {
		t.Error(d)
	}
	if base.Env["V"] != "" {
		t.Error("the base's environment was changed")
	}
	run := ops[0].Run.Env
	if run["L"] != "1-x" || run["V"] != "env" || run["TARGETARCH"] != runtime.GOARCH || run["PATH"] != "/bin" {
		t.Errorf("a command has %v", run)
	}
	if got := ops[1].Run.Env["L"]; got != "later" {
		t.Errorf("the later default is %q", got)
	}
	ops, config = evaluated(t, text, image.Config{}, map[string]string{"V": "2", "L": "given", "NONE": "x", "http_proxy": "p"})
	if config.Env["V2"] != "2" || ops[1].Run.Env["L"] != "given" || ops[0].Run.Env["NONE"] != "" {
		t.Errorf("given arguments: %v, %v", config.Env, ops[1].Run.Env)
	}
	b, err := parsed(t, text).Target(Options{Args: map[string]string{"V": "2", "NONE": "x", "http_proxy": "p"}})
	if err != nil {
		t.Fatal(err)
	}
	from, err := b.Base()
	if err != nil || from.Ref != "oci:debian:2" {
		t.Errorf("FROM is %q (%v)", from.Ref, err)
	}
	if _, _, err := b.Eval(image.Config{}); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"NONE"}, b.Unused()); d != "" {
		t.Error(d)
	}
}

func TestConfig(t *testing.T) {
	base := image.Config{
		Env: map[string]string{"A": "a"}, WorkDir: "/base", User: "u", Entrypoint: []string{"e"}, Cmd: []string{"c"},
		Labels: map[string]string{"l": "1"}, Ports: []string{"80/tcp"},
	}
	ops, got := evaluated(t, `FROM a
WORKDIR sub/
WORKDIR /x/../y
WORKDIR $A
LABEL m="a b" l=2
EXPOSE 80 53/udp 90-92
USER 1:2
SHELL ["/bin/bash", "-c"]
RUN a b
ENTRYPOINT run $A
`, base, nil)
	want := image.Config{
		Env: map[string]string{"A": "a"}, WorkDir: "/y/a", User: "1:2", Entrypoint: []string{"/bin/bash", "-c", "run $A"},
		Labels: map[string]string{"l": "2", "m": "a b"}, Ports: []string{"53/udp", "80/tcp", "90-92/tcp"},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	var dirs []string
	for _, op := range ops {
		if op.Dir != nil {
			dirs = append(dirs, op.Dir.Path)
		}
	}
	if d := cmp.Diff([]string{"/base/sub", "/y", "/y/a"}, dirs); d != "" {
		t.Error(d)
	}
	run := ops[3].Run
	if d := cmp.Diff(&Run{Argv: []string{"/bin/bash", "-c", "a b"}, Env: map[string]string{"A": "a"}, Dir: "/y/a", User: "1:2"}, run); d != "" {
		t.Error(d)
	}
	_, got = evaluated(t, "FROM a\nCMD x\nENTRYPOINT [\"y\"]\n", base, nil)
	if d := cmp.Diff([]string{"/bin/sh", "-c", "x"}, got.Cmd); d != "" {
		t.Error(d)
	}
	_, got = evaluated(t, "FROM a\nUSER root\n", base, nil)
	if !cmp.Equal(got.Cmd, base.Cmd) || !cmp.Equal(got.Entrypoint, base.Entrypoint) {
		t.Errorf("the base's command is gone: %v %v", got.Entrypoint, got.Cmd)
	}
}

func TestBases(t *testing.T) {
	for ref, want := range map[string]string{
		"python:3.12": "oci:python:3.12", "debian:bookworm": "debian:bookworm", "debian:trixie": "debian:trixie", "debian:11": "oci:debian:11",
		"docker.io/library/debian:bookworm": "oci:docker.io/library/debian:bookworm", "image:mine": "image:mine", "scratch": "scratch",
		"snapshot:py": "snapshot:py", "oci-layout:./x": "oci-layout:./x", "oci:debian:bookworm": "oci:debian:bookworm",
		"localhost:5000/x": "oci:localhost:5000/x", "alpine": "oci:alpine", "image:": "oci:image:",
	} {
		if got := recipeBase(ref); got != want {
			t.Errorf("FROM %s is %s, want %s", ref, got, want)
		}
	}
	f := parsed(t, "ARG B=snapshot:x\nFROM $B AS one\nRUN x\nFROM one\nCOPY --from=one a b\nCOPY --from=oci-layout:d a b\nCOPY --from=0 a b\n")
	refs, err := f.Refs(nil)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"snapshot:x", "oci-layout:d"}, refs); d != "" {
		t.Error(d)
	}
	b, err := f.Target(Options{})
	if err != nil {
		t.Fatal(err)
	}
	if base, err := b.Base(); err != nil || base.Stage == nil || base.Stage.Index() != 0 {
		t.Errorf("the last stage stands on %+v (%v)", base, err)
	}
	if _, err := f.Target(Options{Target: "two"}); err == nil || !strings.Contains(err.Error(), "there are one, 1") {
		t.Errorf("a target that is not there: %v", err)
	}
	other := parsed(t, "FROM --platform=linux/mips64 a\n")
	b, err = other.Target(Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Base(); err == nil || !strings.Contains(err.Error(), "Dockerfile:1: FROM --platform=linux/mips64") {
		t.Errorf("another platform: %v", err)
	}
}

func TestEscapeDirective(t *testing.T) {
	ops, _ := evaluated(t, "# escape=`\nFROM a\nRUN a `\n  b\\\nCOPY c\\d /e/\n", image.Config{}, nil)
	if got := ops[0].Run.Argv[2]; got != `a   b\` {
		t.Errorf("got %q", got)
	}
	if got := ops[1].Copy.Sources[0]; got != `c\d` {
		t.Errorf("got %q", got)
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"FROM a\nRUN b \\\n c\n", "ARG A=1\nFROM x:$A AS b\nCOPY --from=b a b/\n", "FROM a\nRUN <<E cat <<-'F'\n\tx\nE\nF\n",
		"FROM a\nENV A=\"${B:-${C}}\" D='e'\nLABEL x y\n", "# escape=`\nFROM a\nADD [\"a\", \"b\"]\n", "FROM a\nEXPOSE 1-2/udp $X\n",
		"FROM a\nCOPY <<\"A\" <<B /x/\nA\nB\n", "\ufefffrom a\r\nuser ${U:?x}\r\n", "FROM a\nRUN ${", "FROM scratch\nCOPY * /\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		file, err := Parse("Dockerfile", text)
		if err != nil {
			if e, ok := errors.AsType[*image.FileError](err); !ok || len(e.Faults) == 0 {
				t.Fatalf("an error without faults: %v", err)
			}
			return
		}
		b, err := file.Target(Options{Args: map[string]string{"A": "$A"}})
		if err != nil {
			return
		}
		_, _ = b.Base()
		c := NewContext(&memory{})
		ops, _, err := b.Eval(image.Config{})
		if err != nil {
			return
		}
		for _, op := range ops {
			if op.Line < 1 || strings.ContainsAny(op.Text, "\n\x1b") {
				t.Errorf("operation %+v", op)
			}
			if op.Copy != nil {
				_, _ = c.Select(op.Copy)
			}
			if op.Run != nil && len(op.Run.Argv) == 0 {
				t.Errorf("a command without a program: %+v", op)
			}
		}
	})
}
