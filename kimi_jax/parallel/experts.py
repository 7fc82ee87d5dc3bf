"""Routed experts spread over devices: each device owns a range of experts and tokens come to them.

Everything here is called inside `jax.shard_map`, on a device's own tokens and experts. Three ways to bring the two
together, all exact for every routing, without a capacity and without dropped tokens:

- replicated: all devices hold the same tokens, run their own experts on them and add up (psum).
- gathered: tokens of all devices are gathered, then as replicated; sums go back to their owners (psum_scatter).
- ragged: one row for each of a token's experts goes to the expert's owner, and its result comes back
  (`jax.lax.ragged_all_to_all`).

Static shapes must hold the worst routing, in which one device gets every row. Buffers are made for an even routing
and some slack instead, and are filled as often as it takes: rows that meet a device's experts are numbered, and window
w holds numbers w·R..w·R+R−1. How many windows there are is known at run time, and, where devices exchange rows, to all
of them. So memory is bounded whatever the routing, and an even one costs no more than its rows. Where the worst routing
of all tokens fits, as in decoding, one window holds it and there is no loop: on GPUs the host decides every trip of a loop.

Sending a row once a device instead of once an expert would save little: with k = 16 experts a token over 128 devices,
15.1 of them get a token. Over few devices it saves more, and there the gathered form, which does so, moves fewer bytes.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.modules.experts import ExpertStack, Routing, run_experts
from kimi_jax.modules.mlp import GatedActivation
from kimi_jax.parallel.expert_forms import Block, Exchange, Form, Stack, Weights, trainable
from kimi_jax.parallel.local_experts import gathered_backward, gathered_forward, local_backward, local_forward
from kimi_jax.parallel.ragged_experts import ragged_backward, ragged_forward
from pallas_kernels.dispatch import Implementation
from pallas_kernels.manual_axes import align
from pallas_kernels.precision import at_least_float32

BUDGET = 2**28
"""Bytes that temporaries of one call's forward pass may take, where `budget` isn't given."""

SLACK = 1.5
"""Rows of a window over those of an even routing: the fullest of many devices has this many more than the mean."""

SMALLEST_WINDOW = 256
"""Rows of a window where an even routing needs fewer: of few rows the fullest device has many times the mean."""


class ExchangeChoice(NamedTuple):
    """What `cheaper_exchange` found.

    Attributes:
        name: the form that takes the least time.
        reason: a sentence with the numbers behind it.
        seconds: estimate for each form that was compared.
    """

    name: Exchange
    reason: str
    seconds: dict[Exchange, float]


def run_experts_sharded(
    x: Float[Array, "M D"],
    routing: Routing,
    valid: Bool[Array, " M"],
    stack: ExpertStack,
    num_experts: int,
    activation: GatedActivation,
    *,
    axes: tuple[str, ...] = ("expert", "tensor"),
    tokens: Literal["split", "replicated"] = "split",
    exchange: Literal["gathered", "ragged"] | None = None,
    budget: int = BUDGET,
    implementation: Implementation | None = None,
    ragged_all_to_all: Callable[..., Array] = jax.lax.ragged_all_to_all,
    reduce: Callable[[Array], Any] | None = None,
) -> Any:
    """Σ_e w_e · E_e(x) as `kimi_jax.modules.experts.run_experts`, with the experts split over mesh axes.

    Device i of the n devices of `axes` (row-major in the order of `axes`) owns experts i·E/n..(i+1)·E/n−1. Each token's
    sum is taken in float32 and rounded once: over its experts in their order for the ragged form; over a device's
    experts, in its own order where one window holds them and in ascending order otherwise, then over devices, for the
    other two. Rows that aren't valid come back 0 and touch nothing else, NaN neither.

    Differentiable in reverse mode, once, in `x`, `routing.weights` and array stacks; the gradient is that of the sum
    over devices of what is differentiated, as for collectives of jax under check_vma=False. Nothing but the arguments
    is kept for it: the backward pass moves the rows again. Gradients of a stack add up in float32 over the call.

    Args:
        x: this device's tokens, or all devices' where they're replicated.
        routing: experts are numbers in 0..num_experts−1.
        valid: False for padding.
        stack: this device's experts, of one or more layers; `offset` counts in them.
        num_experts: E, of all devices.
        activation: between the two products.
        axes: mesh axes that split the experts, all of them manual.
        tokens: whether devices of `axes` hold different tokens or the same ones.
        exchange: how split tokens meet their experts. None takes, when compiled for TPU, the form that moves fewer
            bytes, and `gathered` elsewhere: CPUs lack the ragged collective, and on GPUs it hasn't been tried.
        budget: bytes for temporaries of the forward pass; the backward pass takes about twice as many, and float32
            sums of the gradients of an array stack. Tokens are processed in as many blocks as it takes, of at least
            one token a device, and their rows in windows of at least 256. One device runs all tokens at once, as
            `run_experts` does, whatever the budget.
        implementation: of the grouped products.
        ragged_all_to_all: another function of the same meaning.
        reduce: for replicated tokens, what makes the result out of this device's sums [M, D], float32 or better, in place
            of adding them up and rounding.

    Raises:
        ValueError: sizes or names that don't fit each other; names the config field where there is one.
    """
    size = _group_size(axes)
    _check(x, routing, valid, stack, num_experts, size, axes)
    if tokens not in ("split", "replicated"):
        raise ValueError(f"run_experts_sharded: tokens is {tokens!r}; it must be 'split' or 'replicated'.")
    if exchange not in (None, "gathered", "ragged"):
        raise ValueError(f"run_experts_sharded: exchange is {exchange!r}; it must be None, 'gathered' or 'ragged'.")
    if tokens == "replicated" and exchange is not None:
        raise ValueError(
            f"run_experts_sharded: exchange is {exchange!r} and tokens 'replicated'; only split tokens are exchanged."
        )
    if budget < 1:
        raise ValueError(f"run_experts_sharded: budget is {budget}; it must be a positive number of bytes.")
    if x.shape[0] == 0:
        return x
    if size == 1:
        x, routing, valid, stack = align(x, routing, valid, stack)
        return run_experts(x, routing, valid, stack, num_experts, activation, implementation)
    per_token = routing.experts.shape[1]

    def form(kind: Exchange) -> Form:
        block, window = block_and_window(kind, x.shape, x.dtype.itemsize, per_token, stack.down.shape[2], size, budget)
        return Form(
            kind,
            axes,
            size,
            num_experts,
            activation,
            block,
            window,
            implementation,
            ragged_all_to_all=ragged_all_to_all,
        )

    forms: tuple[tuple[str, Form], ...]
    if tokens == "replicated":
        forms = (("default", form("replicated")),)
    elif exchange is not None:
        forms = (("default", form(exchange)),)
    else:
        moved = {
            kind: _link_bytes(kind, size * x.shape[0], x.shape[1], per_token, num_experts, size, x.dtype.itemsize)
            for kind in ("gathered", "ragged")
        }
        best: Exchange = "ragged" if moved["ragged"] < moved["gathered"] else "gathered"
        forms = (("default", form("gathered")), ("tpu", form(best)))
    device = jax.lax.axis_index(axes)
    arrays = align(
        x,
        routing.weights,
        stack.gate_up,
        stack.down,
        jnp.asarray(stack.offset, jnp.int32),
        routing.experts,
        valid,
        device,
    )
    result: Array = _run(forms, *arrays)
    if forms[0][1].kind != "replicated":
        return result
    return jax.lax.psum(result, axes).astype(x.dtype) if reduce is None else reduce(result)


def run_experts_parallel(
    x: Float[Array, "M D"],
    routing: Routing,
    valid: Bool[Array, " M"],
    stack: ExpertStack,
    num_experts: int,
    activation: GatedActivation,
    *,
    split_axes: tuple[str, ...] = ("expert",),
    replicated_axes: tuple[str, ...] = ("tensor",),
    exchange: Exchange | None = None,
    budget: int = BUDGET,
    implementation: Implementation | None = None,
    ragged_all_to_all: Callable[..., Array] = jax.lax.ragged_all_to_all,
) -> Float[Array, "M D"]:
    """`run_experts_sharded` for tokens that differ over some of the axes and are the same over the others.

    Experts are split over (*split_axes, *replicated_axes). Each device of `replicated_axes` takes its share of the
    tokens, the shares are exchanged as split tokens, and the results are gathered over `replicated_axes`.

    Args:
        x: this device's tokens.
        routing: see `run_experts_sharded`.
        valid: False for padding.
        stack: this device's experts.
        num_experts: E, of all devices.
        activation: between the two products.
        split_axes: mesh axes over which tokens differ; may be empty.
        replicated_axes: mesh axes over which they're the same; may be empty.
        exchange: "replicated" shares nothing out: the same tokens everywhere, one psum; legal where `split_axes` have
            one device. None takes it there if the ragged form doesn't run or would move more bytes.
        budget: see `run_experts_sharded`.
        implementation: of the grouped products.
        ragged_all_to_all: another function of the same meaning.

    Raises:
        ValueError: as `run_experts_sharded`.
    """
    axes = (*split_axes, *replicated_axes)
    size, copies = _group_size(axes), _group_size(replicated_axes)
    run = partial(run_experts_sharded, axes=axes, budget=budget, implementation=implementation)
    if exchange == "replicated":
        if size != copies:
            raise ValueError(
                f"run_experts_parallel: exchange is 'replicated' and split_axes {split_axes} have {size // copies} "
                "devices with tokens of their own; 'gathered', 'ragged' or None are legal."
            )
        return run(x, routing, valid, stack, num_experts, activation, tokens="replicated")
    share = -(-x.shape[0] // copies)
    per_token, itemsize = routing.experts.shape[1], x.dtype.itemsize

    def shared(*arrays: Any) -> Array:
        x, experts, weights, scores, valid, gate_up, down, offset = arrays
        here = jax.lax.axis_index(replicated_axes) if replicated_axes else 0

        def part(array: Array) -> Array:
            padded = jnp.pad(array, [(0, share * copies - array.shape[0])] + [(0, 0)] * (array.ndim - 1))
            return jax.lax.dynamic_slice_in_dim(padded, here * share, share)

        own = Routing(part(experts), part(weights), part(scores))
        local = ExpertStack(gate_up, down, offset)
        result = run(
            part(x),
            own,
            part(valid),
            local,
            num_experts,
            activation,
            exchange=exchange,
            ragged_all_to_all=ragged_all_to_all,
        )
        return _gather_copies(result, replicated_axes)[: x.shape[0]] if replicated_axes else result

    def same(*arrays: Any) -> Array:
        x, experts, weights, scores, valid, gate_up, down, offset = arrays
        stack = ExpertStack(gate_up, down, offset)
        routing = Routing(experts, weights, scores)
        result = run(x, routing, valid, stack, num_experts, activation, tokens="replicated")
        return align(result, jax.lax.axis_index(split_axes))[0] if split_axes else result

    arrays = (x, *routing, valid, stack.gate_up, stack.down, jnp.asarray(stack.offset, jnp.int32))
    if exchange is not None or size != copies or copies == 1:
        return shared(*arrays)
    bytes_of = partial(_link_bytes, num_tokens=x.shape[0], width=x.shape[1], per_token=per_token)
    bytes_of = partial(bytes_of, num_experts=num_experts, size=size, itemsize=itemsize)
    back = (size - 1) * share * x.shape[1] * itemsize
    if bytes_of("ragged") + back >= bytes_of("replicated"):
        return same(*arrays)
    return jax.lax.platform_dependent(*arrays, tpu=shared, default=same)


def cheaper_exchange(
    num_tokens: int,
    width: int,
    per_token: int,
    num_experts: int,
    devices: int,
    *,
    link_bandwidth: float,
    memory_bandwidth: float,
    collective_seconds: float = 0.0,
    message_seconds: float = 0.0,
    itemsize: int = 2,
    replicated: bool = False,
) -> ExchangeChoice:
    """The form with the least time for moving rows. Reading experts and multiplying take the same time in all forms.

    With T tokens in all, D = width, k experts a token, E experts, n devices, s = itemsize, and c, m the seconds that a
    collective and one message to another device take to start, a device needs

        seconds = bytes over links / link_bandwidth + bytes of memory / memory_bandwidth + start

        form        bytes over links                             bytes of memory       start
        replicated  (n−1)/n · T · 2·4·D                          T·D·(s + 8)           c + 2(n−1)·m
        gathered    (n−1)/n · T · (D·(s + 4) + 8·k)              T·D·(2·s + 8)         4·c + 4(n−1)·m
        ragged      (n−1)/n · T/n · k·2·s·D + (n−1) · 4·E        T/n · k · 12·s·D      3·c + 3(n−1)·m

    The 4 is a float32 sum, 8·k a token's expert numbers and weights, 4·E each device's count of rows by expert. Memory:
    the replicated sum is read and written; gathered rows are written and read; a ragged row is copied six times
    (sent, received, sorted by expert, result, sorted back, received). An even routing is assumed.

    Args:
        num_tokens: T, distinct tokens of all devices of the group.
        width: D at which routed experts work.
        per_token: k, num_experts_per_token.
        num_experts: E.
        devices: n.
        link_bandwidth: bytes a second that a device sends.
        memory_bandwidth: bytes a second that a device reads or writes.
        collective_seconds: c.
        message_seconds: m.
        itemsize: s, bytes of an element of a row.
        replicated: whether all devices hold all tokens already: replicated is compared with ragged, to which a gather
            of T/n·(n−1) result rows is added. Otherwise gathered is.

    Raises:
        ValueError: a size or bandwidth that isn't positive, or experts that can't be split.
    """
    for name, value in (
        ("num_tokens", num_tokens),
        ("width", width),
        ("per_token", per_token),
        ("devices", devices),
        ("itemsize", itemsize),
        ("link_bandwidth", link_bandwidth),
        ("memory_bandwidth", memory_bandwidth),
    ):
        if value <= 0:
            raise ValueError(f"cheaper_exchange: {name} is {value}; it must be positive.")
    _check_split(num_experts, devices, "cheaper_exchange")
    rivals: tuple[Exchange, ...] = ("replicated" if replicated else "gathered", "ragged")
    start = {"replicated": (1, 2), "gathered": (4, 4), "ragged": (3, 3)}
    memory = {
        "replicated": num_tokens * width * (itemsize + 8),
        "gathered": num_tokens * width * (2 * itemsize + 8),
        "ragged": num_tokens / devices * per_token * 12 * itemsize * width,
    }
    moved: dict[Exchange, float] = {
        name: _link_bytes(name, num_tokens, width, per_token, num_experts, devices, itemsize) for name in rivals
    }
    if replicated:
        moved["ragged"] += num_tokens / devices * (devices - 1) * width * itemsize
    seconds: dict[Exchange, float] = {}
    for name in rivals:
        collectives, messages = start[name]
        begin = collectives * collective_seconds + messages * (devices - 1) * message_seconds
        seconds[name] = moved[name] / link_bandwidth + memory[name] / memory_bandwidth + begin
    # A tie goes to the first, which every platform can run.
    best = min(rivals, key=lambda name: seconds[name])
    other = rivals[1 - rivals.index(best)]
    reason = (
        f"{best} takes {seconds[best] * 1e6:.1f} us ({moved[best] / 1e6:.2f} MB over links, {memory[best] / 1e6:.2f} MB "
        f"of memory) and {other} {seconds[other] * 1e6:.1f} us ({moved[other] / 1e6:.2f} MB, "
        f"{memory[other] / 1e6:.2f} MB) for {num_tokens} tokens of width {width}, {per_token} of {num_experts} experts "
        f"each, over {devices} devices."
    )
    return ExchangeChoice(best, reason, seconds)


def _gather_copies(share: Float[Array, "M D"], axes: tuple[str, ...]) -> Float[Array, "N D"]:
    """The rows of all devices, known to be the same on them where shard_map asks for that (check_vma=True)."""
    checked = set(axes) <= jax.typeof(share).manual_axis_type.varying
    # Not without check_vma: jax 0.10 halves the gradient of two copies then.
    return jax.lax.all_gather(share, axes, tiled=True, to="invarying" if checked else "varying")


def _link_bytes(
    kind: Exchange, num_tokens: int, width: int, per_token: int, num_experts: int, size: int, itemsize: int
) -> float:
    """Bytes that a device sends; see `cheaper_exchange`."""
    others = (size - 1) / size
    if kind == "replicated":
        return others * num_tokens * 8 * width
    if kind == "gathered":
        return others * num_tokens * (width * (itemsize + 4) + 8 * per_token)
    return others * num_tokens / size * per_token * 2 * itemsize * width + (size - 1) * 4 * num_experts


def _group_size(axes: tuple[str, ...]) -> int:
    sizes = []
    for axis in axes:
        try:
            sizes.append(jax.lax.axis_size(axis))
        except NameError:
            raise ValueError(
                f"axes has {axis!r}, which isn't a manual mesh axis here; call this inside jax.shard_map over it."
            ) from None
    return math.prod(sizes)


def _check_split(num_experts: int, size: int, where: str) -> None:
    if num_experts < 1 or num_experts % size:
        legal = [count for count in range(1, num_experts + 1) if num_experts % count == 0]
        raise ValueError(
            f"{where}: num_experts = {num_experts} can't be split evenly over {size} devices; it can over "
            f"{', '.join(map(str, legal)) or 'none'}."
        )


def _check(
    x: Array,
    routing: Routing,
    valid: Array,
    stack: ExpertStack,
    num_experts: int,
    size: int,
    axes: tuple[str, ...],
) -> None:
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(f"run_experts_sharded: axes is {axes}; at least one mesh axis is needed, each of them once.")
    _check_split(num_experts, size, f"run_experts_sharded over {axes}")
    rows = (x.shape[0], routing.experts.shape[-1])
    if routing.experts.shape != rows or routing.weights.shape != rows or valid.shape != rows[:1]:
        raise ValueError(
            f"run_experts_sharded: routing.experts has shape {routing.experts.shape}, routing.weights "
            f"{routing.weights.shape} and valid {valid.shape}; {rows[0]} tokens need [{rows[0]}, k] twice and [{rows[0]}]."
        )
    width, own = x.shape[1], num_experts // size
    up, down = tuple(stack.gate_up.shape), tuple(stack.down.shape)
    if len(up) != 3 or len(down) != 3 or up[1] % 2 or down != (up[0], width, up[1] // 2) or up[2] != width:
        raise ValueError(
            f"run_experts_sharded: stack.gate_up has shape {up} and stack.down {down}; rows of width {width} "
            f"(routed_expert_hidden_size, or hidden_size) need [G, 2·F, {width}] and [G, {width}, F]."
        )
    if up[0] < own or up[0] % own:
        raise ValueError(
            f"run_experts_sharded: stack holds {up[0]} experts; num_experts = {num_experts} over {size} devices needs "
            f"{own} on each for every layer."
        )


def block_and_window(
    kind: Exchange, rows: tuple[int, ...], item: int, per_token: int, inner: int, size: int, budget: int = BUDGET
) -> tuple[int, int]:
    """Tokens of a block and rows of a window for a budget.

    Args:
        kind: how tokens meet their experts.
        rows: tokens of a device, and their width.
        item: bytes of an element.
        per_token: experts of a token.
        inner: F, the experts' inner width.
        size: devices that share the experts.
        budget: bytes for temporaries.
    """
    tokens, width = rows
    window_row = item * (4 * width + 3 * inner)
    # Rows that meet a device's experts, of each token of a block, if the routing is even.
    even = per_token if kind == "ragged" else per_token * (1 if kind == "gathered" else 1 / size)
    seen = size if kind == "gathered" else 1
    if kind == "ragged":
        fixed = per_token * (3 * width * item + 16)
    else:
        fixed = seen * (width * (2 * item + 8) + 32 * per_token)
    block = max(int(budget // (fixed + SLACK * even * window_row)), 1)
    blocks = -(-tokens // min(block, tokens))
    block = -(-tokens // blocks)
    most = block * per_token * (1 if kind == "replicated" else size)
    if blocks == 1 and kind != "ragged" and block * fixed + most * window_row <= budget:
        return block, most
    return block, min(most, max(math.ceil(SLACK * even * block), SMALLEST_WINDOW))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(
    forms: tuple[tuple[str, Form], ...],
    x: Float[Array, "M D"],
    weights: Float[Array, "M k"],
    gate_up: Weights,
    down: Weights,
    offset: Int[Array, ""],
    experts: Int[Array, "M k"],
    valid: Bool[Array, " M"],
    device: Int[Array, ""],
) -> Float[Array, "M D"]:
    """The form of the platform compiled for; partial sums, float32 or better, of the replicated one."""
    return _by_platform(forms, _forward, x, weights, gate_up, down, offset, experts, valid, device)


def _run_forward(forms: tuple[tuple[str, Form], ...], *arrays: Any) -> tuple[Array, tuple[Any, ...]]:
    return _by_platform(forms, _forward, *arrays), arrays


def _run_backward(forms: tuple[tuple[str, Form], ...], arrays: tuple[Any, ...], d_result: Array) -> tuple[Any, ...]:
    d_x, d_weights, d_arrays = _by_platform(forms, _backward, *arrays, d_result)
    return (d_x, d_weights, d_arrays.get("gate_up"), d_arrays.get("down"), None, None, None, None)


_run.defvjp(_run_forward, _run_backward)


def _by_platform(forms: tuple[tuple[str, Form], ...], run: Callable[..., Any], *arrays: Any) -> Any:
    options = {platform: partial(run, form) for platform, form in forms}
    if len(options) == 1:
        return options["default"](*arrays)
    return jax.lax.platform_dependent(*arrays, default=options.pop("default"), **options)


def _forward(
    form: Form,
    x: Float[Array, "M D"],
    weights: Float[Array, "M k"],
    gate_up: Weights,
    down: Weights,
    offset: Int[Array, ""],
    experts: Int[Array, "M k"],
    valid: Bool[Array, " M"],
    device: Int[Array, ""],
) -> Float[Array, "M D"]:
    stack, run = Stack(gate_up, down, offset), _FORMS[form.kind]
    blocks = _blocks(form, (x, weights, experts, valid))

    def step(carry: None, block: tuple[Array, ...]) -> tuple[None, Array]:
        return carry, run.forward(form, Block(*block), stack, device)

    return _joined(_scan(step, None, blocks)[1], x.shape[0])


def _backward(
    form: Form,
    x: Float[Array, "M D"],
    weights: Float[Array, "M k"],
    gate_up: Weights,
    down: Weights,
    offset: Int[Array, ""],
    experts: Int[Array, "M k"],
    valid: Bool[Array, " M"],
    device: Int[Array, ""],
    d_result: Float[Array, "M D"],
) -> tuple[Float[Array, "M D"], Float[Array, "M k"], dict[str, Array]]:
    stack, run = Stack(gate_up, down, offset), _FORMS[form.kind]
    arrays = trainable(stack)[0]
    zeros = {name: jnp.zeros(part.shape, at_least_float32(part)) for name, part in arrays.items()}
    zeros, _ = align(zeros, x)
    blocks = _blocks(form, (x, weights, experts, valid, d_result))

    def step(total: dict[str, Array], block: tuple[Array, ...]) -> tuple[dict[str, Array], tuple[Array, Array]]:
        *tokens, d_result = block
        d_x, d_weights, total = run.backward(form, Block(*tokens), d_result, stack, device, total)
        return total, (d_x.astype(x.dtype), d_weights.astype(weights.dtype))

    total, (d_x, d_weights) = _scan(step, zeros, blocks)
    d_arrays = {name: total[name].astype(part.dtype) for name, part in arrays.items()}
    return _joined(d_x, x.shape[0]), _joined(d_weights, x.shape[0]), d_arrays


def _blocks(form: Form, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """[M, ...] -> [blocks, block, ...]; what is added isn't valid."""
    count = -(-arrays[0].shape[0] // form.block)

    def cut(array: Array) -> Array:
        padded = jnp.pad(array, [(0, count * form.block - array.shape[0])] + [(0, 0)] * (array.ndim - 1))
        return padded.reshape(count, form.block, *array.shape[1:])

    return tuple(cut(array) for array in arrays)


def _joined(blocks: Array, tokens: int) -> Array:
    return blocks.reshape(-1, *blocks.shape[2:])[:tokens]


def _scan(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, blocks: tuple[Array, ...]) -> tuple[Any, Any]:
    if blocks[0].shape[0] > 1:
        return jax.lax.scan(step, carry, blocks)
    carry, result = step(carry, jax.tree.map(lambda array: array[0], blocks))
    return carry, jax.tree.map(lambda array: array[None], result)


class _Passes(NamedTuple):
    forward: Callable[[Form, Block, Stack, Int[Array, ""]], Array]
    backward: Callable[[Form, Block, Array, Stack, Int[Array, ""], Any], tuple[Array, Array, Any]]


_FORMS: dict[Exchange, _Passes] = {
    "replicated": _Passes(local_forward, local_backward),
    "gathered": _Passes(gathered_forward, gathered_backward),
    "ragged": _Passes(ragged_forward, ragged_backward),
}
