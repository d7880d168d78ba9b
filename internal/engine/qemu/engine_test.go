package qemu_test

import (
	"testing"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/enginetest"
	"forkd.dev/forkd/internal/engine/qemu"
	"forkd.dev/forkd/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m.Run) }

func newEngine(t testing.TB) engine.Engine {
	t.Helper()
	testenv.Need(t, "qemu")
	accelerator := qemu.Auto
	if testenv.NoKVM() {
		accelerator = qemu.TCG
	}
	e, err := qemu.New(qemu.Config{Accelerator: accelerator})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestContract(t *testing.T) { enginetest.Run(t, newEngine(t)) }
