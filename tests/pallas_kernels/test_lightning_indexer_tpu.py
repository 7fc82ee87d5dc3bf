"""The TPU kernel of the indexer: interpreted against a sort of NumPy float64 scores, and compiled for TPUs that aren't there.

Interpreted memory starts as NaN and is watched for races.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from kimi_jax.planning import topology_devices
from pallas_kernels.dispatch import UnsupportedImplementationError, noted_choices
from pallas_kernels.lightning_indexer import TwoStage, lightning_indexer, tpu, tpu_kernel
from pallas_kernels.lightning_indexer.specs import DECODE, LONG, PREFILL, TINY, IndexerSpec
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.target import traced_for
from tests import oracle_dsa as oracle

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x2", "v6e:2x2", "tpu7x:2x2x1")
LOWEST = float(np.finfo(np.float32).min)
RNG = np.random.default_rng
SHAPE = jax.ShapeDtypeStruct


def run(q: Any, k: Any, w: Any, q_positions: np.ndarray, top_k: int, *segments: np.ndarray) -> np.ndarray:
    """What the interpreted kernel selects, without a race."""
    names = ("segment_ids", "key_segment_ids")
    given = {name: jnp.asarray(ids) for name, ids in zip(names, segments, strict=False)}
    q, k, w = (x if isinstance(x, Mxfp8) else jnp.asarray(x) for x in (q, k, w))
    chosen = tpu.lightning_indexer(
        q, k, w, top_k=top_k, q_positions=jnp.asarray(q_positions), **given, interpret=INTERPRET
    )
    chosen = np.asarray(chosen)
    assert chosen.dtype == np.int32
    assert interpreter.races is not None
    assert not interpreter.races.races_found
    return chosen


def integers(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    """Small enough for exact products, and for many scores that tie."""
    return [RNG((seed, i)).integers(-2, 3, shape).astype(np.float32) for i, shape in enumerate(shapes)]


def by_oracle(
    q: np.ndarray, k: np.ndarray, w: np.ndarray, q_positions: np.ndarray, top_k: int, segments: Any = None
) -> np.ndarray:
    return oracle.padded(oracle.selections(q, k, w, top_k, q_positions, segments), top_k)


# --- which keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", TINY, ids=lambda spec: spec.name)
def test_small_shapes_with_many_ties(spec: IndexerSpec) -> None:
    """Blocks of 32 of 40 queries; widths and heads that fill no tile; more places than keys."""
    arguments = spec.arguments()
    q, k, w = integers(*(tuple(arguments[name].shape) for name in "qkw"))
    positions = np.tile(np.arange(spec.keys - spec.queries, spec.keys), (spec.batch, 1))
    positions[-1, -3:] = -1
    positions[0, 1] = spec.keys - 1
    got = run(q, k, w, positions, spec.top_k)
    np.testing.assert_array_equal(got, by_oracle(q, k, w, positions, spec.top_k))


# Scores by name, of a number of keys.
SCORES: dict[str, Callable[[int], np.ndarray]] = {
    "normal": lambda n: RNG(0).standard_normal(n),
    "tied": lambda n: RNG(1).integers(-3, 4, n),
    "all equal": lambda n: np.full(n, -1.5),
    "zeros of both signs": lambda n: np.where(RNG(2).random(n) < 0.5, 0.0, -0.0),
    "rising": lambda n: np.arange(n) - n / 2,
    "falling": lambda n: -np.arange(n),
    "nan among few": lambda n: np.where(RNG(3).random(n) < 0.3, np.nan, RNG(4).integers(-2, 2, n)),
    "nan alone": lambda n: np.full(n, np.nan),
    "extreme": lambda n: RNG(5).choice([np.inf, -np.inf, 0, -0.0, 3e38, LOWEST, 1e-37, -1e-37], n),
    "needles": lambda n: np.where(np.arange(n) % 997 == 5, 7.0, 0.0),
    "few values": lambda n: np.where(np.arange(n) < n // 2, 1.0, 2.0),
}
KEYS = 9000
LIMITS = np.array([8999, 8192, 8191, 4096, 4095, 300, 0, -1])


def expected(scores: np.ndarray, limit: int, top_k: int) -> np.ndarray:
    seen = scores[: limit + 1].astype(np.float64)
    seen = np.where(np.isnan(seen) | (seen < LOWEST), LOWEST, seen) + 0.0
    best = np.sort(np.argsort(-seen, kind="stable")[:top_k])
    return np.concatenate([best, np.full(top_k - len(best), -1)])


def sorted_out(q: np.ndarray, k: np.ndarray, w: np.ndarray, q_positions: np.ndarray, top_k: int) -> np.ndarray:
    """As `by_oracle`, faster."""
    tables = oracle.scores(q, k, w)
    rows = (zip(*row, strict=True) for row in zip(tables, q_positions, strict=True))
    return np.array([[expected(scores, limit, top_k) for scores, limit in row] for row in rows])


@pytest.mark.parametrize("top_k", [2048, pytest.param(100, marks=pytest.mark.slow)])
def test_any_scores(top_k: int) -> None:
    """Two heads, of relu(s) and of -relu(-s): whatever is put into a key is its score."""
    q = np.zeros((1, len(LIMITS), 2, 8), np.float32)
    q[..., 0, 0], q[..., 1, 0] = 1, -1
    w = np.broadcast_to(np.array([1, -1], np.float32), (1, len(LIMITS), 2))
    for name, scores in SCORES.items():
        k = np.zeros((1, KEYS, 8), np.float32)
        k[0, :, 0] = scores(KEYS)
        got = run(q, k, w, LIMITS[None], top_k)[0]
        want = [expected(k[0, :, 0], limit, top_k) for limit in LIMITS]
        np.testing.assert_array_equal(got, want, err_msg=name)
        if name == "normal":
            # What nobody sees may hold anything, and a query that is none as well.
            k[0, 8192:] = np.nan
            unseen = run(np.where(LIMITS[None, :, None, None] > 8191, np.nan, q), k, w, LIMITS[None], top_k)[0]
            np.testing.assert_array_equal(unseen[2:], want[2:])


def test_rows_whose_scores_leave_room_for_eight_queries_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "_SCORES", 2**17)
    keys, queries = 300, 130  # 17 blocks, whose numbers lie in two registers
    q, w = integers((1, queries, 1, 8), (1, queries, 1))
    k = integers((1, keys, 8), seed=1)[0]
    positions = np.linspace(-1, keys - 1, queries).astype(int)[None]
    got = run(q, k, w, positions, 30)
    np.testing.assert_array_equal(got, sorted_out(q, k, w, positions, 30))


@pytest.mark.parametrize(
    ("keys", "formats"),
    [
        (384, ["mxfp8 mxfp8", "bfloat16 bfloat16"]),
        pytest.param(384, ["float32 mxfp8", "bfloat16 mxfp8", "bfloat16 float32"], marks=pytest.mark.slow),
        pytest.param(4300, ["mxfp8 mxfp8"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_formats(keys: int, formats: list[str]) -> None:
    """Exact numbers in all of them: 12 queries of two groups, and more than a tile of keys or less than one."""
    q, k, w = integers((1, 12, 4, 128), (1, keys, 128), (1, 12, 4), seed=2)
    q[0, :, :, :32] *= 8
    k[:, ::3, 32:64] *= 0.25
    positions = np.arange(keys - 12, keys)[None]
    positions[0, 4] = -1
    want = sorted_out(q, k, w, positions, 150)

    def form(x: np.ndarray, name: str) -> Any:
        return Mxfp8.quantize(jnp.asarray(x)) if name == "mxfp8" else jnp.asarray(x, name)

    for names in formats:
        low_q, low_k = (form(x, name) for x, name in zip((q, k), names.split(), strict=True))
        np.testing.assert_array_equal(run(low_q, low_k, w, positions, 150), want, err_msg=names)


def test_normal_numbers_at_the_width_of_the_model() -> None:
    """32 heads of 128: what is selected lies above what isn't, but for the rounding of float32 sums."""
    keys, top_k = 2600, 2048
    rng = RNG(3)
    q, k, w = (rng.standard_normal(s).astype(np.float32) for s in ((1, 3, 32, 128), (1, keys, 128), (1, 3, 32)))
    positions = np.array([[keys - 1, keys - 300, 2047]])
    low_q, low_k = Mxfp8.quantize(jnp.asarray(q)), Mxfp8.quantize(jnp.asarray(k))
    wide_q, wide_k = (np.asarray(x.dequantize(jnp.float32), np.float64) for x in (low_q, low_k))
    table = oracle.scores(wide_q, wide_k, w)[0]
    got = run(low_q, low_k, w, positions, top_k)[0]
    for row, limit, scores in zip(got, positions[0], table, strict=True):
        assert np.all(np.diff(row) > 0)
        seen = scores[: limit + 1]
        left = np.delete(seen, row)
        assert row[-1] <= limit
        if left.size:
            assert left.max() < seen[row].min() + 5e-6 * np.abs(seen).max()


