"""The TPU kernel of sparse MLA, interpreted on a CPU, and compiled for chips that aren't there.

Interpreted memory starts as NaN and is watched for races. A copied row takes milliseconds there, so most tiles are empty.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.layout import Format, Layout
from jax.experimental.pallas import tpu as pltpu

from kimi_jax.planning import topology_devices
from pallas_kernels.dispatch import UnsupportedImplementationError, noted_choices
from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.lightning_indexer import TwoStage
from pallas_kernels.sparse_mla import dsa_mla, kernel_dsa, paged_sparse_mla, sparse_mla, specs, tpu, xla
from pallas_kernels.target import traced_for

BF16 = jnp.dtype("bfloat16")
WATCHED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x2", "v6e:2x2", "tpu7x:2x2x1")
BY_NAME = {spec.name: spec for spec in specs.SPECS}
B, T, H, L, R, S, C = 2, 5, 3, 128, 64, 64, 200  # ten queries in blocks of eight, two tiles of keys each
SCALE = 0.07


def draw(q_dtype: str, latent: str, heads: int = H, seed: int = 0) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """Queries and a cache, and what they are in float64."""
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.standard_normal((B, T, heads, L + R)), q_dtype)
    rows = rng.standard_normal((B, S, L + R))
    cache: Any = Fp8Latent.quantize(jnp.asarray(rows, jnp.float32), L) if latent == "fp8" else jnp.asarray(rows, latent)
    return q, cache, np.asarray(q, np.float64), stored(cache, q.dtype)


def stored(cache: Any, dtype: Any) -> np.ndarray:
    """The numbers of a cache; those of FP8 latents by their definition, then rounded as the kernel must."""
    if not isinstance(cache, Fp8Latent):
        return np.asarray(cache, np.float64)
    packed = np.asarray(cache.packed)
    codes = packed[..., :L].view(jnp.float8_e4m3fn).astype(np.float64)
    scales = np.ascontiguousarray(packed[..., L : L + 4 * (L // 128)]).view("<f4").astype(np.float64)
    slot = np.ascontiguousarray(packed[..., L + 4 * (L // 128) :]).view(BF16).astype(np.float64)
    latent = (codes * np.repeat(scales, 128, axis=-1)).astype(np.float32).astype(dtype).astype(np.float64)
    return np.concatenate([latent, slot], axis=-1)


def oracle(q: np.ndarray, rows: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    batch, tokens, heads, _ = q.shape
    o, lse = np.zeros((batch, tokens, heads, L)), np.full((batch, tokens, heads), -np.inf)
    for b, t, h in np.ndindex(batch, tokens, heads):
        keys = rows[b, [i for i in indices[b, t] if 0 <= i < rows.shape[1]]]
        if len(keys):
            scores = SCALE * keys @ q[b, t, h]
            p = np.exp(scores - scores.max())
            o[b, t, h] = p @ keys[:, :L] / p.sum()
            lse[b, t, h] = scores.max() + np.log(p.sum())
    return o, lse


def watched(q: Any, cache: Any, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    o, lse = tpu.attend(q, cache, jnp.asarray(indices, jnp.int32), L, SCALE, WATCHED, 128)
    assert o.dtype == q.dtype
    assert lse.dtype == jnp.float32
    o, lse = np.asarray(o).astype(np.float64), np.asarray(lse).astype(np.float64)
    assert interpreter.races is not None
    assert not interpreter.races.races_found
    return o, lse


def selections() -> np.ndarray:
    """All in one tile; in the second only; nowhere, by -1 and by numbers that are too large; in both, some of them twice."""
    rng = np.random.default_rng(0)
    indices = np.full((B, T, C), -1)
    indices[0, 1, 5:90] = rng.permutation(S + 21)  # too large ones are skipped
    indices[0, 3, 150:] = rng.integers(0, S, 50)
    indices[0, 4] = S
    indices[1, 2] = rng.integers(-3, S + 3, C)
    indices[1, 4, 199] = 7  # one key, in the second block of queries
    return indices


@pytest.mark.parametrize(
    ("q_dtype", "latent"),
    [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32"), ("bfloat16", "fp8")],
)
def test_equals_the_formula(q_dtype: str, latent: str) -> None:
    q, cache, q64, rows = draw(q_dtype, latent)
    indices = selections()
    o, lse = watched(q, cache, indices)
    want, want_lse = oracle(q64, rows, indices)
    # bfloat16 rounds probabilities once and the result once.
    error = {"bfloat16": 2**-7, "float32": 2e-6}[q_dtype]
    np.testing.assert_allclose(o, want, rtol=error, atol=error)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=2e-6)
    empty = [(0, 0), (0, 2), (0, 4), (1, 0), (1, 1), (1, 3)]
    for b, t in empty:
        assert not np.any(o[b, t])
        assert np.all(lse[b, t] == -np.inf)
    np.testing.assert_allclose(o[1, 4], np.broadcast_to(rows[1, 7, :L], (H, L)), rtol=error)


def test_what_nobody_names_may_hold_anything() -> None:
    q, cache, _, _ = draw("bfloat16", "bfloat16", heads=1)
    indices = np.full((B, T, C), -1)
    indices[0, 0, :4], indices[1, 3, 60:63] = [1, 4, 63, S], [2, 32, 33]
    named = np.zeros((B, S), bool)
    named[0, [1, 4, 63]] = named[1, [2, 32, 33]] = True
    before = watched(q, cache, indices)
    spoiled = jnp.where(named[..., None], cache, jnp.nan)
    q = q.at[0, 1].set(jnp.nan)  # a query without keys
    after = watched(q, spoiled, indices)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.isfinite(after[0]).all()


def test_nothing_to_attend() -> None:
    q, cache, _, _ = draw("bfloat16", "bfloat16")
    o, lse = tpu.attend(q, cache, jnp.zeros((B, T, 0), jnp.int32), L, SCALE)
    assert not np.any(np.asarray(o, np.float32))
    assert np.all(np.asarray(lse) == -np.inf)
    o, lse = tpu.attend(q[:, :0], cache, jnp.zeros((B, 0, C), jnp.int32), L, SCALE)
    assert o.shape == (B, 0, H, L)
    assert lse.shape == (B, 0, H)


def test_every_fp8_number() -> None:
    # One key a query: its row comes back, so the value is the number itself. Scales and slots are bytes put together.
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].reshape(2, 127)
    rng = np.random.default_rng(0)
    packed = np.zeros((B, S, L + 4 + 2 * R), np.uint8)
    packed[:, :, :127] = codes[np.arange(S) % 2]
    scales = np.exp(rng.uniform(-8, 8, (B, S, 1))).astype(np.float32)
    packed[..., L : L + 4] = scales.view(np.uint8)
    packed[..., L + 4 :] = rng.standard_normal((B, S, R)).astype(BF16).view(np.uint8)
    cache = Fp8Latent(jnp.asarray(packed), L, R)
    indices = np.full((B, T, 1), -1)
    indices[0, :4, 0], indices[1, 3, 0] = [0, 1, 2, 63], 7
    q = np.zeros((B, T, 1, L + R), np.float32)
    q[..., L + 5] = 1
    o, lse = watched(jnp.asarray(q), cache, indices)
    rows = stored(cache, np.float32)
    for b, t in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 3)):
        row = rows[b, indices[b, t, 0]]
        np.testing.assert_array_equal(o[b, t, 0], row[:L])
        np.testing.assert_allclose(lse[b, t, 0], SCALE * row[L + 5], rtol=1e-6)


def test_its_gradient_is_that_of_xla() -> None:
    q, cache, _, _ = draw("float32", "float32", heads=1)
    indices = np.full((B, T, C), -1)
    indices[0, 2, :6], indices[1, 1, :3] = [3, 5, 5, 9, S, 11], [0, 2, 63]
    chosen = jnp.asarray(indices, jnp.int32)
    d_o, d_lse = (jnp.asarray(np.random.default_rng(1).standard_normal(shape)) for shape in ((B, T, 1, L), (B, T, 1)))

    def gradient(run: Any) -> Any:
        def loss(q: jax.Array, cache: jax.Array) -> jax.Array:
            o, lse = run(q, cache)
            return jnp.sum(o * d_o) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0) * d_lse)

        return jax.jit(jax.grad(loss, (0, 1)))(q, cache)

    kernel = gradient(lambda q, cache: tpu.sparse_mla(q, cache, chosen, L, SCALE, 2**20, WATCHED))
    plain = gradient(lambda q, cache: xla.sparse_mla(q, cache, chosen, latent_width=L, scale=SCALE, budget_bytes=2**20))
    for one, other in zip(kernel, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
        assert np.any(np.asarray(one))


# --- which calls it takes --------------------------------------------------------------------------------------------


def shapes(spec: specs.MlaSpec, packed: bool = False, place: Any = None) -> dict[str, Any]:
    """Abstract arguments, all in the order of their axes in memory."""

    def array(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        by_row = None if place is None else Format(Layout(tuple(range(x.ndim))), place)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_row)

    found: dict[str, Any] = {name: array(x) for name, x in spec.sparse_arguments().items()}
    if packed:
        size = (spec.batch, spec.keys, spec.latent + 4 * spec.latent // 128 + 2 * spec.slot)
        found["latent"] = Fp8Latent(array(jax.ShapeDtypeStruct(size, jnp.uint8)), spec.latent, spec.slot)
    return found


def call(spec: specs.MlaSpec, implementation: Any = None) -> Any:
    return partial(sparse_mla, latent_width=spec.latent, scale=spec.scale, implementation=implementation)


def test_where_it_is_chosen() -> None:
    small = specs.MlaSpec("small", 1, 2, 64, 4, top_k=16)
    for implementation, name in ((None, "xla"), ("tpu", "tpu")):
        with noted_choices() as chosen:
            jax.eval_shape(call(small, implementation), **shapes(small))
        assert chosen["sparse_mla"].name == name
    with traced_for("tpu"):
        for spec in (*specs.PREFILL, *specs.DECODE, specs.LONG):
            for packed in (False, True):
                with noted_choices() as chosen:
                    o, lse = jax.eval_shape(call(spec), **shapes(spec, packed))
                assert chosen["sparse_mla"].name == "tpu"
                assert o.shape == (spec.batch, spec.queries, spec.heads, spec.latent)
                assert lse.shape == o.shape[:3]
        with noted_choices() as chosen:
            jax.eval_shape(call(specs.TINY[0]), **shapes(specs.TINY[0]))
        assert chosen["sparse_mla"].name == "xla"


def test_pages_are_read_where_they_are() -> None:
    shape = jax.ShapeDtypeStruct
    q, pages = shape((3, 1, 4, 576), BF16), shape((5, 32, 576), BF16)
    options = {"latent_width": 512, "scale": 0.1, "implementation": "tpu"}
    with noted_choices() as chosen:
        jax.eval_shape(
            lambda q, pages, indices, table: paged_sparse_mla(q, pages, indices, page_table=table, **options),
            q,
            pages,
            shape((3, 1, 8), jnp.int32),
            shape((3, 2), jnp.int32),
        )
    assert chosen["sparse_mla"].name == "tpu"


def test_what_it_cannot_do_is_said() -> None:
    cache = jnp.zeros((1, 64, 192), BF16)
    assert tpu.unfit((1, 2, 3, 192), BF16, cache, 128) is None
    assert "queries have dtype float16" in str(tpu.unfit((1, 2, 3, 192), jnp.float16, cache, 128))
    assert "latents have dtype float16" in str(tpu.unfit((1, 2, 3, 192), BF16, cache.astype(jnp.float16), 128))
    assert "values have 96 channels" in str(tpu.unfit((1, 2, 3, 192), BF16, cache, 96))
    assert "the cache has 40 rows; the TPU kernel takes multiples of 32" in str(
        tpu.unfit((1, 2, 3, 192), BF16, cache[:, :40], 128)
    )
    wide = Fp8Latent.zeros((1, 64), 256, 64)
    assert "values have 128 channels, FP8 latents 256" in str(tpu.unfit((1, 2, 3, 320), BF16, wide, 128))
    assert "4000 heads of 192 channels don't fit in VMEM" in str(tpu.unfit((1, 2, 4000, 192), BF16, cache, 128))
    indices = jnp.zeros((1, 2, 4), jnp.int32)
    with pytest.raises(UnsupportedImplementationError, match="needs a TPU, and the platform is 'cpu'"):
        sparse_mla(jnp.zeros((1, 2, 3, 192), BF16), cache, indices, latent_width=128, scale=0.1, implementation="tpu")


def test_queries_spread_over_a_mesh() -> None:
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    by_head, everywhere = jax.sharding.PartitionSpec(None, None, "tensor"), jax.sharding.PartitionSpec()
    small = specs.MlaSpec("small", 1, 2, 64, 4, top_k=16)
    inputs = shapes(small)

    @partial(jax.shard_map, mesh=mesh, in_specs=(by_head, everywhere, everywhere), out_specs=by_head)
    def split(q: jax.Array, latent: jax.Array, indices: jax.Array) -> jax.Array:
        return call(small, "tpu")(q, latent, indices)[0]

    with jax.set_mesh(mesh):
        with pytest.raises(UnsupportedImplementationError, match=r"mesh axes 'tensor' .* inside jax\.shard_map"):
            jax.eval_shape(call(small, "tpu"), **inputs)
        result = jax.eval_shape(split, *inputs.values())
    assert result.shape == (1, 2, 4, 512)


# --- compiled for TPUs that aren't there -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "name", "packed"),
    [
        *((topology, "k31-prefill-4096x32768-h96", False) for topology in TOPOLOGIES),
        *((topology, "k31-decode-64x1-h96", True) for topology in TOPOLOGIES[::3]),
        ("v6e:2x2", "k31-decode-64x4-h12", False),
    ],
)
def test_compiles_without_copies(topology: str, name: str, packed: bool) -> None:
    spec = BY_NAME[name]
    place = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])
    with traced_for("tpu"), noted_choices() as chosen:
        compiled = jax.jit(call(spec)).lower(**shapes(spec, packed, place)).compile()
    assert chosen["sparse_mla"].name == "tpu"
    memory = compiled.memory_analysis()
    assert memory is not None
    # Selections exist once more, and the log-sum-exp is laid out anew. The cache isn't: rows are fetched from where
    # they are.
    selections = 4 * spec.batch * spec.queries * 2048
    assert memory.temp_size_in_bytes < 2**20 + selections + 8 * spec.batch * spec.queries * 128


# --- with the selection ----------------------------------------------------------------------------------------------


def test_selected_keys_are_handed_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = tpu.attend

    def interpreted(q: Any, latent: Any, indices: Any, width: int, scale: float, interpret: Any) -> Any:
        assert not interpret
        return attend(q, latent, indices, width, scale, WATCHED, 128)

    monkeypatch.setattr(tpu, "attend", interpreted)
    rng = np.random.default_rng(3)
    shapes = {"index_q": (B, T, 2, 8), "index_k": (B, S, 8), "index_w": (B, T, 2), "q": (B, T, H, 16 + R)}
    shapes |= {"latent": (B, S, L + R), "w_uk": (H, 16, L), "w_uv": (H, 16, L)}
    inputs = {name: jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32) for name, shape in shapes.items()}
    positions = jnp.tile(jnp.arange(S - T, S), (B, 1)).at[1, -2:].set(-1)
    options: dict[str, Any] = {"top_k": 6, "q_positions": positions, "scale": SCALE, "return_indices": True}
    out, indices = kernel_dsa.dsa_mla(**inputs, **options, kernel="tpu", budget_bytes=2**20)
    want, chosen = dsa_mla(**inputs, **options, form="gather", implementation="xla")
    np.testing.assert_array_equal(np.asarray(indices), np.asarray(chosen))
    np.testing.assert_allclose(np.asarray(out), np.asarray(want), atol=2e-5)
    assert np.abs(np.asarray(want)).max() > 0.5


def long_rows(keys: int) -> tuple[dict[str, Any], dict[str, Any]]:
    sharding = jax.sharding.SingleDeviceSharding(topology_devices("v5p:2x2x2")[0])

    def array(*sizes: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    inputs = {"index_q": array(1, 64, 32, 128), "index_k": array(1, keys, 128), "q": array(1, 64, 24, 192)}
    inputs |= {"index_w": array(1, 64, 32, dtype=jnp.float32), "latent": array(1, keys, 576)}
    inputs |= {"w_uk": array(24, 128, 512), "w_uv": array(24, 128, 512)}
    return inputs, {"top_k": 2048, "scale": SCALE}


@pytest.mark.parametrize("keys", [2**17, 2**18])
def test_long_rows_take_kernels_by_themselves(keys: int) -> None:
    inputs, options = long_rows(keys)

    def run(inputs: dict[str, Any]) -> Any:
        positions = keys - 64 + jnp.arange(64, dtype=jnp.int32)[None]
        return dsa_mla(**inputs, **options, q_positions=positions)

    with traced_for("tpu"), noted_choices() as choices:
        lowered = jax.jit(run).lower(inputs)
    assert choices["dsa_mla"].name == ("tpu" if keys == 2**18 else "xla")
    if keys == 2**18:
        memory = lowered.compile().memory_analysis()
        # The cache once, with whole lanes in a row; scores of all keys would be 64 MiB more.
        assert memory.temp_size_in_bytes < keys * 640 * 2 + 2**24


def test_what_has_no_kernel_is_said() -> None:
    inputs, options = long_rows(2**18)

    def said(**change: Any) -> str:
        given: dict[str, Any] = {"top_k": options["top_k"], "form": None, "two_stage": None, "named": True} | change
        found = []

        def ask(inputs: dict[str, Any]) -> None:
            arguments = [inputs[name] for name in ("index_q", "index_k", "index_w", "q", "latent", "w_uk")]
            found.append(str(kernel_dsa.tpu_obstacle(*arguments, **given)))

        jax.eval_shape(ask, inputs)
        return found[0]

    assert said() == "None"
    assert "form='mask'" in said(form="mask")
    assert "no more than top_k" in said(top_k=2**18)
    assert "at most 2048" in said(top_k=4096)
    assert "two stages choose blocks of 8" in said(two_stage=TwoStage(8, 0.1, "mean"))
    assert said(two_stage=TwoStage()) == said()
