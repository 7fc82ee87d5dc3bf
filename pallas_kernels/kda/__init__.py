"""Kimi Delta Attention: linear attention with a state per head, a decay per key channel and the delta rule."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, always, choose
from pallas_kernels.kda import gpu, gpu_slots, reference, tpu, xla
from pallas_kernels.kda.decode import (
    KdaConvDecodeOutput,
    KdaDecodeOutput,
    KdaRecords,
    KdaVerifyOutput,
    conv_decode_obstacle,
    kda_commit,
    kda_conv_decode,
    kda_decode,
    kda_verify,
)
from pallas_kernels.kda.gate import gate, l2_normalize
from pallas_kernels.kda.xla import RUN, ChunkScan, best_chunk_scan
from pallas_kernels.precision import at_least_float32
from pallas_kernels.target import platform

__all__ = [
    "ChunkScan",
    "KdaConvDecodeOutput",
    "KdaDecodeOutput",
    "KdaOutput",
    "KdaRecords",
    "KdaVerifyOutput",
    "conv_decode_obstacle",
    "gate",
    "kda",
    "kda_commit",
    "kda_conv_decode",
    "kda_decode",
    "kda_from_raw",
    "kda_verify",
    "l2_normalize",
    "raw_obstacle",
]


class KdaOutput(NamedTuple):
    """Result of `kda`.

    Attributes:
        o: [B, T, H, V] in the dtype of v; 0 at padding.
        final_state: [B, H, K, V], or [B, N, H, K, V] with num_segments; float32 or better.
        states: [B, M, H, K, V] at state_positions, None without them.
    """

    o: Float[Array, "B T H V"]
    final_state: Float[Array, "B H K V"] | Float[Array, "B N H K V"]
    states: Float[Array, "B M H K V"] | None


def kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    *,
    initial_state: Float[Array, "B H K V"] | Float[Array, "B N H K V"] | None = None,
    lengths: Int[Array, "B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    num_segments: int | None = None,
    state_positions: Int[Array, "B M"] | None = None,
    scale: float | None = None,
    gate_lower_bound: float | None = None,
    chunk_size: int | None = None,
    chunk_scan: ChunkScan | None = None,
    segments: int | None = None,
    state_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> KdaOutput:
    """Runs the gated delta rule over T tokens.

    Per head, with a state S of K x V, in this order for every token:

        S' = diag(exp g_t) S,    u_t = β_t (v_t - S'ᵀ k_t),    S = S' + k_t u_tᵀ,    o_t = scale · Sᵀ q_t.

    Everything inside is float32, or float64 if an argument is. Differentiable in every float argument. Within one
    compiled shape a token changes no bit of an earlier token's output, and a row no bit of another row's.

    A row is one sequence, whose first `lengths` tokens count; or with `segment_ids` several sequences, one after the
    other. Padding may hold anything, NaN too: it changes no state, its o is 0 and its gradient is 0.

    Source: Kimi Linear report (arXiv 2510.26692).

    Args:
        q: queries, already L2-normalised, not scaled.
        k: keys, already L2-normalised.
        v: values.
        g: log decay, finite and <= 0 (`gate` computes it), float32 or better: bfloat16 would round slow decays to none.
        beta: strength of the write, in (0, 1), float32 or better.
        initial_state: the state before the first token, one a sequence. None: zeros.
        lengths: tokens of each row that count, 0 to T. None: all. Not with segment_ids.
        segment_ids: ids that don't decrease along a row, in [0, num_segments), then -1 for padding.
        num_segments: N >= 1, how many states to keep per row; a sequence without tokens ends where it began. None, with
            segment_ids, says that no state is needed: every sequence starts from zeros, final_state is that of the
            row's last one, and the cost doesn't depend on the number of sequences. This is the form for training; a NaN
            in a sequence reaches the ones after it there, but not with num_segments.
        state_positions: numbers of tokens, 0 to the row's length, after which to report the state; the larger ones are
            taken as the length. In any order. Not with segment_ids. Each costs up to a chunk. The gradient is then that
            of "xla" everywhere.
        scale: of q; None: K^(-1/2).
        gate_lower_bound: a promise that g >= this bound, negative. From -5.5 up it makes `xla` faster; a g below the
            promised bound gives wrong results.
        chunk_size: tokens a chunk, a multiple of 16. None: 64, or less for short sequences. The TPU kernel has 16, 32, 64
            and 128.
        chunk_scan: how `xla` passes from chunk to chunk: one after the other ("sequential"), or as a tree over as many
            chunks as 1 GiB of K x (K + V) matrices allows ("associative"), which is for few heads and long sequences; the
            results differ by rounding. None: "associative" on a GPU with at most 128 rows times heads, where steps take
            longer to start than to run, if there are no segments, else "sequential".
        segments: into how many parts to cut each sequence ("xla": the chunks of a row that it holds at once), which then
            run side by side, from zeros and the identity to find out what each does to a state, and again from the state
            that enters it. For few heads and long sequences; the results differ by rounding. Where the kernels cut depends
            on the sequence's own length and this number. None: "gpu" takes what a model of its time says is fastest for
            the shapes and the GPU's multiprocessors, and says it with its choice; the others take 1. "reference" has none.
        state_dtype: of the states that are returned, bfloat16 for instance; None: float32 or better. They are computed in
            float32 or better whatever it is, from an initial_state of any floating point type.
        implementation: None takes the best that can run. "tpu" takes widths K and V that are multiples of 128, q, k and
            v in float32 or bfloat16. With bfloat16 its products keep 16 bits of each operand. Its gradient is a kernel,
            too, or that of "xla" with segments or state_positions. "gpu" takes widths of 128, q, k and v in bfloat16,
            chunks of 64 and, with segment_ids, num_segments; it is faster with a gate_lower_bound from -5.5 up. Its
            products take bfloat16; its gradient is that of "xla", and for `kda_from_raw` kernels', too, with such a bound
            and without state_positions; the choice says which. One token runs in the kernel of `kda_decode`, in float32.

    Returns:
        KdaOutput(o, final_state, states).

    Raises:
        ValueError: sizes that don't fit, or arguments that contradict each other.
        TypeError: dtypes that don't fit.
        UnsupportedImplementationError: the implementation named can't run.
    """
    _check(q, k, v, g, beta, initial_state, lengths, segment_ids, num_segments, state_positions)
    if scale is not None and not scale > 0:
        raise ValueError(f"kda: scale is {scale}; it must be positive, or None for K^(-1/2).")
    if gate_lower_bound is not None and not gate_lower_bound < 0:
        raise ValueError(
            f"kda: gate_lower_bound is {gate_lower_bound}; it must be negative, or None if the gate has no bound."
        )
    if chunk_size is not None and (chunk_size <= 0 or chunk_size % RUN):
        raise ValueError(f"kda: chunk_size is {chunk_size}; it must be a positive multiple of {RUN}.")
    if chunk_scan not in (None, "sequential", "associative"):
        raise ValueError(f"kda: chunk_scan is {chunk_scan!r}; it must be 'sequential' or 'associative', or None.")
    _check_segments("kda", segments)
    if chunk_scan == "associative" and segments not in (None, 1):
        raise ValueError(f"kda: segments is {segments}, and chunk_scan='associative' has none; leave one of them out.")
    _check_state_dtype("kda", state_dtype)
    if initial_state is not None:
        initial_state = initial_state.astype(at_least_float32(q, k, v, g, beta, initial_state))
    one_token = q.shape[1] == 1 and segment_ids is None and state_positions is None
    note = partial(_note, q, num_segments, state_positions, gate_lower_bound, segments, one_token, raw=False)
    choice = choose(
        "kda",
        implementation,
        {
            "tpu": lambda: tpu.obstacle(
                q,
                k,
                v,
                g,
                beta,
                initial_state=initial_state,
                chunk_size=chunk_size,
                chunk_scan=chunk_scan,
                named=implementation == "tpu",
            ),
            "gpu": lambda: (
                gpu_slots.obstacle_of_one(
                    q, k, v, {"g": g, "beta": beta, "initial_state": initial_state}, named=implementation == "gpu"
                )
                if one_token
                else gpu.obstacle(
                    q,
                    k,
                    v,
                    {"g": g, "beta": beta, "initial_state": initial_state},
                    segment_ids=segment_ids,
                    num_segments=num_segments,
                    chunk_size=chunk_size,
                    chunk_scan=chunk_scan,
                )
            ),
            "xla": always,
            "reference": always,
        },
        {"gpu": note},
    )
    arguments: dict[str, Any] = {
        "initial_state": initial_state,
        "lengths": lengths,
        "segment_ids": segment_ids,
        "num_segments": num_segments,
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
    }
    tokens = q, k, v, g, beta
    if choice.name == "gpu" and one_token:
        one = gpu_slots.one_token(*tokens, initial_state=initial_state, lengths=lengths, scale=arguments["scale"])
        return _output((*one, None), state_dtype)
    arguments["state_positions"] = state_positions
    if choice.name == "reference":
        return _output(reference.kda(*tokens, **arguments), state_dtype)
    arguments["gate_lower_bound"] = gate_lower_bound
    if choice.name == "gpu":
        return _output(gpu.kda_with_states(*tokens, **arguments, segments=segments), state_dtype)
    arguments |= {"chunk_size": chunk_size, "segments": segments or 1}
    if choice.name == "tpu":
        return _output(tpu.kda(*tokens, **arguments), state_dtype)
    if chunk_scan is None:
        chunk_scan = best_chunk_scan(q.shape[0] * q.shape[2]) if segments is None else "sequential"
    return _output(xla.kda(*tokens, **arguments, chunk_scan=chunk_scan), state_dtype)


def _output(found: tuple[Array, Array, Array | None], state_dtype: DTypeLike | None) -> KdaOutput:
    o, final_state, states = found
    if state_dtype is None:
        return KdaOutput(o, final_state, states)
    return KdaOutput(o, final_state.astype(state_dtype), None if states is None else states.astype(state_dtype))


def kda_from_raw(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    raw: Float[Array, "B T H K"],
    beta_logits: Float[Array, "B T H"],
    A_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    *,
    initial_state: Float[Array, "B H K V"] | Float[Array, "B N H K V"] | None = None,
    lengths: Int[Array, "B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    num_segments: int | None = None,
    state_positions: Int[Array, "B M"] | None = None,
    scale: float | None = None,
    gate_lower_bound: float | None = None,
    segments: int | None = None,
    state_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> KdaOutput:
    """Runs `kda` on what a layer's projections give.

        kda(l2_normalize(q), l2_normalize(k), v, gate(raw, A_log, dt_bias, gate_lower_bound), σ(beta_logits)).

    The "gpu" implementation computes gate, norms and σ in its kernels, from bfloat16 raw numbers; the others compose it
    as written.

    Args:
        q: queries, neither normalised nor scaled.
        k: keys, not normalised.
        v: values.
        raw: output of the decay projection.
        beta_logits: output of the projection for the strength of the write.
        A_log: of `gate`.
        dt_bias: of `gate`.
        initial_state: as in `kda`; so are all arguments that follow.
        lengths: tokens of each row that count.
        segment_ids: packed sequences.
        num_segments: how many states to keep per row.
        state_positions: numbers of tokens after which to report the state.
        scale: of q.
        gate_lower_bound: of `gate`.
        segments: into how many parts to cut each sequence.
        state_dtype: of the states that are returned.
        implementation: None takes the best that can run.

    Returns:
        KdaOutput(o, final_state, states).

    Raises:
        ValueError: sizes that don't fit, or arguments that contradict each other.
        TypeError: dtypes that don't fit.
        UnsupportedImplementationError: the implementation named can't run.
    """
    heads, width = q.shape[2:]
    if A_log.shape != (heads,) or dt_bias.shape != (heads, width):
        raise ValueError(
            f"kda_from_raw: A_log has shape {A_log.shape} and dt_bias {dt_bias.shape}; they must be ({heads},) and "
            f"({heads}, {width})."
        )
    if scale is not None and not scale > 0:
        raise ValueError(f"kda_from_raw: scale is {scale}; it must be positive, or None for K^(-1/2).")
    if gate_lower_bound is not None and not gate_lower_bound < 0:
        raise ValueError(
            f"kda_from_raw: gate_lower_bound is {gate_lower_bound}; it must be negative, or None if the gate has no bound."
        )
    _check_segments("kda_from_raw", segments)
    _check_state_dtype("kda_from_raw", state_dtype)
    if initial_state is not None and jnp.issubdtype(initial_state.dtype, jnp.floating):
        initial_state = initial_state.astype(at_least_float32(initial_state))
    dtype = at_least_float32(raw, A_log, dt_bias)
    decays = jax.ShapeDtypeStruct(raw.shape, dtype)
    betas = jax.ShapeDtypeStruct(beta_logits.shape, at_least_float32(beta_logits))
    one_token = q.shape[1] == 1 and segment_ids is None and state_positions is None
    note = partial(_note, q, num_segments, state_positions, gate_lower_bound, segments, one_token, raw=True)

    def obstacle() -> str | None:
        if one_token:
            wide = {"A_log": A_log, "dt_bias": dt_bias, "initial_state": initial_state}
            return gpu_slots.obstacle_of_one(
                q, k, v, wide, named=implementation == "gpu", raw=raw, gate_lower_bound=gate_lower_bound
            )
        return raw_obstacle(
            q,
            k,
            v,
            raw,
            beta_logits,
            A_log,
            dt_bias,
            initial_state,
            segment_ids=segment_ids,
            num_segments=num_segments,
        )

    # Elsewhere `kda` chooses, and says so.
    if implementation == "gpu" or (implementation is None and platform() == "gpu"):
        choice = choose(
            "kda_from_raw",
            implementation,
            {"gpu": obstacle, "xla": always},
            {"gpu": note},
        )
        if choice.name == "gpu":
            _check(q, k, v, decays, betas, initial_state, lengths, segment_ids, num_segments, state_positions)
            if one_token:
                one = gpu_slots.one_token(
                    q,
                    k,
                    v,
                    raw,
                    beta_logits,
                    A_log,
                    dt_bias,
                    initial_state=initial_state,
                    lengths=lengths,
                    scale=q.shape[-1] ** -0.5 if scale is None else scale,
                    gate_lower_bound=gate_lower_bound,
                )
                return _output((*one, None), state_dtype)
            found = gpu.kda_with_states(
                q,
                k,
                v,
                raw,
                beta_logits,
                A_log,
                dt_bias,
                initial_state=initial_state,
                lengths=lengths,
                segment_ids=segment_ids,
                num_segments=num_segments,
                state_positions=state_positions,
                scale=q.shape[-1] ** -0.5 if scale is None else scale,
                gate_lower_bound=gate_lower_bound,
                segments=segments,
            )
            return _output(found, state_dtype)
    counts = None if segment_ids is None else segment_ids >= 0
    if lengths is not None:
        counts = jnp.arange(q.shape[1]) < lengths[:, None]
    if counts is not None:
        # Padding may be NaN, which the norms and the gate would bring into the gradient of what counts.
        q, k, raw = (jnp.where(counts[..., None, None], x, jnp.zeros((), x.dtype)) for x in (q, k, raw))
        beta_logits = jnp.where(counts[..., None], beta_logits, jnp.zeros((), beta_logits.dtype))
    return kda(
        l2_normalize(q),
        l2_normalize(k),
        v,
        gate(raw, A_log, dt_bias, gate_lower_bound),
        jax.nn.sigmoid(beta_logits.astype(betas.dtype)),
        initial_state=initial_state,
        lengths=lengths,
        segment_ids=segment_ids,
        num_segments=num_segments,
        state_positions=state_positions,
        scale=scale,
        gate_lower_bound=gate_lower_bound,
        segments=segments,
        state_dtype=state_dtype,
        implementation=implementation,
    )


def raw_obstacle(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    raw: Float[Array, "B T H K"],
    beta_logits: Float[Array, "B T H"],
    A_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    initial_state: Float[Array, "B H K V"] | Float[Array, "B N H K V"] | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    num_segments: int | None = None,
) -> str | None:
    """Why the GPU's kernels can't take whole sequences of `kda_from_raw`, or None; nothing is computed."""
    if raw.dtype != jnp.bfloat16:
        return f"raw has dtype {raw.dtype}; the Hopper kernels compute the gate from bfloat16."
    return gpu.obstacle(
        q,
        k,
        v,
        {"beta_logits": beta_logits, "A_log": A_log, "dt_bias": dt_bias, "initial_state": initial_state},
        segment_ids=segment_ids,
        num_segments=num_segments,
    )


def _note(
    q: Array,
    num_segments: int | None,
    state_positions: Array | None,
    gate_lower_bound: float | None,
    segments: int | None,
    one_token: bool,
    raw: bool,
) -> str | None:
    """What else to say of a call that the Hopper kernels take."""
    if one_token:
        return None
    gradient = gpu.gradient_in_words(gate_lower_bound, state_positions is not None, raw)
    return f"{gpu.in_words(q, num_segments, segments)}; {gradient}"


def _check_state_dtype(operation: str, state_dtype: DTypeLike | None) -> None:
    if state_dtype is not None and not jnp.issubdtype(state_dtype, jnp.floating):
        raise TypeError(
            f"{operation}: state_dtype is {jnp.dtype(state_dtype)}; it must be a floating point type, or None."
        )


def _check_segments(operation: str, segments: int | None) -> None:
    if segments is not None and segments < 1:
        raise ValueError(f"{operation}: segments is {segments}; it must be at least 1, or None.")


def _check(
    q: Array,
    k: Array,
    v: Array,
    g: Array | jax.ShapeDtypeStruct,
    beta: Array | jax.ShapeDtypeStruct,
    initial_state: Array | None,
    lengths: Array | None,
    segment_ids: Array | None,
    num_segments: int | None,
    state_positions: Array | None,
) -> None:
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"kda: q has shape {q.shape}; it must be [B, T, H, K] with no size 0.")
    batch, length, heads, width = q.shape
    if v.ndim != 4 or v.shape[:3] != q.shape[:3] or v.shape[3] == 0:
        raise ValueError(f"kda: v has shape {v.shape}; it must be ({batch}, {length}, {heads}, V).")
    if segment_ids is None and num_segments is not None:
        raise ValueError(f"kda: num_segments is {num_segments}, but there are no segment_ids for it to count.")
    if segment_ids is not None:
        if num_segments is not None and num_segments < 1:
            raise ValueError(f"kda: num_segments is {num_segments}; it must be at least 1, or None.")
        if num_segments is None and initial_state is not None:
            raise ValueError("kda: initial_state with segment_ids needs num_segments, one state for each sequence.")
        if lengths is not None:
            raise ValueError("kda: lengths can't be given with segment_ids; mark the padding with -1 there.")
        if state_positions is not None:
            raise ValueError("kda: state_positions can't be given with segment_ids; only final_state can.")

    sequences = () if num_segments is None else (num_segments,)
    expected = {
        "k": (k, q.shape),
        "g": (g, q.shape),
        "beta": (beta, q.shape[:3]),
        "initial_state": (initial_state, (batch, *sequences, heads, width, v.shape[3])),
        "lengths": (lengths, (batch,)),
        "segment_ids": (segment_ids, (batch, length)),
    }
    for name, (x, shape) in expected.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"kda: {name} has shape {x.shape}; it must be {shape}.")
    if state_positions is not None and (state_positions.ndim != 2 or state_positions.shape[0] != batch):
        raise ValueError(f"kda: state_positions has shape {state_positions.shape}; it must be ({batch}, M).")

    for name, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"kda: {name} has dtype {x.dtype}; it must be a floating point type.")
    for name, x in {"g": g, "beta": beta}.items():
        if jnp.finfo(x.dtype).bits < 32:
            raise TypeError(f"kda: {name} has dtype {x.dtype}; it must be float32 or float64.")
    for name, x in {"lengths": lengths, "segment_ids": segment_ids, "state_positions": state_positions}.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"kda: {name} has dtype {x.dtype}; it must be an integer type.")
