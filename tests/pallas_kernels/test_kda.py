"""KDA against the token recurrence in NumPy float64, for every way to call it and every implementation."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels.dispatch import UnsupportedImplementationError
from pallas_kernels.kda import KdaOutput, gate, kda, kda_from_raw, l2_normalize
from pallas_kernels.kda.specs import SPECS
from tests import oracle_kda as oracle

NAMES = oracle.NAMES
FORMS: dict[str, dict[str, Any]] = {
    "sequential": {"chunk_scan": "sequential"},
    "segments": {"segments": 3},
    "associative": {"chunk_scan": "associative"},
}


def make(
    batch: int,
    length: int,
    heads: int,
    width: int,
    values: int,
    *,
    g: Any = "bounded",
    correlation: float = 0.0,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Random inputs in float32; g is a constant, "bounded" in (-5, 0), or "any" from -50 to -0.001."""
    rng = np.random.default_rng(seed)
    shape = (batch, length, heads, width)

    def unit() -> np.ndarray:
        x = rng.standard_normal(shape) + correlation * np.sqrt(width)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    if isinstance(g, str):
        bounded = -5 / (1 + np.exp(2 - 2 * rng.standard_normal(shape)))
        g = {"bounded": bounded, "any": -np.exp(rng.uniform(np.log(1e-3), np.log(50), shape))}[g]
    inputs = {
        "q": unit(),
        "k": unit(),
        "v": rng.standard_normal((*shape[:3], values)),
        "g": np.broadcast_to(g, shape),
        "beta": 1 / (1 + np.exp(-rng.standard_normal(shape[:3]))),
        "state": rng.standard_normal((batch, heads, width, values)),
    }
    return {name: x.astype(np.float32) for name, x in inputs.items()}


def run(inputs: dict[str, Any], **options: Any) -> KdaOutput:
    """One call; the implementations compile themselves, once per set of shapes and static options."""
    inputs = {name: jnp.asarray(x) for name, x in inputs.items()}
    return kda(*(inputs[name] for name in NAMES[:-1]), initial_state=inputs.get("state"), **options)


STATIC = ("num_segments", "gate_lower_bound", "chunk_size", "chunk_scan", "segments", "implementation", "scale")


@partial(jax.jit, static_argnames=STATIC)
def run_with_gradient(
    inputs: dict[str, jax.Array], d_o: jax.Array, d_last: jax.Array, **options: Any
) -> tuple[KdaOutput, dict[str, jax.Array]]:
    """The result, and the gradient of sum(o * d_o) + sum(final_state * d_last)."""

    def loss(inputs: dict[str, jax.Array]) -> tuple[jax.Array, KdaOutput]:
        result = run(inputs, **options)
        wide = jnp.promote_types(result.o.dtype, jnp.float32)
        return jnp.sum(result.o.astype(wide) * d_o) + jnp.sum(result.final_state * d_last), result

    gradient, result = jax.grad(loss, has_aux=True)(inputs)
    return result, gradient


def assert_close(actual: Any, expected: np.ndarray, tolerance: float, name: str = "", floor: float = 1e-30) -> None:
    """Largest difference, relative to the largest entry or the floor."""
    actual = np.asarray(actual).astype(np.float64)
    assert actual.shape == expected.shape
    scale = np.abs(expected).max()
    assert np.abs(actual - expected).max() <= tolerance * max(scale, floor), (
        name,
        np.abs(actual - expected).max(),
        scale,
    )


def part(inputs: dict[str, np.ndarray], row: int, begin: int, end: int) -> dict[str, np.ndarray]:
    """Tokens begin to end of one row, without the state."""
    return {name: x[row : row + 1, begin:end] for name, x in inputs.items() if name != "state"}


# --- H01: strong decay -----------------------------------------------------------------------------------------------

DECAYS = (-0.01, -1.0, -2.5, -3.0, -5.0, "uniform")


