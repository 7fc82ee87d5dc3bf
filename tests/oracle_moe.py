"""ORACLE-MOE: routed, shared and latent experts, token by token and expert by expert, in NumPy float64.

Imports nothing from the product. Source: public model code of Kimi K3 and Kimi-Linear-48B, and their description.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Activation = Callable[[np.ndarray, np.ndarray], np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate * sigmoid(gate) * up


def situ_glu(gate: np.ndarray, up: np.ndarray, beta: float = 4.0, linear_beta: float = 25.0) -> np.ndarray:
    return beta * np.tanh(gate / beta) * sigmoid(gate) * linear_beta * np.tanh(up / linear_beta)


@dataclass(frozen=True)
class Mlp:
    """w1 gate [F, D], w3 up [F, D], w2 down [D, F]."""

    w1: np.ndarray
    w3: np.ndarray
    w2: np.ndarray

    def __call__(self, x: np.ndarray, activation: Activation) -> np.ndarray:
        w1, w3, w2 = (np.asarray(w, np.float64) for w in (self.w1, self.w3, self.w2))
        return w2 @ activation(w1 @ x, w3 @ x)


@dataclass(frozen=True)
class Latent:
    """down [L, D], norm [L], up [D, L]."""

    down: np.ndarray
    norm: np.ndarray
    up: np.ndarray
    eps: float = 1e-5


def route(
    hidden: np.ndarray,
    router: np.ndarray,
    bias: np.ndarray,
    top_k: int,
    *,
    scaling: float = 1.0,
    renormalize: bool = True,
) -> tuple[list[list[int]], list[list[float]]]:
    """Experts of each token, best first, ties to the lower index, and their weights. hidden [N, D], router [E, D]."""
    chosen, weights = [], []
    for token in np.asarray(hidden, np.float64):
        scores = sigmoid(np.asarray(router, np.float64) @ token)
        experts = np.argsort(-(scores + np.asarray(bias, np.float64)), kind="stable")[:top_k]
        picked = scores[experts]
        if renormalize:
            picked = picked / (picked.sum() + 1e-20)
        chosen.append([int(expert) for expert in experts])
        weights.append([float(weight) for weight in scaling * picked])
    return chosen, weights


def moe(
    hidden: np.ndarray,
    router: np.ndarray,
    bias: np.ndarray,
    experts: list[Mlp],
    top_k: int,
    activation: Activation,
    *,
    latent: Latent | None = None,
    shared: Mlp | None = None,
    scaling: float = 1.0,
    renormalize: bool = True,
) -> np.ndarray:
    """The block's output [N, D] for real tokens hidden [N, D]."""
    hidden = np.asarray(hidden, np.float64)
    chosen, weights = route(hidden, router, bias, top_k, scaling=scaling, renormalize=renormalize)
    result = np.zeros_like(hidden)
    for n, token in enumerate(hidden):
        z = token if latent is None else np.asarray(latent.down, np.float64) @ token
        y = np.zeros_like(z)
        for expert, weight in zip(chosen[n], weights[n], strict=True):
            y = y + weight * experts[expert](z, activation)
        if latent is not None:
            y = y / np.sqrt(np.mean(y**2) + latent.eps) * np.asarray(latent.norm, np.float64)
            y = np.asarray(latent.up, np.float64) @ y
        if shared is not None:
            y = y + shared(token, activation)
        result[n] = y
    return result
