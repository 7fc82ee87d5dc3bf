"""The router against a float64 definition: every implementation, the Hopper kernels' warps in NumPy, and gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Implementation, UnsupportedImplementationError, noted_choices
from pallas_kernels.router import gpu, gpu_kernel, gpu_words, router, select_experts, sort_by_expert
from tests.pallas_kernels.numpy_warp import NumpyWarp, run_block

RNG = np.random.default_rng

# Tokens, experts, chosen: not a multiple of 32 or 128, few, the published models'.
SIZES = [(9, 100, 5), (3, 7, 7), (2, 33, 1), (5, 256, 8), (4, 896, 16)]
KINDS = ["random", "tied", "negative bias", "all equal", "narrow bias"]


def draw(kind: str, tokens: int, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and bias, float32."""
    rng = RNG(tokens + num_experts)
    scores = 1 / (1 + np.exp(-rng.standard_normal((tokens, num_experts))))
    bias = 0.3 * rng.standard_normal(num_experts)
    if kind == "tied":
        scores, bias = rng.integers(1, 4, scores.shape) / 4, rng.integers(-2, 3, num_experts) / 4
    if kind == "negative bias":
        bias = bias - 5
    if kind == "all equal":
        scores, bias = np.full(scores.shape, 0.5), np.full(num_experts, -0.5)
    if kind == "narrow bias":  # H06: a band that bfloat16, whose steps are 1/32 there, would melt into nine values
        bias = np.linspace(6.817, 7.063, num_experts)
    return scores.astype(np.float32), bias.astype(np.float32)