@pytest.mark.parametrize("g", DECAYS)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", -5.0), ("float32", None), ("bfloat16", -5.0)])
def test_strong_decay(dtype: str, bound: float | None, g: Any) -> None:
    if g == "uniform":
        g = np.random.default_rng(1).uniform(-5, 0, (1, 128, 2, 128))
    inputs = make(1, 128, 2, 128, 128, g=g)
    inputs["state"] *= 0.1
    for name in ("q", "k", "v"):
        inputs[name] = np.asarray(jnp.asarray(inputs[name], dtype))
    rng = np.random.default_rng(2)
    d_o, d_last = rng.standard_normal((1, 128, 2, 128)), rng.standard_normal((1, 2, 128, 128))

    result, gradient = run_with_gradient(inputs, np.float32(d_o), np.float32(d_last), gate_lower_bound=bound)

    o, states = oracle.kda(**inputs)
    expected = oracle.kda_gradient(inputs, np.float32(d_o), np.float32(d_last))
    exact = dtype == "float32"
    assert result.o.dtype == dtype
    assert result.final_state.dtype == jnp.float32
    assert_close(result.o, o, 1e-5 if exact else 1e-2, "o")
    assert_close(result.final_state, states[-1], 1e-5, "final_state")
    for name in NAMES:
        assert_close(gradient[name], expected[name], 2e-5 if exact else 2e-2, name)
    if isinstance(g, float) and g == -5.0:
        # Nearly no memory: what a token reads is what it wrote.
        memoryless = oracle.kda(**{**inputs, "g": np.full_like(inputs["g"], -1e3)})[0]
        written = np.sum(np.float64(inputs["q"]) * np.float64(inputs["k"]), -1) * inputs["beta"]
        assert_close(memoryless, 128**-0.5 * written[..., None] * np.float64(inputs["v"]), 1e-12)
        assert_close(result.o, memoryless, 0.02)


@pytest.mark.parametrize("g", [-20.0, -50.0, "any"])
def test_gate_without_bound(g: Any) -> None:
    inputs = make(1, 130, 2, 16, 8, g=g, correlation=1.0)
    o, states = oracle.kda(**inputs)
    result = run(inputs)
    assert_close(result.o, o, 2e-6, "o")
    assert_close(result.final_state, states[-1], 2e-6, "final_state")


@pytest.mark.parametrize(
    ("form", "bound"), [("sequential", -5.0), ("sequential", None), ("segments", None), ("associative", None)]
)
def test_slow_decay_over_a_long_horizon(form: str, bound: float | None) -> None:
    """Keys that resemble each other and hardly decay, where powers of L would grow beyond all digits."""
    inputs = make(1, 2100, 2, 16, 8, g=-0.001, correlation=2.0)
    # The worst case for the inverse, one key for all tokens: L is full of ones.
    inputs["k"][:, :, 1] = inputs["k"][:, :1, 1]
    inputs["beta"][:, :, 1] = 1 - 1e-6
    o, states = oracle.kda(**inputs)
    result = run(inputs, gate_lower_bound=bound, **FORMS[form])
    for head in range(2):
        assert_close(result.o[:, :, head], o[:, :, head], 1e-5, "o")
        assert_close(result.final_state[:, head], states[-1, :, head], 1e-5, "final_state")


def test_lowest_bound_of_the_single_reference() -> None:
    inputs = make(1, 128, 2, 128, 16, g=-5.5)
    o, states = oracle.kda(**inputs)
    result = run(inputs, gate_lower_bound=-5.5)
    assert_close(result.o, o, 2e-6, "o")
    assert_close(result.final_state, states[-1], 2e-6, "final_state")


# --- H02: packed sequences -------------------------------------------------------------------------------------------

PACKINGS = ((63, 65), (1, 127), (64, 64), (127, 1), (5, 3, 120), (20, 0, 60))
LENGTH, SEQUENCES = 128, 3


def segment_ids(lengths: tuple[int, ...]) -> np.ndarray:
    ids = np.repeat(np.arange(len(lengths)), lengths)
    return np.concatenate([ids, np.full(LENGTH - len(ids), -1)])[None].astype(np.int32)


