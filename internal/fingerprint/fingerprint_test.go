package fingerprint

import (
	"encoding/base64"
	"encoding/hex"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	sum := make([]byte, 32)
	for i := range sum {
		sum[i] = byte(i)
	}
	b64, digits := base64.StdEncoding.EncodeToString(sum), hex.EncodeToString(sum)
	var colons []string
	for i := 0; i < len(digits); i += 2 {
		colons = append(colons, strings.ToUpper(digits[i:i+2]))
	}
	for _, good := range []string{"sha256//" + b64, "sha256:" + digits, digits, strings.Join(colons, ":")} {
		if got, err := Parse(good); err != nil || string(got) != string(sum) {
			t.Errorf("%s: %x, %v", good, got, err)
		}
	}
	for _, bad := range []string{"", "sha256//", "sha256//" + b64[:40], digits[:62], b64, "sha1:" + digits} {
		if _, err := Parse(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}
