//go:build !nogpu

#include "textflag.h"

GLOBL ·callFramePC(SB), NOPTR|RODATA, $8
DATA ·callFramePC(SB)/8, $callFrame(SB)

// int callFrame(struct frame *): eight arguments go in registers, the others on the stack, below what Go keeps there.
TEXT callFrame(SB), NOSPLIT, $0
	SUB $48, RSP
	MOVD R0, R9
	MOVD 72(R9), R10
	MOVD R10, 0(RSP)
	MOVD 80(R9), R10
	MOVD R10, 8(RSP)
	MOVD 88(R9), R10
	MOVD R10, 16(RSP)
	MOVD 96(R9), R10
	MOVD R10, 24(RSP)
	MOVD 8(R9), R0
	MOVD 16(R9), R1
	MOVD 24(R9), R2
	MOVD 32(R9), R3
	MOVD 40(R9), R4
	MOVD 48(R9), R5
	MOVD 56(R9), R6
	MOVD 64(R9), R7
	MOVD 0(R9), R10
	CALL (R10)
	ADD $48, RSP
	RET

GLOBL ·callFramesPC(SB), NOPTR|RODATA, $8
DATA ·callFramesPC(SB)/8, $callFrames(SB)

// int callFrames(struct calls *): frames of a function, six arguments and a word for the result, and behind the last of them how many are used. It returns all
// results, one or-ed to the other.
TEXT callFrames(SB), NOSPLIT, $0
	SUB $32, RSP
	MOVD R19, 8(RSP) // these three are the caller's
	MOVD R20, 16(RSP)
	MOVD R21, 24(RSP)
	MOVD 512(R0), R20
	MOVD R0, R19
	MOVD ZR, R21
next:
	CBZ R20, done
	MOVD 0(R19), R10
	MOVD 8(R19), R0
	MOVD 16(R19), R1
	MOVD 24(R19), R2
	MOVD 32(R19), R3
	MOVD 40(R19), R4
	MOVD 48(R19), R5
	CALL (R10)
	MOVD R0, 56(R19)
	ORR R0, R21
	ADD $64, R19
	SUB $1, R20
	B next
done:
	MOVD R21, R0
	MOVD 8(RSP), R19
	MOVD 16(RSP), R20
	MOVD 24(RSP), R21
	ADD $32, RSP
	RET
