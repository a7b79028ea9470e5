//go:build !nogpu

#include "textflag.h"

GLOBL ·callFramePC(SB), NOPTR|RODATA, $8
DATA ·callFramePC(SB)/8, $callFrame(SB)

// int callFrame(struct frame *): six arguments go in registers, the others on the stack, which is a multiple of 16 at a call.
TEXT callFrame(SB), NOSPLIT, $48
	MOVQ DI, R11
	MOVQ 56(R11), AX
	MOVQ AX, 0(SP)
	MOVQ 64(R11), AX
	MOVQ AX, 8(SP)
	MOVQ 72(R11), AX
	MOVQ AX, 16(SP)
	MOVQ 80(R11), AX
	MOVQ AX, 24(SP)
	MOVQ 88(R11), AX
	MOVQ AX, 32(SP)
	MOVQ 96(R11), AX
	MOVQ AX, 40(SP)
	MOVQ 8(R11), DI
	MOVQ 16(R11), SI
	MOVQ 24(R11), DX
	MOVQ 32(R11), CX
	MOVQ 40(R11), R8
	MOVQ 48(R11), R9
	MOVQ 0(R11), R10
	XORL AX, AX // no floating-point arguments, should it be variadic
	CALL R10
	RET

GLOBL ·callFramesPC(SB), NOPTR|RODATA, $8
DATA ·callFramesPC(SB)/8, $callFrames(SB)

// int callFrames(struct calls *): frames of a function, six arguments and a word for the result, and behind the last of them how many are used. It returns all
// results, one or-ed to the other.
TEXT callFrames(SB), NOSPLIT, $32
	MOVQ BX, 0(SP) // these three are the caller's
	MOVQ R12, 8(SP)
	MOVQ R13, 16(SP)
	MOVQ 512(DI), R12
	MOVQ DI, BX
	XORL R13, R13
next:
	TESTQ R12, R12
	JEQ done
	MOVQ 0(BX), R10
	MOVQ 8(BX), DI
	MOVQ 16(BX), SI
	MOVQ 24(BX), DX
	MOVQ 32(BX), CX
	MOVQ 40(BX), R8
	MOVQ 48(BX), R9
	XORL AX, AX
	CALL R10
	MOVQ AX, 56(BX)
	ORL AX, R13
	ADDQ $64, BX
	DECQ R12
	JMP next
done:
	MOVL R13, AX
	MOVQ 0(SP), BX
	MOVQ 8(SP), R12
	MOVQ 16(SP), R13
	RET
