"""What a configuration needs on a topology, as one value: text, JSON and a picture are views of it."""

import json
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import jax.stages

from kimi_jax.planning.chips import GIB, Chip, chip_named
from kimi_jax.planning.counting import AnyMesh, Counts, UnknownLoop, axis_sizes, counts_of
from kimi_jax.planning.picture import Bar, memory_picture
from kimi_jax.planning.roofline import HOP_SECONDS, Estimate, collective_seconds, estimate, torus_of

SCHEMA = "kimi-jax plan 1"
"""Name of the form of the JSON; another one is another name."""

Format = Literal["text", "json", "svg"]

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TOO_LARGE = (
    re.compile(r"\(([\d.]+)([BKMGT]?)\) exceeds available HBM \(([\d.]+)([BKMGT]?)\)"),
    re.compile(r"Used ([\d.]+)([BKMGT]?) of ([\d.]+)([BKMGT]?) hbm", re.IGNORECASE),
)


@dataclass(frozen=True)
class Memory:
    """Bytes of main memory of one device, as the compiler has laid them out (tiles' padding included).

    Attributes:
        arguments: arrays that the program is given.
        outputs: arrays that it returns.
        aliased: of those, the bytes that are returned in the place of an argument that was donated.
        temporaries: what it needs meanwhile.
        code: the program itself.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """Arguments, outputs that need places of their own, and temporaries; without the program."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def total(self) -> int:
        """`peak` and the program."""
        return self.peak + self.code


