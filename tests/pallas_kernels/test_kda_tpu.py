"""The TPU kernels of KDA: interpreted against the token recurrence in NumPy float64, and compiled for TPUs that aren't there.

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
from pallas_kernels.kda import kda, tpu, tpu_decode
from pallas_kernels.kda.specs import SPECS, KdaSpec
from pallas_kernels.target import traced_for
from tests import oracle_kda as oracle
from tests.pallas_kernels.test_kda import PACKINGS, SEQUENCES, assert_close, make, part, segment_ids

NAMES = oracle.NAMES
INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
FLOAT32 = 1e-5  # ten times better than the gate of 1e-4
BY_NAME = {spec.name: spec for spec in SPECS}
RMS = 0.005  # the tolerance of the public Triton kernels in bfloat16


def run(inputs: dict[str, Any], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """(o, final_state) of the interpreted kernel; o in float32 for NumPy's sake."""
    arrays = {name: jnp.asarray(x) for name, x in inputs.items()}
    options = {
        "initial_state": arrays.pop("state", None),
        "lengths": None,
        "segment_ids": None,
        "num_segments": None,
        "scale": inputs["q"].shape[-1] ** -0.5,
        "gate_lower_bound": -5.0,
        "chunk_size": None,
        "interpret": INTERPRET,
    } | options
    o, state, _ = tpu.kda(**arrays, **options)
    assert o.dtype == arrays["v"].dtype
    assert state.dtype == jnp.float32
    return watched(o.astype(jnp.float32)), watched(state)


def watched(x: jax.Array) -> np.ndarray:
    """Its value, once the kernel has run without a race."""
    value = np.asarray(x)
    assert interpreter.races is not None
    assert not interpreter.races.races_found
    return value


