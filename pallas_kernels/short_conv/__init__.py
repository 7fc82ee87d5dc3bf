"""The short convolution in front of KDA: depthwise, causal, a few taps, then SiLU."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, always, choose
from pallas_kernels.short_conv import reference, xla

__all__ = ["short_conv"]


def short_conv(
    x: Float[Array, "B T X"],
    weight: Float[Array, "X W"],
    *,
    tail: Float[Array, "B W-1 X"] | None = None,
    lengths: Int[Array, "B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T X"], Float[Array, "B W-1 X"]]:
    """y_t = silu(Σ_j weight_j · x_(t-W+1+j)) for every channel, j from 0 to W-1; weight_(W-1) meets the current token.

    There is no bias. What lies before the first token is `tail`, zeros without one. Computed in float32 or better,
    returned in the dtype of x. Differentiable.

    Padding may hold anything, NaN too: its y is 0, its gradient is 0, and it never enters the tail. Within one compiled
    shape a token changes no bit of an earlier token's output, and a row no bit of another row's.

    Source: Kimi Linear report (arXiv 2510.26692), and the public Kimi K3 code for the order of the taps.

    Args:
        x: inputs, channels last.
        weight: taps of every channel, oldest first.
        tail: the last W-1 inputs before this call, oldest first: inputs of the convolution, not its outputs.
        lengths: tokens of each row that count, 0 to T. None: all. Not with segment_ids.
        segment_ids: ids of packed sequences, that don't decrease along a row, then -1 for padding. A tap doesn't reach
            into another sequence. Not with tail: every sequence begins in the row.
        implementation: None takes the best that can run.

    Returns:
        (y, the W-1 inputs up to the last token that counts, in the dtype of x). With fewer new tokens than that, the
        old tail moves up; without any it stays as it was. With segment_ids it is the tail of the row's last sequence.

    Raises:
        ValueError: sizes that don't fit, or arguments that contradict each other.
        TypeError: dtypes that don't fit.
        UnsupportedImplementationError: the implementation named can't run.
    """
    _check(x, weight, tail, lengths, segment_ids)
    choice = choose(
        "short_conv",
        implementation,
        {
            "tpu": lambda: "short_conv has no TPU kernel yet.",
            "gpu": lambda: "short_conv has no GPU kernel yet.",
            "xla": always,
            "reference": always,
        },
    )
    run = reference.short_conv if choice.name == "reference" else xla.short_conv
    return run(x, weight, tail, lengths, segment_ids)


def _check(x: Array, weight: Array, tail: Array | None, lengths: Array | None, segment_ids: Array | None) -> None:
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(f"short_conv: x has shape {x.shape}; it must be [B, T, X] with no size 0.")
    batch, length, channels = x.shape
    if weight.ndim != 2 or weight.shape[0] != channels or weight.shape[1] == 0:
        raise ValueError(f"short_conv: weight has shape {weight.shape}; it must be ({channels}, W).")
    if segment_ids is not None and tail is not None:
        raise ValueError("short_conv: tail can't be given with segment_ids; packed sequences begin in their row.")
    if segment_ids is not None and lengths is not None:
        raise ValueError("short_conv: lengths can't be given with segment_ids; mark the padding with -1 there.")
    expected = {
        "tail": (tail, (batch, weight.shape[1] - 1, channels)),
        "lengths": (lengths, (batch,)),
        "segment_ids": (segment_ids, (batch, length)),
    }
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"short_conv: {name} has shape {array.shape}; it must be {shape}.")
    for name, array in {"x": x, "weight": weight, "tail": tail}.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"short_conv: {name} has dtype {array.dtype}; it must be a floating point type.")
    for name, array in {"lengths": lengths, "segment_ids": segment_ids}.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"short_conv: {name} has dtype {array.dtype}; it must be an integer type.")
