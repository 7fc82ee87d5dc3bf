"""KDA and the short convolution in NumPy float64, token by token, with the gradient of the recurrence by hand.

Imports nothing from the product.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]
NAMES = ("q", "k", "v", "g", "beta", "state")


def wide(*arrays: ArrayLike) -> list[Float64]:
    return [np.asarray(x).astype(np.float64) for x in arrays]


def kda(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    state: ArrayLike,
    scale: float | None = None,
) -> tuple[Float64, Float64]:
    """Returns (o [B, T, H, V], the states after 0, 1, ..., T tokens [T+1, B, H, K, V])."""
    q, k, v, g, beta, state = wide(q, k, v, g, beta, state)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    states, outputs = [state], []
    for t in range(q.shape[1]):
        state = np.exp(g[:, t])[..., None] * state
        u = beta[:, t, :, None] * (v[:, t] - _read(state, k[:, t]))
        state = state + _outer(k[:, t], u)
        outputs.append(scale * _read(state, q[:, t]))
        states.append(state)
    return np.stack(outputs, axis=1), np.stack(states)


def kda_gradient(
    inputs: Mapping[str, ArrayLike], d_o: ArrayLike, d_last: ArrayLike, scale: float | None = None
) -> dict[str, Float64]:
    """Gradient of sum(o * d_o) + sum(last state * d_last) for every input of `kda`, by going back token by token."""
    _, states = kda(**inputs, scale=scale)
    q, k, v, g, beta, d_o, d_state = wide(*(inputs[name] for name in NAMES[:-1]), d_o, d_last)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    grad = {name: np.zeros(np.shape(inputs[name])) for name in NAMES}
    for t in reversed(range(q.shape[1])):
        decay = np.exp(g[:, t])[..., None]
        decayed = decay * states[t]
        error = v[:, t] - _read(decayed, k[:, t])
        u = beta[:, t, :, None] * error

        grad["q"][:, t] = scale * _read_transposed(states[t + 1], d_o[:, t])
        d_state = d_state + scale * _outer(q[:, t], d_o[:, t])
        d_u = _read(d_state, k[:, t])
        d_error = beta[:, t, :, None] * d_u
        grad["beta"][:, t] = np.sum(d_u * error, axis=-1)
        grad["v"][:, t] = d_error
        grad["k"][:, t] = _read_transposed(d_state, u) - _read_transposed(decayed, d_error)
        d_state = d_state - _outer(k[:, t], d_error)
        grad["g"][:, t] = np.sum(d_state * decayed, axis=-1)
        d_state = decay * d_state
    grad["state"] = d_state
    return grad


def gate(raw: ArrayLike, a_log: ArrayLike, dt_bias: ArrayLike, lower_bound: float | None) -> Float64:
    raw, a_log, dt_bias = wide(raw, a_log, dt_bias)
    rate, z = np.exp(a_log)[..., None], raw + dt_bias
    if lower_bound is None:
        return -rate * np.logaddexp(z, 0)
    return lower_bound / (1 + np.exp(-rate * z))


def conv(x: ArrayLike, weight: ArrayLike, tail: ArrayLike) -> tuple[Float64, Float64]:
    """Returns (y [T, X], the last W-1 inputs) of one row."""
    x, weight, tail = wide(x, weight, tail)
    window, outputs = list(tail), []
    for entry in x:
        window.append(entry)
        total = np.zeros(len(entry))
        for j, past in enumerate(window[-weight.shape[1] :]):
            total += weight[:, j] * past
        outputs.append(total / (1 + np.exp(-total)))
    return np.array(outputs).reshape(x.shape), np.array(window[len(window) - len(tail) :]).reshape(tail.shape)


def central_differences(f: Callable[[Float64], Float64], x: ArrayLike, step: float = 1e-5) -> Float64:
    """Gradient at x of f, which maps copies of x [P, *x.shape] to one number each [P]."""
    (x,) = wide(x)
    steps = step * np.eye(x.size).reshape(x.size, *x.shape)
    return ((f(x + steps) - f(x - steps)) / (2 * step)).reshape(x.shape)


def _read(state: Float64, x: Float64) -> Float64:
    return np.einsum("bhkv,bhk->bhv", state, x)


def _read_transposed(state: Float64, x: Float64) -> Float64:
    return np.einsum("bhkv,bhv->bhk", state, x)


def _outer(k: Float64, v: Float64) -> Float64:
    return k[..., :, None] * v[..., None, :]
