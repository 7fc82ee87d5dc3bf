"""Walking the decoder's layers in a program whose size doesn't depend on their number.

Layers are grouped into units of one period (KDA, KDA, KDA, MLA in the public models); equal units that follow each
other are scanned, and so are equal layers inside a unit. Weights stay in one stack per kind of layer and are addressed
by index, so the grouping is a matter of the program alone and any layer pattern runs.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.config import LayerKind

Tree = Any


class LayerIndex(NamedTuple):
    """Where a layer's weights and state are: its number, and its rank among layers of its mixer and of its FFN kind."""

    layer: Any
    mixer: Any
    ffn: Any


@dataclass(frozen=True)
class Run:
    """`count` consecutive layers of one kind."""

    kind: LayerKind
    count: int


@dataclass(frozen=True)
class Segment:
    """`repeats` consecutive units of the same runs; `indices[r]` holds LayerIndex arrays [repeats, count] of run r."""

    runs: tuple[Run, ...]
    repeats: int
    indices: tuple[LayerIndex, ...]


def plan(kinds: Sequence[LayerKind]) -> tuple[Segment, ...]:
    """Groups layers into segments, with units that end or that start at full attention: whichever compiles less."""
    ends = _segments(kinds, lambda previous, kind: previous.mixer == "mla")
    starts = _segments(kinds, lambda previous, kind: kind.mixer == "mla")
    return min(ends, starts, key=lambda segments: sum(len(segment.runs) for segment in segments))


def _segments(kinds: Sequence[LayerKind], splits: Callable[[LayerKind, LayerKind], bool]) -> tuple[Segment, ...]:
    units: list[list[LayerKind]] = [[kinds[0]]]
    for previous, kind in itertools.pairwise(kinds):
        if splits(previous, kind) or previous.ffn != kind.ffn:
            units.append([])
        units[-1].append(kind)

    segments: list[Segment] = []
    start = 0
    for unit, equal in itertools.groupby(units):
        repeats = len(list(equal))
        runs = tuple(Run(kind, len(list(same))) for kind, same in itertools.groupby(unit))
        layers = start + np.arange(repeats * len(unit)).reshape(repeats, -1)
        bounds = np.cumsum([0, *(run.count for run in runs)])
        indices = tuple(_index(kinds, layers[:, a:b]) for a, b in itertools.pairwise(bounds))
        segments.append(Segment(runs, repeats, indices))
        start += layers.size
    return tuple(segments)


def _index(kinds: Sequence[LayerKind], layers: np.ndarray) -> LayerIndex:
    mixers = [kind.mixer for kind in kinds]
    ffns = [kind.ffn for kind in kinds]

    def ranks(names: Sequence[str]) -> np.ndarray:
        of_layer = np.array([list(names[:i]).count(name) for i, name in enumerate(names)], np.int32)
        return of_layer[layers]

    return LayerIndex(layers.astype(np.int32), ranks(mixers), ranks(ffns))


def walk(
    segments: Sequence[Segment],
    step: Callable[[LayerKind, Tree, LayerIndex, Tree], tuple[Tree, Tree]],
    carry: Tree,
    inputs: list[list[Tree]] | None = None,
    *,
    reverse: bool = False,
    unroll: bool = False,
) -> tuple[Tree, list[list[Tree]]]:
    """Folds `step` over all layers.

    Args:
        segments: from `plan`.
        step: (kind, carry, index, input) -> (carry, output).
        carry: of the first step.
        inputs: per segment and run, trees with leading axes [repeats, count]; None passes None to every step.
        reverse: from the last layer to the first.
        unroll: one copy of `step` a layer in place of loops; indices are plain numbers then.

    Returns:
        (last carry, outputs), outputs laid out as `inputs`.
    """
    outputs: list[list[Tree]] = []
    direction = -1 if reverse else 1
    for segment, given in list(zip(segments, inputs or itertools.repeat(None, len(segments)), strict=True))[
        ::direction
    ]:

        def unit(carry: Tree, xs: tuple, segment: Segment = segment) -> tuple[Tree, list[Tree]]:
            results = []
            for run, index, value in list(zip(segment.runs, *xs, strict=True))[::direction]:

                def layer(carry: Tree, x: tuple, kind: LayerKind = run.kind) -> tuple[Tree, Tree]:
                    return step(kind, carry, *x)

                carry, output = _scan(layer, carry, (index, value), run.count, reverse, unroll)
                results.append(output)
            return carry, results[::direction]

        values = tuple(given) if given is not None else (None,) * len(segment.runs)
        carry, output = _scan(unit, carry, (segment.indices, values), segment.repeats, reverse, unroll)
        outputs.append(output)
    return carry, outputs[::direction]


def _scan(body: Callable, carry: Tree, xs: Tree, length: int, reverse: bool, unroll: bool) -> tuple[Tree, Tree]:
    """`lax.scan`, without a loop around a single step and, unrolled, around any."""
    if length > 1 and not unroll:
        return jax.lax.scan(body, carry, xs, length=length, reverse=reverse)
    found = []
    for step in range(length)[:: -1 if reverse else 1]:
        carry, y = body(carry, jax.tree.map(partial(_pick, step), xs))
        found.append(y)
    return carry, jax.tree.map(lambda *a: jnp.stack(a), *found[:: -1 if reverse else 1])


def _pick(step: int, x: Any) -> Any:
    # A layer outside of any loop has a plain number for an index, so that its weights are sliced statically.
    picked = x[step]
    return picked.item() if isinstance(picked, np.generic) else picked


def by_layer(outputs: list[list[Tree]]) -> Tree:
    """Outputs of `walk`, stacked in layer order along a new first axis; runs whose output is None are left out."""
    pieces = []
    for segment in outputs:
        kept = [value for value in segment if value is not None]
        if kept:
            unit = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *kept)
            pieces.append(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), unit))
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *pieces) if pieces else None
