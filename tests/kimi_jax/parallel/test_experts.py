"""Experts spread over eight devices against the same experts on one; the ragged form compiled for 128 TPUs."""

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kimi_jax.modules.experts import ExpertStack, Routing, run_experts
from kimi_jax.modules.mlp import GatedActivation
from kimi_jax.parallel.experts import cheaper_exchange, run_experts_parallel, run_experts_sharded
from kimi_jax.planning.topology import topology_devices
from pallas_kernels.mxfp4 import Mxfp4

E, K, D, F = 16, 4, 64, 32
TOKENS = 8 * 24  # of all devices; if all go to one device, its rows fill three windows
LAYERS = 2
ACTIVATION = GatedActivation(4.0, 25.0)
AXES = ("expert", "tensor")


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all` as its documentation defines it; NaN everywhere if the two ends disagree."""
    me = jax.lax.axis_index(axis_name)
    places = [jax.lax.all_gather(array, axis_name)[:, me] for array in (input_offsets, send_sizes, output_offsets)]
    everything = jax.lax.all_gather(operand, axis_name)
    row = jnp.arange(output.shape[0])

    def receive(sender, carry):
        output, untouched, good = carry
        start, size, to = (place[sender] for place in places)
        inside = (row >= to) & (row < to + size)
        good &= (size == recv_sizes[sender]) & (start >= 0) & (start + size <= operand.shape[0])
        good &= (to >= 0) & (to + size <= output.shape[0]) & jnp.all(untouched | ~inside)
        source = everything[sender][jnp.clip(start + row - to, 0, operand.shape[0] - 1)]
        return jnp.where(inside[:, None], source, output), untouched & ~inside, good

    carry = (output, jnp.ones(row.shape, bool), jnp.array(True))
    output, _, good = jax.lax.fori_loop(0, recv_sizes.shape[0], receive, carry)
    return jnp.where(good, output, jnp.nan)


FORMS: dict[str, dict[str, Any]] = {
    "replicated": {"tokens": "replicated"},
    "gathered": {"exchange": "gathered"},
    "gathered_in_blocks": {"exchange": "gathered", "budget": 100_000},
    "ragged": {"exchange": "ragged", "ragged_all_to_all": emulated},
    "ragged_in_blocks": {"exchange": "ragged", "ragged_all_to_all": emulated, "budget": 100_000},
}


def mesh_of(expert: int, tensor: int) -> Mesh:
    return Mesh(
        np.asarray(jax.devices()[: expert * tensor]).reshape(expert, tensor), AXES, axis_types=(AxisType.Auto,) * 2
    )


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def routings() -> dict[str, jax.Array]:
    """Experts of each token; valid ones only count."""
    drawn = np.random.default_rng(1)

    def choose(*among: int) -> np.ndarray:
        return np.stack([drawn.permutation(among)[:K] for _ in range(TOKENS)])

    found = {
        "random": choose(*range(E)),
        "one_device": np.tile([4, 5, 5, 4], (TOKENS, 1)),  # experts of a token needn't differ
        "all_but_expert_7": choose(*(expert for expert in range(E) if expert != 7)),
        "expert_7_and_others": np.concatenate([np.full((TOKENS, 1), 7), choose(9, 12, 14, 15)[:, 1:]], axis=1),
    }
    return {name: jnp.asarray(experts, jnp.int32) for name, experts in found.items()}


ROUTINGS = routings()
VALID = jnp.asarray(np.random.default_rng(2).random(TOKENS) < 0.8)
# What padding holds must not matter: no number, no weight, no expert.
X = jnp.where(VALID[:, None], draw(TOKENS, D), jnp.nan)
WEIGHTS = jnp.where(VALID[:, None], jnp.abs(draw(TOKENS, K, seed=3)), jnp.nan)
GATE_UP, DOWN = 0.2 * draw(LAYERS * E, 2 * F, D, seed=4), 0.2 * draw(LAYERS * E, D, F, seed=5)


def padded(experts: jax.Array) -> jax.Array:
    return jnp.where(VALID[:, None], experts, jnp.array([-1, E, 0, 2**30]))


def alone(x, weights, gate_up, down, experts, *, layer=0, valid=VALID):
    stack = ExpertStack(gate_up, down, layer * E)
    return run_experts(x, Routing(experts, weights, jnp.zeros((TOKENS, E))), valid, stack, E, ACTIVATION)


def by_owner(weights: Any, devices: int) -> Any:
    """[layers · E, ...] with each device's experts of all layers next to each other."""

    def move(part: jax.Array) -> jax.Array:
        rest = part.shape[1:]
        return part.reshape(-1, devices, E // devices, *rest).swapaxes(0, 1).reshape(-1, *rest)

    return jax.tree.map(move, weights)


def spread(mesh: Mesh, run: Callable[..., Any] = run_experts_sharded, *, layer=0, check_vma=False, **options):
    """The same as `alone` with experts split over the mesh."""
    if run is run_experts_parallel:
        tokens = PartitionSpec(options.get("split_axes", AXES[:1]))
    else:
        tokens = PartitionSpec() if options.get("tokens") == "replicated" else PartitionSpec(AXES)
    own = E // mesh.size

    def local(x, weights, gate_up, down, experts, valid):
        stack = ExpertStack(gate_up, down, jnp.int32(layer * own))
        routing = Routing(experts, weights, jnp.zeros((x.shape[0], E)))
        return run(x, routing, valid, stack, E, ACTIVATION, **options)

    specs = (tokens, tokens, PartitionSpec(AXES), PartitionSpec(AXES), tokens, tokens)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=check_vma)

    def call(x, weights, gate_up, down, experts, *, valid=VALID):
        return sharded(x, weights, by_owner(gate_up, mesh.size), by_owner(down, mesh.size), experts, valid)

    return call


def results(call: Callable[..., jax.Array], by: tuple[int, ...] = (0, 1, 2, 3)) -> Callable[..., Any]:
    """Values, and gradients of a sum that sees valid rows only, compiled."""

    def loss(*arrays: Any) -> tuple[jax.Array, jax.Array]:
        result = call(*arrays)
        return jnp.sum(jnp.sin(jnp.where(VALID[:, None], result, 0)) * jnp.arange(D)), result

    def both(*arrays: Any) -> list[jax.Array]:
        (_, result), gradients = jax.value_and_grad(loss, by, has_aux=True)(*arrays)
        return [result, *jax.tree.leaves(gradients)]

    return jax.jit(both)


@cache
def expected(routing: str, layer: int) -> list[np.ndarray]:
    experts = padded(ROUTINGS[routing])
    return [np.asarray(array) for array in _alone(layer)(X, WEIGHTS, GATE_UP, DOWN, experts)]


@cache
def _alone(layer: int) -> Callable[..., Any]:
    return results(partial(alone, layer=layer))


def assert_close(found: list[jax.Array], wanted: list[np.ndarray], bound: float = 1e-5) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert np.abs(np.asarray(one) - other).max() <= bound * np.abs(other).max()


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_those_of_one_device(form: str) -> None:
    run = results(spread(mesh_of(4, 2), layer=1, **FORMS[form]))
    for routing, experts in ROUTINGS.items():
        found = run(X, WEIGHTS, GATE_UP, DOWN, padded(experts))
        assert_close(found, expected(routing, 1))
        assert np.all(np.asarray(found[0])[~VALID] == 0)
        assert all(np.isfinite(np.asarray(array)).all() for array in found)


@pytest.mark.parametrize(
    ("form", "expert", "tensor"),
    [("replicated", 2, 2), ("gathered", 8, 1), ("gathered", 1, 1), ("ragged", 1, 8), ("ragged", 2, 1)],
)
def test_any_split_of_the_experts(form: str, expert: int, tensor: int) -> None:
    run = jax.jit(spread(mesh_of(expert, tensor), **FORMS[form]))
    found = run(X, WEIGHTS, GATE_UP, DOWN, padded(ROUTINGS["random"]))
    assert_close([found], expected("random", 0)[:1])


def test_one_expert_on_a_device() -> None:
    """16 experts can't have a device each here, but 8 can: the others' weights are never asked for."""
    experts = ROUTINGS["random"] % 8
    stack = GATE_UP[:8], DOWN[:8]
    wanted = jax.jit(alone)(X, WEIGHTS, GATE_UP, DOWN, padded(experts))

    def local(x, weights, gate_up, down, experts, valid):
        routing = Routing(experts, weights, jnp.zeros((x.shape[0], 8)))
        return run_experts_sharded(x, routing, valid, ExpertStack(gate_up, down, 0), 8, ACTIVATION)

    split = PartitionSpec(AXES)
    run = jax.shard_map(local, mesh=mesh_of(4, 2), in_specs=(split,) * 6, out_specs=split)
    assert_close([jax.jit(run)(X, WEIGHTS, *stack, padded(experts), VALID)], [np.asarray(wanted)])


PARALLEL: dict[str, dict[str, Any]] = {
    "chosen": {},
    "ragged": {"exchange": "ragged", "ragged_all_to_all": emulated},
    "same_everywhere": {"split_axes": (), "replicated_axes": AXES},
    "same_everywhere_ragged": {
        "split_axes": (),
        "replicated_axes": AXES,
        "exchange": "ragged",
        "ragged_all_to_all": emulated,
    },
    "psum": {"split_axes": (), "replicated_axes": AXES, "exchange": "replicated"},
    "nothing_replicated": {"split_axes": AXES, "replicated_axes": ()},
}


@pytest.mark.parametrize(
    ("form", "check_vma"), [*((form, False) for form in PARALLEL), ("chosen", True), ("same_everywhere", True)]
)
def test_tokens_that_some_axes_share(form: str, check_vma: bool) -> None:
    """189 tokens aren't a multiple of any number of devices, nor are a fourth of 188 of two."""
    options = PARALLEL[form]
    count = {0: 189, 1: 188, 2: TOKENS}[len(options.get("split_axes", AXES[:1]))]
    valid = VALID & (jnp.arange(TOKENS) < count)
    call = spread(mesh_of(4, 2), run_experts_parallel, check_vma=check_vma, **options)

    def cut(x, weights, gate_up, down, experts):
        found = call(x[:count], weights[:count], gate_up, down, experts[:count], valid=valid[:count])
        return jnp.pad(found, ((0, TOKENS - count), (0, 0)))

    arrays = (X, WEIGHTS, GATE_UP, DOWN, padded(ROUTINGS["random"]))
    assert_close(results(cut, (0,))(*arrays), [np.asarray(array) for array in _partly(count)(*arrays)])


@cache
def _partly(count: int) -> Callable[..., Any]:
    return results(partial(alone, valid=VALID & (jnp.arange(TOKENS) < count)), (0,))


def test_packed_experts() -> None:
    packed = jax.jit(lambda *arrays: [Mxfp4.quantize(array[:E]) for array in arrays])(GATE_UP, DOWN)
    experts = padded(ROUTINGS["random"])
    wanted = [np.asarray(array) for array in results(alone, (0,))(X, WEIGHTS, *packed, experts)]
    found = results(spread(mesh_of(4, 2), **FORMS["ragged"]), (0,))(X, WEIGHTS, *packed, experts)
    assert_close(found, wanted)


def test_bfloat16_sums_are_rounded_once() -> None:
    """Σ_e w_e · E_e(x) of bfloat16 results E_e(x), in float64, is at most half a unit of bfloat16 away."""
    x, gate_up, down = (array.astype(jnp.bfloat16) for array in (X, GATE_UP[:E], DOWN[:E]))
    experts = padded(ROUTINGS["random"])
    single = jax.jit(alone)
    parts = [
        single(x, jnp.where(jnp.arange(K) == slot, jnp.ones(()), jnp.zeros((TOKENS, K))), gate_up, down, experts)
        for slot in range(K)
    ]
    weights = np.nan_to_num(np.asarray(WEIGHTS, np.float64))
    exact = sum(np.asarray(part, np.float64) * weights[:, slot, None] for slot, part in enumerate(parts))
    unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-20))) - 7)
    for form in ("replicated", "ragged"):
        found = jax.jit(spread(mesh_of(4, 2), **FORMS[form]))(x, WEIGHTS, gate_up, down, experts)
        assert found.dtype == jnp.bfloat16
        # A hundredth more for the float32 sum before the rounding, and for products of other shapes.
        assert np.mean(np.abs(np.asarray(found, np.float64) - exact) <= 0.51 * unit) > 0.99
        assert np.max(np.abs(np.asarray(found, np.float64) - exact) / unit) <= 1.01


@pytest.mark.parametrize("form", ["replicated", "ragged"])
def test_a_token_does_not_see_the_others(form: str) -> None:
    """Bits of one compiled shape: with even routing one window is enough, with all rows on one device several."""
    run = jax.jit(spread(mesh_of(4, 2), **FORMS[form]))
    mine = jnp.arange(TOKENS)[:, None] % 8 == 0
    for others in ("one_device", "expert_7_and_others"):
        experts = jnp.where(mine, ROUTINGS["random"], ROUTINGS[others])
        found = run(jnp.where(mine, X, 1 - X), WEIGHTS, GATE_UP, DOWN, experts)
        wanted = run(X, WEIGHTS, GATE_UP, DOWN, ROUTINGS["random"])
        mask = np.asarray(mine[:, 0] & VALID)
        np.testing.assert_array_equal(np.asarray(found)[mask], np.asarray(wanted)[mask])


def shapes_of(text: str, operation: str) -> Iterator[int]:
    """Bytes of the results of an operation in the text of a program."""
    item = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1, "u8": 1}
    for line in re.findall(rf"= (.*?) {operation}(?:-start)?\(", text):
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", line):
            yield item[dtype] * int(np.prod([int(size) for size in sizes.split(",") if size], dtype=np.int64))


@pytest.mark.parametrize("form", ["gathered", "replicated"])
def test_no_expert_is_gathered(form: str) -> None:
    """All that is gathered, in the backward pass too, is smaller than one expert, and sums are in float32."""
    tokens, inner = 16, 4096
    mesh = mesh_of(4, 2)
    split = NamedSharding(mesh, PartitionSpec(AXES))
    same = split if form == "gathered" else NamedSharding(mesh, PartitionSpec())

    def local(x, weights, gate_up, down, experts, valid):
        routing = Routing(experts, weights, jnp.zeros((x.shape[0], E)))
        kind = "replicated" if form == "replicated" else "split"
        return run_experts_sharded(x, routing, valid, ExpertStack(gate_up, down, 0), E, ACTIVATION, tokens=kind)

    specs = (same.spec, same.spec, split.spec, split.spec, same.spec, same.spec)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=same.spec, check_vma=False)
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype, sharding in (
            ((tokens, D), jnp.bfloat16, same),
            ((tokens, K), jnp.float32, same),
            ((E, 2 * inner, D), jnp.bfloat16, split),
            ((E, D, inner), jnp.bfloat16, split),
            ((tokens, K), jnp.int32, same),
            ((tokens,), jnp.bool_, same),
        )
    ]
    gradient = jax.grad(lambda *arrays: jnp.sum(run(*arrays).astype(jnp.float32)), (0, 1))
    one_expert = 3 * D * inner * 2
    for program in (run, gradient):
        text = jax.jit(program).lower(*arrays).compile().as_text()
        assert text is not None
        gathered = sum(shapes_of(text, "all-gather"))
        assert gathered < one_expert / 10
        assert (gathered > 0) == (form == "gathered")
        summed = re.findall(r"= (.*?) (?:all-reduce|reduce-scatter)(?:-start)?\(", text)
        assert summed
        assert not any("bf16" in line for line in summed)


def test_the_budget_bounds_temporaries() -> None:
    """All rows may go to one device, and nothing grows with what that device would receive."""
    mesh, tokens, width, inner, budget = mesh_of(4, 2), 8 * 2048, 256, 128, 2**23
    split = NamedSharding(mesh, PartitionSpec(AXES))

    def local(x, experts, weights, valid, gate_up, down):
        routing = Routing(experts, weights, jnp.zeros((x.shape[0], E)))
        stack = ExpertStack(gate_up, down, 0)
        return run_experts_sharded(x, routing, valid, stack, E, ACTIVATION, budget=budget)

    run = jax.shard_map(local, mesh=mesh, in_specs=(split.spec,) * 6, out_specs=split.spec, check_vma=False)
    shapes = ((tokens, width), (tokens, K), (tokens, K), (tokens,), (E, 2 * inner, width), (E, width, inner))
    dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.bool_, jnp.float32, jnp.float32)
    arrays = [jax.ShapeDtypeStruct(s, d, sharding=split) for s, d in zip(shapes, dtypes, strict=True)]
    analysis = jax.jit(run).lower(*arrays).compile().memory_analysis()
    assert analysis is not None
    worst = tokens * K * (width + 3 * inner) * 4
    assert worst > 16 * budget
    assert analysis.temp_size_in_bytes <= 2 * budget


# What Kimi K3 and K3.1 have.
K3_EXPERTS, K3_PER_TOKEN, K3_WIDTH, K3_INNER = 896, 16, 3584, 3072
CHIPS = 128


def test_k3_layer_compiles_for_128_tpus(tmp_path: Path) -> None:
    """Seven packed experts a device, 1024 tokens a device: rows are exchanged, no expert is, and memory is bounded."""
    mesh = Mesh(np.asarray(topology_devices("v5p:4x4x8")).reshape(32, 4), AXES, axis_types=(AxisType.Auto,) * 2)
    split, tokens, budget = NamedSharding(mesh, PartitionSpec(AXES)), CHIPS * 1024, 2**28

    def local(x, experts, weights, valid, gate_up, down):
        routing = Routing(experts, weights, jnp.zeros((x.shape[0], 1)))
        stack = ExpertStack(gate_up, down, 0)
        return run_experts_sharded(x, routing, valid, stack, K3_EXPERTS, ACTIVATION, budget=budget)

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=split)

    def packed(rows: int, width: int) -> Mxfp4:
        return Mxfp4(
            array((K3_EXPERTS, rows, width // 2), jnp.uint8), array((K3_EXPERTS, rows, width // 32), jnp.uint8)
        )

    arrays = (
        array((tokens, K3_WIDTH), jnp.bfloat16),
        array((tokens, K3_PER_TOKEN), jnp.int32),
        array((tokens, K3_PER_TOKEN), jnp.float32),
        array((tokens,), jnp.bool_),
        packed(2 * K3_INNER, K3_WIDTH),
        packed(K3_WIDTH, K3_INNER),
    )
    run = jax.shard_map(local, mesh=mesh, in_specs=(split.spec,) * 6, out_specs=split.spec, check_vma=False)
    with jax.set_mesh(mesh):
        lowered = jax.jit(run).lower(*arrays)
        # Some pairs of jaxlib and libtpu can't read the compiled program back; the compiler itself can write it.
        compiled = lowered.compile({"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True})
    analysis = compiled.memory_analysis()
    assert analysis is not None
    print(
        f"temporaries {analysis.temp_size_in_bytes / 2**20:.1f} MiB, "
        f"arguments {analysis.argument_size_in_bytes / 2**20:.1f} MiB"
    )
    assert analysis.temp_size_in_bytes <= budget
    (file,) = tmp_path.glob("*after_optimizations.txt")
    text = file.read_text()
    assert len(list(shapes_of(text, "ragged-all-to-all"))) >= 2
    one_expert = 3 * K3_WIDTH * K3_INNER * 17 // 32
    # Counts of rows: 128 devices, 896 experts.
    counts = 4 * CHIPS * K3_EXPERTS
    for operation in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
        assert sum(shapes_of(text, operation)) <= counts < one_expert


def k3_choice(num_tokens: int, devices: int, **options: Any):
    """On TPU v5p: 600 GB/s of links and 2765 GB/s of memory a chip."""
    return cheaper_exchange(
        num_tokens,
        K3_WIDTH,
        K3_PER_TOKEN,
        K3_EXPERTS,
        devices,
        link_bandwidth=600e9,
        memory_bandwidth=2765e9,
        collective_seconds=10e-6,
        message_seconds=0.2e-6,
        **options,
    )


def test_the_cheaper_exchange_moves_fewer_bytes() -> None:
    """By hand: over 128 devices a token's row goes to 127 of them, or 16 times out and back."""
    many = k3_choice(128 * 1024, 128)
    assert many.name == "ragged"
    assert "ragged takes" in many.reason
    others, tokens = 127 / 128, 128 * 1024
    links = others * 1024 * 16 * 2 * 2 * 3584 + 127 * 4 * 896
    memory = 1024 * 16 * 12 * 2 * 3584
    np.testing.assert_allclose(many.seconds["ragged"], links / 600e9 + memory / 2765e9 + 30e-6 + 381 * 0.2e-6)
    links, memory = others * tokens * (3584 * 6 + 128), tokens * 3584 * 12
    np.testing.assert_allclose(many.seconds["gathered"], links / 600e9 + memory / 2765e9 + 40e-6 + 508 * 0.2e-6)

    assert k3_choice(1, 128, replicated=True).name == "replicated"
    assert k3_choice(2**17, 128, replicated=True).name == "ragged"
    # Two devices: one row there and its sum back instead of some eight there and eight back.
    assert k3_choice(2**16, 2).name == "gathered"


def call_with(
    mesh: Mesh,
    run: Callable[..., Any] = run_experts_sharded,
    *,
    num_experts: int = E,
    width: int = D,
    chosen: int = K,
    **options,
):
    split = PartitionSpec(AXES)

    def local(x, weights, gate_up, down, experts, valid):
        routing = Routing(experts, weights, jnp.zeros((x.shape[0], E)))
        return run(x, routing, valid, ExpertStack(gate_up, down, 0), num_experts, ACTIVATION, **options)

    call = jax.shard_map(local, mesh=mesh, in_specs=(split,) * 6, out_specs=split, check_vma=False)
    jax.eval_shape(call, X[:, :width], WEIGHTS[:, :chosen], GATE_UP, DOWN, ROUTINGS["random"], VALID)


def test_what_does_not_fit_is_refused() -> None:
    mesh = mesh_of(4, 2)
    with pytest.raises(ValueError, match=r"num_experts = 12 can't .* over 8 devices; it can over 1, 2, 3, 4, 6, 12"):
        call_with(mesh, num_experts=12)
    with pytest.raises(ValueError, match=r"stack holds 4 experts; num_experts = 64 over 8 devices needs 8"):
        call_with(mesh, num_experts=64)
    with pytest.raises(ValueError, match=r"rows of width 32 \(routed_expert_hidden_size"):
        call_with(mesh, width=32)
    with pytest.raises(ValueError, match=r"routing.weights \(24, 3\) .* 24 tokens need \[24, k\] twice"):
        call_with(mesh, chosen=3)
    with pytest.raises(ValueError, match=r"exchange is 'ragged' and tokens 'replicated'"):
        call_with(mesh, tokens="replicated", exchange="ragged")
    with pytest.raises(ValueError, match=r"budget is 0; it must be a positive"):
        call_with(mesh, budget=0)
    with pytest.raises(ValueError, match=r"'context', which isn't a manual mesh axis"):
        call_with(mesh, axes=("context",))
    with pytest.raises(ValueError, match=r"axes is \('expert', 'expert'\); at least one"):
        call_with(mesh, axes=("expert", "expert"))
    with pytest.raises(ValueError, match=r"'replicated' and split_axes \('expert',\) have 4 devices"):
        call_with(mesh, run_experts_parallel, exchange="replicated")
    with pytest.raises(ValueError, match="num_experts = 10 can't be split evenly over 4 devices"):
        cheaper_exchange(1, 1, 1, 10, 4, link_bandwidth=1.0, memory_bandwidth=1.0)
    with pytest.raises(ValueError, match="link_bandwidth is 0"):
        cheaper_exchange(1, 1, 1, 8, 4, link_bandwidth=0.0, memory_bandwidth=1.0)
