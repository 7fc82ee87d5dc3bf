"""The Hopper kernel of sparse MLA, interpreted on a CPU or lowered for a GPU that isn't there; FP8 latents everywhere."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedImplementationError
from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.sparse_mla import dsa_mla, gpu, gpu_backward, kernel_dsa, paged_sparse_mla, sparse_mla, specs, xla
from pallas_kernels.sparse_mla.gpu import Tuning

BF16 = jnp.dtype("bfloat16")
WIDTH, VALUE, SCALE = 576, 512, 192**-0.5
# The plain form, and the one in which two warpgroups both score and sum.
PLAIN = Tuning(16, 1, False, 3, 0, (152, 128, 40))
PAIRED = Tuning(32, 1, True, 1, 16, (240, 240, 24))


def interpreter() -> Any:
    """What Pallas takes to run a Mosaic GPU kernel on a CPU; private before jax 0.11."""
    public = getattr(plgpu, "InterpretGPUParams", None)
    if public is not None:
        return public()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def draw(*shape: int, seed: int, times: float = 1.0) -> np.ndarray:
    """Normal numbers that bfloat16 holds, as float64."""
    return (np.random.default_rng(seed).standard_normal(shape) * times).astype(BF16).astype(np.float64)


def oracle(q: np.ndarray, latent: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One query after the other in float64."""
    o, lse = np.zeros((*q.shape[:3], VALUE)), np.full(q.shape[:3], -np.inf)
    for b, t in np.ndindex(*q.shape[:2]):
        chosen = [i for i in indices[b, t] if 0 <= i < latent.shape[1]]
        if not chosen:
            continue
        keys = latent[b, chosen]
        scores = SCALE * q[b, t] @ keys.T
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        o[b, t] = weights / total @ keys[:, :VALUE]
        lse[b, t] = (top + np.log(total))[:, 0]
    return o, lse


def check(got: tuple[Any, Any], want: tuple[np.ndarray, np.ndarray]) -> None:
    """FlashMLA's tolerances for bfloat16, which are meant for values of a few tenths as here."""
    o, lse = (np.asarray(x).astype(np.float64) for x in got)
    np.testing.assert_allclose(o, want[0], atol=8e-4, rtol=3.01 / 128)
    np.testing.assert_allclose(lse, want[1], atol=1e-6, rtol=2.01 / 65536)
    both = np.sum(o * o + want[0] * want[0])
    assert both == 0 or 1 - 2 * np.sum(o * want[0]) / both < 7e-6


def run(tuning: Tuning, q: np.ndarray, latent: Any, indices: np.ndarray) -> tuple[jax.Array, jax.Array]:
    latent = latent if isinstance(latent, Fp8Latent) else jnp.asarray(latent, BF16)
    return gpu.attend(jnp.asarray(q, BF16), latent, jnp.asarray(indices, jnp.int32), SCALE, tuning, interpreter())


@pytest.mark.parametrize("tuning", [PLAIN, PAIRED], ids=["plain", "paired"])
def test_queries_over_their_keys(tuning: Tuning) -> None:
    # Two batch rows, two tiles of keys, the last one cut short; heads that don't fill a block of threads.
    heads, rng = tuning.heads - 3, np.random.default_rng(0)
    q, latent = draw(2, 1, heads, WIDTH, seed=1, times=6), draw(2, 80, WIDTH, seed=2, times=0.25)
    indices = rng.integers(0, 80, (2, 1, 120))
    indices[0, 0, 100:] = -1
    indices[1, 0, :64] = 80 + np.arange(64)  # a whole tile of keys that don't exist, before those that do
    absent = np.setdiff1d(np.arange(80), indices)
    latent[:, absent] = np.nan
    check(run(tuning, q, latent, indices), oracle(q, latent, indices))


def test_scores_that_grow_from_tile_to_tile_are_rescaled() -> None:
    q, latent = draw(1, 1, PAIRED.heads, WIDTH, seed=0, times=6), draw(1, 192, WIDTH, seed=1, times=0.25)
    # Scores rise by hundreds of powers of two from tile to tile for some heads, fall for others.
    latent[0, :, 0] = np.repeat([0.0, 64.0, 128.0], 64)
    q[0, 0, :, 0] = np.linspace(-96, 96, PAIRED.heads).astype(BF16)
    indices = np.arange(192)[None, None]
    for tuning in (PAIRED, replace(PLAIN, heads=32, turns=2)):
        check(run(tuning, q, latent, indices), oracle(q, latent, indices))


