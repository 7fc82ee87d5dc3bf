"""MXFP4 against ml_dtypes' own E2M1, exact arithmetic in NumPy and a dequantisation published with golden weights."""

import json
import struct
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.mxfp4 import Mxfp4, find_invalid_scales

GOLDEN = Path(__file__).parents[1] / "golden" / "kimi-k3-tiny-mxfp4"

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def exact(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return E2M1[codes] * np.ldexp(1.0, np.repeat(scale.astype(np.int64) - 127, 32, axis=-1))


@partial(jax.jit, static_argnums=1)
def dequantize(array: Mxfp4, dtype: str = "float32") -> jax.Array:
    return array.dequantize(dtype)


quantize = jax.jit(Mxfp4.quantize)


def random_parts(*shape: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    return packed, rng.integers(110, 130, (*shape[:-1], shape[-1] // 32), dtype=np.uint8)


def read_tensor(name: str) -> np.ndarray:
    """A uint8 tensor of the golden checkpoint, straight from the safetensors layout."""
    file = json.loads((GOLDEN / "model.safetensors.index.json").read_text())["weight_map"][name]
    content = (GOLDEN / file).read_bytes()
    (header_size,) = struct.unpack("<Q", content[:8])
    entry = json.loads(content[8 : 8 + header_size])[name]
    assert entry["dtype"] == "U8"
    start, stop = (8 + header_size + offset for offset in entry["data_offsets"])
    return np.frombuffer(content[start:stop], np.uint8).reshape(entry["shape"])


def test_ml_dtypes_agrees_with_the_format() -> None:
    np.testing.assert_array_equal(E2M1, np.concatenate([MAGNITUDES, -MAGNITUDES]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("inside", [np.asarray, jnp.asarray])
def test_every_code_times_every_exact_scale(dtype: str, inside) -> None:
    scale = np.arange(2, 253, dtype=np.uint8)[:, None]
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)
    packed = np.broadcast_to(codes[0::2] | codes[1::2] << 4, (len(scale), 16))
    with jax.enable_x64(dtype == "float64"):
        array = Mxfp4(inside(packed), inside(scale))
        results = [array.dequantize(dtype), dequantize(array, dtype)]
    want = exact(packed, scale)
    for result in results:
        assert result.dtype == jnp.dtype(dtype)
        got = np.asarray(result).astype(np.float64)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
        assert np.isfinite(got).all()


def test_scales_outside_the_exact_range() -> None:
    codes = jnp.full((5, 16), 0x32, jnp.uint8)  # 1.0 and 1.5
    got = np.asarray(dequantize(Mxfp4(codes, jnp.array([[0], [1], [253], [254], [255]], jnp.uint8))))
    np.testing.assert_array_equal(got[:2], 0)
    np.testing.assert_array_equal(got[2:4, :2], [[2.0**126, 1.5 * 2.0**126], [2.0**127, 1.5 * 2.0**127]])
    assert np.isnan(got[4]).all()


def test_low_nibble_is_the_even_element() -> None:
    packed = np.zeros((1, 32), np.uint8)
    packed[0, 0], packed[0, 17] = 0x92, 0x07  # elements 0, 1: 1.0, -0.5; element 34: 6.0
    got = np.asarray(dequantize(Mxfp4(packed, np.array([[127, 128]], np.uint8))))
    want = np.zeros((1, 64))
    want[0, [0, 1, 34]] = 1.0, -0.5, 12.0
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("layer", "expert", "name"), [(1, 0, "w1"), (2, 5, "w2")])
def test_golden_weights(layer: int, expert: int, name: str) -> None:
    tensor = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight_"
    array = Mxfp4(read_tensor(tensor + "packed"), read_tensor(tensor + "scale"))
    with np.load(GOLDEN / "expected.npz") as expected:
        want = expected[f"dequant_L{layer}_E{expert}_{name}"]
    np.testing.assert_array_equal(np.asarray(dequantize(array, "float32")), want)
    np.testing.assert_array_equal(np.asarray(dequantize(array, "bfloat16")).astype(np.float32), want)
    np.testing.assert_array_equal(np.asarray(dequantize(quantize(jnp.asarray(want)))), want)


def test_shape_and_indexing_of_leading_axes() -> None:
    packed, scale = random_parts(4, 3, 5, 64)
    array = Mxfp4(packed, scale)
    assert array.shape == (4, 3, 5, 64)
    assert array.ndim == 4
    assert array.nbytes == 4 * 3 * 5 * (32 + 2)
    for index in (2, slice(1, 3), (1, 2), (slice(None), 0), np.array([3, 0]), (0, slice(2), 4)):
        part = array[index]
        np.testing.assert_array_equal(part.packed, packed[index])
        np.testing.assert_array_equal(part.scale, scale[index])
    traced = jax.jit(lambda array, i: array[i].dequantize(jnp.float32))(Mxfp4(*map(jnp.asarray, (packed, scale))), 3)
    np.testing.assert_array_equal(np.asarray(traced), exact(packed, scale)[3])
    for bad in ((0, 0, 0, 0), ..., (0, ...), None):
        with pytest.raises(IndexError, match="only its first 3 axes"):
            array[bad]


def test_is_a_pytree_of_anything() -> None:
    array = Mxfp4(*random_parts(2, 32))
    shapes = jax.eval_shape(lambda array: array[0], array)
    assert (shapes.packed.shape, shapes.scale.shape) == ((16,), (1,))
    assert jax.tree.map(lambda leaf: leaf.ndim, array) == Mxfp4(2, 2)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), array, array)
    assert stacked.shape == (2, 2, 32)
    with pytest.raises(AttributeError):
        array.packed = None  # type: ignore[misc]


def test_quantize_goes_to_the_nearest_code_and_ties_to_the_even_one() -> None:
    values = np.array([0, 0.25, 0.26, 0.75, 0.76, 1.25, 1.26, 1.75, 2.5, 2.51, 3.5, 3.49, 5, 5.01, 7.9, 4])
    want = np.array([0, 0, 0.5, 1, 1, 1, 1.5, 2, 2, 3, 4, 3, 4, 6, 6, 4])
    block = np.concatenate([values, -values])
    for power in (0, 9, -9):
        got = quantize(jnp.asarray(np.ldexp(block, power), jnp.float32))
        np.testing.assert_array_equal(np.asarray(got.scale), [127 + power])
        np.testing.assert_array_equal(np.asarray(dequantize(got)), np.ldexp(np.concatenate([want, -want]), power))


def test_quantize_takes_the_floor_rule_for_scales_and_leaves_exact_arrays_alone() -> None:
    values = np.random.default_rng(0).standard_normal((3, 96)).astype(np.float32)
    values[0, 32:64] = 0
    got = quantize(jnp.asarray(values))
    largest = np.abs(values.reshape(3, 3, 32)).max(-1)
    there = largest > 0
    np.testing.assert_array_equal(np.asarray(got.scale)[there], np.floor(np.log2(largest[there])) - 2 + 127)
    once = dequantize(got)
    np.testing.assert_array_equal(np.asarray(dequantize(quantize(once))), np.asarray(once))
    assert not np.asarray(once)[0, 32:64].any()


def test_find_invalid_scales() -> None:
    scale = np.full((2, 3, 4), 254, np.uint8)
    assert len(find_invalid_scales(scale)) == 0
    scale[1, 0, 3] = scale[0, 2, 1] = 255
    np.testing.assert_array_equal(find_invalid_scales(scale), [[0, 2, 1], [1, 0, 3]])


def test_parts_that_do_not_fit_are_refused() -> None:
    packed, scale = random_parts(2, 64)
    with pytest.raises(ValueError, match=r"scale has shape \(2, 1\).*needs \(2, 2\)"):
        Mxfp4(packed, scale[:, :1]).dequantize(jnp.float32)
    with pytest.raises(ValueError, match="packed has dtype int8"):
        Mxfp4(packed.view(np.int8), scale).dequantize(jnp.float32)
    with pytest.raises(ValueError, match="30 input elements a row; a multiple of 32"):
        Mxfp4(packed[:, :15], scale).dequantize(jnp.float32)
    with pytest.raises(ValueError, match="dtype is float16"):
        Mxfp4(packed, scale).dequantize(jnp.float16)
    with pytest.raises(ValueError, match="the last axis has 40 elements; a multiple of 32"):
        Mxfp4.quantize(jnp.zeros((2, 40)))
