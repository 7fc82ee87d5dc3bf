"""FP8 latents byte by byte against NumPy's own conversions, and the laws that every reader relies on."""

import struct
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.fp8_latent import Fp8Latent, bytes_per_token

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
WIDTH, SLOT = 512, 64

quantize = jax.jit(Fp8Latent.quantize, static_argnums=1, static_argnames="power_of_two_scales")


@partial(jax.jit, static_argnums=1)
def dequantize(array: Fp8Latent, dtype: str) -> jax.Array:
    return array.dequantize(dtype)


def nearest_code(value: float) -> int:
    """The e4m3 code nearest to a finite number, ties to the even one, by looking at all of them."""
    finite = [code for code in range(128) if np.isfinite(E4M3[code])]
    best = min(finite, key=lambda code: (abs(E4M3[code] - abs(value)), code % 2))
    return best | (128 if np.signbit(value) else 0)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_a_token_of_the_kimi_models_takes_656_bytes() -> None:
    assert bytes_per_token(WIDTH, SLOT) == 656
    assert bytes_per_token(128, 0) == 132
    array = Fp8Latent.zeros((3, 7), WIDTH, SLOT)
    assert (array.shape, array.ndim, array.nbytes) == ((3, 7, 576), 3, 3 * 7 * 656)
    np.testing.assert_array_equal(np.asarray(dequantize(array, "bfloat16")).astype(np.float32), 0)


def test_every_byte_of_a_token() -> None:
    values = draw(WIDTH + SLOT)
    values[130] = 400.0  # a tile with another scale than the others
    token = np.asarray(quantize(jnp.asarray(values), WIDTH).packed).tobytes()
    scales = struct.unpack("<4f", token[512:528])
    for tile in range(4):
        part = values[128 * tile : 128 * tile + 128]
        np.testing.assert_allclose(scales[tile], np.abs(part).max() / 448, rtol=2**-22)
        quotients = part / np.float32(scales[tile])
        assert [nearest_code(q) for q in quotients] == list(token[128 * tile : 128 * tile + 128])
    assert token[528:] == values[WIDTH:].astype(ml_dtypes.bfloat16).tobytes()


def test_every_code_is_read_back() -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), 2)
    scales = np.array([1.0, 0.37, 2.0**-13, 1e-4 / 448], "<f4")
    slot = draw(SLOT, seed=1).astype(ml_dtypes.bfloat16)
    packed = np.concatenate([codes, scales.view(np.uint8), slot.view(np.uint8)])
    for dtype in ("bfloat16", "float32"):
        got = np.asarray(dequantize(Fp8Latent(jnp.asarray(packed), WIDTH, SLOT), dtype)).astype(np.float64)
        exact = E4M3[codes] * np.repeat(scales.astype(np.float64), 128)
        want = exact.astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float64)
        np.testing.assert_array_equal(got[:WIDTH], want)
        np.testing.assert_array_equal(got[WIDTH:], slot.astype(np.float64))


@pytest.mark.parametrize("inside", [np.asarray, jnp.asarray])
def test_parts_are_views_of_the_bytes(inside) -> None:
    packed = np.random.default_rng(0).integers(0, 256, (5, 656), dtype=np.uint8)
    codes, scale, slot = Fp8Latent(inside(packed), WIDTH, SLOT).parts()
    assert np.asarray(codes).tobytes() == packed[:, :512].tobytes()
    assert np.asarray(scale).tobytes() == packed[:, 512:528].tobytes()
    assert np.asarray(slot).tobytes() == packed[:, 528:].tobytes()


def test_values_beyond_the_largest_code_saturate_and_none_is_nan() -> None:
    values = np.zeros((4, WIDTH + SLOT), np.float32)
    values[1, :7] = [0, 1e-4, 1, 448, 465, 1000, -1000]
    values[2, :2] = [3e38, -3e38]
    values[3] = 1e-30
    array = quantize(jnp.asarray(values), WIDTH)
    back = np.asarray(dequantize(array, "float32"))
    assert np.isfinite(back).all()
    np.testing.assert_array_equal(back[[0, 3], :WIDTH], 0)  # rows of zeros, or next to it, have a scale all the same
    np.testing.assert_allclose(back[1, 2:7], values[1, 2:7], rtol=2**-4)
    np.testing.assert_allclose(back[2, :2], values[2, :2], rtol=1e-6)
    # Rounding the quotient of the largest magnitude by its scale never gives the code for NaN.
    peaks = np.random.default_rng(0).uniform(1e-3, 1e3, (4096, 1)).astype(np.float32)
    codes = np.asarray(quantize(jnp.asarray(peaks * np.ones((1, 128), np.float32)), 128).packed)[:, :128]
    assert (codes == 0x7E).all()


def test_nan_stays_in_its_tile() -> None:
    values = draw(WIDTH + SLOT)
    values[140] = np.nan
    back = np.asarray(dequantize(quantize(jnp.asarray(values), WIDTH), "float32"))
    assert np.isnan(back[128:256]).all()
    assert np.isfinite(np.delete(back, np.s_[128:256])).all()


@pytest.mark.parametrize("power", [False, True])
def test_error_is_half_a_step_of_the_code(power: bool) -> None:
    values = draw(64, WIDTH + SLOT) * np.exp(draw(64, 1, seed=1) * 4)
    array = quantize(jnp.asarray(values), WIDTH, power_of_two_scales=power)
    back = np.asarray(dequantize(array, "float32"))
    scale = np.repeat(np.asarray(array.parts()[1]), 128, axis=-1)
    step = np.maximum(np.abs(values[:, :WIDTH]) * 2**-4, scale * 2**-10)
    assert (np.abs(back - values)[:, :WIDTH] <= step * (1 + 1e-6)).all()
    if power:
        mantissa, _ = np.frexp(scale)
        np.testing.assert_array_equal(mantissa, 0.5)
        assert (np.abs(values[:, :WIDTH]) <= 448 * scale).all()
        # Twice smaller ones would be too small.
        peak = np.maximum(np.abs(values[:, :WIDTH]).reshape(64, 4, 128).max(axis=-1), 1e-4)
        assert (peak > 224 * scale[:, ::128]).all()
        # And products with them are exact in bfloat16.
        narrow = np.asarray(dequantize(array, "bfloat16")).astype(np.float32)
        np.testing.assert_array_equal(narrow[:, :WIDTH], back[:, :WIDTH])


def test_indexing_and_reshaping_keep_tokens_whole() -> None:
    array = quantize(jnp.asarray(draw(2, 6, WIDTH + SLOT)), WIDTH)
    whole = np.asarray(dequantize(array, "float32"))
    np.testing.assert_array_equal(np.asarray(dequantize(array[1], "float32")), whole[1])
    np.testing.assert_array_equal(np.asarray(dequantize(array[:, 2:4], "float32")), whole[:, 2:4])
    np.testing.assert_array_equal(np.asarray(dequantize(array.reshape(3, 4), "float32")), whole.reshape(3, 4, -1))
    with pytest.raises(IndexError, match="first 2 axes"):
        array[0, 0, 0]


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        bytes_per_token(500, 64)
    with pytest.raises(ValueError, match="slot_width=-64"):
        Fp8Latent.quantize(jnp.zeros(448), 512)
    with pytest.raises(ValueError, match=r"latent: .*packed is uint8\[655\]"):
        Fp8Latent(jnp.zeros(655, jnp.uint8), WIDTH, SLOT).check("latent: Fp8Latent")
