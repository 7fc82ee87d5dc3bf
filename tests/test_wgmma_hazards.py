"""Registers written under a running product are found in machine code."""

import pytest

from benchmarks.wgmma_hazards import constant_factors, hazards

PRODUCT = "/*0110*/ HGMMA.64x64x16.F32.BF16 R24, R152, gdesc[UR16].tnspB, R24, gsb0 ;"
NEXT = "/*0140*/ HGMMA.64x64x16.F32.BF16 R24, R160, gdesc[UR20].tnspB, R24, gsb0 ;"


@pytest.mark.parametrize(
    ("write", "registers"),
    [
        ("IMAD.MOV.U32 R154, RZ, RZ, 0x3f803f80", [154]),
        ("CS2R R152, SRZ", [152, 153]),
        ("LDS.128 R148, [R3]", []),
        ("LDSM.16.MT88.4 R150, [R3]", [152, 153]),
        ("@P0 LDL.LU.64 R154, [R1+0x10]", [154, 155]),
        ("STS.128 [R3], R152", []),
        ("F2FP.BF16.F32.PACK_AB R156, R152, R153", []),
    ],
)
def test_a_write_before_the_wait(write: str, registers: list[int]) -> None:
    lines = [PRODUCT, f"/*0120*/ {write} ;", "/*0130*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"]
    assert [hazard.register for hazard in hazards(lines)] == registers


def test_only_what_has_been_waited_for_may_be_written() -> None:
    write, other = "/*0160*/ MOV R154, R3 ;", "/*0170*/ MOV R160, R3 ;"
    wait = "/*0150*/ WARPGROUP.DEPBAR.LE gsb0, 0x{} ;".format
    assert [x.register for x in hazards([PRODUCT, NEXT, wait(1), write, other])] == [160]
    assert [x.register for x in hazards([PRODUCT, NEXT, wait(0), write, other])] == []
    assert [x.register for x in hazards([PRODUCT, NEXT, write, other])] == [154, 160]


def test_constants_in_ptx() -> None:
    product = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1,%r2}, {%r5,%r6,%r7,%r8}, %rd1, p, 1, 1, 1;"
    known = ["mov.b32 %r4, 1065369472;", "mov.b32 %r6, %r4;", product]
    loaded = ["ld.shared.b32 %r4, [%rd2];", "mov.b32 %r6, %r4;", product]
    assert constant_factors(known) == [3]
    assert constant_factors(loaded) == []
