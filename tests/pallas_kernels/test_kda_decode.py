"""KDA on slots of a pool, one token, windows and commits, against the token recurrence in NumPy float64.

One suite for all implementations; the kernels run interpreted, those of the TPU with memory that starts as NaN and is
watched for races. Rows of padding and slots of no row hold NaN throughout.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from kimi_jax.planning import topology_devices
from pallas_kernels.dispatch import UnsupportedImplementationError, noted_choices
from pallas_kernels.kda import gpu_commit, gpu_decode, gpu_slots, gpu_verify, kda, kda_from_raw, tpu_decode, tpu_slots
from pallas_kernels.kda.decode import KdaRecords, kda_commit, kda_conv_decode, kda_decode, kda_verify
from pallas_kernels.target import traced_for
from tests import oracle_kda as oracle

SCALE = 0.3
HEADS, WIDTH, POOL = 2, 128, 6
SLOTS = np.array([4, -1, 0, 2])
ROWS = len(SLOTS)
IMPLEMENTATIONS = ("reference", "xla", "tpu", "gpu")
TOLERANCE = 1e-4  # of float32; bfloat16 inputs are compared with the recurrence of what they are rounded to
RMS = 0.005
WATCHED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def interpret_gpu() -> Any:
    """What Pallas takes to run a Mosaic GPU kernel on a CPU; private before jax 0.11."""
    public = getattr(plgpu, "InterpretGPUParams", None)
    if public is not None:
        return public()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


class Token(NamedTuple):
    """Arrays [T, H, ·] of one slot's tokens."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray


def draw(tokens: int, seed: int, strongest: float = -5.0) -> Token:
    """Tokens of one slot, the decay of their channels anything from -0.001 to `strongest`."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((tokens, HEADS, WIDTH)) for _ in range(3))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -np.exp(rng.uniform(np.log(1e-3), np.log(-strongest), q.shape))
    beta = 1 / (1 + np.exp(-rng.standard_normal((tokens, HEADS))))
    return Token(*(x.astype(np.float32) for x in (q, k, v, g, beta)))


def rounded(token: Token, dtype: str) -> Token:
    return token._replace(**{name: np.asarray(jnp.asarray(getattr(token, name), dtype)) for name in "qkv"})


def wide(token: Token) -> Token:
    return Token(*(np.asarray(x, np.float64) for x in token))


def recurrence(token: Token, state: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(o [T, H, V], u [T, H, V], states after 0..T tokens) of one slot."""
    rows = Token(*(x[None] for x in wide(token)))
    o, states = oracle.kda(*rows, state[None], scale=SCALE)
    _, k, v, g, beta = wide(token)
    written = []
    for t in range(len(k)):
        decayed = np.exp(g[t])[..., None] * states[t, 0]
        written.append(beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", decayed, k[t])))
    return o[0], np.stack(written), states[:, 0]


def batch(tokens: list[Token], window: slice | int) -> list[jax.Array]:
    """The rows' arrays of those tokens, NaN at padding."""
    arrays = []
    for name in Token._fields:
        example = getattr(tokens[0], name)[window]
        rows = np.full((ROWS, *example.shape), np.nan, example.dtype)
        for row, slot in enumerate(SLOTS):
            if slot >= 0:
                rows[row] = getattr(tokens[slot], name)[window]
        arrays.append(jnp.asarray(rows))
    return arrays


def new_pool(seed: int = 0) -> np.ndarray:
    """States of all slots; those of no row hold NaN."""
    pool = np.random.default_rng(seed).standard_normal((POOL, HEADS, WIDTH, WIDTH)).astype(np.float32)
    pool[[slot for slot in range(POOL) if slot not in SLOTS]] = np.nan
    return pool


def watched(x: Any) -> Any:
    """The results of an interpreted TPU kernel, once it has run without a race."""
    values = jax.tree.map(np.asarray, x)
    assert interpreter.races is not None
    assert not interpreter.races.races_found
    return values


def decode(implementation: str, *arguments: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    if implementation == "gpu":
        A_log, dt_bias = options.pop("A_log", None), options.pop("dt_bias", None)
        front = gpu_decode.Front(options.pop("gate_lower_bound", None)) if A_log is not None else None
        vectors, places = arguments[:5], arguments[5:]
        return gpu_decode.decode(
            *vectors, A_log, dt_bias, *places, front=front, scale=SCALE, columns=64, interpret=interpret_gpu()
        )
    if implementation == "tpu":
        return watched(tpu_decode.decode(*arguments, scale=SCALE, interpret=WATCHED))
    return tuple(kda_decode(*arguments, scale=SCALE, implementation=implementation, **options))


def verify(implementation: str, *arguments: Any, committed: Any) -> tuple[Any, Any]:
    *inputs, records, slots = arguments
    if implementation == "gpu":
        return gpu_verify.verify(
            *inputs, tuple(records), slots, committed, scale=SCALE, blocks=2, interpret=interpret_gpu()
        )
    if implementation == "tpu":
        committed = jnp.zeros(ROWS, jnp.int32) if committed is None else committed
        return watched(tpu_slots.verify(*inputs, tuple(records), slots, committed, scale=SCALE, interpret=WATCHED))
    return tuple(kda_verify(*arguments, committed=committed, scale=SCALE, implementation=implementation))


def commit(implementation: str, *arguments: Any) -> Any:
    pool, records, slots, counts = arguments
    if implementation == "gpu":
        return gpu_commit.commit(pool, tuple(records), slots, counts, columns=64, interpret=interpret_gpu())
    if implementation == "tpu":
        return watched(tpu_slots.commit(pool, tuple(records), slots, counts, interpret=WATCHED))
    return kda_commit(*arguments, implementation=implementation)


def assert_near(actual: Any, expected: np.ndarray, dtype: str = "float32") -> None:
    """Relative to the largest entry; o in bfloat16 by the root mean square."""
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected, np.float64)
    if dtype == "float32":
        assert np.abs(actual - expected).max() <= TOLERANCE * np.abs(expected).max()
    else:
        assert np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)) < RMS


