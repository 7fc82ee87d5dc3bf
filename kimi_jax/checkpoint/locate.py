"""Finding a decoder's parameters among the tensors of a checkpoint, from names, shapes and dtypes alone."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.safetensors_format import shown
from kimi_jax.checkpoint.values import FP8_BLOCK, is_float
from kimi_jax.params import Params, ParamSpec, named_specs
from pallas_kernels.mxfp4 import BLOCK

TEXT_PREFIX = "language_model."
# Held by multimodal checkpoints, read by the vision tower.
OTHER_PARTS = ("vision_tower.", "mm_projector.")
FP8_SCALE = "_scale_inv"
LISTED_PROBLEMS = 40

Kind = Literal["missing", "unexpected", "wrong shape", "wrong dtype", "mixed packing"]


@runtime_checkable
class TensorTable(Protocol):
    """What a checkpoint says about its tensors, whatever its format."""

    directory: Path

    def names(self) -> Collection[str]:
        """Names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor as Hugging Face files hold it."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """Element type of a tensor."""
        ...

    def file_of(self, name: str) -> Path:
        """The file or folder that holds a tensor."""
        ...


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


@dataclass(frozen=True)
class Mismatch:
    """A tensor that isn't what the config asks for."""

    kind: Kind
    tensor: str
    detail: str
    file: Path | None = None

    def __str__(self) -> str:
        where = "" if self.file is None else f"{self.file}: "
        return f"{where}{self.kind}: {shown(self.tensor)[1:-1]} {self.detail}"


def locate(table: TensorTable, specs: Params) -> dict[str, list[Located]]:
    """Finds every tensor of every parameter, by dotted parameter path.

    Raises:
        CheckpointError: listing everything that is missing, unexpected, or of a wrong shape or dtype.
    """
    located, mismatches = compare(table, specs)
    raise_if([str(mismatch) for mismatch in mismatches], f"{table.directory} doesn't fit its config.json")
    return located


def compare(table: TensorTable, specs: Params) -> tuple[dict[str, list[Located]], list[Mismatch]]:
    """What `locate` finds, and everything that is wrong with it."""
    names = table.names()
    prefix = TEXT_PREFIX if any(name.startswith(TEXT_PREFIX) for name in names) else ""
    mismatches: list[Mismatch] = []
    used: set[str] = set()
    located: dict[str, list[Located]] = {}
    for path, spec in named_specs(specs).items():
        tensors = [_find(names, index, prefix + name) for index, name in spec.sources()]
        if any(tensor.packed for tensor in tensors):
            # An expert that isn't there at all is missing in the form that the others have.
            tensors = [t if t.packed or t.name in names else replace(t, packed=True) for t in tensors]
            plain = next((tensor for tensor in tensors if not tensor.packed), None)
            if plain is not None:
                mismatches.append(
                    Mismatch(
                        "mixed packing",
                        plain.name,
                        "isn't packed while others of its kind are; all or none must be.",
                        table.file_of(plain.name),
                    )
                )
        located[path] = tensors
        for tensor in tensors:
            missing = [name for name in tensor.names if name not in names]
            shapes = packed_shapes(spec.tensor_shape) if tensor.packed else stored_shapes(spec)
            mismatches += [
                Mismatch("missing", name, str(list(shape)))
                for name, shape in zip(tensor.names, shapes, strict=False)
                if name in missing
            ]
            used.update(tensor.names)
            used.add(tensor.name + FP8_SCALE)
            if not missing:
                mismatches += _misfits(table, spec, tensor)
    mismatches += [
        Mismatch("unexpected", name, str(list(table.shape(name))), table.file_of(name))
        for name in sorted(set(names) - used)
        if not name.startswith(OTHER_PARTS)
    ]
    return located, mismatches


