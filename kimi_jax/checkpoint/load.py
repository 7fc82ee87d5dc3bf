"""From a checkpoint of either format to the stacked parameters of a decoder, on one device or spread over a mesh.

Each process reads the parts that its own devices hold, and of those only the bytes (converted checkpoints: the chunks)
that it needs, once for all of its devices. Reads run side by side; what is read and not yet on a device is bounded.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from kimi_jax.checkpoint.boxes import Box
from kimi_jax.checkpoint.converted import ConvertedCheckpoint
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.locate import FP8_SCALE, Located, check_padding, is_padded, locate, packed_shapes, raise_if
from kimi_jax.checkpoint.manifest import Part
from kimi_jax.checkpoint.opened import Checkpoint
from kimi_jax.checkpoint.reader import CheckpointReader
from kimi_jax.checkpoint.values import NAN_SCALE, dequantize_fp8, empty, has_nan, touch
from kimi_jax.checkpoint.verify import verify as verify_checkpoint
from kimi_jax.model import Decoder
from kimi_jax.params import Params, ParamSpec, is_spec, named_specs
from kimi_jax.sharding import RULES, Rule, named_sharding
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.precision import at_least_float32

BYTES_IN_FLIGHT = 2 * 2**30
"""Bound on what is in host memory and not yet on a device; one device's part of one parameter always fits."""

_READERS = 8
_BYTES_PER_READ = 32 * 2**20


def load_params(
    reader: Checkpoint,
    decoder: Decoder,
    dtype: DTypeLike,
    *,
    mesh: Mesh | None = None,
    rules: Mapping[str, Rule] | None = None,
    verify: bool = False,
    bytes_in_flight: int = BYTES_IN_FLIGHT,
) -> Params:
    """Reads every parameter of `decoder`.

    Parameters marked float32 are read as float32, experts stored as MXFP4 stay packed, all others become `dtype`.

    Args:
        reader: an open checkpoint, from `open_checkpoint`.
        decoder: the model.
        dtype: of parameters that may have any.
        mesh: devices to spread parameters over; every process of a run makes the same call. None: the default device.
        rules: mesh axis of each logical axis; None: `sharding.RULES`.
        verify: first compare the checkpoint's bytes with its checksums; processes share that work.
        bytes_in_flight: bound on host memory for what is being read.

    Raises:
        CheckpointError: tensors are missing, unexpected, or of a wrong shape or dtype (all are listed, before any is
            read), are damaged, or hold NaN.
        ShardingError: a size of the model isn't a multiple of the mesh axis that splits it.
    """
    located = locate(reader, decoder.specs)
    source: _Source
    if isinstance(reader, ConvertedCheckpoint):
        reader.check_parameters(decoder.specs)
        source = _Converted(reader, located)
    else:
        source = _HuggingFace(reader, named_specs(decoder.specs), located)
    flat, treedef = jax.tree.flatten(decoder.specs, is_leaf=is_spec)
    paths = list(named_specs(decoder.specs))
    plans: list[list[_Target]] = [
        _targets(path, spec, located[path][0].packed, dtype, mesh, rules or RULES)
        for path, spec in zip(paths, flat, strict=True)
    ]
    with _agreeing(mesh):
        if verify:
            shared = mesh is not None
            verify_checkpoint(
                reader, part=jax.process_index() if shared else 0, parts=jax.process_count() if shared else 1
            )
        arrays = list(_place(source, [target for plan in plans for target in plan], bytes_in_flight))
        raise_if(source.problems, f"{reader.directory} can't be loaded")
    placed = iter(arrays)
    leaves = [parts[0] if len(parts) == 1 else Mxfp4(*parts) for parts in ([next(placed) for _ in p] for p in plans)]
    return jax.tree.unflatten(treedef, leaves)


@contextlib.contextmanager
def _agreeing(mesh: Mesh | None) -> Iterator[None]:
    """Makes a failure that one process of a mesh meets a failure of all, which would otherwise wait for it.

    Raises:
        CheckpointError: this process's own, or one that says that another process has the reason.
    """
    failure: CheckpointError | None = None
    try:
        yield
    except CheckpointError as error:
        failure = error
    if mesh is not None and jax.process_count() > 1:
        failures = multihost_utils.process_allgather(np.array(failure is not None))
        if failure is None and np.any(failures):
            numbers = ", ".join(map(str, np.flatnonzero(failures)))
            failure = CheckpointError(f"The checkpoint can't be loaded; process {numbers} says what is wrong with it.")
    if failure is not None:
        raise failure


@dataclass(frozen=True)
class _Target:
    """One array to fill: a parameter, or the codes or the scales of a packed one."""

    path: str
    spec: ParamSpec
    part: Part
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding | None


@runtime_checkable
class _Source(Protocol):
    """Where values come from."""

    problems: list[str]

    def read(self, target: _Target, box: Box, out: np.ndarray) -> None:
        """Copies a box of a target into `out`, converting values to its type."""
        ...


