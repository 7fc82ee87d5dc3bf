"""Chooses a mesh: every legal one is judged by memory and by seconds a step, the fastest that fits is taken.

plan = plan_mesh(config, parse_topology("v5p:8x8x8"), [Workload("decode", 64, 1, 131072)])
print(plan)              # what was chosen, why, and what comes next
plan.sizes               # {"data": 1, "context": 4, "expert": 16, "tensor": 8}
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_jax.config import KimiConfig
from kimi_jax.parallel.zigzag import Layout
from kimi_jax.planning.chips import CHIPS, GIB, Chip
from kimi_jax.planning.step_cost import Part, Phase, Spread, StepCost, StepModel, Workload
from kimi_jax.planning.topology import Topology
from kimi_jax.sharding import MESH_AXES, ShardingError, num_devices

_MOST_DEVICES = 2**15
_MOST_MICRO_BATCHES = 2**12


class PlanError(ValueError):
    """No mesh of these devices holds the model and its work; the message says what would."""


@dataclass(frozen=True)
class Candidate:
    """A legal mesh and what the phases cost on it.

    Attributes:
        sizes: of all axes.
        steps: one a phase, in the order asked for.
        limit: bytes that a program may use.
    """

    sizes: Mapping[str, int]
    steps: tuple[StepCost, ...]
    limit: int

    def needed(self, step: StepCost) -> int:
        """Bytes of one device while a phase runs: phases without training share parameters, and all caches stay."""
        used = sum(step.memory.values())
        if step.workload.phase == "train":
            return used
        others = (other for other in self.steps if other is not step and other.workload.phase != "train")
        return used + sum(other.memory["cache"] for other in others)

    @property
    def peak(self) -> int:
        """The most that any phase needs."""
        return max(self.needed(step) for step in self.steps)

    @property
    def fits(self) -> bool:
        """Whether every phase fits."""
        return self.peak <= self.limit

    @property
    def seconds(self) -> float:
        """Of a step of every phase."""
        return sum(step.seconds for step in self.steps)


@dataclass(frozen=True)
class MeshPlan:
    """What was chosen.

    Attributes:
        config: the model.
        devices: how many.
        chip: figures of one.
        chosen: the mesh.
        others: the next best that fit.
        legal: how many meshes the model allows.
        fitting: how many of them fit.
        given: whether the mesh was given and not chosen.
    """

    config: KimiConfig
    devices: int
    chip: Chip
    chosen: Candidate
    others: tuple[Candidate, ...]
    legal: int
    fitting: int
    given: bool

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of all mesh axes."""
        return dict(self.chosen.sizes)

    @property
    def reason(self) -> str:
        """One sentence: how the mesh was found."""
        if self.given:
            return "as given"
        much = "the only one" if self.fitting == 1 else f"the fastest of {self.fitting}"
        return f"{much} that fit, of {self.legal} legal meshes of {self.devices} {self.chip.name} devices"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "reason": self.reason,
            "mesh": self.sizes,
            "phases": {step.workload.phase: _plain(self.chosen, step) for step in self.chosen.steps},
            "next": [
                {"mesh": dict(other.sizes), "peak_bytes": other.peak}
                | {step.workload.phase: step.seconds for step in other.steps}
                for other in self.others
            ],
        }

    def __str__(self) -> str:
        lines = [f"mesh {written(self.chosen.sizes)}: {self.reason}", *_phases(self.chosen), *_layers(self)]
        if self.others:
            lines.append("  next best:")
            for other in self.others:
                times = ", ".join(f"{step.workload.phase} {_time(step.seconds)}" for step in other.steps)
                lines.append(f"    {written(other.sizes)}: {times}, up to {_gib(other.peak)} a device")
        lines.append("  Estimates from shapes at published peaks (kimi_jax.planning.step_cost has the formulas).")
        return "\n".join(lines)


