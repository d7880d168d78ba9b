package pack

import (
	"bytes"
	"strings"
	"testing"
)

func TestSecretFiles(t *testing.T) {
	homes := []string{"/root", "/home/user/"}
	for file, want := range map[string]string{
		"/root/.bash_history": "shell history", "/home/user/.aws/credentials": "credentials", "/home/user/.ssh/id_ed25519": "private key",
		"/home/user/.ssh/id_ed25519.pub": "", "/home/user/.ssh/known_hosts": "", "/tmp/.bash_history": "", "/root/.bashrc": "",
		"/home/users/.netrc": "", "/root/.docker/config.json": "credentials", "/root/.local/share/fish/fish_history": "shell history",
	} {
		if got := SecretFile(file, homes); got != want {
			t.Errorf("%s is %q, want %q", file, got, want)
		}
	}
}

// TestTokens: each form is found and replaced, whatever surrounds it; what only looks like one is left. The tokens are made
// up, and put together here so that nobody takes them for real ones.
func TestTokens(t *testing.T) {
	k := NewTokens()
	x := func(n int) string { return strings.Repeat("aB3d", n/4+1)[:n] }
	for what, text := range map[string]string{
		"private key":         "-----BEGIN OPENSSH " + "PRIVATE KEY-----\n" + x(70) + "\n-----END OPENSSH " + "PRIVATE KEY-----",
		"AWS key":             "AKIA" + strings.ToUpper(x(16)),
		"AWS secret key":      "aws_secret_access_key = " + x(40),
		"GitHub token":        "ghp" + "_" + x(36),
		"GitLab token":        "glpat" + "-" + x(20),
		"Slack token":         "xoxb" + "-" + x(24),
		"API key":             "sk" + "-ant-" + x(48),
		"Stripe key":          "sk" + "_live_" + x(24),
		"Hugging Face token":  "hf" + "_" + x(34),
		"npm token":           "npm" + "_" + x(36),
		"PyPI token":          "pypi-" + "AgEIcHlwaS5vcmc" + x(60),
		"Google key":          "AIza" + x(35),
		"Docker token":        "dckr" + "_pat_" + x(27),
		"E2B key":             "e2b" + "_" + strings.Repeat("0a1b", 10),
		"forkd token":         "fkd" + "_tk0a1b2c3d_" + strings.Repeat("ab27", 13),
		"URL with a password": "postgres://user:" + x(8) + "@host/db",
	} {
		for _, around := range []string{"%", "export TOKEN=%\n", `{"token": "%"}`, "first line\n  key: '%'  # here\n"} {
			text := []byte(strings.Replace(around, "%", text, 1))
			if got := k.Find(text); got != what {
				t.Errorf("%s is %q, want %q", text, got, what)
			}
			clean := k.Redact(text)
			if len(clean) != len(text) || k.Find(clean) != "" || !bytes.Contains(clean, []byte("****")) {
				t.Errorf("%s is left of %s", clean, text)
			}
		}
	}
	for _, text := range []string{
		"", "sk-short", "task-" + strings.Repeat("a", 10), "http://example.com:80/path", "https://user@example.com/x",
		"the key is AKIA", "-----BEGIN CERTIFICATE-----", "ghp_short", "risk-assessment-of-the-whole-undertaking",
	} {
		if got := k.Find([]byte(text)); got != "" {
			t.Errorf("%q is taken for %s", text, got)
		}
	}
}
