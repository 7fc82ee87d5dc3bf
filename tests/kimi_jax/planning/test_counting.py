"""Counts of small programs whose products and messages are known by hand, and of texts with known contents."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from kimi_jax.planning import collectives_of, counts_of
from kimi_jax.planning.counting import Collective
from kimi_jax.planning.groups import parse_groups, span_of
from kimi_jax.planning.hlo import parse_program, parse_shape

STEPS = 5
SIZES = {"data": 1, "context": 4, "expert": 1, "tensor": 2}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 4)


def text_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text is not None
    return text


def by_kind(collectives: tuple[Collective, ...]) -> dict[str, Collective]:
    found = {one.kind: one for one in collectives}
    assert len(found) == len(collectives)
    return found


def test_messages_of_a_scan_are_counted_once_a_step(mesh: Mesh) -> None:
    def body(x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            carry = jax.lax.psum(carry, "tensor")
            gathered = jax.lax.all_gather(carry, "context", tiled=True)
            scattered = jax.lax.psum_scatter(jnp.sin(gathered), "context", tiled=True)
            return jax.lax.ppermute(scattered, "context", [(i, (i + 1) % 4) for i in range(4)]), None

        return jax.lax.scan(step, x, None, length=STEPS)[0]

    spec = PartitionSpec("context", None)
    shaped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = jax.jit(shaped).lower(jax.ShapeDtypeStruct((64, 32), jnp.float32)).compile()
    counts = counts_of(compiled, mesh)
    assert counts.exact
    found = by_kind(counts.collectives)
    local = 16 * 32 * 4
    assert {kind: (one.axes, one.group_size, one.bytes, one.executions) for kind, one in found.items()} == {
        "all-reduce": (("tensor",), 2, local, STEPS),
        "all-gather": (("context",), 4, 4 * local, STEPS),
        "reduce-scatter": (("context",), 4, 4 * local, STEPS),
        "collective-permute": (("context",), 4, local, STEPS),
    }
    assert collectives_of(compiled, SIZES) == counts.collectives
    assert found["all-reduce"].total_bytes == STEPS * local
    assert found["all-reduce"].source.endswith("psum")


def test_an_exchange_over_two_axes_names_both(mesh: Mesh) -> None:
    def body(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, ("context", "tensor"), split_axis=1, concat_axis=0, tiled=True)

    shaped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=PartitionSpec(("context", "tensor"), None),
        out_specs=PartitionSpec(None, ("context", "tensor")),
    )
    compiled = jax.jit(shaped).lower(jax.ShapeDtypeStruct((16, 64), jnp.float32)).compile()
    exchange = by_kind(collectives_of(compiled, mesh))["all-to-all"]
    assert (exchange.axes, exchange.group_size, exchange.bytes) == (("context", "tensor"), 8, 2 * 64 * 4)


def test_a_program_without_messages_has_none(mesh: Mesh) -> None:
    assert collectives_of(text_of(lambda x: jnp.tanh(x @ x), (8, 8)), mesh) == ()


def test_products_of_nested_scans_are_multiplied_out() -> None:
    def inner(carry: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(carry @ weight), None

    def outer(carry: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
        return jnp.sin(jax.lax.scan(inner, carry, weights)[0] @ weights[0]), None

    def program(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(outer, x, weights)[0]

    counts = counts_of(text_of(program, (24, 32), (3, 7, 32, 32)))
    assert counts.exact
    assert counts.flops == {"f32": 3 * (7 + 1) * 2 * 24 * 32 * 32}


def test_products_of_any_form_are_two_operations_a_multiplication() -> None:
    def program(a: jax.Array, b: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.einsum("bhtk,bhsk->bhts", a, b), jnp.einsum("bhtk,kd->bhtd", a, c)

    counts = counts_of(text_of(program, (2, 3, 16, 8), (2, 3, 20, 8), (8, 40)))
    assert counts.total_flops == 2 * (2 * 3) * 16 * 20 * 8 + 2 * (2 * 3 * 16) * 8 * 40


def test_a_loop_over_indices_is_counted_from_its_first_to_its_last() -> None:
    counts = counts_of(text_of(lambda x: jax.lax.fori_loop(3, 14, lambda _, y: jnp.tanh(y @ y), x), (16, 16)))
    assert counts.exact
    assert counts.total_flops == 11 * 2 * 16**3


def test_a_loop_of_unknown_length_is_reported_and_not_taken_for_one() -> None:
    def program(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: y[0, 0] < 100.0, lambda y: y @ y, x)

    counts = counts_of(text_of(program, (16, 16)))
    assert not counts.exact
    (loop,) = counts.unknown_loops
    assert loop.flops == 2 * 16**3
    assert loop.source.endswith("while")
    assert loop.hbm_bytes >= 2 * 16 * 16 * 4


def test_a_length_that_depends_on_data_may_be_assumed() -> None:
    def inner(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: y[0, 0] < 100.0, lambda y: y @ y, x)

    text = text_of(lambda x: jax.lax.scan(lambda y, _: (jax.jit(inner)(y), None), x, None, length=STEPS)[0], (16, 16))
    counts = counts_of(text, assumed_trips={"jit(inner)": 7, "jit(": 9, "elsewhere": 3})
    assert counts.total_flops == STEPS * 7 * 2 * 16**3
    assert [loop.assumed_trips for loop in counts.unknown_loops] == [7]
    assert (counts.exact, counts.lower_bound) == (False, False)
    assert counts_of(text).lower_bound
    with pytest.raises(ValueError, match="must be a part of a name and have 0 trips or more"):
        counts_of(text, assumed_trips={"inner": -1})


def test_messages_in_a_loop_of_unknown_length_are_marked(mesh: Mesh) -> None:
    def body(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: y[0] < 1e3, lambda y: jax.lax.psum(y, "tensor"), x)

    spec = PartitionSpec()
    shaped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = jax.jit(shaped).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile()
    (one,) = collectives_of(compiled, mesh)
    assert not one.exact


def test_memory_traffic_of_a_scan_reads_each_slice_once() -> None:
    # 6 slices of 256 x 256 float32 are read; the carry of 8 x 256 is read and written a few times a step.
    def step(carry: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(carry @ weight), None

    counts = counts_of(text_of(lambda x, w: jax.lax.scan(step, x, w)[0], (8, 256), (6, 256, 256)))
    weights, carry = 6 * 256 * 256 * 4, 8 * 256 * 4
    assert weights <= counts.hbm_bytes <= 3 * weights + 6 * 20 * carry


def test_without_loops_memory_traffic_is_what_xla_itself_counts() -> None:
    def program(x: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jax.nn.silu(x @ a) @ b
        return y / jnp.sqrt((y * y).mean(-1, keepdims=True)), jax.nn.softmax(y @ x.T)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 128), (128, 512), (512, 128))]
    compiled = jax.jit(program).lower(*shapes).compile()
    analysis = compiled.cost_analysis()
    assert analysis is not None
    assert counts_of(compiled).hbm_bytes == pytest.approx(analysis["bytes accessed"], rel=1e-3)


# A layer's weights cut out of a stack through a fused copy of it, as TPUs do it, and an update in place of one row of a
# large array; the copies exist only where they are cut.
FUSED = """HloModule fused

