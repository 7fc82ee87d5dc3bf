import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.model import Decoder
from kimi_jax.params import Params, named_specs
from kimi_jax.train import OptimizerConfig, init_params, make_optimizer, wsd_schedule
from kimi_jax.train.optimizer import groups
from tests.kimi_jax.train.tiny import config

DECODER = Decoder(config())


@cache
def params() -> Params:
    return init_params(DECODER)


@cache
def by_group() -> dict[str, str]:
    return dict(zip(named_specs(DECODER.specs), jax.tree.leaves(groups(DECODER)), strict=True))


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("kda.qkv", "muon"),
        ("kda.output", "muon"),
        ("mla.query", "muon"),
        ("mla.indexer.query", "muon"),
        ("experts.gate_up", "muon"),
        ("experts.down", "muon"),
        ("dense.down", "muon"),
        ("kda.conv", "adamw"),
        ("kda.A_log", "adamw"),
        ("kda.dt_bias", "adamw"),
        ("blocks.input_norm.weight", "adamw"),
        ("blocks.attention_residual.query", "adamw"),
        ("moe.router", "adamw"),
        ("embed", "adamw"),
        ("head", "adamw"),
        ("moe.correction_bias", "frozen"),
    ],
)
def test_muon_takes_the_matrices_inside_layers(path: str, group: str) -> None:
    assert by_group()[path] == group


def updates(gradients: Params, **options: object) -> Params:
    settings = OptimizerConfig(1.0, weight_decay=0.0, clip_norm=1e9)
    optimizer = make_optimizer(DECODER, settings, wsd_schedule(2, warmup=0, decay=0), **options)
    return jax.jit(optimizer.update)(gradients, optimizer.init(params()), params())[0]


def noise() -> Params:
    leaves, tree = jax.tree.flatten(params())
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in leaves])


def test_muon_orthogonalises_every_matrix_of_a_stack_on_its_own() -> None:
    gradients = noise()
    found = updates(gradients)
    for path in (("experts", "down"), ("mla", "query"), ("kda", "output")):
        update, gradient = found, gradients
        for part in path:
            update, gradient = update[part], gradient[part]
        spec = named_specs(DECODER.specs)[".".join(path)]
        matrices = np.asarray(update).reshape(-1, np.prod(spec.tensor_shape[:-1]), spec.tensor_shape[-1])
        originals = np.asarray(gradient).reshape(matrices.shape)
        for matrix, original in zip(matrices, originals, strict=True):
            # −UV' of the gradient's U S V', whose size is AdamW's usual 0.2 an entry; the iteration leaves ±30 %.
            size = 0.2 * np.sqrt(max(matrix.shape))
            singular = np.linalg.svd(matrix, compute_uv=False) / size
            assert singular.min() > 0.4, path
            assert singular.max() < 1.4, path
            u, _, v = np.linalg.svd(original, full_matrices=False)
            cosine = -np.sum(matrix * (u @ v)) / np.linalg.norm(matrix) / np.linalg.norm(u @ v)
            assert cosine > 0.9, path


def test_what_is_frozen_stays_and_does_not_count_in_the_norm() -> None:
    gradients = noise()
    found = updates(gradients, trainable=lambda path: path.startswith("mla.indexer."))
    moved = {
        path for path, leaf in zip(named_specs(DECODER.specs), jax.tree.leaves(found), strict=True) if np.any(leaf)
    }
    assert moved == {path for path in named_specs(DECODER.specs) if path.startswith("mla.indexer.")}

    # AdamW's first update doesn't depend on the gradient's size, so a clip shows in Muon's momentum alone.
    settings = OptimizerConfig(1.0, clip_norm=1.0)
    optimizer = make_optimizer(DECODER, settings, wsd_schedule(2, warmup=0, decay=0), lambda path: path == "kda.output")
    small = jax.tree.map(lambda x: np.full(x.shape, 1e6, np.float32), params())
    small["kda"]["output"] = np.full(params()["kda"]["output"].shape, 1e-3, np.float32)
    state = jax.jit(optimizer.update)(small, optimizer.init(params()), params())[1]
    momenta = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == params()["kda"]["output"].shape]
    np.testing.assert_allclose(momenta[0], 0.05 * small["kda"]["output"], rtol=1e-5)


def test_the_schedule_rises_stays_and_falls() -> None:
    factor = wsd_schedule(100, warmup=9, decay=50, peak=0.5, floor=0.1)
    assert float(factor(0)) == pytest.approx(0.05)
    assert [float(factor(step)) for step in (9, 30, 50)] == [0.5] * 3
    assert float(factor(75)) == pytest.approx(0.3)
    assert float(factor(100)) == pytest.approx(0.1)


def test_illegal_settings_name_themselves() -> None:
    with pytest.raises(ValueError, match="warmup=60 and decay=50"):
        wsd_schedule(100, warmup=60, decay=50)
    with pytest.raises(ValueError, match=r"floor=0\.5 and peak=0.2"):
        wsd_schedule(100, warmup=0, decay=0, peak=0.2, floor=0.5)
    for name, value in {"learning_rate": 0.0, "clip_norm": -1.0, "beta2": 1.0, "weight_decay": -0.1}.items():
        with pytest.raises(ValueError, match=re.escape(f"{name}={value}")):
            OptimizerConfig(**{"learning_rate": 1e-3, name: value})
    with pytest.raises(ValueError, match="trainable refuses every parameter"):
        make_optimizer(DECODER, OptimizerConfig(1e-3), wsd_schedule(2, warmup=0, decay=0), lambda path: False)
