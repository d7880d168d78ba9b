package host

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
)

func TestAudience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a audience
		ctx, cancel := context.WithCancel(t.Context())
		began := 0
		var last context.Context // of the newest wait
		go func() {
			for {
				watched, done, err := a.wait(ctx)
				if err != nil {
					return
				}
				began, last = began+1, watched
				<-watched.Done()
				done()
			}
		}()
		synctest.Wait()
		if began != 0 {
			t.Fatal("something is watched for nobody")
		}
		first, second := a.join(), a.join()
		synctest.Wait()
		first()
		first() // leaving again is nothing
		synctest.Wait()
		if began != 1 || last.Err() != nil {
			t.Fatalf("with somebody left: begun %d times, %v", began, last.Err())
		}
		second()
		synctest.Wait()
		if !errors.Is(last.Err(), context.Canceled) {
			t.Fatal("nobody is left, and it is watched")
		}
		third := a.join()
		synctest.Wait()
		if began != 2 || last.Err() != nil {
			t.Fatalf("with somebody else: begun %d times, %v", began, last.Err())
		}
		third()
		cancel()
		synctest.Wait()
	})
}