def assert_only_slots_changed(after: Any, before: np.ndarray) -> None:
    others = [slot for slot in range(POOL) if slot not in SLOTS]
    after, before = (np.asarray(x).astype(np.float32) for x in (after, before))
    np.testing.assert_array_equal(after[others], before[others])


# --- one token -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_token(implementation: str, dtype: str) -> None:
    tokens = [rounded(draw(1, slot, strongest=-50.0), dtype) for slot in range(POOL)]
    pool = new_pool()
    o, after = decode(implementation, *batch(tokens, 0), jnp.asarray(pool), jnp.asarray(SLOTS))
    assert o.dtype == dtype
    for row, slot in enumerate(SLOTS):
        if slot < 0:
            assert not np.any(np.asarray(o[row]))
            continue
        expected, _, states = recurrence(tokens[slot], pool[slot])
        assert_near(o[row], expected[0], dtype)
        assert_near(after[slot], states[-1])
    assert_only_slots_changed(after, pool)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("slots", [[-1] * ROWS, [5, 4, 3, 1], [-1, 3, -1, 5]])
def test_slots_in_any_order(implementation: str, slots: list[int]) -> None:
    tokens = [draw(1, slot) for slot in range(POOL)]
    pool = np.random.default_rng(1).standard_normal((POOL, HEADS, WIDTH, WIDTH)).astype(np.float32)
    arrays = [jnp.stack([jnp.asarray(getattr(tokens[slot], name)[0]) for slot in slots]) for name in Token._fields]
    o, after = decode(implementation, *arrays, jnp.asarray(pool), jnp.asarray(slots))
    untouched = [slot for slot in range(POOL) if slot not in slots]
    np.testing.assert_array_equal(np.asarray(after)[untouched], pool[untouched])
    for row, slot in enumerate(slots):
        if slot < 0:
            assert not np.any(np.asarray(o[row]))
        else:
            expected, _, states = recurrence(tokens[slot], pool[slot])
            assert_near(o[row], expected[0])
            assert_near(after[slot], states[-1])


