"""Frozen dataclasses that jax sees as trees of arrays."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

Class = TypeVar("Class", bound=type)


@dataclass_transform(frozen_default=True)
def pytree(cls: Class) -> Class:
    """Makes `cls` a frozen dataclass whose fields are children of a pytree, but for metadata {"static": True}.

    jax rebuilds trees around shapes, shardings and placeholders, so rebuilding doesn't call `__init__`: the shapes in
    the annotations are a promise about arrays, and are checked where arrays are put in.
    """
    made: Any = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(made) if not field.metadata.get("static")]
    static = [field.name for field in dataclasses.fields(made) if field.metadata.get("static")]

    def flatten(value: Any) -> tuple[list[tuple[Any, Any]], tuple]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in names]
        return children, tuple(getattr(value, name) for name in static)

    def unflatten(aux: tuple, children: Any) -> Any:
        value = object.__new__(made)
        for name, child in [*zip(names, children, strict=True), *zip(static, aux, strict=True)]:
            object.__setattr__(value, name, child)
        return value

    jax.tree_util.register_pytree_with_keys(made, flatten, unflatten)
    return made
