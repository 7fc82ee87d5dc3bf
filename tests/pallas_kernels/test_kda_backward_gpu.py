"""The gradient of KDA's Hopper prefill, interpreted on a CPU or lowered for a GPU that isn't there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import gpu, gpu_prefill
from pallas_kernels.kda.gpu_backward import Inputs, gradients
from tests import oracle_kda as oracle
from tests.pallas_kernels.test_kda_gpu import BF16, BOUND, SCALE, WIDTH, draw, error, interpreter, oracle_inputs

CLOSE = {"q": 0.008, "k": 0.008, "v": 0.008, "initial_state": 0.008, "g": 0.02, "beta": 0.02, "dt_bias": 0.02}


HOW = {"lengths": None, "segment_ids": None, "num_segments": None, "scale": SCALE, "gate_lower_bound": BOUND}
TOKENS = ("q", "k", "v", "g", "beta")


def cotangents(inputs: dict[str, np.ndarray], seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    d_o = rng.standard_normal(inputs["v"].shape).astype(BF16)
    return d_o, rng.standard_normal(inputs["initial_state"].shape).astype(np.float32)


def through_projections(inputs: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """From the recurrence's gradient to that of what a layer's projections give, in float64."""
    unit = oracle_inputs(inputs)
    wide = {name: np.asarray(x, np.float64) for name, x in inputs.items()}
    result = {"v": found["v"], "initial_state": found["state"]}
    for name in "qk":
        size = np.sqrt(np.sum(wide[name] ** 2, axis=-1, keepdims=True) + 1e-6)
        along = np.sum(unit[name] * found[name], axis=-1, keepdims=True)
        result[name] = (found[name] - unit[name] * along) / size
    rate, z = np.exp(wide["A_log"])[:, None], wide["g"] + wide["dt_bias"]
    s = 1 / (1 + np.exp(-rate * z))
    slope = found["g"] * BOUND * s * (1 - s) * rate
    result |= {"g": slope, "dt_bias": slope.sum(axis=(0, 1)), "A_log": (slope * z).sum(axis=(0, 1, 3))}
    result["beta"] = found["beta"] * unit["beta"] * (1 - unit["beta"])
    return result


def test_packed_sequences_from_what_a_layer_projects(monkeypatch: pytest.MonkeyPatch) -> None:
    # The gradient doesn't look at the result, which takes long to interpret.
    monkeypatch.setattr(gpu_prefill, "kda", lambda *arrays, initial_state, **how: (arrays[2], initial_state, None))
    sizes, sequences = {0: 20, 2: 66}, 3  # sequence 1 has no token, and 2 tokens pad the row
    ids = np.repeat([*sizes, -1], [*sizes.values(), 2])[None]
    inputs = draw(1, ids.size, 1, sequences, seed=1)
    d_o, d_last = cotangents(inputs, 2)
    for x in (*(inputs[name] for name in TOKENS), d_o):
        x[:, -2:] = np.nan

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        how = HOW | {"segment_ids": jnp.asarray(ids, jnp.int32), "num_segments": sequences}
        return gpu.kda(**arrays, **how, gradient="kernels", interpret=interpreter())

    pull = jax.vjp(run, {name: jnp.asarray(x) for name, x in inputs.items()})[1]
    got = {name: np.asarray(x, np.float64) for name, x in pull((jnp.asarray(d_o), jnp.asarray(d_last)))[0].items()}
    want = {name: np.zeros(x.shape) for name, x in inputs.items()}
    for sequence in range(sequences):
        mine = ids[0] == sequence
        if not mine.any():
            want["initial_state"][:, sequence] = d_last[:, sequence]
            continue
        part = {name: x[:, mine] if name in TOKENS else x for name, x in inputs.items()}
        part["initial_state"] = inputs["initial_state"][:, sequence]
        found = oracle.kda_gradient(oracle_inputs(part), d_o[:, mine], d_last[:, sequence])
        for name, x in through_projections(part, found).items():
            if name in TOKENS:
                want[name][:, mine] = x
            elif name == "initial_state":
                want[name][:, sequence] = x
            else:
                want[name] += x
    for name, close in CLOSE.items():
        assert error(got[name], want[name]) < close, name
    np.testing.assert_allclose(got["A_log"], want["A_log"], rtol=0.05)
    for name in TOKENS:
        np.testing.assert_array_equal(got[name][:, -2:], 0)


def test_given_decays_from_hardly_any_to_all() -> None:
    length = 65
    rng = np.random.default_rng(3)
    inputs = draw(1, length + 1, 1, seed=4)
    for name in "qk":
        x = inputs[name].astype(np.float64)
        inputs[name] = (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(BF16)
    slow = np.arange(WIDTH) % 2 == 1
    inputs["g"] = (np.where(slow, -0.01, -5) * rng.uniform(0.9, 1, inputs["g"].shape)).astype(np.float32)
    inputs["beta"] = rng.uniform(0, 1, inputs["beta"].shape).astype(np.float32)
    inputs["beta"][0, 30] = 0.0
    d_o, d_last = cotangents(inputs, 5)
    arrays = {name: jnp.asarray(x) for name, x in inputs.items()} | {"A_log": None, "dt_bias": None}
    how = HOW | {"lengths": jnp.asarray([length])}
    found = gradients(Inputs(**arrays), jnp.asarray(d_o), jnp.asarray(d_last), **how, interpret=interpreter())
    got = {name: np.asarray(x, np.float64) for name, x in found._asdict().items() if x is not None}
    part = {name: inputs[name][:, :length] for name in TOKENS} | {"state": inputs["initial_state"]}
    want = oracle.kda_gradient(part, d_o[:, :length], d_last)
    for name in TOKENS:
        assert error(got[name][:, :length], want[name]) < CLOSE[name], name
        np.testing.assert_array_equal(got[name][:, length:], 0)
    for which in (slow, ~slow):
        assert error(got["g"][:, :length, :, which], want["g"][..., which]) < CLOSE["g"]
    assert error(got["initial_state"], want["state"]) < CLOSE["initial_state"]


def test_it_lowers_for_a_gpu_that_is_not_here() -> None:
    token = jax.ShapeDtypeStruct((1, 256, 2, WIDTH), BF16)
    numbers = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2,), (2, WIDTH), (1, 2, WIDTH, WIDTH))]

    def loss(*arrays: Any) -> jax.Array:
        o, state = gpu.kda(*arrays[:-1], initial_state=arrays[-1], **HOW, gradient="kernels")
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(state)

    arguments = (*(token,) * 4, jax.ShapeDtypeStruct(token.shape[:3], BF16), *numbers)
    lowered = jax.jit(jax.grad(loss, argnums=tuple(range(8)))).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 6


@pytest.mark.parametrize("bound", [None, -6.0])
def test_kernels_of_the_gradient_want_a_bounded_gate(bound: float | None) -> None:
    x, how = jnp.zeros((1, 1, 1, 128), jnp.bfloat16), HOW | {"gate_lower_bound": bound}
    with pytest.raises(ValueError, match=r"gate_lower_bound is .*at least -5\.5"):
        gpu.kda(x, x, x, x, x[..., 0], initial_state=None, **how, gradient="kernels")


def test_kernels_of_the_gradient_know_no_states_on_the_way() -> None:
    x, how = jnp.zeros((1, 1, 1, 128), jnp.bfloat16), HOW | {"state_positions": jnp.zeros((1, 1), jnp.int32)}
    with pytest.raises(ValueError, match="state_positions"):
        gpu.kda_with_states(x, x, x, x, x[..., 0], initial_state=None, **how, gradient="kernels")


@pytest.mark.parametrize(
    ("bound", "forced", "raw", "kernels"),
    [
        (BOUND, None, True, True),
        (BOUND, None, False, False),
        (BOUND, "kernels", False, True),
        (BOUND, "xla", True, False),
        (None, None, True, False),
        (-6.0, None, True, False),
        (-6.0, "xla", False, False),
    ],
)
def test_the_gradient_takes_kernels_where_they_can_run(
    bound: float | None, forced: Any, raw: bool, kernels: bool
) -> None:
    token = jax.ShapeDtypeStruct((1, 64, 1, WIDTH), BF16)

    def loss(*arrays: Any) -> jax.Array:
        o, state = gpu.kda(*arrays, initial_state=None, **(HOW | {"gate_lower_bound": bound}), gradient=forced)
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(state)

    wide = BF16 if raw else jnp.float32
    arguments = (*(token,) * 3, jax.ShapeDtypeStruct(token.shape, wide), jax.ShapeDtypeStruct(token.shape[:3], wide))
    if raw:
        arguments = (*arguments, *(jax.ShapeDtypeStruct(sizes, jnp.float32) for sizes in ((1,), (1, WIDTH))))
    program = jax.jit(jax.grad(loss)).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert ("kda_pairs" in program) == kernels


@pytest.mark.parametrize(
    ("bound", "states", "raw", "said"),
    [
        (BOUND, False, True, "has kernels"),
        (BOUND, False, False, "that of xla: with decays computed beforehand"),
        (None, False, True, "that of xla: gate_lower_bound is None"),
        (BOUND, True, True, "positions"),
    ],
)
def test_what_is_said_of_the_gradient(bound: float | None, states: bool, raw: bool, said: str) -> None:
    assert said in gpu.gradient_in_words(bound, states, raw)