@pytest.mark.parametrize("implementation", ["reference", "xla", "gpu"])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_gate_norm_and_strength_in_front(implementation: str, bound: float | None) -> None:
    rng = np.random.default_rng(0)
    q, k, v, raw = (rng.standard_normal((ROWS, HEADS, WIDTH)).astype(np.float32) for _ in range(4))
    # Decays from next to none, which add up over a long text, to nearly all.
    raw = raw * 8 - 6
    beta, A_log = rng.standard_normal((ROWS, HEADS)).astype(np.float32), np.array([-2.0, 1.5], np.float32)
    dt_bias, pool = rng.standard_normal((HEADS, WIDTH)).astype(np.float32), new_pool()
    padded = [np.where((SLOTS < 0).reshape(-1, *(1,) * (x.ndim - 1)), np.nan, x) for x in (q, k, v, raw, beta)]
    options = {"A_log": jnp.asarray(A_log), "dt_bias": jnp.asarray(dt_bias), "gate_lower_bound": bound}
    o, after = decode(
        implementation, *(jnp.asarray(x, jnp.float32) for x in padded), jnp.asarray(pool), jnp.asarray(SLOTS), **options
    )
    g = oracle.gate(raw, A_log, dt_bias, bound)
    q, k = (x / np.sqrt(np.sum(np.float64(x) ** 2, -1, keepdims=True) + 1e-6) for x in (q, k))
    for row, slot in enumerate(SLOTS):
        if slot < 0:
            assert not np.any(np.asarray(o[row]))
            continue
        token = Token(*(x[row : row + 1] for x in (q, k, v, g, 1 / (1 + np.exp(-np.float64(beta))))))
        expected, _, states = recurrence(token, pool[slot])
        assert_near(o[row], expected[0])
        assert_near(after[slot], states[-1])


def test_small_softplus_keeps_its_digits() -> None:
    from pallas_kernels.kda.gpu_registers import softplus

    x = np.linspace(-60, 60, 2401).astype(np.float32)
    np.testing.assert_allclose(np.asarray(softplus(jnp.asarray(x))), np.logaddexp(np.float64(x), 0), rtol=5e-7)


