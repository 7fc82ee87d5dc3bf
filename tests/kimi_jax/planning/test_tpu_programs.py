"""Programs compiled for TPUs that aren't there. They need libtpu, as developers have it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kimi_jax.planning import (
    chip_named,
    counts_of,
    num_devices,
    parse_topology,
    report_failure,
    report_program,
    topology_devices,
    topology_mesh,
)
from kimi_jax.planning.roofline import torus_of


@pytest.mark.parametrize("name", ["v5e:4x4", "v6e:2x4", "v5p:2x2x1", "v5p:8x8x8", "tpu7x:4x4x4", "v5e:1x1", "v6e:1x2"])
def test_libtpu_counts_devices_as_we_do(name: str) -> None:
    devices = topology_devices(name)
    assert len(devices) == num_devices(name)
    chip = parse_topology(name).chip
    assert {device.device_kind for device in devices} == {chip.kind}
    assert len({tuple(device.coords) for device in devices}) * chip.devices_per_chip == len(devices)


def test_a_large_mesh_lies_along_the_torus() -> None:
    mesh = topology_mesh("v5p:8x8x8", {"data": 1, "context": 4, "expert": 16, "tensor": 8})
    assert dict(mesh.shape) == {"data": 1, "context": 4, "expert": 16, "tensor": 8}
    torus = torus_of(chip_named("v5p"), mesh)
    assert torus is not None
    assert (torus.shape, torus.joined) == ((8, 8, 8), (True, True, True))
    places = np.array(torus.places).reshape(4, 16, 8, 3)
    # Along the axis of tensors only one dimension of the torus changes.
    assert (np.ptp(places, axis=2) > 0).any((0, 1)).sum() == 1


@pytest.mark.parametrize(("name", "free"), [("v5e:2x2", 15), ("v6e:2x2", 30)])
def test_a_small_program_compiled_for_tpus_that_are_not_there(name: str, free: int) -> None:
    mesh = topology_mesh(name, {"context": 2, "tensor": 2})
    steps, rows, width = 6, 256, 512

    def body(x: jax.Array, weights: jax.Array) -> jax.Array:
        def step(carry: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            product = jax.lax.psum(carry @ weight, "tensor")
            part = jax.lax.axis_index("tensor") * (width // 2)
            return jax.lax.dynamic_slice_in_dim(jnp.tanh(product), part, width // 2, 1), None

        return jax.lax.scan(step, x, weights)[0]

    specs = PartitionSpec("context", "tensor"), PartitionSpec(None, "tensor", None)
    function = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False), donate_argnums=0
    )
    shapes = (2 * rows, width), (steps, width, width)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        compiled = function.lower(*arguments).compile()
    counts = counts_of(compiled, mesh)
    assert counts.exact
    assert counts.flops == {"bf16": steps * 2 * rows * (width // 2) * width}
    reductions = [one for one in counts.collectives if one.kind in ("all-reduce", "reduce-scatter")]
    assert {one.axes for one in counts.collectives} == {("tensor",)}
    assert sum(one.executions for one in reductions) == steps
    assert {one.bytes for one in reductions} == {rows * width * 2}

    weights = steps * (width // 2) * width * 2
    report = report_program("step", compiled, mesh, {"parameters": weights}, 2 * rows, chip_named(name.split(":")[0]))
    assert report.memory.arguments == weights + rows * (width // 2) * 2
    assert report.memory.aliased == report.memory.outputs == rows * (width // 2) * 2
    assert sum(report.segments().values()) == report.memory.total
    assert report.memory.total < free * 2**30
    assert report.estimate.compute_seconds > 0


def test_a_program_that_is_too_large_says_by_how_much() -> None:
    device = topology_devices("v5e:2x2")[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    large = jax.ShapeDtypeStruct((20 * 512, 1024, 1024), jnp.bfloat16, sharding=sharding)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.jit(lambda x: (x * 2).sum()).lower(large).compile()
    failed = report_failure("sum", caught.value)
    assert failed.needed_bytes == 20 * 2**30
    assert failed.available_bytes == chip_named("v5e").usable_bytes
