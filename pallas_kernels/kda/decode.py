"""KDA on a pool of states: one token for many slots, a window of drafts, and what was accepted of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, always, choose
from pallas_kernels.kda import decode_reference, decode_xla, gpu_slots, tpu_slots
from pallas_kernels.kda.gate import gate, l2_normalize
from pallas_kernels.precision import at_least_float32
from pallas_kernels.short_conv import short_conv


class KdaDecodeOutput(NamedTuple):
    """Result of `kda_decode`.

    Attributes:
        o: [B, H, V] in the dtype of v; 0 at padding.
        state_pool: [P, H, K, V] with the states of the slots after the token.
    """

    o: Float[Array, "B H V"]
    state_pool: Float[Array, "P H K V"]


class KdaConvDecodeOutput(NamedTuple):
    """Result of `kda_conv_decode`.

    Attributes:
        o: [B, H, K] in the dtype of x; 0 at padding.
        state_pool: [P, H, K, K] with the states of the slots after the token.
        tail_pool: [P, W-1, X] with the last inputs of the slots' convolutions.
    """

    o: Float[Array, "B H K"]
    state_pool: Float[Array, "P H K K"]
    tail_pool: Float[Array, "P W-1 X"]


class KdaRecords(NamedTuple):
    """What each of a slot's last tokens did to its state: S = diag(exp g) S + k uᵀ, for up to R tokens a slot.

    Attributes:
        k: [P, H, R, K] keys, L2-normalised.
        u: [P, H, R, V] what was written for them, β (v - Sᵀ k). float32: rounded to bfloat16 its errors would stay in the
            state, where those of a token's inputs are met by the next correction.
        g: [P, H, R, K] log decay.
    """

    k: Float[Array, "P H R K"]
    u: Float[Array, "P H R V"]
    g: Float[Array, "P H R K"]


class KdaVerifyOutput(NamedTuple):
    """Result of `kda_verify`.

    Attributes:
        o: [B, n, H, V] in the dtype of v; 0 at padding.
        records: with the window's n records behind the committed ones.
    """

    o: Float[Array, "B n H V"]
    records: KdaRecords


def kda_decode(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    g: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
    state_pool: Float[Array, "P H K V"],
    slots: Int[Array, "B"],
    *,
    A_log: Float[Array, "H"] | None = None,
    dt_bias: Float[Array, "H K"] | None = None,
    gate_lower_bound: float | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> KdaDecodeOutput:
    """One token of `kda` for B sequences, whose states are slots of a pool.

    For every row, with the state S of its slot:

        S' = diag(exp g) S,    u = β (v - S'ᵀ k),    S = S' + k uᵀ,    o = scale · Sᵀ q.

    The kernels write the states where they are: donate the pool to `jax.jit`, or it's copied first. A row with a negative
    slot is padding: it may hold anything, its o is 0, and no slot changes. Slots of no row may hold anything, NaN too.

    Everything inside is float32 or better. Only "xla" and "reference" are differentiable.

    Source: Kimi Linear report (arXiv 2510.26692).

    Args:
        q: queries, L2-normalised and not scaled; with A_log not normalised.
        k: keys, as q.
        v: values.
        g: log decay, <= 0, float32 or better; with A_log what `gate` takes, in any precision.
        beta: strength of the write, in (0, 1), float32 or better; with A_log its logits, in any precision.
        state_pool: states of P slots, float32 or better.
        slots: the slot of each row, no slot twice, less than P; negative for padding.
        A_log: of `gate`. Given with dt_bias, the operation starts with l2_normalize(q), l2_normalize(k),
            gate(g, A_log, dt_bias, gate_lower_bound) and σ(beta).
        dt_bias: of `gate`.
        gate_lower_bound: of `gate`, for calls with A_log.
        scale: of q; None: K^(-1/2).
        implementation: None takes the best that can run. "gpu" takes K = V = 128 and a pool in float32; "tpu" widths that
            are multiples of 128.

    Returns:
        KdaDecodeOutput(o, state_pool).

    Raises:
        ValueError: sizes that don't fit, or arguments that contradict each other.
        TypeError: dtypes that don't fit.
        UnsupportedImplementationError: the implementation named can't run.
    """
    batch, heads, width, values = _check_pool("kda_decode", state_pool, slots)
    scale = _scale_of("kda_decode", scale, width)
    raw = A_log is not None
    if raw != (dt_bias is not None):
        given, missing = ("A_log", "dt_bias") if raw else ("dt_bias", "A_log")
        raise ValueError(f"kda_decode: {given} is given without {missing}; the gate needs both.")
    if gate_lower_bound is not None and not raw:
        raise ValueError(
            f"kda_decode: gate_lower_bound is {gate_lower_bound}, but without A_log there is no gate here."
        )
    _check_shapes(
        "kda_decode",
        {
            "q": (q, (batch, heads, width)),
            "k": (k, (batch, heads, width)),
            "v": (v, (batch, heads, values)),
            "g": (g, (batch, heads, width)),
            "beta": (beta, (batch, heads)),
            "A_log": (A_log, (heads,)),
            "dt_bias": (dt_bias, (heads, width)),
        },
    )
    _check_dtypes(
        "kda_decode", {"q": q, "k": k, "v": v, "A_log": A_log, "dt_bias": dt_bias}, {"state_pool": state_pool}
    )
    _check_dtypes("kda_decode", {"g": g, "beta": beta}, {} if raw else {"g": g, "beta": beta})
    vectors = {"q": q, "k": k, "v": v} | ({"g": g} if raw else {})
    floats = {"state_pool": state_pool, "A_log": A_log, "dt_bias": dt_bias} | ({} if raw else {"g": g, "beta": beta})
    choice = choose(
        "kda_decode",
        implementation,
        {
            "tpu": lambda: tpu_slots.obstacle(
                {"q": q, "k": k, "v": v}, floats, state_pool, named=implementation == "tpu"
            ),
            "gpu": lambda: gpu_slots.obstacle(
                vectors,
                floats,
                state_pool,
                named=implementation == "gpu",
                unproved=gpu_slots.gate_unproved(raw, gate_lower_bound),
            ),
            "xla": always,
            "reference": always,
        },
    )
    if choice.name == "gpu":
        return KdaDecodeOutput(
            *gpu_slots.decode(
                q, k, v, g, beta, A_log, dt_bias, state_pool, slots, scale=scale, gate_lower_bound=gate_lower_bound
            )
        )
    if A_log is not None and dt_bias is not None:
        q, k = l2_normalize(q), l2_normalize(k)
        g = gate(g[:, None], A_log, dt_bias, gate_lower_bound)[:, 0]
        beta = jax.nn.sigmoid(beta.astype(at_least_float32(beta)))
    runs: dict[str, Any] = {"tpu": tpu_slots.decode, "xla": decode_xla.decode, "reference": decode_reference.decode}
    run = runs[choice.name]
    return KdaDecodeOutput(*run(q, k, v, g, beta, state_pool, slots, scale=scale))


def kda_conv_decode(
    x: Float[Array, "B X"],
    conv_weight: Float[Array, "X W"],
    raw: Float[Array, "B H K"],
    beta_logits: Float[Array, "B H"],
    A_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    state_pool: Float[Array, "P H K K"],
    tail_pool: Float[Array, "P W-1 X"],
    slots: Int[Array, "B"],
    *,
    gate_lower_bound: float | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> KdaConvDecodeOutput:
    """One token of a KDA layer between its projections and its output norm, for B sequences in slots of two pools.

    That is:

        q, k, v = silu(conv(x))    (`short_conv`, rounded to the dtype of x as there),
        kda_decode(q, k, v, raw, beta_logits, A_log=A_log, dt_bias=dt_bias).

    The kernel writes states and tails where they are: donate both pools. Padding, slots and precision are as in
    `kda_decode`. Only "xla" and "reference" are differentiable.

    Args:
        x: this token's inputs of the convolution, X = 3·H·K channels: those of q, of k, and of v, head after head.
        conv_weight: taps of every channel, oldest first.
        raw: output of the decay projection.
        beta_logits: output of the projection for the strength of the write.
        A_log: of `gate`.
        dt_bias: of `gate`.
        state_pool: states of P slots, float32 or better.
        tail_pool: the last W-1 inputs of every slot's convolution, oldest first, in the dtype of x.
        slots: the slot of each row, no slot twice, less than P; negative for padding.
        gate_lower_bound: of `gate`.
        scale: of q; None: K^(-1/2).
        implementation: None takes the best that can run. "gpu" takes K = 128 and W = 4; "tpu" is the kernel of
            `kda_decode` behind the convolution in XLA.

    Returns:
        KdaConvDecodeOutput(o, state_pool, tail_pool).

    Raises:
        ValueError: sizes that don't fit.
        TypeError: dtypes that don't fit.
        UnsupportedImplementationError: the implementation named can't run.
    """
    batch, heads, width, values = _check_pool("kda_conv_decode", state_pool, slots)
    if values != width:
        raise ValueError(f"kda_conv_decode: state_pool has shape {state_pool.shape}; it must be [P, H, K, K].")
    scale = _scale_of("kda_conv_decode", scale, width)
    channels = 3 * heads * width
    if conv_weight.ndim != 2 or conv_weight.shape[0] != channels or conv_weight.shape[1] == 0:
        raise ValueError(f"kda_conv_decode: conv_weight has shape {conv_weight.shape}; it must be ({channels}, W).")
    history = conv_weight.shape[1] - 1
    _check_shapes(
        "kda_conv_decode",
        {
            "x": (x, (batch, channels)),
            "raw": (raw, (batch, heads, width)),
            "beta_logits": (beta_logits, (batch, heads)),
            "A_log": (A_log, (heads,)),
            "dt_bias": (dt_bias, (heads, width)),
            "tail_pool": (tail_pool, (state_pool.shape[0], history, channels)),
        },
    )
    floats = {"x": x, "conv_weight": conv_weight, "raw": raw, "beta_logits": beta_logits, "A_log": A_log}
    _check_dtypes("kda_conv_decode", floats | {"dt_bias": dt_bias}, {"state_pool": state_pool})
    if tail_pool.dtype != x.dtype:
        raise TypeError(f"kda_conv_decode: tail_pool has dtype {tail_pool.dtype}; it must be that of x, {x.dtype}.")
    wide = {"state_pool": state_pool, "A_log": A_log, "dt_bias": dt_bias}
    choice = choose(
        "kda_conv_decode",
        implementation,
        {
            "tpu": lambda: tpu_slots.obstacle({"x": x}, wide, state_pool, named=implementation == "tpu"),
            "gpu": lambda: conv_decode_obstacle(
                x,
                conv_weight,
                raw,
                beta_logits,
                A_log,
                dt_bias,
                state_pool,
                tail_pool,
                gate_lower_bound=gate_lower_bound,
                implementation=implementation,
            ),
            "xla": always,
            "reference": always,
        },
    )
    if choice.name == "gpu":
        o, tail_pool, state_pool = gpu_slots.conv_decode(
            x,
            conv_weight,
            raw,
            beta_logits,
            A_log,
            dt_bias,
            tail_pool,
            state_pool,
            slots,
            scale=scale,
            gate_lower_bound=gate_lower_bound,
        )
        return KdaConvDecodeOutput(o, state_pool, tail_pool)
    y, tails = short_conv(
        x[:, None],
        conv_weight,
        tail=tail_pool[jnp.maximum(slots, 0)],
        lengths=(slots >= 0).astype(jnp.int32),
        implementation="reference" if choice.name == "reference" else "xla",
    )
    q, k, v = (y.reshape(batch, 3, heads, width)[:, which] for which in range(3))
    o, state_pool = kda_decode(
        q,
        k,
        v,
        raw,
        beta_logits,
        state_pool,
        slots,
        A_log=A_log,
        dt_bias=dt_bias,
        gate_lower_bound=gate_lower_bound,
        scale=scale,
        implementation=choice.name,
    )
    return KdaConvDecodeOutput(o, state_pool, decode_reference.put(tail_pool, slots, tails))


def conv_decode_obstacle(
    x: Float[Array, "B X"],
    conv_weight: Float[Array, "X W"],
    raw: Float[Array, "B H K"],
    beta_logits: Float[Array, "B H"],
    A_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    state_pool: Float[Array, "P H K K"],
    tail_pool: Float[Array, "P W-1 X"],
    *,
    gate_lower_bound: float | None = None,
    implementation: Implementation | None = None,
) -> str | None:
    """Why no GPU kernel takes a call of `kda_conv_decode` with these arguments, or None; nothing is computed."""
    if implementation not in (None, "gpu"):
        return f"implementation={implementation!r} was named."
    if tail_pool.dtype != x.dtype:
        return f"the tails are {tail_pool.dtype} and the inputs {x.dtype}."
    return gpu_slots.obstacle(
        {"x": x, "raw": raw},
        {"state_pool": state_pool, "A_log": A_log, "dt_bias": dt_bias},
        state_pool,
        named=implementation == "gpu",
        unproved=gpu_slots.gate_unproved(True, gate_lower_bound),
        taps=conv_weight.shape[1],
    )


def kda_verify(
    q: Float[Array, "B n H K"],
    k: Float[Array, "B n H K"],
    v: Float[Array, "B n H V"],
    g: Float[Array, "B n H K"],
    beta: Float[Array, "B n H"],
    state_pool: Float[Array, "P H K V"],
    records: KdaRecords,
    slots: Int[Array, "B"],
    *,
    committed: Int[Array, "B"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> KdaVerifyOutput:
    """What `kda_decode` would give for n tokens in a row, without writing a state: for tokens that may be taken back.

    The state is read once, and every token's effect on it is recorded. With G the log decay summed from the state on,
    over the slot's committed records j and then the window,

        P(x)_i = (x_i ⊙ exp G_i)ᵀ S + Σ_j ⟨x_i, k_j ⊙ exp(G_i - G_j)⟩ u_j    over all j before i,
        u_i = β_i (v_i - P(k)_i),    o_i = scale · (P(q)_i + ⟨q_i, k_i⟩ u_i).

    The records go where the pool of records is: donate it. To accept the first a tokens of the window, count them as
    committed in the next call; before there is no room for a window behind them, fold the committed ones with
    `kda_commit` and begin at 0. What was recorded beyond is overwritten. Padding and slots are as in `kda_decode`.
    Everything inside is float32 or better, and decays are taken pair by pair, so the gate needs no bound.

    Source: ReplaySSM (dao-lab.ai/blog/2026/replayssm), for a decay per channel.

    Args:
        q: queries of n tokens a row, L2-normalised, not scaled.
        k: keys, L2-normalised, in the dtype of the records' keys.
        v: values.
        g: log decay, <= 0, float32 or better.
        beta: strength of the write, in (0, 1), float32 or better.
        state_pool: states of P slots, float32 or better.
        records: of the P slots, R >= n each.
        slots: the slot of each row, no slot twice, less than P; negative for padding.
        committed: records of each row's slot that count, those between its state and the window, at most R - n. None: 0.
        scale: of q; None: K^(-1/2).
        implementation: None takes the best that can run. "gpu" takes K = V = 128, up to 16 tokens and 8 or 16 records;
            "tpu" widths that are multiples of 128.

    Returns:
        KdaVerifyOutput(o, records).

    Raises:
        ValueError: sizes that don't fit.
        TypeError: dtypes that don't fit.
        UnsupportedImplementationError: the implementation named can't run.
    """
    batch, heads, width, values = _check_pool("kda_verify", state_pool, slots)
    scale = _scale_of("kda_verify", scale, width)
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"kda_verify: q has shape {q.shape}; it must be ({batch}, n, {heads}, {width}) with n >= 1.")
    tokens = q.shape[1]
    _check_records("kda_verify", records, state_pool, tokens)
    _check_shapes(
        "kda_verify",
        {
            "q": (q, (batch, tokens, heads, width)),
            "k": (k, (batch, tokens, heads, width)),
            "v": (v, (batch, tokens, heads, values)),
            "g": (g, (batch, tokens, heads, width)),
            "beta": (beta, (batch, tokens, heads)),
            "committed": (committed, (batch,)),
        },
    )
    _check_dtypes("kda_verify", {"q": q, "k": k, "v": v}, {"g": g, "beta": beta, "state_pool": state_pool})
    _check_integers("kda_verify", {"committed": committed})
    if k.dtype != records.k.dtype:
        raise TypeError(f"kda_verify: k has dtype {k.dtype}; it must be that of records.k, {records.k.dtype}.")
    floats = {"g": g, "beta": beta, "state_pool": state_pool, "records.u": records.u, "records.g": records.g}
    choice = choose(
        "kda_verify",
        implementation,
        {
            "tpu": lambda: tpu_slots.obstacle(
                {"q": q, "k": k, "v": v}, floats, state_pool, named=implementation == "tpu", tokens=tokens
            ),
            "gpu": lambda: gpu_slots.obstacle(
                {"q": q, "k": k, "v": v},
                floats,
                state_pool,
                named=implementation == "gpu",
                unproved={"committed records": committed is not None, "more than 8 tokens": tokens > 8},
                capacity=records.k.shape[2],
                tokens=tokens,
            ),
            "xla": always,
            "reference": always,
        },
    )
    recorded = records.k, records.u, records.g
    if choice.name == "gpu":
        o, recorded = gpu_slots.verify(q, k, v, g, beta, state_pool, recorded, slots, committed, scale=scale)
    else:
        if committed is None:
            committed = jnp.zeros((batch,), jnp.int32)
        runs: dict[str, Any] = {
            "tpu": tpu_slots.verify,
            "xla": decode_xla.verify,
            "reference": decode_reference.verify,
        }
        o, recorded = runs[choice.name](q, k, v, g, beta, state_pool, recorded, slots, committed, scale=scale)
    return KdaVerifyOutput(o, KdaRecords(*recorded))


def kda_commit(
    state_pool: Float[Array, "P H K V"],
    records: KdaRecords,
    slots: Int[Array, "B"],
    counts: Int[Array, "B"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "P H K V"]:
    """The pool with the first `counts` records of every row's slot folded into its state, one after the other.

    A record makes of a state:

        S = diag(exp g) S + k uᵀ,

    which is how `kda_decode` writes a token. The kernels write the states where they are: donate the pool.

    Args:
        state_pool: states of P slots, float32 or better.
        records: of the P slots, as `kda_verify` left them.
        slots: the slot of each row, no slot twice, less than P; negative for padding.
        counts: records to fold, 0 to R.
        implementation: None takes the best that can run; "gpu" and "tpu" take what they take in `kda_verify`.

    Returns:
        The pool.

    Raises:
        ValueError: sizes that don't fit.
        TypeError: dtypes that don't fit.
        UnsupportedImplementationError: the implementation named can't run.
    """
    batch, *_ = _check_pool("kda_commit", state_pool, slots)
    _check_records("kda_commit", records, state_pool, 1)
    _check_shapes("kda_commit", {"counts": (counts, (batch,))})
    _check_dtypes("kda_commit", {}, {"state_pool": state_pool})
    _check_integers("kda_commit", {"counts": counts})
    vectors = {"records.k": records.k}
    floats = {"records.u": records.u, "records.g": records.g, "state_pool": state_pool}
    choice = choose(
        "kda_commit",
        implementation,
        {
            "tpu": lambda: tpu_slots.obstacle(vectors, floats, state_pool, named=implementation == "tpu"),
            "gpu": lambda: gpu_slots.obstacle(
                vectors,
                floats,
                state_pool,
                named=implementation == "gpu",
                unproved={"commits": True},
                capacity=records.k.shape[2],
            ),
            "xla": always,
            "reference": always,
        },
    )
    runs: dict[str, Any] = {
        "tpu": tpu_slots.commit,
        "gpu": gpu_slots.commit,
        "xla": decode_xla.commit,
        "reference": decode_reference.commit,
    }
    return runs[choice.name](state_pool, (records.k, records.u, records.g), slots, counts)


def _check_pool(operation: str, state_pool: Array, slots: Array) -> tuple[int, int, int, int]:
    """(B, H, K, V)."""
    if state_pool.ndim != 4 or 0 in state_pool.shape:
        raise ValueError(
            f"{operation}: state_pool has shape {state_pool.shape}; it must be [P, H, K, V] with no size 0."
        )
    if slots.ndim != 1 or slots.shape[0] == 0:
        raise ValueError(f"{operation}: slots has shape {slots.shape}; it must be [B] with B >= 1.")
    _check_integers(operation, {"slots": slots})
    _, heads, width, values = state_pool.shape
    return slots.shape[0], heads, width, values


def _scale_of(operation: str, scale: float | None, width: int) -> float:
    if scale is not None and not scale > 0:
        raise ValueError(f"{operation}: scale is {scale}; it must be positive, or None for K^(-1/2).")
    return width**-0.5 if scale is None else scale


def _check_records(operation: str, records: KdaRecords, state_pool: Array, tokens: int) -> None:
    slots, heads, width, values = state_pool.shape
    if records.k.ndim != 4 or records.k.shape[2] < tokens:
        raise ValueError(
            f"{operation}: records.k has shape {records.k.shape}; it must be ({slots}, {heads}, R, {width}) with "
            f"R >= {tokens}."
        )
    capacity = records.k.shape[2]
    _check_shapes(
        operation,
        {
            "records.k": (records.k, (slots, heads, capacity, width)),
            "records.u": (records.u, (slots, heads, capacity, values)),
            "records.g": (records.g, (slots, heads, capacity, width)),
        },
    )
    _check_dtypes(operation, {"records.k": records.k}, {"records.u": records.u, "records.g": records.g})


def _check_shapes(operation: str, expected: dict[str, tuple[Array | None, tuple[int, ...]]]) -> None:
    for name, (x, shape) in expected.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"{operation}: {name} has shape {x.shape}; it must be {shape}.")


def _check_dtypes(operation: str, floats: dict[str, Any], wide: dict[str, Any]) -> None:
    for name, x in (floats | wide).items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{operation}: {name} has dtype {x.dtype}; it must be a floating point type.")
    for name, x in wide.items():
        if jnp.finfo(x.dtype).bits < 32:
            raise TypeError(f"{operation}: {name} has dtype {x.dtype}; it must be float32 or float64.")


def _check_integers(operation: str, integers: dict[str, Array | None]) -> None:
    for name, x in integers.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{operation}: {name} has dtype {x.dtype}; it must be an integer type.")