%stack (p: bf16[60,8,128]) -> bf16[60,8,128] {
  %p = bf16[60,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %c = bf16[60,8,128]{2,1,0:T(16,128)(2,1)} copy(%p)
}

%cut (p: bf16[60,8,128], i: s32[]) -> bf16[8,128] {
  %p = bf16[60,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)S(6)} parameter(1)
  %whole = bf16[60,8,128]{2,1,0:T(16,128)(2,1)} fusion(%p), kind=kLoop, calls=%stack
  %z = s32[] constant(0)
  %s = bf16[1,8,128]{2,1,0} dynamic-slice(%whole, %i, %z, %z), dynamic_slice_sizes={1,8,128}
  ROOT %b = bf16[8,128]{1,0} bitcast(%s)
}

%put (p: bf16[60,8,128], i: s32[], u: bf16[8,128]) -> bf16[60,8,128] {
  %p = bf16[60,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)S(6)} parameter(1)
  %u = bf16[8,128]{1,0} parameter(2)
  %whole = bf16[60,8,128]{2,1,0:T(16,128)(2,1)} fusion(%p), kind=kLoop, calls=%stack
  %row = bf16[1,8,128]{2,1,0} bitcast(%u)
  %z = s32[] constant(0)
  %d = bf16[60,8,128]{2,1,0:T(16,128)(2,1)} dynamic-update-slice(%whole, %row, %i, %z, %z)
  ROOT %r = bf16[60,8,128]{2,1,0:T(8,128)(2,1)} fusion(%d), kind=kLoop, calls=%stack
}

