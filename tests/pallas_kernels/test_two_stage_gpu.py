"""Two stages on Hopper: bits and lists by warps in NumPy, kernels interpreted, or lowered without a GPU."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lightning_indexer import TwoStage, gpu, gpu_coarse, gpu_prefill, gpu_two_stage
from pallas_kernels.lightning_indexer.gpu_select import room_for
from pallas_kernels.mxfp8 import Mxfp8
from tests.pallas_kernels.numpy_warp import NumpyWarp
from tests.pallas_kernels.test_lightning_indexer_gpu import BF16, RNG, arrays, draw, interpreter

BEYOND = 2**31 - 1


def bits_of(wanted: np.ndarray) -> np.ndarray:
    """[..., S] truths as words, the lowest bit first."""
    padded = np.pad(wanted, [(0, 0)] * (wanted.ndim - 1) + [(0, -wanted.shape[-1] % 32)])
    packed = np.packbits(padded, axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view("<i4")


def test_a_warp_puts_together_what_eight_queries_want() -> None:
    rng = RNG(0)
    scores, limits = rng.standard_normal((16, 128)).astype(np.float32), rng.random(16).astype(np.float32) + 1.5
    scores[3, ::5] = np.nan
    scores[9, 31], scores[9, 127] = np.inf, np.inf
    warp = NumpyWarp()
    row, column = warp.lane // 4, 2 * (warp.lane % 4)
    dots = {
        (half, block, odd): scores[8 * half + row, 8 * block + column + odd]
        for half in range(2)
        for block in range(16)
        for odd in range(2)
    }
    got = gpu_coarse.wanted_word(warp, dots, [limits[row], limits[8 + row]])
    want = bits_of((scores > limits[:, None]).reshape(2, 8, 128).any(axis=1))
    np.testing.assert_array_equal(got[:8].reshape(2, 4), want)


@pytest.mark.parametrize(("keys", "part"), [(40000, 0.04), (3000, 1.0), (70, 0.5), (700, 0.0)])
def test_sixteen_warps_list_what_is_wanted(keys: int, part: float) -> None:
    wanted = np.less(RNG(1).random(keys), part)
    bits = bits_of(wanted)
    length = -(-int(wanted.sum()) // 256) * 256 + 256
    out, shared = np.full(length, -7, np.int32), np.zeros(gpu_coarse.WARPS, np.int32)
    meeting, failures = threading.Barrier(gpu_coarse.WARPS), []

    def one(number: int) -> None:
        try:
            warp = NumpyWarp(number, meeting.wait)
            gpu_coarse.write_list(warp, (bits, 0), (out, 0), (shared, 0), len(bits), length)
        except threading.BrokenBarrierError:
            pass
        except BaseException as failure:
            failures.append(failure)
            meeting.abort()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(gpu_coarse.WARPS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    places = np.flatnonzero(wanted)
    np.testing.assert_array_equal(out[: len(places)], places)
    end = -(-len(places) // 256) * 256
    assert np.all(out[len(places) : end] == BEYOND)
    assert np.all(out[end:] == -7)


@pytest.mark.parametrize("packed", [False, True])
def test_four_warps_copy_the_keys_of_a_list(packed: bool) -> None:
    rng, keys = RNG(11), 300
    wide = rng.integers(0, 2**15, (keys, 128), dtype=np.int16)
    narrow, scales = rng.integers(0, 256, (keys, 128)).astype(np.uint8), rng.integers(0, 99, keys).astype(np.int32)
    places = np.sort(rng.permutation(keys)[:128]).astype(np.int32)
    places[120:] = BEYOND
    tile, lines = np.full(128 * 64, -1, np.int32), np.full(128, -1, np.int32)
    sources = [(narrow.view("<i4").reshape(-1), 0), (scales, 0)] if packed else [(wide.view("<i4").reshape(-1), 0)]
    for number in range(4):
        gpu_prefill.copy_listed(NumpyWarp(number), sources, [(tile, 0), (lines, 0)], (places, 0), keys)
    chosen = np.minimum(places, keys - 1)
    if packed:
        np.testing.assert_array_equal(tile[: 128 * 32].view(np.uint8).reshape(128, 128), narrow[chosen])
        np.testing.assert_array_equal(lines, scales[chosen])
        return
    # 8 rows of two tiles of 64 channels: 16 bytes of row r that belong at place c are at c xor r.
    got = tile.view(np.int16).reshape(16, 2, 8, 8, 8)
    row = np.arange(8)
    plain = np.stack([got[:, :, r, row ^ r] for r in range(8)], axis=1).reshape(128, 128)
    np.testing.assert_array_equal(plain, wide[chosen])


@pytest.mark.parametrize("packed", [False, True])
def test_bits_interpreted(packed: bool) -> None:
    rng = RNG(2)
    vectors = rng.integers(-3, 4, (1, 256, 128)).astype(np.float32)
    keys = rng.integers(-2, 3, (1, 200, 128)).astype(np.float32)
    cuts = rng.integers(20, 60, (1, 256)).astype(np.float32)
    given = jnp.asarray(keys, BF16)
    got = gpu_coarse.wanted_bits(
        jnp.asarray(vectors, BF16),
        Mxfp8.quantize(given) if packed else given,
        jnp.asarray(cuts),
        jnp.full((1, 256), 199, jnp.int32),
        blocks=2,
        interpret=interpreter(),
    )
    above = np.einsum("btk,bsk->bts", vectors, keys) > cuts[..., None]
    np.testing.assert_array_equal(got[:, :, :7], bits_of(above.reshape(1, 32, 8, 200).any(axis=2)))


def test_lists_interpreted() -> None:
    wanted = RNG(3).random((3, 320)) < np.array([[0.1], [0.9], [0]])
    got = np.asarray(gpu_coarse.lists(jnp.asarray(bits_of(wanted)), 512, interpret=interpreter()))
    for row, mine in zip(got, wanted, strict=True):
        places = np.flatnonzero(mine)
        np.testing.assert_array_equal(row[: len(places)], places)
        assert np.all(row[len(places) :] == BEYOND)


def among(inputs: dict[str, np.ndarray], candidates: list[np.ndarray], top_k: int) -> np.ndarray:
    """[T, top_k] selections of one row's queries, eight of which share candidates."""
    q, k, w, positions = (inputs[name][0].astype(np.float64) for name in ("q", "k", "w", "q_positions"))
    found = []
    for query in range(len(q)):
        mine = candidates[query // 8]
        mine = mine[mine <= positions[query]]
        scores = w[query] @ np.maximum(q[query] @ k[mine].T, 0)
        best = np.sort(mine[np.argsort(-scores, kind="stable")[:top_k]])
        found.append(np.concatenate([best, np.full(top_k - len(best), -1)]))
    return np.stack(found)


@pytest.mark.parametrize("packed", [False, True])
def test_listed_keys_interpreted(packed: bool) -> None:
    # In the interpreter MXFP8 queries of several tiles take threads that it doesn't have.
    inputs = draw(1, 8, 190, seed=5)
    inputs["q_positions"] = np.minimum(inputs["q_positions"], 180)
    candidates = [np.sort(RNG(6).permutation(190)[:150])]
    given = arrays(inputs, packed)
    listed = np.full((1, 256), BEYOND, np.int32)
    listed[0, :150] = candidates[0]
    got = gpu_prefill.prefill(
        jnp.asarray(inputs["q"], BF16),
        given["k"],
        given["w"],
        given["q_positions"].astype(jnp.int32),
        room_for(16),
        blocks=1,
        listed=jnp.asarray(listed),
        listed_counts=jnp.array([150], jnp.int32),
        interpret=interpreter(),
    )
    np.testing.assert_array_equal(got[0], among(inputs, candidates, 16))


SETTINGS = TwoStage(1, 0.05, "linear")


def test_thresholds_keep_their_part_of_the_sample() -> None:
    rng = RNG(7)
    sample, places = rng.standard_normal((1, 512, 128)), np.arange(512, dtype=np.int32)[None] * 8
    vectors = rng.standard_normal((1, 40, 128))
    sample[0, 4], positions = np.nan, rng.integers(200, 4096, (1, 40)).astype(np.int32)
    positions[0, 0], positions[0, 1] = -1, 8
    given = jnp.asarray(vectors, BF16), jnp.asarray(sample, BF16)
    cuts = np.asarray(gpu_two_stage.thresholds(*given, jnp.asarray(places), jnp.asarray(positions), SETTINGS, 4))
    assert cuts[0, 0] == np.inf
    assert cuts[0, 1] == -np.inf
    numbers = [np.asarray(x, np.float64) for x in given]
    scores = np.einsum("btk,bsk->bts", *numbers)[0]
    for query in range(2, 40):
        seen = places[0] <= positions[0, query]
        part = max(0.05, gpu_two_stage.SPARE * 6 / (positions[0, query] + 1))
        wanted = int(np.ceil(np.float32(part) * np.float32(seen.sum())))
        kept = np.sum(scores[query, seen] > cuts[0, query])
        above = np.sum(scores[query, seen] > cuts[0, query] + 2.0**-7 * abs(cuts[0, query]) + 1e-6)
        assert above < wanted <= kept, query


def test_the_first_and_the_newest_keys_are_wanted_and_later_ones_are_not() -> None:
    positions = np.full((1, 24), -1, np.int32)
    positions[0, :8], positions[0, 8:12] = 500 + np.arange(8), (70, 75, 40, 41)
    wanted = RNG(8).random((3, 640)) < 0.1
    bits = bits_of(wanted)[None].copy()
    bits[:, 1, 3:] = -1  # never written: nobody sees them
    got, counts, enough = gpu_two_stage.settled(jnp.asarray(bits), jnp.asarray(positions), 630, 20)
    got = np.unpackbits(np.asarray(got).view(np.uint8), axis=-1, bitorder="little").astype(bool)[0]
    assert got[0, :32].all()
    assert got[0, 480 - 32 : 508].all()
    assert not got[0, 508:].any()
    np.testing.assert_array_equal(got[0, 32:448], wanted[0, 32:448])
    np.testing.assert_array_equal(got[1], np.arange(640) <= 75)
    assert not got[2].any()
    np.testing.assert_array_equal(counts[0], got.sum(-1))
    assert bool(enough)
    few = gpu_two_stage.settled(jnp.zeros_like(jnp.asarray(bits)), jnp.asarray(positions), 630, 400)[2]
    assert not bool(few)


def test_stages_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels replaced by their definitions: 300 queries in two chunks, the first of which sees too few keys."""
    keys, queries, top_k = 3000, 300, 16
    inputs = draw(1, queries, keys, seed=9)
    inputs["q_positions"] = np.sort(RNG(10).integers(-1, keys, (1, queries)))
    inputs["q_positions"][0, 200:] = np.arange(keys - 100, keys)
    seen: dict[str, Any] = {"exact": 0, "listed": 0}

    def bits(vectors: Any, k: Any, cuts: Any, limits: Any, **_: Any) -> Any:
        above = jnp.einsum("btk,bsk->bts", vectors.astype(jnp.float32), k.astype(jnp.float32)) > cuts[..., None]
        above = above.reshape(1, -1, 8, keys).any(axis=2)
        above = jnp.pad(above, ((0, 0), (0, 0), (0, -keys % 128))).reshape(1, above.shape[1], -1, 32)
        words = jnp.sum(jnp.where(above, jnp.left_shift(jnp.uint32(1), jnp.arange(32, dtype=jnp.uint32)), 0), axis=-1)
        return jax.lax.bitcast_convert_type(words.astype(jnp.uint32), jnp.int32)

    def lists(bits: Any, length: int, **_: Any) -> Any:
        there = (jnp.right_shift(bits[..., None], jnp.arange(32)) & 1).reshape(bits.shape[0], -1)
        places = jnp.where(there != 0, jnp.arange(there.shape[1], dtype=jnp.int32), BEYOND)
        return jnp.pad(jnp.sort(places), ((0, 0), (0, max(0, length - places.shape[1]))))[:, :length]

    def prefill(q: Any, k: Any, w: Any, limits: Any, room: Any, **more: Any) -> Any:
        listed = more.get("listed")
        seen["exact" if listed is None else "listed"] += 1
        dots = jnp.einsum("thk,sk->ths", q[0].astype(jnp.float32), k[0].astype(jnp.float32))
        scores = jnp.einsum("th,ths->ts", w[0], jnp.maximum(dots, 0))
        allowed = jnp.arange(keys) <= limits[0][:, None]
        if listed is not None:
            counts = more["listed_counts"]
            known = jnp.where(jnp.arange(listed.shape[1]) < counts[:, None], listed, keys)
            mine = jnp.zeros((listed.shape[0], keys + 1), bool)
            mine = mine.at[jnp.arange(listed.shape[0])[:, None], jnp.minimum(known, keys)].set(True)[:, :keys]
            allowed &= jnp.repeat(mine, 8, axis=0)
        best, places = jax.lax.top_k(jnp.where(allowed, scores, -jnp.inf), room.top_k)
        places = jnp.sort(jnp.where(best > -jnp.inf, places, BEYOND))
        return jnp.where(places == BEYOND, -1, places)[None]

    monkeypatch.setattr(gpu_two_stage, "CHUNK", 256)
    monkeypatch.setattr(gpu_two_stage, "wanted_bits", bits)
    monkeypatch.setattr(gpu_two_stage, "lists", lists)
    monkeypatch.setattr(gpu_two_stage, "prefill", prefill)

    @jax.jit
    def run(given: dict[str, Any]) -> Any:
        return gpu.lightning_indexer(**given, top_k=top_k, two_stage=SETTINGS)

    # Positive products alone: the linear form is the score, up to its rounding to bfloat16.
    inputs["q"], inputs["k"] = np.abs(inputs["q"]), np.abs(inputs["k"])
    got = np.asarray(run(arrays(inputs, packed=False)))[0]
    assert seen["exact"]
    assert seen["listed"]
    want = among(inputs, [np.arange(keys)] * (queries // 8 + 1), top_k)
    short = inputs["q_positions"][0] < gpu_two_stage.SPARE * SETTINGS.fewest(top_k)
    np.testing.assert_array_equal(got[short], want[short])
    np.testing.assert_array_equal((got >= 0).sum(-1), (want >= 0).sum(-1))
    pairs = zip(got, want, strict=True)
    same = np.array([len(np.intersect1d(a[a >= 0], b[b >= 0])) / max(1, (b >= 0).sum()) for a, b in pairs])
    assert same[inputs["q_positions"][0] >= 0].mean() > 0.99
    assert np.all(got.max(axis=-1) <= inputs["q_positions"][0])


@pytest.mark.parametrize("packed", [False, True])
def test_it_lowers_for_a_gpu_that_is_not_here(packed: bool) -> None:
    def shaped(*shape: int) -> Any:
        if not packed:
            return jax.ShapeDtypeStruct(shape, BF16)
        scale = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // 32), jnp.uint8)
        return Mxfp8(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), scale)

    def run(q: Any, k: Any, w: Any, positions: Any) -> jax.Array:
        assert gpu.unfit_stages(q, TwoStage()) is None
        return gpu.lightning_indexer(q, k, w, top_k=2048, q_positions=positions, two_stage=TwoStage())

    given = shaped(1, 1024, 32, 128), shaped(1, 262144, 128)
    numbers = jax.ShapeDtypeStruct((1, 1024, 32), jnp.float32), jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    lowered = jax.jit(run).trace(*given, *numbers).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_what_it_cannot_do_is_said() -> None:
    q = jnp.zeros((1, 24, 32, 128), BF16)
    assert "blocks of 8 by their 'mean'" in str(gpu.unfit_stages(q, TwoStage(8, 0.5, "mean")))
    assert "there are 3 queries a row" in str(gpu.unfit_stages(q[:, :3], TwoStage()))
    keys = jnp.zeros((1, 64, 128), BF16)
    assert "with MXFP8 keys only" in str(gpu.unproved(keys, TwoStage()))
    assert gpu.unproved(Mxfp8.quantize(keys), TwoStage()) is None
    long = jax.eval_shape(Mxfp8.quantize, jax.ShapeDtypeStruct((1, 2**21, 128), BF16))
    assert "rows of 2097152 keys haven't run on a card yet" in str(gpu.unproved(long, TwoStage()))
    assert gpu.unfit_stages(q, TwoStage()) is None
