package e2b

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/testenv"
)

// answer is what a request without a client's help got.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// ask sends a request as clients do: the body without its length.
func (d *daemon) ask(t *testing.T, method, path, body string, headers ...string) answer {
	t.Helper()
	env := map[string]string{}
	for _, v := range d.env {
		name, value, _ := strings.Cut(v, "=")
		env[name] = value
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(time.Minute))
	defer cancel()
	var in io.Reader
	if body != "" {
		in = io.MultiReader(strings.NewReader(body))
	}
	r, err := http.NewRequestWithContext(ctx, method, env["E2B_API_URL"]+path, in)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-API-KEY", env["E2B_API_KEY"])
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	resp, err := new(http.Client).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header, text}
}

func (a answer) into(t *testing.T, out any) {
	t.Helper()
	if err := json.Unmarshal(a.body, out); err != nil {
		t.Fatalf("%d: %v: %s", a.status, err, a.body)
	}
}

// refused wants a status, and E2B's kind of error with these words.
func (a answer) refused(t *testing.T, what string, status int, words ...string) {
	t.Helper()
	var e struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}
	if a.status != status || json.Unmarshal(a.body, &e) != nil || e.Code != status {
		t.Errorf("%s: %d, want %d: %s", what, a.status, status, a.body)
	}
	for _, w := range words {
		if !strings.Contains(e.Message, w) {
			t.Errorf("%s: %q does not say %q", what, e.Message, w)
		}
	}
}

