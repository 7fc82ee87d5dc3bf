"""Which part of a parameter lies on which device: the table from logical axes to mesh axes, and what follows from it.

The only place that spells the name of a mesh axis.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kimi_jax.params import ParamSpec

MESH_AXES: Mapping[str, str] = {
    "data": "rows of a batch; each device along it has a copy of the model",
    "context": "tokens of a row, and the places of its cache",
    "expert": "routed experts; and rows of a batch, or tokens of a row where there aren't enough rows",
    "tensor": "heads, inner widths of MLPs, vocabulary; and routed experts, together with `expert`",
}
"""Axes that a mesh may have and what they split, in the order of a mesh's devices: neighbours along the last one talk most.

One that a mesh lacks splits nothing.
"""

Rule = str | tuple[str, ...] | None
"""The mesh axis of a logical axis, several that split it together, or None: not split."""

RULES: Mapping[str, Rule] = {
    "layers": None,
    "vocab": "tensor",
    "embed": None,
    "heads": "tensor",
    "mlp": "tensor",
    "experts": ("expert", "tensor"),
    "expert_mlp": None,
    "expert_embed": None,
}
"""The mesh axes of each logical axis of a parameter."""

# Where the sizes of logical axes come from, by the first part of a parameter's path where that matters.
_FIELDS: Mapping[str, str | Mapping[str, str]] = {
    "layers": "num_hidden_layers",
    "vocab": "vocab_size",
    "embed": "hidden_size",
    "heads": {"kda": "linear_attn_config.num_heads", "mla": "num_attention_heads"},
    "mlp": {"dense": "intermediate_size", "moe": "moe_intermediate_size (times num_shared_experts)"},
    "experts": "num_experts",
    "expert_mlp": "moe_intermediate_size",
    "expert_embed": "routed_expert_hidden_size (hidden_size where there is none)",
}


class ShardingError(ValueError):
    """A mesh can't hold the model; the message names the config field and the mesh axis."""


def partition(spec: ParamSpec, mesh: Mapping[str, int], rules: Mapping[str, Rule] = RULES) -> PartitionSpec:
    """How a parameter is split on a mesh with these axes.

    Raises:
        ShardingError: the rules don't know a logical axis, or give one mesh axis to two axes of the parameter.
    """
    unknown = sorted({axis for axis in spec.axes if axis is not None and axis not in rules})
    if unknown:
        raise ShardingError(
            f"rules have no entry for the logical axis {unknown[0]!r} of {spec.names[0]}; give it one, None for an axis "
            "that isn't split."
        )
    named = [_axes(None if axis is None else rules[axis]) for axis in spec.axes]
    used = [tuple(axis for axis in axes if axis in mesh) for axes in named]
    taken = [axis for axes in used for axis in axes]
    if len(set(taken)) < len(taken):
        raise ShardingError(
            f"rules give one mesh axis to two axes of {spec.names[0]}: {dict(zip(spec.axes, named, strict=True))}."
        )
    return PartitionSpec(*(axes[0] if len(axes) == 1 else (axes or None) for axes in used))


def _axes(rule: Rule) -> tuple[str, ...]:
    if rule is None:
        return ()
    return (rule,) if isinstance(rule, str) else rule


