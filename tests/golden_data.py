"""Access to the golden families under tests/golden."""

import functools
from pathlib import Path

import numpy as np

from kimi_jax import Kimi

ROOT = Path(__file__).parent / "golden"
FAMILIES = ("kimi-linear-tiny", "kimi-k3-tiny", "kimi-k3-tiny-mxfp4", "kimi-k31-tiny", "kimi-k31-d128")


@functools.cache
def expected(family: str) -> dict[str, np.ndarray]:
    with np.load(ROOT / family / "expected.npz") as arrays:
        return dict(arrays)


@functools.cache
def model(family: str, dtype: str = "float32") -> Kimi:
    return Kimi.from_pretrained(ROOT / family, dtype=dtype, progress=False)