// traps are what servers before this one got wrong, asked for without a client that would hide it.
func (d *daemon) traps(t *testing.T, template string) {
	t.Helper()
	type sandbox struct {
		ID           string    `json:"sandboxID"`
		Started      time.Time `json:"startedAt"`
		End          time.Time `json:"endAt"`
		EnvdToken    string    `json:"envdAccessToken"`
		TrafficToken string    `json:"trafficAccessToken"`
	}
	// Who says no time gets that of the route's version, and fields of later versions are no error.
	made := map[string]sandbox{}
	for path, want := range map[string]time.Duration{"/v2/sandboxes": 300 * time.Second, "/sandboxes": 15 * time.Second} {
		a := d.ask(t, "POST", path, `{"templateID":"`+template+`","metadata":{"a":"b c","d":"e"},"ofALaterVersion":{"x":[1]}}`)
		var s, info sandbox
		if a.into(t, &s); a.status != http.StatusCreated || s.EnvdToken == "" || s.TrafficToken == "" || s.EnvdToken == s.TrafficToken {
			t.Fatalf("POST %s: %d: %s", path, a.status, a.body)
		}
		d.ask(t, "GET", "/sandboxes/"+s.ID, "").into(t, &info)
		if got := info.End.Sub(info.Started); got < want-time.Second || got > want+testenv.Timeout(10*time.Second) {
			t.Errorf("POST %s: it lives for %s, want %s", path, got, want)
		}
		made[path] = s
	}
	s := made["/v2/sandboxes"]
	one := "/sandboxes/" + s.ID

	// Clients parse what claims to be JSON.
	for _, a := range []answer{
		d.ask(t, "POST", one+"/timeout", `{"timeout":200}`), d.ask(t, "POST", one+"/refreshes", `{"duration":200}`), d.ask(t, "GET", "/health", ""),
		d.ask(t, "DELETE", "/sandboxes/"+made["/sandboxes"].ID, ""),
	} {
		if a.status != http.StatusNoContent || len(a.body) > 0 || a.header.Get("Content-Type") != "" {
			t.Errorf("%d of type %q with %q", a.status, a.header.Get("Content-Type"), a.body)
		}
	}

	// Filters, as JavaScript's client encodes them.
	for query, want := range map[string]bool{
		"metadata=a%3Db%252520c%26d%3De&state=running,paused": true, "metadata=a%3Db%252520c%26d%3De&state=paused": false, "metadata=a%3Dx&limit=5": false,
		"template=" + url.QueryEscape(template) + "&order=asc": true,
	} {
		a := d.ask(t, "GET", "/v2/sandboxes?"+query, "")
		if got := bytes.Contains(a.body, []byte(s.ID)); a.status != http.StatusOK || got != want {
			t.Errorf("?%s: %d, listed %v: %s", query, a.status, got, a.body)
		}
	}
	d.ask(t, "GET", "/v2/sandboxes?state=lost", "").refused(t, "another state", http.StatusBadRequest, "state")

	// What cannot be done is refused by its name.
	for field, more := range map[string]string{
		"mcp": `"mcp":{"exa":{"apiKey":"x"}}`, "iam": `"iam":{"tokens":{"t":{"audience":"a","tokenType":"jwt"}}}`,
		"volumeMounts": `"volumeMounts":[{"name":"v","path":"/v"}]`, "autoPauseMemory": `"autoPause":true,"autoPauseMemory":false`,
		"rules": `"network":{"rules":{"a.example":[{"transform":{"headers":{"k":"v"}}}]}}`, "egressProxy": `"network":{"egressProxy":{"address":"a:1"}}`,
		"maskRequestHost": `"network":{"maskRequestHost":"a"}`, "allowPublicTraffic": `"network":{"allowPublicTraffic":true}`,
		"allowOut": `"network":{"allowOut":["not a host"]}`, "timeout": `"timeout":-1`,
	} {
		d.ask(t, "POST", "/v2/sandboxes", `{"templateID":"`+template+`",`+more+`}`).refused(t, field, http.StatusBadRequest, field)
	}
	for _, a := range []struct {
		method, path, body string
		status             int
		word               string
	}{
		{"POST", one + "/pause", `{"memory":false}`, 400, "memory"},
		{"POST", one + "/snapshots", `{"memory":false}`, 400, "memory"},
		{"POST", one + "/connect", `{"timeout":10,"memory":false}`, 400, "memory"},
		{"POST", one + "/resume", `{}`, 409, "running"},
		{"POST", one + "/fork", `{"count":101}`, 400, "count"},
		{"POST", one + "/timeout", `{}`, 400, "timeout"},
		{"POST", one + "/timeout", `{"timeout":`, 400, ""},
		{"GET", "/sandboxes/sbaaaaaaaaaaaaa", "", 404, "sbaaaaaaaaaaaaa"},
		{"DELETE", "/sandboxes/sbaaaaaaaaaaaaa", "", 404, ""},
		{"POST", "/v2/sandboxes", `{"templateID":"no-such"}`, 404, "no-such"},
		{"GET", "/templates/aliases/no-such", "", 404, "no-such"},
		{"GET", "/volumes", "", 400, "volumes"},
		{"POST", "/secrets", `{"name":"a"}`, 400, "secrets"},
		{"GET", "/teams", "", 400, "teams"},
		{"POST", "/templates/tags", `{"target":"a:b","tags":["c"]}`, 400, "tags"},
		{"DELETE", "/templates/tags", `{"name":"a","tags":["c"]}`, 400, "tags"},
		{"GET", "/templates/" + template + "/tags", "", 400, "tags"},
		{"PATCH", "/v2/templates/" + template, `{"public":true}`, 400, "public"},
		{"POST", "/v3/templates", `{"name":"x","tags":["a","b"]}`, 400, "tags"},
		{"POST", "/v3/templates", `{"name":"x","cpuCount":1000}`, 400, "cpuCount"},
		{"GET", "/templates/x/files/0123", "", 400, "hash"},
		{"GET", "/templates/x/builds/00000000-0000-4000-8000-000000000000/status", "", 404, "build"},
	} {
		d.ask(t, a.method, a.path, a.body).refused(t, a.method+" "+a.path, a.status, a.word)
	}
	d.ask(t, "GET", one, "", "X-API-KEY", "e2b_"+strings.Repeat("0", 40)).refused(t, "another key", http.StatusUnauthorized)

	// A template that forkd could build is said to be missing at once, and clients do not ask again.
	if _, err := d.run(t.Context(), "snapshot-info", "base"); err != nil {
		a := d.ask(t, "POST", "/v2/sandboxes", `{"templateID":"base"}`)
		a.refused(t, "base", http.StatusServiceUnavailable, "forkd build base -t base")
		if a.header.Get("Should-Retry") != "false" {
			t.Errorf("base: clients are not told to stop asking: %v", a.header)
		}
	}

	// Who is not there is 502 to those who ask it, in words that clients know.
	for id, words := range map[string]string{"sbaaaaaaaaaaaaa": "The sandbox was not found", s.ID: "port is not open"} {
		a := d.ask(t, "GET", "/", "", "E2b-Sandbox-Id", id, "E2b-Sandbox-Port", "8124", "E2B-Traffic-Access-Token", s.TrafficToken)
		if a.status != http.StatusBadGateway || !bytes.Contains(a.body, []byte(words)) {
			t.Errorf("port of %s: %d: %s", id, a.status, a.body)
		}
	}
	if a := d.ask(t, "DELETE", one, ""); a.status != http.StatusNoContent {
		t.Errorf("kill: %d: %s", a.status, a.body)
	}
}