def raise_if(problems: list[str], heading: str) -> None:
    """Raises one CheckpointError that lists the problems, if there are any."""
    if problems:
        shown_problems = problems[:LISTED_PROBLEMS]
        rest = len(problems) - len(shown_problems)
        more = [f"... and {rest} more."] if rest else []
        count = f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}"
        raise CheckpointError("\n  ".join([f"{heading} ({count}):", *shown_problems, *more]))


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


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes and of the scales of an MXFP4 array that stands for `shape`."""
    *rows, width = shape
    return (*rows, width // 2), (*rows, width // BLOCK)


def is_padded(spec: ParamSpec, shape: tuple[int, ...]) -> bool:
    """Whether a stored tensor has more values than the model uses."""
    return spec.adapt == "narrow" and len(shape) == 1 and shape != spec.tensor_shape


def check_padding(spec: ParamSpec, value: np.ndarray, name: str) -> None:
    """Refuses a padded vector whose tail isn't zero.

    Raises:
        CheckpointError: naming the tensor and the accepted layouts.
    """
    (count,) = spec.tensor_shape
    # Bits and not values: a tail of -0 or NaN wouldn't come back when zeros are restored.
    if value[count:].view(f"u{value.dtype.itemsize}").any():
        raise CheckpointError(
            f"{name} has {value.size} values for {count} heads with a tail that isn't zero; accepted are [{count}], "
            f"[1, 1, {count}, 1], and a padded vector whose values past the heads are all 0."
        )


def _find(names: Collection[str], index: tuple[int, ...], name: str) -> Located:
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


def _misfits(table: TensorTable, spec: ParamSpec, tensor: Located) -> Iterator[Mismatch]:
    if tensor.packed:
        for name, expected in zip(tensor.names, packed_shapes(spec.tensor_shape), strict=True):
            if table.dtype(name) != np.uint8:
                yield _mismatch(table, "wrong dtype", name, f"is {table.dtype(name)}, packed MXFP4 is uint8.")
            if tuple(table.shape(name)) != expected:
                yield _mismatch(
                    table, "wrong shape", name, f"is {list(table.shape(name))}, the config makes it {list(expected)}."
                )
        return
    found, dtype = tuple(table.shape(tensor.name)), table.dtype(tensor.name)
    if not is_float(dtype):
        yield _mismatch(table, "wrong dtype", tensor.name, f"is {dtype}, a floating-point tensor is needed.")
    elif dtype.itemsize == 1:
        scale = tensor.name + FP8_SCALE
        blocks = tuple(-(-size // FP8_BLOCK) for size in found)
        if scale not in table.names():
            yield Mismatch("missing", scale, f"{list(blocks)}, the block scales of {tensor.name}, which is {dtype}.")
        elif tuple(table.shape(scale)) != blocks:
            yield _mismatch(
                table,
                "wrong shape",
                scale,
                f"is {list(table.shape(scale))}, tiles of 128 x 128 make it {list(blocks)}.",
            )
        elif not is_float(table.dtype(scale)):
            yield _mismatch(table, "wrong dtype", scale, f"is {table.dtype(scale)}, a floating-point tensor is needed.")
    legal = stored_shapes(spec)
    if not any(_shape_fits(spec, found, shape) for shape in legal):
        yield _mismatch(
            table,
            "wrong shape",
            tensor.name,
            f"is {list(found)}, the config makes it "
            f"{' or '.join(str(list(shape)).replace('[-1]', 'a vector padded with zeros') for shape in legal)}.",
        )


def _mismatch(table: TensorTable, kind: Kind, name: str, detail: str) -> Mismatch:
    return Mismatch(kind, name, detail, table.file_of(name))


def _shape_fits(spec: ParamSpec, found: tuple[int, ...], legal: tuple[int, ...]) -> bool:
    if legal == (-1,):
        # Releases pad the head count to a width that kernels like (96 to 128); any other length is a mistake.
        (count,) = spec.tensor_shape
        return len(found) == 1 and found[0] >= count and (found[0] % 16 == 0 or found[0].bit_count() == 1)
    return found == legal
