"""Packed weights unpacked as even and odd elements, the form in which TPUs multiply by them."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.xla import product_by_halves
from pallas_kernels.mxfp4 import Mxfp4

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def unpacked(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Values of the OCP specification, float64; products below the smallest normal bfloat16 count as zero."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values = np.where(codes >= 8, -1, 1) * MAGNITUDES[codes & 7]
    scales = np.where(scale < 2, 0.0, 2.0 ** (scale.astype(np.float64) - 127))
    return values * np.repeat(scales, 32, axis=-1)


@pytest.fixture(scope="module")
def weight() -> tuple[Mxfp4, np.ndarray]:
    random = np.random.default_rng(7)
    packed = random.integers(0, 256, (48, 64), np.uint8)
    scale = random.integers(120, 134, (48, 4), np.uint8)
    return Mxfp4(jnp.asarray(packed), jnp.asarray(scale)), unpacked(packed, scale)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_even_and_odd_elements_are_exact(weight: tuple[Mxfp4, np.ndarray], dtype: jnp.dtype) -> None:
    packed, values = weight
    even, odd = packed.even_odd(dtype)
    assert even.dtype == odd.dtype == dtype
    np.testing.assert_array_equal(np.asarray(even, np.float64), values[:, 0::2])
    np.testing.assert_array_equal(np.asarray(odd, np.float64), values[:, 1::2])


def test_every_code_with_every_scale_that_checkpoints_may_hold() -> None:
    packed = np.broadcast_to(np.arange(16, dtype=np.uint8) * 17, (253, 16)).copy()
    scale = np.arange(253, dtype=np.uint8)[:, None]
    even, odd = Mxfp4(jnp.asarray(packed), jnp.asarray(scale)).even_odd(jnp.bfloat16)
    values = unpacked(packed, scale)
    np.testing.assert_array_equal(np.asarray(even, np.float64), values[:, 0::2])
    np.testing.assert_array_equal(np.asarray(odd, np.float64), values[:, 1::2])


def test_a_scale_that_is_not_a_number_reaches_its_row_only() -> None:
    packed, scale = np.full((3, 32), 0x22, np.uint8), np.full((3, 2), 127, np.uint8)
    scale[1, 0] = 255
    even, _ = Mxfp4(jnp.asarray(packed), jnp.asarray(scale)).even_odd(jnp.float32)
    assert np.isnan(even[1]).all()
    assert (np.asarray(even)[[0, 2]] == 1).all()


def test_other_dtypes_are_refused(weight: tuple[Mxfp4, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="even_odd: dtype is float16"):
        weight[0].even_odd(jnp.float16)


@pytest.mark.parametrize(("spec", "width"), [("md,fd->mf", 128), ("mf,fd->md", 48)])
def test_products_are_those_of_the_whole_weight(weight: tuple[Mxfp4, np.ndarray], spec: str, width: int) -> None:
    packed, values = weight
    rows = np.random.default_rng(8).standard_normal((5, width)).astype(np.float32)
    expected = np.einsum(spec, rows.astype(np.float64), values)
    result = product_by_halves(spec, jnp.asarray(rows), packed, jnp.float32)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    rough = product_by_halves(spec, jnp.asarray(rows, jnp.bfloat16), packed, jnp.bfloat16)
    assert rough.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(rough, np.float64), expected, rtol=0.05, atol=0.02 * np.abs(expected).max())
