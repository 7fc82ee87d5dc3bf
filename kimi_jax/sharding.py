"""Which part of a parameter lies on which device: the table from logical axes to mesh axes, and what follows from it.

The only place that spells the name of a mesh axis.
"""

import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kimi_jax.params import ParamSpec

MESH_AXES: Mapping[str, str] = {
    "data": "copies of the model that see different rows of a batch",
    "fsdp": "parameters split along the model's width, gathered where they're used",
    "expert": "routed experts",
    "tensor": "heads, inner widths of MLPs, vocabulary",
}
"""Axes that a mesh may have and what they split; one that a mesh lacks splits nothing."""

RULES: Mapping[str, str | None] = {
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    "expert_mlp": "tensor",
    "expert_embed": "fsdp",
}
"""The mesh axis of each logical axis of a parameter; None: not split."""

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


def partition(spec: ParamSpec, mesh: Mapping[str, int], rules: Mapping[str, str | None] = RULES) -> PartitionSpec:
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
    named = [None if axis is None else rules[axis] for axis in spec.axes]
    used = [axis if axis in mesh else None for axis in named]
    taken = [axis for axis in used if axis is not None]
    if len(set(taken)) < len(taken):
        raise ShardingError(
            f"rules give one mesh axis to two axes of {spec.names[0]}: {dict(zip(spec.axes, named, strict=True))}."
        )
    return PartitionSpec(*used)


def shard_shape(
    path: str,
    spec: ParamSpec,
    mesh: Mapping[str, int],
    rules: Mapping[str, str | None] = RULES,
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
        count = 1 if split is None else mesh[split]
        if size % count:
            raise ShardingError(
                f"{config_field(path, axis)} doesn't allow {split}={count}: {path} has {size} along its axis {axis!r}"
                f"{'' if shape == spec.shape else ' as it is packed'}, which isn't a multiple of {count}."
            )
        result.append(size // count)
    return tuple(result)


def named_sharding(
    path: str,
    spec: ParamSpec,
    mesh: Mesh,
    rules: Mapping[str, str | None] = RULES,
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