def test_segments() -> None:
    keys, top_k = 4200, 40
    q, k, w = integers((1, 10, 2, 8), (1, keys, 8), (1, 10, 2), seed=4)
    positions = np.array([[4199, 4199, 4150, 4100, 100, 99, 30, 4199, -1, 0]])
    key_segments = np.sort(RNG(5).integers(0, 4, (1, keys)), axis=1)
    key_segments[0, 3000:3010] = -1
    own = np.array([[3, 2, 1, 0, 0, 1, 0, -1, 3, 0]])
    table = oracle.scores(q, k, w)[0]
    got = run(q, k, w, positions, top_k, own, key_segments)[0]
    for row, scores, limit, mine in zip(got, table, positions[0], own[0], strict=True):
        mask = oracle.visible(limit, keys, key_segments[0], mine)
        want = oracle.select(scores, mask, top_k)
        np.testing.assert_array_equal(row, want + [-1] * (top_k - len(want)))
    # Everything that is seen fits: nothing is scored, but segments still count.
    got = run(q[:, 4:7], k, w[:, 4:7], positions[:, 4:7], 128, own[:, 4:7], key_segments)[0]
    for row, limit, mine in zip(got, positions[0, 4:7], own[0, 4:7], strict=True):
        want = np.flatnonzero(oracle.visible(limit, keys, key_segments[0], mine)).tolist()
        np.testing.assert_array_equal(row, want + [-1] * (128 - len(want)))