@pytest.mark.parametrize("implementation", ["reference", "xla", "gpu"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", -5.0), ("bfloat16", None)])
def test_convolution_in_front(implementation: str, dtype: str, bound: float | None) -> None:
    rng = np.random.default_rng(0)
    channels = 3 * HEADS * WIDTH
    x, tails = (np.array(jnp.asarray(rng.standard_normal(s), dtype)) for s in ((ROWS, channels), (POOL, 3, channels)))
    weight = rng.standard_normal((channels, 4)).astype(np.float32)
    raw, beta = (rng.standard_normal(s).astype(np.float32) for s in ((ROWS, HEADS, WIDTH), (ROWS, HEADS)))
    A_log, dt_bias = (
        rng.standard_normal(HEADS).astype(np.float32),
        rng.standard_normal((HEADS, WIDTH)).astype(np.float32),
    )
    pool = new_pool()
    tails[[slot for slot in range(POOL) if slot not in SLOTS]] = np.nan
    x[SLOTS < 0] = np.nan
    arrays = [jnp.asarray(array) for array in (x, weight, raw, beta, A_log, dt_bias)]
    places = jnp.asarray(pool), jnp.asarray(tails)
    slots = jnp.asarray(SLOTS)
    if implementation == "gpu":
        o, tails_after, after = gpu_decode.conv_decode(
            *arrays,
            *reversed(places),
            slots,
            front=gpu_decode.Front(bound),
            scale=SCALE,
            columns=128 if dtype == "float32" else 64,  # one warpgroup, or two that share a tail
            interpret=interpret_gpu(),
        )
    else:
        o, after, tails_after = kda_conv_decode(
            *arrays, *places, slots, gate_lower_bound=bound, scale=SCALE, implementation=implementation
        )
    assert o.dtype == tails_after.dtype == dtype
    g = oracle.gate(raw, A_log, dt_bias, bound)
    for row, slot in enumerate(SLOTS):
        if slot < 0:
            assert not np.any(np.asarray(o[row]))
            continue
        y, tail = oracle.conv(x[row : row + 1], weight, tails[slot])
        np.testing.assert_array_equal(np.asarray(tails_after[slot]).astype(np.float64), tail)
        # As the convolution of a prompt leaves them: in the dtype of x.
        q, k, v = np.asarray(jnp.asarray(y, dtype)).astype(np.float64).reshape(3, 1, HEADS, WIDTH)
        q, k = (entry / np.sqrt(np.sum(entry**2, -1, keepdims=True) + 1e-6) for entry in (q, k))
        token = Token(q, k, v, g[row : row + 1], 1 / (1 + np.exp(-np.float64(beta[row : row + 1]))))
        expected, _, states = recurrence(token, pool[slot])
        assert_near(o[row], expected[0], dtype)
        assert_near(after[slot], states[-1], dtype)
    assert_only_slots_changed(after, pool)
    assert_only_slots_changed(tails_after, np.asarray(places[1]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decode_after_prefill_is_prefill(implementation: str) -> None:
    prompt, more = 19, 3
    tokens = [draw(prompt + more, slot) for slot in range(POOL)]
    pool = new_pool()
    real = SLOTS >= 0
    q, k, v, g, beta = (x[real] for x in batch(tokens, slice(0, prompt)))
    state = kda(q, k, v, g, beta, initial_state=jnp.asarray(pool[SLOTS[real]]), scale=SCALE).final_state
    after = jnp.asarray(pool).at[SLOTS[real]].set(state)
    outputs = []
    for t in range(prompt, prompt + more):
        o, after = decode(implementation, *batch(tokens, t), jnp.asarray(after), jnp.asarray(SLOTS))
        outputs.append(np.asarray(o))
    for row, slot in enumerate(SLOTS):
        if slot >= 0:
            expected, _, states = recurrence(tokens[slot], pool[slot])
            assert_near(np.stack(outputs)[:, row], expected[prompt:])
            assert_near(after[slot], states[-1])


# --- windows and commits ---------------------------------------------------------------------------------------------


class Case(NamedTuple):
    window: int
    capacity: int
    committed: tuple[int, ...] | None  # by row
    strongest: float = -5.0


CASES = [
    Case(8, 8, None),
    Case(5, 16, (5, 0, 11, 0)),
    pytest.param(Case(3, 8, (1, 0, 5, 2), -50.0), id="any gate"),
    pytest.param(Case(16, 16, None), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_a_window_is_as_many_tokens_one_by_one(implementation: str, case: Case) -> None:
    past = np.zeros(ROWS, int) if case.committed is None else np.array(case.committed)
    tokens = [draw(case.capacity, slot, case.strongest) for slot in range(POOL)]
    pool = new_pool()
    records = [np.full((POOL, HEADS, case.capacity, WIDTH), np.nan, np.float32) for _ in range(3)]
    windows = [np.full((ROWS, case.window, *x.shape[1:]), np.nan, np.float32) for x in tokens[0]]
    for row, slot in enumerate(SLOTS):
        if slot >= 0:
            _, u, _ = recurrence(tokens[slot], pool[slot])
            for record, x in zip(records, (tokens[slot].k, u, tokens[slot].g), strict=True):
                record[slot, :, : past[row]] = x[: past[row]].swapaxes(0, 1)
            for window, x in zip(windows, tokens[slot], strict=True):
                window[row] = x[past[row] : past[row] + case.window]
    committed = None if case.committed is None else jnp.asarray(past)
    slots = jnp.asarray(SLOTS)
    given = KdaRecords(*map(jnp.asarray, records))
    o, recorded = verify(
        implementation, *map(jnp.asarray, windows), jnp.asarray(pool), given, slots, committed=committed
    )
    # Some of the window is accepted, all of it in the first row.
    accepted = np.minimum(case.window, np.array([case.window, 0, 2, 1]))
    after = commit(implementation, jnp.asarray(pool), KdaRecords(*recorded), slots, jnp.asarray(past + accepted))
    for row, slot in enumerate(SLOTS):
        if slot < 0:
            assert not np.any(np.asarray(o[row]))
            continue
        expected, u, states = recurrence(tokens[slot], pool[slot])
        new = slice(past[row], past[row] + case.window)
        assert_near(o[row], expected[new])
        for record, x in zip(recorded, (tokens[slot].k, u, tokens[slot].g), strict=True):
            assert_near(record[slot, :, : new.stop], x[: new.stop].swapaxes(0, 1))
            assert np.all(np.isnan(np.asarray(record[slot, :, new.stop :])))
        assert_near(after[slot], states[past[row] + accepted[row]])
    for record, before in zip(recorded, records, strict=True):
        assert_only_slots_changed(record, before)
    assert_only_slots_changed(after, pool)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_windows(implementation: str) -> None:
    tokens = [rounded(draw(8, slot), "bfloat16") for slot in range(POOL)]
    pool = new_pool()
    shape = POOL, HEADS, 8, WIDTH
    records = KdaRecords(jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape), jnp.zeros(shape))
    o, recorded = verify(
        implementation, *batch(tokens, slice(0, 8)), jnp.asarray(pool), records, jnp.asarray(SLOTS), committed=None
    )
    after = commit(implementation, jnp.asarray(pool), KdaRecords(*recorded), jnp.asarray(SLOTS), jnp.full(ROWS, 8))
    for row, slot in enumerate(SLOTS):
        if slot >= 0:
            expected, u, states = recurrence(tokens[slot], pool[slot])
            assert_near(o[row], expected, "bfloat16")
            assert_near(recorded[1][slot], u.swapaxes(0, 1))
            assert_near(after[slot], states[-1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_accepted_changes_nothing(implementation: str) -> None:
    pool = new_pool()
    shape = POOL, HEADS, 8, WIDTH
    records = KdaRecords(*(jnp.full(shape, jnp.nan, jnp.float32) for _ in range(3)))
    after = commit(implementation, jnp.asarray(pool), records, jnp.asarray(SLOTS), jnp.zeros(ROWS, jnp.int32))
    np.testing.assert_array_equal(np.asarray(after), pool)


# --- a token of `kda` ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [False, True])
def test_kda_takes_the_kernel_for_one_token(monkeypatch: pytest.MonkeyPatch, raw: bool) -> None:
    rows, slots = 3, np.array([0, 1, 2])
    tokens = [draw(1, slot) for slot in slots]
    q, k, v, g, beta = (jnp.stack([jnp.asarray(getattr(token, name)) for token in tokens]) for name in Token._fields)
    state = jnp.asarray(np.random.default_rng(0).standard_normal((rows, HEADS, WIDTH, WIDTH)), jnp.float32)
    lengths = jnp.array([1, 0, 1])
    arguments: dict[str, Any] = {"initial_state": state, "lengths": lengths, "scale": SCALE}
    call: Any = kda
    vectors = [q, k, v, g, beta]
    if raw:
        call = kda_from_raw
        vectors += [jnp.array([0.5, -1.0]), jnp.ones((HEADS, WIDTH))]
    expected = call(*vectors, **arguments, implementation="xla")
    monkeypatch.setattr("pallas_kernels.kda.platform", lambda: "gpu")
    monkeypatch.setattr(gpu_slots, "obstacle_of_one", lambda *_, **__: None)
    monkeypatch.setattr(gpu_decode, "decode", partial(gpu_decode.decode, interpret=interpret_gpu()))
    with noted_choices() as choices:
        o, after, _ = call(*vectors, **arguments)
    assert choices[call.__name__].name == "gpu"
    assert_near(o, np.asarray(expected.o))
    assert_near(after, np.asarray(expected.final_state))
    np.testing.assert_array_equal(np.asarray(after[1]), np.asarray(state[1]))
    assert not np.any(np.asarray(o[1]))

    def loss(implementation: Any, state: jax.Array, v: jax.Array) -> jax.Array:
        result = call(
            *vectors[:2], v, *vectors[3:], **arguments | {"initial_state": state}, implementation=implementation
        )
        return jnp.sum(result.o**2) + jnp.sum(result.final_state**2)

    for one, other in zip(*(jax.grad(partial(loss, name), (0, 1))(state, v) for name in ("gpu", "xla")), strict=True):
        assert_near(one, np.asarray(other))


def test_one_token_of_kda_on_a_mesh() -> None:
    """The kernel traces inside shard_map, gradient included."""
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    token, heads = spec(None, None, "tensor"), spec(None, "tensor")

    @partial(jax.shard_map, mesh=mesh, in_specs=(*[token] * 5, heads), out_specs=(token, heads), check_vma=False)
    def split(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
        return gpu_slots.one_token(q, k, v, g, beta, initial_state=state, lengths=None, scale=SCALE)

    *vectors, pool = shapes(rows=6)
    arrays = [SHAPE((x.shape[0], 1, *x.shape[1:]), x.dtype) for x in vectors]
    gradient = jax.grad(lambda *x: jnp.sum(split(*x)[0].astype(jnp.float32)), argnums=5)
    assert jax.eval_shape(gradient, *arrays, pool).shape == pool.shape


# --- which calls it takes --------------------------------------------------------------------------------------------

SHAPE = jax.ShapeDtypeStruct


def shapes(rows: int = 4, heads: int = 8, width: int = WIDTH, pool: int = 6, window: int | None = None) -> list[Any]:
    """Arguments of `kda_decode`, or of `kda_verify` up to the pool."""
    token = (rows, heads) if window is None else (rows, window, heads)
    vectors = [SHAPE((*token, width), jnp.bfloat16)] * 3
    wide = [(*token, width), token, (pool, heads, width, width)]
    return [*vectors, *(SHAPE(shape, jnp.float32) for shape in wide)]


def records_of(pool: int = 6, capacity: int = 8, heads: int = 8, width: int = WIDTH) -> KdaRecords:
    shape = pool, heads, capacity, width
    return KdaRecords(SHAPE(shape, jnp.bfloat16), SHAPE(shape, jnp.float32), SHAPE(shape, jnp.float32))


INDEX = SHAPE((4,), jnp.int32)


def test_where_the_kernels_are_chosen() -> None:
    def chosen() -> list[str]:
        names = []
        for run, arguments in (
            (kda_decode, [*shapes(), INDEX]),
            (kda_verify, [*shapes(window=8), records_of(), INDEX]),
            (kda_commit, [shapes()[5], records_of(), INDEX, INDEX]),
        ):
            with noted_choices() as choices:
                jax.eval_shape(run, *arguments)
            names.append(choices[run.__name__].name)
        return names

    assert chosen() == ["xla"] * 3
    with traced_for("tpu"):
        assert chosen() == ["tpu"] * 3


@pytest.mark.usefixtures("unchecked")
def test_the_gpu_kernels_are_chosen_for_what_a_card_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_slots, "platform", lambda: "gpu")
    monkeypatch.setattr(gpu_slots, "capability", lambda: "9.0")
    pool, records = shapes()[5], records_of()
    gate = {"A_log": SHAPE((8,), jnp.float32), "dt_bias": SHAPE((8, 128), jnp.float32)}
    wide = [SHAPE(x.shape, jnp.float32) for x in shapes()]
    raw = [SHAPE(x.shape, jnp.bfloat16) for x in shapes()[:5]]
    cases: list[tuple[Any, list[Any], dict[str, Any], str]] = [
        (kda_decode, [*shapes(), INDEX], {}, ""),
        (partial(kda_decode, gate_lower_bound=-5.0), [*raw, pool, INDEX], gate, ""),
        (kda_decode, [*raw, pool, INDEX], gate, "a gate that has no bound"),
        (kda_decode, [*wide, INDEX], {}, "other vectors than bfloat16"),
        (kda_verify, [*shapes(window=8), records, INDEX], {}, ""),
        (kda_verify, [*shapes(window=8), records_of(capacity=16), INDEX], {"committed": INDEX}, "committed records"),
        (kda_verify, [*shapes(window=9), records_of(capacity=16), INDEX], {}, "more than 8 tokens"),
        (kda_commit, [pool, records, INDEX, INDEX], {}, "commits"),
    ]
    for run, arguments, options, unproved in cases:
        for implementation in (None, "gpu"):
            with noted_choices() as choices:
                jax.eval_shape(partial(run, implementation=implementation), *arguments, **options)
            [choice] = choices.values()
            assert choice.name == ("xla" if unproved and implementation is None else "gpu")
            assert implementation is not None or unproved in choice.reason


@pytest.mark.usefixtures("unchecked")
def test_what_the_gpu_kernels_refuse() -> None:
    vectors, pool = {"q": shapes()[0]}, shapes()[5]
    assert gpu_slots.unfit(vectors, {}, pool, taps=4, capacity=16, tokens=16) is None
    assert "K=64 and V=64" in str(gpu_slots.unfit(vectors, {}, SHAPE((6, 8, 64, 64), jnp.float32)))
    assert "q has dtype float16" in str(gpu_slots.unfit({"q": SHAPE((4, 8, 128), jnp.float16)}, {}, pool))
    assert "g has dtype float64" in str(gpu_slots.unfit({}, {"g": np.zeros(1)}, pool))
    assert "3 taps" in str(gpu_slots.unfit(vectors, {}, pool, taps=3))
    assert "17 tokens" in str(gpu_slots.unfit(vectors, {}, pool, tokens=17))
    assert "12 records" in str(gpu_slots.unfit(vectors, {}, pool, capacity=12))
    with pytest.raises(UnsupportedImplementationError, match="Hopper GPUs, and the platform is 'cpu'"):
        jax.eval_shape(partial(kda_decode, implementation="gpu"), *shapes(), INDEX)


def test_states_that_vary_over_an_axis_are_left_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_slots, "platform", lambda: "gpu")
    monkeypatch.setattr(gpu_slots, "capability", lambda: "9.0")
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    by_head = [spec(None, "tensor")] * 6

    def chosen(check: bool) -> str:
        split = jax.shard_map(
            lambda *x: kda_decode(*x).o,
            mesh=mesh,
            in_specs=(*by_head, spec()),
            out_specs=spec(None, "tensor"),
            check_vma=check,
        )
        with noted_choices() as choices:
            jax.eval_shape(split, *shapes(), INDEX)
        return choices["kda_decode"].name

    assert chosen(check=False) == "gpu"
    assert chosen(check=True) == "xla"


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the shape checks that tests switch on: a user doesn't have them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def call(change: dict[str, Any]) -> None:
    names = ("q", "k", "v", "g", "beta", "state_pool", "slots")
    arguments = dict(zip(names, [*shapes(), INDEX], strict=True)) | change
    options = {name: arguments.pop(name) for name in ("scale", "gate_lower_bound") if name in arguments}
    jax.eval_shape(partial(kda_decode, **options), **arguments)


REFUSED = [
    ({"scale": -1.0}, ValueError, "scale is -1.0"),
    ({"A_log": SHAPE((8,), jnp.float32)}, ValueError, "A_log is given without dt_bias"),
    ({"gate_lower_bound": -5.0}, ValueError, "without A_log there is no gate"),
    ({"v": SHAPE((4, 8, 64), jnp.bfloat16)}, ValueError, r"v has shape \(4, 8, 64\)"),
    ({"slots": SHAPE((3,), jnp.int32)}, ValueError, r"q has shape"),
    ({"g": SHAPE((4, 8, 128), jnp.bfloat16)}, TypeError, "g has dtype bfloat16"),
    ({"state_pool": SHAPE((6, 8, 128, 128), jnp.bfloat16)}, TypeError, "state_pool has dtype bfloat16"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_what_it_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(change)


@pytest.mark.usefixtures("unchecked")
def test_records_need_room_for_the_window() -> None:
    with pytest.raises(ValueError, match="R >= 9"):
        jax.eval_shape(kda_verify, *shapes(window=9), records_of(), INDEX)
    vectors = [SHAPE(x.shape, jnp.float32) for x in shapes(window=8)]
    with pytest.raises(TypeError, match=r"k has dtype float32; it must be that of records\.k, bfloat16"):
        jax.eval_shape(kda_verify, *vectors, records_of(), INDEX)


# --- in place --------------------------------------------------------------------------------------------------------


def test_gpu_programs_write_the_pools_where_they_are() -> None:
    """They lower for a GPU that isn't there, every pool aliased with its result and nothing copied."""
    raw = [
        SHAPE((4, 8, 128), jnp.bfloat16),
        SHAPE((4, 8), jnp.bfloat16),
        SHAPE((8,), jnp.float32),
        SHAPE((8, 128), jnp.float32),
    ]
    channels = 3 * 8 * 128
    pool, tails = shapes()[5], SHAPE((6, 3, channels), jnp.bfloat16)
    front = gpu_decode.Front(-5.0)
    programs = {
        "decode": (
            partial(gpu_decode.decode, front=None, scale=SCALE, columns=64),
            (*shapes()[:5], None, None, pool, INDEX),
            7,
        ),
        "conv": (
            partial(gpu_decode.conv_decode, front=front, scale=SCALE, columns=64),
            (SHAPE((4, channels), jnp.bfloat16), SHAPE((channels, 4), jnp.float32), *raw, tails, pool, INDEX),
            (6, 7),
        ),
        "verify": (
            partial(gpu_verify.verify, scale=SCALE, blocks=264),
            (*shapes(window=8), tuple(records_of()), INDEX, INDEX),
            6,
        ),
        "commit": (partial(gpu_commit.commit, columns=64), (pool, tuple(records_of()), INDEX, INDEX), 0),
    }
    for name, (run, arguments, donated) in programs.items():
        lowered = jax.jit(run, donate_argnums=donated).trace(*arguments).lower(lowering_platforms=("cuda",))
        text = lowered.as_text()
        count = {"decode": 1, "conv": 2, "verify": 3, "commit": 1}[name]
        assert "mosaic_gpu" in text
        assert text.count("output_operand_alias<") == count
        assert text.count("tf.aliasing_output") == count


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("topology", ["v6e:2x2", slow("v5e:2x2"), slow("v5p:2x2x2"), slow("tpu7x:2x2x1")])
def test_tpu_programs_write_the_pools_where_they_are(topology: str) -> None:
    sharding = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])
    rows, heads, slots, window, capacity = 64, 12, 256, 8, 16

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda x: SHAPE(x.shape, x.dtype, sharding=sharding), tree)

    index = SHAPE((rows,), jnp.int32)
    records = records_of(slots, capacity, heads)
    pool = shapes(rows, heads, pool=slots)[5]
    programs: list[tuple[Any, list[Any], int, Any]] = [
        (kda_decode, [*shapes(rows, heads, pool=slots), index], 5, pool),
        (
            lambda *x, **options: kda_verify(*x[:-1], committed=x[-1], **options),
            [*shapes(rows, heads, pool=slots, window=window), records, index, index],
            6,
            records,
        ),
        (kda_commit, [pool, records, index, index], 0, pool),
    ]
    for run, arguments, donated, held in programs:
        jitted = jax.jit(partial(run, implementation="tpu"), donate_argnums=donated)
        memory = jitted.lower(*placed(arguments)).compile().memory_analysis()
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))
        assert memory.alias_size_in_bytes >= size
        # A few tokens' arrays, not a pool.
        assert memory.temp_size_in_bytes < size / 4
