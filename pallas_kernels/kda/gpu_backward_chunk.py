"""The gradient inside chunks of 64 tokens, given what the passes over chunks leave.

With l_ij = Σ_c k_ic k_jc exp(G_ic - G_jc) for i > j, L = diag(β) l, T = (I + L)^-1 diag(β), and, from the passes, S, R (the
gradient of the state that leaves the chunk), Y = V - (K * exp G) S and dY = dV:

    X = T Y      dA = tril(dO X^T)      dl = -stril(dY X^T)      dβ_i = <dY_i, X_i> / β_i²
    d(Q * exp G) = dO S^T      d(K * exp G) = -dY S^T      d(K * exp(G_C - G)) = X R^T

A decay between two tokens of a chunk is a product of two factors, one of each token. With b_i and a_j the rounded rows times
their factors, a pair adds b_i dA_ij a_j to the gradient of G_i and takes it away from that of G_j. Both are formed from the
same rounded numbers, so that in the sums over the tokens from a third one on they cancel as they must, whatever the decay.
A token meets itself without decay, and that pair stays out of it.

`gpu_backward_solve` computes X, dA and dl, and `gpu_backward_pairs` all that has decays in it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.gpu_backward_pairs import BALANCE, RUNS, Given, gather
from pallas_kernels.kda.gpu_backward_solve import correct
from pallas_kernels.kda.gpu_prefill_warp import RUN

LEAST_BETA = 2.0**-13
"""A smaller β is taken for this in the gradient, which moves by less than its rounding; it divides by β."""


class Laid(NamedTuple):
    """Arrays of chunks, float32 [N, H, 64, *]; where no token is they are 0.

    Attributes:
        q: normalised, not scaled.
        k: normalised.
        g: log decay.
        beta: [N, H, 64, 1], at least `LEAST_BETA` where a token is.
    """

    q: Any
    k: Any
    g: Any
    beta: Any


class Around(NamedTuple):
    """What the passes over chunks know.

    Attributes:
        states: S^T, bfloat16 [N, H, V, K].
        d_states: R^T.
        y: Y, bfloat16 [N, H, 64, V].
        d_y: dY.
        d_o: bfloat16.
    """

    states: Any
    d_states: Any
    y: Any
    d_y: Any
    d_o: Any


def pull(laid: Laid, around: Around, scale: float, interpret: Any = None) -> Laid:
    """The gradients of `laid`."""
    q, k, g, beta = laid
    # No product with a triangle of ones: what XLA makes of one depends on what it tries out on the card.
    upto = jnp.cumsum(g.reshape(*g.shape[:2], RUNS, RUN, g.shape[-1]), axis=3).reshape(g.shape)
    of_runs = upto[..., RUN - 1 :: RUN, :]
    table = _table(of_runs)
    keys = k.astype(jnp.bfloat16)
    x, pairs, meets = correct(keys, upto, table, beta[..., 0], around.y, around.d_o, around.d_y, interpret)
    itself, d_beta = scale * meets[0, ..., None], meets[1, ..., None]
    d_beta = jnp.where(beta > 0, d_beta / jnp.where(beta > 0, beta * beta, 1), 0)
    given = Given(
        q=(q * scale).astype(jnp.bfloat16),
        k=keys,
        upto=upto,
        table=table,
        pairs=pairs,
        d_o=around.d_o,
        d_y=around.d_y,
        x=x,
        states=around.states,
        d_states=around.d_states,
    )
    found = gather(given, interpret)
    through = jnp.sum(around.states.astype(jnp.float32) * around.d_states, axis=-2, keepdims=True)
    through *= jnp.exp(jnp.sum(of_runs, axis=-2, keepdims=True))
    return Laid(scale * found.q + itself * k, found.k + itself * q, found.g + through, d_beta)


def _table(of_runs: jax.Array) -> jax.Array:
    """The factors between runs, from their sums of g."""
    before = jnp.cumsum(of_runs, axis=-2) - of_runs
    rest = jnp.sum(of_runs, axis=-2, keepdims=True) - before
    parts = [jnp.exp(before) / BALANCE, jnp.exp(rest) * BALANCE]
    for run in range(1, RUNS):
        parts.append(jnp.exp(before[..., run : run + 1, :] - before[..., : run + 1, :]))
    return jnp.concatenate(parts, axis=-2)
