"""Products of one array with several weights, as one product or one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.modules import linear
from kimi_jax.modules.linear import side_by_side


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("platform", "rows", "sizes", "products"),
    [("gpu", 3, (256, 128), 1), ("gpu", 3, (256, 96), 2), ("gpu", 600, (128, 128), 2), ("cpu", 3, (256, 128), 2)],
    ids=str,
)
def test_one_product_says_what_several_say(
    monkeypatch: pytest.MonkeyPatch, platform: str, rows: int, sizes: tuple[int, int], products: int, dtype: str
) -> None:
    rng = np.random.default_rng(0)
    x, *weights = (jnp.asarray(rng.standard_normal((n, 64)), dtype) for n in (rows, *sizes))
    monkeypatch.setattr(linear, "platform", lambda: platform)
    outs = [jnp.dtype(dtype), jnp.dtype("float32")]
    program = jax.make_jaxpr(lambda x, *weights: side_by_side(x, weights, outs))(x, *weights)
    assert str(program).count("dot_general[") == products
    for found, weight, out in zip(side_by_side(x, weights, outs), weights, outs, strict=True):
        assert found.dtype == out
        want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
        atol = 0.05 if out == jnp.bfloat16 else 1e-4
        np.testing.assert_allclose(np.asarray(found, np.float64), want, rtol=1e-2, atol=atol)
    assert [part.dtype for part in side_by_side(x, weights)] == [x.dtype] * 2