def packed(seed: int = 0, heads: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    inputs = make(1, LENGTH, heads, 8, 8, g=rng.uniform(-5, -4, (1, LENGTH, heads, 8)), seed=seed)
    inputs["state"] = rng.standard_normal((1, SEQUENCES, heads, 8, 8)).astype(np.float32)
    return inputs


PACKED_RUNS = {
    "xla": {"gate_lower_bound": -5.0},
    "xla, segments": {"gate_lower_bound": -5.0, "segments": 4},
    "xla, associative": {"gate_lower_bound": -5.0, "chunk_scan": "associative"},
    "reference": {"implementation": "reference"},
}


@pytest.mark.parametrize("options", PACKED_RUNS.values(), ids=PACKED_RUNS)
def test_packed_sequences_are_runs_of_their_own(options: dict[str, Any]) -> None:
    inputs = packed()
    for lengths in PACKINGS:
        ids = segment_ids(lengths)
        result = run(inputs, segment_ids=jnp.asarray(ids), num_segments=SEQUENCES, **options)
        begin = 0
        for i, length in enumerate(lengths):
            own = part(inputs, 0, begin, begin + length)
            o, states = (
                oracle.kda(**own, state=inputs["state"][:, i]) if length else (own["v"], inputs["state"][None, :, i])
            )
            assert_close(result.o[:, begin : begin + length], o, 2e-6, "o") if length else None
            assert_close(result.final_state[:, i], states[-1], 2e-6, "final_state")
            begin += length
        assert not np.any(result.o[:, begin:])
        for i in range(len(lengths), SEQUENCES):
            np.testing.assert_array_equal(result.final_state[:, i], inputs["state"][:, i])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_packed_sequences_without_states(implementation: str) -> None:
    inputs = packed()
    del inputs["state"]
    for lengths in PACKINGS:
        ids = segment_ids(lengths)
        result = run(inputs, segment_ids=jnp.asarray(ids), gate_lower_bound=-5.0, implementation=implementation)
        begin = 0
        for length in filter(None, lengths):
            o, states = oracle.kda(**part(inputs, 0, begin, begin + length), state=np.zeros((1, 16, 8, 8)))
            assert_close(result.o[:, begin : begin + length], o, 2e-6, "o")
            begin += length
        assert_close(result.final_state, states[-1], 2e-6, "final_state")
        assert not np.any(result.o[:, begin:])


@pytest.mark.parametrize("num_segments", [SEQUENCES, None])
def test_a_packed_sequence_does_not_touch_the_others(num_segments: int | None) -> None:
    inputs, others = packed(0), packed(1)
    if num_segments is None:
        del inputs["state"], others["state"]
    for lengths in PACKINGS:
        ids = segment_ids(lengths)
        for changed in range(len(lengths)):
            mixed = {}
            for name, x in inputs.items():
                where = np.arange(SEQUENCES) == changed if name == "state" else ids[0] == changed
                mixed[name] = np.where(where.reshape(1, -1, *(1,) * (x.ndim - 2)), others[name], x)
            options = {"segment_ids": jnp.asarray(ids), "num_segments": num_segments, "gate_lower_bound": -5.0}
            before, after = run(inputs, **options), run(mixed, **options)
            kept = ids[0] != changed
            np.testing.assert_array_equal(before.o[:, kept], after.o[:, kept])
            if num_segments is not None:
                kept = np.arange(SEQUENCES) != changed
                np.testing.assert_array_equal(before.final_state[:, kept], after.final_state[:, kept])


@pytest.mark.parametrize("num_segments", [SEQUENCES, None])
def test_gradient_of_packed_sequences(num_segments: int | None) -> None:
    inputs = packed(heads=2)
    lengths = (5, 3, 110)
    if num_segments is None:
        del inputs["state"]
    rng = np.random.default_rng(3)
    d_o = rng.standard_normal(inputs["v"].shape).astype(np.float32)
    d_last = rng.standard_normal((1, *(() if num_segments is None else (SEQUENCES,)), 2, 8, 8)).astype(np.float32)
    _, gradient = run_with_gradient(
        inputs, d_o, d_last, segment_ids=segment_ids(lengths), num_segments=num_segments, gate_lower_bound=-5.0
    )
    begin = 0
    for i, length in enumerate(lengths):
        own = part(inputs, 0, begin, begin + length)
        if num_segments is None:
            own["state"] = np.zeros((1, 2, 8, 8))
            d_state = d_last if i == len(lengths) - 1 else np.zeros_like(d_last)
        else:
            own["state"], d_state = inputs["state"][:, i], d_last[:, i]
        expected = oracle.kda_gradient(own, d_o[:, begin : begin + length], d_state)
        for name in NAMES[:-1]:
            assert_close(gradient[name][:, begin : begin + length], expected[name], 3e-5, name)
        if num_segments is not None:
            assert_close(gradient["state"][:, i], expected["state"], 1e-5, "state")
        begin += length
    for name in NAMES[:-1]:
        assert not np.any(gradient[name][:, begin:])


# --- H03, H08, H22: lengths ------------------------------------------------------------------------------------------

STORED = 129
LENGTHS = np.array([1, 2, 63, 64, 65, 127, 129], np.int32)


def ragged(filler: float, lengths: np.ndarray = LENGTHS, length: int = STORED, heads: int = 2) -> dict[str, np.ndarray]:
    inputs = make(len(lengths), length, heads, 8, 8)
    padding = np.arange(length) >= lengths[:, None]
    for name in NAMES[:-1]:
        inputs[name][padding] = filler
    return inputs


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("fresh", [False, True])
def test_any_length_then_decode(fresh: bool, implementation: str) -> None:
    inputs = ragged(np.nan)
    if fresh:
        inputs["state"] *= 0
    options = {"gate_lower_bound": -5.0, "implementation": implementation}
    prefill = run(inputs, lengths=jnp.asarray(LENGTHS), **options)
    shorter = run(inputs, lengths=jnp.asarray(LENGTHS - 1), **options)
    rows = np.arange(len(LENGTHS))
    last = {name: inputs[name][rows, LENGTHS - 1][:, None] for name in NAMES[:-1]}
    joined = run(last | {"state": shorter.final_state}, **options)
    assert_close(joined.final_state, np.float64(prefill.final_state), 2e-6, "prefill(T-1) + decode(1)")
    assert_close(joined.o[:, 0], np.float64(np.asarray(prefill.o)[rows, LENGTHS - 1]), 2e-6, "prefill(T-1) + decode(1)")

    tokens = make(len(LENGTHS), 8, 2, 8, 8, seed=5)
    state, decoded = prefill.final_state, []
    for t in range(8):
        step = run({name: tokens[name][:, t : t + 1] for name in NAMES[:-1]} | {"state": state}, **options)
        state = step.final_state
        decoded.append(step.o)

    for row, length in enumerate(LENGTHS):
        first, second = part(inputs, row, 0, length), part(tokens, row, 0, 8)
        whole = {name: np.concatenate([first[name], second[name]], axis=1) for name in first}
        o, states = oracle.kda(**whole, state=inputs["state"][row : row + 1])
        assert_close(prefill.o[row : row + 1, :length], o[:, :length], 2e-6, "o")
        assert_close(prefill.final_state[row : row + 1], states[length], 2e-6, "state after prefill")
        assert_close(jnp.concatenate(decoded, axis=1)[row : row + 1], o[:, length:], 5e-6, "decode")
        assert_close(state[row : row + 1], states[-1], 5e-6, "state after decode")
        assert not np.any(prefill.o[row, length:])


@pytest.mark.parametrize("length", [65, 1])
def test_padding_reaches_nothing(length: int) -> None:
    lengths = np.minimum(LENGTHS, length)
    lengths[0] = 0
    rng = np.random.default_rng(0)
    d_o = rng.standard_normal((len(lengths), length, 1, 8)).astype(np.float32)
    d_last = rng.standard_normal((len(lengths), 1, 8, 8)).astype(np.float32)
    padding = np.arange(length) >= lengths[:, None]

    def outcome(filler: float) -> tuple[KdaOutput, dict[str, jax.Array]]:
        return run_with_gradient(
            ragged(filler, lengths, length, 1), d_o, d_last, lengths=lengths, gate_lower_bound=-5.0
        )

    clean, clean_gradient = outcome(0.0)
    np.testing.assert_array_equal(clean.final_state[0], ragged(0.0, lengths, length, 1)["state"][0])
    for filler in (np.nan, 1e30, -np.inf):
        result, gradient = outcome(filler)
        np.testing.assert_array_equal(result.o, clean.o)
        np.testing.assert_array_equal(result.final_state, clean.final_state)
        assert not np.any(np.asarray(result.o)[padding])
        for name in NAMES:
            np.testing.assert_array_equal(gradient[name], clean_gradient[name])
            if name != "state":
                assert not np.any(np.asarray(gradient[name])[padding])


def test_rows_do_not_depend_on_their_neighbours() -> None:
    lengths = np.array([1, 3, 12, 64, 65, 64, 64, 64], np.int32)
    inputs = make(8, 65, 2, 8, 8)
    for name in NAMES:
        inputs[name][5:] = inputs[name][3]
    together = run(inputs, lengths=jnp.asarray(lengths), gate_lower_bound=-5.0)
    for copy in (5, 6, 7):
        np.testing.assert_array_equal(together.o[copy], together.o[3])

    backwards = {name: x[::-1] for name, x in inputs.items()}
    reverse = run(backwards, lengths=jnp.asarray(lengths[::-1]), gate_lower_bound=-5.0)
    np.testing.assert_array_equal(reverse.o[::-1], together.o)
    np.testing.assert_array_equal(reverse.final_state[::-1], together.final_state)

    for row in range(5):
        only = np.where(np.arange(8) == row, lengths, 0)
        alone = run(inputs, lengths=jnp.asarray(only), gate_lower_bound=-5.0)
        np.testing.assert_array_equal(alone.o[row], together.o[row])
        np.testing.assert_array_equal(alone.final_state[row], together.final_state[row])

    # Another batch size is another compiled shape: low bits may differ.
    single = run({name: x[3:4] for name, x in inputs.items()}, lengths=jnp.asarray(lengths[3:4]), gate_lower_bound=-5.0)
    assert_close(single.o[0], np.float64(together.o[3]), 1e-6)


# --- H11: several tokens on a filled state ----------------------------------------------------------------------------


def test_any_split_of_a_sequence() -> None:
    inputs = make(2, 53, 2, 8, 8, g=-0.01)
    o, states = oracle.kda(**inputs)

    def tokens(begin: int, end: int, state: jax.Array) -> KdaOutput:
        piece = {name: inputs[name][:, begin:end] for name in NAMES[:-1]}
        return run(piece | {"state": state}, gate_lower_bound=-5.0)

    filled = tokens(0, 37, jnp.asarray(inputs["state"])).final_state
    for split in ((16,), (1,) * 16, (5, 11), (3, 3, 10)):
        state, begin = filled, 37
        for count in split:
            result = tokens(begin, begin + count, state)
            assert_close(result.o, o[:, begin : begin + count], 1e-5, f"{split}")
            state, begin = result.final_state, begin + count
        assert_close(state, states[-1], 1e-5, f"{split}")


# --- states on the way -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"implementation": "reference"}])
def test_states_at_positions(options: dict[str, Any]) -> None:
    inputs = make(3, 130, 2, 8, 8)
    lengths = np.array([130, 70, 0], np.int32)
    positions = np.array([[64, 0, 1, 130, 129, 64, 70], [70, 69, 3, 64, 0, 63, 17], [0, 0, 0, 0, 0, 0, 0]], np.int32)
    o, states = oracle.kda(**inputs)
    for name in NAMES[:-1]:
        inputs[name][np.arange(130) >= lengths[:, None]] = np.nan

    result = run(inputs, lengths=jnp.asarray(lengths), state_positions=jnp.asarray(positions), **options)
    assert result.states is not None
    for row, length in enumerate(lengths):
        assert_close(result.o[row, :length], o[row, :length], 2e-6, "o") if length else None
        assert not np.any(result.o[row, length:])
        assert_close(result.final_state[row], states[length, row], 2e-6, "final_state")
        assert_close(result.states[row], states[positions[row], row], 2e-6, "states")
    np.testing.assert_array_equal(result.states[1, 4], inputs["state"][1])
    # Past the end of a row lies its last state.
    past = run(inputs, lengths=jnp.asarray(lengths), state_positions=jnp.asarray(positions + 200), **options)
    assert past.states is not None
    assert_close(past.states[:, 0], np.float64(past.final_state), 1e-6)


def test_gradient_through_states_at_positions() -> None:
    inputs = make(1, 70, 2, 8, 8)
    positions = (17, 64)
    weights = np.random.default_rng(0).standard_normal((1, 2, 2, 8, 8)).astype(np.float32)

    def loss(inputs: dict[str, jax.Array]) -> jax.Array:
        states = run(inputs, state_positions=jnp.asarray([positions])).states
        assert states is not None
        return jnp.sum(states * weights)

    gradient = jax.grad(loss)({name: jnp.asarray(x) for name, x in inputs.items()})
    expected = {name: np.zeros(x.shape) for name, x in inputs.items()}
    for i, position in enumerate(positions):
        own = part(inputs, 0, 0, position) | {"state": inputs["state"]}
        for name, x in oracle.kda_gradient(own, np.zeros_like(own["v"]), weights[:, i]).items():
            expected[name][:, : x.shape[1]] += x
    for name in NAMES:
        assert_close(gradient[name], expected[name], 1e-5, name)


# --- H24: gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("lengths", [(1,), (63, 65, 130)])
def test_gradients_equal_central_differences(lengths: tuple[int, ...], bound: float | None) -> None:
    """Through the gate too, with a loss on everything and with one on the final states alone."""
    rows, longest = len(lengths), max(lengths)
    rng = np.random.default_rng(longest)
    inputs: dict[str, np.ndarray] = dict(make(rows, longest, 1, 4, 4))
    del inputs["g"]
    inputs["raw"] = rng.standard_normal((rows, longest, 1, 4)) + (1.0 if bound else -2.0)
    inputs["A_log"] = rng.uniform(0, 1, (1,))
    inputs["dt_bias"] = rng.uniform(0, 1, (1, 4))
    inputs = {name: x.astype(np.float32) for name, x in inputs.items()}
    d_last = rng.standard_normal((rows, 1, 4, 4)).astype(np.float32)

    @jax.jit
    @jax.grad
    def gradient_of(inputs: dict[str, jax.Array], d_o: jax.Array) -> jax.Array:
        g = gate(inputs["raw"], inputs["A_log"], inputs["dt_bias"], bound)
        result = run({**inputs, "g": g}, gate_lower_bound=bound, lengths=jnp.asarray(lengths))
        return jnp.sum(result.o * d_o) + jnp.sum(result.final_state * d_last)

    for weight in (1.0, 0.0):
        d_o = weight * rng.standard_normal((rows, longest, 1, 4)).astype(np.float32)
        gradient = gradient_of(inputs, d_o)
        shared = {name: np.zeros(inputs[name].shape) for name in ("A_log", "dt_bias")}
        for row, length in enumerate(lengths):
            own = {n: x[row, :length] for n, x in inputs.items() if n not in shared and n != "state"}
            own |= {"state": inputs["state"][row]} | {name: inputs[name] for name in shared}
            d_own, d_state = d_o[row, :length], d_last[row]
            for name, x in own.items():

                def value(
                    copies: np.ndarray, name: str = name, own: Any = own, d_own: Any = d_own, d_state: Any = d_state
                ) -> np.ndarray:
                    every = {n: np.broadcast_to(y, (len(copies), *y.shape)) for n, y in own.items()} | {name: copies}
                    g = oracle.gate(every["raw"], every["A_log"][:, None], every["dt_bias"][:, None], bound)
                    o, states = oracle.kda(**{n: every[n] for n in NAMES if n != "g"}, g=g)
                    return np.sum(o * d_own, axis=(1, 2, 3)) + np.sum(states[-1] * d_state, axis=(1, 2, 3))

                expected = oracle.central_differences(value, x)
                if name in shared:
                    shared[name] += expected
                else:
                    actual = gradient[name][row] if name == "state" else gradient[name][row, :length]
                    assert_close(actual, expected, 1e-4, name, floor=1e-4)
        for name, expected in shared.items():
            assert_close(gradient[name], expected, 1e-4, name, floor=1e-4)
        for name, x in gradient.items():
            assert np.all(np.isfinite(x)), name


def test_the_oracles_agree() -> None:
    """The gradient by hand is that of the recurrence."""
    inputs = {name: np.float64(x) for name, x in make(1, 5, 1, 3, 2).items()}
    rng = np.random.default_rng(0)
    d_o, d_last = rng.standard_normal((1, 5, 1, 2)), rng.standard_normal((1, 1, 3, 2))
    by_hand = oracle.kda_gradient(inputs, d_o, d_last)
    for name, x in inputs.items():

        def value(copies: np.ndarray, name: str = name) -> np.ndarray:
            every = {n: np.broadcast_to(y, (len(copies), *y.shape))[:, 0] for n, y in inputs.items()}
            o, states = oracle.kda(**(every | {name: copies[:, 0]}))
            return np.sum(o * d_o, axis=(1, 2, 3)) + np.sum(states[-1] * d_last, axis=(1, 2, 3))

        assert_close(by_hand[name], oracle.central_differences(value, x), 1e-8, name)


# --- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [-5.0, None])
def test_a_token_changes_no_bit_of_the_past(bound: float | None) -> None:
    inputs, others = make(1, 130, 16, 8, 8), make(1, 130, 16, 8, 8, g=-4.0, seed=1)
    before = run(inputs, gate_lower_bound=bound)
    for t in (0, 1, 7, 8, 15, 16, 17, 63, 64, 100, 129):
        for names in (NAMES[:-1], ("g",)):
            changed = {name: x.copy() for name, x in inputs.items()}
            for name in names:
                changed[name][:, t] = others[name][:, t]
            after = run(changed, gate_lower_bound=bound)
            np.testing.assert_array_equal(after.o[:, :t], before.o[:, :t])
            assert np.any(np.asarray(after.o[:, t:]) != np.asarray(before.o[:, t:]))


@pytest.mark.parametrize(
    ("form", "bound", "heads"), [("sequential", -5.0, 16), ("segments", None, 2), ("associative", None, 2)]
)
def test_float64_to_its_own_precision(form: str, bound: float | None, heads: int) -> None:
    inputs = {name: np.float64(x) for name, x in make(1, 300, heads, 4, 3, g=-0.01, correlation=1.0).items()}
    rng = np.random.default_rng(0)
    d_o, d_last = rng.standard_normal((1, 300, heads, 3)), rng.standard_normal((1, heads, 4, 3))
    o, states = oracle.kda(**inputs)
    expected = oracle.kda_gradient(inputs, d_o, d_last)
    with jax.enable_x64(True):
        result, gradient = run_with_gradient(inputs, d_o, d_last, gate_lower_bound=bound, **FORMS[form])
        assert result.o.dtype == result.final_state.dtype == jnp.float64
        assert_close(result.o, o, 1e-12, "o")
        assert_close(result.final_state, states[-1], 1e-12, "final_state")
        for name in NAMES:
            assert_close(gradient[name], expected[name], 1e-12, name)
        result = run(inputs, implementation="reference")
        assert_close(result.o, o, 1e-13, "o")
        assert_close(result.final_state, states[-1], 1e-13, "final_state")


def test_gradient_of_the_reference() -> None:
    inputs = make(1, 100, 2, 8, 8, g=-0.02)
    rng = np.random.default_rng(0)
    d_o = rng.standard_normal((1, 100, 2, 8)).astype(np.float32)
    d_last = rng.standard_normal((1, 2, 8, 8)).astype(np.float32)
    expected = oracle.kda_gradient(inputs, d_o, d_last)
    _, gradient = run_with_gradient(inputs, d_o, d_last, implementation="reference")
    for name in NAMES:
        assert_close(gradient[name], expected[name], 1e-5, name)


@pytest.mark.parametrize("chunk_size", [16, 48, 128])
def test_chunk_sizes_agree(chunk_size: int) -> None:
    inputs = make(1, 200, 2, 8, 8, g=-0.02)
    o, states = oracle.kda(**inputs)
    result = run(inputs, chunk_size=chunk_size)
    assert_close(result.o, o, 5e-6, "o")
    assert_close(result.final_state, states[-1], 5e-6, "final_state")


def test_memory_of_the_gradient_is_that_of_arguments_and_results() -> None:
    inputs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in make(1, 4096, 4, 32, 32).items()}
    size = 4 * sum(np.prod(x.shape) for x in inputs.values())

    def loss(inputs: dict[str, jax.Array]) -> jax.Array:
        return jnp.sum(run(inputs, gate_lower_bound=-5.0).o ** 2)

    memory = jax.jit(jax.grad(loss)).lower(inputs).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2.5 * size