def shard_shape(
    path: str,
    spec: ParamSpec,
    mesh: Mapping[str, int],
    rules: Mapping[str, Rule] = RULES,
    shape: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """The part of a parameter that one device of a mesh holds.

    Args:
        path: dotted path of the parameter.
        spec: its description.
        mesh: sizes of the mesh axes.
        rules: from logical to mesh axes.
        shape: that of the stored array where it differs (codes and scales of packed weights); None: the parameter's.

    Raises:
        ShardingError: a size isn't a multiple of the mesh axis that splits it; the config field is named.
    """
    shape = spec.shape if shape is None else shape
    result = []
    for axis, split, size in zip(spec.axes, partition(spec, mesh, rules), shape, strict=True):
        axes = _axes(split)
        count = math.prod(mesh[name] for name in axes)
        if size % count:
            packed = "" if shape == spec.shape else " as it is packed"
            raise ShardingError(
                f"{config_field(path, axis)} doesn't allow {_spelled(axes, mesh)}: {path} has {size} along its axis "
                f"{axis!r}{packed}, which isn't a multiple of {count}. {_legal(axes, size)}"
            )
        result.append(size // count)
    return tuple(result)


def _spelled(axes: tuple[str, ...], mesh: Mapping[str, int]) -> str:
    return " times ".join(f"{name}={mesh[name]}" for name in axes)


def _legal(axes: tuple[str, ...], size: int) -> str:
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    shown = ", ".join(map(str, divisors[:12])) + (", ..." if len(divisors) > 12 else "")
    product = " times ".join(axes)
    others = [name for name in MESH_AXES if name not in axes]
    return f"{product} may be {shown}; more devices than that go to {' or '.join(others)}."


def named_sharding(
    path: str,
    spec: ParamSpec,
    mesh: Mesh,
    rules: Mapping[str, Rule] = RULES,
    shape: tuple[int, ...] | None = None,
) -> NamedSharding:
    """The sharding of a parameter (or of its packed part of `shape`) on a mesh.

    Raises:
        ShardingError: as `shard_shape`.
    """
    sizes = dict(mesh.shape)
    shard_shape(path, spec, sizes, rules, shape)
    return NamedSharding(automatic(mesh), partition(spec, sizes, rules))


def automatic(mesh: Mesh) -> Mesh:
    """The same mesh with the compiler in charge of activations, for which the model's code is written.

    `jax.make_mesh` makes meshes whose axes are explicit in types of arrays, which every operation would have to spell.
    """
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def parse_mesh(text: str) -> dict[str, int]:
    """Reads a description such as `expert=8,tensor=4`.

    Raises:
        ShardingError: it isn't of that form, or names an axis that isn't in `MESH_AXES`.
    """
    mesh: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in MESH_AXES:
            raise ShardingError(
                f"mesh axis {axis!r} of {text!r} is unknown; legal are {', '.join(MESH_AXES)}, as in "
                "'expert=8,tensor=4'."
            )
        if axis in mesh or not size.isascii() or not size.isdigit() or not 1 <= int(size) <= 2**20:
            raise ShardingError(
                f"mesh axis {axis!r} of {text!r} needs one whole number from 1 on, as in 'expert=8,tensor=4'."
            )
        mesh[axis] = int(size)
    return mesh


def num_devices(mesh: Mapping[str, int]) -> int:
    """Devices of a mesh."""
    return math.prod(mesh.values())


def config_field(path: str, axis: str | None) -> str:
    """The config field that an axis of a parameter has its size from."""
    field: Any = _FIELDS.get(axis or "", axis)
    return str(field if isinstance(field, str) else field.get(path.split(".")[0], axis))


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """A mesh of the first devices with these sizes of axes, neighbours on fast links.

    Raises:
        ShardingError: an unknown axis, a size below 1, or more devices than there are.
    """
    if not all(axis in MESH_AXES and isinstance(size, int) and size > 0 for axis, size in sizes.items()):
        raise ShardingError(
            f"mesh={dict(sizes)}; its axes must be some of {', '.join(MESH_AXES)}, of whole sizes from 1 on."
        )
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    count, there = math.prod(shape), jax.devices()
    if count > len(there):
        raise ShardingError(
            f"mesh={dict(sizes)} needs {count} devices; there are {len(there)} ({there[0].device_kind})."
        )
    kinds = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, tuple(MESH_AXES), axis_types=kinds, devices=there[:count])


def complete(mesh: Mesh) -> Mesh:
    """The same devices with all axes of `MESH_AXES`, in their order; axes that were missing have size 1.

    Raises:
        ShardingError: the mesh has an axis of another name, or its axes are in another order.
    """
    known = [axis for axis in MESH_AXES if axis in mesh.axis_names]
    if list(mesh.axis_names) != known:
        raise ShardingError(
            f"mesh axes {tuple(mesh.axis_names)} aren't legal; they must be some of {tuple(MESH_AXES)}, in this order."
        )
    shape = [mesh.shape.get(axis, 1) for axis in MESH_AXES]
    return Mesh(mesh.devices.reshape(shape), tuple(MESH_AXES), axis_types=(AxisType.Auto,) * len(shape))
