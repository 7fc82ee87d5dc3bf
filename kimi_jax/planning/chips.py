"""What one device of a kind has: memory, arithmetic, memory bandwidth, links; peaks as their makers publish them.

A device is what JAX counts as one. A TPU v5p chip is one device (its two cores work as one); a TPU7x chip is two, each
with half of the chip's memory, arithmetic and links.

Sources:
    TPU v5e: https://docs.cloud.google.com/tpu/docs/v5e (819 GB/s from the same page's table of HBM2 values).
    TPU v5p: https://docs.cloud.google.com/tpu/docs/v5p, INT8 from Google's announcement of the chip.
    TPU v6e: https://docs.cloud.google.com/tpu/docs/v6e.
    TPU7x: https://docs.cloud.google.com/tpu/docs/tpu7x, which compares all of them in one table.
    A100, H100, H200: NVIDIA's data sheets of the SXM forms (A100 80 GB), figures without sparsity.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GIB = 2**30

Fabric = Literal["torus", "switch"]


@dataclass(frozen=True)
class Chip:
    """Published figures of one device.

    Attributes:
        name: as in the name of a topology.
        kind: `device_kind` of JAX's devices.
        hbm_bytes: memory of one device, as published.
        usable_bytes: what a program may use of it: the limit in libtpu's own message about a program that is too large
            (libtpu 0.0.42); for GPUs all of it, although JAX takes three quarters unless it is told otherwise.
        hbm_bandwidth: bytes per second.
        peak_flops: operations per second by type of operands: "bf16", "fp8", "int8", on GPUs also "tf32" and "f32".
        fabric: "torus" of links between neighbours, or one "switch" between all devices of a host.
        torus_dims: dimensions of the torus, 0 for a switch.
        link_bandwidth: bytes per second, one direction of one link of a device; for a switch, of the whole device.
        devices_per_chip: devices that share a place on the torus.
        pair_bandwidth: bytes per second, one direction, between the devices of one chip; 0 where there's one.
        wraps: the number of chips along a dimension from which (and from multiples of which) its ends are joined.
    """

    name: str
    kind: str
    hbm_bytes: int
    usable_bytes: int
    hbm_bandwidth: float
    peak_flops: Mapping[str, float]
    fabric: Fabric
    torus_dims: int
    link_bandwidth: float
    devices_per_chip: int = 1
    pair_bandwidth: float = 0.0
    wraps: int = 0

    def peak(self, operands: str) -> float:
        """Operations per second of products, by the type of their operands as `counting.Counts.flops` names it.

        TPUs multiply float32 in bf16 passes: one by default, three for "f32 high", six for "f32 highest". GPUs use tf32
        by default and their float32 units for the rest. Types that a chip has no unit for are converted to bf16.
        """
        dtype, _, precision = operands.partition(" ")
        if dtype in ("f32", "f64"):
            if "f32" in self.peak_flops:
                return self.peak_flops["f32" if precision else "tf32"]
            return self.peak_flops["bf16"] / {"": 1, "high": 3, "highest": 6}.get(precision, 6)
        kind = "fp8" if dtype.startswith("f8") else "int8" if dtype in ("s8", "u8", "s4", "u4") else "bf16"
        return self.peak_flops.get(kind, self.peak_flops["bf16"])


# Links: the documentation gives bytes per second of a chip, all links and both directions together: 400 GB/s over
# 4 links (v5e), 800 over 4 (v6e), 1200 over 6 (v5p and TPU7x). Whole dimensions are joined into rings from 16 chips on
# in the two-dimensional kinds and in multiples of 4 in the three-dimensional ones.
CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            "v5e",
            "TPU v5 lite",
            16 * GIB,
            int(15.75 * GIB),
            819e9,
            {"bf16": 197e12, "int8": 393e12},
            "torus",
            2,
            50e9,
            wraps=16,
        ),
        Chip(
            "v5p",
            "TPU v5",
            95 * GIB,
            int(95.74 * GIB),
            2765e9,
            {"bf16": 459e12, "fp8": 459e12, "int8": 918e12},
            "torus",
            3,
            100e9,
            wraps=4,
        ),
        Chip(
            "v6e",
            "TPU v6 lite",
            32 * GIB,
            int(31.25 * GIB),
            1638e9,
            {"bf16": 918e12, "fp8": 918e12, "int8": 1836e12},
            "torus",
            2,
            100e9,
            wraps=16,
        ),
        # Half a chip. Its two halves are joined by an interface that is six times as fast as one link of the chip.
        Chip(
            "tpu7x",
            "TPU7x",
            96 * GIB,
            int(94.75 * GIB),
            3690e9,
            {"bf16": 1153.5e12, "fp8": 2307e12},
            "torus",
            3,
            50e9,
            devices_per_chip=2,
            pair_bandwidth=600e9,
            wraps=4,
        ),
        Chip(
            "a100",
            "NVIDIA A100-SXM4-80GB",
            80 * 10**9,
            80 * 10**9,
            2039e9,
            {"bf16": 312e12, "int8": 624e12, "tf32": 156e12, "f32": 19.5e12},
            "switch",
            0,
            300e9,
        ),
        Chip(
            "h100",
            "NVIDIA H100 80GB HBM3",
            80 * 10**9,
            80 * 10**9,
            3350e9,
            {"bf16": 989.4e12, "fp8": 1978.9e12, "int8": 1978.9e12, "tf32": 494.7e12, "f32": 67e12},
            "switch",
            0,
            450e9,
        ),
        Chip(
            "h200",
            "NVIDIA H200",
            141 * 10**9,
            141 * 10**9,
            4800e9,
            {"bf16": 989.4e12, "fp8": 1978.9e12, "int8": 1978.9e12, "tf32": 494.7e12, "f32": 67e12},
            "switch",
            0,
            450e9,
        ),
    )
}
"""Devices by the name that a topology begins with."""


def chip_named(name: str) -> Chip:
    """The figures of a device.

    Raises:
        ValueError: the name isn't in `CHIPS`.
    """
    if name not in CHIPS:
        raise ValueError(f"chip {name!r} is unknown; legal are {', '.join(CHIPS)}.")
    return CHIPS[name]
