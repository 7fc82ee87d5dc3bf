"""A layer of routed experts against its definition, its gradients, and the memory that its program takes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_layer import Gate, expert_layer, expert_mlp, sort_by_expert
from pallas_kernels.mxfp4 import Mxfp4

TOKENS, EXPERTS, PER_TOKEN, WIDTH, INNER = 29, 5, 3, 64, 32
TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1e-2}
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def joined(gate: Gate, g: np.ndarray, u: np.ndarray) -> np.ndarray:
    """SwiGLU and SiTU-GLU by their definition."""
    sigmoid = 1 / (1 + np.exp(-g))
    if gate.situ_beta is None:
        return g * sigmoid * u
    linear = gate.situ_linear_beta
    return gate.situ_beta * np.tanh(g / gate.situ_beta) * sigmoid * linear * np.tanh(u / linear)


def oracle(
    x: np.ndarray, experts: np.ndarray, weights: np.ndarray, gate_up: np.ndarray, down: np.ndarray, gate: Gate
) -> np.ndarray:
    result, inner = np.zeros(x.shape), down.shape[2]
    for m, row in enumerate(experts):
        for j, e in enumerate(row):
            both = gate_up[e] @ x[m]
            result[m] += weights[m, j] * (down[e] @ joined(gate, both[:inner], both[inner:]))
    return result


def draw(dtype: Any, seed: int = 0) -> tuple[np.ndarray, ...]:
    """x, experts, weights and both stacks, of numbers that the dtype holds, as float64."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(jnp.dtype(dtype)).astype(np.float64)

    experts = np.stack([rng.permutation(EXPERTS)[:PER_TOKEN] for _ in range(TOKENS)])
    weights = rng.random((TOKENS, PER_TOKEN)).astype(np.float32).astype(np.float64)
    stacks = normal(EXPERTS, 2 * INNER, WIDTH, scale=0.2), normal(EXPERTS, WIDTH, INNER, scale=0.2)
    return normal(TOKENS, WIDTH, scale=1.0), experts, weights, *stacks


