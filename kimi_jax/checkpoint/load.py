"""From a Hugging Face directory to the stacked parameters of a decoder."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kimi_jax.checkpoint.reader import CheckpointError, CheckpointReader
from kimi_jax.model import Decoder
from kimi_jax.params import Params, ParamSpec, is_spec, named_specs
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.precision import at_least_float32

TEXT_PREFIX = "language_model."
# Held by multimodal checkpoints, read by the vision tower.
OTHER_PARTS = ("vision_tower.", "mm_projector.")
FP8_BLOCK = 128
LISTED_PROBLEMS = 40


@dataclass(frozen=True)
class Located:
    """One tensor of a parameter stack and the names under which the checkpoint holds it."""

    index: tuple[int, ...]
    name: str
    packed: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All names read for this tensor."""
        return (f"{self.name}_packed", f"{self.name}_scale") if self.packed else (self.name,)


def load_params(reader: CheckpointReader, decoder: Decoder, dtype: DTypeLike) -> Params:
    """Reads every parameter of `decoder`.

    Parameters marked float32 are read as float32, experts stored as MXFP4 stay packed, all others become `dtype`.

    Raises:
        CheckpointError: tensors are missing, unexpected, or of a wrong shape or dtype (all are listed, before any is
            read), or hold NaN.
    """
    located = locate(reader, decoder.specs)
    problems: list[str] = []

    def read(spec: ParamSpec, tensors: list[Located]) -> Any:
        target = np.dtype(at_least_float32(dtype) if spec.float32 else dtype)
        if tensors[0].packed:
            return _read_packed(reader, spec, tensors, problems)
        stack = np.empty(spec.shape, target)
        for tensor in tensors:
            value = _read_float(reader, tensor.name)
            if bool(np.isnan(value).any()):
                problems.append(f"{reader.file_of(tensor.name)}: {tensor.name} holds NaN.")
            try:
                stack[tensor.index] = adapt(spec, value, tensor.name).astype(target)
            except CheckpointError as error:
                problems.append(str(error))
        return jnp.asarray(stack)

    flat, treedef = jax.tree.flatten(decoder.specs, is_leaf=is_spec)
    paths = list(named_specs(decoder.specs))
    arrays = [read(spec, located[path]) for spec, path in zip(flat, paths, strict=True)]
    _raise_if(problems, reader.directory)
    return jax.tree.unflatten(treedef, arrays)


def locate(reader: CheckpointReader, specs: Params) -> dict[str, list[Located]]:
    """Finds every tensor of every parameter, by dotted parameter path, from names, shapes and dtypes alone.

    Raises:
        CheckpointError: listing everything that is missing, unexpected, or of a wrong shape or dtype.
    """
    names = set(reader.names())
    prefix = TEXT_PREFIX if any(name.startswith(TEXT_PREFIX) for name in names) else ""
    problems: list[str] = []
    used: set[str] = set()
    located: dict[str, list[Located]] = {}
    for path, spec in named_specs(specs).items():
        tensors = [_find(names, index, prefix + name) for index, name in spec.sources()]
        located[path] = tensors
        if len({tensor.packed for tensor in tensors}) > 1:
            plain = next(tensor for tensor in tensors if not tensor.packed)
            problems.append(f"{plain.name} is not packed while other experts of its kind are: all or none must be.")
        for tensor in tensors:
            missing = [name for name in tensor.names if name not in names]
            problems += [f"missing: {name} {list(stored_shapes(spec)[0])}" for name in missing]
            used.update(tensor.names)
            used.add(f"{tensor.name}_scale_inv")
            if not missing:
                problems += _misfits(reader, spec, tensor)
    problems += [
        f"unexpected: {name} {list(reader.shape(name))}"
        for name in sorted(names - used)
        if not name.startswith(OTHER_PARTS)
    ]
    _raise_if(problems, reader.directory)
    return located


def _raise_if(problems: list[str], directory: Path) -> None:
    if problems:
        shown = problems[:LISTED_PROBLEMS]
        rest = len(problems) - len(shown)
        more = [f"... and {rest} more."] if rest else []
        raise CheckpointError(
            "\n  ".join([f"{directory} doesn't fit its config.json ({len(problems)} problems):", *shown, *more])
        )


def _find(names: set[str], index: tuple[int, ...], name: str) -> Located:
    if name not in names and f"{name}_packed" in names:
        return Located(index, name, packed=True)
    # Early K3 files spelled the parameters of Attention Residuals as members: mlp_res.proj_weight.
    for kind in ("proj", "norm"):
        older = name.removesuffix(f"_{kind}.weight") + f".{kind}_weight"
        if name.endswith(f"_res_{kind}.weight") and name not in names and older in names:
            return Located(index, older)
    # transformers writes the dense MLP of a Kimi-Linear model under the name of the sparse one.
    saved = name.replace(".mlp.", ".block_sparse_moe.")
    if name not in names and saved in names:
        return Located(index, saved)
    return Located(index, name)


