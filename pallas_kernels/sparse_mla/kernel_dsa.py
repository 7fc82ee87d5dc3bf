"""DeepSeek sparse attention by kernels: the selection of all queries, then the kernel over the keys that they name."""

from functools import partial
from typing import Any, Literal

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8_latent import Fp8Latent
from pallas_kernels.lightning_indexer import TwoStage, lightning_indexer, tpu_two_stage
from pallas_kernels.lightning_indexer import tpu as indexer_tpu
from pallas_kernels.lightning_indexer.blocks import in_blocks, plan
from pallas_kernels.mxfp8 import Mxfp8
from pallas_kernels.sparse_mla import gpu, gpu_backward, tpu
from pallas_kernels.sparse_mla.absorbed import absorb, expand
from pallas_kernels.sparse_mla.attend import constant_apart, together

TPU_KEYS = 2**18
"""Keys of a row from which nobody who names nothing gets `xla` on a TPU.

By estimate: `xla` writes the scores of all keys to memory and reads them to select from, whatever attends then, which takes as
long at about this length as copying 2048 rows for every query does at any.
"""


def gpu_obstacle(
    index_k: Float[Array, "B S K"] | Mxfp8,
    q: Float[Array, "B T H Q"],
    latent: Float[Array, "B S R"] | Fp8Latent,
    w_uk: Float[Array, "H N L"],
    *,
    top_k: int,
    form: Literal["gather", "mask"] | None,
) -> str | None:
    """Why Hopper kernels can't run for this call, or None. The selection takes whatever the indexer picks for itself."""
    return _nothing_selected(index_k, top_k, form) or gpu.obstacle(latent.shape[2], q.dtype, latent, w_uk.shape[2])


def tpu_obstacle(
    index_q: Float[Array, "B T I K"] | Mxfp8,
    index_k: Float[Array, "B S K"] | Mxfp8,
    index_w: Float[Array, "B T I"],
    q: Float[Array, "B T H Q"],
    latent: Float[Array, "B S R"] | Fp8Latent,
    w_uk: Float[Array, "H N L"],
    *,
    top_k: int,
    form: Literal["gather", "mask"] | None,
    two_stage: TwoStage | None,
    named: bool,
) -> str | None:
    """Why TPU kernels can't run for this call, or nobody should get them who doesn't name them, or None."""
    problem = _nothing_selected(index_k, top_k, form) or indexer_tpu.obstacle(index_q, index_k, index_w, top_k, named)
    if two_stage is not None:
        problem = problem or tpu_two_stage.unfit(index_k, two_stage, top_k)
    absorbed = (*q.shape[:3], latent.shape[2])
    problem = problem or tpu.obstacle(absorbed, q.dtype, latent, w_uk.shape[2], named=named)
    if problem is None and not named and index_k.shape[1] < TPU_KEYS:
        return f"there are {index_k.shape[1]} keys a row; by estimate the TPU kernels are faster from {TPU_KEYS} on."
    return problem


def _nothing_selected(
    index_k: Float[Array, "B S K"] | Mxfp8, top_k: int, form: Literal["gather", "mask"] | None
) -> str | None:
    if index_k.shape[1] <= top_k:
        return f"{index_k.shape[1]} keys are no more than top_k={top_k}: all are attended, and nothing is selected."
    if form == "mask":
        return "form='mask' attends all keys; its kernel attends those that were selected."
    return None


@partial(jax.jit, static_argnames=("kernel", "top_k", "scale", "two_stage", "budget_bytes", "return_indices"))
def dsa_mla(
    index_q: Float[Array, "B T I K"] | Mxfp8,
    index_k: Float[Array, "B S K"] | Mxfp8,
    index_w: Float[Array, "B T I"],
    q: Float[Array, "B T H Q"],
    latent: Float[Array, "B S R"] | Fp8Latent,
    w_uk: Float[Array, "H N L"],
    w_uv: Float[Array, "H V L"],
    *,
    kernel: Literal["gpu", "tpu"],
    top_k: int,
    q_positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    scale: float,
    two_stage: TwoStage | None = None,
    budget_bytes: int,
    return_indices: bool = True,
) -> tuple[Float[Array, "B T H V"], Int[Array, "B T C"] | None]:
    """Output and selection. All selections exist at once, 4 * top_k bytes a query; absorbed queries a block at a time."""
    index_q, index_k, index_w = jax.lax.stop_gradient((index_q, index_k, index_w))
    indices = lightning_indexer(
        index_q,
        index_k,
        index_w,
        top_k=top_k,
        q_positions=q_positions,
        segment_ids=segment_ids,
        key_segment_ids=key_segment_ids,
        two_stage=two_stage,
        budget_bytes=budget_bytes,
    )
    indices = jax.lax.stop_gradient(indices)
    (batch, queries, heads, _), width = q.shape, w_uk.shape[2]
    # The absorbed query and its result, twice: keys are split for few queries only, which fit anyway.
    row = batch * heads * (latent.shape[2] + 2 * width) * q.dtype.itemsize
    blocks = plan(1, queries, fits=budget_bytes // (2 * row), wanted=queries)

    attend: Any = {"gpu": gpu_backward.sparse_mla, "tpu": tpu.sparse_mla}[kernel]

    def block(sliced: jax.Array, shared: tuple, constants: Any) -> tuple[jax.Array, None]:
        keys, up_k, up_v = shared
        ((chosen,), fixed) = constants
        keys = together(keys, fixed)
        attended: Any = attend(absorb(sliced, up_k), keys, chosen, width, scale, budget_bytes // 2)
        return expand(attended[0], up_v, sliced.dtype), None

    differentiable, constant = constant_apart(latent)
    out, _ = in_blocks(block, blocks, q, (differentiable, w_uk, w_uv), ((indices,), constant))
    return out, indices if return_indices else None