def test_scale_and_widths() -> None:
    inputs = make(1, 20, 1, 8, 5)
    o, states = oracle.kda(**inputs, scale=0.3)
    result = run(inputs, scale=0.3)
    assert_close(result.o, o, 1e-6)
    assert_close(result.final_state, states[-1], 1e-6)


@pytest.mark.parametrize("options", [*FORMS.values(), {"implementation": "reference"}])
def test_inside_shard_map(options: dict[str, Any]) -> None:
    """Heads over a mesh axis, with an argument that all devices share: it traces, gradient included."""
    inputs = make(1, 70, 2, 8, 8)
    shared = inputs.pop("state")
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    by_head = jax.sharding.PartitionSpec(None, None, "heads")

    @partial(jax.shard_map, mesh=mesh, in_specs=(by_head, jax.sharding.PartitionSpec()), out_specs=by_head)
    def sharded(inputs: dict[str, jax.Array], shared: jax.Array) -> jax.Array:
        return run(inputs | {"state": shared}, gate_lower_bound=-5.0, **options).o

    def loss(inputs: dict[str, jax.Array], shared: jax.Array) -> jax.Array:
        return jnp.sum(sharded(inputs, shared))

    gradient = jax.eval_shape(jax.grad(loss, argnums=1), inputs, shared)
    assert gradient.shape == shared.shape


