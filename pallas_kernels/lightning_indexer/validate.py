"""Checks of shapes and dtypes shared by the indexer and the attention operations, made before anything is computed."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.mxfp8 import Mxfp8


def check_shape(
    operation: str, name: str, array: jax.Array | Mxfp8 | Fp8Latent, dims: str, sizes: Sequence[int | None]
) -> None:
    """Raises ValueError unless `array` has these sizes (None: any size of at least 1)."""
    legal = "[" + ", ".join("any" if size is None else str(size) for size in sizes) + "]"
    matches = array.ndim == len(sizes) and all(
        have >= 1 if want is None else have == want for have, want in zip(array.shape, sizes, strict=False)
    )
    if not matches:
        raise ValueError(f"{operation}: {name} has shape {list(array.shape)}; it must be {dims} = {legal}.")


def check_floating(operation: str, **arrays: jax.Array) -> None:
    """Raises TypeError unless every array holds floating point numbers."""
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{operation}: {name} has dtype {array.dtype}; it must be a floating point type.")


def check_integers(operation: str, **arrays: jax.Array) -> None:
    """Raises TypeError unless every array holds integers."""
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{operation}: {name} has dtype {array.dtype}; it must be an integer type.")


def check_at_least(operation: str, minimum: int, **values: int) -> None:
    """Raises ValueError unless every value is an integer of at least `minimum`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"{operation}: {name}={value!r}; it must be an integer of at least {minimum}.")


def check_scale(operation: str, scale: float) -> None:
    """Raises ValueError unless `scale` is a positive finite number."""
    if not 0 < scale < float("inf"):
        raise ValueError(f"{operation}: scale={scale!r}; it must be a positive finite number.")


def check_visibility(
    operation: str,
    q_positions: jax.Array,
    segment_ids: jax.Array | None,
    batch: int,
    queries: int,
    keys: int,
    key_segment_ids: jax.Array | None = None,
) -> None:
    """Raises unless the arguments of the visibility rule fit `batch`, `queries` and `keys`."""
    check_shape(operation, "q_positions", q_positions, "[B, T]", (batch, queries))
    check_integers(operation, q_positions=q_positions)
    if key_segment_ids is not None:
        if segment_ids is None:
            raise ValueError(f"{operation}: key_segment_ids were given without segment_ids, the ids of the queries.")
        check_shape(operation, "key_segment_ids", key_segment_ids, "[B, S]", (batch, keys))
        check_integers(operation, key_segment_ids=key_segment_ids)
    if segment_ids is None:
        return
    if key_segment_ids is None and queries != keys:
        raise ValueError(
            f"{operation}: segment_ids were given with {queries} queries and {keys} keys; packed sequences need as "
            "many queries as keys, because one id names both, or key_segment_ids."
        )
    check_shape(operation, "segment_ids", segment_ids, "[B, T]", (batch, queries))
    check_integers(operation, segment_ids=segment_ids)


def check_indexer(
    operation: str,
    q: jax.Array | Mxfp8,
    k: jax.Array | Mxfp8 | None,
    w: jax.Array,
    names: tuple[str, str, str] = ("q", "k", "w"),
) -> None:
    """Raises unless the indexer's queries, keys (None: pages, which `paged_keys` checks) and head weights fit together."""
    check_shape(operation, names[0], q, "[B, T, H, K]", (None, None, None, None))
    if k is not None:
        check_shape(operation, names[1], k, "[B, S, K]", (q.shape[0], None, q.shape[3]))
    check_shape(operation, names[2], w, "[B, T, H]", q.shape[:3])
    for name, array in zip(names, (q, k, w), strict=True):
        if isinstance(array, Mxfp8):
            array.check(f"{operation}: {name}")
        elif array is not None:
            check_floating(operation, **{name: array})
    if jnp.finfo(w.dtype).bits < 32:
        raise TypeError(
            f"{operation}: {names[2]} has dtype {w.dtype}; it must be float32 or float64, because rounded head weights "
            "make scores tie."
        )
