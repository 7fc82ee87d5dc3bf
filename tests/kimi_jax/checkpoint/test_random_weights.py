"""Random checkpoints: the released layout, plausible values, the mark, and refusals."""

import json
from pathlib import Path

import numpy as np
import pytest

from kimi_jax.checkpoint import CheckpointError, CheckpointReader
from kimi_jax.checkpoint.marks import RANDOM
from kimi_jax.checkpoint.opened import is_random, open_checkpoint
from kimi_jax.checkpoint.random_weights import init_random
from kimi_jax.checkpoint.verify import verify
from kimi_jax.config import ConfigError
from pallas_kernels.mxfp4 import Mxfp4
from tests.kimi_jax.checkpoint import sources
from tests.kimi_jax.checkpoint.sources import CONFIGS, GOLDEN, INDEX, k3_config, random_checkpoint, tensors_of


@pytest.mark.parametrize("family", sources.FAMILIES)
def test_names_types_and_shapes_are_those_of_the_released_layout(tmp_path: Path, family: str) -> None:
    made = CheckpointReader(init_random(CONFIGS / f"{family}.json", tmp_path / "a", progress=False))
    golden = CheckpointReader(GOLDEN / family)
    assert made.names() == golden.names()
    for name in golden.names():
        assert made.dtype(name) == golden.dtype(name), name
        if not name.endswith("A_log"):
            assert made.shape(name) == golden.shape(name), name
    padded = {made.shape(name) for name in golden.names() if name.endswith("A_log")}
    assert padded == ({(1, 1, 4, 1)} if family == "kimi-linear-tiny" else {(128,)})


TOTALS = """
import json, sys
from pathlib import Path
from kimi_jax.checkpoint.random_weights import tensors_of
from kimi_jax.config import KimiConfig
tensors = dict(tensors_of(KimiConfig.from_dict(json.loads(Path(sys.argv[1]).read_text()))))
print(len(tensors), sum(tensor.info.nbytes for tensor in tensors.values()))
"""


def test_k3_has_the_published_number_of_tensors_and_bytes() -> None:
    """The released index says 497,220 tensors and total_size 1,560,860,324,864."""
    assert sources.run_script(TOTALS, CONFIGS / "kimi-k3.json").split() == ["497220", "1560860324864"]


def test_heads_are_padded_as_k3_pads_them(tmp_path: Path) -> None:
    config = k3_config()
    config["text_config"]["linear_attn_config"]["num_heads"] = 96
    tensors = tensors_of(random_checkpoint(tmp_path / "a", config))
    decay = tensors["language_model.model.layers.0.self_attn.A_log"]
    assert decay.shape == (128,)
    assert (decay[:96] >= 0).all()
    assert (decay[:96] <= np.log(16)).all()
    assert not decay[96:].any()


def test_the_image_tower_has_the_released_tensors(tmp_path: Path) -> None:
    whole = json.loads((CONFIGS / "kimi-k3.json").read_text())
    vision = whole["vision_config"] | {
        "vt_num_hidden_layers": 2,
        "vt_hidden_size": 16,
        "mm_hidden_size": 16,
        "vt_intermediate_size": 24,
        "vt_num_attention_heads": 2,
        "qkv_hidden_size": 24,
        "text_hidden_size": 80,
        "init_pos_emb_height": 3,
        "init_pos_emb_width": 5,
    }
    reader = CheckpointReader(random_checkpoint(tmp_path / "a", k3_config() | {"vision_config": vision}))
    tower = {name: reader.shape(name) for name in reader.names() if name.startswith(("vision_tower.", "mm_projector."))}
    # 165 and 3 tensors in the release, of which 27 blocks have six each.
    assert len(tower) == 165 + 3 - 25 * 6
    assert tower["vision_tower.patch_embed.proj.weight"] == (16, 3, 14, 14)
    assert tower["vision_tower.patch_embed.pos_emb.weight"] == (3, 5, 16)
    assert tower["vision_tower.encoder.blocks.1.wqkv.weight"] == (72, 16)
    assert tower["vision_tower.encoder.blocks.1.mlp.fc1.weight"] == (16, 24)
    assert tower["mm_projector.proj.2.weight"] == (80, 64)