ENTRY %main (p: bf16[60,8,128], i: s32[]) -> bf16[60,8,128] {
  %p = bf16[60,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)S(6)} parameter(1)
  %s = bf16[8,128]{1,0} fusion(%p, %i), kind=kLoop, calls=%cut
  ROOT %d = bf16[60,8,128]{2,1,0:T(8,128)(2,1)} fusion(%p, %i, %s), kind=kLoop, calls=%put
}
"""


def test_fused_slices_and_updates_cost_what_they_touch() -> None:
    layer = 8 * 128 * 2
    # Cut: read and written; put: the row is read and written.
    assert counts_of(FUSED).hbm_bytes == 4 * layer
    # A sum needs all of the stack.
    summed = FUSED.replace(
        "ROOT %c = bf16[60,8,128]{2,1,0:T(16,128)(2,1)} copy(%p)", "ROOT %c = bf16[60,8,128] add(%p, %p)"
    )
    assert counts_of(summed).hbm_bytes == (60 + 1 + 60 + 1 + 60) * layer


# A batch of 16 products [24, 32] x [32, 40] as TPUs write it: the batch is a spatial dimension whose kernel places each
# meet one input; a plain product; and a causal filter of width 4 over 64 places, padded with 3, so all 64 x 4 pairs but
# 0 + 1 + 2 + 3 = 6 meet one.
CONVOLUTIONS = """HloModule convolutions, num_partitions=4

ENTRY %main (a: bf16[16,24,32], b: bf16[16,32,40], c: f32[24,32], d: f32[32,40], e: f32[2,64,1], f: f32[4,1,8]) -> bf16[1] {
  %a = bf16[16,24,32]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %b = bf16[16,32,40]{2,1,0:T(8,128)(2,1)} parameter(1)
  %c = f32[24,32]{1,0:T(8,128)} parameter(2)
  %d = f32[32,40]{1,0:T(8,128)} parameter(3)
  %e = f32[2,64,1]{1,0,2} parameter(4)
  %f = f32[4,1,8]{1,0,2} parameter(5)
  %g = bf16[16,24,40]{2,1,0:T(8,128)(2,1)} convolution(%a, %b), window={size=16 stride=15 lhs_dilate=16}, dim_labels=0bf_0io->0bf
  %h = f32[24,40]{1,0:T(8,128)} convolution(%c, %d), dim_labels=bf_io->bf, operand_precision={highest,highest}
  ROOT %i = f32[2,64,8]{1,0,2} convolution(%e, %f), window={size=4 pad=3_0}, dim_labels=b0f_0io->b0f
}
"""


def test_products_written_as_convolutions() -> None:
    counts = counts_of(CONVOLUTIONS)
    assert counts.flops == {
        "bf16": 16 * 2 * 24 * 32 * 40,
        "f32": 2 * 2 * 8 * (64 * 4 - 6),
        "f32 highest": 2 * 24 * 32 * 40,
    }
    # What lies in another memory than the main one, S(1), costs no traffic.
    large = 16 * 32 * 40 * 2 + 16 * 24 * 40 * 2
    assert counts.hbm_bytes == large + 4 * (24 * 32 + 32 * 40 + 24 * 40) + 4 * (2 * 64 + 4 * 8 + 2 * 64 * 8)


# What a TPU's compiler makes of messages: a start and an end, a message in a computation of its own that another core
# runs, a reduce-scatter as an all-reduce of which a slice is kept, one message fused with other work in two parts.
MESSAGES = """HloModule messages, num_partitions=8