@pytest.mark.parametrize("length", [5, 8, 9, 20])
def test_the_last_token_changes_nothing_before_it(length: int) -> None:
    q, k, w = integers((1, 20, 2, 16), (1, 20, 16), (1, 20, 2), seed=6)
    positions = np.where(np.arange(20) < length, np.arange(20), -1)[None]
    before = run(q, k, w, positions, 8)
    for x in (q, k, w):
        x[:, length - 1] = 9
    after = run(q, k, w, positions, 8)
    np.testing.assert_array_equal(after[0, : length - 1], before[0, : length - 1])
    np.testing.assert_array_equal(
        after[0, : min(length, 8)], [expected(np.zeros(8), t, 8) for t in range(min(length, 8))]
    )
    np.testing.assert_array_equal(after, by_oracle(q, k, w, positions, 8))


def test_codes_and_scales_of_mxfp8() -> None:
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(tpu_kernel._from_e4m3(jnp.asarray(codes)), codes.astype(np.float32))
    factor, halves = (np.asarray(x, np.float64) for x in tpu_kernel._factors(jnp.arange(256)))
    np.testing.assert_array_equal((factor * halves)[:255], 2.0 ** (np.arange(255) - 127))
    assert np.isnan(factor[255])
    assert factor[:255].min() >= 2.0**-126


# --- which calls it takes --------------------------------------------------------------------------------------------


def call(spec: IndexerSpec, implementation: str | None, **change: Any) -> str:
    """The implementation that a call of these shapes is traced with."""
    options: dict[str, Any] = {"top_k": spec.top_k, "implementation": implementation}
    arrays = spec.arguments()
    for name, x in change.items():
        (arrays if isinstance(x, SHAPE) else options)[name] = x
    with noted_choices() as choices:
        jax.eval_shape(partial(lightning_indexer, **options), **arrays)
    return choices["lightning_indexer"].name


def test_where_it_is_chosen() -> None:
    assert call(TINY[0], None) == "xla"
    assert call(TINY[0], "tpu") == "tpu"
    with traced_for("tpu"):
        for spec in (*PREFILL, DECODE[0], *TINY):
            assert call(spec, None) == "tpu"
        assert call(TINY[0], "xla") == "xla"
        assert call(TINY[0], None, q=SHAPE((2, 40, 4, 16), jnp.float16)) == "xla"
        assert call(PREFILL[1], None, two_stage=TwoStage()) == "tpu"
        assert call(PREFILL[1], None, two_stage=TwoStage(8, 0.1, "mean")) == "xla"


