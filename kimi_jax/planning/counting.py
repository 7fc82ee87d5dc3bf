"""Counts what one run of a compiled program does on one device: products, memory traffic, messages.

XLA's own analysis counts the body of a loop once. Here the program's text is walked from its entry, and what a loop does
is multiplied by how often it runs.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import jax.stages
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from kimi_jax.planning.groups import Groups, span_of
from kimi_jax.planning.hlo import COLLECTIVES, Computation, Instruction, Program, parse_program
from kimi_jax.planning.trips import Trips

AnyMesh = Mesh | AbstractMesh | Mapping[str, int]

_COST = re.compile(r'"cost_estimate":\{([^}]*)\}')
_COST_FIELD = re.compile(r'"(\w+)":"?(\d+)"?')
_BRANCHES = re.compile(r"%([^\s,{}]+)")
_DIM_LABELS = re.compile(r"([0-9a-z]+)_([0-9a-z]+)->([0-9a-z]+)")
_ASYNC_NAME = re.compile(r'async_collective_name="([^"]+)"')
# Custom calls that stand for no work of their own.
_NO_WORK = frozenset(
    {
        "AllocateBuffer",
        "AssumeGatherIndicesInBound",
        "AsyncCollectiveDone",
        "AsyncCollectiveStart",
        "ConcatBitcast",
        "GatherScatterIndicesBitpacked",
        "MoveToDevice",
        "MoveToHost",
        "PrepareAsyncCallDone",
        "PrepareAsyncCallStart",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
        "Sharding",
        "xla.sdy.FuncResultSharding",
    }
)
# Instructions that move nothing through memory themselves.
_NO_TRAFFIC = frozenset(
    {
        "add-dependency",
        "after-all",
        "async-done",
        "async-start",
        "async-update",
        "bitcast",
        "call",
        "call-done",
        "call-start",
        "conditional",
        "constant",
        "domain",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
        "while",
    }
)
# Instructions that, fused, only say where a value is to be found.
_REARRANGED = frozenset({"bitcast", "copy", "reshape", "transpose"})
# Instructions that change a part of their first operand in place, and which operand is the part.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_SLICES = frozenset({"dynamic-slice", "gather", "slice"})


@dataclass(frozen=True)
class Collective:
    """Messages of one kind over the same axes, on one device.

    Attributes:
        kind: the opcode, such as "all-gather".
        axes: mesh axes that it runs over, in the mesh's order; empty where no mesh was given.
        group_size: devices that take part together.
        bytes: of the whole array of one execution: what an all-gather gives, what anything else takes.
        executions: how often it runs in one run of the program; when not `exact`, at least that often, or as often as the
            caller's assumption about a loop makes it.
        exact: whether it is outside every loop of unknown length.
        asynchronous: whether computation may go on meanwhile.
        source: the traced operation, such as "jit(f)/while/body/psum".
        groups: devices in the order of the mesh; pairs of source and target for a collective-permute.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    bytes: int
    executions: int
    exact: bool = True
    asynchronous: bool = False
    source: str = ""
    groups: Groups = field(default=(), repr=False)

    @property
    def total_bytes(self) -> int:
        """Bytes of all executions."""
        return self.bytes * self.executions


@dataclass(frozen=True)
class UnknownLoop:
    """A loop whose length the program's text doesn't say, because it depends on data.

    Attributes:
        source: the traced operation.
        flops: of one iteration.
        hbm_bytes: of one iteration.
        assumed_trips: how often it was counted because the caller said so. None: it was counted once for want of a
            number, and totals are lower bounds.
    """

    source: str
    flops: float
    hbm_bytes: float
    assumed_trips: int | None = None


@dataclass(frozen=True)
class Counts:
    """What one run of a program does on one device.

    Attributes:
        flops: multiplications and additions of matrix products and convolutions, by type of the operands: "bf16",
            "f32", "f32 high" and "f32 highest" (products of float32 in three and six bf16 passes), "s8", ...
        declared_flops: what kernels say they do themselves (`cost_estimate` of a Pallas call); of unnamed type.
        hbm_bytes: bytes read from and written to main memory by all instructions, a value read by two of them counted
            twice, slices and updates in place by what they touch.
        collectives: messages.
        opaque_calls: calls of kernels or libraries that say nothing about their cost, by target: executions.
        unknown_loops: loops whose length depends on data.
        conditionals: places where one of several branches runs; the most expensive one is counted.
    """

    flops: Mapping[str, float]
    declared_flops: float
    hbm_bytes: float
    collectives: tuple[Collective, ...]
    opaque_calls: Mapping[str, int]
    unknown_loops: tuple[UnknownLoop, ...]
    conditionals: int

    @property
    def total_flops(self) -> float:
        """All counted and declared operations."""
        return sum(self.flops.values()) + self.declared_flops

    @property
    def lower_bound(self) -> bool:
        """Whether a loop was counted once for want of its length, or a kernel doesn't say what it does."""
        return bool(self.opaque_calls) or any(loop.assumed_trips is None for loop in self.unknown_loops)

    @property
    def exact(self) -> bool:
        """Whether the program's text gives the lengths of all loops."""
        return not self.unknown_loops


