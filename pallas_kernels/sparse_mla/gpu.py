"""Pallas Mosaic GPU for Hopper: bfloat16 queries over bfloat16 or FP8 latents, summed in float32."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.manual_axes import axes_left_to_xla
from pallas_kernels.sparse_mla import xla
from pallas_kernels.target import platform

Latent = Float[Array, "B S LR"] | Fp8Latent

WIDTH, VALUE = 576, 512
"""Channels of a key, and those that are its value: what the kernel is written for."""

TILE = 64
"""Keys that are scored together."""

_WIDEST, _WIDEST_ALONE = 96, 64
_OVERHEAD = 3  # tiles' time that a block of threads takes to start, to end and to write its part


@dataclass(frozen=True)
class Tuning:
    """How a call is cut.

    Attributes:
        heads: of a block of threads, a multiple of 16, or of 32 when paired.
        splits: parts of a query's keys, each a block of threads.
        paired: whether two warpgroups both score and sum, or one scores for two that sum.
        doubled: of a tile's nine chunks, how many have two places in shared memory.
        parked: heads whose sums, for 64 channels of each warpgroup, lie in shared memory while it scores.
        registers: of a thread that sums (and scores, when paired), one that scores, one that copies.
        copiers: warpgroups that copy, and unpack FP8.
        turns: places for the probabilities of a tile: with two, a tile's are written while the last one's are read.
    """

    heads: int
    splits: int
    paired: bool
    doubled: int
    parked: int
    registers: tuple[int, int, int]
    copiers: int = 1
    turns: int = 1


def obstacle(width: int, dtype: DTypeLike, latent: Latent, latent_width: int) -> str | None:
    """Why the kernel can't run for queries of this width and dtype, or None."""
    if platform() != "gpu":
        return f"it runs on NVIDIA Hopper GPUs, and the platform is {platform()!r}."
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if capability != "9.0":
        return f"it is compiled for compute capability 9.0 (Hopper), and this device has {capability}."
    return axes_left_to_xla() or unfit(width, dtype, latent, latent_width)


def unfit(width: int, dtype: DTypeLike, latent: Latent, latent_width: int) -> str | None:
    """Why no Hopper GPU could run this call, or None."""
    if width != WIDTH or latent_width != VALUE:
        return (
            f"keys have {width} channels and values {latent_width}; it is written for {WIDTH} and {VALUE}, those of "
            "the Kimi models."
        )
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"queries are {jnp.dtype(dtype)}; its matrix instructions take bfloat16."
    if not isinstance(latent, Fp8Latent) and latent.dtype != jnp.bfloat16:
        return f"latents are {latent.dtype}; it takes bfloat16 and FP8."
    rows = latent.shape[0] * latent.shape[1]
    if rows >= 2**31:
        return f"the cache has {rows} rows; it counts them in 31 bits."
    return None