def _misfits(reader: CheckpointReader, spec: ParamSpec, tensor: Located) -> Iterator[str]:
    if tensor.packed:
        *rows, width = spec.tensor_shape
        for name, expected in zip(tensor.names, ((*rows, width // 2), (*rows, width // 32)), strict=True):
            if reader.dtype(name) != np.uint8:
                yield f"wrong dtype: {name} is {reader.dtype(name)}, packed MXFP4 is uint8."
            if tuple(reader.shape(name)) != expected:
                yield f"wrong shape: {name} is {list(reader.shape(name))}, the config makes it {list(expected)}."
        return
    found, dtype = tuple(reader.shape(tensor.name)), reader.dtype(tensor.name)
    if not jnp.issubdtype(dtype, jnp.floating):
        yield f"wrong dtype: {tensor.name} is {dtype}, a floating-point tensor is needed."
    elif dtype.itemsize == 1:
        scale = f"{tensor.name}_scale_inv"
        blocks = tuple(-(-size // FP8_BLOCK) for size in found)
        if scale not in reader.names():
            yield f"missing: {scale}, the block scales of {tensor.name}, which is {dtype}."
        elif tuple(reader.shape(scale)) != blocks:
            yield f"wrong shape: {scale} is {list(reader.shape(scale))}, blocks of 128 x 128 make it {list(blocks)}."
    legal = stored_shapes(spec)
    if not any(_shape_fits(found, shape) for shape in legal):
        yield (
            f"wrong shape: {tensor.name} is {list(found)}, the config makes it "
            f"{' or '.join(str(list(shape)).replace('-1', 'padded') for shape in legal)}."
        )


def stored_shapes(spec: ParamSpec) -> tuple[tuple[int, ...], ...]:
    """Shapes in which checkpoints store a tensor of this parameter, the released one first; -1 is a padded length."""
    shape = spec.tensor_shape
    match spec.adapt:
        case "vector":
            return (1, *shape), shape
        case "conv":
            return (shape[0], 1, shape[1]), shape
        case "heads":
            return ((shape[0] * shape[1], *shape[2:]),)
        case "narrow":
            return shape, (1, 1, *shape, 1), (-1,)
        case _:
            return (shape,)


def _shape_fits(found: tuple[int, ...], legal: tuple[int, ...]) -> bool:
    if legal == (-1,):
        # Releases pad the head count to a width that kernels like (96 to 128); any other length is a mistake.
        return len(found) == 1 and (found[0] % 16 == 0 or found[0].bit_count() == 1)
    return found == legal


def adapt(spec: ParamSpec, value: np.ndarray, name: str) -> np.ndarray:
    """A stored tensor in the shape that the model uses.

    Raises:
        CheckpointError: a padded vector's tail isn't zero.
    """
    if spec.adapt == "narrow" and value.ndim == 1:
        count = spec.tensor_shape[0]
        tail = value[count:]
        if value.size < count or not bool((tail == 0).all()):
            raise CheckpointError(
                f"{name} has {value.size} values for {count} heads with a tail that isn't zero; accepted are [{count}], "
                f"[1, 1, {count}, 1], and a padded vector whose values past the heads are all 0."
            )
        value = value[:count]
    return value.reshape(spec.tensor_shape)


def _read_float(reader: CheckpointReader, name: str) -> np.ndarray:
    value = reader.read(name)
    if value.dtype.itemsize > 1:
        return value
    scale = reader.read(f"{name}_scale_inv").astype(np.float32)
    for axis, size in enumerate(value.shape):
        scale = np.repeat(scale, FP8_BLOCK, axis=axis).take(np.arange(size), axis=axis)
    return value.astype(np.float32) * scale


def _read_packed(
    reader: CheckpointReader, spec: ParamSpec, tensors: list[Located], problems: list[str]
) -> Mxfp4:
    *leading, width = spec.shape
    packed = np.empty((*leading, width // 2), np.uint8)
    scale = np.empty((*leading, width // 32), np.uint8)
    for tensor in tensors:
        for stack, name in zip((packed, scale), tensor.names, strict=True):
            stack[tensor.index] = reader.read(name)
        if bool((scale[tensor.index] == 255).any()):
            name = tensor.names[1]
            problems.append(f"{reader.file_of(name)}: {name} holds the scale byte 255, which is NaN.")
    return Mxfp4(jnp.asarray(packed), jnp.asarray(scale))


__all__ = ["CheckpointError", "adapt", "load_params", "locate", "stored_shapes"]