def rounded(inputs: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    return {name: np.array(jnp.asarray(x, dtype)) if name in "qkv" else x for name, x in inputs.items()}


def assert_rms(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    error = np.sqrt(np.mean((np.float64(actual) - expected) ** 2) / np.mean(expected**2))
    assert error < tolerance, error


def assert_right(dtype: str, actual: tuple[np.ndarray, np.ndarray], o: np.ndarray, state: np.ndarray) -> None:
    if dtype == "float32":
        assert_close(actual[0], o, FLOAT32, "o")
        assert_close(actual[1], state, FLOAT32, "final_state")
    else:
        assert_rms(actual[0], o, RMS)
        assert_close(actual[0], o, 1e-2, "o")
        # Nothing that leads to the state is rounded to bfloat16.
        assert_close(actual[1], state, 1e-4, "final_state")


# --- H01: strong decay -----------------------------------------------------------------------------------------------

MODES = [
    ("float32", -5.0),
    ("float32", None),
    ("bfloat16", -5.0),
    pytest.param("bfloat16", None, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("dtype", "bound"), MODES)
def test_decays(dtype: str, bound: float | None) -> None:
    uniform = np.random.default_rng(1).uniform(-5, 0, (1, 128, 2, 128))
    for g in (-0.01, -1.0, -2.5, -3.0, -5.0, uniform, *(() if bound else (-20.0, "any"))):
        inputs = make(1, 128, 2, 128, 128, g=g)
        inputs["state"] *= 0.1
        inputs = rounded(inputs, dtype)
        result = run(inputs, gate_lower_bound=bound)
        o, states = oracle.kda(**inputs)
        assert_right(dtype, result, o, states[-1])
        if isinstance(g, float) and g == -5.0:
            # Nearly no memory: what a token reads is what it wrote.
            written = np.sum(np.float64(inputs["q"]) * np.float64(inputs["k"]), -1) * inputs["beta"]
            memoryless = 128**-0.5 * written[..., None] * np.float64(inputs["v"])
            assert np.abs(result[0] - memoryless)[:, 1:].max() < 0.02 * np.abs(memoryless).max()


@pytest.mark.parametrize(("dtype", "bound"), MODES)
def test_keys_that_resemble_each_other(dtype: str, bound: float | None) -> None:
    """Where powers of L would grow beyond all digits; the second head has one key for all tokens."""
    inputs = make(1, 128, 2, 128, 128, g=-0.001, correlation=2.0)
    inputs["k"][:, :, 1] = inputs["k"][:, :1, 1]
    inputs["beta"][:, :, 1] = 1 - 1e-6
    inputs = rounded(inputs, dtype)
    o, states = oracle.kda(**inputs)
    result = run(inputs, gate_lower_bound=bound)
    for head in range(2):
        assert_right(dtype, (result[0][:, :, head], result[1][:, head]), o[:, :, head], states[-1][:, head])


@pytest.mark.parametrize(("dtype", "bound"), MODES)
def test_a_token_changes_no_bit_of_the_past(dtype: str, bound: float | None) -> None:
    inputs, others = (rounded(make(1, 128, 2, 128, 128, seed=seed), dtype) for seed in (0, 1))
    before, _ = run(inputs, gate_lower_bound=bound)
    for t in (0, 1, 8, 15, 16, 63, 64, 100, 127):
        changed = {name: x.copy() for name, x in inputs.items()}
        for name in NAMES[:-1]:
            changed[name][:, t] = others[name][:, t]
        after, _ = run(changed, gate_lower_bound=bound)
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert np.any(after[:, t:] != before[:, t:])


@pytest.mark.slow
def test_long_horizon() -> None:
    inputs = rounded(make(1, 2048, 1, 128, 128, g=-0.001), "bfloat16")
    o, states = oracle.kda(**inputs)
    assert_right("bfloat16", run(inputs), o, states[-1])


# --- H02: packed sequences -------------------------------------------------------------------------------------------


def packed(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    inputs = make(1, 128, 2, 8, 8, g=rng.uniform(-5, -4, (1, 128, 2, 8)), seed=seed)
    inputs["state"] = rng.standard_normal((1, SEQUENCES, 2, 8, 8)).astype(np.float32)
    return inputs


@pytest.mark.parametrize("num_segments", [SEQUENCES, None])
def test_packed_sequences(num_segments: int | None) -> None:
    inputs, others = packed(0), packed(1)
    if num_segments is None:
        inputs["state"] *= 0
        others["state"] *= 0

    def packed_run(inputs: dict[str, np.ndarray], ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if num_segments is None:
            inputs = {name: x for name, x in inputs.items() if name != "state"}
        return run(inputs, segment_ids=jnp.asarray(ids), num_segments=num_segments)

    for lengths in (*PACKINGS, (0, 0, 64), (0, 128, 0), (0, 0, 0)):
        ids = segment_ids(lengths)
        for name in NAMES[:-1]:
            # A padding's values are anything.
            inputs[name] = np.where((ids < 0).reshape(1, -1, *(1,) * (inputs[name].ndim - 2)), np.nan, packed(0)[name])
        o, final = packed_run(inputs, ids)
        begin = 0
        for i, length in enumerate(lengths):
            state = inputs["state"][:, i]
            if length:
                own, states = oracle.kda(**part(inputs, 0, begin, begin + length), state=state)
                assert_close(o[:, begin : begin + length], own, FLOAT32, "o")
                state = states[-1]
            if num_segments is not None:
                assert_close(final[:, i], np.float64(state), FLOAT32, "final_state")
            elif length and begin + length == sum(lengths):
                assert_close(final, state, FLOAT32, "final_state")
            begin += length
        assert not np.any(o[:, begin:])
        for i in range(len(lengths), SEQUENCES):
            if num_segments is not None:
                np.testing.assert_array_equal(final[:, i], inputs["state"][:, i])

        # The first sequence that has tokens becomes another one: no bit of the others changes.
        if not any(lengths):
            continue
        changed = next(i for i, length in enumerate(lengths) if length)
        mixed = {}
        for name, x in inputs.items():
            where = np.arange(SEQUENCES) == changed if name == "state" else ids[0] == changed
            mixed[name] = np.where(where.reshape(1, -1, *(1,) * (x.ndim - 2)), others[name], x)
        after, last = packed_run(mixed, ids)
        np.testing.assert_array_equal(after[:, ids[0] != changed], o[:, ids[0] != changed])
        assert np.any(after[:, ids[0] == changed] != o[:, ids[0] == changed])
        if num_segments is not None:
            kept = np.arange(SEQUENCES) != changed
            np.testing.assert_array_equal(last[:, kept], final[:, kept])


# --- H03: lengths ----------------------------------------------------------------------------------------------------

LENGTHS = np.array([0, 1, 2, 63, 64, 65, 127, 129], np.int32)


def test_any_length_then_decode() -> None:
    inputs = make(len(LENGTHS), 129, 2, 8, 8)
    padding = np.arange(129) >= LENGTHS[:, None]
    for name in NAMES[:-1]:
        inputs[name][padding] = np.nan
    o, state = run(inputs, lengths=jnp.asarray(LENGTHS))
    assert not np.any(o[padding])
    np.testing.assert_array_equal(state[0], inputs["state"][0])

    # The last token on its own.
    shorter = run(inputs, lengths=jnp.asarray(LENGTHS - 1).clip(0))[1]
    rows = np.arange(len(LENGTHS))
    last = {name: inputs[name][rows, np.maximum(LENGTHS - 1, 0)][:, None] for name in NAMES[:-1]}
    alone = run(last | {"state": shorter}, lengths=jnp.asarray(LENGTHS))
    assert_close(alone[1], np.float64(state), FLOAT32, "prefill(T-1) + decode(1)")
    assert_close(alone[0][1:, 0], np.float64(o[rows, LENGTHS - 1][1:]), FLOAT32, "prefill(T-1) + decode(1)")

    tokens = make(len(LENGTHS), 8, 2, 8, 8, seed=5)
    after, decoded = state, []
    for t in range(8):
        out, after = run({name: tokens[name][:, t : t + 1] for name in NAMES[:-1]} | {"state": after})
        decoded.append(out)
    for row, length in enumerate(LENGTHS):
        first, second = part(inputs, row, 0, length), part(tokens, row, 0, 8)
        whole = {name: np.concatenate([first[name], second[name]], axis=1) for name in first}
        expected, states = oracle.kda(**whole, state=inputs["state"][row : row + 1])
        if length:
            assert_close(o[row : row + 1, :length], expected[:, :length], FLOAT32, "o")
        assert_close(state[row : row + 1], states[length], FLOAT32, "state after prefill")
        assert_close(np.concatenate(decoded, axis=1)[row : row + 1], expected[:, length:], FLOAT32, "decode")
        assert_close(after[row : row + 1], states[-1], FLOAT32, "state after decode")


@pytest.mark.parametrize(
    ("heads", "length", "options"),
    [
        (9, 5, {}),
        (16, 20, {"chunk_size": 16}),
        pytest.param(3, 37, {"chunk_size": 32, "gate_lower_bound": None}, marks=pytest.mark.slow),
        pytest.param(1, 300, {"chunk_size": 128}, marks=pytest.mark.slow),
        pytest.param(16, 70, {}, marks=pytest.mark.slow),
    ],
)
def test_heads_and_chunk_sizes(heads: int, length: int, options: dict[str, Any]) -> None:
    """Blocks of 3 of 9 heads, heads first; blocks of 8 of 16, tokens first; chunks that the length isn't a multiple of."""
    inputs = make(2, length, heads, 8, 16)
    o, states = oracle.kda(**inputs, scale=0.3)
    result = run(inputs, scale=0.3, **options)
    assert_close(result[0], o, FLOAT32, "o")
    assert_close(result[1], states[-1], FLOAT32, "final_state")


# --- one token -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "dtype"), [(8, "bfloat16"), (3, "float32")])
def test_one_token(heads: int, dtype: str) -> None:
    inputs = rounded(make(4, 1, heads, 128, 128), dtype)
    for name in NAMES[:-1]:
        inputs[name][2] = np.nan
    o, state = run(inputs, lengths=jnp.asarray([1, 1, 0, 1]))
    for row in (0, 1, 3):
        expected, states = oracle.kda(**part(inputs, row, 0, 1), state=inputs["state"][row : row + 1])
        assert_close(o[row : row + 1], expected, 1e-2 if dtype == "bfloat16" else 1e-6)
        assert_close(state[row : row + 1], states[-1], 1e-6)
    assert not np.any(o[2])
    np.testing.assert_array_equal(state[2], inputs["state"][2])
    fresh = run({name: x for name, x in inputs.items() if name != "state"}, lengths=jnp.asarray([1, 1, 0, 1]))
    expected, states = oracle.kda(**part(inputs, 0, 0, 1), state=0 * inputs["state"][:1])
    assert_close(fresh[0][:1], expected, 1e-2 if dtype == "bfloat16" else 1e-6)
    assert_close(fresh[1][:1], states[-1], 1e-6)
    assert not np.any(fresh[1][2])


SLOTS = ([5, 4, 3, 2, 1, 0], [-1, -1, 3, -1, 0, 8], [2, -1, -1, 7, -1, -1], [-1] * 6, [-1, 0, 1, 2, 3, -1])


def test_slots_of_a_pool() -> None:
    pool = np.random.default_rng(0).standard_normal((9, 24, 16, 8)).astype(np.float32)
    for slots in SLOTS:
        inputs = make(6, 1, 24, 16, 8)
        for name in NAMES[:-1]:
            inputs[name][np.array(slots) < 0] = np.nan
        o, after = tpu_decode.decode(
            *(jnp.asarray(inputs[name][:, 0]) for name in NAMES[:-1]),
            jnp.asarray(pool),
            jnp.asarray(slots),
            scale=16**-0.5,
            interpret=INTERPRET,
        )
        o, after = watched(o), watched(after)
        untouched = [slot for slot in range(len(pool)) if slot not in slots]
        np.testing.assert_array_equal(after[untouched], pool[untouched])
        for row, slot in enumerate(slots):
            if slot < 0:
                assert not np.any(o[row])
                continue
            expected, states = oracle.kda(**part(inputs, row, 0, 1), state=pool[slot : slot + 1])
            assert_close(o[row : row + 1, None], expected, 1e-6)
            assert_close(after[slot : slot + 1], states[-1], 1e-6)


# --- gradient --------------------------------------------------------------------------------------------------------


def test_gradient() -> None:
    inputs = make(2, 5, 1, 8, 8)
    rng = np.random.default_rng(0)
    d_o = rng.standard_normal((2, 5, 1, 8)).astype(np.float32)
    d_last = rng.standard_normal((2, 1, 8, 8)).astype(np.float32)
    d_o[1, 3:] = 0

    @jax.jit
    def gradient(arrays: dict[str, jax.Array], d_o: jax.Array, d_last: jax.Array) -> dict[str, jax.Array]:
        def loss(arrays: dict[str, jax.Array]) -> jax.Array:
            o, last, _ = tpu.kda(
                *(arrays[name] for name in NAMES[:-1]),
                initial_state=arrays["state"],
                lengths=jnp.asarray([5, 3]),
                segment_ids=None,
                num_segments=None,
                scale=0.4,
                gate_lower_bound=-5.0,
                chunk_size=None,
                interpret=INTERPRET,
            )
            return jnp.sum(o * d_o) + jnp.sum(last * d_last)

        return jax.grad(loss)(arrays)

    actual = gradient({name: jnp.asarray(x) for name, x in inputs.items()}, d_o, d_last)
    for row, length in ((0, 5), (1, 3)):
        own = part(inputs, row, 0, length) | {"state": inputs["state"][row : row + 1]}
        expected = oracle.kda_gradient(own, d_o[row : row + 1, :length], d_last[row : row + 1], scale=0.4)
        for name in NAMES[:-1]:
            assert_close(actual[name][row : row + 1, :length], expected[name], 1e-5, name)
            assert not np.any(actual[name][row, length:])
        assert_close(actual["state"][row : row + 1], expected["state"], 1e-5, "state")


# --- states on the way, segments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 3])
def test_states_at_positions(segments: int) -> None:
    inputs = make(3, 70, 2, 128, 128, g=-0.02)
    lengths = np.array([70, 40, 0], np.int32)
    positions = np.array([[32, 0, 70, 69, 32], [1, 40, 39, 16, 200], [0, 3, 0, 0, 0]], np.int32)
    o, states = oracle.kda(**inputs)
    arrays = {name: jnp.asarray(x) for name, x in inputs.items()}
    for name in NAMES[:-1]:
        arrays[name] = jnp.where(
            (np.arange(70) < lengths[:, None]).reshape(3, 70, *(1,) * (arrays[name].ndim - 2)), arrays[name], np.nan
        )
    got = tpu.kda(
        **{name: arrays[name] for name in NAMES[:-1]},
        initial_state=arrays["state"],
        lengths=jnp.asarray(lengths),
        segment_ids=None,
        num_segments=None,
        state_positions=jnp.asarray(positions),
        scale=128**-0.5,
        gate_lower_bound=-5.0,
        chunk_size=16,
        segments=segments,
        interpret=INTERPRET,
    )
    assert got[2] is not None
    left, last, at = (watched(x) for x in got)
    for row, length in enumerate(lengths):
        assert_close(left[row, :length], o[row, :length], FLOAT32, "o") if length else None
        assert not np.any(left[row, length:])
        assert_close(last[row], states[length, row], FLOAT32, "final_state")
        assert_close(at[row], states[np.minimum(positions[row], length), row], FLOAT32, "states")


def test_segments_of_packed_sequences() -> None:
    """Every sequence is cut by its own length alone: its bits don't depend on the others'."""
    sizes = (50, 0, 33)
    ids = np.repeat([0, 1, 2, -1], [*sizes, 7])[None].astype(np.int32)
    inputs = make(1, 90, 1, 128, 128, g=-0.02)
    inputs["state"] = np.random.default_rng(1).standard_normal((1, 3, 1, 128, 128)).astype(np.float32)
    options = {"segment_ids": jnp.asarray(ids), "num_segments": 3, "chunk_size": 16, "segments": 2}
    o, last = run(inputs, **options)
    begin = 0
    for i, size in enumerate(sizes):
        own = part(inputs, 0, begin, begin + size)
        want, states = (
            oracle.kda(**own, state=inputs["state"][:, i]) if size else (own["v"], inputs["state"][None, :, i])
        )
        assert_close(o[:, begin : begin + size], want, FLOAT32, "o") if size else None
        assert_close(last[:, i], states[-1], FLOAT32, "final_state")
        begin += size
    assert not np.any(o[:, begin:])
    other = {name: x.copy() for name, x in inputs.items()}
    for name in NAMES[:-1]:
        other[name][:, :50] = make(1, 90, 1, 128, 128, seed=7)[name][:, :50]
    changed, after = run(other, **options)
    np.testing.assert_array_equal(changed[:, 50:], o[:, 50:])
    np.testing.assert_array_equal(after[:, 1:], last[:, 1:])


# --- which calls it takes --------------------------------------------------------------------------------------------


def call(spec: KdaSpec, implementation: str | None, **change: Any) -> str:
    """The implementation that a call of these shapes is traced with."""
    options = spec.options() | {"implementation": implementation}
    arrays = spec.arguments()
    for name, x in change.items():
        (arrays if isinstance(x, jax.ShapeDtypeStruct) else options)[name] = x
    with noted_choices() as choices:
        jax.eval_shape(partial(kda, **options), **arrays)
    return choices["kda"].name


SMALL = KdaSpec("small", 1, 64, 8)


def test_where_it_is_chosen() -> None:
    assert call(SMALL, None) == "xla"
    assert call(SMALL, "tpu") == "tpu"
    with traced_for("tpu"):
        for name in ("k3_prefill_8k_tp8", "kimi_linear_decode_64", "k3_packed_mixed_tp8"):
            assert call(BY_NAME[name], None) == "tpu"
        assert call(KdaSpec("narrow", 1, 64, 8, width=64), None) == "xla"
        assert call(SMALL, "xla") == "xla"


SHAPE = jax.ShapeDtypeStruct
REFUSED = {
    "no TPU kernel for K=64": {"spec": KdaSpec("", 1, 64, 8, width=64)},
    "no TPU kernel for K=384": {"spec": KdaSpec("", 1, 64, 8, width=384)},
    "q has dtype float16": {"q": SHAPE((1, 64, 8, 128), jnp.float16)},
    "chunk_size is 48": {"chunk_size": 48},
    "chunk_scan is 'associative'": {"chunk_scan": "associative"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_it_refuses(message: str) -> None:
    change = dict(REFUSED[message])
    spec: Any = change.pop("spec", SMALL)
    with pytest.raises(UnsupportedImplementationError, match=message):
        call(spec, "tpu", **change)


def test_it_refuses_float64() -> None:
    with jax.enable_x64(True), pytest.raises(UnsupportedImplementationError, match="g has dtype float64"):
        call(SMALL, "tpu", g=SHAPE((1, 64, 8, 128), jnp.float64))


def test_it_refuses_arrays_that_are_not_on_a_tpu() -> None:
    arrays = {name: jnp.zeros(x.shape, x.dtype) for name, x in SMALL.arguments().items()}
    with pytest.raises(UnsupportedImplementationError, match="needs a TPU, and the platform is 'cpu'"):
        kda(**arrays, implementation="tpu")


def test_it_is_not_split_over_a_mesh_by_itself() -> None:
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    by_head = jax.sharding.PartitionSpec(None, None, "tensor")
    names = "qkvg"

    @partial(jax.shard_map, mesh=mesh, in_specs=(by_head, jax.sharding.PartitionSpec()), out_specs=by_head)
    def split(inputs: dict[str, jax.Array], shared: jax.Array) -> jax.Array:
        return kda(**inputs, initial_state=shared, implementation="tpu").o

    arrays = SMALL.arguments()
    inputs, shared = {name: arrays[name] for name in (*names, "beta")}, SHAPE((1, 4, 128, 128), jnp.float32)
    with jax.set_mesh(mesh):
        with pytest.raises(UnsupportedImplementationError, match=r"mesh axes 'tensor' .* inside jax\.shard_map"):
            call(SMALL, "tpu")
        # Inside, with a state that all devices share, it traces, gradient included.
        gradient = jax.eval_shape(
            jax.grad(lambda *x: jnp.sum(split(*x).astype(jnp.float32)), argnums=1), inputs, shared
        )
    assert gradient.shape == shared.shape


# --- compiled for TPUs that aren't there -----------------------------------------------------------------------------

slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("topology", "name"),
    [
        ("v6e:2x2", "k3_prefill_8k"),
        ("tpu7x:2x2x1", "k3_prefill_8k_tp8"),
        ("v5e:2x2", "k3_decode_64"),
        slow("v5e:2x2", "k3_prefill_8k"),
        slow("v5p:2x2x2", "k3_prefill_8k"),
        slow("tpu7x:2x2x1", "k3_prefill_8k"),
        slow("v5e:2x2", "k3_prefill_8k_tp8"),
        ("v5p:2x2x2", "k3_prefill_8k_tp8"),
        slow("v6e:2x2", "k3_prefill_8k_tp8"),
        slow("v5e:2x2", "k3_packed_mixed"),
        slow("v5p:2x2x2", "kimi_linear_prefill_8k"),
        slow("v6e:2x2", "k3_verify_8"),
        slow("tpu7x:2x2x1", "k3_decode_256_tp8"),
    ],
)
def test_compiles_without_copies_of_its_arrays(topology: str, name: str) -> None:
    spec = BY_NAME[name]
    sharding = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])
    arguments = {name: SHAPE(x.shape, x.dtype, sharding=sharding) for name, x in spec.arguments().items()}
    compiled = jax.jit(partial(kda, **spec.options(), implementation="tpu")).lower(**arguments).compile()
    memory = compiled.memory_analysis()
    own = memory.argument_size_in_bytes + memory.output_size_in_bytes
    logical = sum(np.prod(x.shape) * x.dtype.itemsize for x in spec.arguments().values())
    assert memory.argument_size_in_bytes < 1.2 * logical
    # No copy of even one of q, k and v; beta, narrow as it is, may be laid out anew.
    assert memory.temp_size_in_bytes < own / 16


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "heads"), [("v5e:2x2", 8), ("tpu7x:2x2x1", 3)])
def test_packed_sequences_without_states_compile(topology: str, heads: int) -> None:
    """The training form, at a length that isn't a multiple of the chunk."""
    spec = KdaSpec("", 2, 1000, heads)
    sharding = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])
    arguments = {name: SHAPE(x.shape, x.dtype, sharding=sharding) for name, x in spec.arguments().items()}
    del arguments["initial_state"]
    arguments["segment_ids"] = SHAPE((2, 1000), jnp.int32, sharding=sharding)
    compiled = jax.jit(partial(kda, gate_lower_bound=-5.0, implementation="tpu")).lower(**arguments).compile()
    memory = compiled.memory_analysis()
    own = memory.argument_size_in_bytes + memory.output_size_in_bytes
    # The states that the sequences begin from, zeros, are an array of their own.
    assert memory.temp_size_in_bytes < own / 16 + 2 * heads * 128 * 128 * 4


def test_a_donated_pool_is_written_in_place() -> None:
    sharding = jax.sharding.SingleDeviceSharding(topology_devices("v6e:2x2")[0])
    heads, slots = 12, 512
    token = SHAPE((64, heads, 128), jnp.bfloat16, sharding=sharding)
    pool = SHAPE((slots, heads, 128, 128), jnp.float32, sharding=sharding)
    compiled = (
        jax.jit(partial(tpu_decode.decode, scale=128**-0.5), donate_argnames="pool")
        .lower(
            token,
            token,
            token,
            SHAPE(token.shape, jnp.float32, sharding=sharding),
            SHAPE(token.shape[:2], jnp.float32, sharding=sharding),
            pool,
            SHAPE((64,), jnp.int32, sharding=sharding),
        )
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == slots * heads * 128 * 128 * 4
    assert memory.temp_size_in_bytes < 2**21
