package debian

import (
	"bytes"
	"io"
	"testing"

	"github.com/ProtonMail/go-crypto/openpgp/armor"
	"github.com/ProtonMail/go-crypto/openpgp/clearsign"
)

func dearmor(t *testing.T, signed []byte) []byte {
	t.Helper()
	block, _ := clearsign.Decode(signed)
	if block == nil {
		t.Fatal("not signed")
	}
	data, err := io.ReadAll(block.ArmoredSignature.Body)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func rearmor(t *testing.T, packets []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := armor.Encode(&b, "PGP SIGNATURE", nil)
	if err == nil {
		_, err = w.Write(packets)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	b.WriteByte('\n')
	return b.Bytes()
}