# --- gate and norm ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [-5.0, None])
def test_gate(bound: float | None) -> None:
    rng = np.random.default_rng(0)
    raw = np.concatenate(
        [rng.standard_normal((2, 5, 3, 4)), np.full((2, 1, 3, 4), 60.0), np.full((2, 1, 3, 4), -60.0)], 1
    )
    a_log, dt_bias = rng.uniform(0, 2, (3,)), rng.uniform(-1, 1, (3, 4))
    arguments = [jnp.asarray(x, jnp.float32) for x in (raw, a_log, dt_bias)]
    g = gate(*arguments, bound)
    np.testing.assert_allclose(g, oracle.gate(*arguments, bound), rtol=1e-5, atol=1e-30)
    assert np.all(np.asarray(g) <= 0)
    assert gate(arguments[0].astype(jnp.bfloat16), *arguments[1:], bound).dtype == jnp.float32
    gradients = jax.grad(lambda *x: jnp.sum(gate(*x, bound)), argnums=(0, 1, 2))(*arguments)
    assert all(np.all(np.isfinite(x)) for x in gradients)


def test_l2_normalize_adds_eps_to_the_sum() -> None:
    x = np.array([[3e-3, 4e-3], [0.0, 0.0], [30.0, 40.0]], np.float32)
    expected = x / np.sqrt(np.sum(np.float64(x) ** 2, -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(l2_normalize(jnp.asarray(x)), expected, rtol=1e-6)
    assert l2_normalize(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.float32


# --- the call --------------------------------------------------------------------------------------------------------


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the shape checks that tests switch on: a user doesn't have them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


BAD_CALLS = {
    "k has shape": (ValueError, {"k": jnp.ones((2, 9, 2, 8))}),
    "v has shape": (ValueError, {"v": jnp.ones((2, 8, 3, 4))}),
    "g has shape": (ValueError, {"g": jnp.ones((2, 8, 2))}),
    "beta has shape": (ValueError, {"beta": jnp.ones((2, 8))}),
    "q has dtype": (TypeError, {"q": jnp.ones((2, 8, 2, 8), jnp.int32)}),
    "g has dtype bfloat16": (TypeError, {"g": jnp.ones((2, 8, 2, 8), jnp.bfloat16)}),
    "beta has dtype bfloat16": (TypeError, {"beta": jnp.ones((2, 8, 2), jnp.bfloat16)}),
    "initial_state has shape": (ValueError, {"initial_state": jnp.ones((2, 2, 4, 8))}),
    "state_dtype is int32": (TypeError, {"state_dtype": jnp.int32}),
    "initial_state has dtype": (TypeError, {"initial_state": jnp.ones((2, 2, 8, 4), jnp.int32)}),
    "lengths has shape": (ValueError, {"lengths": jnp.ones((3,), jnp.int32)}),
    "lengths has dtype": (TypeError, {"lengths": jnp.ones((2,))}),
    "segment_ids has shape": (ValueError, {"segment_ids": jnp.ones((2, 9), jnp.int32)}),
    "lengths can't be given": (
        ValueError,
        {"segment_ids": jnp.ones((2, 8), jnp.int32), "lengths": jnp.ones((2,), jnp.int32)},
    ),
    "state_positions can't be given": (
        ValueError,
        {"segment_ids": jnp.ones((2, 8), jnp.int32), "state_positions": jnp.ones((2, 1), jnp.int32)},
    ),
    "needs num_segments": (
        ValueError,
        {"segment_ids": jnp.ones((2, 8), jnp.int32), "initial_state": jnp.ones((2, 2, 8, 4))},
    ),
    "no segment_ids for it": (ValueError, {"num_segments": 2}),
    "num_segments is 0": (ValueError, {"segment_ids": jnp.ones((2, 8), jnp.int32), "num_segments": 0}),
    "state_positions has shape": (ValueError, {"state_positions": jnp.ones((8,), jnp.int32)}),
    "state_positions has dtype": (TypeError, {"state_positions": jnp.ones((2, 1))}),
    "scale is 0": (ValueError, {"scale": 0.0}),
    "gate_lower_bound is 0": (ValueError, {"gate_lower_bound": 0.0}),
    "chunk_size is 40": (ValueError, {"chunk_size": 40}),
    "chunk_scan is": (ValueError, {"chunk_scan": "parallel"}),
    "segments is 0": (ValueError, {"segments": 0}),
    "segments is 2, and": (ValueError, {"segments": 2, "chunk_scan": "associative"}),
    "no TPU kernel": (UnsupportedImplementationError, {"implementation": "tpu"}),
    "kernels run on NVIDIA Hopper GPUs": (UnsupportedImplementationError, {"implementation": "gpu"}),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_calls_are_refused(message: str) -> None:
    error, change = BAD_CALLS[message]
    shape = (2, 8, 2, 8)
    arguments: dict[str, Any] = {
        "q": jnp.ones(shape),
        "k": jnp.ones(shape),
        "v": jnp.ones((2, 8, 2, 4)),
        "g": -jnp.ones(shape),
        "beta": jnp.ones(shape[:3]),
    }
    with pytest.raises(error, match=message):
        kda(**(arguments | change))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_states_are_kept_in_the_dtype_asked_for(implementation: Any) -> None:
    inputs = {name: jnp.asarray(x) for name, x in make(1, 20, 2, 8, 8).items()}
    state = inputs.pop("state").astype(jnp.bfloat16)
    options = {"state_positions": jnp.asarray([[7]]), "implementation": implementation}
    kept = kda(**inputs, initial_state=state, state_dtype=jnp.bfloat16, **options)
    exact = kda(**inputs, initial_state=state.astype(jnp.float32), **options)
    assert kept.final_state.dtype == jnp.bfloat16
    assert kept.states is not None
    assert exact.states is not None
    np.testing.assert_array_equal(kept.o, exact.o)
    np.testing.assert_array_equal(kept.final_state, exact.final_state.astype(jnp.bfloat16))
    np.testing.assert_array_equal(kept.states, exact.states.astype(jnp.bfloat16))
    numbers = {"A_log": jnp.zeros(2), "dt_bias": jnp.zeros((2, 8))}
    q, k, v, g, beta = (inputs[name] for name in ("q", "k", "v", "g", "beta"))
    raw = kda_from_raw(q, k, v, g, beta, **numbers, initial_state=state, state_dtype=jnp.bfloat16)
    wide = kda_from_raw(q, k, v, g, beta, **numbers, initial_state=state.astype(jnp.float32))
    np.testing.assert_array_equal(raw.final_state, wide.final_state.astype(jnp.bfloat16))


@pytest.mark.usefixtures("unchecked")
def test_bad_gates_are_refused() -> None:
    raw = jnp.ones((1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"lower_bound is 1\.0"):
        gate(raw, jnp.ones(3), jnp.ones((3, 4)), 1.0)
    with pytest.raises(ValueError, match="dt_bias"):
        gate(raw, jnp.ones(3), jnp.ones((4, 4)), None)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_real_shapes_trace(spec: Any) -> None:
    result = jax.eval_shape(partial(kda, **spec.options()), **spec.arguments())
    assert result.o.shape == (spec.batch, spec.tokens, spec.heads, spec.width)
    assert result.o.dtype == spec.dtype
    assert result.final_state.dtype == jnp.float32
    assert result.final_state.shape == spec.arguments()["initial_state"].shape
