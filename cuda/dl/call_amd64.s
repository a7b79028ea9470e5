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