def plan_mesh(
    config: KimiConfig,
    where: Topology | Chip,
    workloads: Sequence[Workload],
    *,
    devices: int | None = None,
    mesh: Mapping[str, int] | None = None,
    limit: int | None = None,
    shown: int = 3,
) -> MeshPlan:
    """The mesh on which steps are fastest, out of all that the model allows and that fit.

    With several phases one mesh serves all of them, since parameters stay where they are: it is the one with the least
    sum over phases of seconds over the least seconds that any fitting mesh needs for that phase. Training has its own
    parameters (float32, unpacked) and is cut into as few micro-batches as fit; one [B, T, D] array a layer is kept,
    the rest is computed again.

    Args:
        config: the model.
        where: a topology, or the kind of device.
        workloads: what shall run.
        devices: how many; None: those of the topology.
        mesh: sizes of axes, to judge this mesh instead of choosing one; missing axes are 1.
        limit: bytes that a program may use on a device; None: the chip's `usable_bytes`.
        shown: how many of the next best are kept.

    Raises:
        PlanError: nothing fits; says the least memory found, and what would fit.
        ShardingError: `mesh` isn't legal for the model.
        ValueError: a workload, or the number of devices, isn't legal.
    """
    chip = where.chip if isinstance(where, Topology) else where
    count = where.num_devices if isinstance(where, Topology) and devices is None else devices
    if count is None or count < 1:
        raise ValueError(f"devices={devices}; a number of devices from 1 on is needed.")
    if not workloads:
        raise ValueError("workloads is empty; name at least one phase to plan for.")
    for work in workloads:
        work.check(config)
    limit = chip.usable_bytes if limit is None else limit
    model = StepModel(config, chip)
    if mesh is not None:
        sizes = _given(mesh, count)
        candidate = _candidate(model, sizes, workloads, limit)
        return MeshPlan(config, count, chip, candidate, (), 1, int(candidate.fits), given=True)
    legal = _candidates(model, count, workloads, limit)
    fitting = [candidate for candidate in legal if candidate.fits]
    if not fitting:
        raise PlanError(_nothing_fits(model, count, workloads, limit, legal))
    best = [min(c.steps[i].seconds for c in fitting) for i in range(len(workloads))]

    def score(candidate: Candidate) -> tuple[float, int]:
        relative = sum(step.seconds / least for step, least in zip(candidate.steps, best, strict=True))
        return round(relative, 9), candidate.peak

    ranked = sorted(fitting, key=score)
    return MeshPlan(config, count, chip, ranked[0], tuple(ranked[1 : 1 + shown]), len(legal), len(fitting), given=False)


def choose_mesh(
    config: KimiConfig,
    devices: Sequence[Any],
    *,
    rows: int = 8,
    context: int = 8192,
) -> tuple[dict[str, int], str]:
    """A mesh of these devices for prompts of `context` tokens and decoding `rows` of them at once, and why.

    Args:
        config: the model.
        devices: JAX's, such as `jax.devices()`; of one kind.
        rows: decoded at once.
        context: places of a row, at most max_position_embeddings of them.

    Returns:
        (sizes of the axes that have more than one device: none for one device; a sentence or several).

    Raises:
        PlanError: nothing fits.
    """
    if len(devices) == 1:
        return {}, "one device"
    kind = str(devices[0].device_kind)
    chip = _chip_of(kind)
    if chip is None:
        return _largest_split(config, len(devices), kind)
    context = min(context, config.max_position_embeddings)
    # What a device says that it may use counts for more than what its kind is sold with.
    stats = devices[0].memory_stats() if hasattr(devices[0], "memory_stats") else None
    limit = (stats or {}).get("bytes_limit")
    phases = [Workload("prefill", 1, context, context), Workload("decode", rows, 1, context)]
    plan = plan_mesh(config, chip, phases, devices=len(devices), limit=limit)
    return {axis: size for axis, size in plan.sizes.items() if size > 1}, str(plan)


def cheaper_layout(
    config: KimiConfig, sizes: Mapping[str, int], kind: str, phase: Phase, rows: int, tokens: int, context: int
) -> Layout:
    """The order in which attention runs the queries of rows whose tokens are split, by what a layer costs in each.

    Args:
        config: the model.
        sizes: of the mesh axes.
        kind: `device_kind` of JAX's devices; "zigzag" for one that has no figures in `CHIPS`.
        phase: "prefill" or "train".
        rows: sequences at once.
        tokens: new ones of each row, padded.
        context: places of each row's cache; 0 for training.

    Raises:
        ShardingError, ValueError: as `StepModel.cost`.
    """
    chip = _chip_of(kind)
    if chip is None:
        return "zigzag"
    return StepModel(config, chip).cost(sizes, Workload(phase, rows, tokens, context)).layout


def _chip_of(kind: str) -> Chip | None:
    return next((chip for chip in CHIPS.values() if chip.kind == kind), None)