def tuned(queries: int, heads: int, tiles: int, packed: bool, blocks: int = 132) -> Tuning:
    """How to cut a call of `queries` queries, `tiles` tiles of keys each.

    Few queries leave multiprocessors idle: their keys are split until the last round of blocks of threads is full, as
    long as that gains more than starting and merging them costs.
    """
    pieces = -(-heads // _WIDEST)
    share = -(-heads // pieces)
    paired = share > _WIDEST_ALONE
    share = _WIDEST if paired else -(-share // 16) * 16
    items = queries * pieces
    splits = min(
        range(1, min(tiles, 64) + 1),
        key=lambda count: (-(-items * count // blocks)) * (-(-tiles // count) + _OVERHEAD + (count > 1)),
    )
    if paired and packed:
        return Tuning(share, splits, True, 0, 48, (224, 224, 32), copiers=2)
    if paired:
        return Tuning(share, splits, True, 1, 32, (240, 240, 24))
    registers = (160, 128, 64) if packed else (168, 128, 40) if share > 48 else (152, 128, 40)
    least = Tuning(share, splits, False, 0, 0, registers, turns=2 if packed else 1)
    room = 225 * 1024 - shared_bytes(least, packed)
    return replace(least, doubled=min(9, room // (TILE * 128)))


def shared_bytes(tuning: Tuning, packed: bool) -> int:
    """Shared memory of a block of threads but for barriers.

    It holds keys, queries and probabilities, the softmax's state, scales of FP8 and sums laid aside.
    """
    keys, scorers = (9 + tuning.doubled) * TILE * 128, 2 if tuning.paired else 1
    share = tuning.heads // scorers
    state = 4 * scorers * (8 * share + 128 * -(-share // 32))
    scales = 2 * TILE * 16 if packed else 0
    return keys + (9 + tuning.turns) * 128 * tuning.heads + state + scales + 2 * 4 * TILE * tuning.parked


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def sparse_mla(
    q: Float[Array, "B T H LR"],
    latent: Latent,
    indices: Int[Array, "B T C"],
    latent_width: int,
    scale: float,
    budget_bytes: int,
) -> tuple[Float[Array, "B T H L"], Float[Array, "B T H"]]:
    """See `pallas_kernels.sparse_mla.sparse_mla`; `budget_bytes` is for the gradients, which `xla` computes."""
    del latent_width, budget_bytes
    blocks = getattr(jax.devices()[0], "core_count", 132)
    batch, tokens, heads, _ = q.shape
    tiles = -(-indices.shape[2] // TILE)
    tuning = tuned(batch * tokens, heads, tiles, isinstance(latent, Fp8Latent), blocks)
    return attend(q, latent, indices, scale, tuning)


def _forward(
    q: Array, latent: Latent, indices: Array, latent_width: int, scale: float, budget_bytes: int
) -> tuple[tuple[Array, Array], tuple[Array, Latent, Array]]:
    return sparse_mla(q, latent, indices, latent_width, scale, budget_bytes), (q, latent, indices)


def _backward(
    latent_width: int, scale: float, budget_bytes: int, saved: tuple[Array, Latent, Array], grads: tuple[Array, Array]
) -> tuple[Array, Array | None, None]:
    q, latent, indices = saved
    run = partial(xla.sparse_mla, latent_width=latent_width, scale=scale, budget_bytes=budget_bytes)
    if isinstance(latent, Fp8Latent):
        _, pull = jax.vjp(lambda q: run(q, latent, indices), q)
        return *pull(grads), None, None
    _, pull = jax.vjp(lambda q, latent: run(q, latent, indices), q, latent)
    return *pull(grads), None


sparse_mla.defvjp(_forward, _backward)


@partial(jax.jit, static_argnums=(3, 4, 5))
def attend(
    q: Float[Array, "B T H LR"],
    latent: Latent,
    indices: Int[Array, "B T C"],
    scale: float,
    tuning: Tuning,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H L"], Float[Array, "B T H"]]:
    """The call cut as `tuning` says; `interpret` is what Pallas takes to run it without a GPU."""
    # Imported late: Mosaic takes a second, which nobody should wait for who has no such GPU.
    from pallas_kernels.sparse_mla.gpu_kernel import attend_rows

    batch, tokens, heads, width = q.shape
    queries, keys = batch * tokens, indices.shape[2]
    pieces = -(-heads // tuning.heads)
    tail = -keys % TILE
    if tail:
        indices = jnp.pad(indices, ((0, 0), (0, 0), (0, tail)), constant_values=-1)
    q = q.reshape(queries, heads, width)
    if pieces * tuning.heads != heads:
        q = jnp.pad(q, ((0, 0), (0, pieces * tuning.heads - heads), (0, 0)))
    stored = latent.packed if isinstance(latent, Fp8Latent) else latent
    split = tuning.splits > 1
    o, lse = attend_rows(
        q,
        stored.reshape(-1, stored.shape[-1]),
        indices.reshape(-1),
        batch=batch,
        scale=scale,
        tuning=tuning,
        interpret=interpret,
    )
    shape = tuning.splits, batch, tokens, pieces * tuning.heads
    o, lse = o.reshape(*shape, VALUE)[..., :heads, :], lse.reshape(shape)[..., :heads]
    return merge(o, lse, q.dtype) if split else (o[0], lse[0])


def merge(
    o: Float[Array, "N *axes L"], lse: Float[Array, "N *axes"], dtype: Any
) -> tuple[Float[Array, "*axes L"], Float[Array, "*axes"]]:
    """Attention over N parts of the keys as one: m = max lse, o = Σ e^(lse - m) o / Σ e^(lse - m); nothing gives 0, -inf."""
    top = jnp.max(lse, axis=0)
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(lse - top)
    total = jnp.sum(weights, axis=0)
    some = jnp.where(total == 0, 1, total)
    merged = jnp.sum(jnp.where(weights[..., None] == 0, 0, o * weights[..., None]), axis=0) / some[..., None]
    return merged.astype(dtype), jnp.where(total == 0, -jnp.inf, top + jnp.log(some))