@pytest.mark.parametrize(
    "tuning",
    [replace(PLAIN, doubled=1, turns=2), replace(PAIRED, doubled=0, copiers=2)],
    ids=["two places for probabilities", "paired, two copy"],
)
def test_fp8_latents_in_parts(tuning: Tuning) -> None:
    q, latent = draw(1, 1, tuning.heads, WIDTH, seed=0, times=6), draw(1, 70, WIDTH, seed=1, times=0.25)
    indices = np.random.default_rng(2).integers(-9, 79, (1, 1, 128))
    packed = Fp8Latent.quantize(jnp.asarray(latent, jnp.float32), VALUE)
    known = np.asarray(packed.dequantize(BF16)).astype(np.float64)
    check(run(replace(tuning, splits=2), q, packed, indices), oracle(q, known, indices))


def test_a_query_without_keys() -> None:
    q, latent = draw(1, 1, 9, WIDTH, seed=0), draw(1, 9, WIDTH, seed=1)
    o, lse = run(PLAIN, q, latent, np.full((1, 1, 64), -1))
    np.testing.assert_array_equal(np.asarray(o).astype(np.float64), 0)
    np.testing.assert_array_equal(np.asarray(lse), -np.inf)


def test_parts_merge_into_the_whole() -> None:
    o, lse = draw(3, 4, 5, seed=0), draw(3, 4, seed=1)
    lse[0, 1], lse[:, 2] = -np.inf, -np.inf
    o[0, 1] = np.nan  # nobody wrote a part without keys
    got_o, got_lse = gpu.merge(jnp.asarray(o, jnp.float32), jnp.asarray(lse, jnp.float32), jnp.float32)
    total = np.exp(lse).sum(axis=0)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(np.asarray(got_lse), np.log(total), rtol=1e-6, atol=1e-6)
    want = np.nan_to_num(o * np.exp(lse)[..., None]).sum(axis=0) / np.where(total == 0, 1, total)[:, None]
    np.testing.assert_allclose(np.asarray(got_o), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_fp8_latents_are_dequantised_elsewhere_too(implementation: Any) -> None:
    q, latent = draw(2, 3, 4, WIDTH, seed=0, times=6), draw(2, 40, WIDTH, seed=1, times=0.25)
    indices = np.random.default_rng(2).integers(-9, 49, (2, 3, 30))
    packed = Fp8Latent.quantize(jnp.asarray(latent, jnp.float32), VALUE)
    got = sparse_mla(
        jnp.asarray(q, BF16),
        packed,
        jnp.asarray(indices),
        latent_width=VALUE,
        scale=SCALE,
        implementation=implementation,
    )
    check(got, oracle(q, np.asarray(packed.dequantize(BF16)).astype(np.float64), indices))


@pytest.mark.parametrize("packed", [False, True])
def test_pages(packed: bool) -> None:
    q, pool = draw(2, 2, 3, WIDTH, seed=0), draw(7, 16, WIDTH, seed=1)
    table = np.array([[3, 0, -1, 6], [5, 2, 1, 4]])
    indices = np.random.default_rng(2).integers(-4, 70, (2, 2, 24))
    pages: Any = jnp.asarray(pool, jnp.float32)
    if packed:
        pages = Fp8Latent.quantize(pages, VALUE)
        pool = np.asarray(pages.dequantize(jnp.float32)).astype(np.float64)
    options: Any = {"latent_width": VALUE, "scale": SCALE}
    got = paged_sparse_mla(
        jnp.asarray(q, jnp.float32), pages, jnp.asarray(indices), page_table=jnp.asarray(table), **options
    )
    rows = pool[np.maximum(table, 0)].reshape(2, 64, WIDTH)
    seen = np.where((indices // 16 == 2) & (np.arange(2) == 0)[:, None, None], -1, indices)  # it has no such page
    want = oracle(q, rows, seen)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=1e-4, atol=1e-5)
    # The same rows by their physical numbers.
    inside = (seen >= 0) & (seen < 64)
    places = np.where(inside, seen, 0)
    physical = np.take_along_axis(table, (places // 16).reshape(2, -1), axis=1).reshape(places.shape)
    physical = np.where(inside, physical * 16 + places % 16, 7 * 16 + 3)
    same = paged_sparse_mla(jnp.asarray(q, jnp.float32), pages, jnp.asarray(physical), **options)
    for one, other in zip(got, same, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_real_shapes_fit_a_multiprocessor() -> None:
    for spec in specs.SPECS:
        if spec.top_k is None or spec.latent != VALUE:
            continue
        for packed in (False, True):
            tuning = gpu.tuned(spec.batch * spec.queries, spec.heads, -(-spec.top_k // 64), packed)
            assert gpu.shared_bytes(tuning, packed) <= 227 * 1024 - 1024
            assert tuning.heads % (32 if tuning.paired else 16) == 0
            assert tuning.heads * -(-spec.heads // tuning.heads) - spec.heads < 32
            threads = (2, 0 if tuning.paired else 1, tuning.copiers)
            most = {3: 3 * 168, 4: 4 * 128}[sum(threads)]  # those of 64 Ki that a thread has at launch, in eights
            assert sum(count * size for count, size in zip(threads, tuning.registers, strict=True)) <= most
            assert 1 <= tuning.splits <= -(-spec.top_k // 64)


@pytest.mark.parametrize(
    ("heads", "queries", "packed"), [(96, 4096, False), (96, 8, True), (12, 8, False), (64, 128, True)]
)
def test_it_lowers_for_a_gpu_that_is_not_here(heads: int, queries: int, packed: bool) -> None:
    q = jax.ShapeDtypeStruct((1, queries, heads, WIDTH), BF16)
    latent: Any = jax.ShapeDtypeStruct((1, 32768, WIDTH), BF16)
    if packed:
        latent = Fp8Latent(jax.ShapeDtypeStruct((1, 32768, 656), jnp.uint8), VALUE, WIDTH - VALUE)
    indices = jax.ShapeDtypeStruct((1, queries, 2048), jnp.int32)
    tuning = gpu.tuned(queries, heads, 32, packed)

    def run(q: Any, latent: Any, indices: Any) -> Any:
        assert gpu.unfit(WIDTH, q.dtype, latent, VALUE) is None
        return gpu.attend(q, latent, indices, SCALE, tuning)

    lowered = jax.jit(run).trace(q, latent, indices).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_xla(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    def forward(q, latent, indices, scale, tuning):
        return xla.sparse_mla(q, latent, indices, latent_width=VALUE, scale=scale, budget_bytes=2**28)

    monkeypatch.setattr(gpu, "attend", forward)
    q, indices = jnp.asarray(draw(1, 3, 2, WIDTH, seed=0), BF16), jnp.asarray([[[0, 3, -1], [2, 2, 5], [-1, -1, -1]]])
    latent: Any = jnp.asarray(draw(1, 6, WIDTH, seed=1), BF16)
    latent = Fp8Latent.quantize(latent, VALUE) if packed else latent
    wanted = (0,) if packed else (0, 1)

    def gradients(attend: Any) -> Any:
        def loss(q: jax.Array, latent: Any) -> jax.Array:
            o, lse = attend(q, latent)
            return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse))

        return jax.grad(loss, wanted)(q, latent)

    mine = gradients(lambda q, latent: gpu.sparse_mla(q, latent, indices, VALUE, SCALE, 2**28))
    theirs = gradients(
        lambda q, latent: xla.sparse_mla(q, latent, indices, latent_width=VALUE, scale=SCALE, budget_bytes=2**28)
    )
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
        assert np.abs(np.asarray(one).astype(np.float64)).max() > 0


def test_selected_keys_are_handed_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(q, latent, indices, scale, tuning):
        return xla.sparse_mla(q, latent, indices, latent_width=VALUE, scale=scale, budget_bytes=2**28)

    def gradient(q, latent, indices, o, lse, do, dlse, scale, tuning):
        run = partial(xla.sparse_mla, indices=indices, latent_width=VALUE, scale=scale, budget_bytes=2**28)
        return jax.vjp(run, q, latent)[1]((do, dlse))

    monkeypatch.setattr(gpu, "attend", forward)
    monkeypatch.setattr(gpu_backward, "gradient", gradient)
    shapes = {"index_q": (2, 7, 2, 8), "index_k": (2, 40, 8), "index_w": (2, 7, 2), "q": (2, 7, 3, 16 + 64)}
    shapes |= {"latent": (2, 40, WIDTH), "w_uk": (3, 16, VALUE), "w_uv": (3, 16, VALUE)}
    inputs = {name: jnp.asarray(draw(*shape, seed=i) / 4, BF16) for i, (name, shape) in enumerate(shapes.items())}
    inputs["index_w"] = inputs["index_w"].astype(jnp.float32)
    options: Any = {"top_k": 8, "q_positions": jnp.tile(jnp.arange(30, 37), (2, 1)).at[1, -2:].set(-1), "scale": SCALE}

    def out(attend: Any, latent: jax.Array, **more: Any) -> Any:
        return attend(**{**inputs, "latent": latent}, **options, **more, budget_bytes=30_000, return_indices=True)

    got, indices = out(kernel_dsa.dsa_mla, inputs["latent"], kernel="gpu")
    want, chosen = out(dsa_mla, inputs["latent"], form="gather", implementation="xla")
    np.testing.assert_array_equal(np.asarray(indices), np.asarray(chosen))
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    np.testing.assert_allclose(got, want, atol=0.02, rtol=0.02)
    assert np.abs(want).max() > 0.5

    slopes = [
        jax.grad(lambda latent, f=f, more=more: jnp.sum(out(f, latent, **more)[0].astype(jnp.float32) ** 2))(
            inputs["latent"]
        )
        for f, more in ((kernel_dsa.dsa_mla, {"kernel": "gpu"}), (dsa_mla, {"form": "gather", "implementation": "xla"}))
    ]
    one, other = (np.asarray(slope).astype(np.float64) for slope in slopes)
    assert np.linalg.norm(one - other) < 0.02 * np.linalg.norm(other)
    arguments = [inputs[name] for name in ("index_k", "q", "latent", "w_uk")]
    assert "form='mask'" in str(kernel_dsa.gpu_obstacle(*arguments, top_k=8, form="mask"))
    assert "40 keys are no more than top_k=40" in str(kernel_dsa.gpu_obstacle(*arguments, top_k=40, form=None))


def test_what_it_cannot_do_is_said() -> None:
    q, latent = jnp.zeros((1, 1, 2, WIDTH), BF16), jnp.zeros((1, 8, WIDTH), BF16)
    assert gpu.unfit(WIDTH, BF16, latent, VALUE) is None
    assert gpu.unfit(WIDTH, BF16, Fp8Latent.zeros((1, 8), VALUE, WIDTH - VALUE), VALUE) is None
    assert "queries are float32" in str(gpu.unfit(WIDTH, jnp.float32, latent, VALUE))
    assert "latents are float32" in str(gpu.unfit(WIDTH, BF16, latent.astype(jnp.float32), VALUE))
    assert "values 256" in str(gpu.unfit(WIDTH, BF16, latent, 256))
    assert "keys have 512 channels" in str(gpu.unfit(512, BF16, latent[..., :512], VALUE))
    indices = jnp.zeros((1, 1, 4), jnp.int32)
    with pytest.raises(UnsupportedImplementationError, match="NVIDIA Hopper GPUs, and the platform is 'cpu'"):
        sparse_mla(q, latent, indices, latent_width=VALUE, scale=SCALE, implementation="gpu")
    with pytest.raises(ValueError, match=r"with 512 latent channels; it must be .* with latent_width=128"):
        sparse_mla(q, Fp8Latent.zeros((1, 8), VALUE, 64), indices, latent_width=128, scale=SCALE)
    with pytest.raises(ValueError, match="Fp8Latent of shape"):
        sparse_mla(q, Fp8Latent.zeros((2, 8), VALUE, 64), indices, latent_width=VALUE, scale=SCALE)
