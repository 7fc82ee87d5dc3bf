"""Raw values: NaN by bits, FP8 tiles, alignment."""

import ml_dtypes
import numpy as np
import pytest

from kimi_jax.checkpoint.values import ALIGNMENT, dequantize_fp8, empty, has_nan

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_sixteen_bit_pattern_is_judged_as_numpy_does(dtype: type) -> None:
    codes = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        expected = np.isnan(codes.astype(np.float32))
    assert [has_nan(codes[i : i + 1]) for i in range(0, 1 << 16, 37)] == expected[::37].tolist()
    assert has_nan(codes)
    assert not has_nan(codes[~expected])


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_nan_of_either_sign_is_found(dtype: type) -> None:
    values = np.array([0.0, -0.0, 1.5, -2.0, 240.0], dtype)
    infinities = () if dtype is ml_dtypes.float8_e4m3fn else (np.inf, -np.inf)
    values = np.concatenate([values, np.array(infinities, dtype)])
    assert not has_nan(values)
    for sign in (1.0, -1.0):
        nan = np.copysign(np.array(np.nan, dtype), np.array(sign, dtype))
        assert has_nan(np.append(values, nan))
    assert not has_nan(values[:0])


def test_fp8_tiles_are_multiplied_by_their_own_factor() -> None:
    random = np.random.default_rng(0)
    value = random.standard_normal((200, 300)).astype(ml_dtypes.float8_e4m3fn)
    scale = random.uniform(0.5, 2, (2, 3)).astype(np.float32)
    found = dequantize_fp8(value, scale)
    for row, column in ((0, 0), (127, 128), (128, 127), (199, 299), (130, 256)):
        assert found[row, column] == np.float32(value[row, column]) * scale[row // 128, column // 128]


def test_memory_starts_on_a_cache_line() -> None:
    for shape in ((), (3,), (5, 7)):
        array = empty(shape, ml_dtypes.bfloat16)
        assert array.ctypes.data % ALIGNMENT == 0
        assert array.shape == shape
        array[...] = 1
