package contexts

import (
	"testing"

	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

// TestChosenContext: where the default context was warmed in another language, it takes code without a language and code
// in its own, and Python has a context beside it.
func TestChosenContext(t *testing.T) {
	testenv.Need(t, "python3")
	m := newManager(t)
	evalRequest(t, m, &wire.EvalRequest{Context: "default", Language: "shell", Code: "a=1"})
	for _, c := range []struct{ context, language, code, stdout string }{
		{"", "", "a=$((a + 1)); echo $a", "2\n"},
		{"", "sh", "a=$((a + 1)); echo $a", "3\n"},
		{"default", "", "echo $a", "3\n"},
		{"", "python", "a = 10; print(a)", "10\n"},
		{"", "py", "print(a + 1)", "11\n"},
		{"other", "shell", "echo [$a]", "[]\n"},
		{"", "", "echo $a", "3\n"},
	} {
		r, out := evalRequest(t, m, &wire.EvalRequest{Context: c.context, Language: c.language, Code: c.code})
		if r.Error != nil || out.stdout.String() != c.stdout {
			t.Errorf("%q %q: %q gives %q, %+v", c.context, c.language, c.code, out.stdout.String(), r.Error)
		}
	}
}
