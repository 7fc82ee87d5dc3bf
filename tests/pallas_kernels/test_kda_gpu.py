"""KDA's Hopper prefill, interpreted on a CPU or lowered for a GPU that isn't there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedImplementationError
from pallas_kernels.kda import gate, gpu, gpu_prefill, kda, kda_from_raw, l2_normalize, xla
from pallas_kernels.kda.gpu_prefill import plan
from tests import oracle_kda as oracle

WIDTH = 128
SCALE = WIDTH**-0.5
BOUND = -5.0
BF16 = jnp.dtype("bfloat16")
CLOSE = 0.005  # root mean square of the error, relative to that of the result


def interpreter() -> Any:
    """What Pallas takes to run a Mosaic GPU kernel on a CPU; private before jax 0.11."""
    public = getattr(plgpu, "InterpretGPUParams", None)
    if public is not None:
        return public()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def draw(batch: int, length: int, heads: int, sequences: int | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    """What a layer's projections could give, as numbers that bfloat16 holds, and a state."""
    rng = np.random.default_rng(seed)
    shape = (batch, length, heads, WIDTH)
    raw = {name: rng.standard_normal(shape).astype(BF16) for name in ("q", "k", "v", "g")}
    states = (batch, *(() if sequences is None else (sequences,)), heads, WIDTH, WIDTH)
    return raw | {
        "beta": rng.standard_normal(shape[:3]).astype(BF16),
        "A_log": rng.uniform(0, 1, heads).astype(np.float32),
        "dt_bias": rng.uniform(-2, 1, (heads, WIDTH)).astype(np.float32),
        "initial_state": 0.1 * rng.standard_normal(states).astype(np.float32),
    }


def interpreted(inputs: dict[str, Any], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    how = {"lengths": None, "segment_ids": None, "num_segments": None, "scale": SCALE, "gate_lower_bound": BOUND}
    arrays = {name: jnp.asarray(x) for name, x in inputs.items()}
    o, state = gpu.kda(**arrays, **(how | options), interpret=interpreter())
    return np.asarray(o.astype(jnp.float32)), np.asarray(state)


def oracle_inputs(inputs: dict[str, np.ndarray], bound: float | None = BOUND) -> dict[str, np.ndarray]:
    """The arguments of the recurrence in float64."""
    q, k, v, raw, beta, a_log, bias, state = (np.asarray(x).astype(np.float64) for x in inputs.values())
    q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    rate, z = np.exp(a_log)[:, None], raw + bias
    g = -rate * np.logaddexp(0, z) if bound is None else bound / (1 + np.exp(-rate * z))
    return {"q": q, "k": k, "v": v, "g": g, "beta": 1 / (1 + np.exp(-beta)), "state": state}


def error(actual: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt(np.sum((actual - wanted) ** 2) / np.sum(wanted**2)))


def recurrence(inputs: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(o, the state after all tokens)."""
    q, k, v, g, beta, state = (inputs[name] for name in oracle.NAMES)
    o, states = oracle.kda(q, k, v, g, beta, state)
    return o, states[-1]


LENGTHS = [70, 33]


@pytest.fixture(scope="module")
def rows() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Two rows of 70 and 33 tokens, NaN behind them, and the result."""
    inputs = draw(2, 70, 1)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][1, 33:] = np.nan
    return inputs, *interpreted(inputs, lengths=jnp.asarray(LENGTHS))


def test_rows_follow_the_recurrence(rows: Any) -> None:
    inputs, o, state = rows
    for row, length in enumerate(LENGTHS):
        part = {name: x[row : row + 1] if x.shape[0] == 2 else x for name, x in inputs.items()}
        part = {name: x[:, :length] if name in ("q", "k", "v", "g", "beta") else x for name, x in part.items()}
        want, last = recurrence(oracle_inputs(part))
        assert error(o[row, :length], want[0]) < CLOSE
        assert error(state[row], last[0]) < CLOSE
    np.testing.assert_array_equal(o[1, 33:], 0)


def test_earlier_tokens_and_other_rows_keep_their_bits(rows: Any) -> None:
    inputs, o, state = rows
    changed = {name: x.copy() for name, x in inputs.items()}
    for name in ("q", "k", "v", "g", "beta"):
        changed[name][0, 41:] = draw(1, 70, 1, seed=5)[name][0, 41:]
    other, last = interpreted(changed, lengths=jnp.asarray(LENGTHS))
    np.testing.assert_array_equal(other[0, :41], o[0, :41])
    assert np.any(other[0, 41:] != o[0, 41:])
    np.testing.assert_array_equal(other[1], o[1])
    np.testing.assert_array_equal(last[1], state[1])


def test_packed_sequences_do_not_meet() -> None:
    sizes, sequences = {0: 20, 2: 66}, 3  # sequence 1 has no token, and 9 tokens pad the row
    ids = np.repeat([*sizes, -1], [*sizes.values(), 9])[None]
    inputs = draw(1, ids.size, 1, sequences, seed=1)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, -9:] = np.nan
    o, state = interpreted(inputs, segment_ids=jnp.asarray(ids, jnp.int32), num_segments=sequences)
    for sequence in range(sequences):
        mine = ids[0] == sequence
        part = {name: x[:, mine] if name in ("q", "k", "v", "g", "beta") else x for name, x in inputs.items()}
        part["initial_state"] = inputs["initial_state"][:, sequence]
        if not mine.any():
            np.testing.assert_array_equal(state[:, sequence], part["initial_state"])
            continue
        want, last = recurrence(oracle_inputs(part))
        assert error(o[:, mine], want) < CLOSE
        assert error(state[:, sequence], last) < CLOSE
    np.testing.assert_array_equal(o[:, ids[0] < 0], 0)