def oracle(
    scores: np.ndarray, bias: np.ndarray, top_k: int, renormalize: bool, scale: float, biased_weights: bool
) -> tuple[np.ndarray, np.ndarray]:
    biased = (scores + bias).astype(np.float64)  # the order is that of rounded sums
    experts = np.argsort(-biased, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(biased if biased_weights else scores.astype(np.float64), experts, axis=1)
    if renormalize:
        weights = weights / (weights.sum(1, keepdims=True) + 1e-20)
    return experts, weights * scale


def by_warps(scores: np.ndarray, bias: np.ndarray, top_k: int, *settings: Any) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel's warps do, a token each."""
    tokens, num_experts = scores.shape
    experts, weights = np.full(tokens * top_k, -9, np.int32), np.full(tokens * top_k, np.nan, np.float32)
    names = ("renormalize", "scale", "biased_weights")
    for token in range(tokens):
        warp = NumpyWarp(token % 4)
        places = (scores.reshape(-1), 0), (bias, 0), (experts, 0), (weights, 0)
        gpu_words.select(
            warp,
            warp.integer(token),
            *places,
            num_experts=num_experts,
            top_k=top_k,
            **dict(zip(names, settings, strict=True)),
        )
    return experts.reshape(tokens, top_k), weights.reshape(tokens, top_k)


def by_xla(implementation: Implementation, *arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    scores, bias, top_k, renormalize, scale, biased_weights = arguments
    run = partial(
        select_experts,
        top_k=top_k,
        renormalize=renormalize,
        scale=scale,
        biased_weights=biased_weights,
        implementation=implementation,
    )
    experts, weights = jax.jit(run)(scores, bias)
    return np.asarray(experts), np.asarray(weights)


RUNS: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "reference": partial(by_xla, "reference"),
    "xla": partial(by_xla, "xla"),
    "warps": by_warps,
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_best_are_chosen_and_weighed(run: str, kind: str, size: tuple[int, int, int]) -> None:
    tokens, num_experts, top_k = size
    scores, bias = draw(kind, tokens, num_experts)
    settings = {
        "random": (True, 2.5, False),
        "tied": (True, 1.0, False),
        "negative bias": (False, 1.5, False),
        "all equal": (False, 1.0, True),
        "narrow bias": (True, 2.872, False),
    }[kind]
    experts, weights = RUNS[run](scores, bias, top_k, *settings)
    want, by = oracle(scores, bias, top_k, *settings)
    np.testing.assert_array_equal(experts, want)
    np.testing.assert_allclose(weights, by, rtol=1e-6, atol=1e-7)


def sort_by_warps(experts: np.ndarray, valid: np.ndarray, num_experts: int, first: int) -> tuple[np.ndarray, ...]:
    """What the kernel's warps do together."""
    count = experts.size
    warps = gpu_kernel.warps_for(count)
    order, place, sizes = (np.full(size, -9, np.int32) for size in (count, count, num_experts))
    room = np.full(gpu_words.room_for(num_experts, warps), 77, np.int32)
    given = experts.reshape(-1), valid, np.array([first])
    arrays = *(array.astype(np.int32) for array in given), order, sizes, place, room

    def act(warp: Any) -> None:
        gpu_words.sort(
            warp,
            *((array, 0) for array in arrays),
            count=count,
            per_token=experts.shape[1],
            num_experts=num_experts,
            warps=warps,
        )

    run_block(warps, act)
    return order, sizes, place.reshape(experts.shape)


@pytest.mark.parametrize("by_kernel", [False, True], ids=["xla", "warps"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts"), [(1, 1, 1), (40, 3, 6), (64, 8, 128), (33, 16, 896), (700, 8, 30)], ids=str
)
def test_assignments_are_sorted_and_counted(by_kernel: bool, tokens: int, top_k: int, num_experts: int) -> None:
    rng = RNG(tokens)
    sort = jax.jit(sort_by_expert, static_argnums=1)
    last = num_experts - 1
    for low, high, first in ((-1, last + 2, 0), (last, last, 0), (num_experts, num_experts, 0), (0, 3 * last, last)):
        given, valid = rng.integers(low, high + 1, (tokens, top_k)), rng.random(tokens) < 0.8
        if by_kernel:
            order, sizes, place = sort_by_warps(given, valid, num_experts, first)
        else:
            found = sort(jnp.asarray(given), num_experts, jnp.asarray(valid), first=first)
            order, sizes, place = (np.asarray(x) for x in found)
        experts = given - first
        known = valid[:, None] & (experts >= 0) & (experts < num_experts)
        flat = np.where(known, experts, num_experts).reshape(-1)
        np.testing.assert_array_equal(order, np.argsort(flat, kind="stable"))
        np.testing.assert_array_equal(sizes, np.bincount(flat, minlength=num_experts + 1)[:num_experts])
        np.testing.assert_array_equal(order[place.reshape(-1)], np.arange(flat.size))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_scores_are_sums_of_float32_products(dtype: str, activation: Any) -> None:
    rng = RNG(0)
    x, weight = (jnp.asarray(0.4 * rng.standard_normal(shape), dtype) for shape in ((20, 300), (50, 300)))
    found = jax.jit(partial(router, top_k=4, activation=activation, scale=2.0))(x, weight, jnp.zeros(50))
    logits = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    scores = 1 / (1 + np.exp(-logits))
    if activation == "softmax":
        scores = np.exp(logits - logits.max(1, keepdims=True))
        scores /= scores.sum(1, keepdims=True)
    np.testing.assert_allclose(np.asarray(found.scores), scores, rtol=2e-5)
    experts, weights = oracle(np.asarray(found.scores), np.zeros(50, np.float32), 4, True, 2.0, False)
    np.testing.assert_array_equal(found.experts, experts)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_only_the_best_groups_are_considered(implementation: Implementation) -> None:
    rng = RNG(1)
    scores = rng.random((6, 24)).astype(np.float32)
    run = partial(select_experts, top_k=3, num_groups=4, top_groups=2, implementation=implementation)
    experts, _ = jax.jit(run)(scores, jnp.zeros(24, jnp.float32))
    for row, found in zip(scores, np.asarray(experts), strict=True):
        best = np.argsort(-np.sort(row.reshape(4, 6), axis=1)[:, -2:].sum(1), kind="stable")[:2]
        allowed = np.where(np.isin(np.arange(24) // 6, best), row, -np.inf)
        np.testing.assert_array_equal(found, np.argsort(-allowed, kind="stable")[:3])


def test_the_kernels_gradient_is_that_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, bias = map(jnp.asarray, draw("random", 9, 100))
    settings = (5, True, 2.5, True)
    monkeypatch.setattr(gpu_kernel, "choose", lambda *given: select_experts(
        *given[:2], top_k=5, scale=2.5, biased_weights=True, implementation="xla"))  # fmt: skip

    def loss(run: Callable[..., Any], scores: Any, bias: Any) -> jax.Array:
        return jnp.sum(jnp.sin(run(scores, bias)[1]))

    plain = partial(select_experts, top_k=5, scale=2.5, biased_weights=True, implementation="xla")
    want = jax.grad(partial(loss, plain), argnums=(0, 1))(scores, bias)
    got = jax.grad(partial(loss, lambda *given: gpu.select(*given, *settings)), argnums=(0, 1))(scores, bias)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), got, want)


@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(64, 128, 8), (2048, 256, 8), (512, 896, 16)])
def test_it_lowers_for_a_gpu_that_is_not_here(tokens: int, num_experts: int, top_k: int) -> None:
    def run(scores: jax.Array, bias: jax.Array, valid: jax.Array) -> Any:
        assert gpu.unfit(scores, top_k, 1, 1) is None
        experts, weights = gpu.select(scores, bias, top_k, True, 2.5, False)
        assert gpu.sort_unfit(experts, num_experts) is None
        return weights, gpu.sort(experts, valid, jnp.int32(0), num_experts)

    shapes = ((tokens, num_experts), jnp.float32), ((num_experts,), jnp.float32), ((tokens,), jnp.bool)
    lowered = (
        jax.jit(run).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).lower(lowering_platforms=("cuda",))
    )
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 2