def counts_of(
    compiled: jax.stages.Compiled | str,
    mesh: AnyMesh | None = None,
    *,
    assumed_trips: Mapping[str, int] | None = None,
) -> Counts:
    """Counts a compiled program, or its text.

    Args:
        compiled: the program.
        mesh: that it was compiled for, to name the axes of collectives; None leaves them unnamed.
        assumed_trips: how often loops run whose length depends on data, by a part of the names of their traced
            operations, as in `{"jit(grouped_matmul)": 16}`. Where several parts fit, the one furthest in counts.

    Raises:
        ValueError: the text isn't that of a compiled program, it needs more devices than the mesh has, or an assumed
            number is negative.
    """
    assumed = dict(assumed_trips or {})
    for part, trips in assumed.items():
        if trips < 0 or not part:
            raise ValueError(f"assumed_trips={assumed}: {part!r} must be a part of a name and have 0 trips or more.")
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    if text is None:
        raise ValueError("the compiled program has no text: its backend doesn't give one.")
    counter = _Counter(parse_program(text), None if mesh is None else axis_sizes(mesh), assumed)
    return counter.counts()


def collectives_of(
    compiled: jax.stages.Compiled | str,
    mesh: AnyMesh | None = None,
    *,
    assumed_trips: Mapping[str, int] | None = None,
) -> tuple[Collective, ...]:
    """Messages of one run of a compiled program on one device, the same ones of all iterations of a loop together.

    Raises:
        ValueError: as `counts_of`.
    """
    return counts_of(compiled, mesh, assumed_trips=assumed_trips).collectives


def axis_sizes(mesh: AnyMesh) -> dict[str, int]:
    """Sizes of the axes of a mesh, in its order."""
    return dict(mesh.items()) if isinstance(mesh, Mapping) else {str(axis): size for axis, size in mesh.shape.items()}


@dataclass
class _Cost:
    flops: Counter[str] = field(default_factory=Counter)
    declared: float = 0.0
    hbm: float = 0.0
    # Keys: (computation, name) of the instruction and whether it is outside unknown loops; the kind as counted.
    collectives: Counter[tuple[str, str, str, bool]] = field(default_factory=Counter)
    opaque: Counter[str] = field(default_factory=Counter)
    loops: tuple[UnknownLoop, ...] = ()
    conditionals: int = 0

    def add(self, other: "_Cost", times: int = 1, *, exact: bool = True) -> None:
        if times == 0:
            return
        for mine, theirs in ((self.flops, other.flops), (self.opaque, other.opaque)):
            for key, value in theirs.items():
                mine[key] += value * times
        for (where, name, kind, known), value in other.collectives.items():
            self.collectives[where, name, kind, known and exact] += value * times
        self.declared += other.declared * times
        self.hbm += other.hbm * times
        self.loops += tuple(loop for loop in other.loops if loop not in self.loops)
        self.conditionals += other.conditionals

    @property
    def weight(self) -> tuple[float, float]:
        return sum(self.flops.values()) + self.declared, self.hbm


