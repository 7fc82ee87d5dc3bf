"""Parameters described before they exist: shape, dtype, logical axes, initialiser and where a checkpoint keeps them.

Abstract trees, counts, initialisation and checkpoint reading all come from these descriptions.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from flax import nnx

Adapt = Literal["as stored", "vector", "conv", "heads", "narrow"]
Init = Literal["normal", "ones", "zeros", "decay", "dt_bias"]
Params = dict[str, Any]
Bound = TypeVar("Bound", bound=nnx.Module)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter array, or one stack of equal tensors of a checkpoint.

    Attributes:
        shape: shape of the array. Leading axes are, in this order: layers (when `layers` is set), experts (when a name
            holds `{expert}`), then the tensors of `names` (when there is more than one); the rest is one tensor.
        axes: logical axis names, one per dimension; `sharding` maps them to mesh axes.
        names: checkpoint names, relative to the layer when `layers` is set. Matrices keep the checkpoint's
            `[out, in]` orientation.
        float32: kept in float32 whatever the model's dtype.
        init: initialiser of a random model.
        adapt: how a stored tensor becomes this shape. `vector`: `[1, D]` to `[D]`; `conv`: `[P, 1, W]` to `[P, W]`;
            `heads`: leading axis split into heads; `narrow`: one value a head out of `[H]`, `[1, 1, H, 1]` or a longer
            vector with a zero tail.
        layers: zero-based model layers of the stack, or None outside the layers.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    names: tuple[str, ...]
    float32: bool = False
    init: Init = "normal"
    adapt: Adapt = "as stored"
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{self.names}: {len(self.shape)} dimensions but {len(self.axes)} logical axes.")

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def has_experts(self) -> bool:
        """Whether the array stacks one tensor per expert."""
        return "{expert}" in self.names[0]

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The leading axes along which tensors of the checkpoint are stacked."""
        count = (self.layers is not None) + self.has_experts + (len(self.names) > 1)
        return self.shape[:count]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of one tensor of the stack."""
        return self.shape[len(self.stack_shape) :]

    def stacked(self, layers: tuple[int, ...]) -> "ParamSpec":
        """This parameter of one layer, stacked over `layers`."""
        return replace(self, shape=(len(layers), *self.shape), axes=("layers", *self.axes), layers=layers)

    def sources(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yields (index into the stack axes, checkpoint name) for every tensor; K3 files prefix `language_model.`."""
        for index in np.ndindex(*self.stack_shape):
            rest = list(index)
            prefix = f"model.layers.{self.layers[rest.pop(0)]}." if self.layers is not None else ""
            expert = rest.pop(0) if self.has_experts else None
            name = self.names[rest.pop(0) if rest else 0]
            yield index, prefix + name.format(expert=expert)


def param(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *names: str,
    float32: bool = False,
    init: Init = "normal",
    adapt: Adapt = "as stored",
) -> nnx.Param:
    """Declares a parameter of a module: an `nnx.Param` that holds its description until arrays are bound to it."""
    return nnx.Param(ParamSpec(shape, axes, names, float32=float32, init=init, adapt=adapt))


def is_spec(value: object) -> bool:
    """Leaf test for trees of descriptions."""
    return isinstance(value, ParamSpec)


def specs_of(module: nnx.Module) -> Params:
    """The tree of descriptions of an unbound module, as nested dicts."""
    return nnx.to_pure_dict(nnx.split(module)[1])


def named_specs(specs: Params) -> dict[str, ParamSpec]:
    """Descriptions by dotted path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)
    return {".".join(str(key.key) for key in path): spec for path, spec in leaves}


def count_parameters(specs: Params) -> int:
    """Number of parameters described by a tree."""
    return sum(spec.size for spec in named_specs(specs).values())


def bind(module: Bound, params: Mapping[str, Any]) -> Bound:
    """`module` with arrays (or tracers) in place of its descriptions."""
    return nnx.merge(nnx.graphdef(module), params)
