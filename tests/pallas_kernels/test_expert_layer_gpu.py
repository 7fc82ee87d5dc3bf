"""The Hopper kernels of a layer of routed experts, interpreted on a CPU or lowered for a GPU that isn't there."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedImplementationError, noted_choices
from pallas_kernels.expert_layer import Gate, expert_layer, expert_mlp, gpu
from pallas_kernels.expert_layer.gpu_gather import gather
from pallas_kernels.grouped_matmul import gpu as products
from pallas_kernels.grouped_matmul.gpu_tiles import Tuning
from pallas_kernels.mxfp4 import Mxfp4

BF16 = jnp.dtype("bfloat16")
GATES = [Gate(), Gate(4.0, 25.0), Gate(2.0)]
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def interpreter() -> Any:
    """What Pallas takes to run a Mosaic GPU kernel on a CPU; private before jax 0.11."""
    public = getattr(plgpu, "InterpretGPUParams", None)
    if public is not None:
        return public()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def draw(*shape: int, seed: int, scale: float = 1.0) -> np.ndarray:
    """Normal numbers that bfloat16 holds, as float64."""
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(BF16).astype(np.float64)


def joined(gate: Gate, g: np.ndarray, u: np.ndarray) -> np.ndarray:
    """SwiGLU and SiTU-GLU by their definition."""
    sigmoid = 1 / (1 + np.exp(-g))
    if gate.situ_beta is None:
        return g * sigmoid * u
    if gate.situ_linear_beta is not None:
        u = gate.situ_linear_beta * np.tanh(u / gate.situ_linear_beta)
    return gate.situ_beta * np.tanh(g / gate.situ_beta) * sigmoid * u


def gated(gate: Gate, rows: np.ndarray, weights: np.ndarray, sizes: list[int]) -> np.ndarray:
    result, width = np.zeros((len(rows), weights.shape[1] // 2)), weights.shape[1] // 2
    for m, group in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        both = weights[group] @ rows[m]
        result[m] = joined(gate, both[:width], both[width:])
    return result


def interpreted(gate: Gate, rows: np.ndarray, weights: Any, sizes: list[int], tuning: Tuning) -> np.ndarray:
    weights = weights if isinstance(weights, Mxfp4) else jnp.asarray(weights, BF16)
    arrays = jnp.asarray(rows, BF16), weights, jnp.asarray(sizes, jnp.int32), jnp.int32(0)
    return np.asarray(products.product(*arrays, BF16, tuning, interpreter(), gate)).astype(np.float64)


@pytest.mark.parametrize("gate", GATES[:2], ids=["silu", "situ"])
def test_gate_and_up_are_one_product(gate: Gate) -> None:
    rows, weights, sizes = draw(29, 64, seed=0), draw(5, 128, 64, seed=1, scale=0.4), [3, 0, 9, 1, 11]
    rows[24:] = np.nan  # rows of no group may hold anything
    got = interpreted(gate, rows, weights, sizes, Tuning((8, 16), 2, warpgroups=1, blocks=1, tall=2))
    np.testing.assert_allclose(got, gated(gate, np.nan_to_num(rows), weights, sizes), rtol=2**-8, atol=1e-4)
    np.testing.assert_array_equal(got[24:], 0)


def test_all_rows_of_one_expert_and_a_row_alone() -> None:
    rows, weights = draw(16, 64, seed=0), draw(3, 128, 64, seed=1, scale=0.4)
    tuning = Tuning((8, 16), 2, warpgroups=1, blocks=1, tall=2)
    whole = interpreted(Gate(), rows, weights, [0, 16, 0], tuning)
    np.testing.assert_allclose(whole, gated(Gate(), rows, weights, [0, 16, 0]), rtol=2**-8, atol=1e-4)
    # A row's bits are its own: alone in its group, among other numbers, in another place of a narrower tile.
    others = draw(16, 64, seed=2)
    others[9] = rows[3]
    alone = interpreted(Gate(), others, weights, [9, 1, 6], tuning)
    np.testing.assert_array_equal(alone[9], whole[3])


def test_packed_gate_and_up() -> None:
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (2, 128, 256), dtype=np.uint8)
    scale = rng.integers(120, 124, (2, 128, 16), dtype=np.uint8)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(2, 128, 512)
    values = MAGNITUDES[codes & 7] * np.where(codes >= 8, -1, 1) * np.repeat(2.0 ** (scale - 127.0), 32, axis=-1)
    rows, sizes = draw(12, 512, seed=1), [5, 6]
    weights = Mxfp4(jnp.asarray(packed), jnp.asarray(scale))
    got = interpreted(GATES[1], rows, weights, sizes, Tuning((8,), 2, 128, warpgroups=1, blocks=1, tall=2))
    np.testing.assert_allclose(got, gated(GATES[1], rows, values, sizes), rtol=2**-7, atol=1e-3)


def test_the_quick_gate_is_the_gate() -> None:
    g = np.concatenate([np.linspace(-90, 90, 4001), 2.0 ** np.arange(-30, 7), -(2.0 ** np.arange(-30, 7)), [0]])
    u = np.random.default_rng(0).permutation(g)
    for gate in GATES:
        got = np.asarray(jax.jit(gate.quickly)(jnp.asarray(g, jnp.float32), jnp.asarray(u, jnp.float32)))
        want = joined(gate, g.astype(np.float32).astype(np.float64), u.astype(np.float32).astype(np.float64))
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-34)
        plain = np.asarray(gate(jnp.asarray(g, jnp.float32), jnp.asarray(u, jnp.float32)))
        np.testing.assert_allclose(plain, want, rtol=2e-5, atol=1e-34)
    assert np.isnan(np.asarray(GATES[1].quickly(jnp.float32(np.nan), jnp.float32(1))))


@pytest.mark.parametrize("blocks", [1, 3])
def test_rows_are_gathered(blocks: int) -> None:
    x, index = draw(20, 512, seed=0), np.random.default_rng(1).integers(0, 20, 88)
    got = gather(jnp.asarray(x, BF16), jnp.asarray(index, jnp.int32), blocks, interpreter())
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), x[index])


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are taken as on a Hopper GPU, with small tiles, and interpreted."""
    run, differentiate = products.product, products.weight_gradient

    def tuned(num_rows, num_groups, width, out_width, packed, blocks, gated=False):
        return Tuning((24,), 2, 128, blocks=1, warpgroups=1 if gated else 2, tall=2 if gated else 1)

    def product(rows, weights, sizes, offset, out_dtype, tuning, interpret, gate, transposed, ordered):
        return run(rows, weights, sizes, offset, out_dtype, tuning, interpreter(), gate, transposed, ordered)

    monkeypatch.setattr(products, "tuned", tuned)
    monkeypatch.setattr(products, "product", product)
    monkeypatch.setattr(products, "weight_gradient", partial(differentiate, interpret=interpreter()))
    monkeypatch.setattr(products, "obstacle", products.unfit)


