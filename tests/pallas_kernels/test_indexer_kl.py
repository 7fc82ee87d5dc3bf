"""The indexer's loss against NumPy float64, query by query."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_mla import indexer_kl, kl

B, T, H, N, R, L, HI, K = 2, 12, 3, 8, 4, 16, 2, 8
SCALE = (N + R) ** -0.5
SEGMENTS = np.array([[0] * 5 + [1] * 4 + [-1] * 3, [0] * 12])


def inputs(seed: int = 0, keys: int = T) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {
        "index_q": (B, T, HI, K),
        "index_k": (B, keys, K),
        "index_w": (B, T, HI),
        "q": (B, T, H, N + R),
        "latent": (B, keys, L + R),
        "w_uk": (H, N, L),
    }
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def oracle(
    given: dict[str, np.ndarray], positions: np.ndarray, top_k: int | None, segments: np.ndarray | None
) -> np.ndarray:
    """Sum over the attended keys of p log(p / share)."""
    found = np.zeros((B, T))
    for b in range(B):
        for t in range(T):
            seen = [s for s in range(given["latent"].shape[1]) if s <= positions[b, t]]
            if segments is not None:
                seen = [s for s in seen if segments[b, s] == segments[b, t] >= 0]
            dots = np.maximum(given["index_q"][b, t] @ given["index_k"][b, seen].T, 0)
            index = given["index_w"][b, t] @ dots
            if top_k is not None and len(seen) > top_k:
                keep = np.sort(np.argsort(-index, kind="stable")[:top_k])
                seen, index = [seen[i] for i in keep], index[keep]
            if not seen:
                continue
            share = np.exp(index - index.max())
            share /= share.sum()
            p = np.zeros(len(seen))
            for h in range(H):
                content, slot = given["latent"][b, seen, :L], given["latent"][b, seen, L:]
                scores = content @ given["w_uk"][h].T @ given["q"][b, t, h, :N] + slot @ given["q"][b, t, h, N:]
                weights = np.exp(SCALE * (scores - scores.max()))
                p += weights / weights.sum() / H
            found[b, t] = np.sum(p * np.log(p / share))
    return found


def run(given: dict[str, np.ndarray], positions: np.ndarray, dtype: str = "float32", **options: Any) -> np.ndarray:
    arrays = [jnp.asarray(x, dtype) for x in given.values()]
    return np.asarray(indexer_kl(*arrays, q_positions=jnp.asarray(positions), scale=SCALE, **options))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("top_k", [None, 3, 50])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one sequence", "packed"])
def test_values(implementation: Any, top_k: int | None, segments: np.ndarray | None) -> None:
    given, positions = inputs(), np.tile(np.arange(T), (B, 1))
    if segments is not None:
        positions = np.where(segments < 0, -1, positions)
    ids = None if segments is None else jnp.asarray(segments)
    want = oracle(given, positions, top_k, segments)
    for budget in (None, 20_000, 1):
        got = run(given, positions, top_k=top_k, segment_ids=ids, budget_bytes=budget, implementation=implementation)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_queries_behind_other_keys_and_padding() -> None:
    given = inputs(keys=30)
    positions = np.stack([np.arange(18, 30), np.where(np.arange(T) < 9, np.arange(15, 27), -1)])
    given["latent"][1, 24:], given["index_k"][1, 24:] = np.nan, np.nan
    clean = {name: np.nan_to_num(x) for name, x in given.items()}
    for top_k in (None, 7):
        got = run(given, positions, top_k=top_k)
        np.testing.assert_allclose(got, oracle(clean, positions, top_k, None), rtol=1e-4, atol=1e-5)
        assert np.all(got[1, 9:] == 0)


def test_it_is_zero_where_the_indexer_agrees() -> None:
    # One head whose query and keys are the indexer's own, all scores positive.
    rng = np.random.default_rng(3)
    q, k = rng.random((B, T, 1, K)), rng.random((B, T, K))
    given = {
        "index_q": q,
        "index_k": k,
        "index_w": np.full((B, T, 1), SCALE),
        "q": q,
        "latent": k,
        "w_uk": np.eye(K)[None],
    }
    got = run(given, np.tile(np.arange(T), (B, 1)), top_k=None)
    np.testing.assert_allclose(got, 0, atol=1e-6)


@pytest.mark.parametrize("top_k", [None, 3])
def test_gradients_reach_the_indexer_alone_and_match_differences(top_k: int | None) -> None:
    positions = np.tile(np.arange(T), (B, 1))
    with jax.enable_x64():
        given = {name: jnp.asarray(x) for name, x in inputs(5).items()}

        def total(given: dict[str, jax.Array], implementation: Any = "xla") -> jax.Array:
            loss = indexer_kl(
                *(given[name] for name in inputs()),
                top_k=top_k,
                q_positions=jnp.asarray(positions),
                scale=SCALE,
                budget_bytes=20_000,
                implementation=implementation,
            )
            return jnp.sum(jnp.arange(B * T).reshape(B, T) * loss)

        gradient = jax.jit(jax.grad(total))(given)
        reference = jax.jit(jax.grad(lambda given: total(given, "reference")))(given)
        value = jax.jit(total)
        for name in ("index_q", "index_k", "index_w"):
            direction = np.random.default_rng(1).standard_normal(given[name].shape)
            ahead, behind = (value(given | {name: given[name] + step * direction}) for step in (1e-6, -1e-6))
            slope = float(ahead - behind) / 2e-6
            assert slope == pytest.approx(float(jnp.sum(gradient[name] * direction)), rel=1e-4), name
            np.testing.assert_allclose(gradient[name], reference[name], rtol=1e-7, atol=1e-9)
        for name in ("q", "latent", "w_uk"):
            assert not np.any(gradient[name]), name


def test_arguments_are_checked() -> None:
    given, positions = inputs(), np.tile(np.arange(T), (B, 1))
    with pytest.raises(ValueError, match=r"indexer_kl: top_k=0"):
        run(given, positions, top_k=0)
    with pytest.raises(ValueError, match=r"indexer_kl: budget_bytes=0"):
        run(given, positions, top_k=None, budget_bytes=0)
    with pytest.raises(ValueError, match=r"indexer_kl: q leaves 5 channels .* latent leaves 4"):
        run(given | {"q": np.zeros((B, T, H, N + 5))}, positions, top_k=None)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one sequence", "packed"])
def test_gathering_what_was_selected_changes_nothing(segments: np.ndarray | None) -> None:
    positions = (
        np.where(np.arange(T) < 10, np.arange(T), -1) if segments is None else np.where(SEGMENTS < 0, -1, np.arange(T))
    )
    positions = np.broadcast_to(positions, (B, T))
    given = inputs(7)
    with jax.enable_x64():
        arrays = [jnp.asarray(x) for x in given.values()]
        ids = None if segments is None else jnp.asarray(segments, jnp.int32)
        options: Any = {"top_k": 3, "segment_ids": ids, "key_segment_ids": ids, "scale": SCALE}
        options["q_positions"] = jnp.asarray(positions, jnp.int32)

        def loss(index_q: jax.Array, index_k: jax.Array, index_w: jax.Array, form: Any, budget: int) -> Any:
            nats = kl.indexer_kl(index_q, index_k, index_w, *arrays[3:], **options, form=form, budget_bytes=budget)
            return jnp.sum(jnp.arange(B * T).reshape(B, T) * nats), nats

        pull = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
        want = pull(*arrays[:3], "mask", 2**28)
        np.testing.assert_allclose(np.asarray(want[0][1]), oracle(given, positions, 3, segments), rtol=1e-9, atol=1e-12)
        for budget in (2**28, 3000):
            got = pull(*arrays[:3], "gather", budget)
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-9, atol=1e-12), got, want
            )
