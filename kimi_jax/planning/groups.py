"""Which axes of a mesh a collective runs over, from the groups of devices that a compiled program names."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_INTEGERS = re.compile(r"\{([\d,\s]+)\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^)]*(?:\([\d,]*\))?[^)]*)\))? \{([^}]*)\}")
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_PART = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Span:
    """What the groups of a collective cover.

    Attributes:
        axes: mesh axes along which the devices of a group differ, in the mesh's order.
        size: devices of the largest group.
        whole: every group covers these axes completely.
        groups: devices by number in the order of the mesh; for a permutation its pairs of source and target.
    """

    axes: tuple[str, ...]
    size: int
    whole: bool
    groups: Groups


def span_of(attributes: str, mesh: Mapping[str, int] | None, num_devices: int) -> Span:
    """Reads `replica_groups` or `source_target_pairs` of an instruction.

    Args:
        attributes: of the instruction.
        mesh: sizes of the axes in the order in which devices are numbered; None: no names are wanted.
        num_devices: of the program.

    Raises:
        ValueError: a group names a device that the mesh doesn't have.
    """
    pairs = "source_target_pairs=" in attributes
    text = _pairs_text(attributes) if pairs else _groups_text(attributes)
    sizes = {"": num_devices} if mesh is None else mesh
    return _span(text, pairs, tuple(sizes.items()) if mesh is not None else None, num_devices)


@lru_cache(maxsize=4096)
def _span(text: str, pairs: bool, mesh: tuple[tuple[str, int], ...] | None, num_devices: int) -> Span:
    groups = parse_groups(text, num_devices)
    if mesh is None:
        return Span((), num_devices if pairs else max(map(len, groups)), False, groups)
    names, sizes = [name for name, _ in mesh], [size for _, size in mesh]
    total = math.prod(sizes)
    last = max(max(group) for group in groups)
    if last >= total:
        raise ValueError(f"the program names device {last}, but the mesh {dict(mesh)} has only {total}.")
    differs = np.zeros(len(names), bool)
    for group in groups:
        places = np.stack(np.unravel_index(np.array(group), sizes))
        differs |= (places != places[:, :1]).any(1)
    covered = math.prod(size for size, moves in zip(sizes, differs, strict=True) if moves)
    axes = tuple(name for name, moves in zip(names, differs, strict=True) if moves)
    if pairs:
        return Span(axes, covered, True, groups)
    return Span(axes, max(map(len, groups)), all(len(group) == covered for group in groups), groups)


def parse_groups(text: str, num_devices: int) -> Groups:
    """Reads any of the ways in which groups are written.

    `{{0,1},{2,3}}`; `[2,4]<=[4,2]T(1,0)`, the numbers of devices reshaped, transposed and cut into rows;
    `mesh['a'=2,'b'=4] {'b'}`, the axes of a mesh that a group covers, with `, device_ids=(...)` before the space where
    the devices of that mesh aren't in order, and `'b':(2)2` for a part of an axis (here the two devices after 2 others);
    nothing or `{}`: all devices.

    Raises:
        ValueError: it is written in another way.
    """
    if text in ("", "{}", "{{}}"):
        return (tuple(range(num_devices)),)
    if text.startswith("mesh["):
        return _mesh_groups(text)
    if text.startswith("{"):
        return tuple(tuple(int(number) for number in group.split(",")) for group in _INTEGERS.findall(text))
    if text.startswith("["):
        return _rows(_iota(text))
    raise ValueError(f"replica groups of an unknown form: {text[:200]!r}.")


def _mesh_groups(text: str) -> Groups:
    match = _MESH.match(text)
    if match is None:
        raise ValueError(f"replica groups of an unknown form: {text[:200]!r}.")
    axes = [(name, int(size)) for name, size in _AXIS.findall(match[1])]
    ids = np.arange(math.prod(size for _, size in axes))
    if match[2]:
        listed = match[2]
        ids = _iota(listed).reshape(-1) if listed.startswith("[") else np.array([int(n) for n in listed.split(",")])
    sizes = dict(axes)
    parts = _parts(match[3])
    if len({name for name, _, _ in parts}) < len(parts):
        raise ValueError(f"replica groups with two parts of one axis: {text[:200]!r}.")
    # Every axis becomes three: what stands before a part of it, the part, and what follows.
    chosen = {name: (int(before or 1), int(part or sizes[name])) for name, before, part in parts}
    shape: list[int] = []
    taken: list[int | None] = []
    for name, size in axes:
        before, part = chosen.get(name, (1, 1))
        taken.append(len(shape) + 1 if name in chosen else None)
        shape += [before, part, size // (before * part)]
    inside = [axis for axis in taken if axis is not None]
    outside = [axis for axis in range(len(shape)) if axis not in inside]
    array = ids.reshape(shape).transpose(outside + inside)
    return _rows(array.reshape(-1, math.prod(shape[axis] for axis in inside)))


def _parts(text: str) -> list[tuple[str, str, str]]:
    return [(match[1], match[2] or "", match[3] or "") for match in _PART.finditer(text)]


def _iota(text: str) -> np.ndarray:
    match = _IOTA.match(text)
    if match is None:
        raise ValueError(f"replica groups of an unknown form: {text[:200]!r}.")
    shape = [int(size) for size in match[1].split(",")]
    before = [int(size) for size in (match[2] or match[1]).split(",")]
    array = np.arange(math.prod(before)).reshape(before)
    if match[3]:
        array = array.transpose([int(axis) for axis in match[3].split(",")])
    return array.reshape(shape) if match[2] else array


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in array)


def _groups_text(attributes: str) -> str:
    at = attributes.find(" replica_groups=")
    if at < 0:
        return ""
    rest = attributes[at + len(" replica_groups=") :]
    if rest.startswith("mesh["):
        match = _MESH.match(rest)
        return rest[:80] if match is None else match[0]
    if rest.startswith("{"):
        end = rest.find("}}") + 2
        return "{}" if rest.startswith("{}") else rest[:end]
    match = _IOTA.match(rest)
    return rest[:80] if match is None else match[0]


def _pairs_text(attributes: str) -> str:
    begin = attributes.find("source_target_pairs=") + len("source_target_pairs=")
    return attributes[begin : attributes.find("}}", begin) + 2]
