"""Operations inside `jax.shard_map`: arrays that do and arrays that don't vary over its mesh axes, together."""

from typing import TypeVarTuple

import jax

Trees = TypeVarTuple("Trees")


def align(*trees: *Trees) -> tuple[*Trees]:
    """The trees, with every array varying over each manual mesh axis that any of them varies over.

    The state of a loop must vary over what the loop's body makes it vary over, and the gradient that a custom rule
    returns over what its argument does. An operation that aligns its arguments, and the state of its loops with them,
    meets both rules; the gradient of an argument that was the same on all devices is then summed over them, as it must
    be. Outside `shard_map`, and with check_vma=False, nothing happens.
    """
    leaves, structure = jax.tree.flatten(trees)
    axes = frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in leaves))
    aligned = []
    for leaf in leaves:
        missing = tuple(sorted(axes - jax.typeof(leaf).manual_axis_type.varying))
        aligned.append(jax.lax.pcast(leaf, missing, to="varying") if missing else leaf)
    return jax.tree.unflatten(structure, aligned)


def axes_left_to_xla() -> str | None:
    """Why a kernel can't be called here: the mesh has axes that XLA would split its arrays over. None: it has none."""
    mesh = jax.sharding.get_abstract_mesh()
    split = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in mesh.manual_axes]
    if not split:
        return None
    return (
        f"the mesh axes {', '.join(map(repr, split))} aren't manual here, and a kernel isn't split over a mesh by itself; "
        "call it inside jax.shard_map."
    )
