"""The gradient kernel of sparse MLA, interpreted on a CPU or lowered for a GPU that isn't there, against float64."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_mla import gpu, gpu_backward, gpu_shares, kl, sparse_mla, specs, xla
from pallas_kernels.sparse_mla.gpu_backward import Tuning

BF16 = jnp.dtype("bfloat16")
WIDTH, VALUE, SCALE = 576, 512, 192**-0.5
SMALL = Tuning(16, 10, 2, (104, 240, 128, 40), staged=False)


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


def oracle(
    q: np.ndarray, latent: np.ndarray, indices: np.ndarray, do: np.ndarray, dlse: np.ndarray, rounded: bool = False
) -> tuple[np.ndarray, ...]:
    """Results, then gradients of queries and latents, one query after the other in float64.

    `rounded`: of results as bfloat16 has them, from which sum_j p_j dp_j = do . o comes.
    """
    o, lse = np.zeros(do.shape), np.full(dlse.shape, -np.inf)
    dq, dlatent = np.zeros(q.shape), np.zeros(latent.shape)
    for b, t in np.ndindex(*q.shape[:2]):
        chosen = [i for i in indices[b, t] if 0 <= i < latent.shape[1]]
        if not chosen:
            continue
        keys = latent[b, chosen]
        scores = SCALE * q[b, t] @ keys.T
        top = scores.max(axis=-1, keepdims=True)
        p = np.exp(scores - top)
        total = p.sum(axis=-1, keepdims=True)
        p /= total
        o[b, t], lse[b, t] = p @ keys[:, :VALUE], (top + np.log(total))[:, 0]
        # d score_c = p_c (dp_c - sum_j p_j dp_j + dlse)
        dp = do[b, t] @ keys[:, :VALUE].T
        known = o[b, t].astype(BF16).astype(np.float64) if rounded else o[b, t]
        slopes = SCALE * p * (dp - np.sum(do[b, t] * known, axis=-1, keepdims=True) + dlse[b, t, :, None])
        dq[b, t] = slopes @ keys
        dkeys = slopes.T @ q[b, t]
        dkeys[:, :VALUE] += p.T @ do[b, t]
        np.add.at(dlatent[b], chosen, dkeys)
    return o, lse, dq, dlatent


def run(tuning: Tuning, q: np.ndarray, latent: np.ndarray, indices: np.ndarray, *rest: np.ndarray) -> list[np.ndarray]:
    """Gradients by the kernel; `rest` are o, lse, do and dlse."""
    o, lse, do, dlse = rest
    arrays = [jnp.asarray(q, BF16), jnp.asarray(latent, BF16), jnp.asarray(indices, jnp.int32), jnp.asarray(o, BF16)]
    arrays += [jnp.asarray(lse, jnp.float32), jnp.asarray(do, BF16), jnp.asarray(dlse, jnp.float32)]
    got = gpu_backward.gradient(*arrays, SCALE, tuning, interpreter())
    return [np.asarray(x).astype(np.float64) for x in got]


def distance(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def test_gradients_of_queries_and_latents() -> None:
    # Two batch rows, two tiles of keys, the last one cut short; heads that don't fill a block of threads.
    heads, keys, rng = 13, 80, np.random.default_rng(0)
    q, latent = draw(2, 1, heads, WIDTH, seed=1, times=3), draw(2, keys, WIDTH, seed=2, times=0.25)
    indices = rng.integers(0, keys - 5, (2, 1, 120))  # many of them twice
    indices[0, 0, 100:] = -1
    indices[1, 0, :64] = keys + np.arange(64)  # a whole tile of keys that don't exist, before those that do
    do, dlse = draw(2, 1, heads, VALUE, seed=3), draw(2, 1, heads, seed=4)
    o, lse, *want = oracle(q, latent, indices, do, dlse)
    absent = [np.setdiff1d(np.arange(keys), indices[b]) for b in range(2)]
    for b in range(2):
        latent[b, absent[b]] = np.nan
    dq, dlatent = run(SMALL, q, latent, indices, o, lse, do, dlse)
    assert distance(dq, want[0]) < 4e-3
    assert distance(dlatent, want[1]) < 4e-3
    for b in range(2):
        np.testing.assert_array_equal(dlatent[b, absent[b]], 0)


def test_large_scores_and_a_query_without_keys() -> None:
    # One key takes nearly all of the softmax of most heads: ds is the difference of nearly equal numbers there.
    q, latent = draw(1, 2, 16, WIDTH, seed=0, times=3), draw(1, 40, WIDTH, seed=1, times=0.25)
    latent[..., 0], q[..., 0] = np.linspace(0, 64, 40).astype(BF16), np.linspace(-96, 96, 16).astype(BF16)
    indices = np.stack([np.concatenate([np.arange(40), np.arange(24)]), np.full(64, -1)])[None]
    do, dlse = draw(1, 2, 16, VALUE, seed=3), draw(1, 2, 16, seed=4)
    o, lse, *want = oracle(q, latent, indices, do, dlse, rounded=True)
    dq, dlatent = run(replace(SMALL, together=3, staged=True), q, latent, indices, o, lse, do, dlse)
    assert distance(dlatent, want[1]) < 4e-3
    assert distance(dq, want[0]) < 4e-3
    np.testing.assert_array_equal(dq[0, 1], 0)


def test_the_mean_over_heads_of_probabilities() -> None:
    q, latent = draw(2, 1, 13, WIDTH, seed=1, times=3), draw(2, 40, WIDTH, seed=2, times=0.25)
    indices = np.random.default_rng(0).integers(-3, 43, (2, 1, 50))
    _, lse, *_ = oracle(q, latent, indices, np.zeros((2, 1, 13, VALUE)), np.zeros((2, 1, 13)))
    want = np.zeros(indices.shape)
    for b, c in np.ndindex(2, 50):
        i = indices[b, 0, c]
        if 0 <= i < 40:
            want[b, 0, c] = np.mean(np.exp(SCALE * q[b, 0] @ latent[b, i] - lse[b, 0]))
    arrays = jnp.asarray(q, BF16), jnp.asarray(latent, BF16), jnp.asarray(indices, jnp.int32)
    got = gpu_shares.mean_probabilities(*arrays, jnp.asarray(lse, jnp.float32), SCALE, interpreter())
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(np.sum(np.asarray(got), axis=-1), 1, rtol=1e-5)


def test_the_loss_takes_both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Any, latent: Any, indices: Any, width: int, scale: float, budget_bytes: int) -> Any:
        return xla.sparse_mla(q, latent, indices, latent_width=width, scale=scale, budget_bytes=budget_bytes)

    def share(q: Any, latent: Any, indices: Any, lse: Any, scale: float) -> Any:
        valid = indices >= 0
        rows = jax.vmap(lambda rows, chosen: rows[chosen])(latent, jnp.where(valid, indices, 0)).astype(jnp.float32)
        scores = jnp.einsum("bthk,btck->bthc", q.astype(jnp.float32), rows)
        return jnp.where(valid, jnp.mean(jnp.exp(scale * scores - lse[..., None]), axis=2), 0)

    monkeypatch.setattr(gpu, "sparse_mla", attend)
    monkeypatch.setattr(gpu_shares, "mean_probabilities", share)
    shapes = {"index_q": (1, 7, 2, 8), "index_k": (1, 30, 8), "index_w": (1, 7, 2), "q": (1, 7, 3, 16 + 64)}
    shapes |= {"latent": (1, 30, WIDTH), "w_uk": (3, 16, VALUE)}
    inputs = {name: jnp.asarray(draw(*shape, seed=i) / 4, BF16) for i, (name, shape) in enumerate(shapes.items())}
    inputs["index_w"] = inputs["index_w"].astype(jnp.float32)
    positions = jnp.arange(23, 30)[None].at[0, 2].set(-1).at[0, 3].set(4)
    options: Any = {"top_k": 8, "q_positions": positions, "scale": SCALE, "segment_ids": None, "key_segment_ids": None}

    def loss(index_q: jax.Array, index_k: jax.Array, index_w: jax.Array, form: Any) -> jax.Array:
        rest = inputs["q"], inputs["latent"], inputs["w_uk"]
        return jnp.sum(kl.indexer_kl(index_q, index_k, index_w, *rest, **options, budget_bytes=60_000, form=form))

    indexer = inputs["index_q"], inputs["index_k"], inputs["index_w"]
    got, want = (jax.value_and_grad(loss, (0, 1, 2))(*indexer, form) for form in ("kernels", "mask"))
    np.testing.assert_allclose(float(got[0]), float(want[0]), rtol=1e-3)
    for one, other in zip(got[1], want[1], strict=True):
        assert distance(np.asarray(one).astype(np.float64), np.asarray(other).astype(np.float64)) < 1e-2
    arguments = inputs["index_k"], inputs["q"], inputs["latent"], inputs["w_uk"]
    assert "all visible keys has no GPU kernel" in str(kl.gpu_obstacle(*arguments, None))
    assert "30 keys are no more than top_k=30" in str(kl.gpu_obstacle(*arguments, 30))
    assert "the platform is 'cpu'" in str(kl.gpu_obstacle(*arguments, 8))


def test_real_shapes_fit_a_multiprocessor() -> None:
    for heads in {spec.heads for spec in specs.SPECS if spec.latent == VALUE}:
        tuning = gpu_backward.tuned(heads)
        assert gpu_backward.shared_bytes(tuning) <= 224 * 1024
        assert tuning.heads % 16 == 0
        assert tuning.heads * -(-heads // tuning.heads) - heads < 48
        assert sum(tuning.registers) <= 512
        assert tuning.slots >= WIDTH // 64


@pytest.mark.parametrize("heads", [96, 32, 12])
def test_it_lowers_for_a_gpu_that_is_not_here(heads: int) -> None:
    q = jax.ShapeDtypeStruct((1, 256, heads, WIDTH), BF16)
    latent = jax.ShapeDtypeStruct((1, 4096, WIDTH), BF16)
    indices = jax.ShapeDtypeStruct((1, 256, 2048), jnp.int32)

    def gradients(q: Any, latent: Any, indices: Any) -> Any:
        def loss(q: jax.Array, latent: jax.Array) -> jax.Array:
            o, lse = gpu_backward.sparse_mla(q, latent, indices, VALUE, SCALE, 2**30)
            return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(lse)

        return jax.grad(loss, (0, 1))(q, latent)

    lowered = jax.jit(gradients).trace(q, latent, indices).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 2
    dq, dlatent = jax.eval_shape(gradients, q, latent, indices)
    assert (dq.dtype, dlatent.dtype, dlatent.shape) == (BF16, BF16, latent.shape)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_the_oracle_agrees_with_the_other_implementations(implementation: Any) -> None:
    q, latent, indices = (
        draw(2, 2, 3, WIDTH, seed=0),
        draw(2, 9, WIDTH, seed=1),
        np.array([[[0, 3, 3], [8, -1, 9]]] * 2),
    )
    do, dlse = draw(2, 2, 3, VALUE, seed=2), draw(2, 2, 3, seed=3)
    _, _, *want = oracle(q, latent, indices, do, dlse)
    with jax.enable_x64():

        def attend(q: jax.Array, latent: jax.Array) -> Any:
            options: Any = {"latent_width": VALUE, "scale": SCALE, "implementation": implementation}
            return sparse_mla(q, latent, jnp.asarray(indices), **options)

        pull = jax.vjp(attend, jnp.asarray(q), jnp.asarray(latent))[1]
        got = [np.asarray(x) for x in pull((jnp.asarray(do), jnp.asarray(dlse)))]
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
