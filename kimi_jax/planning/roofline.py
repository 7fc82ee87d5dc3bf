"""How long a step would take if arithmetic, memory and links ran at their published peaks.

With P the bytes of the whole array on one device, N devices in a group and W the bytes per second that a device can send:

    all-gather, reduce-scatter    P (N - 1) / N / W
    all-reduce                    2 P (N - 1) / N / W
    collective-permute            P (messages over the busiest link) / w
    all-to-all                    torus: the largest over its dimensions of P n / (4 r w); switch: P (N - 1) / N / W

On a torus w is one direction of one link; a group that spans n chips of a dimension whose ends are joined uses both
directions (r = 2), else one (r = 1); W = sum over the dimensions that a group spans of r w. Where a group takes every
k-th chip of a dimension only, k groups share its links, so r is divided by k. The all-to-all follows from the links that
cross the middle of a dimension: half of the devices send half of their P over r of them. A ragged all-to-all is counted
as if every device sent all that it has room for. Where a group has several devices of each chip, what they all need
comes to the chip once, over the links of all of them: W is that of the chip. On a switch w = W, one direction of all
links of a device.

Every collective also waits for its longest way: one hop a link, twice for an all-reduce.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jax.sharding import Mesh

from kimi_jax.planning.chips import Chip
from kimi_jax.planning.counting import AnyMesh, Collective, Counts, UnknownLoop
from kimi_jax.planning.groups import Groups

HOP_SECONDS = 1e-6
"""Assumed delay of one message over one link."""

Place = tuple[int, ...]


@dataclass(frozen=True)
class Estimate:
    """Seconds of one step on one device, at published peaks.

    Attributes:
        compute_seconds: of products, each type of operands at its own peak.
        memory_seconds: of traffic with main memory.
        transfer_seconds: of messages, by bytes.
        latency_seconds: of messages, by hops.
        lower_bound: part of the work isn't counted: loops of unknown length, or kernels that declare no cost.
        assumptions: what else the figures rest on, as sentences.
    """

    compute_seconds: float
    memory_seconds: float
    transfer_seconds: float
    latency_seconds: float
    lower_bound: bool
    assumptions: tuple[str, ...]

    @property
    def communication_seconds(self) -> float:
        """Of messages."""
        return self.transfer_seconds + self.latency_seconds

    @property
    def overlapped_seconds(self) -> float:
        """A step whose messages hide behind its other work, or the other way round."""
        return max(self.compute_seconds, self.memory_seconds, self.communication_seconds)

    @property
    def serial_seconds(self) -> float:
        """A step that waits for every message."""
        return max(self.compute_seconds, self.memory_seconds) + self.communication_seconds

    @property
    def bound(self) -> str:
        """What takes longest: "compute", "memory" or "communication"."""
        times = {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "communication": self.communication_seconds,
        }
        return max(times, key=lambda name: times[name])


@dataclass(frozen=True)
class Torus:
    """Places of the devices of a mesh, in its order.

    Attributes:
        places: chips.
        cores: devices within their chips.
        shape: chips along each dimension.
        joined: which dimensions' ends are joined.
    """

    places: tuple[Place, ...]
    cores: tuple[int, ...]
    shape: tuple[int, ...]
    joined: tuple[bool, ...]


def estimate(counts: Counts, chip: Chip, mesh: AnyMesh) -> Estimate:
    """The roofline of a counted program.

    Args:
        counts: of the program.
        chip: that it runs on.
        mesh: that it was compiled for; where its devices have places on a torus, messages are routed over them.
    """
    torus = torus_of(chip, mesh)
    transfer = latency = 0.0
    for collective in counts.collectives:
        seconds, hops = collective_seconds(collective, chip, torus)
        transfer += seconds * collective.executions
        latency += hops * HOP_SECONDS * collective.executions
    compute = sum(flops / chip.peak(operands) for operands, flops in counts.flops.items())
    compute += counts.declared_flops / chip.peak_flops["bf16"]
    return Estimate(
        compute,
        counts.hbm_bytes / chip.hbm_bandwidth,
        transfer,
        latency,
        counts.lower_bound,
        tuple(_assumptions(counts, chip, torus)),
    )


def collective_seconds(collective: Collective, chip: Chip, torus: Torus | None) -> tuple[float, int]:
    """Seconds of one execution by its bytes, and the links on its longest way.

    Args:
        collective: which.
        chip: that it runs on.
        torus: places of devices; None: every group is a ring of its own (torus) or behind a switch.
    """
    size, payload = collective.group_size, float(collective.bytes)
    if size < 2 or not payload:
        return 0.0, 0
    part = payload * (size - 1) / size
    times = 2 if collective.kind == "all-reduce" else 1
    if chip.fabric == "switch":
        return (payload if collective.kind == "collective-permute" else times * part) / chip.link_bandwidth, times
    if collective.kind == "collective-permute":
        if torus is None:
            return payload / chip.link_bandwidth, 1
        load, hops, pair = _routed(collective.groups, torus)
        return max(
            payload * load / chip.link_bandwidth, payload / chip.pair_bandwidth if pair and chip.pair_bandwidth else 0.0
        ), hops
    spans = ((size, 2.0),) if torus is None else _spans(collective.groups[0], torus)
    if not spans:
        # Only the devices of one chip.
        return times * part / chip.pair_bandwidth, times
    hops = times * sum(length // 2 if directions >= 2 else length - 1 for length, directions in spans)
    if collective.kind in ("all-to-all", "ragged-all-to-all"):
        return max(payload * length / (4 * directions) for length, directions in spans) / chip.link_bandwidth, hops
    together = 1 if torus is None else size / len({torus.places[device] for device in collective.groups[0]})
    return times * part / (together * chip.link_bandwidth * sum(directions for _, directions in spans)), hops


def torus_of(chip: Chip, mesh: AnyMesh) -> Torus | None:
    """Places of a mesh's devices, or None where they have none."""
    if not isinstance(mesh, Mesh) or chip.fabric != "torus":
        return None
    devices = mesh.devices.reshape(-1)
    if not all(hasattr(device, "coords") for device in devices):
        return None
    places = tuple(tuple(int(at) for at in device.coords[: chip.torus_dims]) for device in devices)
    shape = tuple(max(place[axis] for place in places) + 1 for axis in range(chip.torus_dims))
    cores = tuple(int(getattr(device, "core_on_chip", 0)) for device in devices)
    return Torus(places, cores, shape, tuple(size % chip.wraps == 0 for size in shape))


