package testenv

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"time"
)

// netMissing says why the host's own package archive does not answer: through a proxy when one is configured, else
// directly. Only a connection is made.
func netMissing() error {
	if on(EnvOffline) {
		return errors.New(EnvOffline + " is set")
	}
	address, err := archiveAddress()
	if err != nil {
		return err
	}
	conn, err := net.DialTimeout("tcp", address, 10*time.Second) //nolint:noctx // bounded; a probe outlives no test.
	if err != nil {
		return fmt.Errorf("the package archive does not answer: %w", err)
	}
	return conn.Close()
}

// archiveAddress is where a client of the archive connects to first.
func archiveAddress() (string, error) {
	for _, name := range []string{"http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"} {
		if value := os.Getenv(name); value != "" {
			return hostPort(value)
		}
	}
	if proxy := firstMatch(`(?m)^\s*Acquire::https?::Proxy\s+"(http[^"]+)"`, "/etc/apt/apt.conf", "/etc/apt/apt.conf.d/*"); proxy != "" {
		return hostPort(proxy)
	}
	source := firstMatch(`(?m)^(?:deb\s+(?:\[[^\]]*\]\s+)?|URIs:\s*)(https?://\S+)`,
		"/etc/apt/sources.list", "/etc/apt/sources.list.d/*")
	if source == "" {
		source = "http://deb.debian.org"
	}
	return hostPort(source)
}

func hostPort(text string) (string, error) {
	u, err := url.Parse(text)
	if err != nil {
		return "", errors.New("a proxy or package source here is no valid URL")
	}
	port := u.Port()
	if port == "" {
		port = u.Scheme
	}
	return net.JoinHostPort(u.Hostname(), port), nil
}

// firstMatch is the first group of the first match in the files that the patterns name.
func firstMatch(expression string, patterns ...string) string {
	re := regexp.MustCompile(expression)
	for _, pattern := range patterns {
		paths, _ := filepath.Glob(pattern) // the patterns are constants
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				continue
			}
			if m := re.FindSubmatch(text); m != nil {
				return string(m[1])
			}
		}
	}
	return ""
}