def test_what_it_cannot_do_is_said() -> None:
    scores, bias = jnp.zeros((3, 40)), jnp.zeros(40)
    assert gpu.unfit(scores, 8, 1, 1) is None
    assert "scores are bfloat16; it takes float32" in str(gpu.unfit(scores.astype(jnp.bfloat16), 8, 1, 1))
    assert "it takes 32 of 1022 experts at most" in str(gpu.unfit(scores, 33, 1, 1))
    assert "2 of 4 groups" in str(gpu.unfit(scores, 8, 4, 2))
    assert "no tokens" in str(gpu.unfit(scores[:0], 8, 1, 1))
    assert "1023 experts; it takes 1022" in str(gpu.sort_unfit(jnp.zeros((3, 2), jnp.int32), 1023))
    assert "there are 262144 assignments" in str(gpu.sort_unfit(jnp.zeros((2**17, 2), jnp.int32), 8))
    for name_it in (
        lambda: select_experts(scores, bias, top_k=2, implementation="gpu"),
        lambda: sort_by_expert(jnp.zeros((3, 2), jnp.int32), 8, implementation="gpu"),
    ):
        with pytest.raises(UnsupportedImplementationError, match="NVIDIA Hopper GPUs, and the platform is 'cpu'"):
            name_it()
    wrong: dict[str, Callable[[], Any]] = {
        r"bias has shape \(39,\)": lambda: select_experts(scores, bias[1:], top_k=2),
        "top_k is 41; it must be 1 to 40": lambda: select_experts(scores, bias, top_k=41),
        "num_groups is 3; it must divide 40": lambda: select_experts(scores, bias, top_k=2, num_groups=3),
        r"x has shape \(3, 40\) and weight \(5, 4\)": lambda: router(scores, jnp.zeros((5, 4)), bias, top_k=2),
    }
    for message, run in wrong.items():
        with pytest.raises(ValueError, match=message):
            run()


def test_it_is_the_first_choice_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_no_hopper", lambda: None)
    monkeypatch.setattr(gpu, "select", lambda *given: (jnp.full((3, 2), 7, jnp.int32), jnp.ones((3, 2))))
    with noted_choices() as found:
        experts, _ = select_experts(jnp.zeros((3, 40)), jnp.zeros(40), top_k=2)
    assert found["router"].name == "gpu"
    np.testing.assert_array_equal(experts, 7)