def test_values_are_of_a_plausible_size(tmp_path: Path) -> None:
    tensors = tensors_of(random_checkpoint(tmp_path / "a", k3_config(vocab_size=4096)))
    embedding = tensors["language_model.model.embed_tokens.weight"].astype(np.float32)
    assert embedding.std() == pytest.approx(0.02, rel=0.02)
    expert = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight"
    packed = Mxfp4(tensors[f"{expert}_packed"], tensors[f"{expert}_scale"])
    assert np.asarray(packed.dequantize(np.float32)).std() == pytest.approx(0.02, rel=0.5)
    assert len(np.unique(tensors[f"{expert}_packed"])) > 250
    step = np.log1p(np.exp(tensors["language_model.model.layers.0.self_attn.dt_bias"].astype(np.float64)))
    assert step.min() >= 0.99e-3
    assert step.max() <= 1.01e-1
    assert set(tensors["language_model.model.layers.0.input_layernorm.weight"].astype(np.float32)) == {1.0}


def test_a_seed_gives_the_same_bytes_in_any_number_of_files(tmp_path: Path) -> None:
    one = random_checkpoint(tmp_path / "one", k3_config(), seed=1)
    many = random_checkpoint(tmp_path / "many", k3_config(), shard_bytes=50_000, seed=1)
    other = random_checkpoint(tmp_path / "other", k3_config(), seed=2)
    assert len(list(one.glob("*.safetensors"))) == 1
    files = sorted(many.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    index = json.loads((many / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_of(many).values())
    a, b, c = map(tensors_of, (one, many, other))
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)
    assert any(a[name].tobytes() != c[name].tobytes() for name in a)
    verify(open_checkpoint(many), show=False)


def test_every_file_and_the_index_are_marked(tmp_path: Path) -> None:
    directory = random_checkpoint(tmp_path / "a", k3_config(), shard_bytes=100_000, seed=7)
    reader = CheckpointReader(directory)
    assert is_random(reader)
    assert all(file.metadata[RANDOM] == "7" for file in reader.files)
    assert json.loads((directory / INDEX).read_text())["metadata"][RANDOM] == "7"


def test_a_finished_one_is_left_and_an_unfinished_one_goes_on(tmp_path: Path) -> None:
    directory = random_checkpoint(tmp_path / "a", k3_config(), shard_bytes=100_000)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    stamp = (directory / INDEX).stat().st_mtime_ns
    random_checkpoint(tmp_path / "a", k3_config(), shard_bytes=100_000)
    assert (directory / INDEX).stat().st_mtime_ns == stamp
    marker = json.loads((directory / "kimi_jax.json").read_text())
    (directory / "kimi_jax.json").write_text(json.dumps(marker | {"complete": False}))
    (directory / "model-00002-of-00005.safetensors").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="hasn't finished"):
        open_checkpoint(directory)
    random_checkpoint(tmp_path / "a", k3_config(), shard_bytes=100_000)
    assert before == {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(CheckpointError, match="of another source"):
        random_checkpoint(tmp_path / "a", k3_config(), seed=5)


def test_a_directorys_tokenizer_comes_along(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "config.json").write_text(json.dumps(k3_config()))
    (origin / "tiktoken.model").write_text("tokens")
    made = init_random(origin, tmp_path / "a", progress=False)
    assert (made / "tiktoken.model").read_text() == "tokens"
    assert (made / "config.json").read_bytes() == (origin / "config.json").read_bytes()


def test_faulty_configs_and_arguments_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError):
        init_random(file, tmp_path / "a")
    file.write_text("{")
    with pytest.raises(CheckpointError, match="valid JSON"):
        init_random(file, tmp_path / "a")
    file.write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        init_random(file, tmp_path / "a")
    file.write_text(json.dumps(k3_config(hidden_size=None)))
    with pytest.raises(ConfigError, match="hidden_size"):
        init_random(file, tmp_path / "a")
    with pytest.raises(ValueError, match="seed=-1"):
        init_random(file, tmp_path / "a", seed=-1)
    assert not (tmp_path / "a").exists()
