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

// int callFrames(struct calls *): a count, then frames of 13 words with a word for the result behind each. The calls take six arguments at most.
TEXT callFrames(SB), NOSPLIT, $16
	MOVQ BX, 0(SP) // these two are the caller's
	MOVQ R12, 8(SP)
	MOVQ 0(DI), R12
	LEAQ 8(DI), BX
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
	MOVQ AX, 104(BX)
	ADDQ $112, BX
	DECQ R12
	JMP next
done:
	MOVQ 0(SP), BX
	MOVQ 8(SP), R12
	XORL AX, AX
	RET
