"""The gradient of sparse MLA on Hopper: bfloat16 queries and latents."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.sparse_mla import gpu
from pallas_kernels.sparse_mla.gpu import TILE, VALUE, WIDTH, Latent

_WIDEST = 48


@dataclass(frozen=True)
class Tuning:
    """How a gradient is cut.

    Attributes:
        heads: of a block of threads, a multiple of 16.
        slots: places for 64 channels of 64 keys.
        together: chunks of 64 channels of latents' gradients in one accumulator.
        registers: of a thread that scores, sums queries' gradients, sums latents' gradients, copies.
        staged: whether latents' gradients are added by bulk copies from shared memory, or from registers.
        wave: blocks of threads that begin together, as far as possible; 0: each begins when it can.
    """

    heads: int
    slots: int
    together: int
    registers: tuple[int, int, int, int]
    staged: bool
    wave: int = 0


def tuned(heads: int, blocks: int = 132) -> Tuning:
    """Pieces of at most 48 heads, and as many places as shared memory has room for; `blocks` run at a time."""
    pieces = -(-heads // _WIDEST)
    share = -(-heads // (16 * pieces)) * 16
    if share > 32:
        tuning = Tuning(share, 0, 2, (104, 240, 128, 40), staged=False, wave=blocks)
    else:
        tuning = Tuning(share, 0, 3, (104, 216, 160, 32), staged=True, wave=blocks)
    room = 224 * 1024 - shared_bytes(tuning)  # barriers and alignment take 3 KiB
    return replace(tuning, slots=min(18, room // (TILE * 128)))


def shared_bytes(tuning: Tuning) -> int:
    """Shared memory of a block of threads but for barriers.

    It holds keys, queries and results' gradients, probabilities and scores' gradients, two numbers a head, and a stage.
    """
    keys, heads = tuning.slots * TILE * 128, tuning.heads
    both = WIDTH // 64 * 2 * heads * 128
    stage = 4 * TILE * (tuning.together * 64 + 8) if tuning.staged else 0
    return keys + both + 2 * 2 * heads * 128 + 8 * heads + stage


def obstacle(q: Array, latent: Latent, indices: Array) -> str | None:
    """Why the gradient isn't this module's, where `gpu.sparse_mla` can run; or None."""
    if isinstance(latent, Fp8Latent):
        return "FP8 latents are constants: only queries have a gradient."
    if any(jax.typeof(x).manual_axis_type.varying for x in (q, latent, indices)):
        return "its arrays vary over axes of a mesh, and Pallas lets no kernel add into such an array; check_vma=False would."
    return None


def sparse_mla(
    q: Float[Array, "B T H LR"],
    latent: Latent,
    indices: Int[Array, "B T C"],
    latent_width: int,
    scale: float,
    budget_bytes: int,
) -> tuple[Float[Array, "B T H L"], Float[Array, "B T H"]]:
    """`gpu.sparse_mla`, whose gradient is this module's, or that of `xla` where `obstacle` says why."""
    if obstacle(q, latent, indices) is not None:
        run: Any = gpu.sparse_mla
    else:
        run = _sparse_mla
    return run(q, latent, indices, latent_width, scale, budget_bytes)


_sparse_mla = jax.custom_vjp(gpu.sparse_mla, nondiff_argnums=(3, 4, 5))


def _forward(
    q: Array, latent: Array, indices: Array, latent_width: int, scale: float, budget_bytes: int
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    out: Any = gpu.sparse_mla(q, latent, indices, latent_width, scale, budget_bytes)
    return out, (q, latent, indices, *out)


def _backward(
    latent_width: int, scale: float, budget_bytes: int, saved: tuple[Array, ...], grads: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    del latent_width, budget_bytes
    q, latent, indices, o, lse = saved
    blocks = getattr(jax.devices()[0], "core_count", 132)
    dq, dlatent = gradient(q, latent, indices, o, lse, *grads, scale, tuned(q.shape[2], blocks))
    return dq, dlatent, None


_sparse_mla.defvjp(_forward, _backward)


@partial(jax.jit, static_argnums=(7, 8, 9))
def gradient(
    q: Float[Array, "B T H LR"],
    latent: Float[Array, "B S LR"],
    indices: Int[Array, "B T C"],
    o: Float[Array, "B T H L"],
    lse: Float[Array, "B T H"],
    do: Float[Array, "B T H L"],
    dlse: Float[Array, "B T H"],
    scale: float,
    tuning: Tuning,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H LR"], Float[Array, "B S LR"]]:
    """Gradients of queries and latents, given the results and theirs."""
    # Imported late: Mosaic takes a second, which nobody should wait for who has no such GPU.
    from pallas_kernels.sparse_mla.gpu_backward_kernel import differentiate_rows

    batch, tokens, heads, width = q.shape
    queries, keys = batch * tokens, indices.shape[2]
    pieces = -(-heads // tuning.heads)
    spare = pieces * tuning.heads - heads
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=-1) - dlse
    powers = jnp.where(lse == -jnp.inf, 0, lse) * math.log2(math.e)
    info = jnp.stack([powers, delta]).astype(jnp.float32).reshape(2, queries, heads)
    if spare:
        q, do = (jnp.pad(x, ((0, 0), (0, 0), (0, spare), (0, 0))) for x in (q, do))
        info = jnp.pad(info, ((0, 0), (0, 0), (0, spare)))
    info = jnp.moveaxis(info.reshape(2, queries * pieces, tuning.heads), 0, 1)
    tail = -keys % TILE
    if tail:
        indices = jnp.pad(indices, ((0, 0), (0, 0), (0, tail)), constant_values=-1)
    dq, dlatent = differentiate_rows(
        q.reshape(queries, heads + spare, width),
        do.reshape(queries, heads + spare, VALUE),
        latent.reshape(-1, width),
        indices.reshape(-1),
        info.reshape(queries * pieces, 2 * tuning.heads),
        batch=batch,
        scale=scale,
        tuning=tuning,
        interpret=interpret,
    )
    dq = dq.reshape(batch, tokens, heads + spare, width)[..., :heads, :]
    return dq, dlatent.reshape(latent.shape).astype(latent.dtype)