@pytest.fixture(params=["float64", "float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> Any:
    if request.param != "float64":
        yield request.param
        return
    with jax.enable_x64(True):
        yield request.param


@pytest.mark.parametrize("gate", [Gate(), Gate(4.0, 25.0)], ids=["silu", "situ"])
def test_every_token_gets_its_weighted_sum(dtype: Any, gate: Gate) -> None:
    x, experts, weights, gate_up, down = draw(dtype)
    valid = np.arange(TOKENS) % 7 != 3
    given = np.where(valid[:, None], x, np.nan)  # padding may hold anything
    arrays = jnp.asarray(given, dtype), jnp.asarray(experts), jnp.asarray(weights, np.promote_types(dtype, np.float32))
    stacks = jnp.asarray(gate_up, dtype), jnp.asarray(down, dtype)
    got = expert_layer(*arrays, jnp.asarray(valid), *stacks, num_experts=EXPERTS, gate=gate)
    assert got.dtype == dtype
    want = np.where(valid[:, None], oracle(x, experts, weights, gate_up, down, gate), 0)
    got = np.asarray(got).astype(np.float64)
    assert np.linalg.norm(got - want) <= TOLERANCE[dtype] * np.linalg.norm(want)
    np.testing.assert_array_equal(got[~valid], 0)


def test_packed_experts_of_the_second_layer() -> None:
    x, experts, weights, _, _ = draw("float32")
    rng = np.random.default_rng(1)

    def packed(out: int, width: int) -> tuple[Mxfp4, np.ndarray]:
        codes = rng.integers(0, 256, (2 * EXPERTS, out, width // 2), dtype=np.uint8)
        scale = rng.integers(122, 126, (2 * EXPERTS, out, width // 32), dtype=np.uint8)
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(2 * EXPERTS, out, width)
        values = MAGNITUDES[nibbles & 7] * np.where(nibbles >= 8, -1, 1)
        return Mxfp4(jnp.asarray(codes), jnp.asarray(scale)), values * np.repeat(2.0 ** (scale - 127.0), 32, axis=-1)

    (gate_up, all_up), (down, all_down) = packed(2 * INNER, WIDTH), packed(WIDTH, INNER)
    arrays = (
        jnp.asarray(x, jnp.float32),
        jnp.asarray(experts),
        jnp.asarray(weights, jnp.float32),
        jnp.ones(TOKENS, bool),
    )
    run = partial(expert_layer, num_experts=EXPERTS, gate=Gate(4.0, 25.0))
    got = jax.jit(lambda offset: run(*arrays, gate_up, down, group_offset=offset))(jnp.int32(EXPERTS))
    want = oracle(x, experts, weights, all_up[EXPERTS:], all_down[EXPERTS:], Gate(4.0, 25.0))
    assert np.linalg.norm(np.asarray(got) - want) <= 1e-5 * np.linalg.norm(want)


def test_gradients_are_those_of_the_sum() -> None:
    with jax.enable_x64(True):
        x, experts, weights, gate_up, down = draw("float64")
        direction = draw("float64", seed=1)
        valid = jnp.arange(TOKENS) != 5
        parts = [jnp.asarray(part) for part in (x, weights, gate_up, down)]
        along = [jnp.asarray(part) for part in (direction[0], direction[2], direction[3], direction[4])]

        def loss(x: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
            experts_of = jnp.asarray(experts)
            result = expert_layer(x, experts_of, weights, valid, gate_up, down, num_experts=EXPERTS)
            return jnp.sum(jnp.sin(result))

        gradients = jax.grad(loss, (0, 1, 2, 3))(*parts)
        numbers = np.arange(TOKENS)

        def by_definition(step: float, which: int) -> float:
            given = [
                np.asarray(p + step * d if i == which else p) for i, (p, d) in enumerate(zip(parts, along, strict=True))
            ]
            result = oracle(given[0], experts, given[1], given[2], given[3], Gate())
            return float(np.sum(np.sin(result[numbers != 5])))

        for which, gradient in enumerate(gradients):
            want = (by_definition(1e-5, which) - by_definition(-1e-5, which)) / 2e-5
            np.testing.assert_allclose(float(jnp.sum(gradient * along[which])), want, rtol=1e-6)
        np.testing.assert_array_equal(np.asarray(gradients[0][5]), 0)


def test_assignments_are_sorted_and_counted() -> None:
    rng = np.random.default_rng(0)
    sort = jax.jit(partial(sort_by_expert, num_experts=6))
    for experts in (rng.integers(-1, 8, (40, 3)), np.full((40, 3), 2), np.full((40, 3), 6)):
        order, sizes, place = (np.asarray(part) for part in sort(jnp.asarray(experts)))
        flat = np.where((experts < 0) | (experts > 5), 6, experts).reshape(-1)
        np.testing.assert_array_equal(order, np.argsort(flat, kind="stable"))
        np.testing.assert_array_equal(sizes, np.bincount(flat, minlength=7)[:6])
        np.testing.assert_array_equal(order[place.reshape(-1)], np.arange(flat.size))


def test_a_token_does_not_see_the_others() -> None:
    x, experts, weights, gate_up, down = draw("bfloat16")
    stacks = jnp.asarray(gate_up, jnp.bfloat16), jnp.asarray(down, jnp.bfloat16)
    run = jax.jit(
        lambda x, experts, weights, valid: expert_layer(x, experts, weights, valid, *stacks, num_experts=EXPERTS)
    )
    found = []
    for seed in range(3):
        others, routing, mixing, _, _ = draw("bfloat16", seed=seed + 5)
        others[11], routing[11], mixing[11] = x[11], experts[11], weights[11]
        valid = np.random.default_rng(seed).random(TOKENS) < 0.7
        valid[11] = True
        given = jnp.asarray(100 * others, jnp.bfloat16).at[11].set(jnp.asarray(x[11], jnp.bfloat16))
        result = run(given, jnp.asarray(routing), jnp.asarray(mixing, jnp.float32), jnp.asarray(valid))
        found.append(np.asarray(result[11]).astype(np.float64))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize("packed", [False, True])
def test_no_temporary_grows_with_the_experts(packed: bool) -> None:
    # Nothing of experts x rows, and no unpacked weights, in the compiled program, forward and backward.
    tokens, per_token, width, inner = 256, 4, 512, 256
    rows = tokens * per_token

    def temporaries(experts: int) -> int:
        def stack(out: int, width: int) -> Any:
            if not packed:
                return jax.ShapeDtypeStruct((experts, out, width), jnp.float32)
            parts = (experts, out, width // 2), (experts, out, width // 32)
            return Mxfp4(*(jax.ShapeDtypeStruct(part, jnp.uint8) for part in parts))

        def run(x: jax.Array, chosen: jax.Array, weights: jax.Array, gate_up: Any, down: Any) -> Any:
            valid = jnp.ones(tokens, bool)

            def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
                return jnp.sum(expert_layer(x, chosen, weights, valid, gate_up, down, num_experts=experts))

            return jax.value_and_grad(loss, (0, 1))(x, weights)

        x = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
        chosen = jax.ShapeDtypeStruct((tokens, per_token), jnp.int32)
        weights = jax.ShapeDtypeStruct((tokens, per_token), jnp.float32)
        compiled = jax.jit(run).lower(x, chosen, weights, stack(2 * inner, width), stack(width, inner)).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    few, many = temporaries(16), temporaries(64)
    assert many - few < 4 * rows * 8  # bookkeeping of the groups
    assert many < 4 * rows * (8 * width + 6 * inner) + 8 * 4 * 3 * width * inner


def test_no_rows_at_all() -> None:
    gate_up, down = jnp.ones((2, 8, 4)), jnp.ones((2, 4, 4))
    assert expert_mlp(jnp.zeros((0, 4)), gate_up, down, jnp.array([0, 0])).shape == (0, 4)
