"""The TPU kernel of grouped products, interpreted on a CPU, and compiled for chips that aren't there.

Interpreted memory starts as NaN and is watched for races.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from kimi_jax.planning import topology_devices
from pallas_kernels.dispatch import UnsupportedImplementationError, noted_choices
from pallas_kernels.grouped_matmul import grouped_matmul, specs, tpu, xla
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.target import traced_for

BF16 = jnp.dtype("bfloat16")
WATCHED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x2", "v6e:2x2", "tpu7x:2x2x1")
BY_NAME = {spec.name: spec for spec in specs.SPECS}
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
M, D, F, G = 75, 256, 256, 7
TILE = tpu.Tuning(16, 128)


def draw(*shape: int, seed: int, dtype: Any = BF16) -> np.ndarray:
    """Normal numbers that `dtype` holds, as float64."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype).astype(np.float64)


def interpreted(rows: Any, weights: Any, sizes: Any, offset: int, out: Any, tuning: tpu.Tuning = TILE) -> np.ndarray:
    got = tpu.product(rows, weights, jnp.asarray(sizes, jnp.int32), jnp.int32(offset), out, tuning, WATCHED)
    assert got.dtype == out
    got = np.asarray(got)
    assert interpreter.races is not None
    assert not interpreter.races.races_found
    return got.astype(np.float64)


def oracle(rows: np.ndarray, weights: np.ndarray, sizes: Any, offset: int) -> np.ndarray:
    result = np.zeros((len(rows), weights.shape[1]))
    for m, group in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        result[m] = weights[offset + group] @ rows[m]
    return result