%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[]{:T(256)} parameter(0)
  %y = bf16[]{:T(256)} parameter(1)
  ROOT %s = bf16[]{:T(256)} add(%x, %y)
}

%offloaded (p: bf16[64,128], t: token[]) -> bf16[64,128] {
  %p = bf16[64,128]{1,0} parameter(0)
  %t = token[] parameter(1)
  ROOT %all-reduce.1 = bf16[64,128]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}, execution_thread="sparsecore"

%all-reduce-scatter (p: bf16[64,128]) -> bf16[16,128] {
  %p = bf16[64,128]{1,0} parameter(0)
  %all-reduce.2 = bf16[64,128]{1,0} all-reduce(%p), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  %z = u32[] constant(0)
  ROOT %r = bf16[16,128]{1,0} dynamic-slice(%all-reduce.2, %z, %z), dynamic_slice_sizes={16,128}
}

%part.1 (p: bf16[64,128]) -> bf16[512,128] {
  %p = bf16[64,128]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[512,128]{1,0} all-gather(%p), channel_id=1, replica_groups={}, dimensions={0}, \
frontend_attributes={async_collective_name="all-gather-start.7"}
}

%part.2 (p: bf16[64,128]) -> bf16[512,128] {
  %p = bf16[64,128]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[512,128]{1,0} all-gather(%p), channel_id=1, replica_groups={}, dimensions={0}, \
frontend_attributes={async_collective_name="all-gather-start.7"}
}

ENTRY %main (p: bf16[64,128], t: token[]) -> bf16[16,128] {
  %p = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %t = token[] parameter(1)
  %call-start = ((bf16[64,128]{1,0}, token[]), bf16[64,128]{1,0}) call-start(%p, %t), \
async_execution_thread="sparsecore", to_apply=%offloaded
  %call-done = bf16[64,128]{1,0} call-done(%call-start)
  %collective-permute-start = (bf16[64,128]{1,0}, bf16[64,128]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), \
channel_id=1, source_target_pairs={{0,2},{2,4},{4,6},{1,3},{3,5},{5,7}}
  %collective-permute-done = bf16[64,128]{1,0} collective-permute-done(%collective-permute-start)
  %f.1 = bf16[512,128]{1,0} fusion(%p), kind=kCustom, calls=%part.1
  %f.2 = bf16[512,128]{1,0} fusion(%p), kind=kCustom, calls=%part.2
  %e = bf16[64,128]{1,0} ragged-all-to-all(%p, %p, %p, %p, %p, %p), replica_groups=mesh['a'=4,'b'=2] {'a'}
  ROOT %r = bf16[16,128]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter
}
"""


def test_messages_as_tpus_write_them() -> None:
    found = by_kind(collectives_of(MESSAGES, SIZES))
    local = 64 * 128 * 2
    assert {
        kind: (one.axes, one.bytes, one.executions, one.asynchronous, one.group_size) for kind, one in found.items()
    } == {
        "all-reduce": (("tensor",), local, 1, True, 2),
        "collective-permute": (("context",), local, 1, True, 4),
        "all-gather": (("context", "tensor"), 8 * local, 1, False, 8),
        "ragged-all-to-all": (("context",), local, 1, False, 4),
        "reduce-scatter": (("context",), local, 1, False, 4),
    }


KERNELS = """HloModule kernels

