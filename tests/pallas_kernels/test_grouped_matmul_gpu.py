"""The Hopper kernel of grouped products, interpreted on a CPU or lowered for a GPU that isn't there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedImplementationError, noted_choices
from pallas_kernels.grouped_matmul import gpu, gpu_cut, grouped_matmul, specs, xla
from pallas_kernels.grouped_matmul.gpu_tiles import Tuning, cut
from pallas_kernels.grouped_matmul.gpu_unpack import order_inputs, unpack_plainly
from pallas_kernels.mxfp4 import Mxfp4
from tests.pallas_kernels.numpy_warp import run_block

BF16 = jnp.dtype("bfloat16")
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def interpreter() -> Any:
    """What Pallas takes to run a Mosaic GPU kernel on a CPU; private before jax 0.11."""
    public = getattr(plgpu, "InterpretGPUParams", None)
    if public is not None:
        return public()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def draw(*shape: int, seed: int) -> np.ndarray:
    """Normal numbers that bfloat16 holds, as float64."""
    return np.random.default_rng(seed).standard_normal(shape).astype(BF16).astype(np.float64)


def interpreted(rows: np.ndarray, weights: Any, sizes: list[int], offset: int, tuning: Tuning) -> np.ndarray:
    weights = weights if isinstance(weights, Mxfp4) else jnp.asarray(weights, BF16)
    arrays = jnp.asarray(rows, BF16), weights, jnp.asarray(sizes, jnp.int32), jnp.int32(offset)
    return np.asarray(gpu.product(*arrays, BF16, tuning, interpreter())).astype(np.float64)


def oracle(rows: np.ndarray, weights: np.ndarray, sizes: list[int], offset: int) -> np.ndarray:
    result = np.zeros((len(rows), weights.shape[1]))
    for m, group in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        result[m] = weights[offset + group] @ rows[m]
    return result


M, D, F = 45, 128, 64
SMALL = Tuning((8, 16), 2, warpgroups=1, blocks=1)


@pytest.mark.parametrize("sizes", [[3, 0, 11, 1, 16, 0, 8], [0, 0, 45, 0, 0, 0, 0]], ids=["ragged", "one"])
def test_rows_times_their_experts(sizes: list[int]) -> None:
    rows, weights = draw(M, D, seed=0), draw(9, F, D, seed=1)
    rows[sum(sizes) :] = np.nan  # rows of no group may hold anything
    got = interpreted(rows, weights, sizes, 2, SMALL)
    want = oracle(np.nan_to_num(rows), weights, sizes, 2)
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-5)
    np.testing.assert_array_equal(got[sum(sizes) :], 0)


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16", "mxfp4"])
def test_a_row_does_not_see_the_others(packed: bool) -> None:
    # Row 7 of expert 4 stands in the first, a middle or the last block of its group, in a wide tile or a narrow one.
    width = 512 if packed else D
    weights: Any = draw(7, F, width, seed=1)
    if packed:
        rng = np.random.default_rng(1)
        codes, scale = (
            rng.integers(*span, (7, F, width // part), np.uint8) for span, part in (((0, 256), 2), ((119, 123), 32))
        )
        weights = Mxfp4(jnp.asarray(codes), jnp.asarray(scale))
    tuning = Tuning((8, 16), 2, 128, warpgroups=1, blocks=1) if packed else SMALL
    mine = draw(width, seed=7)
    found = []
    for sizes, place in (([3, 0, 5, 0, 30, 0, 7], 8), ([0, 20, 0, 0, 1, 0, 24], 20)):
        there = draw(M, width, seed=len(found) + 2) * 1e3
        there[place] = mine
        found.append(interpreted(there, weights, sizes, 0, tuning)[place])
    assert np.abs(found[0]).max() > 0
    np.testing.assert_array_equal(found[0], found[1])


def test_two_warpgroups_and_two_blocks_of_threads() -> None:
    rows, weights, sizes = draw(24, 64, seed=0), draw(3, 128, 64, seed=1), [5, 0, 13]
    got = interpreted(rows, weights, sizes, 0, Tuning((16,), 2, blocks=2))
    np.testing.assert_allclose(got, oracle(rows, weights, sizes, 0), rtol=2**-8, atol=1e-5)


WIDE = [
    (Tuning((16, 288), 2, warpgroups=1, blocks=1), [0, 270, 9]),  # two instructions
    (Tuning((24, 96), 2, warpgroups=1, blocks=1, tall=2), [3, 90, 0]),  # two blocks of columns, an odd number of parts
    (Tuning((8, 96, 128), 2, warpgroups=1, blocks=1), [3, 107, 0]),  # parts that no border can be in
]


@pytest.mark.parametrize(("tuning", "sizes"), WIDE, ids=["wide", "tall", "inner"])
def test_wide_tiles_and_two_blocks_of_columns(tuning: Tuning, sizes: list[int]) -> None:
    rows, weights = draw(sum(sizes) + 2, 64, seed=0), draw(3, 64 * tuning.tall, 64, seed=1)
    got = interpreted(rows, weights, sizes, 0, tuning)
    np.testing.assert_allclose(got, oracle(rows, weights, sizes, 0), rtol=2**-8, atol=1e-5)


def test_slots_of_256_packed_inputs() -> None:
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (2, 64, 256), dtype=np.uint8)
    scale = rng.integers(120, 124, (2, 64, 16), dtype=np.uint8)
    rows, sizes, weights = draw(12, 512, seed=1), [5, 6], Mxfp4(jnp.asarray(packed), jnp.asarray(scale))
    got = interpreted(rows, weights, sizes, 0, Tuning((8,), 2, 256, warpgroups=1, blocks=1))
    np.testing.assert_allclose(got, oracle(rows, stored_values(packed, scale), sizes, 0), rtol=2**-8, atol=1e-3)


def stored_values(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """MXFP4 by its definition; scales 0 and 1 stand for zeros."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values = MAGNITUDES[codes & 7] * np.where(codes >= 8, -1, 1)
    factor = np.where(scale < 2, 0.0, 2.0 ** (scale.astype(int) - 127))
    return values * np.repeat(factor, 32, axis=-1)


