"""Looks through a Hopper kernel's machine code for registers that are written while a matrix product may still read them.

    MOSAIC_GPU_DUMP_TO=FOLDER MOSAIC_GPU_DUMP_PTX=1 python ...       # compile the kernels
    python -m benchmarks.wgmma_hazards FOLDER                        # needs ptxas and nvdisasm
    python -m benchmarks.wgmma_hazards KERNEL.sass                   # or what nvdisasm -c has printed

A product (HGMMA) reads its left factor's four registers for as long as it runs, until a WARPGROUP.DEPBAR waits for its group.
ptxas 13.0 was seen to set such a register to a constant behind the product that reads it. What came out depended on which of
the two was faster: wrong numbers in eight rows of sixteen, others in each run, and never in an interpreter. Kernels should hand
no constants to products as left factors in registers, such as masks (`pallas_kernels.kda.gpu_prefill_warp.conceal`); the PTX is
searched for those, too, since another version of ptxas may place them badly where this one doesn't.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
_NO_RESULT = ("ST", "BAR", "BRA", "EXIT", "RED", "SYNCS", "UTMA", "WARPSYNC", "DEPBAR", "FENCE", "MEMBAR", "NANOSLEEP")
_TWO_RESULTS = ("IMAD.WIDE", "CS2R")


class Hazard(NamedTuple):
    """An instruction that writes a register of a running product's left factor.

    Attributes:
        writes: its address and text.
        register: number.
        product: address and text of the product.
    """

    writes: str
    register: int
    product: str


class _Running(NamedTuple):
    group: int
    registers: range
    text: str


def _results(name: str, arguments: list[str]) -> range:
    """Numbers of the registers that an instruction writes."""
    places = [x.strip() for x in arguments]
    if places and re.fullmatch(r"U?P[\dT]+", places[0]) and name.startswith(("LOP3", "IADD3", "IMAD", "SHFL")):
        places = places[1:]  # a truth value comes first
    match = re.fullmatch(r"R(\d+)(\.\w+)?", places[0]) if places else None
    if match is None or name.startswith(_NO_RESULT):
        return range(0)
    count = 1
    if product := re.match(r"HGMMA\.64x(\d+)x", name):
        count = int(product[1]) // 2
    elif name.startswith("LD") and ".128" in name:
        count = 4
    elif name.startswith("LD") and ".64" in name:
        count = 2
    elif name.startswith("LDSM"):
        count = int(name[-1]) if name[-1] in "24" else 1
    elif name.startswith(_TWO_RESULTS) and not name.startswith("CS2R.32"):
        count = 2
    return range(int(match[1]), int(match[1]) + count)


def hazards(lines: Iterable[str]) -> Iterator[Hazard]:
    """In what `nvdisasm -c` prints, from top to bottom as if nothing branched."""
    running: list[_Running] = []
    group = 0
    for line in lines:
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        address, name, rest = match.groups()
        arguments, text = rest.split(","), f"{address} {name} {rest.strip()}"
        if name.startswith("WARPGROUP.DEPBAR"):
            left = int(arguments[-1], 16)
            running = [product for product in running if product.group >= group - left]
            continue
        for register in _results(name, arguments):
            yield from (Hazard(text, register, each.text) for each in running if register in each.registers)
        if name.startswith("HGMMA"):
            if factor := re.match(r"\s*R(\d+)", arguments[1]):
                running.append(_Running(group, range(int(factor[1]), int(factor[1]) + 4), text))
            group += "gsb0" in rest


def constant_factors(lines: Iterable[str]) -> list[int]:
    """Lines of PTX with a product that has a constant among its left factor's registers."""
    values: dict[str, str | None] = {}
    found = []

    def constant(register: str) -> bool:
        value: str | None = register
        for _ in range(len(values)):
            if value is None or not value.startswith("%"):
                break
            value = values.get(value)
        return value is not None and not value.startswith("%")

    for number, line in enumerate(lines, 1):
        if move := re.match(r"\s*mov\.[bu]32\s+(%r\d+), (\S+);", line):
            values[move[1]] = move[2]
        elif other := re.match(r"\s*[a-z][\w.]*\s+(%r\d+),", line):
            values[other[1]] = None
        if "wgmma.mma_async" in line:
            factors = re.findall(r"\{(%r\d+(?:,%r\d+){3})\}", line)
            if factors and any(constant(register) for register in factors[-1].split(",")):
                found.append(number)
    return found


def _disassembled(ptx: Path) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        subprocess.run(["ptxas", "-arch=sm_90a", "-O3", ptx, "-o", binary], check=True, capture_output=True)
        printed = subprocess.run(["nvdisasm", "-c", binary], check=True, capture_output=True, text=True)
    return printed.stdout.splitlines()


def main() -> None:
    """Prints a line for each kernel, and its hazards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="+", help="a folder with .ptx files, or .ptx or .sass files")
    total = 0
    for path in parser.parse_args().path:
        for kernel in sorted(path.glob("*.ptx")) if path.is_dir() else [path]:
            constants = []
            if kernel.suffix == ".ptx":
                constants, lines = constant_factors(kernel.read_text().splitlines()), _disassembled(kernel)
            else:
                lines = kernel.read_text().splitlines()
            found = list(hazards(lines))
            total += len(found)
            products = sum("HGMMA" in line for line in lines)
            print(f"{kernel.name}: {products} products, {len(constants)} with constants, {len(found)} hazards")
            for hazard in found:
                print(f"  {hazard.writes} writes R{hazard.register} of {hazard.product}")
    raise SystemExit(bool(total))


if __name__ == "__main__":
    main()