REFUSED: dict[str, dict[str, Any]] = {
    "q has dtype float16": {"q": SHAPE((2, 40, 4, 16), jnp.float16)},
    "top_k=2049; the TPU kernel selects at most 2048": {"top_k": 2049},
    "there are 128 heads of 16": {"q": SHAPE((2, 40, 128, 16), jnp.float32), "w": SHAPE((2, 40, 128), jnp.float32)},
    "there are 1048577 keys a row": {"k": SHAPE((2, 2**20 + 1, 16), jnp.float32)},
    "blocks of 8 by their 'mean'": {"spec": PREFILL[1], "two_stage": TwoStage(8, 0.1, "mean")},
    "two stages keep 65537 keys": {
        "spec": PREFILL[2],
        "k": SHAPE((1, 131073, 128), jnp.bfloat16),
        "two_stage": TwoStage(1, 0.5),
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_it_refuses(message: str) -> None:
    change = dict(REFUSED[message])
    with pytest.raises(UnsupportedImplementationError, match=message):
        call(change.pop("spec", TINY[0]), "tpu", **change)


def test_it_refuses_what_is_not_on_a_tpu() -> None:
    arrays: dict[str, Any] = {name: jnp.zeros(x.shape, x.dtype) for name, x in TINY[2].arguments().items()}
    with pytest.raises(UnsupportedImplementationError, match="needs a TPU, and the platform is 'cpu'"):
        lightning_indexer(**arrays, top_k=3, implementation="tpu")
    with jax.enable_x64(True), pytest.raises(UnsupportedImplementationError, match="w has dtype float64"):
        call(TINY[0], "tpu", w=SHAPE((2, 40, 4), jnp.float64))


def test_it_is_not_split_over_a_mesh_by_itself() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_row, shared = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    @partial(jax.shard_map, mesh=mesh, in_specs=(by_row, shared, by_row, by_row), out_specs=by_row)
    def split(q: jax.Array, k: jax.Array, w: jax.Array, positions: jax.Array) -> jax.Array:
        k = jnp.broadcast_to(k, (q.shape[0], *k.shape[1:]))
        return lightning_indexer(q, k, w, top_k=8, q_positions=positions, implementation="tpu")

    arrays = TINY[0].arguments() | {"k": SHAPE((1, 40, 16), jnp.float32)}
    with jax.set_mesh(mesh):
        with pytest.raises(UnsupportedImplementationError, match=r"mesh axes 'data' .* inside jax\.shard_map"):
            call(TINY[0], "tpu")
        # Inside, with keys that all devices share, it traces.
        assert jax.eval_shape(split, *(arrays[name] for name in ("q", "k", "w", "q_positions"))).shape == (2, 40, 8)


def test_programs_with_gradients_take_it() -> None:
    arrays = TINY[0].arguments()

    @jax.grad
    def gradient(q: jax.Array, others: dict[str, Any]) -> jax.Array:
        chosen = lightning_indexer(q, **others, top_k=8, implementation="tpu")
        return jnp.sum(q) * jnp.sum(chosen).astype(jnp.float32)

    q = arrays.pop("q")
    assert jax.eval_shape(gradient, q, arrays).shape == q.shape


# --- compiled for TPUs that aren't there -----------------------------------------------------------------------------

MILLION = IndexerSpec("k31-prefill-4096x1m", 1, 4096, 2**20)


def placed(spec: IndexerSpec, topology: str, mxfp8: bool) -> dict[str, Any]:
    place = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])

    def at(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return SHAPE(shape, dtype, sharding=place)

    arrays: dict[str, Any] = {name: at(x.shape, x.dtype) for name, x in spec.arguments().items()}
    for name in "qk" if mxfp8 else "":
        *outer, width = arrays[name].shape
        arrays[name] = Mxfp8(at((*outer, width), jnp.float8_e4m3fn), at((*outer, width // 32), jnp.uint8))
    return arrays


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    ("spec", "mxfp8"),
    [
        (PREFILL[2], True),
        (DECODE[1], True),
        *(slow(spec, False) for spec in (*PREFILL, *DECODE, LONG, MILLION)),
        *(slow(spec, True) for spec in (*PREFILL[:2], DECODE[0], *DECODE[2:], LONG, MILLION)),
    ],
    ids=lambda x: getattr(x, "name", "mxfp8" if x else "bfloat16"),
)
def test_compiles_quickly_and_without_scores_in_memory(topology: str, spec: IndexerSpec, mxfp8: bool) -> None:
    began = time.perf_counter()
    function = jax.jit(partial(lightning_indexer, top_k=spec.top_k))
    with traced_for("tpu"), noted_choices() as chosen:
        memory = function.lower(**placed(spec, topology, mxfp8)).compile().memory_analysis()
    assert time.perf_counter() - began < 60
    assert chosen["lightning_indexer"].name == "tpu"
    assert memory is not None
    assert memory.temp_size_in_bytes < 32 * 2**20


@pytest.mark.parametrize("spec", TINY, ids=lambda spec: spec.name)
def test_small_shapes_compile(spec: IndexerSpec) -> None:
    function = jax.jit(partial(lightning_indexer, top_k=spec.top_k, implementation="tpu"))
    for topology in TOPOLOGIES[::2]:
        function.lower(**placed(spec, topology, False)).compile()
