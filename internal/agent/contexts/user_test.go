package contexts

import (
	"os"
	"strconv"
)

// testUser is whoever runs the tests.
var testUser = strconv.Itoa(os.Getuid())