def test_every_pair_of_codes_comes_out_exactly() -> None:
    # One-hot rows read the weights themselves: 2 positions of a byte for 24 bytes of 64 results, all 256 bytes.
    packed = (np.arange(256)[None, :] * 64 + np.arange(64)[:, None]).astype(np.uint8)[None]
    scale = np.array([0, 1, 2, 3, 64, 126, 127, 128, 129, 200, 251, 252, 120, 121, 122, 123], np.uint8)
    scale = np.stack([np.roll(scale, shift) for shift in range(64)])[None]
    inputs = np.random.default_rng(0).permutation(np.concatenate([np.arange(16), np.arange(128, 144), [300, 511] * 8]))
    rows = np.zeros((48, 512))
    rows[np.arange(48), inputs] = 1
    assert len(np.unique(packed[0][:, inputs // 2])) == 256
    weights = Mxfp4(jnp.asarray(packed), jnp.asarray(scale))
    got = interpreted(rows, weights, [48], 0, Tuning((16,), 2, 128, warpgroups=1, blocks=1))
    np.testing.assert_array_equal(got, stored_values(packed[0], scale[0])[:, inputs].T)


def test_every_byte_with_every_exact_scale() -> None:
    packed = np.tile(np.arange(256, dtype=np.uint8), (1, 256, 1))
    scale = np.tile(np.clip(np.arange(256), 2, 252).astype(np.uint8)[None, :, None], (1, 1, 16))
    weights = Mxfp4(jnp.asarray(packed), jnp.asarray(scale))
    got = interpreted(np.eye(512), weights, [512], 0, Tuning((256,), 2, 128, warpgroups=1, blocks=1))
    np.testing.assert_array_equal(got, stored_values(packed[0], scale[0]).T)


def test_unpacked_weights_and_columns_of_rows_agree_on_their_order() -> None:
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (256, 64), dtype=np.uint8)
    scale = np.stack([np.arange(256, dtype=np.uint8)] * 4, axis=1)
    got = np.asarray(unpack_plainly(jnp.asarray(packed), jnp.asarray(scale))).astype(np.float64)
    want = stored_values(packed[:253], scale[:253])
    np.testing.assert_array_equal(got[:253], np.asarray(order_inputs(jnp.asarray(want))).astype(np.float64))
    assert np.isnan(got[255]).all()
    # What thread c of four must hold: inputs 2c, 2c+1, 8+2c, 9+2c of each sixteen, all of its own 32 stored ones.
    order = np.asarray(order_inputs(jnp.arange(128.0)[None]))[0].astype(int)
    for thread in range(4):
        held = [16 * step + half + 2 * thread + pair for step in range(8) for half in (0, 8) for pair in (0, 1)]
        np.testing.assert_array_equal(np.sort(order[held]), np.arange(32 * thread, 32 * thread + 32))


@pytest.mark.parametrize("widths", [(8,), (8, 16), (16, 64, 256)])
def test_tiles_cover_every_row_once(widths: tuple[int, ...]) -> None:
    rng, total = np.random.default_rng(len(widths)), 640
    tiles_of = jax.jit(lambda sizes: cut(sizes, jnp.int32(5), total, widths))
    for _ in range(20):
        sizes = rng.integers(0, rng.integers(2, 140), 9) * rng.integers(0, 2, 9)
        sizes = np.diff(np.minimum(np.cumsum(sizes), total), prepend=0)
        work = tiles_of(jnp.asarray(sizes, jnp.int32))
        tiles, used = np.asarray(work.tiles), int(work.used[-1])
        assert used <= tiles.shape[1]
        owner = np.repeat(np.arange(9), sizes)
        owner = np.concatenate([owner, np.full(total - len(owner), 9)])
        seen = np.zeros(total, int)
        for base, first, last, expert, kind, busy in tiles[:, :used].T:
            assert base % 8 == 0
            assert base <= first <= last <= base + widths[kind]
            assert first == last or last <= total
            seen[first:last] += 1
            group = expert - 5 if busy else 9
            assert (owner[first:last] == group).all()
        np.testing.assert_array_equal(seen, 1)


@pytest.mark.parametrize("num_groups", [9, 128, 300])
@pytest.mark.parametrize("widths", [(8,), (8, 16), (16, 64, 256)])
def test_warps_cut_the_same_tiles(widths: tuple[int, ...], num_groups: int) -> None:
    rng, total = np.random.default_rng(len(widths)), 640
    for high in (2, 9, 140):
        sizes = rng.integers(0, high, num_groups) * rng.integers(0, 2, num_groups)
        sizes = np.diff(np.minimum(np.cumsum(sizes), total), prepend=0).astype(np.int32)
        want = cut(jnp.asarray(sizes), jnp.int32(5), total, widths)
        most = want.tiles.shape[1]
        tiles, used = np.full(6 * most, -9, np.int32), np.full(num_groups + 1, -9, np.int32)
        arrays = sizes, np.array([5], np.int32), tiles, used, np.full(gpu_cut.room_for(num_groups), 77, np.int32)

        def act(warp: Any, arrays: Any = arrays, most: int = most) -> None:
            settings: Any = {"num_groups": num_groups, "num_rows": total, "widths": widths, "most": most}
            gpu_cut.cut_by_warps(warp, *((array, 0) for array in arrays), **settings)

        run_block(gpu_cut.WARPS, act)
        np.testing.assert_array_equal(used, want.used)
        np.testing.assert_array_equal(tiles.reshape(6, -1)[:, : used[-1]], np.asarray(want.tiles)[:, : used[-1]])


def shared_bytes(tuning: Tuning, width: int, packed: bool) -> int:
    """A ring of weights and rows, results on their way out, and two sets of scales."""
    columns, widest = 64 * tuning.warpgroups, tuning.widths[-1]
    weights = columns * tuning.step // 2 if packed else 2 * columns * tuning.step
    weights *= tuning.tall
    ring = tuning.stages * (weights + 2 * widest * tuning.step)
    return ring + 2 * 2 * columns * tuning.part + (2 * tuning.tall * columns * width // 32 if packed else 0)


def shapes(spec: specs.GroupedMatmulSpec) -> tuple[Any, Any, Any, Any]:
    shape = (spec.groups, spec.out_width, spec.width)
    weights: Any = jax.ShapeDtypeStruct(shape, BF16)
    if spec.weights == "mxfp4":
        packed = jax.ShapeDtypeStruct((*shape[:2], spec.width // 2), jnp.uint8)
        weights = Mxfp4(packed, jax.ShapeDtypeStruct((*shape[:2], spec.width // 32), jnp.uint8))
    sizes = jax.ShapeDtypeStruct((spec.groups,), jnp.int32)
    return jax.ShapeDtypeStruct((spec.rows, spec.width), BF16), weights, sizes, jax.ShapeDtypeStruct((), jnp.int32)


def test_real_shapes_fit_a_multiprocessor() -> None:
    for spec in specs.SPECS:
        packed = spec.weights == "mxfp4"
        for gated, out_width in ((False, spec.out_width), (True, 2 * spec.out_width)):
            if packed and gated:
                continue
            tuning = gpu.tuned(spec.rows, spec.groups, spec.width, out_width, packed, gated=gated)
            assert tuning.stages >= 3
            assert tuning.tall == (2 if gated else 1)
            assert min(32, tuning.widths[-1]) <= tuning.part <= tuning.widths[-1]
            assert tuning.part % 8 == 0
            assert shared_bytes(tuning, spec.width, packed) <= 227 * 1024 - 1024
            assert out_width % tuning.columns == 0
            assert spec.width % tuning.step == 0


@pytest.mark.parametrize("name", ["48b_decode_64_up", "k3_decode_64_up"])
def test_it_lowers_for_a_gpu_that_is_not_here(name: str) -> None:
    [spec] = [spec for spec in specs.SPECS if spec.name == name]
    arguments = shapes(spec)
    tuning = gpu.tuned(spec.rows, spec.groups, spec.width, spec.out_width, spec.weights == "mxfp4")

    def run(*arrays: Any) -> jax.Array:
        assert gpu.unfit(arrays[0], arrays[1], BF16) is None
        return gpu.product(*arrays, BF16, tuning)

    lowered = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_rows_times_their_transposed_experts() -> None:
    rows, weights, sizes = draw(M, D, seed=0), draw(5, D, 128, seed=1), [3, 0, 20, 1, 16]
    arrays = jnp.asarray(rows, BF16), jnp.asarray(weights, BF16), jnp.asarray(sizes, jnp.int32), jnp.int32(0)
    tuning = Tuning((8, 24), 2, warpgroups=2, blocks=1)
    got = np.asarray(gpu.product(*arrays, BF16, tuning, interpreter(), transposed=True)).astype(np.float64)
    np.testing.assert_allclose(got, oracle(rows, weights.transpose(0, 2, 1), sizes, 0), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("offset", [0, 1])
def test_gradients_of_weights_are_sums_over_a_groups_rows(offset: int) -> None:
    # Groups that share blocks of 8 rows, none, one row, more than one chunk of 64; rows past the last hold NaN.
    rows, d_result, sizes, experts = draw(101, 128, seed=0), draw(101, 128, seed=1), [3, 0, 80, 1, 10], 5 + 2 * offset
    rows[94:] = d_result[94:] = np.nan
    got = gpu.weight_gradient(
        jnp.asarray(rows, BF16),
        jnp.asarray(d_result, BF16),
        jnp.zeros((experts, 128, 128), BF16),
        jnp.asarray(sizes, jnp.int32),
        jnp.int32(offset),
        interpreter(),
    )
    want, start = np.zeros((experts, 128, 128)), 0
    for group, size in enumerate(sizes):
        want[offset + group] = d_result[start : start + size].T @ rows[start : start + size]
        start += size
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_two_more_products(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    def product(rows, weights, sizes, offset, out_dtype, tuning, interpret, gate, transposed, ordered):
        weights = weights.swapaxes(1, 2) if transposed else weights
        return xla.grouped_matmul(rows, weights, sizes, offset, out_dtype, 8)

    def weight_gradient(rows, d_result, weights, sizes, offset):
        return xla._weight_gradient(rows, d_result, weights, sizes, offset, 8)

    monkeypatch.setattr(gpu, "product", product)
    monkeypatch.setattr(gpu, "weight_gradient", weight_gradient)
    rows, sizes, offset = jnp.asarray(draw(20, 128, seed=0), BF16), jnp.asarray([4, 0, 13]), jnp.int32(0)
    weights: Any = jnp.asarray(draw(3, 128, 128, seed=1), BF16)
    weights = Mxfp4.quantize(weights) if packed else weights
    wanted = (0,) if packed else (0, 1)

    def gradients(product: Any) -> Any:
        def loss(rows: jax.Array, weights: Any) -> jax.Array:
            return jnp.sum(product(rows, weights, sizes, offset, BF16, 8).astype(jnp.float32) ** 2)

        return jax.grad(loss, wanted)(rows, weights)

    for one, other in zip(gradients(gpu.grouped_matmul), gradients(xla.grouped_matmul), strict=True):
        one, other = (np.asarray(array).astype(np.float64) for array in (one, other))
        np.testing.assert_allclose(one, other, rtol=2**-7, atol=2**-7 * np.abs(other).max())


def test_what_it_cannot_do_is_said() -> None:
    rows, weights = jnp.zeros((8, 512), BF16), jnp.zeros((2, 128, 512), BF16)
    assert gpu.unfit(rows, weights, BF16) is None
    assert "rows are float32" in str(gpu.unfit(rows.astype(jnp.float32), weights, BF16))
    assert "results float32" in str(gpu.unfit(rows, weights, jnp.float32))
    assert "results have 64 columns" in str(gpu.unfit(rows, weights[:, :64], BF16))
    assert "weights are float32" in str(gpu.unfit(rows, weights.astype(jnp.float32), BF16))
    assert "rows are 32 wide" in str(gpu.unfit(rows[:, :32], weights[..., :32], BF16))
    packed = Mxfp4(jnp.zeros((2, 128, 64), jnp.uint8), jnp.zeros((2, 128, 4), jnp.uint8))
    assert "MXFP4 rows are 128 wide; it takes multiples of 512" in str(gpu.unfit(rows[:, :128], packed, BF16))
    with pytest.raises(UnsupportedImplementationError, match="NVIDIA Hopper GPUs, and the platform is 'cpu'"):
        grouped_matmul(rows, weights, jnp.array([3, 5]), implementation="gpu")


def test_it_is_picked_where_nothing_stands_in_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = jnp.zeros((8, 64), BF16), jnp.zeros((2, 128, 64), BF16), jnp.array([3, 5])
    with noted_choices() as found:
        grouped_matmul(*arguments)
    assert found["grouped_matmul"].name == "xla"
    assert "the platform is 'cpu'" in found["grouped_matmul"].reason
    monkeypatch.setattr(gpu, "obstacle", lambda rows, weights, out_dtype: None)
    monkeypatch.setattr(gpu, "grouped_matmul", lambda rows, weights, *rest: jnp.ones((8, 128), BF16))
    with noted_choices() as found:
        result = grouped_matmul(*arguments)
    assert found["grouped_matmul"].name == "gpu"
    np.testing.assert_array_equal(np.asarray(result).astype(np.float64), 1)