class _Counter:
    """Costs of computations, each found once."""

    def __init__(self, program: Program, mesh: Mapping[str, int] | None, assumed: Mapping[str, int]):
        self.program = program
        self.assumed = assumed
        self.mesh = mesh
        self.trips = Trips(program)
        self._costs: dict[str, _Cost] = {}
        self._reads: dict[str, dict[int, int | None]] = {}
        self._uses: dict[str, dict[str, list[Instruction]]] = {}

    def counts(self) -> Counts:
        cost = self.cost(self.program.entry)
        collectives = Counter[Collective]()
        for (where, name, kind, exact), executions in cost.collectives.items():
            collectives[self._collective(self.program[where], name, kind, exact)] += executions
        return Counts(
            {key: float(value) for key, value in sorted(cost.flops.items())},
            float(cost.declared),
            float(cost.hbm),
            tuple(replace(one, executions=executions) for one, executions in collectives.items()),
            dict(sorted(cost.opaque.items())),
            cost.loops,
            cost.conditionals,
        )

    def _collective(self, computation: Computation, name: str, kind: str, exact: bool) -> Collective:
        instruction = computation[name]
        span = span_of(instruction.attributes, self.mesh, self.program.num_devices)
        operands = instruction.operands[:1] if kind == "ragged-all-to-all" else instruction.operands
        size = sum(array.bytes for operand in operands for array in computation[operand].arrays())
        if kind == "all-gather":
            size *= span.size
        # Offloaded collectives start in the computation that calls theirs.
        asynchronous = instruction.opcode.endswith("-start") or self.trips.started(computation.name)
        return Collective(kind, span.axes, span.size, size, 1, exact, asynchronous, instruction.source, span.groups)

    def cost(self, name: str) -> _Cost:
        """Cost of running a computation once."""
        if name not in self._costs:
            self._costs[name] = self._sum(self.program[name])
        return self._costs[name]

    def _sum(self, computation: Computation) -> _Cost:
        total = _Cost()
        split: set[tuple[str, str]] = set()
        for instruction in computation:
            base = instruction.base
            if base == "while":
                self._add_loop(total, computation, instruction)
            elif base == "conditional":
                branches = [self.cost(name) for name in _branches(instruction)]
                if branches:
                    total.add(max(branches, key=lambda cost: cost.weight))
                total.conditionals += 1
            elif base in ("call", "async"):
                called = instruction.called("to_apply") or instruction.called("calls")
                if called is not None:
                    total.add(self.cost(called))
            elif base == "fusion":
                self._add_fusion(total, instruction, split)
                total.hbm += self._traffic(computation, instruction)
                continue
            elif base in ("dot", "convolution"):
                flops, key = _product(computation, instruction)
                total.flops[key] += flops
            elif base in COLLECTIVES:
                total.collectives[computation.name, instruction.name, _kind(computation, instruction), True] += 1
            elif base == "custom-call":
                _add_custom_call(total, instruction)
            if instruction.opcode not in _NO_TRAFFIC:
                total.hbm += self._traffic(computation, instruction)
        return total

    def _add_loop(self, total: _Cost, computation: Computation, instruction: Instruction) -> None:
        body, condition = instruction.called("body"), instruction.called("condition")
        once = _Cost()
        for name in (body, condition):
            if name is not None:
                once.add(self.cost(name))
        trips = self.trips.count(computation.name, instruction)
        if trips is not None:
            total.add(once, trips)
            return
        source = instruction.source or instruction.name
        fitting = [part for part in self.assumed if part in source]
        assumed = self.assumed[max(fitting, key=source.rfind)] if fitting else None
        flops, hbm = once.weight
        total.loops += (UnknownLoop(source, float(flops), float(hbm), assumed),)
        total.add(once, 1 if assumed is None else assumed, exact=False)

    def _add_fusion(self, total: _Cost, instruction: Instruction, split: set[tuple[str, str]]) -> None:
        called = instruction.called("calls")
        if called is None:
            return
        inside = self.cost(called)
        kept = _Cost(inside.flops, inside.declared, 0.0, Counter(), inside.opaque, inside.loops, inside.conditionals)
        for (where, name, kind, exact), value in inside.collectives.items():
            # The start, the steps and the end of one collective may be fused with other work, under one name.
            part = _ASYNC_NAME.search(self.program[where][name].attributes)
            if part is not None:
                if (kind, part[1]) in split:
                    continue
                split.add((kind, part[1]))
            kept.collectives[where, name, kind, exact] += value
        total.add(kept)

    def _traffic(self, computation: Computation, instruction: Instruction) -> int:
        """Bytes of main memory that an instruction reads and writes."""
        opcode, base = instruction.opcode, instruction.base
        written = sum(array.bytes for array in instruction.arrays() if array.space == 0)
        if opcode.endswith("-done"):
            return written if opcode != "custom-call-done" else 0
        if base == "custom-call":
            if _target(instruction) in _NO_WORK:
                return 0
            declared = _declared(instruction)
            if declared is not None:
                return declared[1]
        if base == "fusion":
            called = instruction.called("calls")
            reads = {} if called is None else self._fused_reads(called)
            total = 0 if opcode != base else written
            if called is not None and opcode == base:
                total = self._fused_writes(called, instruction)
            for number, operand in enumerate(instruction.operands):
                whole = _in_hbm(computation[operand])
                part = reads.get(number)
                total += whole if part is None else min(whole, part)
            return total
        if base in _SLICES:
            touched = instruction.arrays()[-1 if base == opcode else 1].bytes if instruction.arrays() else 0
            read = min(_in_hbm(computation.operand(instruction, 0)), touched)
            return read + (written if base == opcode else 0)
        if base == "dynamic-update-slice":
            update = computation.operand(instruction, 1).arrays()
            size = sum(array.bytes for array in update)
            return _in_hbm(computation.operand(instruction, 1)) + min(written, size)
        if base == "scatter":
            rest = instruction.operands[1:]
            moved = sum(_in_hbm(computation[operand]) for operand in rest)
            return moved + min(written, sum(a.bytes for operand in rest for a in computation[operand].arrays()))
        read = sum(_in_hbm(computation[operand]) for operand in instruction.operands)
        return read + (written if base == opcode else 0)

    def _fused_reads(self, name: str) -> dict[int, int | None]:
        """Bytes that a fused computation reads of each parameter; None: all of it."""
        if name not in self._reads:
            computation = self.program[name]
            found: dict[int, int | None] = {}
            for number, parameter in computation.parameters.items():
                size = self._touched(name, parameter, None)
                arrays = computation[parameter].arrays()
                found[number] = (
                    None if size is None or len(arrays) != 1 else size * arrays[0].bytes // max(arrays[0].size, 1)
                )
            self._reads[name] = found
        return self._reads[name]

    def _users(self, name: str) -> dict[str, list[Instruction]]:
        if name not in self._uses:
            users: dict[str, list[Instruction]] = {}
            for instruction in self.program[name]:
                for operand in set(instruction.operands):
                    users.setdefault(operand, []).append(instruction)
            self._uses[name] = users
        return self._uses[name]

    def _touched(self, where: str, name: str, returned: Callable[[], int | None] | None) -> int | None:
        """How many of the values of an array a fused computation uses; None: all of them.

        Args:
            where: the computation.
            name: the array in it.
            returned: how many of them are used of what the computation returns, where it is fused into another one.
        """
        total = 0
        if name == self.program[where].root:
            rest = None if returned is None else returned()
            if rest is None:
                return None
            total += rest
        for user in self._users(where).get(name, []):
            if user.opcode in _SLICES and user.operands[0] == name and name not in user.operands[1:]:
                total += user.arrays()[0].size
                continue
            if user.opcode in _UPDATES and user.operands[0] == name:
                continue
            parts: list[int | None] = [None]
            if user.opcode in _REARRANGED:
                parts = [self._touched(where, user.name, returned)]
            elif user.opcode == "fusion" and (called := user.called("calls")) is not None:
                parts = [
                    self._touched(
                        called,
                        self.program[called].parameters[number],
                        partial(self._touched, where, user.name, returned),
                    )
                    for number, operand in enumerate(user.operands)
                    if operand == name
                ]
            for part in parts:
                if part is None:
                    return None
                total += part
        return total

    def _fused_writes(self, name: str, fusion: Instruction) -> int:
        """Bytes that a fusion writes to main memory: whole results, or what an update in place replaces."""
        computation = self.program[name]
        root = computation[computation.root]
        results = root.operands if root.opcode == "tuple" else (root.name,)
        arrays = fusion.arrays()
        if len(results) != len(arrays):
            return sum(array.bytes for array in arrays if array.space == 0)
        return sum(
            min(array.bytes, self._updated(name, result) or array.bytes)
            for result, array in zip(results, arrays, strict=True)
            if array.space == 0
        )

    def _updated(self, where: str, name: str, given: Callable[[int], int | None] | None = None) -> int | None:
        """Bytes of the update where a value is an array with an update in place; None where it isn't.

        Args:
            where: a fused computation.
            name: the value in it.
            given: the same of a parameter, by number, where it is fused into another one.
        """
        instruction = self.program[where][name]
        if instruction.opcode in _UPDATES:
            update = self.program[where].operand(instruction, _UPDATES[instruction.opcode])
            return sum(array.bytes for array in update.arrays())
        if instruction.opcode in _REARRANGED:
            return self._updated(where, instruction.operands[0], given)
        if instruction.opcode == "parameter":
            return None if given is None else given(int(instruction.literal))
        if instruction.opcode == "fusion" and (called := instruction.called("calls")) is not None:
            operands = instruction.operands
            return self._updated(
                called, self.program[called].root, lambda number: self._updated(where, operands[number], given)
            )
        return None