def _targets(
    path: str, spec: ParamSpec, packed: bool, dtype: DTypeLike, mesh: Mesh | None, rules: Mapping[str, Rule]
) -> list[_Target]:
    def target(part: Part, shape: tuple[int, ...], kind: DTypeLike) -> _Target:
        sharding = None if mesh is None else named_sharding(path, spec, mesh, rules, shape)
        return _Target(path, spec, part, shape, np.dtype(kind), sharding)

    if packed:
        codes, scales = packed_shapes(spec.shape)
        return [target("packed", codes, np.uint8), target("scale", scales, np.uint8)]
    return [target("values", spec.shape, at_least_float32(dtype) if spec.float32 else dtype)]


# From files to devices.


@dataclass(frozen=True)
class _Part:
    """A part of a target on its way to the devices that hold it."""

    box: Box
    values: np.ndarray
    devices: list[Any]


@dataclass(frozen=True)
class _Group:
    """Parts of target number `number` that are read together."""

    number: int
    nbytes: int
    parts: list[_Part]
    reads: list[Future[None]]


def _place(source: _Source, targets: list[_Target], bytes_in_flight: int) -> Iterator[jax.Array]:
    """Fills targets one after the other, reading ahead as far as the bound allows."""
    with ThreadPoolExecutor(_READERS) as pool:
        waiting: deque[_Group] = deque()
        placed: dict[int, list[jax.Array]] = {}
        remaining: dict[int, int] = {}
        in_flight = 0

        def finish() -> None:
            nonlocal in_flight
            group = waiting.popleft()
            for read in group.reads:
                read.result()
            in_flight -= group.nbytes
            while group.parts:
                part = group.parts.pop()
                placed[group.number] += [jax.device_put(part.values, device) for device in part.devices]
                # A copy to another device must have been made before its source is given up.
                jax.block_until_ready(placed[group.number])
            remaining[group.number] -= 1

        try:
            for number, target in enumerate(targets):
                groups = _groups(target, bytes_in_flight)
                remaining[number], placed[number] = len(groups), []
                for boxes in groups:
                    size = sum(box.size for box in boxes) * target.dtype.itemsize
                    while waiting and in_flight + size > bytes_in_flight:
                        finish()
                    parts = [_Part(box, empty(box.shape, target.dtype), devices) for box, devices in boxes.items()]
                    in_flight += size
                    pieces = _around(boxes).split(max(1, _BYTES_PER_READ // target.dtype.itemsize))
                    reads = [pool.submit(_read, source, target, piece, tuple(parts)) for piece in pieces]
                    waiting.append(_Group(number, size, parts, reads))
            for number, target in enumerate(targets):
                while remaining[number]:
                    finish()
                shards = placed.pop(number)
                if target.sharding is None:
                    yield shards[0]
                else:
                    yield jax.make_array_from_single_device_arrays(target.shape, target.sharding, shards)
        finally:
            for group in waiting:
                for read in group.reads:
                    read.cancel()


def _read(source: _Source, target: _Target, box: Box, parts: tuple[_Part, ...]) -> None:
    """Reads a box of a target once, for all parts that hold some of it."""
    shares = [(part, shared) for part in parts if (shared := box.intersect(part.box)) is not None]
    if len(shares) == 1:
        part, _ = shares[0]
        source.read(target, box, part.values[box.within(part.box).slices])
        return
    values = empty(box.shape, target.dtype)
    source.read(target, box, values)
    for part, shared in shares:
        part.values[shared.within(part.box).slices] = values[shared.within(box).slices]


def _groups(target: _Target, most: int) -> list[dict[Box, list[Any]]]:
    """The parts of a target that this process holds, by box, with the devices that hold each, in groups.

    Parts that cut through the same tensors form a group, because a chunk of a converted checkpoint may hold some of
    each and should be read once; unless together they exceed `most` bytes.
    """
    alike: dict[Box, dict[Box, list[Any]]] = {}
    for box, devices in _parts(target):
        axes = len(target.spec.stack_shape)
        alike.setdefault(Box(box.start[:axes], box.shape[:axes]), {})[box] = devices
    groups: list[dict[Box, list[Any]]] = []
    for boxes in alike.values():
        size = sum(box.size for box in boxes)
        if size == _around(boxes).size and size * target.dtype.itemsize <= most:
            groups.append(boxes)
        else:
            groups += [{box: devices} for box, devices in boxes.items()]
    return groups


def _around(boxes: Iterable[Box]) -> Box:
    """The smallest box that holds all of these."""
    starts, stops = zip(*((box.start, box.stop) for box in boxes), strict=True)
    start = tuple(map(min, zip(*starts, strict=True)))
    stop = tuple(map(max, zip(*stops, strict=True)))
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


def _parts(target: _Target) -> list[tuple[Box, list[Any]]]:
    """The parts of a target that this process holds, each once, with the devices that hold it."""
    if target.sharding is None:
        return [(Box.whole(target.shape), [None])]
    parts: dict[Box, list[Any]] = {}
    for device, index in target.sharding.addressable_devices_indices_map(target.shape).items():
        assert index is not None
        parts.setdefault(Box.of_slices(index, target.shape), []).append(device)
    return list(parts.items())


def _layers(target: _Target, box: Box, out: np.ndarray) -> Iterator[tuple[int | None, Box, np.ndarray]]:
    """The layers that a box spans: place in the stack, box and values without the layer axis."""
    if target.spec.layers is None:
        yield None, box, out
        return
    for number in range(box.shape[0]):
        yield box.start[0] + number, box.tail(1), out[number]


# Sources.


class _Problems:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self._lock = threading.Lock()

    def report(self, problem: str) -> None:
        """Notes what is wrong with a tensor, once."""
        with self._lock:
            if problem not in self.problems:
                self.problems.append(problem)


class _HuggingFace(_Problems):
    """Values from safetensors files."""

    def __init__(
        self, reader: CheckpointReader, specs: dict[str, ParamSpec], located: dict[str, list[Located]]
    ) -> None:
        super().__init__()
        self._reader = reader
        self._located = located
        self._checked: set[str] = set()

    def read(self, target: _Target, box: Box, out: np.ndarray) -> None:
        spec = target.spec
        axes = len(spec.stack_shape)
        for place in np.ndindex(*box.shape[:axes]):
            index = tuple(a + i for a, i in zip(box.start, place, strict=False))
            tensor = self._located[target.path][int(np.ravel_multi_index(index, spec.stack_shape)) if index else 0]
            name = tensor.names[1] if target.part == "scale" else tensor.names[0]
            self._read_tensor(target, name, box.tail(axes), out[(*place, ...)])

    def _read_tensor(self, target: _Target, name: str, box: Box, out: np.ndarray) -> None:
        spec, reader = target.spec, self._reader
        stored = reader.dtype(name)
        if target.part != "values":
            shape = packed_shapes(spec.tensor_shape)[target.part == "scale"]
            reader.read_box(name, box, out, shape)
            if target.part == "scale" and bool((out == NAN_SCALE).any()):
                self.report(f"{reader.file_of(name)}: {name} holds the scale byte 255, which is NaN.")
            return
        if stored.itemsize == 1:
            whole = dequantize_fp8(_whole(reader, name), _whole(reader, name + FP8_SCALE))
            if has_nan(whole):
                self.report(f"{reader.file_of(name)}: {name} holds NaN.")
            out[...] = whole.reshape(spec.tensor_shape)[box.slices]
            return
        if is_padded(spec, reader.shape(name)):
            try:
                check_padding(spec, _whole(reader, name), name)
            except CheckpointError as error:
                self.report(f"{reader.file_of(name)}: {error}")
                return
        direct = stored == out.dtype and out.flags.c_contiguous
        values = out if direct else empty(box.shape, stored)
        reader.read_box(name, box, values, spec.tensor_shape)
        if has_nan(values):
            self.report(f"{reader.file_of(name)}: {name} holds NaN.")
        if not direct:
            out[...] = values


class _Converted(_Problems):
    """Values from a converted checkpoint, whose values were checked when it was converted."""

    def __init__(self, checkpoint: ConvertedCheckpoint, located: dict[str, list[Located]]) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._located = located

    def read(self, target: _Target, box: Box, out: np.ndarray) -> None:
        touch(out)
        for layer, inner, values in _layers(target, box, out):
            dtypes = self._checkpoint.stored_dtypes(target.path, target.part, layer)
            if target.part == "values" and any(dtype.itemsize == 1 for dtype in dtypes):
                self._read_fp8(target, layer, inner, values)
            else:
                self._checkpoint.read_box(target.path, target.part, layer, inner, values)

    def _read_fp8(self, target: _Target, layer: int | None, box: Box, out: np.ndarray) -> None:
        spec, checkpoint = target.spec, self._checkpoint
        stack = spec.stack_shape if layer is None else spec.stack_shape[1:]
        for place in np.ndindex(*box.shape[: len(stack)]):
            index = tuple(a + i for a, i in zip(box.start, place, strict=False))
            full = index if layer is None else (layer, *index)
            number = int(np.ravel_multi_index(full, spec.stack_shape)) if full else 0
            name = self._located[target.path][number].name
            value = checkpoint.read_tensor(name)
            if value.dtype.itemsize == 1:
                value = dequantize_fp8(value, checkpoint.read_tensor(name + FP8_SCALE))
            out[(*place, ...)] = value.reshape(spec.tensor_shape)[box.tail(len(stack)).slices]


def _whole(reader: CheckpointReader, name: str) -> np.ndarray:
    values = empty(reader.shape(name), reader.dtype(name))
    reader.read_box(name, Box.whole(values.shape), values)
    return values
