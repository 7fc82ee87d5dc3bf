"""MXFP8 bit by bit: every element byte, scales around powers of two, saturation, pages."""

from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels.mxfp8 import BLOCK, LARGEST, Mxfp8, from_page, to_page

RULES = ("round_up", "floor")


def element(byte: int) -> float:
    """An e4m3 number from its bits: sign, four of exponent (bias 7), three of mantissa."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


FINITE = np.array(sorted({element(byte) for byte in range(256) if byte & 0x7F != 0x7F}))


def nearest(x: np.ndarray) -> np.ndarray:
    """The nearest e4m3 number, ties to the one with an even last bit; beyond 448 saturates."""
    magnitudes = np.array([element(byte) for byte in range(0x7F)])
    distance = np.abs(np.minimum(np.abs(x), LARGEST)[..., None] - magnitudes)
    odd = np.arange(0x7F) % 2
    best = np.argmin(distance + 1e-12 * odd * (distance == distance.min(-1, keepdims=True)), axis=-1)
    return np.copysign(magnitudes[best], x)


def scale_exponent(largest: float, rule: str) -> int:
    """The scale's exponent in exact integers: largest = m · 2^e of a float32."""
    mantissa, exponent = np.frexp(max(np.float32(largest), np.float32(1e-4)))
    if rule == "floor":
        return int(exponent) - 1 - 8
    # The least n with mantissa · 2^exponent <= 448 · 2^n, where 448 = 0.875 · 2^9.
    return int(exponent) - 9 + (1 if mantissa > 0.875 else 0)


def quantized(values: np.ndarray, rule: Any) -> Mxfp8:
    return jax.jit(lambda x: Mxfp8.quantize(x, rule))(jnp.asarray(values, jnp.float32))


def test_every_element_and_scale_byte() -> None:
    bytes_ = np.arange(256, dtype=np.uint8)
    elements = jnp.asarray(np.tile(bytes_, (255, 1))).view(jnp.float8_e4m3fn)
    scale = np.tile(np.arange(255, dtype=np.uint8)[:, None], (1, 8))
    got = np.asarray(Mxfp8(elements, jnp.asarray(scale)).dequantize(jnp.float32)).astype(np.float64)
    with np.errstate(over="ignore"):
        want = np.array([element(int(b)) for b in bytes_]) * 2.0 ** (np.arange(255.0)[:, None] - 127)
        want = want.astype(np.float32).astype(np.float64)
    # Processors flush subnormal numbers.
    normal = ~(np.abs(want) < 2.0**-126)
    np.testing.assert_array_equal(got[normal], want[normal])
    assert np.all(np.abs(got[~normal] - want[~normal]) < 2.0**-126)


