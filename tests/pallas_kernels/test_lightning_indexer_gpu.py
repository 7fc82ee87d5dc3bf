"""The Hopper kernels of the indexer: selection by warps in NumPy, whole kernels interpreted, or lowered without a GPU."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedImplementationError, noted_choices
from pallas_kernels.lightning_indexer import gpu, gpu_decode, gpu_rows, lightning_indexer
from pallas_kernels.lightning_indexer import gpu_select as selection
from pallas_kernels.lightning_indexer.gpu_unpack import order_inputs, unpack_plainly, widen_plainly
from pallas_kernels.lightning_indexer.specs import DECODE, PREFILL
from pallas_kernels.mxfp8 import Mxfp8
from tests import oracle_dsa as oracle
from tests.pallas_kernels.numpy_warp import NumpyWarp

BF16 = jnp.dtype("bfloat16")
LOWEST = float(np.finfo(np.float32).min)
RNG = np.random.default_rng

# Scores by name, of a number of keys.
SCORES: dict[str, Callable[[int], np.ndarray]] = {
    "normal": lambda n: RNG(0).standard_normal(n),
    "tied": lambda n: RNG(1).integers(-3, 4, n),
    "zeros of both signs": lambda n: np.where(RNG(2).random(n) < 0.5, 0.0, -0.0),
    "rising": lambda n: np.arange(n) - n / 2,
    "falling": lambda n: -np.arange(n),
    "nan among few": lambda n: np.where(RNG(3).random(n) < 0.3, np.nan, RNG(4).integers(-2, 2, n)),
    "extreme": lambda n: RNG(5).choice([np.inf, -np.inf, 0, -0.0, 3e38, LOWEST, 1e-45, -1e-45], n),
    "needles": lambda n: np.where(np.arange(n) % 997 == 5, 7.0, 0.0),
}
# Keys, last visible position, top_k.
ROWS = [(300, 299, 100), (200, -1, 16), (200, 0, 16), (200, 128, 2048), (3000, 2999, 1), (300000, 299000, 16)]


def interpreter() -> Any:
    """What Pallas takes to run a Mosaic GPU kernel on a CPU; private before jax 0.11."""
    public = getattr(plgpu, "InterpretGPUParams", None)
    if public is not None:
        return public()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def expected(scores: np.ndarray, limit: int, top_k: int) -> np.ndarray:
    seen = scores[: limit + 1].astype(np.float64)
    seen = np.where(np.isnan(seen) | (seen < LOWEST), LOWEST, seen) + 0.0
    best = np.sort(np.argsort(-seen, kind="stable")[:top_k])
    return np.concatenate([best, np.full(top_k - len(best), -1)])


def ordered(scores: np.ndarray) -> np.ndarray:
    """Integers in the order of float32 scores."""
    lines = np.pad(scores, (0, -len(scores) % 32)).reshape(-1, 32)
    return np.concatenate([selection.order(NumpyWarp(), line) for line in lines])[: len(scores)]


def select_by_warps(scores: np.ndarray, limits: list[int], top_k: int, together: int) -> np.ndarray:
    """What the four warps of a warpgroup select, one row of scores each, in any order within their step."""
    room, num_keys, rng = selection.room_for(top_k), scores.shape[1], RNG(9)
    warps = [NumpyWarp(number) for number in range(4)]
    states = np.full(4 * selection.STATE, 77, np.int32)
    candidates, out = np.full((4, 2 * room.size), -5, np.int32), np.full((4, top_k), -9, np.int32)
    own = [(states, number * selection.STATE) for number in range(4)]
    for number, warp in enumerate(warps):
        selection.begin(warp, own[number], warp.integer(limits[number]))
    step = selection.COLUMNS * together
    for first in range(0, max(limits) + 1, step):
        for number in rng.permutation(4):
            warp = warps[number]
            for start in range(first, first + step, selection.COLUMNS):
                orders, positions = {}, {}
                for tall in range(2):
                    for odd in range(2):
                        position = start + 64 * tall + 2 * warp.lane + odd
                        positions[tall, odd] = position.astype(np.int32)
                        value = selection.order(warp, scores[number, np.minimum(position, num_keys - 1)])
                        seen = position <= limits[number]
                        orders[tall, odd] = np.where(seen, value, selection.INVISIBLE).astype(np.int32)
                selection.append(warp, orders, positions, own[number], (candidates[number], 0), room)
            selection.make_room(warp, (states, 0), (candidates[number], 0), room, together)
    for number, warp in enumerate(warps):
        selection.finish(warp, own[number], (candidates[number], 0), (out[number], 0), room)
    return out


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(
    ("together", "limits", "top_k"),
    [(2, [8999, 4321, 2046, -1], 2048), (1, [2999, 36, 0, 129], 100), (2, [2500, 2999, 1, 15], 16)],
    ids=str,
)
def test_warps_keep_the_best_of_their_rows(name: str, together: int, limits: list[int], top_k: int) -> None:
    # Rows that end long before their neighbours do must not follow when those cut.
    num_keys = max(limits) + 1
    scores = np.stack([np.roll(SCORES[name](num_keys), 17 * row) for row in range(4)]).astype(np.float32)
    got = select_by_warps(scores, limits, top_k, together)
    want = [expected(row, limit, top_k) for row, limit in zip(scores, limits, strict=True)]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("name", "num_keys", "limit", "top_k"),
    [*((name, 9000, 8320, 2048) for name in SCORES), *(("tied", *row) for row in ROWS)],
    ids=str,
)
def test_sixteen_warps_keep_the_best_of_a_row(name: str, num_keys: int, limit: int, top_k: int) -> None:
    scores = SCORES[name](num_keys).astype(np.float32)
    room = gpu_rows.row_room(top_k)
    whole = -(-num_keys // 256) * 256
    order = ordered(scores)
    orders = np.full(whole, selection.INVISIBLE, np.int32)
    orders[: limit + 1] = order[: limit + 1]
    highest = orders.reshape(-1, gpu_rows.GROUP).max(axis=1)
    # What the scores of a row's last tile leave untouched may be anything.
    after = max(limit, 0) // 256 + 1
    orders[after * 256 :], highest[after * 16 :] = 0x7F000000, 0x7F000000
    candidates = np.full((gpu_rows.WARPS, 2 * room.size), -5, np.int32)
    out = np.full(top_k, -9, np.int32)
    states, shared = (np.full(4 * gpu_rows.WARPS, 77, np.int32) for _ in range(2))
    meeting, failures = threading.Barrier(gpu_rows.WARPS), []

    def one(number: int) -> None:
        warp = NumpyWarp(number, meeting.wait)
        places = (out, 0), (candidates[number], 0), (states, 0), (shared, 0)
        try:
            gpu_rows.select_row(warp, (orders, 0), (highest, 0), warp.integer(limit), *places, room, len(highest))
        except threading.BrokenBarrierError:
            pass
        except BaseException as failure:
            failures.append(failure)
            meeting.abort()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(gpu_rows.WARPS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    np.testing.assert_array_equal(out, expected(scores, limit, top_k))


def test_a_warp_that_runs_out_of_room_cuts_from_memory() -> None:
    warp, room = NumpyWarp(), selection.Room(100, 640, 8)
    scores = RNG(7).integers(0, 40, 640).astype(np.float32)
    for cut in (selection.cut, selection.cut_slowly):
        candidates = np.concatenate([ordered(scores), np.arange(640, dtype=np.int32)])
        state = np.array([selection.INVISIBLE, 600, 0, 0], np.int32)
        cut(warp, (state, 0), (candidates, 0), room, 0)
        assert state[selection.COUNT] == 100
        np.testing.assert_array_equal(candidates[640:740], expected(scores, 599, 100))


@pytest.mark.parametrize(("batch", "queries", "tile", "blocks"), [(1, 1, 256, 132), (70, 2, 128, 13), (5, 4, 64, 7)])
def test_blocks_share_all_tiles_that_are_seen(batch: int, queries: int, tile: int, blocks: int) -> None:
    limits = RNG(0).integers(-1, 5000, (batch, queries)).astype(np.int32)
    counts = np.maximum(limits.max(axis=1), 0) // tile + 1
    found = []
    for me in range(blocks):
        warp = NumpyWarp()
        share = gpu_decode.share_of(warp, (limits.reshape(-1), 0), warp.integer(me), batch, queries, tile, blocks)
        row, at, mine = (int(value[0]) for value in share)
        assert abs(mine - counts.sum() / blocks) < 1
        for _ in range(mine):
            found.append((row, at))
            row, at = (row, at + 1) if at + 1 < counts[row] else (row + 1, 0)
    assert found == [(row, at) for row in range(batch) for at in range(counts[row])]


def test_heads_are_summed_over_lanes() -> None:
    warp = NumpyWarp()
    dots, weights = RNG(0).standard_normal((32, 128)), RNG(1).standard_normal(32)
    dots, weights = dots.astype(np.float32), weights.astype(np.float32)
    totals = None
    for product in range(2):
        mine = {
            (half, block, odd): dots[16 * product + 8 * half + warp.lane // 4, 8 * block + 2 * (warp.lane % 4) + odd]
            for half in range(2)
            for block in range(16)
            for odd in range(2)
        }
        totals = selection.add_heads(
            warp, mine, [weights[16 * product + 8 * half + warp.lane // 4] for half in range(2)], totals
        )
    assert totals is not None
    got = np.zeros(128)
    for (tall, odd), score in selection.add_lanes(warp, totals).items():
        got[64 * tall + 2 * warp.lane + odd] = score
    np.testing.assert_allclose(got, weights @ np.maximum(dots, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [(1, 4), (60, 190), (133, 140)])
def test_every_element_byte_is_unpacked_exactly(scale: tuple[int, int]) -> None:
    bytes_ = np.arange(256, dtype=np.uint8)
    bytes_ = bytes_[bytes_ & 0x7F != 0x7F]
    elements = RNG(0).choice(bytes_, (64, 128))
    elements[:2, :127] = bytes_[:254].reshape(2, 127)
    scales = RNG(1).integers(*scale, (64, 4)).astype(np.uint8)
    keys = Mxfp8(jnp.asarray(elements).view(jnp.float8_e4m3fn), jnp.asarray(scales))
    want = np.asarray(keys.dequantize(jnp.bfloat16)).astype(np.float64)
    got = np.asarray(widen_plainly(jnp.asarray(elements), jnp.asarray(scales))).astype(np.float64)
    np.testing.assert_array_equal(got, want)
    ordered = np.asarray(unpack_plainly(jnp.asarray(elements), jnp.asarray(scales))).astype(np.float64)
    np.testing.assert_array_equal(ordered, np.asarray(order_inputs(jnp.asarray(want, jnp.float32))).astype(np.float64))


def draw(batch: int, queries: int, keys: int, seed: int) -> dict[str, np.ndarray]:
    """Small integers and quarters: every sum is exact in float32, and many scores tie."""
    rng = RNG(seed)
    return {
        "q": rng.integers(-2, 3, (batch, queries, 32, 128)).astype(np.float32),
        "k": rng.integers(-2, 3, (batch, keys, 128)).astype(np.float32),
        "w": (rng.integers(-4, 5, (batch, queries, 32)) / 4).astype(np.float32),
        "q_positions": rng.integers(-1, keys, (batch, queries)),
    }


def arrays(inputs: dict[str, np.ndarray], packed: bool) -> dict[str, Any]:
    kind = Mxfp8.quantize if packed else (lambda x: x.astype(BF16))
    return {name: kind(jnp.asarray(x)) if name in "qk" else jnp.asarray(x) for name, x in inputs.items()}


def chosen(inputs: dict[str, np.ndarray], top_k: int) -> np.ndarray:
    found = oracle.selections(inputs["q"], inputs["k"], inputs["w"], top_k, inputs["q_positions"])
    return oracle.padded(found, top_k)


@pytest.mark.parametrize(
    ("batch", "queries", "packed", "wide_bytes"),
    [(1, 17, False, None), (1, 8, True, 0), (3, 2, True, None)],
    ids=["many", "many, converted on the way", "few"],
)
def test_interpreted(
    monkeypatch: pytest.MonkeyPatch, batch: int, queries: int, packed: bool, wide_bytes: int | None
) -> None:
    # Part of a tile of queries, a key tile that nobody sees, one that is cut off, keys that hold NaN.
    if wide_bytes is not None:
        monkeypatch.setattr(gpu, "WIDE_BYTES", wide_bytes)
        monkeypatch.setattr(gpu, "FEW_QUERIES", 2)
    inputs = draw(batch, queries, 180, seed=queries)
    inputs["q_positions"] = np.minimum(inputs["q_positions"], 150)
    want = chosen(inputs, 16)
    given = arrays(inputs, packed)
    if packed:
        given["k"] = Mxfp8(given["k"].elements, given["k"].scale.at[:, 151:].set(255))
    else:
        given["k"] = given["k"].at[:, 151:].set(jnp.nan)
    got = gpu.lightning_indexer(**given, top_k=16, interpret=interpreter())
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("spec", [PREFILL[1], DECODE[1], DECODE[3]], ids=lambda spec: spec.name)
@pytest.mark.parametrize("packed", [False, True])
def test_it_lowers_for_a_gpu_that_is_not_here(spec: Any, packed: bool) -> None:
    arguments: dict[str, Any] = spec.arguments()
    if packed:
        for name in "qk":
            shape = arguments[name].shape
            arguments[name] = Mxfp8(
                jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn),
                jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // 32), jnp.uint8),
            )

    def run(arguments: dict[str, Any]) -> jax.Array:
        q, k, w = (arguments[name] for name in "qkw")
        assert gpu.unfit(q, k, w, spec.top_k, False) is None
        return gpu.lightning_indexer(**arguments, top_k=spec.top_k)

    lowered = jax.jit(run).trace(arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_mxfp8_selects_what_its_numbers_select(implementation: Any) -> None:
    inputs = draw(2, 5, 70, seed=3)
    inputs["q"], inputs["k"] = (RNG(4).standard_normal(inputs[name].shape) for name in "qk")
    given = arrays(inputs, packed=True)
    inputs |= {name: np.asarray(given[name].dequantize(jnp.float32)) for name in "qk"}
    got = jax.jit(lambda given: lightning_indexer(**given, top_k=9, implementation=implementation))(given)
    np.testing.assert_array_equal(got, chosen(inputs, 9))


def test_what_it_cannot_do_is_said() -> None:
    given = arrays(draw(1, 9, 64, seed=0), packed=False)
    q, k, w = given["q"], given["k"], given["w"]
    assert gpu.unfit(q, k, w, 2048, False) is None
    assert "q is float32" in str(gpu.unfit(q.astype(jnp.float32), k, w, 16, False))
    assert "k is float32" in str(gpu.unfit(q, k.astype(jnp.float32), w, 16, False))
    assert "there are 16 heads of 128; it takes 32 of 128" in str(gpu.unfit(q[:, :, :16], k, w[..., :16], 16, False))
    assert "top_k=2049; it selects at most 2048" in str(gpu.unfit(q, k, w, 2049, False))
    assert "segment ids" in str(gpu.unfit(q, k, w, 16, True))
    many = jnp.zeros((1, 140001, 128), BF16)
    assert "140001 bfloat16 keys a row" in str(gpu.unfit(q, many, w, 16, False))
    assert gpu.unproved(q, many, 16) is None
    assert gpu.unproved(q, k, 16) is None
    long = jax.eval_shape(Mxfp8.quantize, jax.ShapeDtypeStruct((256, 2**20, 128), BF16))
    over = jax.eval_shape(Mxfp8.quantize, jax.ShapeDtypeStruct((1, 2**21, 128), BF16))
    assert "rows of 2097152 keys haven't run on a card yet" in str(gpu.unproved(q, over, 16))
    eight, one = (jnp.zeros((256, queries, 32, 128), BF16) for queries in (8, 1))
    assert "256 rows of 8 queries and 1048576 keys are 256 blocks, more than 32" in str(gpu.unproved(eight, long, 2048))
    assert gpu.unproved(one, long, 2048) is None
    with pytest.raises(UnsupportedImplementationError, match="NVIDIA Hopper GPUs, and the platform is 'cpu'"):
        lightning_indexer(**given, top_k=3, implementation="gpu")


def test_it_is_the_first_choice_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arrays(draw(1, 9, 64, seed=0), packed=False)
    monkeypatch.setattr(gpu, "obstacle", lambda *arguments: None)
    monkeypatch.setattr(gpu, "lightning_indexer", lambda q, k, w, *, top_k, **_: jnp.full((1, 9, top_k), 7))
    with noted_choices() as found:
        got = lightning_indexer(**given, top_k=3)
    assert found["lightning_indexer"].name == "gpu"
    np.testing.assert_array_equal(got, 7)
