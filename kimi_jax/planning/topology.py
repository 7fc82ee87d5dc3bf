"""TPU topologies without TPUs: names, devices to compile for, meshes over them."""

import importlib.metadata
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from kimi_jax.planning.chips import CHIPS, Chip

EXAMPLES = ("v5e:4x4", "v6e:16x16", "v5p:8x8x8", "tpu7x:4x4x4")
_NAME = re.compile(r"([a-z0-9]+):([0-9]+(?:x[0-9]+){1,2})")
# libtpu asks the machine what it is part of unless it is told; away from Google's machines that takes minutes and then
# fills the terminal. None of it matters to a described topology.
_AWAY_FROM_TPUS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    # Nothing is run, so other processes that compile, or that have the machine's own TPUs, are no hindrance.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


class TopologyError(ValueError):
    """A topology or a mesh over it can't be had; the message says what can."""


@dataclass(frozen=True)
class Topology:
    """A slice of TPU chips.

    Attributes:
        name: such as "v5p:8x8x8".
        chip: figures of one device.
        shape: chips along each dimension of the torus.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        """Chips."""
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """Devices as JAX counts them."""
        return self.num_chips * self.chip.devices_per_chip


def parse_topology(name: str) -> Topology:
    """Reads a name such as "v5p:8x8x8", "v5e:4x4" or "tpu7x:4x4x4" (chips along each dimension of the torus).

    Raises:
        TopologyError: the name isn't of that form, the kind of chip is unknown, it has another number of dimensions,
            or the chips don't fill hosts of 2x2 chips (one host may also hold a single chip or a row of two).
    """
    kinds = [kind for kind, chip in CHIPS.items() if chip.fabric == "torus"]
    match = _NAME.fullmatch(name)
    if match is None:
        raise TopologyError(
            f"topology {name!r} isn't KIND:SHAPE with the number of chips along each dimension, as in "
            f"{', '.join(EXAMPLES)}."
        )
    kind, sizes = match[1], tuple(int(size) for size in match[2].split("x"))
    if kind not in kinds:
        raise TopologyError(f"topology {name!r} names the chip {kind!r}; legal are {', '.join(kinds)}.")
    chip = CHIPS[kind]
    if len(sizes) != chip.torus_dims:
        raise TopologyError(
            f"topology {name!r} has {len(sizes)} dimensions, but chips of {kind} are joined in {chip.torus_dims}, as in "
            f"{next(example for example in EXAMPLES if example.startswith(kind))!r}."
        )
    if min(sizes) < 1 or math.prod(sizes) > 2**16:
        raise TopologyError(f"topology {name!r} must have between 1 and {2**16} chips.")
    if _host_bounds(sizes) is None:
        raise TopologyError(
            f"topology {name!r} doesn't consist of hosts of 2x2 chips: the first two sizes must be even (or the whole "
            "topology one or two chips)."
        )
    return Topology(name, chip, sizes)


def num_devices(name: str) -> int:
    """Devices of a topology, as JAX counts them.

    Raises:
        TopologyError: as `parse_topology`.
    """
    return parse_topology(name).num_devices


def topology_devices(name: str) -> list[Any]:
    """Devices of a topology that programs can be compiled for, none of which is present.

    Raises:
        TopologyError: as `parse_topology`; or libtpu isn't installed, or doesn't know the topology.
    """
    topology = parse_topology(name)
    options: dict[str, Any] = {}
    bounds = _host_bounds(topology.shape)
    if bounds != (2, 2, 1):
        options["chips_per_host_bounds"] = bounds
    with _environment(_AWAY_FROM_TPUS):
        try:
            described = topologies.get_topology_desc(name, "tpu", **options)
        except Exception as error:
            if "TPU support not installed" in str(error):
                raise TopologyError(
                    "Compiling for TPUs needs libtpu, which isn't installed: pip install 'kimi-jax[tpu]' (it needs no "
                    "TPU, but a Linux machine)."
                ) from error
            raise TopologyError(f"libtpu can't describe the topology {name!r}: {error}") from error
    devices = list(described.devices)
    if len(devices) != topology.num_devices:
        raise TopologyError(
            f"libtpu describes {name!r} with {len(devices)} devices, where {topology.num_devices} were expected: this "
            "version counts devices in another way."
        )
    return devices


def topology_mesh(name: str, sizes: Mapping[str, int]) -> Mesh:
    """A mesh over all devices of a topology, laid along the torus where the sizes allow it.

    Args:
        name: of the topology.
        sizes: of the axes, in their order, as in `{"data": 1, "context": 4, "expert": 16, "tensor": 8}`.

    Raises:
        TopologyError: as `topology_devices`; or the sizes don't multiply to the number of devices, in which case the
            message lists sizes that would.
    """
    topology = parse_topology(name)
    wrong = [axis for axis, size in sizes.items() if size < 1]
    if wrong or not sizes:
        raise TopologyError(f"mesh {dict(sizes)} needs at least one axis, and every size must be 1 or more.")
    product = math.prod(sizes.values())
    if product != topology.num_devices:
        raise TopologyError(
            f"mesh {_written(sizes)} has {product} devices, but {name} has {topology.num_devices}. These sizes would "
            f"do: {'; '.join(_written(other) for other in _sizes_that_fit(sizes, topology.num_devices))}."
        )
    devices = topology_devices(name)
    shape = tuple(sizes.values())
    try:
        array = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (NotImplementedError, ValueError, AssertionError):
        # No axis-by-axis layout exists; the order of the devices is a legal one all the same.
        array = np.array(devices).reshape(shape)
    return Mesh(array, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def versions() -> dict[str, str]:
    """Versions that a compiled program depends on: jax, jaxlib, libtpu ("not installed") and Python."""
    found = {"python": ".".join(str(part) for part in sys.version_info[:3]), "jax": jax.__version__}
    for package in ("jaxlib", "libtpu"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _host_bounds(sizes: Sequence[int]) -> tuple[int, int, int] | None:
    """Chips of one host along each dimension, or None when hosts can't fill the topology."""
    if math.prod(sizes) <= 2:
        return (sizes[0], sizes[1], sizes[2] if len(sizes) > 2 else 1)
    return (2, 2, 1) if sizes[0] % 2 == 0 and sizes[1] % 2 == 0 else None


def _sizes_that_fit(sizes: Mapping[str, int], devices: int) -> list[dict[str, int]]:
    """Up to four meshes with the same axes: one axis changed where that is enough, else the last ones made to fit."""
    found = []
    for axis in list(sizes)[::-1]:
        others = math.prod(size for other, size in sizes.items() if other != axis)
        if devices % others == 0:
            found.append({**sizes, axis: devices // others})
    if not found:
        left, fitted = devices, {}
        for axis, size in sizes.items():
            fitted[axis] = math.gcd(size, left)
            left //= fitted[axis]
        found = [{**fitted, axis: fitted[axis] * left} for axis in list(sizes)[::-1]]
    return found[:4]


def _written(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables that aren't set, for the block only."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
