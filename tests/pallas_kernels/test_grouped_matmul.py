"""Grouped products against NumPy float64, alone and inside a small mixture of experts (case H07)."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.dispatch import Implementation, UnsupportedImplementationError
from pallas_kernels.grouped_matmul import at_once, grouped_matmul, specs, xla
from pallas_kernels.mxfp4 import Mxfp4
from tests import oracle_moe

M, G, D, F = 48, 6, 64, 32
IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", "xla")
SIZES = {
    "ragged": [3, 11, 0, 19, 1, 7],
    "everything in one": [0, 0, 48, 0, 0, 0],
    "full": [8, 8, 8, 8, 8, 8],
    "ends empty": [0, 20, 0, 0, 13, 0],
    "nothing": [0, 0, 0, 0, 0, 0],
    "one row": [0, 0, 0, 0, 0, 1],
}
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-8}


def oracle(rows: np.ndarray, weights: np.ndarray, sizes: list[int], offset: int = 0) -> np.ndarray:
    """Row by row; zeros past the last group."""
    result = np.zeros((len(rows), weights.shape[1]))
    for m, group in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        result[m] = weights[offset + group] @ rows[m]
    return result


def draw(*shape: int, seed: int = 0, dtype: str = "float64") -> np.ndarray:
    """Normal numbers that `dtype` holds exactly, as float64."""
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype)).astype(np.float64)


@cache
def compiled(implementation: Implementation, tile_size: int | None = None):
    def run(rows, weights, sizes, offset):
        return grouped_matmul(
            rows, weights, sizes, group_offset=offset, tile_size=tile_size, implementation=implementation
        )

    return jax.jit(run)


def run(implementation: Implementation, rows, weights, sizes, offset: int = 0, dtype: str = "float32", tile_size=None):
    weights = weights if isinstance(weights, Mxfp4) else jnp.asarray(weights, dtype)
    sizes, offset = jnp.asarray(sizes, jnp.int32), jnp.int32(offset)
    return compiled(implementation, tile_size)(jnp.asarray(rows, dtype), weights, sizes, offset)


def close(got: jax.Array | np.ndarray, want: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(
        np.asarray(got).astype(np.float64), want, rtol=tolerance, atol=tolerance * max(np.abs(want).max(), 1)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_row_meets_its_expert_and_padding_stays_out(implementation: Implementation, dtype: str) -> None:
    rows, weights = draw(M, D, dtype=dtype), draw(G, F, D, seed=1, dtype=dtype)
    for sizes in SIZES.values():
        padded = rows.copy()
        padded[sum(sizes) :] = np.nan
        got = run(implementation, padded, weights, sizes, dtype=dtype)
        assert got.dtype == jnp.dtype(dtype)
        close(got, oracle(rows, weights, sizes), TOLERANCE[dtype])
        np.testing.assert_array_equal(np.asarray(got)[sum(sizes) :].astype(np.float64), 0)


@pytest.mark.parametrize("tile_size", [1, 5, 16, 300])
def test_any_tile_size_gives_the_same_product(tile_size: int) -> None:
    rows, weights, sizes = draw(M, D), draw(G, F, D, seed=1), SIZES["ragged"]
    close(run("xla", rows, weights, sizes, tile_size=tile_size), oracle(rows, weights, sizes), 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bad_rows_and_unused_experts_reach_nobody_else(implementation: Implementation) -> None:
    rows, weights, sizes = draw(M, D), draw(G, F, D, seed=1), SIZES["ragged"]
    want = oracle(rows, weights, sizes)
    rows[4] = np.inf
    weights[2] = np.nan
    got = np.asarray(run(implementation, rows, weights, sizes))
    assert not np.isfinite(got[4]).any()
    close(np.delete(got, 4, axis=0), np.delete(want, 4, axis=0), 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_is_computed_alike_wherever_its_group_holds_it(dtype: str) -> None:
    rows, weights, sizes = draw(M, D), draw(G, F, D, seed=1), SIZES["ragged"]
    ends = np.cumsum(sizes)
    order = np.arange(M)
    rng = np.random.default_rng(2)
    for start, end in zip(ends - sizes, ends, strict=True):
        order[start:end] = rng.permutation(order[start:end])
    got = np.asarray(run("xla", rows, weights, sizes, dtype=dtype))
    np.testing.assert_array_equal(np.asarray(run("xla", rows[order], weights, sizes, dtype=dtype)), got[order])
    rows[20:] *= 3
    np.testing.assert_array_equal(np.asarray(run("xla", rows, weights, sizes, dtype=dtype))[:20], got[:20])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_offset_into_the_experts_of_all_layers(implementation: Implementation) -> None:
    rows, weights, sizes = draw(M, D), draw(3 * G, F, D, seed=1), SIZES["ragged"]
    for layer in range(3):
        close(run(implementation, rows, weights, sizes, layer * G), oracle(rows, weights, sizes, layer * G), 1e-6)


def test_sixteen_rows_over_896_experts() -> None:
    rows, weights = draw(16, D), draw(896, F, D, seed=1)
    chosen = np.random.default_rng(2).choice(896, 12, replace=False)
    sizes = np.bincount(chosen, minlength=896)
    sizes[chosen[0]] += 4
    close(run("xla", rows, weights, sizes), oracle(rows, weights, list(sizes)), 1e-6)


def test_sums_are_kept_in_float32() -> None:
    # 1 + 1 + ... stops at 256 in bfloat16.
    got = run("xla", np.ones((8, 512)), np.ones((1, 32, 512)), [8], dtype="bfloat16")
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), 512)
    sizes = jnp.array([8])
    rows, weights = draw(8, D, dtype="bfloat16"), draw(1, F, D, seed=1, dtype="bfloat16")
    arrays = jnp.asarray(rows, jnp.bfloat16), jnp.asarray(weights, jnp.bfloat16)
    for implementation in IMPLEMENTATIONS:
        wide = grouped_matmul(*arrays, sizes, out_dtype=jnp.float32, implementation=implementation)
        close(wide, oracle(rows, weights, [8]), 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_mxfp4_equals_its_dequantised_weights_bit_for_bit(implementation: Implementation, dtype: str) -> None:
    rows, sizes = draw(M, D), SIZES["ragged"]
    packed = jax.jit(Mxfp4.quantize)(jnp.asarray(draw(2 * G, F, D, seed=1), jnp.float32))
    dense = np.asarray(jax.jit(lambda packed: packed.dequantize(jnp.float32))(packed)).astype(np.float64)
    got = run(implementation, rows, packed, sizes, G, dtype)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(run(implementation, rows, dense, sizes, G, dtype)))
    rows = rows.astype(jnp.dtype(dtype)).astype(np.float64)
    close(got, oracle(rows, dense, sizes, G), TOLERANCE[dtype])

    def gradient(weights) -> np.ndarray:
        def loss(rows):
            product = compiled(implementation)(rows, weights, jnp.asarray(sizes), jnp.int32(G))
            return jnp.sum(product.astype(jnp.float32) ** 2)

        return np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(rows, dtype)))

    np.testing.assert_array_equal(gradient(packed), gradient(jnp.asarray(dense, dtype)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_byte_with_every_exact_scale(implementation: Implementation, dtype: str) -> None:
    # Rows with a single one read the weights themselves: all 256 bytes under scale bytes 2 to 252, an output each.
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scale = np.arange(2, 253, dtype=np.uint8)
    packed = np.tile(np.arange(256, dtype=np.uint8), (1, len(scale), 1))
    weights = Mxfp4(jnp.asarray(packed), jnp.asarray(np.repeat(scale[None, :, None], 16, axis=2)))
    codes = np.stack([packed[0] & 15, packed[0] >> 4], axis=-1).reshape(len(scale), 512)
    exact = magnitudes[codes & 7] * np.where(codes >= 8, -1, 1) * 2.0 ** (scale[:, None] - 127.0)
    got = run(implementation, np.eye(512), weights, [512], dtype=dtype)
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64).T, exact)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_in_float64(implementation: Implementation) -> None:
    rows, weights, upstream = draw(M, D), draw(2 * G, F, D, seed=1), draw(M, F, seed=2)
    with jax.enable_x64(True):

        @jax.jit
        def gradients(rows, weights, sizes):
            def loss(rows, weights):
                return jnp.sum(compiled(implementation)(rows, weights, sizes, jnp.int32(G)) * upstream)

            return jax.grad(loss, (0, 1))(rows, weights)

        for sizes in SIZES.values():
            padded = rows.copy()
            padded[sum(sizes) :] = np.nan
            got = gradients(jnp.asarray(padded), jnp.asarray(weights), jnp.asarray(sizes, jnp.int32))
            d_rows, d_weights = np.zeros_like(rows), np.zeros_like(weights)
            for m, group in enumerate(np.repeat(np.arange(G), sizes)):
                d_rows[m] = upstream[m] @ weights[G + group]
                d_weights[G + group] += np.outer(upstream[m], rows[m])
            np.testing.assert_allclose(np.asarray(got[0]), d_rows, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(np.asarray(got[1]), d_weights, rtol=1e-12, atol=1e-12)


def test_bfloat16_weight_gradients_are_summed_in_float32() -> None:
    rows, weights = jnp.ones((512, 32), jnp.bfloat16), jnp.ones((2, 32, 32), jnp.bfloat16)
    sizes = jnp.array([500, 12])

    @jax.jit
    @jax.grad
    def d_weights(weights):
        return jnp.sum(grouped_matmul(rows, weights, sizes, out_dtype=jnp.float32))

    gradient = d_weights(weights)
    assert gradient.dtype == jnp.bfloat16
    want = np.broadcast_to(np.array([500, 12])[:, None, None], gradient.shape)
    np.testing.assert_array_equal(np.asarray(gradient).astype(np.float64), want)


# H07: six tokens, two of them padding, two of four experts each; expert 0 gets every token and expert 3 none.
TOKENS, EXPERTS, TOP_K, WIDTH, HIDDEN = 6, 4, 2, 32, 64
REAL = np.array([True, True, False, True, True, False])
BIAS = np.array([5.0, 0.0, 0.0, -5.0])


def product_with_rubbish_past_the_end(rows, weights, sizes):
    """A product that leaves its padding rows undefined, as some grouped kernels do."""
    there = (jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None]
    return jnp.where(there, grouped_matmul(rows, weights, sizes), 1e6)


def small_moe(product, combine_by_selection: bool, hidden, router, w1, w3, w2):
    real = jnp.asarray(REAL)[:, None]
    scores = jax.nn.sigmoid(jnp.where(real, hidden, 0) @ router.T)
    _, chosen = jax.lax.top_k(scores + BIAS, TOP_K)
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    chosen = jnp.where(real, chosen, EXPERTS).ravel()  # padding is sorted behind the last expert and counted nowhere
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.bincount(chosen, length=EXPERTS)
    token = order // TOP_K
    rows = hidden[token]
    gate, up = product(rows, w1, sizes), product(rows, w3, sizes)
    y = product(4 * jnp.tanh(gate / 4) * jax.nn.sigmoid(gate) * 25 * jnp.tanh(up / 25), w2, sizes)
    weight = jnp.where(real, weights, 0).ravel()[order][:, None]
    if combine_by_selection:
        y = jnp.where((jnp.arange(y.shape[0]) < jnp.sum(sizes))[:, None], y, 0)
    return jnp.zeros_like(hidden).at[token].add(weight * y)


def moe_inputs() -> list[np.ndarray]:
    hidden = draw(TOKENS, WIDTH)
    router = draw(EXPERTS, WIDTH, seed=1) / 6
    up = [draw(EXPERTS, HIDDEN, WIDTH, seed=seed) / 6 for seed in (2, 3)]
    return [hidden, router, *up, draw(EXPERTS, WIDTH, HIDDEN, seed=4) / 8]


def moe_oracle(hidden, router, w1, w3, w2) -> np.ndarray:
    experts = [oracle_moe.Mlp(w1[e], w3[e], w2[e]) for e in range(EXPERTS)]
    result = np.zeros_like(hidden)
    result[REAL] = oracle_moe.moe(hidden[REAL], router, BIAS, experts, TOP_K, oracle_moe.situ_glu)
    return result


@pytest.mark.parametrize(
    ("product", "combine_by_selection"),
    [(grouped_matmul, False), (product_with_rubbish_past_the_end, True)],
)
def test_padding_tokens_do_not_leak_through_a_mixture_of_experts(product, combine_by_selection: bool) -> None:
    arguments = moe_inputs()
    chosen, _ = oracle_moe.route(arguments[0][REAL], arguments[1], BIAS, TOP_K)
    assert all(experts[0] == 0 and experts[1] in (1, 2) for experts in chosen)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(argument) for argument in arguments]
        arrays[0] = arrays[0].at[~REAL].set(jnp.nan)
        upstream = draw(TOKENS, WIDTH, seed=5)

        def loss(*arrays):
            result = small_moe(product, combine_by_selection, *arrays)
            return jnp.sum(result * upstream), result

        (_, result), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4), has_aux=True))(*arrays)
        result, gradients = np.asarray(result), [np.asarray(gradient) for gradient in gradients]
    np.testing.assert_allclose(result, moe_oracle(*arguments), rtol=1e-11, atol=1e-12)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    np.testing.assert_array_equal(result[~REAL], 0)
    np.testing.assert_array_equal(gradients[0][~REAL], 0)
    for gradient in gradients[2:]:
        np.testing.assert_array_equal(gradient[3], 0)
    for which, gradient in enumerate(gradients):
        direction = draw(*gradient.shape, seed=6)
        losses = []
        for step in (1e-5, -1e-5):
            moved = list(arguments)
            moved[which] = arguments[which] + step * direction
            losses.append(np.sum(moe_oracle(*moved) * upstream))
        np.testing.assert_allclose(np.sum(gradient * direction), (losses[0] - losses[1]) / 2e-5, rtol=1e-6)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "mxfp4"])
def test_temporaries_hold_one_expert_and_do_not_grow_with_the_experts(weights: str) -> None:
    rows, width, out_width, tile = 256, 128, 256, 16
    dtype = jnp.bfloat16 if weights == "bfloat16" else jnp.float32

    def temporaries(groups: int, experts: int, *, backward: bool = False) -> int:
        def shape(*sizes: int, dtype=dtype):
            return jax.ShapeDtypeStruct(sizes, dtype)

        experts_shape = shape(experts, out_width, width)
        if weights == "mxfp4":
            halves = shape(experts, out_width, width // 2, dtype=jnp.uint8)
            experts_shape = Mxfp4(halves, shape(experts, out_width, width // 32, dtype=jnp.uint8))

        def product(rows, experts, sizes):
            return grouped_matmul(rows, experts, sizes, tile_size=tile)

        def d_rows(rows, experts, sizes):
            return jax.grad(lambda rows: jnp.sum(product(rows, experts, sizes).astype(jnp.float32)))(rows)

        lowered = jax.jit(d_rows if backward else product).lower(
            shape(rows, width), experts_shape, shape(groups, dtype=jnp.int32)
        )
        stats = lowered.compile().memory_analysis()
        assert stats is not None
        return stats.temp_size_in_bytes

    expert = out_width * width * np.dtype(dtype).itemsize
    result = rows * max(width, out_width) * np.dtype(dtype).itemsize
    one_product = jax.jit(lambda rows, expert: rows @ expert.T).lower(
        jax.ShapeDtypeStruct((tile, width), dtype), jax.ShapeDtypeStruct((out_width, width), dtype)
    )
    workspace = one_product.compile().memory_analysis()
    assert workspace is not None
    few = temporaries(8, 8)
    assert few < workspace.temp_size_in_bytes + expert + 3 * result
    # Small integers for each group and tile may grow, nothing else.
    assert temporaries(64, 64) < few + 16 * 1024
    assert temporaries(8, 512) < few + 16 * 1024
    assert temporaries(64, 512, backward=True) < few + expert + 2 * result


def test_tile_size_follows_the_mean_group() -> None:
    wanted = {(16, 896): 8, (1024, 896): 8, (2048, 64): 32, (8192, 64): 128, (65536, 896): 128, (1 << 20, 256): 256}
    for (rows, groups), tile in wanted.items():
        assert xla.tile_size(rows, groups) == tile


def test_inside_shard_map() -> None:
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(AxisType.Auto,))
    local = PartitionSpec("expert")
    rows, weights = jnp.asarray(draw(M, D), jnp.float32), jnp.asarray(draw(G, F, D, seed=1), jnp.float32)
    sizes = jnp.asarray(SIZES["ragged"])
    sharded = jax.shard_map(grouped_matmul, mesh=mesh, in_specs=(PartitionSpec(), local, local), out_specs=local)

    def gradients(product):
        return jax.jit(jax.grad(lambda *arrays: jnp.sum(product(*arrays, sizes) ** 2), (0, 1)))(rows, weights)

    for one, other in zip(gradients(sharded), gradients(grouped_matmul), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-5)


def test_real_shapes_are_accepted() -> None:
    for spec in specs.SPECS:
        rows = jax.ShapeDtypeStruct((spec.rows, spec.width), jnp.bfloat16)
        weights = jax.ShapeDtypeStruct((spec.groups, spec.out_width, spec.width), jnp.bfloat16)
        if spec.weights == "mxfp4":
            packed = jax.ShapeDtypeStruct((*weights.shape[:2], spec.width // 2), jnp.uint8)
            weights = Mxfp4(packed, jax.ShapeDtypeStruct((*weights.shape[:2], spec.width // 32), jnp.uint8))
        result = jax.eval_shape(grouped_matmul, rows, weights, jax.ShapeDtypeStruct((spec.groups,), jnp.int32))
        assert (result.shape, result.dtype) == ((spec.rows, spec.out_width), jnp.bfloat16)


def test_no_rows_at_all() -> None:
    result = grouped_matmul(jnp.zeros((0, D)), jnp.zeros((G, F, D)), jnp.zeros(G, jnp.int32))
    assert result.shape == (0, F)


def test_what_does_not_fit_is_refused() -> None:
    rows, weights, sizes = jnp.zeros((M, D)), jnp.zeros((G, F, D)), jnp.zeros(G, jnp.int32)
    packed = Mxfp4(np.zeros((G, F, 48), np.uint8), np.zeros((G, F, 3), np.uint8))
    with pytest.raises(ValueError, match=r"weights have shape \(6, 32, 96\); rows of width 64"):
        grouped_matmul(rows, packed, sizes)
    with pytest.raises(ValueError, match=r"weights.scale has shape \(6, 32, 2\)"):
        grouped_matmul(rows, Mxfp4(packed.packed, packed.scale[..., :2]), sizes)
    with pytest.raises(ValueError, match="6 groups and group_offset is 1; weights hold 6 experts"):
        grouped_matmul(rows, weights, sizes, group_offset=1)
    with pytest.raises(ValueError, match="0 groups"):
        grouped_matmul(rows, weights, sizes[:0])
    with pytest.raises(ValueError, match="tile_size is 0"):
        grouped_matmul(rows, weights, sizes, tile_size=0)
    with pytest.raises(UnsupportedImplementationError, match="rows are 64 wide; the TPU kernel takes multiples of 128"):
        grouped_matmul(rows, weights, sizes, implementation="tpu")


# The form for small experts on a GPU, which runs anywhere.


@pytest.mark.parametrize("tile", [1, 4, 16, 48])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_all_tiles_at_once_give_the_same_product_and_gradient(sizes: list[int], tile: int) -> None:
    rows, weights, d_result = draw(M, D), draw(G + 2, F, D, seed=1), draw(M, F, seed=2)
    used = sum(sizes)
    rows[used:] = np.nan  # rows of no group may hold anything
    given = [jnp.asarray(x, jnp.float32) for x in (rows, weights)]
    counts, offset = jnp.asarray(sizes, jnp.int32), jnp.int32(1)
    product = jax.jit(at_once.product, static_argnums=(0, 5, 6))
    got = product("md,fd->mf", *given, counts, offset, jnp.dtype("float32"), tile)
    close(got, oracle(np.nan_to_num(rows), weights, sizes, 1), 1e-6)

    want = np.zeros_like(weights)
    for m, group in enumerate(np.repeat(np.arange(G), sizes)):
        want[1 + group] += np.outer(d_result[m], rows[m])
    gradient = jax.jit(at_once.weight_gradient, static_argnums=5)
    close(gradient(given[0], jnp.asarray(d_result, jnp.float32), given[1], counts, offset, tile), want, 1e-6)


def test_only_small_unpacked_experts_are_copied() -> None:
    experts = jnp.zeros((8, 128, 128), jnp.bfloat16)  # 64 KiB each in float32
    assert at_once.suits(experts, 4000 * 256, 8, 256)
    assert not at_once.suits(experts, 4100 * 256, 8, 256)
    packed = Mxfp4(jnp.zeros((8, 64, 32), jnp.uint8), jnp.zeros((8, 64, 2), jnp.uint8))
    assert not at_once.suits(packed, 64, 8, 8)
