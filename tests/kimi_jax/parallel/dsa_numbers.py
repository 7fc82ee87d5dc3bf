"""Inputs of sparse attention for tests: exact scores with ties, and the result on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sparse_mla import dense_mla, dsa_mla
from tests.kimi_jax.parallel.context_mesh import TOKENS, WHOLE

PLACES, ROWS = 304, 4
HEADS, NOPE, SLOT, LATENT, VALUES = 2, 6, 3, 8, 5
INDEX_HEADS, INDEX_WIDTH = 3, 4
SCALE = (NOPE + SLOT) ** -0.5
LENGTHS = np.array([1, 39, 150, 300], np.int32)
QUERIES = ("index_q", "index_w", "q")
KEYS = ("index_k", "latent")
WEIGHTS = ("w_uk", "w_uv")


def numbers(seed: int, queries: int, rows: int = ROWS, places: int = PLACES) -> dict[str, np.ndarray]:
    """Index queries, keys and weights are small integers: scores are exact in any order of summation, and many tie."""
    rng = np.random.default_rng(seed)
    result = {
        "index_q": rng.integers(-2, 3, (rows, queries, INDEX_HEADS, INDEX_WIDTH)),
        "index_k": rng.integers(-2, 3, (rows, places, INDEX_WIDTH)),
        "index_w": rng.integers(-2, 4, (rows, queries, INDEX_HEADS)),
        "q": 2 * rng.standard_normal((rows, queries, HEADS, NOPE + SLOT)),
        "latent": rng.standard_normal((rows, places, LATENT + SLOT)),
        "w_uk": rng.standard_normal((HEADS, NOPE, LATENT)),
        "w_uv": rng.standard_normal((HEADS, VALUES, LATENT)),
    }
    return {name: x.astype(np.float32) for name, x in result.items()}


def broken_behind(x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """NaN where nobody looks."""
    used = np.arange(x.shape[1]) < lengths[:, None]
    return np.where(used.reshape(used.shape + (1,) * (x.ndim - 2)), x, np.float32(np.nan))


def positions_of(lengths: np.ndarray, tokens: int, start: int = 0) -> np.ndarray:
    steps = np.arange(tokens, dtype=np.int32)
    return np.where(steps < lengths[:, None], start + steps, -1).astype(np.int32)


def specs(queries: Any) -> tuple[dict[str, Any], Any]:
    by_name: dict[str, Any] = (
        dict.fromkeys(QUERIES, queries) | dict.fromkeys(KEYS, TOKENS) | dict.fromkeys(WEIGHTS, WHOLE)
    )
    return by_name, queries


def dense_arguments(x: dict[str, Any]) -> list[Any]:
    return [x[name] for name in ("q", "latent", *WEIGHTS)]


def alone(x: dict[str, Any], positions: Any, top_k: int | None, **options: Any) -> Any:
    x, positions = jax.tree.map(jnp.asarray, (x, positions))
    if top_k is None:
        return dense_mla(*dense_arguments(x), q_positions=positions, scale=SCALE, **options)
    return dsa_mla(**x, q_positions=positions, top_k=top_k, scale=SCALE, return_indices=True, **options)