def test_given_decay_without_a_bound() -> None:
    inputs = draw(1, 40, 1, seed=2)
    rng = np.random.default_rng(3)
    decay = -np.exp(rng.uniform(np.log(1e-3), np.log(200), inputs["g"].shape)).astype(np.float32)
    unit = {name: np.asarray(l2_normalize(jnp.asarray(inputs[name])).astype(BF16)) for name in "qk"}
    beta = rng.uniform(0, 1, inputs["beta"].shape).astype(np.float32)
    state = inputs["initial_state"]
    given = {**unit, "v": inputs["v"], "g": decay, "beta": beta}
    o, last = interpreted({**given, "initial_state": state}, gate_lower_bound=None)
    want, wanted = recurrence({name: x.astype(np.float64) for name, x in {**given, "state": state}.items()})
    assert error(o, want) < CLOSE
    assert error(last, wanted) < CLOSE


def test_keys_that_resemble_each_other_and_decay_slowly() -> None:
    # The inverse of the chunk's triangle cancels most of what it is applied to.
    inputs = draw(1, 128, 1, seed=4)
    rng = np.random.default_rng(5)
    q, k = (rng.standard_normal(inputs["k"].shape) + 2.0 for _ in range(2))
    unit = [(x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(BF16) for x in (q, k)]
    decay = -0.01 * rng.uniform(0.5, 1, inputs["g"].shape).astype(np.float32)
    beta = rng.uniform(0.5, 1, inputs["beta"].shape).astype(np.float32)
    given = dict(zip("qkv", (*unit, inputs["v"]), strict=True)) | {"g": decay, "beta": beta}
    o, last = interpreted({**given, "initial_state": inputs["initial_state"]})
    wide = {name: x.astype(np.float64) for name, x in {**given, "state": inputs["initial_state"]}.items()}
    want, wanted = recurrence(wide)
    assert error(o, want) < CLOSE
    assert error(last, wanted) < CLOSE


def test_rows_of_one_length() -> None:
    inputs = draw(2, 40, 1, seed=9)
    o, state = interpreted(inputs)
    want, last = recurrence(oracle_inputs(inputs))
    assert error(o, want) < CLOSE
    assert error(state, last) < CLOSE


def test_chunks_begin_where_sequences_begin() -> None:
    ids = np.repeat([[1, 2, 4, -1], [0, 2, 5, -1]], [[70, 1, 64, 65], [0, 200, 0, 0]][0], axis=1)[:1]
    work = plan(1, 200, None, jnp.asarray(ids, jnp.int32), 6)
    tokens, parts = np.asarray(work.tokens), np.asarray(work.parts)
    written = np.zeros(200, int)
    for sequence, (begin, count) in enumerate(parts.T):
        seen = []
        for row, first, start, end, own in tokens[:, begin : begin + count].T:
            assert row == 0
            assert first % 8 == 0
            assert end in (0, own)
            assert 0 <= start <= own <= 64
            seen += range(first + start, first + end)
            written[first + start : first + own] += 1
        assert seen == [*np.flatnonzero(ids[0] == sequence)]
    np.testing.assert_array_equal(written, 1)


def test_gradients_are_those_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {name: jnp.asarray(x) for name, x in draw(1, 5, 1, seed=6).items()}
    weight = np.random.default_rng(7).standard_normal((1, 5, 1, WIDTH))
    how = {"lengths": None, "segment_ids": None, "num_segments": None, "scale": SCALE, "gate_lower_bound": BOUND}

    def plain(*arrays: Any, initial_state: Any, interpret: Any = None, **how: Any) -> Any:
        q, k, v, raw, beta, a_log, bias = arrays
        g, strength = gate(raw, a_log, bias, BOUND), jax.nn.sigmoid(beta.astype(jnp.float32))
        more = {"state_positions": None, "chunk_size": None, "chunk_scan": "sequential"}
        how = more | how
        return xla.kda(l2_normalize(q), l2_normalize(k), v, g, strength, initial_state=initial_state, **how)

    def loss(o: jax.Array, state: jax.Array) -> jax.Array:
        return jnp.sum(o.astype(jnp.float32) * weight) + jnp.sum(state)

    def directly(inputs: dict[str, Any]) -> jax.Array:
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
        return loss(*plain(*(inputs[name] for name in names), initial_state=inputs["initial_state"], **how)[:2])

    monkeypatch.setattr(gpu_prefill, "kda", plain)
    got, want = (
        jax.grad(lambda inputs: loss(*gpu.kda(**inputs, **how, gradient="xla")))(inputs),
        jax.grad(directly)(inputs),
    )
    for name, x in want.items():
        np.testing.assert_array_equal(np.asarray(got[name], float), np.asarray(x, float), err_msg=name)


@pytest.mark.parametrize("heads", [12, 96])
def test_it_lowers_for_a_gpu_that_is_not_here(heads: int) -> None:
    token = jax.ShapeDtypeStruct((1, 256, heads, WIDTH), BF16)
    numbers = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((heads,), (heads, WIDTH))]

    def run(q: Any, k: Any, v: Any, g: Any, beta: Any, a_log: Any, bias: Any) -> Any:
        how = {"lengths": None, "segment_ids": None, "num_segments": None, "scale": SCALE, "gate_lower_bound": BOUND}
        return gpu.kda(q, k, v, g, beta, a_log, bias, initial_state=None, **how)

    arguments = (*(token,) * 4, jax.ShapeDtypeStruct(token.shape[:3], BF16), *numbers)
    lowered = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_a_shard_of_the_heads() -> None:
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    heads = jax.sharding.PartitionSpec(None, None, "heads")
    rest = [jax.sharding.PartitionSpec(*parts) for parts in (("heads",), ("heads",), (None, "heads"))]
    token = jax.ShapeDtypeStruct((1, 128, 2, WIDTH), BF16)
    shapes = ((2,), (2, WIDTH), (1, 2, WIDTH, WIDTH))
    arguments = (*(token,) * 4, jax.ShapeDtypeStruct(token.shape[:3], BF16))
    arguments = (*arguments, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))

    def run(*arrays: Any) -> Any:
        how = {"lengths": None, "segment_ids": None, "num_segments": None, "scale": SCALE, "gate_lower_bound": BOUND}
        return gpu.kda(*arrays[:-1], initial_state=arrays[-1], **how)

    split = jax.shard_map(run, mesh=mesh, in_specs=(*(heads,) * 5, *rest), out_specs=(heads, rest[-1]))

    def loss(*arrays: Any) -> jax.Array:
        return jnp.sum(split(*arrays)[0].astype(jnp.float32))

    assert jax.eval_shape(jax.grad(loss), *arguments).shape == token.shape
    lowered = jax.jit(split).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_from_raw_is_its_formula() -> None:
    inputs = [jnp.asarray(x) for x in draw(1, 20, 2, seed=8).values()]
    q, k, v, raw, beta, a_log, bias, state = inputs
    got = kda_from_raw(*inputs[:-1], initial_state=state, gate_lower_bound=BOUND, implementation="xla")
    g, strength = gate(raw, a_log, bias, BOUND), jax.nn.sigmoid(beta.astype(jnp.float32))
    want = kda(
        l2_normalize(q),
        l2_normalize(k),
        v,
        g,
        strength,
        initial_state=state,
        gate_lower_bound=BOUND,
        implementation="xla",
    )
    np.testing.assert_array_equal(np.asarray(got.o, float), np.asarray(want.o, float))
    np.testing.assert_array_equal(got.final_state, want.final_state)


