"""The golden family with packed experts: they stay packed from the checkpoint to the products, kernels included."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import noted_choices
from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul.gpu_tiles import Tuning
from pallas_kernels.mxfp4 import Mxfp4
from tests import golden_data

FAMILY = "kimi-k3-tiny-mxfp4"
BF16 = jnp.dtype("bfloat16")
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def arrays_of(jaxpr: Any) -> Iterator[Any]:
    """Every intermediate value of a program, loops and calls included."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield variable.aval
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from arrays_of(inner)


def test_the_golden_logits_come_from_packed_experts() -> None:
    model, want = golden_data.model(FAMILY), golden_data.expected(FAMILY)
    experts, moe = model.params["experts"], model.config.moe
    assert isinstance(experts["gate_up"], Mxfp4)
    assert isinstance(experts["down"], Mxfp4)
    ids = jnp.asarray(want["input_ids"])
    with noted_choices() as chosen:
        program = jax.make_jaxpr(model.decoder.logits)(model.params, ids)
    assert chosen["grouped_matmul"].name == "xla"
    # No number of the experts' own shape exists on the way but the stored bytes, of one layer's experts or of all.
    stacks = {moe.num_experts, moe.num_experts * len(moe.layers)}
    found = [aval for aval in arrays_of(program.jaxpr) if len(getattr(aval, "shape", ())) >= 3]
    assert len(found) > 100
    of_experts = [aval for aval in found if aval.shape[0] in stacks and aval.shape[-1] == moe.latent_size]
    assert not [aval for aval in of_experts if jnp.issubdtype(aval.dtype, jnp.floating)]
    np.testing.assert_allclose(np.asarray(model.logits(want["input_ids"])), want["logits"], rtol=0, atol=1e-4)


def test_the_golden_experts_through_the_hopper_kernel() -> None:
    # Their 64 inputs are filled up with zeros to the 512 that the kernel takes.
    experts = golden_data.model(FAMILY).params["experts"]["gate_up"]
    packed, scale = (np.asarray(part[3, :4]).reshape(4, 128, -1) for part in (experts.packed, experts.scale))
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(4, 128, 64)
    values = MAGNITUDES[codes & 7] * np.where(codes >= 8, -1, 1) * np.repeat(2.0 ** (scale - 127.0), 32, axis=-1)
    rng, sizes = np.random.default_rng(0), [5, 0, 11, 1]
    rows = rng.standard_normal((20, 64)).astype(BF16).astype(np.float64)
    wide = Mxfp4(
        jnp.asarray(np.pad(packed, ((0, 0), (0, 0), (0, 224)))),
        jnp.asarray(np.pad(scale, ((0, 0), (0, 0), (0, 14)), constant_values=127)),
    )
    given = jnp.asarray(np.pad(rows, ((0, 0), (0, 448))), BF16)
    assert gpu.unfit(given, wide, BF16) is None
    public = getattr(plgpu, "InterpretGPUParams", None)
    if public is None:  # private before jax 0.11
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as public
    tuning = Tuning((8, 16), 2, 128, warpgroups=1, blocks=1)
    got = gpu.product(given, wide, jnp.asarray(sizes, jnp.int32), jnp.int32(0), BF16, tuning, public())
    want = np.zeros((20, 128))
    for m, expert in enumerate(np.repeat(np.arange(4), sizes)):
        want[m] = values[expert] @ rows[m]
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, rtol=2**-8, atol=1e-5)
