"""Two stages on TPUs: the first in the exact kernel, interpreted and watched for races, or compiled for absent TPUs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from kimi_jax.planning import topology_devices
from pallas_kernels.lightning_indexer import TwoStage, lightning_indexer, tpu_two_stage
from pallas_kernels.lightning_indexer.specs import MILLION, IndexerSpec
from pallas_kernels.mxfp8 import Mxfp8

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x2", "v6e:2x2", "tpu7x:2x2x1")
RNG = np.random.default_rng
STAGES = TwoStage(1, 0.1, "linear")
B, T, S, H, K, TOP_K = 2, 9, 300, 4, 32, 8


def run(q: Any, k: Any, w: Any, q_positions: np.ndarray, *segments: np.ndarray) -> np.ndarray:
    """What the interpreted kernel and the second stage select, without a race."""
    names = ("segment_ids", "key_segment_ids")
    given = {name: jnp.asarray(ids) for name, ids in zip(names, segments, strict=False)}
    select = partial(tpu_two_stage.lightning_indexer, top_k=TOP_K, two_stage=STAGES, interpret=INTERPRET)
    found = np.asarray(jax.jit(select)(q, k, w, q_positions=jnp.asarray(q_positions), **given))
    assert interpreter.races is not None
    assert not interpreter.races.races_found
    return found


def best(scores: np.ndarray, allowed: np.ndarray, count: int) -> np.ndarray:
    """Positions [T, count] of the best allowed keys of each query, ascending, ties to the lowest; -1 at the end."""
    found = np.full((len(scores), count), -1)
    for query, (mine, may) in enumerate(zip(scores, allowed, strict=True)):
        places = np.flatnonzero(may)
        chosen = np.sort(places[np.argsort(-mine[places], kind="stable")[:count]])
        found[query, : len(chosen)] = chosen
    return found


def vectors(seed: int, *, positive: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Integers: products are exact in any format. If they are positive, the linear form is the score."""
    low, rng = (1 if positive else -2), RNG(seed)
    q, k = (rng.integers(low, 3, shape).astype(np.float32) for shape in ((B, T, H, K), (B, S, K)))
    positions = rng.integers(0, S, (B, T)).astype(np.int32)
    positions[0, :3], positions[1, -2:] = (0, 3, S - 1), -1
    return q, k, rng.integers(-3, 4, (B, T, H)).astype(np.float32), positions


@pytest.mark.parametrize("kind", ["float32", "mxfp8", "segments"])
def test_where_the_linear_form_is_the_score_the_selection_is_exact(kind: str) -> None:
    q, k, w, positions = vectors(0, positive=True)
    ids = RNG(1).integers(-1, 2, (B, S)).astype(np.int32)
    ids.sort(axis=1)
    query_ids = np.where(positions < 0, -1, np.take_along_axis(ids, np.maximum(positions, 0), axis=1)).astype(np.int32)
    allowed = np.arange(S) <= positions[..., None]
    segments = ()
    if kind == "segments":
        segments = query_ids, ids
        allowed &= (ids[:, None, :] == query_ids[..., None]) & (ids[:, None, :] >= 0)
    packed = [Mxfp8.quantize(jnp.asarray(x)) if kind == "mxfp8" else jnp.asarray(x) for x in (q, k)]
    found = run(*packed, jnp.asarray(w), positions, *segments)
    scores = np.einsum("bth,bths->bts", w, np.einsum("bthk,bsk->bths", q, k))
    for row in range(B):
        np.testing.assert_array_equal(found[row], best(scores[row], allowed[row], TOP_K))


def test_it_selects_the_best_of_what_the_linear_form_keeps_and_of_both_ends() -> None:
    rng = RNG(2)
    _, _, _, positions = vectors(2, positive=False)
    q, k, w = (rng.standard_normal(shape) for shape in ((B, T, H, K), (B, S, K), (B, T, H)))
    found = run(*(jnp.asarray(x, jnp.float32) for x in (q, k, w)), positions)
    kept = STAGES.most(S, TOP_K)
    for row in range(B):
        end = max(positions[row].max(), 0) + 1
        sample = np.arange(256) * (end // 256) + np.arange(256) * (end % 256) // 256
        dots = np.einsum("thk,sk->ths", q[row], k[row])
        allowed = np.arange(S) <= positions[row][:, None]
        seen = allowed[:, sample]
        slopes = ((dots[:, :, sample] > 0) & seen[:, None]).sum(-1) / np.maximum(seen.sum(-1), 1)[:, None]
        linear = np.einsum("th,ths->ts", w[row] * slopes, dots)
        candidates = np.zeros_like(allowed)
        for query, places in enumerate(best(linear, allowed, kept)):
            candidates[query, places[places >= 0]] = True
            candidates[query, [0, positions[row, query]]] = positions[row, query] >= 0
        scores = np.einsum("th,ths->ts", w[row], np.maximum(dots, 0))
        np.testing.assert_array_equal(found[row], best(scores, candidates, TOP_K))


def test_the_ends_are_added_once() -> None:
    found = jnp.array([[[0, 4, 7, -1], [1, 2, 5, 6], [-1, -1, -1, -1]]])
    ends = tpu_two_stage.with_ends(found, jnp.array([[7, 9, -1]]), jnp.array([[0, 0, 0]]), 10)
    np.testing.assert_array_equal(ends, [[[10, 0, 4, 7, 10, 10], [0, 1, 2, 5, 6, 9], [10] * 6]])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_million_keys_take_less_than_64_mib(topology: str) -> None:
    sharding = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])
    spec: IndexerSpec = MILLION[0]
    given = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in spec.arguments().items()}
    select = partial(lightning_indexer, top_k=spec.top_k, two_stage=TwoStage(), implementation="tpu")
    memory = jax.jit(select).lower(**given).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 64 * 2**20


def test_what_keeps_too_many_keys_is_said() -> None:
    assert "keeps at most 32768" in str(
        tpu_two_stage.unfit(jax.ShapeDtypeStruct((1, 2**20, 128), "bfloat16"), TwoStage(1, 0.9), 64)
    )
    assert tpu_two_stage.unfit(jax.ShapeDtypeStruct((1, 2**20, 128), "bfloat16"), TwoStage(), 2048) is None
