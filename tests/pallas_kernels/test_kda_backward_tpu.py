"""The gradient of KDA's TPU prefill: interpreted against the recurrence's in float64, compiled for TPUs that aren't there.

Interpreted memory starts as NaN and is watched for races.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.planning import topology_devices
from pallas_kernels.kda import kda, tpu
from tests import oracle_kda as oracle
from tests.pallas_kernels.test_kda import assert_close, make, part
from tests.pallas_kernels.test_kda_tpu import INTERPRET, assert_rms, rounded, watched

TOKENS = ("q", "k", "v", "g", "beta")
SCALE = 128**-0.5
CLOSE = {"q": 0.008, "k": 0.008, "v": 0.008, "g": 0.02, "beta": 0.02, "state": 0.008}
"""The tolerances of the public Triton kernels in bfloat16."""

shape_of = jax.ShapeDtypeStruct


@partial(jax.jit, static_argnames=("num_segments", "bound", "segments"))
def gradient(
    arrays: dict[str, jax.Array],
    d_o: jax.Array,
    d_last: jax.Array,
    segment_ids: jax.Array | None = None,
    lengths: jax.Array | None = None,
    *,
    num_segments: int | None = None,
    bound: float | None = -5.0,
    segments: int = 1,
) -> dict[str, jax.Array]:
    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return tpu.kda(
            *(arrays[name] for name in TOKENS),
            initial_state=arrays["state"],
            lengths=lengths,
            segment_ids=segment_ids,
            num_segments=num_segments,
            scale=SCALE,
            gate_lower_bound=bound,
            chunk_size=None,
            segments=segments,
            interpret=INTERPRET,
        )[:2]

    return jax.vjp(run, arrays)[1]((d_o, d_last))[0]


def drawn(batch: int, length: int, heads: int, dtype: str = "float32") -> tuple[dict[str, Any], Any, Any]:
    inputs = rounded(make(batch, length, heads, 128, 128), dtype)
    rng = np.random.default_rng(length)
    d_o = np.array(jnp.asarray(rng.standard_normal(inputs["v"].shape), dtype))
    return inputs, d_o, rng.standard_normal(inputs["state"].shape).astype(np.float32)


def expected(inputs: dict[str, Any], d_o: Any, d_last: Any) -> dict[str, np.ndarray]:
    return oracle.kda_gradient({name: np.float64(x) for name, x in inputs.items()}, d_o, d_last, scale=SCALE)


def placed(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", -5.0), ("bfloat16", None)])
def test_gradient_of_two_chunks_and_a_bit(dtype: str, bound: float | None) -> None:
    inputs, d_o, d_last = drawn(1, 130, 2, dtype)
    found = gradient(placed(inputs), placed(d_o), placed(d_last), bound=bound)
    want = expected(inputs, d_o, d_last)
    for name, x in want.items():
        got = watched(found[name].astype(jnp.float32))
        if dtype == "float32":
            assert_close(got, x, 1e-4, name)
        else:
            assert_rms(got, x, CLOSE[name])


@pytest.mark.parametrize("level", [-5.0, -0.001, 0.0])
def test_gradient_at_constant_decay(level: float) -> None:
    inputs, d_o, d_last = drawn(1, 130, 2)
    inputs["g"] = np.full_like(inputs["g"], level)
    found = gradient(placed(inputs), placed(d_o), placed(d_last))
    for name, x in expected(inputs, d_o, d_last).items():
        assert_close(watched(found[name]), x, 1e-4, name)


def test_gradient_of_packed_sequences_with_nan_behind_them() -> None:
    sizes = (63, 0, 4, 60)
    ids = np.repeat([0, 2, 3, -1], [63, 4, 60, 3])[None]
    inputs, d_o, _ = drawn(1, 130, 8)
    rng = np.random.default_rng(5)
    states, d_states = (rng.standard_normal((1, 4, 8, 128, 128)).astype(np.float32) / 4 for _ in range(2))
    for x in (*(inputs[name] for name in TOKENS), d_o):
        x[:, -3:] = np.nan
    given = placed(inputs | {"state": states})
    found = gradient(given, placed(d_o), placed(d_states), jnp.asarray(ids, jnp.int32), num_segments=4)
    start = 0
    for sequence, size in enumerate(sizes):
        if not size:
            assert_close(watched(found["state"][:, sequence]), d_states[:, sequence], 0, "state")
            continue
        own = part(inputs, 0, start, start + size) | {"state": states[:, sequence]}
        want = expected(own, d_o[:, start : start + size], d_states[:, sequence])
        for name in TOKENS:
            assert_close(watched(found[name][:, start : start + size]), want[name], 1e-4, name)
        assert_close(watched(found["state"][:, sequence]), want["state"], 1e-4, "state")
        start += size
    for name in TOKENS:
        assert not np.any(watched(found[name][:, start:]))


def test_gradient_of_packed_sequences_without_states() -> None:
    ids = np.repeat([0, 1, 2, -1], [63, 4, 60, 3])[None]
    inputs, d_o, d_last = drawn(1, 130, 2)
    found = gradient(placed(inputs), placed(d_o), placed(0 * d_last), jnp.asarray(ids, jnp.int32))
    nothing = np.zeros_like(inputs["state"])
    for begin, end in ((0, 63), (63, 67), (67, 127)):
        want = expected(part(inputs, 0, begin, end) | {"state": nothing}, d_o[:, begin:end], nothing)
        for name in TOKENS:
            got = watched(found[name][:, begin:end])
            # The first token forgets whatever was before it, and its own decay with that.
            scale = np.abs(want[name]).max()
            assert np.abs(got - want[name])[:, int(name == "g") :].max() < 1e-4 * scale, name
    for name in TOKENS:
        assert not np.any(watched(found[name][:, 127:]))


def test_rows_of_their_own_lengths() -> None:
    inputs, d_o, d_last = drawn(2, 70, 1)
    found = gradient(placed(inputs), placed(d_o), placed(d_last), lengths=jnp.asarray([70, 0]))
    want = expected({name: x[:1] for name, x in inputs.items()}, d_o[:1], d_last[:1])
    for name, x in want.items():
        assert_close(watched(found[name][:1]), x, 1e-4, name)
    assert not any(np.any(watched(found[name][1:])) for name in TOKENS)
    assert_close(watched(found["state"][1:]), d_last[1:], 0, "state")


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("topology", "heads", "length"),
    [("v5e:2x2", 32, 8192), slow("v5p:2x2x2", 32, 8192), slow("v6e:2x2", 96, 8192), slow("tpu7x:2x2x1", 12, 8000)],
)
def test_gradient_compiles_without_more_than_the_states_between_chunks(topology: str, heads: int, length: int) -> None:
    sharding = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])

    def array(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return shape_of(sizes, dtype, sharding=sharding)

    tokens = array(1, length, heads, 128)
    state = array(1, heads, 128, 128, dtype=jnp.float32)
    given = (tokens, tokens, tokens, array(1, length, heads, 128, dtype=jnp.float32))
    given = (*given, array(1, length, heads, dtype=jnp.float32), state)

    def run(given: Any, cotangents: Any) -> Any:
        def forward(*x: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = kda(*x[:5], initial_state=x[5], gate_lower_bound=-5.0, implementation="tpu")
            return found.o, found.final_state

        return jax.vjp(forward, *given)[1](cotangents)

    compiled = jax.jit(run).lower(given, (tokens, state)).compile()
    memory = compiled.memory_analysis()
    between = -(-length // 64) * heads * 128 * 128 * 4
    own = memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert memory.temp_size_in_bytes < between + own / 16
    assert memory.temp_size_in_bytes < own