ENTRY %main (p: f32[128,128]) -> f32[128,128] {
  %p = f32[128,128]{1,0} parameter(0)
  %b = f32[128,128]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %k = f32[128,128]{1,0} custom-call(%p), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"TUz()v%x",\
"cost_estimate":{"flops":"12345","transcendentals":"0","bytes_accessed":"777"}}}
  ROOT %l = f32[128,128]{1,0} custom-call(%k), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"TUz"}}
}
"""


def test_kernels_count_what_they_declare_and_are_named_when_they_declare_nothing() -> None:
    counts = counts_of(KERNELS)
    assert counts.declared_flops == 12345
    assert counts.opaque_calls == {"tpu_custom_call": 1}
    assert counts.hbm_bytes == 777 + 2 * 128 * 128 * 4


# Loops as a TPU's compiler leaves them: the bound is carried along unchanged, the counter is added to in a fusion, the
# inner loop's bound comes from the outer one; the last counts down.
LOOPS = """HloModule loops

%next (c: s32[]) -> s32[] {
  %c = s32[]{:T(128)} parameter(0)
  %one = s32[]{:T(128)} constant(2)
  ROOT %sum = s32[]{:T(128)} add(%c, %one)
}

%inner_body (p: (s32[], f32[8,8], s32[])) -> (s32[], f32[8,8], s32[]) {
  %p = (s32[]{:T(128)}, f32[8,8]{1,0}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%p), index=1
  %n = s32[]{:T(128)} get-tuple-element(%p), index=2
  %j = s32[]{:T(128)} fusion(%i), kind=kLoop, calls=%next
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[]{:T(128)}, f32[8,8]{1,0}, s32[]{:T(128)}) tuple(%j, %y, %n)
}

%inner_condition (p: (s32[], f32[8,8], s32[])) -> pred[] {
  %p = (s32[]{:T(128)}, f32[8,8]{1,0}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %n = s32[]{:T(128)} get-tuple-element(%p), index=2
  ROOT %c = pred[]{:T(512)} compare(%n, %i), direction=GT
}

%outer_body (p: (s32[], f32[8,8], s32[])) -> (s32[], f32[8,8], s32[]) {
  %p = (s32[]{:T(128)}, f32[8,8]{1,0}, /*index=2*/s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%p), index=1
  %n = s32[]{:T(128)} get-tuple-element(%p), index=2
  %minus = s32[]{:T(128)} constant(-1)
  %j = s32[]{:T(128)} add(%i, %minus)
  %zero = s32[]{:T(128)} constant(0)
  %copy = s32[]{:T(128)} copy(%zero)
  %start = (s32[]{:T(128)}, f32[8,8]{1,0}, s32[]{:T(128)}) tuple(%copy, %x, %n)
  %loop = (s32[]{:T(128)}, f32[8,8]{1,0}, s32[]{:T(128)}) while(%start), condition=%inner_condition, body=%inner_body
  %y = f32[8,8]{1,0} get-tuple-element(%loop), index=1
  %m = s32[]{:T(128)} get-tuple-element(%loop), index=2
  ROOT %t = (s32[]{:T(128)}, f32[8,8]{1,0}, s32[]{:T(128)}) tuple(%j, %y, %n)
}

%outer_condition (p: (s32[], f32[8,8], s32[])) -> pred[] {
  %p = (s32[]{:T(128)}, f32[8,8]{1,0}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %zero = s32[]{:T(128)} constant(0)
  ROOT %c = pred[]{:T(512)} compare(%i, %zero), direction=GT
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %four = s32[]{:T(128)} constant(4)
  %seven = s32[]{:T(128)} constant(7)
  %start = (s32[]{:T(128)}, f32[8,8]{1,0}, s32[]{:T(128)}) tuple(%four, %x, %seven)
  %loop = (s32[]{:T(128)}, f32[8,8]{1,0}, s32[]{:T(128)}) while(%start), condition=%outer_condition, body=%outer_body
  ROOT %y = f32[8,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_lengths_of_loops_follow_from_their_conditions() -> None:
    # The outer counter takes 4, 3, 2, 1; the inner one 0, 2, 4, 6.
    assert counts_of(LOOPS).flops == {"f32": 4 * 4 * 2 * 8**3}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%j = s32[]{:T(128)} add(%i, %minus)", "%j = s32[]{:T(128)} add(%i, %i)"),
        ("constant(-1)", "constant(1)"),
        ("compare(%i, %zero), direction=GT", "compare(%i, %zero), direction=EQ"),
        ("tuple(%four, %x, %seven)", "tuple(%four, %x, %four), backend_config={}"),
    ],
)
def test_a_length_is_unknown_when_the_text_does_not_give_it(old: str, new: str) -> None:
    assert old in LOOPS
    counts = counts_of(LOOPS.replace(old, new))
    if "tuple" in old:
        assert counts.flops == {"f32": 4 * 2 * 2 * 8**3}
    else:
        assert len(counts.unknown_loops) == 1


def test_a_count_that_the_compiler_wrote_down_is_taken() -> None:
    told = 'body=%outer_body, backend_config={"known_trip_count":{"n":"9"}}'
    assert counts_of(LOOPS.replace("body=%outer_body", told)).flops == {"f32": 9 * 4 * 2 * 8**3}


BRANCHES = """HloModule branches

%small (x: f32[8,8]) -> f32[8,8] {
  ROOT %x = f32[8,8]{1,0} parameter(0)
}

%large (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (i: s32[], x: f32[8,8]) -> f32[8,8] {
  %i = s32[] parameter(0)
  %x = f32[8,8]{1,0} parameter(1)
  ROOT %y = f32[8,8]{1,0} conditional(%i, %x, %x), branch_computations={%small, %large}
}
"""


def test_the_most_expensive_branch_is_counted() -> None:
    counts = counts_of(BRANCHES)
    assert (counts.flops, counts.conditionals) == ({"f32": 2 * 8**3}, 1)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[4,2]<=[8]", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=4,'b'=2] {'a'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=4,'b'=2] {'b','a'}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['a'=4,'b'=2] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=4,'b'=2] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
    ],
)
def test_groups_of_devices_are_read_in_every_form(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert parse_groups(text, 8) == groups


def test_groups_that_cover_a_part_of_an_axis_are_not_whole() -> None:
    span = span_of(", replica_groups={{0,2},{4,6},{1,3},{5,7}}, dimensions={0}", SIZES, 8)
    assert (span.axes, span.size, span.whole) == (("context",), 2, False)


def test_groups_of_an_unknown_form_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown form"):
        parse_groups("ring(3)", 8)


def test_devices_that_the_mesh_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"names device 7, but the mesh \{'x': 4\} has only 4"):
        collectives_of(MESSAGES, {"x": 4})


