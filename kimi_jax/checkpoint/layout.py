"""Which arrays a converted checkpoint consists of, and in which pieces they're written.

An array holds one parameter of one layer, or an even share of it when that would be too large: a group of experts, or
rows of a matrix. Layers are stacked when they're loaded. The arrays have the model's own layout (gate and up rows of
an expert side by side, heads as an axis, no padding), so experts load as they're multiplied.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from kimi_jax.checkpoint.boxes import Box
from kimi_jax.checkpoint.locate import Located, packed_shapes
from kimi_jax.checkpoint.manifest import EmptyTensor, Part, Piece, StoredArray, StoredTensor, piece_name
from kimi_jax.checkpoint.reader import CheckpointReader
from kimi_jax.params import Params, ParamSpec, named_specs

ARRAY_BYTES = 128 * 2**20
"""Largest array, unless a caller asks for another bound; well below the 1 GiB that the format promises."""


@dataclass(frozen=True)
class Layout:
    """The pieces of a converted checkpoint, and the tensors that have nothing to store."""

    pieces: tuple[Piece, ...]
    empty: tuple[EmptyTensor, ...]


@dataclass(frozen=True)
class _Group:
    """All of what one or more arrays are cut from: a part of a parameter in one layer, or one other tensor."""

    param: str | None
    part: Part
    layer: int | None
    label: str
    stack: tuple[int, ...]
    tensor_shape: tuple[int, ...]
    names: tuple[str, ...]


def lay_out(
    reader: CheckpointReader,
    specs: Params,
    located: Mapping[str, list[Located]],
    array_bytes: int = ARRAY_BYTES,
) -> Layout:
    """Plans the arrays of a checkpoint; the same checkpoint always gives the same plan.

    Args:
        reader: the checkpoint.
        specs: the decoder's parameters.
        located: where they are, from `locate`.
        array_bytes: bound on the bytes of an array, and of the arrays that are written together.
    """
    numbers = {file.path: number for number, file in enumerate(reader.files)}
    used = {name for tensors in located.values() for tensor in tensors for name in tensor.names}
    others = [name for name in reader.names() if name not in used]

    def describe(name: str) -> StoredTensor:
        return StoredTensor(name, reader.shape(name), numbers[reader.file_of(name)])

    def is_empty(name: str) -> bool:
        return 0 in reader.shape(name)

    arrays: list[StoredArray] = []
    labels: Counter[str] = Counter()
    for group in [*_parameters(specs, located), *_others(reader, [name for name in others if not is_empty(name)])]:
        for box in _boxes(reader, group, array_bytes):
            places = product(*(range(a, b) for a, b in list(zip(box.start, box.stop, strict=True))[: len(group.stack)]))
            tensors = tuple(describe(group.names[_flat(place, group.stack)]) for place in places)
            arrays.append(
                StoredArray(
                    key=f"{group.label}.{labels[group.label]:03d}",
                    param=group.param,
                    part=group.part,
                    layer=group.layer,
                    box=box,
                    dtype=reader.dtype(tensors[0].name),
                    stack=len(group.stack),
                    tensors=tensors,
                )
            )
            labels[group.label] += 1
    empty = tuple(
        EmptyTensor(name, reader.shape(name), reader.dtype(name), numbers[reader.file_of(name)])
        for name in others
        if is_empty(name)
    )
    return Layout(tuple(_pieces(arrays, array_bytes)), empty)


def tensor_shape(specs: Mapping[str, ParamSpec], array: StoredArray, tensor: StoredTensor) -> tuple[int, ...]:
    """The row-major shape in which an array's box counts the elements of a tensor."""
    if array.param is None:
        return tensor.shape
    shape = specs[array.param].tensor_shape
    if array.part == "values":
        return shape
    return packed_shapes(shape)[array.part == "scale"]


def _parameters(specs: Params, located: Mapping[str, list[Located]]) -> Iterator[_Group]:
    """Parameters outside the layers, then layer by layer, which is about the order of the files."""
    named = named_specs(specs)
    for path, spec in named.items():
        if spec.layers is None:
            yield from _parts(path, spec, None, located[path])
    layers = sorted({layer for spec in named.values() for layer in spec.layers or ()})
    for layer in layers:
        for path, spec in named.items():
            if spec.layers is not None and layer in spec.layers:
                place = spec.layers.index(layer)
                each = len(located[path]) // len(spec.layers)
                yield from _parts(path, spec, place, located[path][place * each : (place + 1) * each])


def _parts(path: str, spec: ParamSpec, place: int | None, tensors: list[Located]) -> Iterator[_Group]:
    stack = spec.stack_shape if place is None else spec.stack_shape[1:]
    label = path if place is None or spec.layers is None else f"{path}.layer{spec.layers[place]:03d}"
    if not tensors[0].packed:
        names = tuple(tensor.name for tensor in tensors)
        yield _Group(path, "values", place, label, stack, spec.tensor_shape, names)
        return
    parts: tuple[Part, Part] = ("packed", "scale")
    for number, (part, shape) in enumerate(zip(parts, packed_shapes(spec.tensor_shape), strict=True)):
        names = tuple(tensor.names[number] for tensor in tensors)
        yield _Group(path, part, place, f"{label}.{part}", stack, shape, names)


def _others(reader: CheckpointReader, names: list[str]) -> Iterator[_Group]:
    """Tensors that the decoder doesn't use: the vision tower, and scales of FP8 tensors."""
    for name in names:
        label = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
        part: Part = "tensor"
        yield _Group(None, part, None, f"{label[:100]}.tensor", (), reader.shape(name), (name,))


def _boxes(reader: CheckpointReader, group: _Group, array_bytes: int) -> Iterator[Box]:
    dtypes = [reader.dtype(name) for name in group.names]
    whole = Box.whole((*group.stack, *group.tensor_shape))
    if len(set(dtypes)) == 1:
        yield from whole.split(max(1, array_bytes // dtypes[0].itemsize))
        return
    # Tensors of different types can't share an array.
    for place in whole.split(1, axes=len(group.stack)):
        itemsize = reader.dtype(group.names[_flat(place.start[: len(group.stack)], group.stack)]).itemsize
        yield from place.split(max(1, array_bytes // itemsize))


def _pieces(arrays: list[StoredArray], piece_bytes: int) -> Iterator[Piece]:
    batch: list[StoredArray] = []
    number, size = 0, 0
    for array in arrays:
        if batch and size + array.nbytes > piece_bytes:
            yield Piece(piece_name(number), tuple(batch))
            number, batch, size = number + 1, [], 0
        batch.append(array)
        size += array.nbytes
    if batch:
        yield Piece(piece_name(number), tuple(batch))


def _flat(place: tuple[int, ...], shape: tuple[int, ...]) -> int:
    number = 0
    for index, size in zip(place, shape, strict=True):
        number = number * size + index
    return number