def test_a_layer_and_its_gradients_by_kernels(on_a_gpu: None) -> None:
    tokens, experts, per_token, width, inner = 9, 3, 2, 128, 128
    rng = np.random.default_rng(0)
    x, gate_up = draw(tokens, width, seed=1), draw(experts, 2 * inner, width, seed=2, scale=0.1)
    down, cotangent = draw(experts, width, inner, seed=3, scale=0.1), draw(tokens, width, seed=4)
    chosen = np.stack([rng.permutation(experts)[:per_token] for _ in range(tokens)])
    weights = rng.random((tokens, per_token)).astype(np.float32)
    valid = np.arange(tokens) != 4
    given = x.copy()
    given[4] = np.nan

    def run(x: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        return expert_layer(x, jnp.asarray(chosen), weights, jnp.asarray(valid), gate_up, down, num_experts=experts)

    arrays = (
        jnp.asarray(given, BF16),
        jnp.asarray(weights),
        jnp.asarray(gate_up, BF16),
        jnp.asarray(down, BF16),
    )
    with noted_choices() as found:
        got, pull = jax.vjp(run, *arrays)
    assert found["expert_mlp"].name == "gpu"
    gradients = pull(jnp.asarray(cotangent, BF16))

    want = np.zeros((tokens, width))
    d_x, d_weights = np.zeros_like(x), np.zeros(weights.shape)
    d_gate_up, d_down = np.zeros_like(gate_up), np.zeros_like(down)
    for m in np.flatnonzero(valid):
        for j, e in enumerate(chosen[m]):
            both = gate_up[e] @ x[m]
            g, u = both[:inner], both[inner:]
            sigmoid = 1 / (1 + np.exp(-g))
            middle = g * sigmoid * u
            output = down[e] @ middle
            want[m] += weights[m, j] * output
            d_weights[m, j] = cotangent[m] @ output
            d_output = weights[m, j] * cotangent[m]
            d_down[e] += np.outer(d_output, middle)
            d_middle = down[e].T @ d_output
            d_g = d_middle * u * sigmoid * (1 + g * (1 - sigmoid))
            d_both = np.concatenate([d_g, d_middle * g * sigmoid])
            d_gate_up[e] += np.outer(d_both, x[m])
            d_x[m] += gate_up[e].T @ d_both
    for one, other in zip((got, *gradients), (want, d_x, d_weights, d_gate_up, d_down), strict=True):
        error = np.linalg.norm(np.asarray(one).astype(np.float64) - other)
        assert error <= 1e-2 * np.linalg.norm(other)
    np.testing.assert_array_equal(np.asarray(got[4]).astype(np.float64), 0)
    np.testing.assert_array_equal(np.asarray(gradients[0][4]).astype(np.float64), 0)


def test_a_layer_of_packed_experts_by_kernels(on_a_gpu: None) -> None:
    tokens, experts, per_token, width, inner = 5, 2, 1, 512, 512
    rng, gate = np.random.default_rng(0), GATES[1]
    x, cotangent = draw(tokens, width, seed=1), draw(tokens, width, seed=2)
    chosen = np.stack([rng.permutation(experts)[:per_token] for _ in range(tokens)])
    weights = rng.random((tokens, per_token)).astype(np.float32)

    def stack(out: int, width: int) -> tuple[Mxfp4, np.ndarray]:
        packed = rng.integers(0, 256, (experts, out, width // 2), dtype=np.uint8)
        scale = rng.integers(119, 121, (experts, out, width // 32), dtype=np.uint8)
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(experts, out, width)
        values = MAGNITUDES[codes & 7] * np.where(codes >= 8, -1, 1) * np.repeat(2.0 ** (scale - 127.0), 32, axis=-1)
        return Mxfp4(jnp.asarray(packed), jnp.asarray(scale)), values

    (gate_up, up_values), (down, down_values) = stack(2 * inner, width), stack(width, inner)

    def run(x: jax.Array) -> jax.Array:
        mixing, valid = jnp.asarray(weights), jnp.ones(tokens, bool)
        return expert_layer(x, jnp.asarray(chosen), mixing, valid, gate_up, down, num_experts=experts, gate=gate)

    with noted_choices() as found:
        got, pull = jax.vjp(run, jnp.asarray(x, BF16))
    assert found["expert_mlp"].name == "gpu"
    [gradient] = pull(jnp.asarray(cotangent, BF16))
    want, d_x, step = np.zeros_like(x), np.zeros_like(x), 1e-4
    for m in range(tokens):
        for j, e in enumerate(chosen[m]):
            g, u = np.split(up_values[e] @ x[m], 2)
            want[m] += weights[m, j] * (down_values[e] @ joined(gate, g, u))
            d_inner = down_values[e].T @ (weights[m, j] * cotangent[m])
            by_g = (joined(gate, g + step, u) - joined(gate, g - step, u)) / (2 * step)
            by_u = (joined(gate, g, u + step) - joined(gate, g, u - step)) / (2 * step)
            d_x[m] += up_values[e].T @ np.concatenate([d_inner * by_g, d_inner * by_u])
    for one, other in ((got, want), (gradient, d_x)):
        error = np.linalg.norm(np.asarray(one).astype(np.float64) - other)
        assert error <= 1e-2 * np.linalg.norm(other)


def test_padding_tokens_do_not_leak_through_kernels(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # H07: six tokens, two of them padding that holds NaN; expert 0 has every real token, expert 3 none; and products that
    # leave rubbish past the last group's rows.
    product = products.product

    def spoiled(rows: Any, weights: Any, sizes: Any, *more: Any) -> Any:
        there = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
        return jnp.where(there[:, None], product(rows, weights, sizes, *more), jnp.asarray(1e6, BF16))

    monkeypatch.setattr(products, "product", spoiled)
    width = inner = 128
    valid = np.array([True, True, False, True, True, False])
    chosen = np.array([[0, 1], [0, 2], [0, 3], [0, 2], [0, 1], [3, 0]])
    x, weights = draw(6, width, seed=1), np.random.default_rng(2).random((6, 2)).astype(np.float32)
    gate_up, down = draw(4, 2 * inner, width, seed=3, scale=0.1), draw(4, width, inner, seed=4, scale=0.1)
    got = expert_layer(
        jnp.asarray(np.where(valid[:, None], x, np.nan), BF16),
        jnp.asarray(chosen),
        jnp.asarray(weights),
        jnp.asarray(valid),
        jnp.asarray(gate_up, BF16),
        jnp.asarray(down, BF16),
        num_experts=4,
        implementation="gpu",
        gate=GATES[1],
    )
    want = np.zeros_like(x)
    for m in np.flatnonzero(valid):
        for j, e in enumerate(chosen[m]):
            want[m] += weights[m, j] * (down[e] @ joined(GATES[1], *np.split(gate_up[e] @ x[m], 2)))
    found = np.asarray(got).astype(np.float64)
    assert np.linalg.norm(found - want) <= 1e-2 * np.linalg.norm(want)
    np.testing.assert_array_equal(found[~valid], 0)


def test_a_token_does_not_see_the_others_in_kernels(on_a_gpu: None) -> None:
    tokens, experts, width, mine = 5, 2, 128, 3
    row = draw(width, seed=3)
    stacks = (jnp.asarray(draw(experts, out, width, seed=out, scale=0.1), BF16) for out in (2 * width, width))
    run = jax.jit(partial(expert_layer, num_experts=experts, implementation="gpu"))
    gate_up, down = stacks
    found = []
    for others in range(2):  # its place in its group, and whose blocks of 8 rows it shares, differ
        x, chosen = 100 * draw(tokens, width, seed=10 + others), np.full((tokens, 1), others)
        x[mine], chosen[mine] = row, 1
        valid, mixing = np.arange(tokens) != 4 * others, np.full((tokens, 1), 0.75, np.float32)
        given = jnp.asarray(x, BF16), jnp.asarray(chosen), jnp.asarray(mixing), jnp.asarray(valid)
        found.append(np.asarray(run(*given, gate_up, down)[mine]).astype(np.float64))
    assert np.abs(found[0]).max() > 0
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("packed", [False, True])
def test_it_lowers_for_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    monkeypatch.setattr(products, "obstacle", products.unfit)
    shape = partial(jax.ShapeDtypeStruct, dtype=BF16)
    experts, width, inner = 112, 3584, 3072

    def stack(out: int, width: int) -> Any:
        if not packed:
            return shape((experts, out, width))
        parts = (experts, out, width // 2), (experts, out, width // 32)
        return Mxfp4(*(jax.ShapeDtypeStruct(part, jnp.uint8) for part in parts))

    def run(rows: jax.Array, gate_up: Any, down: Any, sizes: jax.Array) -> jax.Array:
        return expert_mlp(rows, gate_up, down, sizes, gate=Gate(4.0, 25.0))

    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)
    arguments = shape((128, width)), stack(2 * inner, width), stack(width, inner), sizes
    text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") + text.count('"mosaic_gpu"') >= 2
    written = f"128x{2 * inner}xbf16" in text
    assert written == packed  # array weights: gate and up are never written


def users(jaxpr: Any, variable: Any) -> Iterator[str]:
    """Names of the operations that a value goes into, through calls; a kernel is one operation."""
    for equation in jaxpr.eqns:
        for place, given in enumerate(equation.invars):
            if given is not variable:
                continue
            inner = [getattr(value, "jaxpr", value) for value in equation.params.values() if hasattr(value, "jaxpr")]
            inner = [program for program in inner if len(program.invars) == len(equation.invars)]
            if not inner:
                yield equation.primitive.name
            for program in inner:
                yield from users(program, program.invars[place])


@pytest.mark.parametrize("packed", [False, True])
def test_kernels_read_the_weights_as_they_are_stored(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    # Nothing is done to weights before the kernels, of one layer or of all: no copy, no transposition, no slice.
    monkeypatch.setattr(products, "obstacle", products.unfit)
    layers, experts, width, inner = 3, 16, 512, 512

    def stack(out: int, width: int) -> Any:
        shape = (layers * experts, out, width)
        if not packed:
            return jax.ShapeDtypeStruct(shape, BF16)
        parts = (*shape[:2], width // 2), (*shape[:2], width // 32)
        return Mxfp4(*(jax.ShapeDtypeStruct(part, jnp.uint8) for part in parts))

    def run(gate_up: Any, down: Any, layer: jax.Array, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        return expert_mlp(rows, gate_up, down, sizes, group_offset=layer * experts)

    weights = stack(2 * inner, width), stack(width, inner)
    small = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((64, width), BF16)
    program = jax.make_jaxpr(run)(*weights, *small, jax.ShapeDtypeStruct((experts,), jnp.int32)).jaxpr
    for variable in program.invars[: len(jax.tree.leaves(weights))]:
        found = list(users(program, variable))
        assert found
        assert set(found) <= {"mpmd_map", "core_map", "run_state", "pallas_call"}


def test_what_it_cannot_do_is_said() -> None:
    rows, gate_up, down = jnp.zeros((8, 128), BF16), jnp.zeros((2, 256, 128), BF16), jnp.zeros((2, 128, 128), BF16)
    with pytest.raises(UnsupportedImplementationError, match="NVIDIA Hopper GPUs, and the platform is 'cpu'"):
        expert_mlp(rows, gate_up, down, jnp.array([3, 5]), implementation="gpu")
    assert gpu.obstacle(rows, gate_up, down) is not None
    with pytest.raises(ValueError, match=r"gate_up has shape \(2, 256, 128\) and down \(2, 128, 64\)"):
        expert_mlp(rows, gate_up, down[..., :64], jnp.array([3, 5]))
    with pytest.raises(ValueError, match="there are 3 experts; the stacks hold 2"):
        expert_mlp(rows, gate_up, down, jnp.array([3, 5, 0]))
