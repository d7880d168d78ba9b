#include "textflag.h"

// func readCounter() int64
TEXT ·readCounter(SB), NOSPLIT, $0-8
	// The fence keeps the counter from being read before what precedes it has been done.
	LFENCE
	RDTSC
	SHLQ $32, DX
	ORQ  DX, AX
	MOVQ AX, ret+0(FP)
	RET

// func spin(n uint32)
TEXT ·spin(SB), NOSPLIT, $0-4
	MOVL n+0(FP), CX
loop:
	DECL CX
	JNZ  loop
	RET
