"""The kernels of Attention Residuals, interpreted on a CPU, and compiled for chips that aren't there."""

from functools import partial as bound
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from kimi_jax.planning import topology_devices
from pallas_kernels.attn_res import attn_res, gpu, normed, specs, tpu
from pallas_kernels.dispatch import UnsupportedImplementationError, noted_choices
from pallas_kernels.target import traced_for
from tests.pallas_kernels.test_grouped_matmul_gpu import interpreter

R, T, D = 3, 21, 1024
EPS, OUT_EPS = 1e-5, 1e-4
BF16 = jnp.dtype("bfloat16")
WATCHED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x2", "v6e:2x2", "tpu7x:2x2x1")


def inputs(num_rows: int, dtype: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Numbers that `dtype` holds, as float64; rows that aren't there are NaN."""
    rng = np.random.default_rng(seed)
    bank = rng.standard_normal((R, 1, T, D)) * np.array([0.1, 1, 30])[:, None, None, None]
    bank[num_rows:] = np.nan
    found = {"partial": 3 * rng.standard_normal((1, T, D)), "bank": bank}
    found = {name: x.astype(jnp.dtype(dtype)).astype(np.float64) for name, x in found.items()}
    vectors = {"query": rng.standard_normal(D) / 16, "norm_weight": 1 + 0.3 * rng.standard_normal(D)}
    return found | {name: x.astype(np.float32).astype(np.float64) for name, x in vectors.items()}


def oracle(values: dict[str, np.ndarray], num_rows: int) -> np.ndarray:
    rows = np.concatenate([values["bank"][:num_rows], values["partial"][None]])
    scale = 1 / np.sqrt(np.mean(rows**2, axis=-1) + EPS)
    scores = rows @ (values["norm_weight"] * values["query"]) * scale
    weights = np.exp(scores - scores.max(0))
    return np.einsum("rbt,rbtd->btd", weights / weights.sum(0), rows)


def run(kernel: str, dtype: str, num_rows: int, values: dict[str, np.ndarray], *norm: Any) -> np.ndarray:
    arrays = jnp.asarray(values["partial"], dtype), jnp.asarray(values["bank"], dtype), jnp.int32(num_rows)
    vectors = (jnp.asarray(values[name], jnp.float32) for name in ("query", "norm_weight"))
    mix, how = (gpu.mix, interpreter()) if kernel == "gpu" else (tpu.mix, WATCHED)
    got = np.asarray(mix(*arrays, *vectors, EPS, *(norm or (None, 0.0)), how))
    if kernel == "tpu":
        assert interpret_pallas_call.races is not None
        assert not interpret_pallas_call.races.races_found
    assert got.dtype == jnp.dtype(dtype)
    return got.astype(np.float64)


KERNELS = [("gpu", "bfloat16"), ("tpu", "bfloat16"), ("tpu", "float32")]


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_equals_the_formula_whatever_unused_rows_hold(kernel: str, dtype: str) -> None:
    for num_rows in range(R + 1):
        values = inputs(num_rows, dtype)
        got, want = run(kernel, dtype, num_rows, values), oracle(values, num_rows)
        tolerance = 2**-8 if dtype == "bfloat16" else 2e-6
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())
        if num_rows == 0:
            np.testing.assert_array_equal(got, values["partial"])


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_the_norm_that_follows(kernel: str, dtype: str) -> None:
    values = inputs(2, dtype)
    weight = jnp.asarray(np.random.default_rng(1).standard_normal(D), dtype)
    got = run(kernel, dtype, 2, values, weight, OUT_EPS)
    mixture = run(kernel, dtype, 2, values)  # rounded to its dtype before it is normalised
    want = mixture / np.sqrt(np.mean(mixture**2, axis=-1, keepdims=True) + OUT_EPS)
    # Rounded a second time before the weight, and once more after it.
    tolerance = 2**-7 if dtype == "bfloat16" else 2e-6
    np.testing.assert_allclose(got, want * np.asarray(weight, np.float64), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS[:2])
def test_a_token_changes_no_bit_of_another(kernel: str, dtype: str) -> None:
    values = inputs(R, dtype)
    before = run(kernel, dtype, R, values)
    for name in ("partial", "bank"):
        values[name][..., 5, :] = np.nan
    after = run(kernel, dtype, R, values)
    others = np.arange(T) != 5
    np.testing.assert_array_equal(after[:, others], before[:, others])
    assert np.all(np.isnan(after[:, 5]))