@lru_cache(maxsize=4096)
def _spans(group: Sequence[int], torus: Torus) -> tuple[tuple[int, float], ...]:
    """Of each dimension that a group covers more than one place of: how many, and the directions of it that it has."""
    places = np.array([torus.places[device] for device in group])
    found = []
    for axis, size in enumerate(torus.shape):
        taken = np.unique(places[:, axis])
        if len(taken) > 1:
            gap = int(np.diff(taken).min())
            ring = torus.joined[axis] and len(taken) * gap == size
            found.append((len(taken), (2.0 if ring else 1.0) / gap))
    return tuple(found)


@lru_cache(maxsize=1024)
def _routed(pairs: Groups, torus: Torus) -> tuple[int, int, bool]:
    """Messages over the busiest link, links on the longest way, and whether any stays within a chip.

    A message goes along one dimension after the other, the shorter way round.
    """
    loads: Counter[tuple[int, int, Place]] = Counter()
    longest, within = 0, False
    for source, target in pairs:
        at, end = list(torus.places[source]), torus.places[target]
        within |= source != target and tuple(at) == end
        hops = 0
        for axis, size in enumerate(torus.shape):
            ahead = (end[axis] - at[axis]) % size
            forward = ahead <= size - ahead if torus.joined[axis] else end[axis] >= at[axis]
            for _ in range(abs(end[axis] - at[axis]) if not torus.joined[axis] else min(ahead, size - ahead)):
                loads[axis, 1 if forward else -1, tuple(at)] += 1
                at[axis] = (at[axis] + (1 if forward else -1)) % size
                hops += 1
        longest = max(longest, hops)
    # Two devices of a chip share its links, which the figures of one device already count as half.
    shared = max(1, len(torus.places) // max(1, math.prod(torus.shape)))
    return math.ceil(max(loads.values(), default=0) / shared), longest, within


def _assumptions(counts: Counts, chip: Chip, torus: Torus | None) -> list[str]:
    peaks = ", ".join(f"{name} {value / 1e12:.4g} T" for name, value in _shown_peaks(chip.peak_flops).items())
    said = [
        f"One device of {chip.name}: {peaks} operations/s, {chip.hbm_bandwidth / 1e9:.4g} GB/s of memory, "
        f"{chip.link_bandwidth / 1e9:.4g} GB/s in one direction of one {'link' if chip.fabric == 'torus' else 'switch port'}; "
        "all reached in full.",
        "Only matrix products and convolutions are counted as arithmetic; other work is memory traffic.",
        f"Every hop of a collective takes {HOP_SECONDS * 1e6:g} microsecond.",
    ]
    if chip.fabric == "torus" and "f32" not in chip.peak_flops:
        said.append("float32 products take one bf16 pass, three at precision high, six at highest.")
    if chip.fabric == "torus" and torus is None and counts.collectives:
        said.append("The places of devices aren't known: every group is taken as a ring of neighbours of its own.")
    if torus is not None:
        joined = [str(axis) for axis, ends in enumerate(torus.joined) if ends]
        said.append(
            f"Torus {'x'.join(map(str, torus.shape))}, ends joined along {', '.join(joined) or 'no dimension'}."
        )
    if counts.declared_flops:
        said.append("Kernels' own figures for their operations and bytes are believed, and run at the peak of bf16.")
    if counts.conditionals:
        said.append(f"Of each of {counts.conditionals} conditionals the most expensive branch is counted.")
    said += [
        f"{executions} calls of {target} say nothing about their operations and count as none."
        for target, executions in counts.opaque_calls.items()
    ]
    said += [_loop(loop) for loop in counts.unknown_loops]
    if any(one.kind == "ragged-all-to-all" for one in counts.collectives):
        said.append("Ragged all-to-alls are counted as full.")
    return said


def _loop(loop: UnknownLoop) -> str:
    length = "once for want of a number" if loop.assumed_trips is None else f"{loop.assumed_trips} times, as assumed"
    return (
        f"The length of the loop {loop.source} depends on data; it is counted {length}: {loop.flops:.4g} operations and "
        f"{loop.hbm_bytes:.4g} bytes an iteration."
    )


def _shown_peaks(peaks: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(peaks.items()))
