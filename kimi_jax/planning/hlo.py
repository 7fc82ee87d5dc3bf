"""Reads the text of a compiled program into computations and instructions, in one pass over its lines.

What is kept is what counting needs: names, shapes, opcodes, operands, and the attributes of those instructions that call
others, move data between devices or multiply matrices.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
"""Opcodes that move data between devices."""

_WITH_ATTRIBUTES = frozenset(
    {
        *COLLECTIVES,
        "async",
        "call",
        "compare",
        "conditional",
        "convolution",
        "custom-call",
        "dot",
        "fusion",
        "get-tuple-element",
        "while",
    }
)
_LITERAL = frozenset({"constant", "parameter", "iota", "partition-id", "replica-id"})
_HEADER = re.compile(r"(ENTRY )?%?([^\s(]+) (?:\(.*)?\{$")
_OPERAND = re.compile(r"%([^\s,()]+)")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_BITS = re.compile(r"[a-z]+(\d+)")
_PARENTHESIS = re.compile(r"[()]")


@dataclass(frozen=True)
class ArrayShape:
    """One array of a shape.

    Attributes:
        dtype: such as "bf16".
        dims: sizes.
        space: memory it lies in; 0 is the main memory of the device.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes, without the padding of tiles."""
        return (self.size * _bits(self.dtype) + 7) // 8


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        name: unique within its computation.
        shape: as written.
        opcode: as written.
        operands: names.
        literal: what a constant or a parameter has between parentheses.
        attributes: what follows the operands, for opcodes that it matters for.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    literal: str = ""
    attributes: str = ""

    @property
    def base(self) -> str:
        """The opcode without the mark of an asynchronous start."""
        return self.opcode.removesuffix("-start")

    def arrays(self) -> tuple[ArrayShape, ...]:
        """Arrays of the result; those of a tuple in order."""
        return parse_shape(self.shape)

    def called(self, key: str) -> str | None:
        """The computation that an attribute such as `body` names."""
        at = self.attributes.find(f" {key}=%")
        if at < 0:
            return None
        begin = at + len(key) + 3
        end = begin
        while end < len(self.attributes) and self.attributes[end] not in ", }\n":
            end += 1
        return self.attributes[begin:end]

    def attribute(self, key: str) -> str:
        """The value of an attribute in braces or a plain word; empty where there's none."""
        at = self.attributes.find(f" {key}=")
        if at < 0:
            return ""
        begin = at + len(key) + 2
        if self.attributes[begin : begin + 1] == "{":
            depth, end = 0, begin
            for end in range(begin, len(self.attributes)):
                depth += {"{": 1, "}": -1}.get(self.attributes[end], 0)
                if depth == 0:
                    break
            return self.attributes[begin : end + 1]
        end = self.attributes.find(", ", begin)
        return self.attributes[begin:] if end < 0 else self.attributes[begin:end]

    @property
    def source(self) -> str:
        """The name that the traced operation had, such as "jit(f)/while/body/psum"."""
        at = self.attributes.find('op_name="')
        return "" if at < 0 else self.attributes[at + 9 : self.attributes.find('"', at + 9)]


@dataclass
class Computation:
    """A list of instructions.

    Attributes:
        name: unique within the program.
        instructions: by name, in order.
        root: name of the one whose value is the result.
        parameters: names by number.
    """

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""
    parameters: dict[int, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[name]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def operand(self, instruction: Instruction, number: int) -> Instruction:
        """The instruction that computes an operand."""
        return self.instructions[instruction.operands[number]]


@dataclass
class Program:
    """A compiled program.

    Attributes:
        computations: by name.
        entry: name of the one that runs.
        num_devices: devices that the program was partitioned for.
    """

    computations: dict[str, Computation]
    entry: str
    num_devices: int

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]


def parse_program(text: str) -> Program:
    """Reads the text that `jax.stages.Compiled.as_text` gives.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    entry = ""
    for line in text.split("\n"):
        if line[:1] == " ":
            if current is not None:
                instruction = _instruction(line)
                if instruction is None:
                    continue
                current.instructions[instruction.name] = instruction
                if instruction.opcode == "parameter":
                    current.parameters[int(instruction.literal)] = instruction.name
                if line.lstrip().startswith("ROOT "):
                    current.root = instruction.name
        elif line[:1] == "}":
            current = None
        elif line.endswith("{") and (match := _HEADER.match(line)) is not None:
            current = computations[match[2]] = Computation(match[2])
            if match[1]:
                entry = match[2]
    if not entry:
        raise ValueError("the text isn't that of a compiled program: it has no ENTRY computation.")
    header = text[: text.find("\n")]
    counts = [re.search(rf"{key}=(\d+)", header) for key in ("num_partitions", "replica_count")]
    return Program(computations, entry, math.prod(int(count[1]) for count in counts if count is not None))


@lru_cache(maxsize=65536)
def parse_shape(shape: str) -> tuple[ArrayShape, ...]:
    """Arrays of a shape such as `(f32[2,3]{1,0}, s32[])`; layouts count only for the memory that they name."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        space = _SPACE.search(layout) if "S(" in layout else None
        sizes = tuple(int(size.lstrip("<=")) for size in dims.split(",")) if dims else ()
        found.append(ArrayShape(dtype, sizes, int(space[1]) if space else 0))
    return tuple(found)


def _instruction(line: str) -> Instruction | None:
    name, equals, rest = line.strip().partition(" = ")
    if not equals:
        return None
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opening = rest.find("(", max(end, 0))
    if end <= 0 or opening < 0:
        return None
    opcode = rest[end:opening].strip()
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing]
    keep = opcode.removesuffix("-start") in _WITH_ATTRIBUTES
    return Instruction(
        name.removeprefix("ROOT ").removeprefix("%"),
        rest[:end],
        opcode,
        () if opcode in _LITERAL else _operands(inside),
        inside if opcode in ("constant", "parameter") else "",
        rest[closing + 1 :] if keep else "",
    )


def _operands(inside: str) -> tuple[str, ...]:
    if "%" in inside:
        return tuple(_OPERAND.findall(inside))
    # Some printers leave out the sign; a shape may stand before the name.
    return tuple(part.split()[-1] for part in inside.split(",") if part.strip())


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`; the end of the text where there's none."""
    end = text.find(")", opening)
    if end >= 0 and text.find("(", opening + 1, end) < 0:
        return end
    depth = 0
    for match in _PARENTHESIS.finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


@lru_cache(maxsize=64)
def _bits(dtype: str) -> int:
    if dtype in ("token", "opaque"):
        return 0
    match = _BITS.match(dtype)
    return 8 if match is None else int(match[1])