def _in_hbm(instruction: Instruction) -> int:
    return sum(array.bytes for array in instruction.arrays() if array.space == 0)


def _kind(computation: Computation, instruction: Instruction) -> str:
    """The opcode; an all-reduce of which each device keeps a part is a reduce-scatter, as TPUs write one."""
    if instruction.base == "all-reduce":
        root = computation[computation.root]
        if root.opcode == "dynamic-slice" and root.operands[0] == instruction.name:
            return "reduce-scatter"
    return instruction.base


def _branches(instruction: Instruction) -> list[str]:
    listed = instruction.attribute("branch_computations")
    if listed:
        return _BRANCHES.findall(listed)
    return [name for key in ("true_computation", "false_computation") if (name := instruction.called(key)) is not None]


def _target(instruction: Instruction) -> str:
    return instruction.attribute("custom_call_target").strip('"')


def _declared(instruction: Instruction) -> tuple[int, int] | None:
    """Operations and bytes that a kernel says it needs."""
    match = _COST.search(instruction.attributes)
    if match is None:
        return None
    fields = {key: int(value) for key, value in _COST_FIELD.findall(match[1])}
    return fields.get("flops", 0), fields.get("bytes_accessed", 0)


def _add_custom_call(total: _Cost, instruction: Instruction) -> None:
    target = _target(instruction)
    if target in _NO_WORK:
        return
    declared = _declared(instruction)
    if declared is None:
        total.opaque[target] += 1
    else:
        total.declared += declared[0]


