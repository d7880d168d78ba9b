package recipes

import (
	"fmt"
	"testing"
	"time"

	"forkd.dev/forkd/internal/testenv"
)

// coldPostgres makes a database, starts its server and asks it.
const coldPostgres = `su postgres -c '
PATH=/usr/lib/postgresql/15/bin:$PATH
initdb --no-sync -D /tmp/cold >/dev/null
pg_ctl -D /tmp/cold -o "-p 5433 -c fsync=off" -w -l /tmp/cold.log start >/dev/null
psql -p 5433 -tAc "SELECT 40 + 2"
'`

// TestPostgres: every child's server is up and its own: each makes the same table, finds its own row and nothing of its
// siblings, and what the server draws at random is drawn anew.
func TestPostgres(t *testing.T) {
	heavy(t)
	f := built(t, "postgres")
	n := 10
	if testenv.Soak() {
		n = 50
	}
	start := time.Now()
	children := f.fork("postgres", n)
	forked := time.Since(start)
	each(children, func(_ int, id string) {
		if got := f.exec(id, `psql -tAc "SELECT 40 + 2"`); got != "42" {
			t.Errorf("%s answers its first query with %q", id, got)
		}
	})
	t.Logf("%d children in %d ms, all had answered their first query after %d ms", n, forked.Milliseconds(), time.Since(start).Milliseconds())

	drawn := make([]string, n)
	each(children, func(i int, id string) {
		f.exec(id, fmt.Sprintf(`psql -q -c "CREATE TABLE mine (child int)" -c "CREATE TABLE only_%d (x int)" -c "INSERT INTO mine VALUES (%d)"`, i, i))
		drawn[i] = f.exec(id, `psql -tA -c "SELECT gen_random_uuid()" -c "SELECT random()"`)
	})
	each(children, func(i int, id string) {
		// Through the port, and by a server process that did not exist when the table was made.
		got := f.exec(id, `psql -h 127.0.0.1 -tA -c "SELECT child FROM mine" -c "SELECT relname FROM pg_stat_user_tables ORDER BY 1"`)
		if want := fmt.Sprintf("%d\nmine\nonly_%d", i, i); got != want {
			t.Errorf("child %d has %q, want %q", i, got, want)
		}
	})
	distinct(t, "what the server drew", drawn)

	warm := f.firstAnswer("postgres", func(id string) { f.exec(id, `psql -tAc "SELECT 40 + 2"`) })
	start = time.Now()
	if got := f.exec(children[0].ID, coldPostgres); got != "42" {
		t.Errorf("the cold server answers %q", got)
	}
	cold := time.Since(start)
	t.Logf("first query: %d ms by a fork, %d ms by initdb and a start: %.1f times", warm.Milliseconds(), cold.Milliseconds(),
		float64(cold)/float64(warm))
	if cold < 3*warm {
		t.Errorf("a fork answers after %s, a new server after %s", warm, cold)
	}
}