def factorisations(count: int) -> Iterator[dict[str, int]]:
    """All sizes of the mesh axes that multiply to a number of devices."""
    for data in _divisors(count):
        for context in _divisors(count // data):
            for expert in _divisors(count // (data * context)):
                sizes = (data, context, expert, count // (data * context * expert))
                yield dict(zip(MESH_AXES, sizes, strict=True))


def written(sizes: Mapping[str, int]) -> str:
    """As `sharding.parse_mesh` reads it."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def _candidates(model: StepModel, count: int, workloads: Sequence[Workload], limit: int) -> list[Candidate]:
    found = []
    for sizes in factorisations(count):
        try:
            found.append(_candidate(model, sizes, workloads, limit))
        except (ShardingError, _Impossible):
            continue
    return found


class _Impossible(ValueError):
    """Rows of a training batch can't be spread so."""


def _candidate(model: StepModel, sizes: Mapping[str, int], workloads: Sequence[Workload], limit: int) -> Candidate:
    model.parameter_bytes(sizes, train=False)
    return Candidate(dict(sizes), tuple(_step(model, sizes, work, limit) for work in workloads), limit)


def _step(model: StepModel, sizes: Mapping[str, int], work: Workload, limit: int) -> StepCost:
    if work.phase != "train":
        return model.cost(sizes, work)
    step: StepCost | None = None
    for parts in (n for n in _divisors(work.rows) if n <= _MOST_MICRO_BATCHES):
        try:
            step = model.cost(sizes, work, parts)
        except ShardingError:
            raise
        except ValueError:
            continue
        if sum(step.memory.values()) <= limit:
            break
    if step is None:
        raise _Impossible
    return step


def _given(mesh: Mapping[str, int], count: int) -> dict[str, int]:
    unknown = [axis for axis in mesh if axis not in MESH_AXES]
    if unknown:
        raise ShardingError(f"mesh axis {unknown[0]!r} is unknown; legal are {', '.join(MESH_AXES)}.")
    sizes = {axis: mesh.get(axis, 1) for axis in MESH_AXES}
    if num_devices(sizes) != count:
        raise ShardingError(
            f"mesh {written(mesh)} has {num_devices(sizes)} devices, but there are {count}; sizes must multiply to "
            f"{count}, as in {written({**dict.fromkeys(MESH_AXES, 1), 'data': count})}."
        )
    return sizes


def _largest_split(config: KimiConfig, count: int, kind: str) -> tuple[dict[str, int], str]:
    """For devices without published figures: as many as can share every parameter, `tensor` first."""
    model = StepModel(config, next(iter(CHIPS.values())))
    legal = []
    for sizes in factorisations(count):
        try:
            held = sum(model.parameter_bytes(sizes, train=False).values())
        except ShardingError:
            continue
        legal.append((held, sizes["data"] * sizes["context"], -sizes["tensor"], sizes))
    held, *_, sizes = min(legal, key=lambda entry: entry[:3])
    return (
        {axis: size for axis, size in sizes.items() if size > 1},
        f"mesh {written(sizes)}: no figures of {kind!r} are known, so this is the mesh with the fewest bytes of "
        f"parameters on a device, {_gib(held)}",
    )


def _nothing_fits(
    model: StepModel, count: int, workloads: Sequence[Workload], limit: int, legal: Sequence[Candidate]
) -> str:
    phases = " and ".join(work.phase for work in workloads)
    if not legal:
        return (
            f"no mesh of {count} devices is legal for {phases}: training rows must be whole multiples of the devices."
        )
    least = min(legal, key=lambda candidate: candidate.peak)
    step = max(least.steps, key=least.needed)
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in step.memory.items() if size)
    said = (
        f"{phases} don't fit on {count} {model.chip.name} devices: the least that {step.workload.phase} needs on one is "
        f"{_gib(least.peak)} (mesh {written(least.sizes)}: {parts}), and {_gib(limit)} may be used."
        if len(workloads) > 1
        else f"{phases} doesn't fit on {count} {model.chip.name} devices: the least that it needs on one is "
        f"{_gib(least.peak)} (mesh {written(least.sizes)}: {parts}), and {_gib(limit)} may be used."
    )
    return f"{said} {_way_out(model, count, workloads, limit)}"


def _way_out(model: StepModel, count: int, workloads: Sequence[Workload], limit: int) -> str:
    """What would fit: fewer rows or places on these devices, and more devices."""

    def fits(works: Sequence[Workload], devices: int) -> bool:
        return any(candidate.fits for candidate in _candidates(model, devices, works, limit))

    ways = []
    for field in ("rows", "context", "tokens"):
        smaller = _smaller(workloads, field)
        while smaller is not None and not fits(smaller, count):
            smaller = _smaller(smaller, field)
        if smaller is not None:
            ways.append(" and ".join(f"{field}={getattr(work, field)} for {work.phase}" for work in smaller))
            break
    devices = count * 2
    while devices <= _MOST_DEVICES and not fits(workloads, devices):
        devices *= 2
    if devices <= _MOST_DEVICES:
        ways.append(f"{devices} devices")
    if not ways:
        return "Neither fewer rows nor more devices of this kind help; a chip with more memory might."
    return f"It would fit with {', or with '.join(ways)}."


def _smaller(workloads: Sequence[Workload], field: str) -> list[Workload] | None:
    """The same with half of something, or None where nothing is left to halve."""
    found = []
    for work in workloads:
        value = getattr(work, field)
        least = work.tokens if field == "context" else 1
        keeps = value // 2 < least or (field == "tokens" and work.phase == "decode") or value <= 1
        found.append(work if keeps else Workload(**{**vars(work), field: value // 2}))
    return None if found == list(workloads) else found


def _phases(candidate: Candidate) -> list[str]:
    lines = []
    for step in candidate.steps:
        lines.append(
            f"  {step.workload.phase}, {step.workload}: {_time(step.seconds)} a step, limited by {step.bound}; "
            f"{_gib(candidate.needed(step))} of {_gib(candidate.limit)} a device"
            + ("" if candidate.needed(step) <= candidate.limit else ", which doesn't fit")
        )
        lines.append("    " + ", ".join(_part(part) for part in step.parts))
        memory = [
            f"{name} {'up to ' * (name == 'temporaries')}{_gib(size)}" for name, size in step.memory.items() if size
        ]
        lines.append("    " + ", ".join(memory))
        if step.workload.phase == "train":
            lines.append(
                f"    {step.micro_batches} micro-batch{'es' if step.micro_batches > 1 else ''}, the fewest that fit; one "
                "[B, T, D] array a layer is kept for the backward pass, the rest is computed again"
            )
    return lines


def _layers(plan: MeshPlan) -> list[str]:
    """What splits each kind of layer, and the forms that were chosen."""
    config, sizes = plan.config, plan.chosen.sizes
    tensor, experts = sizes["tensor"], sizes["expert"] * sizes["tensor"]
    heads = [
        f"  KDA ({len(config.kda.layers)} layers): {config.kda.num_heads} heads over tensor={tensor}",
        f"  attention ({len(config.mla.layers)} layers): {config.num_attention_heads} heads over tensor={tensor}"
        + ("" if config.dsa is None else ", every device runs the whole indexer"),
    ]
    if config.moe.layers:
        heads.append(
            f"  experts ({len(config.moe.layers)} layers): {config.moe.num_experts} over expert={sizes['expert']} x "
            f"tensor={tensor} ({config.moe.num_experts // experts} a device)"
        )
    lines = heads[:1]
    for step in plan.chosen.steps:
        lines.append(f"    {step.workload.phase}: {_where(step.spread, sizes)}")
    for head, kind in zip(heads[1:], ("attention", "experts"), strict=False):
        lines.append(head)
        lines += [
            f"    {step.workload.phase}: {step.reasons[kind]}" for step in plan.chosen.steps if kind in step.reasons
        ]
    return lines


def _where(spread: Spread, sizes: Mapping[str, int]) -> str:
    def named(axes: Sequence[str]) -> str:
        return " x ".join(f"{axis}={sizes[axis]}" for axis in axes if sizes[axis] > 1)

    rows = named(spread.rows)
    said = [f"rows over {rows} ({spread.batch:,} a device)" if rows else f"all {spread.batch:,} rows on every device"]
    if not spread.rows and sizes["data"] > 1:
        said.append("the same on all devices of data, which doesn't divide the rows")
    along = named(spread.sequence)
    if along and spread.split:
        said.append(f"tokens over {along} ({spread.tokens:,} of a row a device)")
    if along and spread.places:
        said.append(f"places over {along} ({spread.places:,} of a row a device)")
    return ", ".join(said)


def _plain(candidate: Candidate, step: StepCost) -> dict[str, Any]:
    return {
        "workload": dict(vars(step.workload)),
        "seconds": step.seconds,
        "bound": step.bound,
        "needed_bytes": candidate.needed(step),
        "memory": dict(step.memory),
        "parts": {p.name: {"compute": p.compute, "memory": p.memory, "messages": p.messages} for p in step.parts},
        "layout": step.layout if step.spread.split else None,
        "exchange": step.exchange,
        "micro_batches": step.micro_batches,
    }


def _part(part: Part) -> str:
    times = {"products": part.compute, "memory": part.memory, "messages": part.messages}
    return f"{part.name} {_time(part.seconds)} ({max(times, key=lambda name: times[name])})"


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def _gib(size: float | int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:,.2f} MiB"


def _time(seconds: float) -> str:
    return (
        f"{seconds:.3g} s"
        if seconds >= 1
        else f"{seconds * 1e3:.3g} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.3g} us"
    )