def _product(computation: Computation, instruction: Instruction) -> tuple[int, str]:
    """Operations of a product (two for each multiplication and addition) and the type of its operands."""
    left = computation.operand(instruction, 0).arrays()[0]
    right = computation.operand(instruction, 1).arrays()[0]
    result = instruction.arrays()[0]
    precision = instruction.attribute("operand_precision").strip("{}").split(",")
    key = " ".join([left.dtype, *sorted({part for part in precision if part not in ("", "default")})[:1]])
    if instruction.base == "dot":
        contracted = instruction.attribute("lhs_contracting_dims").strip("{}")
        inner = math.prod(left.dims[int(axis)] for axis in contracted.split(",")) if contracted else 1
        return 2 * result.size * inner, key
    labels = _DIM_LABELS.match(instruction.attribute("dim_labels"))
    if labels is None:
        return 0, key
    window = _window(instruction.attribute("window"))
    places = 1
    for axis in sorted(set(labels[2]) - {"i", "o"}):
        spatial = int(axis)
        places *= _pairs(
            left.dims[labels[1].index(axis)],
            result.dims[labels[3].index(axis)],
            right.dims[labels[2].index(axis)],
            window["stride"].get(spatial, 1),
            window["pad"].get(spatial, 0),
            window["lhs_dilate"].get(spatial, 1),
            window["rhs_dilate"].get(spatial, 1),
        )
    outputs = result.dims[labels[3].index("b")] * result.dims[labels[3].index("f")]
    return 2 * outputs * right.dims[labels[2].index("i")] * places, key


def _window(text: str) -> dict[str, dict[int, int]]:
    """Fields of a window such as `{size=16x3 stride=15x1 pad=0_0x1_1 lhs_dilate=16x1}`, by dimension; low padding only."""
    found: dict[str, dict[int, int]] = {"stride": {}, "pad": {}, "lhs_dilate": {}, "rhs_dilate": {}}
    for part in text.strip("{}").split():
        key, _, values = part.partition("=")
        if key in found:
            found[key] = {number: int(value.split("_")[0]) for number, value in enumerate(values.split("x"))}
    return found


@lru_cache(maxsize=1024)
def _pairs(size: int, outputs: int, kernel: int, stride: int, pad: int, dilate: int, kernel_dilate: int) -> int:
    """Pairs of an output and a place of the kernel that meet an input, along one dimension.

    Output o and place k meet input (o * stride + k * kernel_dilate - pad) / dilate where that is a whole number in range.
    TPUs write the batch of a product as a dimension of a convolution whose outputs each meet one input.
    """
    offsets = np.arange(kernel, dtype=np.int64) * kernel_dilate - pad
    # o * stride + offset in [0, (size - 1) * dilate], and a multiple of dilate.
    low = np.maximum(-(offsets // stride), 0)
    high = np.minimum(((size - 1) * dilate - offsets) // stride, outputs - 1)
    common = math.gcd(stride, dilate)
    period = dilate // common
    solvable = offsets % common == 0
    inverse = pow(stride // common, -1, period) if period > 1 else 0
    first = (-(offsets // common) * inverse) % period
    start = low + (first - low) % period
    counts = np.where(solvable & (start <= high), (high - start) // period + 1, 0)
    return int(counts.sum())