@dataclass(frozen=True)
class CollectiveRow:
    """Messages of one kind over the same axes, all of a step together.

    Attributes:
        kind: opcode.
        axes: of the mesh.
        group_size: devices that take part together.
        asynchronous: whether computation may go on meanwhile.
        executions: in one step.
        bytes: of one device, all executions; the whole array of each (see `counting.Collective`).
        transfer_seconds: by bytes, at the links' peak.
        latency_seconds: by hops.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    asynchronous: bool
    executions: int
    bytes: int
    transfer_seconds: float
    latency_seconds: float


@dataclass(frozen=True)
class ProgramReport:
    """One compiled program of a configuration, per device.

    Attributes:
        name: such as "decode".
        memory: as the compiler reports it.
        categories: bytes of arguments by what they are: "parameters", "cache", "optimizer", ...
        tokens_per_step: of the whole mesh.
        num_devices: of the mesh.
        flops: operations of products by type of operands (see `counting.Counts`).
        declared_flops: operations that kernels declare.
        hbm_bytes: traffic with main memory.
        opaque_calls: kernels of unknown cost: executions by target.
        unknown_loops: loops whose length depends on data.
        collectives: messages.
        estimate: roofline.
        xla_flops: what XLA's own analysis says, which counts loops once; None where it says nothing.
        xla_bytes: likewise, of memory traffic.
        compile_seconds: wall time of the compilation, or None.
        compile_peak_rss_bytes: peak memory of the process that compiled, or None.
    """

    name: str
    memory: Memory
    categories: dict[str, int]
    tokens_per_step: int
    num_devices: int
    flops: dict[str, float]
    declared_flops: float
    hbm_bytes: float
    opaque_calls: dict[str, int]
    unknown_loops: tuple[UnknownLoop, ...]
    collectives: tuple[CollectiveRow, ...]
    estimate: Estimate
    xla_flops: float | None = None
    xla_bytes: float | None = None
    compile_seconds: float | None = None
    compile_peak_rss_bytes: int | None = None

    @property
    def total_flops(self) -> float:
        """All counted and declared operations."""
        return sum(self.flops.values()) + self.declared_flops

    @property
    def tokens_per_second(self) -> float:
        """Of the whole mesh, when messages hide behind other work: the most that the peaks allow."""
        return _rate(self.tokens_per_step, self.estimate.overlapped_seconds)

    @property
    def tokens_per_second_serial(self) -> float:
        """Of the whole mesh, when every message is waited for."""
        return _rate(self.tokens_per_step, self.estimate.serial_seconds)

    def segments(self) -> dict[str, int]:
        """Bytes in use by what they are; they add up to `memory.total`."""
        named = dict(self.categories)
        rest = {
            "other arguments": self.memory.arguments - sum(named.values()),
            "outputs": self.memory.outputs - self.memory.aliased,
            "temporaries": self.memory.temporaries,
            "program": self.memory.code,
        }
        return {**named, **{name: size for name, size in rest.items() if size > 0 or name == "temporaries"}}


@dataclass(frozen=True)
class FailedProgram:
    """A program that couldn't be compiled.

    Attributes:
        name: such as "train".
        reason: what the compiler said.
        needed_bytes: memory of one device that it would need, where the compiler said so.
        available_bytes: memory that it may use, likewise.
    """

    name: str
    reason: str
    needed_bytes: int | None = None
    available_bytes: int | None = None


@dataclass(frozen=True)
class PlanReport:
    """All programs of one configuration on one topology.

    Attributes:
        model: what is planned, such as "kimi-k3".
        topology: such as "v5p:8x8x8".
        chip: name of the chip.
        mesh: sizes of axes.
        rules: mesh axes of logical axes.
        options: what else was chosen: batch, length, dtypes, ...; values that JSON knows.
        programs: compiled ones.
        failed: others.
        versions: of Python, jax, jaxlib and libtpu.
    """

    model: str
    topology: str
    chip: str
    mesh: dict[str, int]
    rules: dict[str, Any]
    options: dict[str, Any]
    programs: tuple[ProgramReport, ...]
    failed: tuple[FailedProgram, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether every program was compiled and needs no more memory than a device has."""
        usable = chip_named(self.chip).usable_bytes
        return not self.failed and all(program.memory.total <= usable for program in self.programs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, derived figures included; `from_dict` reads it."""
        chip = chip_named(self.chip)
        plain = asdict(self)
        for described, program in zip(plain["programs"], self.programs, strict=True):
            described["memory"] |= {"peak": program.memory.peak, "total": program.memory.total}
            described["segments"] = program.segments()
            described["total_flops"] = program.total_flops
            described["tokens_per_second"] = program.tokens_per_second
            described["tokens_per_second_serial"] = program.tokens_per_second_serial
            described["estimate"] |= {
                "overlapped_seconds": program.estimate.overlapped_seconds,
                "serial_seconds": program.estimate.serial_seconds,
                "bound": program.estimate.bound,
            }
        return {
            "schema": SCHEMA,
            "fits": self.fits,
            "hbm_bytes": chip.hbm_bytes,
            "usable_bytes": chip.usable_bytes,
            **_lists(plain),
        }

    def to_json(self) -> str:
        """JSON with sorted keys, so that two plans can be compared line by line."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> "PlanReport":
        """Reads what `to_dict` gives.

        Raises:
            ValueError: it has another form.
        """
        if plain.get("schema") != SCHEMA:
            raise ValueError(f"schema={plain.get('schema')!r} of a plan isn't {SCHEMA!r}.")
        try:
            return PlanReport(
                model=plain["model"],
                topology=plain["topology"],
                chip=plain["chip"],
                mesh=dict(plain["mesh"]),
                rules=dict(plain["rules"]),
                options=dict(plain["options"]),
                programs=tuple(_program(program) for program in plain["programs"]),
                failed=tuple(FailedProgram(**failed) for failed in plain["failed"]),
                versions=dict(plain["versions"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"a plan of the form {SCHEMA!r} lacks or has an unknown field: {error}.") from error

    @staticmethod
    def from_json(text: str) -> "PlanReport":
        """Reads what `to_json` gives.

        Raises:
            ValueError: it isn't JSON, or has another form.
        """
        return PlanReport.from_dict(json.loads(text))

    def __str__(self) -> str:
        return "\n".join(_text(self))

    def to_svg(self) -> str:
        """A picture: for each program a bar of its memory against that of a device."""
        chip = chip_named(self.chip)
        bars = [Bar(program.name, program.segments()) for program in self.programs]
        bars += [
            Bar(failed.name, {"too large": failed.needed_bytes}) if failed.needed_bytes else Bar(failed.name, {})
            for failed in self.failed
        ]
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        return memory_picture(f"{self.model} on {self.topology}: memory of one device", mesh, bars, chip.usable_bytes)


def report_program(
    name: str,
    compiled: jax.stages.Compiled,
    mesh: AnyMesh,
    categories: Mapping[str, int],
    tokens_per_step: int,
    chip: Chip,
    *,
    assumed_trips: Mapping[str, int] | None = None,
    compile_seconds: float | None = None,
    compile_peak_rss_bytes: int | None = None,
) -> ProgramReport:
    """Reports one compiled program.

    Args:
        name: such as "decode".
        compiled: the program.
        mesh: that it was compiled for.
        categories: bytes on one device of the arguments that deserve a name, such as `{"parameters": ..., "cache": ...}`.
        tokens_per_step: tokens that one run handles on the whole mesh.
        chip: that it is meant for.
        assumed_trips: how often loops run whose length depends on data (see `counting.counts_of`).
        compile_seconds: how long compiling took.
        compile_peak_rss_bytes: peak memory of the process meanwhile, as `peak_rss_bytes` gives it.

    Raises:
        ValueError: the categories are larger than the program's arguments, a size is negative, or the backend doesn't say
            what memory the program needs.
    """
    if tokens_per_step < 1:
        raise ValueError(f"tokens_per_step={tokens_per_step} of {name!r} must be 1 or more.")
    memory = memory_of(compiled)
    if any(size < 0 for size in categories.values()):
        raise ValueError(f"categories of {name!r} must not be negative: {dict(categories)}.")
    if sum(categories.values()) > memory.arguments:
        raise ValueError(
            f"categories of {name!r} add up to {sum(categories.values())} bytes on one device, but the program's "
            f"arguments have only {memory.arguments}: {dict(categories)}."
        )
    counts = counts_of(compiled, mesh, assumed_trips=assumed_trips)
    analysis = _cost_analysis(compiled)
    sizes = axis_sizes(mesh)
    devices = 1
    for size in sizes.values():
        devices *= size
    return ProgramReport(
        name=name,
        memory=memory,
        categories=dict(categories),
        tokens_per_step=tokens_per_step,
        num_devices=devices,
        flops=dict(counts.flops),
        declared_flops=counts.declared_flops,
        hbm_bytes=counts.hbm_bytes,
        opaque_calls=dict(counts.opaque_calls),
        unknown_loops=counts.unknown_loops,
        collectives=_rows(counts, chip, mesh),
        estimate=estimate(counts, chip, mesh),
        xla_flops=analysis.get("flops"),
        xla_bytes=analysis.get("bytes accessed"),
        compile_seconds=compile_seconds,
        compile_peak_rss_bytes=compile_peak_rss_bytes,
    )


def report_failure(name: str, error: Exception) -> FailedProgram:
    """Reports a program whose compilation raised; one that is too large says by how much.

    Args:
        name: such as "train".
        error: what `lowered.compile()` raised.
    """
    message = str(error)
    for pattern in _TOO_LARGE:
        match = pattern.search(message)
        if match is not None:
            needed, available = (int(float(match[number]) * _UNITS[match[number + 1].upper()]) for number in (1, 3))
            return FailedProgram(name, message.split("\n")[0], needed, available)
    return FailedProgram(name, message.split("\n")[0])


def memory_of(compiled: jax.stages.Compiled) -> Memory:
    """What a compiled program needs on one device.

    Raises:
        ValueError: its backend doesn't say.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise ValueError("the backend of the compiled program doesn't say what memory it needs.")
    return Memory(
        int(analysis.argument_size_in_bytes),
        int(analysis.output_size_in_bytes),
        int(analysis.alias_size_in_bytes),
        int(analysis.temp_size_in_bytes),
        int(analysis.generated_code_size_in_bytes),
    )


def peak_rss_bytes() -> int:
    """Most memory that this process has had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kibibytes, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def render(report: PlanReport, form: Format = "text") -> str:
    """A plan as text for a terminal, as JSON, or as an SVG picture."""
    if form == "json":
        return report.to_json()
    return report.to_svg() if form == "svg" else f"{report}\n"


def _rows(counts: Counts, chip: Chip, mesh: AnyMesh) -> tuple[CollectiveRow, ...]:
    torus = torus_of(chip, mesh)
    rows: dict[tuple[Any, ...], CollectiveRow] = {}
    for one in counts.collectives:
        seconds, hops = collective_seconds(one, chip, torus)
        key = (one.kind, one.axes, one.group_size, one.asynchronous)
        row = rows.get(key, CollectiveRow(*key, 0, 0, 0.0, 0.0))
        rows[key] = replace(
            row,
            executions=row.executions + one.executions,
            bytes=row.bytes + one.total_bytes,
            transfer_seconds=row.transfer_seconds + seconds * one.executions,
            latency_seconds=row.latency_seconds + hops * HOP_SECONDS * one.executions,
        )
    return tuple(sorted(rows.values(), key=lambda row: (-row.bytes, row.kind, row.axes, row.asynchronous)))


def _cost_analysis(compiled: jax.stages.Compiled) -> dict[str, float]:
    try:
        found = compiled.cost_analysis()
    except NotImplementedError:
        return {}
    if not isinstance(found, Mapping):
        return {}
    return {key: float(found[key]) for key in ("flops", "bytes accessed") if key in found}


def _program(plain: Mapping[str, Any]) -> ProgramReport:
    derived = ("segments", "total_flops", "tokens_per_second", "tokens_per_second_serial")
    given = {key: value for key, value in plain.items() if key not in derived}
    memory = {key: value for key, value in plain["memory"].items() if key not in ("peak", "total")}
    times = {
        key: value
        for key, value in plain["estimate"].items()
        if key not in ("overlapped_seconds", "serial_seconds", "bound")
    }
    given["memory"] = Memory(**memory)
    given["estimate"] = Estimate(**{**times, "assumptions": tuple(times["assumptions"])})
    given["unknown_loops"] = tuple(UnknownLoop(**loop) for loop in plain["unknown_loops"])
    given["collectives"] = tuple(CollectiveRow(**{**row, "axes": tuple(row["axes"])}) for row in plain["collectives"])
    return ProgramReport(**given)


def _lists(value: Any) -> Any:
    """Tuples as the lists that JSON makes of them."""
    if isinstance(value, Mapping):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, tuple | list) else value


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def _text(report: PlanReport) -> list[str]:
    chip = chip_named(report.chip)
    mesh = ", ".join(f"{axis}={size}" for axis, size in report.mesh.items())
    lines = [f"{report.model} on {report.topology} (mesh {mesh})"]
    lines += [f"  {key}: {value}" for key, value in report.options.items()]
    if report.rules:
        lines.append("  rules: " + ", ".join(f"{name}->{_rule(axis)}" for name, axis in report.rules.items()))
    if report.versions:
        lines.append("  " + ", ".join(f"{name} {version}" for name, version in report.versions.items()))
    lines.append(
        f"  per device: {_gib(chip.hbm_bytes)} of memory, of which a program may use {_gib(chip.usable_bytes)}"
    )
    if report.programs:
        lines += ["", *_table(_columns(report, chip))]
    for program in report.programs:
        if program.collectives:
            lines += ["", f"{program.name}: messages of one step, per device", *_table(_messages(program))]
    for failed in report.failed:
        lines += ["", f"{failed.name}: not compiled: {failed.reason}"]
    assumed = dict.fromkeys(text for program in report.programs for text in program.estimate.assumptions)
    if assumed:
        lines += ["", "Assumed:", *(f"  - {text}" for text in assumed)]
    lines += ["", "Everything fits." if report.fits else "It doesn't fit."]
    return lines


def _columns(report: PlanReport, chip: Chip) -> list[list[str]]:
    """A table with one column a program."""
    programs = report.programs
    names = list(dict.fromkeys(name for program in programs for name in program.segments()))
    rows = [["per device", *(program.name for program in programs)]]
    rows += [[name, *(_gib(program.segments().get(name, 0)) for program in programs)] for name in names]
    rows.append(["in use", *(_gib(program.memory.total) for program in programs)])
    rows.append(["free", *(_gib(chip.usable_bytes - program.memory.total) for program in programs)])
    rows.append(["Tflop", *(_mark(program, f"{program.total_flops / 1e12:.4g}") for program in programs)])
    rows.append(["memory traffic", *(_mark(program, _gib(program.hbm_bytes)) for program in programs)])
    rows.append(["messages", *(_gib(sum(row.bytes for row in program.collectives)) for program in programs)])
    for label, name in (
        ("compute", "compute_seconds"),
        ("memory", "memory_seconds"),
        ("communication", "communication_seconds"),
        ("step, overlapped", "overlapped_seconds"),
        ("step, one after the other", "serial_seconds"),
    ):
        rows.append([label, *(_mark(p, _milliseconds(getattr(p.estimate, name))) for p in programs)])
    rows.append(["limited by", *(program.estimate.bound for program in programs)])
    rows.append(["tokens a step, whole mesh", *(f"{program.tokens_per_step:,}" for program in programs)])
    # More time can't be excluded where part of the work isn't counted, so these are at most what is shown.
    rows.append(["tokens/s, overlapped", *(f"<= {program.tokens_per_second:,.0f}" for program in programs)])
    rows.append(["tokens/s, one after the other", *(f"<= {p.tokens_per_second_serial:,.0f}" for p in programs)])
    if any(program.compile_seconds is not None for program in programs):
        rows.append(["compiled in", *(_or(program.compile_seconds, lambda s: f"{s:.1f} s") for program in programs)])
    if any(program.compile_peak_rss_bytes is not None for program in programs):
        rows.append(["compiling process", *(_or(program.compile_peak_rss_bytes, _gib) for program in programs)])
    return rows


def _messages(program: ProgramReport) -> list[list[str]]:
    rows = [["kind", "axes", "devices", "times", "bytes", "transfer", "latency"]]
    rows += [
        [
            row.kind + (" (async)" if row.asynchronous else ""),
            " ".join(row.axes) or "-",
            str(row.group_size),
            f"{row.executions:,}",
            _gib(row.bytes),
            _milliseconds(row.transfer_seconds),
            _milliseconds(row.latency_seconds),
        ]
        for row in program.collectives
    ]
    return rows


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
        if number == 0:
            lines.append("  " + "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return lines


def _mark(program: ProgramReport, text: str) -> str:
    return f">= {text}" if program.estimate.lower_bound else text


def _gib(size: float | int) -> str:
    if abs(size) >= GIB / 10:
        return f"{size / GIB:,.2f} GiB"
    return f"{size / 2**20:,.2f} MiB" if abs(size) >= 2**20 / 10 else f"{size:,.0f} B"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def _or(value: Any, form: Any) -> str:
    return "-" if value is None else form(value)


def _rule(axis: Any) -> str:
    if axis is None:
        return "-"
    return "+".join(str(part) for part in axis) if isinstance(axis, list | tuple) else str(axis)
