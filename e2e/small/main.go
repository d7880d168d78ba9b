// Command small is the one program of a root file system that is to be as small as it can be: a machine of it is forked
// inside a machine.
package main

import (
	"fmt"
	"os"
	"strconv"
)

func main() {
	verb := ""
	if len(os.Args) > 1 {
		verb = os.Args[1]
	}
	switch verb {
	case "spin":
		for n := 1; n > 0; n = n%3 + 1 {
		}
	case "eat": // so many MiB, and keep them
		mib := 0
		if len(os.Args) > 2 {
			mib, _ = strconv.Atoi(os.Args[2])
		}
		b := make([]byte, mib<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = byte(i>>12) | 1
		}
		fmt.Fprintln(os.Stdout, "ate", len(b))
	default:
		fmt.Fprintln(os.Stdout, "a small program")
	}
}
