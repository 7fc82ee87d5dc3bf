"""Sizes that follow from the described shapes, against the published ones."""

import json
from pathlib import Path

import pytest

from kimi_jax.config import KimiConfig, parameter_count
from kimi_jax.model import Decoder
from kimi_jax.params import count_parameters, named_specs

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("name", "billions"), [("kimi-k3", 2779.5), ("kimi-linear-48b-a3b", 49.12), ("kimi-k31-pro", 2779.5 + 0.1785)]
)
def test_described_shapes_add_up_to_the_published_size(name: str, billions: float) -> None:
    specs = Decoder(_config(name)).specs
    assert count_parameters(specs) / 1e9 == pytest.approx(billions, abs=0.06 if billions > 1000 else 0.006)


@pytest.mark.parametrize("name", [path.stem for path in sorted(CONFIGS.glob("*.json"))])
def test_formulas_agree_with_the_described_shapes(name: str) -> None:
    config = _config(name)
    decays = len(config.kda.layers) * config.kda.num_heads
    described = count_parameters(Decoder(config).specs)
    assert parameter_count(config).text in (described, described - decays)


def test_every_stored_tensor_is_described_once() -> None:
    specs = Decoder(_config("kimi-k31-tiny")).specs
    names = [name for spec in named_specs(specs).values() for _, name in spec.sources()]
    assert len(names) == len(set(names)) == 936


def _config(name: str) -> KimiConfig:
    return KimiConfig.from_dict(json.loads((CONFIGS / f"{name}.json").read_text()))
