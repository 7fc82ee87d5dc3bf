"""KDA over several devices does what it does on one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.parallel.context_kda import kda_from_raw_sharded, kda_sharded
from pallas_kernels.kda import kda
from tests import oracle_kda as oracle
from tests.kimi_jax.parallel.context_mesh import (
    AXIS,
    SIZES,
    TOKENS,
    WHOLE,
    assert_close,
    collectives,
    over_context,
    trace,
)
from tests.kimi_jax.parallel.rows import IDS, LENGTHS, ROWS, TOKENS_IN_ALL, packed_ids, padded

HEADS, WIDTH, VALUES = 2, 8, 4
NAMES = ("q", "k", "v", "g", "beta")


def kda_inputs(rows: int, seed: int, *, decay: float = -0.05, tokens: int = TOKENS_IN_ALL) -> dict[str, np.ndarray]:
    """Slow decay on average, so that states from far away count."""
    rng = np.random.default_rng(seed)
    shape = (rows, tokens, HEADS, WIDTH)

    def unit() -> np.ndarray:
        x = rng.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    inputs = {
        "q": unit(),
        "k": unit(),
        "v": rng.standard_normal((*shape[:3], VALUES)),
        "g": decay * rng.gamma(0.3, 1.0, shape),
        "beta": 0.5 / (1 + np.exp(-rng.standard_normal(shape[:3]))),
        "state": rng.standard_normal((rows, HEADS, WIDTH, VALUES)),
    }
    return {name: x.astype(np.float32) for name, x in inputs.items()}


def recurrence(inputs: Any, state: Any) -> tuple[np.ndarray, np.ndarray]:
    """(o, the states after 0, 1, ... tokens), in float64."""
    return oracle.kda(**inputs, state=state)


def sharded_kda(size: int, **options: Any) -> Any:
    def on_device(inputs: dict[str, Any], state: Any, lengths: Any, ids: Any) -> Any:
        arguments = [inputs[name] for name in NAMES]
        return kda_sharded(*arguments, axis=AXIS, initial_state=state, lengths=lengths, segment_ids=ids, **options)

    return over_context(on_device, size, (TOKENS, WHOLE, WHOLE, TOKENS), (TOKENS, WHOLE))


def split(inputs: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    return {name: inputs[name] for name in NAMES}, inputs["state"]


@pytest.fixture(scope="module")
def by_hand() -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """(o, last state) of every row of LENGTHS by the recurrence, from a state and from zeros."""
    inputs, state = split(kda_inputs(ROWS, 0))
    results = []
    for start in (state, np.zeros_like(state)):
        o, states = recurrence(inputs, start)
        results.append([(o[row, :length], states[length, row]) for row, length in enumerate(LENGTHS)])
    return results


@pytest.mark.parametrize("size", SIZES)
def test_kda_of_rows_of_any_length(size: int, by_hand: list[list[tuple[np.ndarray, np.ndarray]]]) -> None:
    """Lengths that end in any part, at its ends too; NaN behind them; with a state to start from, and zeros."""
    inputs, state = split(kda_inputs(ROWS, 0))
    broken = {name: padded(x, LENGTHS, 0 if name == "g" else np.nan) for name, x in inputs.items()}
    run = sharded_kda(size, gate_lower_bound=-5.0)
    for start, expected in zip((state, np.zeros_like(state)), by_hand, strict=True):
        o, last = run(broken, start, LENGTHS, None)
        for row, length in enumerate(LENGTHS):
            assert np.all(np.asarray(o[row, length:]) == 0)
            if length:
                assert_close(o[row, :length], expected[row][0], 2e-6, f"o of {length} tokens")
                assert_close(last[row], expected[row][1], 2e-6, f"state after {length} tokens")
            else:
                np.testing.assert_array_equal(last[row], start[row])


@pytest.mark.parametrize("size", SIZES)
def test_kda_of_packed_sequences(size: int) -> None:
    """Sequences that end with a part, go on in the next one or several, or lie inside one; slow and fast decay."""
    run = sharded_kda(size)
    for decay in (-0.05, -60.0):
        inputs, _ = split(kda_inputs(ROWS, 1, decay=decay))
        lengths = np.sum(IDS >= 0, axis=1)
        broken = {name: padded(x, lengths, 0 if name == "g" else np.nan) for name, x in inputs.items()}
        o, last = run(broken, None, None, IDS)
        expected = kda(*(jnp.asarray(inputs[name]) for name in NAMES), segment_ids=jnp.asarray(IDS))
        assert_close(o, expected.o, 2e-6, "o")
        assert_close(last, expected.final_state, 2e-6, "state")
        row, (a, b) = 5, (152, 153)  # a sequence of one token at the start of a part starts from nothing
        one = {name: x[row : row + 1, a:b] for name, x in inputs.items()}
        alone, _ = recurrence(one, np.zeros((1, HEADS, WIDTH, VALUES)))
        assert_close(o[row : row + 1, a:b], alone, 2e-6, "one token")


@pytest.mark.parametrize("packed", [False, True])
def test_gradient_of_kda(packed: bool) -> None:
    """Of every float argument, the state included, through the exchange between four devices; none into padding."""
    inputs, state = split(kda_inputs(4, 2, tokens=64))
    ids = packed_ids([[64], [16, 16, 32], [15, 18, 29], [17, 1, 20]], 64) if packed else None
    lengths = np.sum(ids >= 0, axis=1) if ids is not None else np.array([1, 17, 32, 64], np.int32)
    inputs = {name: padded(x, lengths, 0 if name == "g" else np.nan) for name, x in inputs.items()}
    rng = np.random.default_rng(3)
    d_o = rng.standard_normal(inputs["v"].shape).astype(np.float32)
    d_last = rng.standard_normal(state.shape).astype(np.float32)
    start, counts = (None, None) if packed else (state, lengths)
    run = sharded_kda(4, gate_lower_bound=-5.0)

    def sharded(inputs: Any, start: Any) -> jax.Array:
        o, last = run(inputs, start, counts, ids)
        return jnp.sum(o * d_o) + jnp.sum(last * d_last)

    def alone(inputs: Any, start: Any) -> jax.Array:
        result = kda(
            *(inputs[name] for name in NAMES),
            initial_state=start,
            lengths=None if packed else jnp.asarray(counts),
            segment_ids=None if ids is None else jnp.asarray(ids),
            gate_lower_bound=-5.0,
        )
        return jnp.sum(result.o * d_o) + jnp.sum(result.final_state * d_last)

    arguments = jax.tree.map(jnp.asarray, (inputs, start))
    actual, expected = (jax.tree.leaves_with_path(jax.jit(jax.grad(f, (0, 1)))(*arguments)) for f in (sharded, alone))
    for (path, x), (_, y) in zip(actual, expected, strict=True):
        assert_close(x, y, 2e-5, jax.tree_util.keystr(path))


def test_columns_of_the_identity_as_heads() -> None:
    """For kernels whose heads have one width; `xla` stands in for one here."""
    inputs, _ = split(kda_inputs(ROWS, 3))
    rng = np.random.default_rng(1)
    raw = {name: inputs[name] for name in "qk"} | {"raw": rng.standard_normal(inputs["q"].shape).astype(np.float32)}
    raw["v"] = rng.standard_normal(inputs["q"].shape).astype(np.float32)
    raw["beta_logits"] = rng.standard_normal(inputs["beta"].shape).astype(np.float32)
    weights = {"A_log": jnp.full(HEADS, -3.0), "dt_bias": jnp.zeros((HEADS, WIDTH))}
    state = rng.standard_normal((ROWS, HEADS, WIDTH, WIDTH)).astype(np.float32)

    def on_device(raw: dict[str, Any], state: Any, lengths: Any, ids: Any) -> Any:
        options = {"initial_state": state, "lengths": lengths, "gate_lower_bound": -5.0, "implementation": "xla"}
        return kda_from_raw_sharded(**raw, **weights, axis=AXIS, as_heads=True, **options)

    run = over_context(on_device, 4, (TOKENS, WHOLE, WHOLE, TOKENS), (TOKENS, WHOLE))
    o, last = run(raw, state, LENGTHS, None)
    exact = {
        "q": raw["q"],
        "k": raw["k"],
        "v": raw["v"],
        "beta": 1 / (1 + np.exp(-raw["beta_logits"].astype(np.float64))),
    }
    exact["g"] = -5.0 / (1 + np.exp(-np.exp(-3.0) * raw["raw"].astype(np.float64)))
    wanted, states = recurrence({name: exact[name] for name in NAMES}, state)
    for row, length in enumerate(LENGTHS):
        if length:
            assert_close(o[row, :length], wanted[row, :length], 2e-6, f"o of {length} tokens")
        assert_close(last[row], states[length, row], 2e-6, f"state after {length} tokens")


def test_kda_in_other_dtypes() -> None:
    """bfloat16 is rounded once, at the end: as close to the exact result as on one device."""
    inputs, state = split(kda_inputs(2, 4, tokens=64))
    narrow = {name: jnp.asarray(x, jnp.bfloat16 if name in "qkv" else jnp.float32) for name, x in inputs.items()}
    o, last = sharded_kda(4)(narrow, state, None, None)
    assert o.dtype == jnp.bfloat16
    assert last.dtype == jnp.float32
    exact, states = recurrence({name: np.asarray(x, np.float32) for name, x in narrow.items()}, state)
    assert_close(o.astype(jnp.float32), jnp.asarray(exact, jnp.bfloat16).astype(jnp.float32), 2**-8, "o")
    assert_close(last, states[-1], 2e-6, "state")


def test_kda_exchanges_one_pair_for_each_head() -> None:
    """However long the parts are."""
    size, rows = 8, 2
    inputs, state = split(kda_inputs(rows, 0, tokens=128))
    compiled = sharded_kda(size).lower(inputs, state, np.full(rows, 100, np.int32), None).compile()
    assert collectives(compiled) == [("all-gather", 4 * size * rows * HEADS * WIDTH * (WIDTH + VALUES))]


SEVERAL = jnp.ones((1, 4), jnp.int32)
BAD_KDA = {
    "v has shape": (ValueError, {"v": jnp.ones((1, 4, 3, VALUES))}),
    "v has dtype": (TypeError, {"v": jnp.ones((1, 4, HEADS, VALUES), jnp.int32)}),
    "k has shape": (ValueError, {"k": jnp.ones((1, 5, HEADS, WIDTH))}),
    "initial_state has shape": (ValueError, {"initial_state": jnp.ones((1, HEADS, WIDTH, WIDTH))}),
    "initial_state can't be given": (
        ValueError,
        {"initial_state": jnp.ones((1, HEADS, WIDTH, VALUES)), "segment_ids": SEVERAL},
    ),
    "lengths can't be given": (ValueError, {"lengths": jnp.ones(1, jnp.int32), "segment_ids": SEVERAL}),
    "lengths has shape": (ValueError, {"lengths": jnp.ones(2, jnp.int32)}),
    "segment_ids has dtype": (TypeError, {"segment_ids": jnp.ones((1, 4))}),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("message", BAD_KDA)
def test_bad_calls_of_kda(message: str) -> None:
    good = {name: jnp.asarray(x) for name, x in split(kda_inputs(1, 8, tokens=4))[0].items()}
    error, changes = BAD_KDA[message]
    with pytest.raises(error, match=message):
        trace(kda_sharded, good | changes)
