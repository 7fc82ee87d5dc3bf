"""Functions of whole arrays from functions that run on each device of a mesh with one axis, "context"."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

AXIS = "context"
SIZES = (1, 2, 4, 8)
WHOLE = PartitionSpec()
TOKENS = PartitionSpec(None, AXIS)


def over_context(fn: Callable[..., Any], size: int, in_specs: Any, out_specs: Any) -> Any:
    """`fn` on `size` devices, compiled once for each set of shapes."""
    mesh = Mesh(np.array(jax.devices()[:size]), (AXIS,), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def collectives(compiled: Any) -> list[tuple[str, int]]:
    """(operation, bytes of its result on one device) of every collective in a compiled program."""
    found = []
    pattern = r"= (\(?)([^=\n]*?)\)? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    for _, shapes, operation in re.findall(pattern, compiled.as_text()):
        total = 0
        for dtype, dims in re.findall(r"([a-z]+\d+)\[([\d,]*)\]", shapes):
            bits = int(re.findall(r"\d+", dtype)[0])
            total += bits // 8 * int(np.prod([int(n) for n in dims.split(",") if n]))
        found.append((operation, total))
    return found


def assert_close(actual: Any, expected: Any, tolerance: float, name: str = "") -> None:
    """Largest difference, relative to the largest entry."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, name
    error = np.max(np.abs(actual - expected)) / max(np.max(np.abs(expected)), 1e-30)
    assert error <= tolerance, f"{name}: {error:.1e}"


def trace(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """On two devices that hold the same."""
    run = over_context(lambda arguments: function(**arguments, axis=AXIS), 2, WHOLE, WHOLE)
    jax.eval_shape(run, arguments)