def test_shapes() -> None:
    (array,) = parse_shape("bf16[2,3]{1,0:T(8,128)(2,1)S(1)}")
    assert (array.dims, array.bytes, array.space) == ((2, 3), 12, 1)
    assert [one.bytes for one in parse_shape("(f8e4m3fn[5], s4[3]{0:E(4)}, pred[], token[], f32[<=4,2])")] == [
        5,
        2,
        1,
        0,
        32,
    ]


def test_text_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        counts_of("module @jit_f {\n}\n")


def test_a_large_program_is_read_in_one_pass() -> None:
    line = (
        '  %a.{0} = f32[128,128]{{1,0:T(8,128)}} fusion(%a.{1}, %p), kind=kLoop, calls=%f, metadata={{op_name="{2}"}}\n'
    )
    many = 12_000
    lines = "".join(line.format(i, i - 1, "x" * 300) for i in range(1, many))
    text = (
        "HloModule large\n\n%f (q: f32[128,128], r: f32[128,128]) -> f32[128,128] {\n"
        "  %q = f32[128,128]{1,0} parameter(0)\n  %r = f32[128,128]{1,0} parameter(1)\n"
        "  ROOT %s = f32[128,128]{1,0} add(%q, %r)\n}\n\nENTRY %main (p: f32[128,128]) -> f32[128,128] {\n"
        "  %p = f32[128,128]{1,0:T(8,128)} parameter(0)\n  %a.0 = f32[128,128]{1,0:T(8,128)} copy(%p)\n" + lines + "}\n"
    )
    assert len(text) > 4e6
    program = parse_program(text)
    assert len(program["main"].instructions) == many + 1
    assert math.isclose(counts_of(text).hbm_bytes, (3 * (many - 1) + 2) * 128 * 128 * 4)
