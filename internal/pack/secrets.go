package pack

import (
	"path"
	"regexp"
	"strings"
)

// What is looked for before packing: files that programs are known to keep secrets in, and texts with the form of
// tokens. It finds what is where it usually is; it is no proof that nothing else is there.

// secretFile is a file below a home directory.
type secretFile struct{ name, what string }

func secretFiles() []secretFile {
	var all []secretFile
	for what, names := range map[string]string{
		"shell history": ".bash_history .zsh_history .sh_history .ash_history .histfile .local/share/fish/fish_history .history",
		"history":       ".python_history .node_repl_history .psql_history .mysql_history .sqlite_history .rediscli_history .lesshst .viminfo .wget-hsts",
		"credentials": ".netrc .git-credentials .config/git/credentials .pgpass .my.cnf .pypirc .docker/config.json .aws/credentials " +
			".config/gcloud/credentials.db .config/gcloud/access_tokens.db .config/gcloud/application_default_credentials.json " +
			".azure/msal_token_cache.json .azure/accessTokens.json .kube/config .config/gh/hosts.yml .config/hub .cargo/credentials " +
			".cargo/credentials.toml .gem/credentials .terraform.d/credentials.tfrc.json .vault-token .huggingface/token " +
			".cache/huggingface/token .config/github-copilot/hosts.json .config/github-copilot/apps.json .claude/.credentials.json " +
			".codex/auth.json .config/containers/auth.json .s3cfg .boto .config/rclone/rclone.conf",
	} {
		for n := range strings.FieldsSeq(names) {
			all = append(all, secretFile{n, what})
		}
	}
	return all
}

// SecretFile says what a file is known to hold by its path, "" if nothing is known. homes are the home directories.
func SecretFile(file string, homes []string) (what string) {
	for _, home := range homes {
		rel, ok := strings.CutPrefix(file, strings.TrimSuffix(home, "/")+"/")
		if !ok {
			continue
		}
		for _, s := range secretFiles() {
			if rel == s.name {
				return s.what
			}
		}
		if dir, base := path.Split(rel); dir == ".ssh/" && strings.HasPrefix(base, "id_") && !strings.HasSuffix(base, ".pub") {
			return "private key"
		}
	}
	return ""
}

// Skipped says of a path that nobody looks into it: what was installed is public, and much.
func Skipped(file string) bool {
	for _, dir := range []string{"/node_modules/", "/site-packages/", "/dist-packages/", "/.git/objects/"} {
		if strings.Contains(file, dir) {
			return true
		}
	}
	return false
}

// MayHoldToken says whether a file is worth reading for tokens.
func MayHoldToken(file string, size int64) bool {
	const most = 256 << 10
	if size <= 0 || size > most || Skipped(file) {
		return false
	}
	base := path.Base(file)
	if strings.HasPrefix(base, ".") || strings.Contains(strings.ToLower(base), "secret") || strings.Contains(strings.ToLower(base), "credential") {
		return true
	}
	switch path.Ext(base) {
	case "", ".env", ".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".sh", ".txt", ".pem", ".key", ".properties", ".xml", ".tfvars":
		return true
	}
	return false
}

// token is the form of tokens of one kind.
type token struct {
	what string
	form *regexp.Regexp
}

// Tokens finds what has the form of a token.
type Tokens struct{ all []token }

// NewTokens knows the forms.
func NewTokens() *Tokens {
	t := &Tokens{}
	for _, x := range [][2]string{
		{"private key", `-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----`},
		{"AWS key", `\b(?:AKIA|ASIA)[0-9A-Z]{16}\b`},
		{"AWS secret key", `(?i)aws_secret_access_key["' ]*[=:]["' ]*[A-Za-z0-9/+]{40}\b`},
		{"GitHub token", `\bgh[pousr]_[A-Za-z0-9]{36,255}\b|\bgithub_pat_[A-Za-z0-9_]{60,255}\b`},
		{"GitLab token", `\bglpat-[A-Za-z0-9_-]{20,}\b`},
		{"Slack token", `\bxox[abeoprs]-[A-Za-z0-9-]{10,}\b`},
		{"API key", `\bsk-(?:ant-|proj-|svcacct-|or-)?[A-Za-z0-9_-]{32,}`},
		{"Stripe key", `\b[rs]k_(?:live|test)_[A-Za-z0-9]{20,}\b`},
		{"Hugging Face token", `\bhf_[A-Za-z0-9]{30,}\b`},
		{"npm token", `\bnpm_[A-Za-z0-9]{36}\b|_authToken=[A-Za-z0-9_-]{20,}`},
		{"PyPI token", `\bpypi-AgEIcHlwaS5vcmc[A-Za-z0-9_-]{50,}`},
		{"Google key", `\bAIza[0-9A-Za-z_-]{35}\b`},
		{"Docker token", `\bdckr_pat_[A-Za-z0-9_-]{20,}\b`},
		{"E2B key", `\be2b_[0-9a-f]{40}\b`},
		{"forkd token", `\bfkd_tk[0-9a-f]{8}_[a-z2-7]{52}\b`},
		{"URL with a password", `\b[a-z][a-z0-9+.-]{1,20}://[^/\s:@]{1,100}:[^/\s:@]{3,200}@`},
	} {
		t.all = append(t.all, token{x[0], regexp.MustCompile(x[1])})
	}
	return t
}

// Find names the first kind of token in a text, "" if there is none.
func (t *Tokens) Find(text []byte) (what string) {
	for _, x := range t.all {
		if x.form.Match(text) {
			return x.what
		}
	}
	return ""
}

// Redact replaces every token by as many asterisks.
func (t *Tokens) Redact(text []byte) []byte {
	for _, x := range t.all {
		text = x.form.ReplaceAllFunc(text, func(m []byte) []byte { return []byte(strings.Repeat("*", len(m))) })
	}
	return text
}
