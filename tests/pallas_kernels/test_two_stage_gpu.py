"""Two stages on Hopper: bits and lists by warps in NumPy, kernels interpreted, or lowered without a GPU."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lightning_indexer import TwoStage, gpu, gpu_coarse, gpu_gathered, gpu_listed, gpu_two_stage
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


def masked(bits: np.ndarray, first: int, last: int) -> np.ndarray:
    """Positions that 8 queries look at."""
    places = np.arange(32 * len(bits))
    wanted = np.unpackbits(bits.view(np.uint8), bitorder="little").astype(bool)
    forced = (places < 32) | (places // 32 >= first // 32 - 1)
    return places[(wanted | forced) & (places <= last)]


@pytest.mark.parametrize(
    ("keys", "part", "first", "last"),
    [(9000, 0.08, 8990, 8997), (4200, 1.0, 0, 4100), (70, 0.5, 40, 69), (700, 0.0, 650, 699)],
)
def test_four_warps_make_positions_of_bits(keys: int, part: float, first: int, last: int) -> None:
    words = gpu_listed.words_of(keys)
    wanted = np.less(RNG(1).random(32 * words), part)
    wanted[keys:] = True  # whatever is there
    bits = bits_of(wanted)
    ring, found, start = np.full(gpu_listed.LISTED * 128, -7, np.int32), [], 100
    warps = [NumpyWarp(number) for number in range(4)]
    edges = np.full(32, first, np.int32), np.full(32, last, np.int32)
    for word in range(0, last // 32 + 1, gpu_listed.WORDS):
        rank = 0
        while True:
            args = (word, rank, start)
            numbers = [np.full(32, number, np.int32) for number in args]
            totals = {
                int(gpu_listed.add_positions(warp, (bits, word), (ring, 0), edges, *numbers)[0]) for warp in warps
            }
            [total] = totals
            added = min(total - rank, gpu_listed.ROUND)
            found += [ring[(start + i) % len(ring)] for i in range(added)]
            start += added
            if total - rank <= gpu_listed.ROUND:
                break
            rank += gpu_listed.ROUND
    np.testing.assert_array_equal(found, masked(bits, first, last))


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
        gpu_gathered.copy_listed(NumpyWarp(number), sources, [(tile, 0), (lines, 0)], (places, 0), keys)
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


@pytest.mark.parametrize(("packed", "kept"), [(False, None), (True, None), (True, 2)])
def test_bits_interpreted(packed: bool, kept: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_coarse, "ROUNDS", 1)
    rng = RNG(2)
    rows, queries = (1, 256) if kept is None else (2, 64)
    vectors = rng.integers(-3, 4, (rows, queries, 128)).astype(np.float32)
    keys = rng.integers(-2, 3, (3, 200, 128)).astype(np.float32)
    cuts = rng.integers(20, 60, (rows, queries)).astype(np.float32)
    given = jnp.asarray(keys, BF16)
    got = gpu_coarse.wanted_bits(
        jnp.asarray(vectors, BF16),
        Mxfp8.quantize(given) if packed else given,
        jnp.asarray(cuts),
        jnp.full((rows, queries), 199, jnp.int32),
        jnp.int32(1),
        kept=kept,
        blocks=1,
        interpret=interpreter(),
    )
    above = np.einsum("btk,bsk->bts", vectors, keys[1 : 1 + rows]) > cuts[..., None]
    lines = 32 if kept is None else kept
    want = bits_of(above.reshape(rows, -1, 8, 200).any(axis=2))[:, :lines]
    assert got.shape == (rows * lines, 128)
    np.testing.assert_array_equal(got.reshape(rows, lines, 128)[..., :7], want)


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
    """The second of two rows: all keys, or some from two runs of words."""
    # In the interpreter MXFP8 queries of several tiles take threads that it doesn't have.
    inputs = draw(2, 8, 4500, seed=5)
    limits = (300 if packed else 4450) + np.arange(8)
    bits = bits_of(RNG(6).random((1, 8192)) < 0.02)
    edges = np.array([0 if packed else limits.min(), limits.max()])
    candidates = masked(bits[0], *edges)
    given, mine = arrays(inputs, packed), slice(1, 2)
    got = gpu_listed.listed(
        jnp.asarray(inputs["q"][mine], BF16),
        given["k"],
        given["w"][mine],
        jnp.asarray(limits[None], jnp.int32),
        jnp.asarray(bits),
        jnp.array([len(candidates)], jnp.int32),
        jnp.asarray(edges[None], jnp.int32),
        jnp.int32(1),
        room_for(16),
        blocks=1,
        interpret=interpreter(),
    )
    chosen = {name: x[mine] for name, x in inputs.items()} | {"q_positions": limits[None]}
    np.testing.assert_array_equal(got[0], among(chosen, [candidates], 16))


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
    positions = np.full(24, -1, np.int32)
    positions[:8], positions[8:12] = 500 + np.arange(8), (70, 75, 40, 41)
    wanted = RNG(8).random((3, 640)) < 0.1
    bits = bits_of(wanted)
    bits[1, 3:] = -1  # never written: nobody sees them
    counts, edges = gpu_two_stage.settled(jnp.asarray(bits), jnp.asarray(positions), 630, 20)
    np.testing.assert_array_equal(edges, [[500, 507], [40, 75], [630, -1]])
    got = [masked(*given) for given in zip(bits, *np.asarray(edges).T, strict=True)]
    np.testing.assert_array_equal(counts, [len(mine) for mine in got])
    assert np.isin([*range(32), *range(480 - 32, 508)], got[0]).all()
    inside = got[0][(got[0] >= 32) & (got[0] < 448)]
    np.testing.assert_array_equal(inside, 32 + np.flatnonzero(wanted[0, 32:448]))
    np.testing.assert_array_equal(got[1], np.arange(76))
    # Too few for the first query of the first tile: it gets all keys, the others as many as before.
    counts, edges = gpu_two_stage.settled(jnp.zeros_like(jnp.asarray(bits)), jnp.asarray(positions), 630, 400)
    np.testing.assert_array_equal(counts, [508, 76, 0])
    np.testing.assert_array_equal(edges, [[0, 507], [40, 75], [630, -1]])


@pytest.mark.parametrize(("batch", "queries"), [(1, 300), (3, 5)])
def test_stages_together(batch: int, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels replaced by their definitions, several pieces: 256 queries, or two rows."""
    keys, top_k = 3000, 16
    inputs = draw(batch, queries, keys, seed=9)
    inputs["q_positions"] = np.sort(RNG(10).integers(-1, keys, (batch, queries)))
    inputs["q_positions"][:, queries // 2 :] = np.arange(keys - 200, keys)[-(queries - queries // 2) :]
    calls: list[tuple[int, ...]] = []

    def bits(vectors: Any, k: Any, cuts: Any, limits: Any, row: Any, *, kept: int | None, **_: Any) -> Any:
        k = jax.lax.dynamic_slice_in_dim(k, row, vectors.shape[0])
        above = jnp.einsum("btk,bsk->bts", vectors.astype(jnp.float32), k.astype(jnp.float32)) > cuts[..., None]
        above = above.reshape(len(vectors), -1, 8, keys).any(axis=2)[:, :kept]
        words = gpu_listed.words_of(keys)
        above = jnp.pad(above, ((0, 0), (0, 0), (0, 32 * words - keys))).reshape(-1, words, 32)
        words = jnp.sum(jnp.where(above, jnp.left_shift(jnp.uint32(1), jnp.arange(32, dtype=jnp.uint32)), 0), axis=-1)
        return jax.lax.bitcast_convert_type(words.astype(jnp.uint32), jnp.int32)

    def listed(
        q: Any, k: Any, w: Any, limits: Any, bits: Any, counts: Any, edges: Any, row: Any, room: Any, **_: Any
    ) -> Any:
        calls.append(q.shape)
        k = jax.lax.dynamic_slice_in_dim(k, row, q.shape[0]).astype(jnp.float32)
        dots = jnp.einsum("bthk,bsk->bths", q.astype(jnp.float32), k)
        scores = jnp.einsum("bth,bths->bts", w, jnp.maximum(dots, 0))
        places = jnp.arange(32 * bits.shape[1])
        there = (jnp.right_shift(bits[..., None], jnp.arange(32)) & 1).reshape(len(bits), -1) != 0
        there |= (places < 32) | (places // 32 >= edges[:, :1] // 32 - 1)
        there &= places <= edges[:, 1:]
        allowed = jnp.repeat(there, 8, axis=0).reshape(*q.shape[:2], -1)[..., :keys]
        allowed &= jnp.arange(keys) <= limits[..., None]
        best, places = jax.lax.top_k(jnp.where(allowed, scores, -jnp.inf), room.top_k)
        places = jnp.sort(jnp.where(best > -jnp.inf, places, BEYOND))
        return jnp.where(places == BEYOND, -1, places)

    monkeypatch.setattr(gpu, "FEWEST_STAGED_KEYS", 1)
    monkeypatch.setattr(gpu, "FEWEST_STAGED_TILES", 1)
    monkeypatch.setattr(gpu_two_stage, "CHUNK", 256)
    monkeypatch.setattr(gpu_two_stage, "ROWS_BYTES", 2 * (4 * gpu_listed.words_of(keys) + 2**17))
    monkeypatch.setattr(gpu_two_stage, "wanted_bits", bits)
    monkeypatch.setattr(gpu_two_stage, "listed", listed)

    @jax.jit
    def run(given: dict[str, Any]) -> Any:
        return gpu.lightning_indexer(**given, top_k=top_k, two_stage=SETTINGS)

    # Positive products alone: the linear form is the score, up to its rounding to bfloat16.
    inputs["q"], inputs["k"] = np.abs(inputs["q"]), np.abs(inputs["k"])
    got = np.asarray(run(arrays(inputs, packed=False)))
    assert calls == [(1, 256, 32, 128) if batch == 1 else (2, 8, 32, 128)]
    for row in range(batch):
        mine = {name: x[row : row + 1] for name, x in inputs.items()}
        limits = mine["q_positions"][0]
        want = among(mine, [np.arange(keys)] * (queries // 8 + 1), top_k)
        short = limits < gpu_two_stage.SPARE * SETTINGS.fewest(top_k)
        np.testing.assert_array_equal(got[row][short], want[short])
        np.testing.assert_array_equal((got[row] >= 0).sum(-1), (want >= 0).sum(-1))
        pairs = zip(got[row], want, strict=True)
        same = np.array([len(np.intersect1d(a[a >= 0], b[b >= 0])) / max(1, (b >= 0).sum()) for a, b in pairs])
        assert same[limits >= 0].mean() > 0.99
        assert np.all(got[row].max(axis=-1) <= limits)


MIB = 2**20
BYTES = {"i8": 1, "ui8": 1, "f8E4M3FN": 1, "i1": 1, "bf16": 2, "i16": 2, "i32": 4, "ui32": 4, "f32": 4}


def sizes(types: str) -> list[int]:
    """Bytes of every tensor type in a text."""
    found = re.findall(r"tensor<((?:[0-9]+x)*)([a-zA-Z0-9]+)>", types)
    return [math.prod(map(int, shape.split("x")[:-1])) * BYTES[kind] for shape, kind in found if kind in BYTES]


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "packed"),
    [
        (1, 4096, 2**20, True),
        (1, 4096, 2**20, False),
        (2, 131000, 2**20, True),
        (1, 4096, 2**23, True),
        (256, 16, 2**20, True),
        (256, 5, 2**18, True),
    ],
)
def test_it_lowers_for_a_gpu_that_is_not_here_and_takes_less_than_64_mib(
    batch: int, queries: int, keys: int, packed: bool
) -> None:
    def shaped(*shape: int) -> Any:
        if not packed:
            return jax.ShapeDtypeStruct(shape, BF16)
        scale = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // 32), jnp.uint8)
        return Mxfp8(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), scale)

    def run(q: Any, k: Any, w: Any, positions: Any) -> jax.Array:
        assert gpu.unfit_stages(TwoStage()) is None
        assert gpu.single_stage(q, k, TwoStage()) is None
        return gpu.lightning_indexer(q, k, w, top_k=2048, q_positions=positions, two_stage=TwoStage())

    given = shaped(batch, queries, 32, 128), shaped(batch, keys, 128)
    numbers = jax.ShapeDtypeStruct((batch, queries, 32), jnp.float32), jax.ShapeDtypeStruct((batch, queries), jnp.int32)
    text = jax.jit(run).trace(*given, *numbers).lower(lowering_platforms=("cuda",)).as_text()
    lines = [line for line in text.splitlines() if "mosaic_gpu" in line and "custom_call" in line]
    bits, selected = (sizes(line.rsplit("->", 1)[1]) for line in lines)
    piece = gpu_two_stage.piece_of(batch, queries, keys)
    pieces = piece.rows * piece.queries
    assert bits == [pieces * gpu_listed.words_of(keys) // 2]
    assert selected[0] == 4 * pieces * 2048
    # Bits, candidates, and two pieces of queries and of what they select: all that is there at a time, besides smaller things.
    assert sum(bits) + sum(selected) + pieces * 2**13 <= 62 * MIB
    # Nothing else is larger than half of it, but what comes and what is returned, in whatever shape.
    whole = {size for tree in (given, numbers) for x in jax.tree.leaves(tree) for size in [x.size * x.dtype.itemsize]}
    whole.add(4 * batch * queries * 2048)
    assert max(size for size in sizes(text) if size not in whole) <= 33 * MIB


def test_what_it_cannot_do_is_said() -> None:
    q = jnp.zeros((1, 24, 32, 128), BF16)
    assert "blocks of 8 by their 'mean'" in str(gpu.unfit_stages(TwoStage(8, 0.5, "mean")))
    long = jax.eval_shape(Mxfp8.quantize, jax.ShapeDtypeStruct((1, 2**21, 128), BF16))
    keys = jnp.zeros((1, 64, 128), BF16)
    assert gpu.single_stage(q[:, :5], long, None) is None
    short = Mxfp8.quantize(keys)
    cases = [(1, 24, short, False), (12, 5, long, False), (6, 9, long, False), (11, 5, long, True), (12, 4, long, True)]
    for batch, queries, k, said in [*cases, (64, 16, short, True)]:
        some = jnp.zeros((batch, queries, 32, 128), BF16)
        assert ("all keys are scored" in str(gpu.single_stage(some, k, TwoStage()))) == said
    assert "rows of 2097152 keys haven't run on a card yet" in str(gpu.unproved(q, long, 16, TwoStage()))
    assert gpu.unfit_stages(TwoStage()) is None


def test_rows_beyond_two_billion_integers_have_a_place() -> None:
    """The last of 72 rows of a million MXFP8 keys begins after 71 * 2^25 integers."""
    warp = NumpyWarp(0)
    _, start = warp.row((np.zeros(0, np.int32), 0), warp.integer(71), 2**25)
    np.testing.assert_array_equal(start, 71 * 2**25)