def test_bfloat16_holds_every_number() -> None:
    values = Mxfp8(
        jnp.asarray(np.tile(np.arange(256, dtype=np.uint8), (3, 1))).view(jnp.float8_e4m3fn),
        jnp.asarray(np.array([[60] * 8, [127] * 8, [190] * 8], np.uint8)),
    )
    wide = np.asarray(values.dequantize(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(wide, values.dequantize(jnp.float32))


def test_a_scale_byte_of_255_is_nan() -> None:
    values = Mxfp8(jnp.ones((1, 64), jnp.float8_e4m3fn), jnp.array([[127, 255]], jnp.uint8))
    got = np.asarray(values.dequantize(jnp.float32))
    assert np.all(got[0, :32] == 1)
    assert np.all(np.isnan(got[0, 32:]))


@pytest.mark.parametrize("rule", RULES)
def test_scales_at_powers_of_two_and_at_448(rule: str) -> None:
    edges = [448.0, 256.0, 1.0, 1.75, 2.0**-9, 3.5, 7.0, 1e-4, 1e-5, 0.0, 2.0**100, 1.5e-30]
    edges += [np.nextafter(np.float32(x), np.float32(y)) for x in edges[:7] for y in (0, np.inf)]
    values = np.zeros((len(edges), BLOCK), np.float32)
    values[:, 3] = edges
    got = quantized(values, rule)
    want = [127 + scale_exponent(x, rule) for x in edges]
    np.testing.assert_array_equal(np.asarray(got.scale)[:, 0], want)
    if rule == "round_up":
        assert want[0] == 127
        assert 127 + scale_exponent(float(edges[13]), rule) == 128  # just above 448
        assert np.all(np.asarray(got.scale) >= 127 - 22)


@pytest.mark.parametrize("rule", RULES)
def test_elements_go_to_the_nearest_number(rule: str) -> None:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((40, 64)) * 10.0 ** rng.integers(-3, 6, (40, 1))).astype(np.float32)
    values[0, :16] = 448 * (np.arange(16) - 8) / 16  # ties and all
    got = quantized(values, rule)
    scale = np.repeat(2.0 ** (np.asarray(got.scale).astype(np.float64) - 127), BLOCK, axis=1)
    want = nearest(values / scale)
    np.testing.assert_array_equal(np.asarray(got.elements).astype(np.float64), want)
    beyond = np.abs(values / scale) > LARGEST
    assert beyond.any() == (rule == "floor")


@pytest.mark.parametrize("rule", RULES)
def test_large_numbers_saturate_and_never_become_nan(rule: str) -> None:
    values = np.zeros((1, BLOCK), np.float32)
    values[0, :7] = [0, 1e-4, 1, 448, 465, 1000, -1000]
    got = quantized(values, rule)
    back = np.asarray(got.dequantize(jnp.float32))
    assert np.all(np.isfinite(back))
    # 1000 is 1.95 · 2^9: its scale is 4 rounded up and 2 rounded down, where 1000 / 2 is more than 448.
    np.testing.assert_array_equal(back[0, 5:7], [1024, -1024] if rule == "round_up" else [896, -896])
    zeros = quantized(np.zeros((2, BLOCK), np.float32), rule)
    np.testing.assert_array_equal(np.asarray(zeros.dequantize(jnp.float32)), 0)


def test_a_nan_spoils_its_block_alone() -> None:
    values = np.ones((1, 64), np.float32)
    values[0, 40] = np.nan
    back = np.asarray(quantized(values, "round_up").dequantize(jnp.float32))
    assert np.all(back[0, :32] == 1)
    assert np.all(np.isnan(back[0, 32:]))


@pytest.mark.parametrize(("rule", "error"), [("round_up", 0.0266), ("floor", 0.0294)])
def test_error_on_normal_numbers_is_the_published_one(rule: str, error: float) -> None:
    # 2.66 % and 2.94 % of the norm: groups of 32 of N(0, 1), round-up and OCP scales.
    values = np.random.default_rng(1).standard_normal((1024, 128)).astype(np.float32)
    back = np.asarray(quantized(values, rule).dequantize(jnp.float32))
    assert abs(np.linalg.norm(back - values) / np.linalg.norm(values) - error) < 3e-4


def test_a_page_holds_all_elements_and_then_all_scales() -> None:
    values = quantized(np.random.default_rng(2).standard_normal((3, 64, 128)), "round_up")
    page = to_page(values)
    assert page.shape == (3, 64 * 132)
    np.testing.assert_array_equal(page[1, 128:256].view(jnp.float8_e4m3fn), values.elements[1, 1])
    np.testing.assert_array_equal(page[2, 64 * 128 + 4 : 64 * 128 + 8], values.scale[2, 1])
    back = from_page(page, 128)
    np.testing.assert_array_equal(back.elements, values.elements)
    np.testing.assert_array_equal(back.scale, values.scale)
    with pytest.raises(ValueError, match=r"from_page: 133 bytes aren't whole rows of width=128, which take 132 bytes"):
        from_page(page[0, :133], 128)


def test_it_is_a_pytree_that_knows_its_shape() -> None:
    values = quantized(np.ones((2, 5, 64)), "round_up")
    assert values.shape == (2, 5, 64)
    assert values.ndim == 3
    assert values.nbytes == 2 * 5 * 66
    assert values[1, 2].shape == (64,)
    assert jax.tree.map(lambda x: x[None], values).shape == (1, 2, 5, 64)
    for index in ((0, 0, 0), ..., None):
        with pytest.raises(IndexError, match=r"only its first 2 axes can be indexed"):
            values[index]


def test_mistakes_are_said_in_sentences() -> None:
    with pytest.raises(ValueError, match=r"the last axis has 33 elements; a multiple of 32 is needed"):
        Mxfp8.quantize(jnp.ones((2, 33)))
    other: Any = "ceil"
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match="ceil"):
        Mxfp8.quantize(jnp.ones((2, 32)), other)
    good = quantized(np.ones((2, 64)), "round_up")
    with pytest.raises(ValueError, match=r"dtype is float16; it must be bfloat16, float32 or float64"):
        good.dequantize(jnp.float16)
    with pytest.raises(ValueError, match=r"k.elements has dtype uint8; MXFP8 is stored as float8_e4m3fn"):
        Mxfp8(good.elements.view(jnp.uint8), good.scale).check("k")
    with pytest.raises(ValueError, match=r"Mxfp8.scale has dtype int32; MXFP8 has scales of uint8"):
        Mxfp8(good.elements, good.scale.astype(jnp.int32)).check()
    with pytest.raises(ValueError, match=r"scale has shape \(2, 1\); elements of shape \(2, 64\) need \(2, 2\)"):
        Mxfp8(good.elements, good.scale[:, :1]).check()
    with pytest.raises(ValueError, match=r"elements has rows of 40; a multiple of 32 is needed"):
        Mxfp8(good.elements[:, :40], good.scale).check()