def test_what_it_cannot_do_is_said() -> None:
    q, k, v, raw, beta, a_log, bias, state = (jnp.asarray(x) for x in draw(1, 5, 1).values())
    options: dict[str, Any] = {"segment_ids": None, "num_segments": None}

    def named(**changed: Any) -> dict[str, Any]:
        return options | changed

    floats = {"g": gate(raw, a_log, bias, BOUND), "initial_state": state}
    assert gpu.unfit(q, k, v, floats, **options) is None
    assert "dtype float32" in str(gpu.unfit(q.astype(jnp.float32), k, v, floats, **options))
    assert "V=64" in str(gpu.unfit(q, k, v[..., :64], floats, **options))
    assert "num_segments" in str(gpu.unfit(q, k, v, floats, **named(segment_ids=jnp.zeros((1, 5), jnp.int32))))
    assert "chunk_size is 32" in str(gpu.unfit(q, k, v, floats, **options, chunk_size=32))
    assert "'associative'" in str(gpu.unfit(q, k, v, floats, **options, chunk_scan="associative"))
    with pytest.raises(ValueError, match="segments is 0"):
        kda_from_raw(q, k, v, raw, beta, a_log, bias, segments=0)
    with pytest.raises(ValueError, match="gate_lower_bound is 5"):
        kda_from_raw(q, k, v, raw, beta, a_log, bias, gate_lower_bound=5.0)
    with pytest.raises(UnsupportedImplementationError, match="the platform is 'cpu'"):
        kda_from_raw(q, k, v, raw, beta, a_log, bias, gate_lower_bound=BOUND, implementation="gpu")