def test_the_gradient_is_that_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    values = inputs(2, "float32", seed=3)
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in values.items()}
    arrays["weight"] = jnp.asarray(np.random.default_rng(1).standard_normal(D), jnp.float32)
    target = jnp.asarray(np.random.default_rng(2).standard_normal((1, T, D)), jnp.float32)

    def kernel(arrays: dict[str, jax.Array]) -> jax.Array:
        mix = bound(tpu.mix, interpret=WATCHED)
        inputs = (arrays[name] for name in ("partial", "bank"))
        vectors = (arrays[name] for name in ("query", "norm_weight", "weight"))
        return jnp.sum(target * normed(mix, OUT_EPS, EPS, *inputs, jnp.int32(2), *vectors))

    def plain(arrays: dict[str, jax.Array]) -> jax.Array:
        named = {name: x for name, x in arrays.items() if name != "weight"}
        options = {"out_norm_weight": arrays["weight"], "out_eps": OUT_EPS, "implementation": "xla"}
        return jnp.sum(target * attn_res(num_rows=2, eps=EPS, **named, **options))

    got, want = jax.jit(jax.grad(kernel))(arrays), jax.jit(jax.grad(plain))(arrays)
    for name, gradient in want.items():
        gradient = np.asarray(gradient)
        assert np.all(np.isfinite(gradient))
        np.testing.assert_allclose(got[name], gradient, rtol=1e-4, atol=1e-5 * np.abs(gradient).max(), err_msg=name)


def arguments(spec: specs.AttnResSpec, place: Any = None) -> list[jax.ShapeDtypeStruct]:
    token = (spec.batch, spec.tokens, spec.width)
    shapes: list[tuple[tuple[int, ...], Any]] = [(token, BF16), ((spec.rows, *token), BF16), ((), jnp.int32)]
    shapes += [((spec.width,), BF16)] * 3
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in shapes]


def mix_and_norm(partial: Any, bank: Any, count: Any, query: Any, norm: Any, after: Any) -> jax.Array:
    return attn_res(partial, bank, count, query, norm, out_norm_weight=after)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("spec", [specs.SPECS[0], specs.SPECS[2]], ids=lambda spec: spec.name)
def test_compiles_for_tpus_without_temporaries(topology: str, spec: specs.AttnResSpec) -> None:
    place = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])
    with traced_for("tpu"), noted_choices() as chosen:
        memory = jax.jit(mix_and_norm).lower(*arguments(spec, place)).compile().memory_analysis()
    assert chosen["attn_res"].name == "tpu"
    assert memory is not None
    row = 2 * spec.batch * spec.tokens * spec.width
    assert memory.temp_size_in_bytes <= max(row // 8, 2**20)


@pytest.mark.parametrize("spec", specs.SPECS, ids=lambda spec: spec.name)
def test_lowers_for_a_gpu(spec: specs.AttnResSpec) -> None:
    def call(*arrays: jax.Array) -> jax.Array:
        assert gpu.unfit(arrays[0], arrays[1]) is None
        return gpu.mix(*arrays[:5], EPS, arrays[5], OUT_EPS)

    shapes = arguments(spec)
    text = jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_it_says_why_a_kernel_is_not_for_a_call() -> None:
    arrays = [jnp.zeros(x.shape, x.dtype) for x in arguments(specs.AttnResSpec("small", 1, 2, 96, 2))]
    for name, reason in {"gpu": "the platform is 'cpu'", "tpu": "96 wide"}.items():
        with pytest.raises(UnsupportedImplementationError, match=reason):
            attn_res(*arrays[:5], implementation=name)  # pyright: ignore[reportArgumentType]
    assert gpu.unfit(arrays[0], arrays[1]) == "rows are 96 wide; it takes multiples of 1024 up to 8192."
    wide = arrays[0].astype(jnp.float32)
    assert gpu.unfit(wide, arrays[1]) == "partial has dtype float32; it takes bfloat16."


def test_xla_applies_the_norm_as_well() -> None:
    values = inputs(R, "float32")
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in values.items()}
    weight = jnp.linspace(-1, 1, D)
    got = attn_res(num_rows=R, eps=EPS, **arrays, out_norm_weight=weight, out_eps=OUT_EPS, implementation="xla")
    mixture = oracle(values, R)
    want = np.asarray(weight) * mixture / np.sqrt(np.mean(mixture**2, axis=-1, keepdims=True) + OUT_EPS)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