def stored_values(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """MXFP4 by its definition; scales 0 and 1 stand for zeros."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values = MAGNITUDES[codes & 7] * np.where(codes >= 8, -1, 1)
    factor = np.where(scale < 2, 0.0, 2.0 ** (scale.astype(int) - 127))
    return values * np.repeat(factor, 32, axis=-1)


SIZES = (
    [3, 0, 11, 1, 31, 0, 8],  # empty groups, one row, tiles shared by two and by four groups
    [0, 0, M, 0, 0, 0, 0],
    [16, 16, 16, 0, 1, 0, 15],  # borders on tiles; none shared but the last
    [0] * G,
    [0, 0, 0, 0, 0, 0, 2],
    [11, 11, 11, 11, 11, 10, 10],  # all rows
)


@pytest.mark.parametrize(
    ("row", "weight", "out"),
    [("bfloat16", "bfloat16", "bfloat16"), ("float32", "bfloat16", "float32"), ("bfloat16", "float32", "float32")],
)
def test_rows_times_their_experts(row: str, weight: str, out: str) -> None:
    rows, weights = draw(M, D, seed=0, dtype=jnp.dtype(row)), draw(G + 2, F, D, seed=1, dtype=jnp.dtype(weight))
    arrays = jnp.asarray(weights, weight)
    for offset, sizes in enumerate(SIZES):
        held = rows.copy()
        held[sum(sizes) :] = np.nan  # rows of no group may hold anything
        offset = offset % 3
        got = interpreted(jnp.asarray(held, row), arrays, sizes, offset, jnp.dtype(out))
        want = oracle(rows, weights, sizes, offset)
        np.testing.assert_allclose(got, want, rtol=2**-8 if out == "bfloat16" else 2e-6, atol=1e-4)
        np.testing.assert_array_equal(got[sum(sizes) :], 0)


def test_packed_experts() -> None:
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (G + 2, F, D // 2), dtype=np.uint8)
    scale = rng.integers(118, 124, (G + 2, F, D // 32), dtype=np.uint8)
    rows, values = draw(M, D, seed=0), stored_values(packed, scale)
    weights = Mxfp4(jnp.asarray(packed), jnp.asarray(scale))
    for offset, sizes in enumerate(SIZES):
        held = rows.copy()
        held[sum(sizes) :] = np.nan
        offset = offset % 3
        got = interpreted(jnp.asarray(held, BF16), weights, sizes, offset, BF16)
        want = oracle(rows, values, sizes, offset)
        np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-5)
        np.testing.assert_array_equal(got[sum(sizes) :], 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_byte_and_scale_comes_out_exactly(dtype: str) -> None:
    # One-hot rows read the weights themselves: row f has byte b = f in places that depend on f, at all scales.
    place = np.arange(128)
    packed = ((np.arange(256)[:, None] + place) % 256).astype(np.uint8)[None]
    scale = (np.arange(256)[:, None] + 37 * np.arange(8)).astype(np.uint8)[None]
    scale[scale > 252] = 127
    rows = np.eye(256)
    assert set(packed.ravel()) == set(range(256))
    assert set(scale.ravel()) == set(range(253))
    weights = Mxfp4(jnp.asarray(packed), jnp.asarray(scale))
    got = interpreted(jnp.asarray(rows, dtype), weights, [256], 0, jnp.dtype(dtype), tpu.Tuning(256, 256))
    np.testing.assert_array_equal(got, stored_values(packed[0], scale[0]).T)


def test_scales_beyond_those_that_are_exact() -> None:
    packed = np.tile(np.arange(128, dtype=np.uint8), (1, 128, 1))
    scale = np.full((1, 128, 8), 127, np.uint8)
    scale[0, 1, 3], scale[0, 2, 3], scale[0, 3, 3] = 253, 254, 255
    weights = Mxfp4(jnp.asarray(packed), jnp.asarray(scale))
    got = interpreted(jnp.asarray(np.eye(256)[96:112], BF16), weights, [16], 0, BF16)
    with np.errstate(over="ignore"):
        want = stored_values(packed[0], scale[0]).astype(np.float32).astype(BF16).astype(np.float64)[:, 96:112].T
    np.testing.assert_array_equal(got[:, :1], want[:, :1])
    # One place of a column that overflows makes NaN of its other products with 0, as infinity does.
    assert not np.isfinite(got[:, 1:3][np.isinf(want[:, 1:3])]).any()
    assert np.isnan(got[:, 3]).all()


def test_a_row_does_not_see_the_others() -> None:
    # Row 7 of expert 4 stands in a tile of its own group, or shares one with four others.
    rows, weights = draw(M, D, seed=0), jnp.asarray(draw(G, F, D, seed=1), BF16)
    mine, found = rows[7].copy(), []
    for sizes, place in (([0, 0, 0, 0, 40, 0, 7], 20), ([0, 20, 0, 0, 1, 3, 24], 20)):
        there = draw(M, D, seed=len(found) + 2) * 1e3
        there[place] = mine
        found.append(interpreted(jnp.asarray(there, BF16), weights, sizes, 0, BF16)[place])
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("tile", [16, 64])
def test_each_row_is_visited_once_and_only_with_its_expert(tile: int) -> None:
    rng, total, groups = np.random.default_rng(tile), 640, 9
    tiles = total // tile
    visits_of = jax.jit(lambda sizes: tpu.plan(sizes, jnp.int32(5), total, tile))
    for _ in range(20):
        sizes = rng.integers(0, rng.integers(2, 140), groups) * rng.integers(0, 2, groups)
        sizes = np.diff(np.minimum(np.cumsum(sizes), total), prepend=0)
        visits = [np.asarray(x) for x in visits_of(jnp.asarray(sizes, jnp.int32))]
        assert {len(x) for x in visits} == {tiles + groups - 1}
        owner, seen, before = np.repeat(np.arange(groups), sizes), np.zeros(total, int), -1
        for at, expert, first, last in zip(*visits, strict=True):
            assert at in (before, before + 1)  # so a tile is written once, and all of them are
            before = at
            here = np.arange(max(first, at * tile), max(first, min(last, (at + 1) * tile)))
            seen[here] += 1
            assert (owner[here] == expert - 5).all()
            # Only experts that have rows are read, but where there's no row at all.
            assert not any(sizes) or sizes[expert - 5]
        assert before == tiles - 1
        np.testing.assert_array_equal(seen[: sum(sizes)], 1)
        assert not seen[sum(sizes) :].any()


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_xla(packed: bool) -> None:
    rows, sizes, offset = jnp.asarray(draw(20, D, seed=0), BF16), jnp.asarray([4, 0, 13]), jnp.int32(0)
    weights: Any = jnp.asarray(draw(3, 128, D, seed=1), BF16)
    weights = Mxfp4.quantize(weights) if packed else weights
    wanted = (0,) if packed else (0, 1)
    target = jnp.asarray(draw(20, 128, seed=2), BF16)

    def gradients(product: Any) -> Any:
        def loss(rows: jax.Array, weights: Any) -> jax.Array:
            return jnp.sum((product(rows, weights, sizes, offset, BF16, 8) * target).astype(jnp.float32))

        return jax.jit(jax.grad(loss, wanted))(rows, weights)

    found = gradients(partial(tpu.grouped_matmul, interpret=WATCHED))
    for one, other in zip(found, gradients(xla.grouped_matmul), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
        assert not np.any(np.asarray(one, np.float32)[17:])


# --- which calls it takes --------------------------------------------------------------------------------------------


def arguments(spec: specs.GroupedMatmulSpec, place: Any = None, layers: int = 1) -> tuple[Any, Any, Any, Any]:
    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    shape = (layers * spec.groups, spec.out_width, spec.width)
    weights: Any = array(shape, BF16)
    if spec.weights == "mxfp4":
        packed = array((*shape[:2], spec.width // 2), jnp.uint8)
        weights = Mxfp4(packed, array((*shape[:2], spec.width // 32), jnp.uint8))
    return array((spec.rows, spec.width), BF16), weights, array((spec.groups,), jnp.int32), array((), jnp.int32)


def call(rows: Any, weights: Any, sizes: Any, offset: Any, implementation: Any = None) -> Any:
    return grouped_matmul(rows, weights, sizes, group_offset=offset, implementation=implementation)


def test_where_it_is_chosen() -> None:
    small = arguments(specs.GroupedMatmulSpec("", 16, 4, 256, 128, "mxfp4"))
    for implementation, name in ((None, "xla"), ("tpu", "tpu")):
        with noted_choices() as chosen:
            jax.eval_shape(partial(call, implementation=implementation), *small)
        assert chosen["grouped_matmul"].name == name
    with traced_for("tpu"):
        for spec in specs.SPECS:
            with noted_choices() as chosen:
                result = jax.eval_shape(call, *arguments(spec))
            assert chosen["grouped_matmul"].name == "tpu"
            assert result.shape == (spec.rows, spec.out_width)


def test_what_it_cannot_do_is_said() -> None:
    rows, weights = jnp.zeros((8, 512), BF16), jnp.zeros((2, 128, 512), BF16)
    assert tpu.unfit(rows, weights, 2, BF16) is None
    assert "rows have dtype float16" in str(tpu.unfit(rows.astype(jnp.float16), weights, 2, BF16))
    assert "results have dtype float16" in str(tpu.unfit(rows, weights, 2, jnp.float16))
    assert "weights have dtype float16" in str(tpu.unfit(rows, weights.astype(jnp.float16), 2, BF16))
    assert "results have 64 columns" in str(tpu.unfit(rows, weights[:, :64], 2, BF16))
    assert "rows are 96 wide; the TPU kernel takes multiples of 128" in str(
        tpu.unfit(rows[:, :96], weights[..., :96], 2, BF16)
    )
    packed = Mxfp4(jnp.zeros((2, 128, 64), jnp.uint8), jnp.zeros((2, 128, 4), jnp.uint8))
    assert "multiples of 256 for MXFP4" in str(tpu.unfit(rows[:, :128], packed, 2, BF16))

    def why(rows: int, experts: int, width: int) -> str:
        found = []
        shapes = (rows, width), (experts, 128, width)
        arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        jax.eval_shape(lambda *x: found.append(tpu.unfit(*x, experts, jnp.float32)), *arrays)
        return str(found[0])

    assert "don't fit in VMEM" in why(1, 1, 2**16)
    assert "may take 262143 visits; the TPU kernel has 32768" in why(2**21, 2**17, 512)
    with pytest.raises(UnsupportedImplementationError, match="needs a TPU, and the platform is 'cpu'"):
        grouped_matmul(rows, weights, jnp.array([3, 5]), implementation="tpu")


def test_experts_spread_over_a_mesh() -> None:
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    by_expert, everywhere = jax.sharding.PartitionSpec("expert"), jax.sharding.PartitionSpec()
    specs_in = (everywhere, by_expert, by_expert)

    @partial(jax.shard_map, mesh=mesh, in_specs=specs_in, out_specs=by_expert)
    def split(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return grouped_matmul(rows, weights, sizes, implementation="tpu")

    rows, weights, sizes, _ = arguments(specs.GroupedMatmulSpec("", 16, 4, 256, 128, "bfloat16"))
    with jax.set_mesh(mesh):
        with pytest.raises(UnsupportedImplementationError, match=r"mesh axes 'expert' .* inside jax\.shard_map"):
            jax.eval_shape(partial(grouped_matmul, implementation="tpu"), rows, weights, sizes)
        result = jax.eval_shape(split, rows, weights, sizes)
        # Rows that all devices share get the sum of their gradients.
        gradient = jax.eval_shape(jax.grad(lambda *x: jnp.sum(split(*x).astype(jnp.float32))), rows, weights, sizes)
    assert result.shape == (32, 128)
    assert gradient.shape == rows.shape


# --- compiled for TPUs that aren't there -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "name"),
    [
        *((topology, "k3_prefill_4096_up") for topology in TOPOLOGIES),
        ("v5p:2x2x2", "k3_prefill_4096_down"),
        ("v5e:2x2", "k3_decode_64_up"),
        ("v6e:2x2", "48b_prefill_8192_up"),
        ("tpu7x:2x2x1", "48b_decode_32_up"),
        ("v5e:2x2", "k3_prefill_8192_up_of_8_devices_bfloat16"),
    ],
)
def test_compiles_without_copies(topology: str, name: str) -> None:
    spec = BY_NAME[name]
    place = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])
    with traced_for("tpu"), noted_choices() as chosen:
        compiled = jax.jit(call).lower(*arguments(spec, place, layers=2)).compile()
    assert chosen["grouped_matmul"].name == "tpu"
    memory = compiled.memory_analysis()
    assert memory is not None
    # The list of visits, and what the result takes to be laid out: no rows, no weights, no scales.
    assert memory.temp_size_in_bytes < 4 * 2**20
    if spec.weights == "mxfp4":
        scales = 2 * spec.groups * spec.out_width * spec.width // 32
        assert memory.argument_size_in_bytes < 1.02 * 17 * scales + 2 * spec.rows * spec.width
