package qemu_test

import (
	"os"
	"path/filepath"
	"testing"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/enginetest"
	"forkd.dev/forkd/internal/engine/qemu"
	"forkd.dev/forkd/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m.Run) }

// newEngine makes one whose machines have what live captures need where this user can have that: as root without jails.
func newEngine(t testing.TB) engine.Engine {
	t.Helper()
	if os.Geteuid() == 0 {
		return engineWith(t, qemu.JailOff)
	}
	return engineWith(t, qemu.JailAuto)
}

func engineWith(t testing.TB, jail string) engine.Engine {
	t.Helper()
	testenv.Need(t, "qemu")
	accelerator := qemu.Auto
	if testenv.NoKVM() {
		accelerator = qemu.TCG
	}
	e, err := qemu.New(qemu.Config{Accelerator: accelerator, Jail: jail, Libraries: filepath.Join(t.TempDir(), "libraries")})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestContract(t *testing.T) { enginetest.Run(t, newEngine(t)) }

// TestContractJailed: machines do in jails all that they do without, but for live captures where the kernel gives
// other users no userfaultfd.
func TestContractJailed(t *testing.T) {
	testenv.Need(t, "root")
	enginetest.Run(t, engineWith(t, qemu.JailOn))
}
