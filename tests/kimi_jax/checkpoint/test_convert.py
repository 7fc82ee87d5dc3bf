"""Conversion in both directions: exactness, the finished state, and how sources and destinations can be wrong."""

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest

from kimi_jax.checkpoint import CheckpointError, CheckpointReader, store, write_safetensors
from kimi_jax.checkpoint.convert import convert
from kimi_jax.checkpoint.converted import ConvertedCheckpoint
from kimi_jax.checkpoint.load import load_params
from kimi_jax.checkpoint.lock import hold
from kimi_jax.checkpoint.manifest import MARKER, read_marker
from kimi_jax.checkpoint.opened import is_random, open_checkpoint
from kimi_jax.checkpoint.verify import verify
from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
from tests import golden_data
from tests.kimi_jax.checkpoint import sources
from tests.kimi_jax.checkpoint.sources import GOLDEN, INDEX, k3_config, plain_checkpoint, random_checkpoint, tensors_of

LAYER = "language_model.model.layers.1."
EXPERT = f"{LAYER}block_sparse_moe.experts.2.w1.weight"
A_LOG = "language_model.model.layers.0.self_attn.A_log"


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Those of a K3 model of two layers with packed experts."""
    return tensors_of(random_checkpoint(tmp_path_factory.mktemp("k3") / "source", k3_config()))


@pytest.fixture
def source(tmp_path: Path, tensors: dict[str, np.ndarray]) -> Path:
    return plain_checkpoint(tmp_path / "source", k3_config(), tensors)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and a[name].tobytes() == b[name].tobytes()
        for name in a
    )


def refuse(source: Path, destination: Path, **options: Any) -> str:
    """The message of a conversion that must fail and leave nothing that loads."""
    with pytest.raises(CheckpointError) as caught:
        convert(source, destination, progress=False, **options)
    with pytest.raises((CheckpointError, FileNotFoundError)):
        load_params(open_checkpoint(destination), Decoder(KimiConfig.from_directory(destination)), "float32")
    return str(caught.value)


# Exactness.


@pytest.mark.parametrize("family", golden_data.FAMILIES)
def test_every_family_survives_both_directions(tmp_path: Path, family: str) -> None:
    """Tensors and files byte for byte, parameters bit for bit, and the logits that one compiled function makes of them."""
    source, orbax, back = golden_data.ROOT / family, tmp_path / "orbax", tmp_path / "back"
    # Small arrays, so that experts and matrices are cut.
    convert(source, orbax, array_bytes=2**19, verify=True, progress=False)
    convert(orbax, back, to="hf", verify=True, progress=False)
    assert same(tensors_of(source), tensors_of(back))
    # The layout into files is kept too, and safetensors' own order within them.
    for file in source.glob("*.safetensors"):
        assert (back / file.name).read_bytes() == file.read_bytes()

    decoder = Decoder(KimiConfig.from_directory(source))
    for dtype in ("bfloat16", "float32"):
        before, after = (load_params(open_checkpoint(path), decoder, dtype) for path in (source, orbax))
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            assert a.dtype == b.dtype
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    ids = golden_data.expected(family)["input_ids"]
    # Quick to compile; how fast and how exact it is doesn't matter here.
    options: dict[str, str | bool] = {
        "xla_backend_optimization_level": "0",
        "xla_llvm_disable_expensive_passes": True,
    }
    logits = jax.jit(decoder.logits).lower(before, ids).compile(compiler_options=options)
    found = np.asarray(logits(before, ids))
    assert np.isfinite(found).all()
    assert np.asarray(logits(after, ids)).tobytes() == found.tobytes()


def test_arrays_have_the_models_layout_and_the_stored_types(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "orbax", progress=False)
    arrays = {}
    for piece in ConvertedCheckpoint(tmp_path / "orbax").pieces:
        arrays |= ocp.load(str(tmp_path / "orbax" / "arrays" / piece.name))
    tensors = tensors_of(source)
    packed = arrays["experts.gate_up.layer001.packed.000"]
    assert packed.dtype == np.uint8
    assert packed.shape == (4, 2, 64, 32)
    np.testing.assert_array_equal(packed[2, 0], tensors[f"{EXPERT}_packed"])
    np.testing.assert_array_equal(
        arrays["experts.gate_up.layer001.scale.000"][2, 1], tensors[EXPERT.replace("w1", "w3") + "_scale"]
    )
    assert arrays["kda.A_log.layer000.000"].shape == (4,)
    assert arrays["kda.A_log.layer000.000"].dtype == np.float32
    assert arrays["kda.qkv.layer000.000"].dtype == ml_dtypes.bfloat16
    assert arrays["moe.correction_bias.layer001.000"].dtype == np.float32


def test_arrays_and_pieces_stay_below_the_bound(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "source", k3_config(hidden_size=256, vocab_size=512))
    convert(checkpoint, tmp_path / "orbax", array_bytes=2**16, progress=False)
    pieces = ConvertedCheckpoint(tmp_path / "orbax").pieces
    assert max(piece.nbytes for piece in pieces) <= 2**16
    assert max(len(piece.arrays) for piece in pieces) > 1
    embedding = [array for piece in pieces for array in piece.arrays if array.param == "embed"]
    assert [array.box.start[0] for array in embedding] == [0, 128, 256, 384]


def test_tensors_outside_the_decoder_travel_too(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    others = {
        "vision_tower.encoder.blocks.0.norm0.weight": np.ones(32, ml_dtypes.bfloat16),
        "vision_tower.patch_embed.proj.weight": np.arange(3 * 4 * 4 * 8, dtype=np.float16).reshape(8, 3, 4, 4),
        "vision_tower.scalar": np.array(2.5, np.float64),
        "vision_tower.empty": np.empty((0, 3), np.int64),
        "mm_projector.flags": np.array([True, False]),
    }
    source = plain_checkpoint(tmp_path / "source", k3_config(), tensors | others)
    convert(source, tmp_path / "orbax", verify=True, progress=False)
    convert(tmp_path / "orbax", tmp_path / "back", to="hf", progress=False)
    assert same(tensors_of(source), tensors_of(tmp_path / "back"))
    checkpoint = ConvertedCheckpoint(tmp_path / "orbax")
    for name, tensor in others.items():
        np.testing.assert_array_equal(checkpoint.read_tensor(name), tensor)


def test_fp8_tensors_stay_fp8_and_are_scaled_when_loaded(tmp_path: Path) -> None:
    config = json.loads((sources.CONFIGS / "kimi-k31-d128.json").read_text())
    tensors = tensors_of(GOLDEN / "kimi-k31-d128")
    name = min(name for name in tensors if name.endswith("indexer.wq_b.weight"))
    random = np.random.default_rng(0)
    shape = tensors[name].shape
    tensors[name] = random.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = random.uniform(0.01, 0.02, [-(-n // 128) for n in shape]).astype(np.float32)
    source = plain_checkpoint(tmp_path / "source", config, tensors)
    convert(source, tmp_path / "orbax", progress=False)
    convert(tmp_path / "orbax", tmp_path / "back", to="hf", progress=False)
    assert same(tensors, tensors_of(tmp_path / "back"))
    decoder = Decoder(KimiConfig.from_directory(source))
    expected = (
        tensors[name].astype(np.float32)
        * tensors[f"{name}_scale_inv"].repeat(128, 0).repeat(128, 1)[: shape[0], : shape[1]]
    )
    for path in (source, tmp_path / "orbax"):
        loaded = load_params(open_checkpoint(path), decoder, "float32")["mla"]["indexer"]["query"]
        first = np.asarray(loaded)[0].reshape(shape)
        np.testing.assert_array_equal(first, expected)


@pytest.mark.parametrize("length", [4, 16, 128])
def test_padding_of_A_log_is_dropped_and_restored(tmp_path: Path, tensors: dict[str, np.ndarray], length: int) -> None:
    padded = np.zeros(length, np.float32)
    padded[:4] = tensors[A_LOG][:4]
    source = plain_checkpoint(tmp_path / "source", k3_config(), tensors | {A_LOG: padded})
    convert(source, tmp_path / "orbax", progress=False)
    convert(tmp_path / "orbax", tmp_path / "back", to="hf", verify=True, progress=False)
    np.testing.assert_array_equal(tensors_of(tmp_path / "back")[A_LOG], padded)
    decoder = Decoder(KimiConfig.from_directory(source))
    for path in (source, tmp_path / "orbax"):
        params = load_params(open_checkpoint(path), decoder, "bfloat16")
        np.testing.assert_array_equal(np.asarray(params["kda"]["A_log"])[0], padded[:4])


def test_conversion_works_under_an_active_mesh(tmp_path: Path, source: Path) -> None:
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        convert(source, tmp_path / "orbax", verify=True, progress=False)


def test_relative_paths_and_odd_names(
    tmp_path: Path, tensors: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    odd = Path("süß #1 %20?")
    plain_checkpoint(odd / "source", k3_config(), tensors)
    convert(odd / "source", odd / "orbax", verify=True, progress=False)
    convert(odd / "orbax", odd / "back", to="hf", verify=True, progress=False)
    assert same(tensors, tensors_of(odd / "back"))


# The finished state.


def test_a_second_run_checks_and_writes_nothing(tmp_path: Path, source: Path) -> None:
    first = convert(source, tmp_path / "orbax", progress=False)
    assert first.written > 0
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "orbax").rglob("*")}
    second = convert(source, tmp_path / "orbax", progress=False)
    assert (second.written, second.tensors, second.nbytes) == (0, first.tensors, first.nbytes)
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "orbax").rglob("*")}
    assert convert(tmp_path / "orbax", tmp_path / "back", to="hf", progress=False).written > 0
    assert convert(tmp_path / "orbax", tmp_path / "back", to="hf", progress=False).written == 0


def test_a_finished_destination_belongs_to_its_source(
    tmp_path: Path, source: Path, tensors: dict[str, np.ndarray]
) -> None:
    convert(source, tmp_path / "orbax", progress=False)
    # Copies of the same files are the same checkpoint, whatever their times.
    os.utime(source / "model.safetensors", (1, 1))
    assert convert(source, tmp_path / "orbax", progress=False).written == 0
    plain_checkpoint(source, k3_config(), tensors | {A_LOG: np.zeros(128, np.float32)})
    with pytest.raises(CheckpointError, match=r"other weights.*\n.*A_log has changed"):
        convert(source, tmp_path / "orbax", progress=False)
    other = random_checkpoint(tmp_path / "other", k3_config(hidden_size=96))
    with pytest.raises(CheckpointError, match="a conversion of another source"):
        convert(other, tmp_path / "orbax", progress=False)


def test_files_travel_except_code_and_pickles(tmp_path: Path, source: Path) -> None:
    kept = ("tokenizer_config.json", "tiktoken.model", "chat_template.jinja", "LICENSE", "generation_config.json")
    left = ("modeling_kimi_k3.py", "pytorch_model.bin", "training.pkl", ".hidden.json")
    for name in (*kept, *left):
        (source / name).write_text(name)
    convert(source, tmp_path / "orbax", progress=False)
    convert(tmp_path / "orbax", tmp_path / "back", to="hf", progress=False)
    for directory in (tmp_path / "orbax", tmp_path / "back"):
        for name in kept:
            assert (directory / name).read_text() == name
        assert not any((directory / name).exists() for name in left)
        assert (directory / "config.json").read_bytes() == (source / "config.json").read_bytes()
        assert not list(directory.glob(".*"))


def test_random_weights_stay_marked(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "source", k3_config(), seed=3)
    convert(source, tmp_path / "orbax", progress=False)
    convert(tmp_path / "orbax", tmp_path / "back", to="hf", progress=False)
    assert all(is_random(open_checkpoint(path)) for path in (source, tmp_path / "orbax", tmp_path / "back"))
    assert not is_random(open_checkpoint(GOLDEN / "kimi-linear-tiny"))


# Damage after conversion.


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_flipped_bit_is_found_and_its_tensor_named(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "orbax", progress=False)
    largest = max((tmp_path / "orbax" / "arrays").rglob("*"), key=lambda path: path.stat().st_size)
    flip(largest, largest.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"arrays/000000: \S+ has checksum .* was recorded"):
        verify(open_checkpoint(tmp_path / "orbax"), show=False)
    with pytest.raises(CheckpointError, match="doesn't have the checksum that was recorded"):
        convert(tmp_path / "orbax", tmp_path / "back", to="hf", progress=False)
    with pytest.raises(CheckpointError, match="hasn't finished"):
        open_checkpoint(tmp_path / "back")


def test_a_flipped_bit_in_a_written_safetensors_file_is_found(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "source", k3_config())
    verify(open_checkpoint(source), show=False)
    (file,) = source.glob("*.safetensors")
    flip(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001.safetensors: \S+ has checksum"):
        verify(open_checkpoint(source), show=False)
    with pytest.raises(CheckpointError, match="no recorded checksums"):
        verify(CheckpointReader(GOLDEN / "kimi-linear-tiny"), show=False)


def test_missing_truncated_and_damaged_files_are_listed_together(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "orbax", array_bytes=2**16, progress=False)
    orbax = tmp_path / "orbax"
    pieces = sorted((orbax / "arrays").iterdir())
    assert len(pieces) > 3
    data = [max(piece.rglob("*"), key=lambda path: path.stat().st_size) for piece in pieces]
    data[0].unlink()
    with data[1].open("r+b") as file:
        file.truncate(10)
    (orbax / "pieces" / f"{pieces[2].name}.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        ConvertedCheckpoint(orbax)
    message = str(caught.value)
    assert f"{data[0]} is missing" in message
    assert f"{data[1]} has 10 bytes" in message
    assert f"the record of piece {pieces[2].name} is missing" in message
    assert "3 problems" in message


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda record: record["arrays"].pop(0), "missing: language_model.model.embed_tokens.weight"),
        (lambda record: record["arrays"].append(record["arrays"][0]), "don't make up"),
        (lambda record: record["arrays"][0].update(layer=7), "don't make up"),
        (lambda record: record["arrays"][0].update(dtype="F32"), "its record says float32"),
        (lambda record: record["arrays"][0].update(key="../../x"), "'key' a plain name"),
        (lambda record: record["arrays"][0].update(shape=[-1]), "'shape' must be a list of sizes"),
        (lambda record: record["arrays"][0].update(tensors=[]), "one for each place"),
        (lambda record: record.update(files={"/etc/passwd": 1}), "'files' must be"),
        (lambda record: record.update(arrays=1), "'arrays' must be"),
        (lambda record: record["arrays"][0].update(dtype="pickle"), "'dtype' must be one of"),
    ],
)
def test_a_damaged_record_is_refused(tmp_path: Path, source: Path, change: Callable[[Any], object], part: str) -> None:
    convert(source, tmp_path / "orbax", progress=False)
    path = tmp_path / "orbax" / "pieces" / "000000.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(CheckpointError) as caught:
        load_params(open_checkpoint(tmp_path / "orbax"), Decoder(KimiConfig.from_directory(source)), "float32")
    assert part in str(caught.value)


# Sources that can't be converted.


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_raw(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    header, data = header_of(path)
    change(header)
    write_raw(path, json.dumps(header).encode(), data)


def overlapping(header: dict[str, Any]) -> None:
    begin, end = header[f"{EXPERT}_packed"]["data_offsets"]
    header[f"{EXPERT}_packed"]["data_offsets"] = [begin - 1, end - 1]


def test_faulty_files_are_refused_by_name(tmp_path: Path, source: Path) -> None:
    file = source / "model.safetensors"
    whole = file.read_bytes()
    header, data = header_of(file)
    text = json.dumps(header).encode()

    faults: dict[str, Callable[[], object]] = {
        "belong to no tensor|must be two integers": lambda: file.write_bytes(whole[:-100]),
        "announces a header of": lambda: write_raw(file, text, data, length=2 * len(whole)),
        f"'{EXPERT}_packed' overlaps": lambda: edit_header(file, overlapping),
        f"'{EXPERT}_packed' has data_offsets": lambda: edit_header(
            file, lambda header: header[f"{EXPERT}_packed"].update(data_offsets=[0, 2**40])
        ),
        f"the same key more than once: '{EXPERT}_packed'": lambda: write_raw(
            file, text.replace(f"{EXPERT}_scale".encode(), f"{EXPERT}_packed".encode()), data
        ),
        "nests deeper": lambda: write_raw(file, b'{"a":' * 100_000, data),
        "isn't a regular file": lambda: (file.unlink(), file.mkdir()),
    }
    for part, damage in faults.items():
        damage()
        message = refuse(source, tmp_path / "orbax")
        assert str(file) in message
        assert any(option in message for option in part.split("|")), message
        assert not (tmp_path / "orbax").exists()
        shutil.rmtree(source)
        plain_checkpoint(source, k3_config(), {})
        file.write_bytes(whole)
    convert(source, tmp_path / "orbax", progress=False)


def test_a_header_bomb_is_refused_unread(tmp_path: Path, source: Path) -> None:
    file = source / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(struct.pack("<Q", 2**30))
        opened.truncate(2**31)
    assert "at most 100000000" in refuse(source, tmp_path / "orbax")


def test_missing_shards_and_tensors_in_two_files_are_named(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    source = random_checkpoint(tmp_path / "source", k3_config(), shard_bytes=100_000)
    files = sorted(path.name for path in source.glob("*.safetensors"))
    assert len(files) > 3
    (source / MARKER).unlink()
    (source / files[1]).rename(tmp_path / "kept")
    assert f"names files that don't exist: '{files[1]}'" in refuse(source, tmp_path / "orbax")
    (source / INDEX).unlink()
    assert "these are missing: 2" in refuse(source, tmp_path / "orbax")
    (tmp_path / "kept").rename(source / files[1])
    write_safetensors(source / "again.safetensors", {A_LOG: tensors[A_LOG]})
    message = refuse(source, tmp_path / "orbax")
    assert f"both hold: '{A_LOG}'" in message
    assert "again.safetensors" in message


@pytest.mark.parametrize("place", ["../outside.safetensors", "{outside}", "link.safetensors"])
def test_an_index_that_leaves_the_directory_is_refused(tmp_path: Path, source: Path, place: str) -> None:
    outside = tmp_path / "outside.safetensors"
    (source / "model.safetensors").rename(outside)
    (source / "link.safetensors").symlink_to(outside)
    names = CheckpointReader(plain_checkpoint(tmp_path / "copy", k3_config(), {"a": np.ones(1, np.float32)})).names()
    place = place.format(outside=outside)
    (source / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, place)}))
    message = refuse(source, tmp_path / "orbax")
    assert place in message
    assert "inside the directory" in message or "outside the directory" in message


def test_a_linked_tokenizer_that_leads_out_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    (source / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    assert f"{source / 'tokenizer.json'} is a link to" in refuse(source, tmp_path / "orbax")


def test_all_tensors_that_dont_fit_are_listed_together(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    wrong = dict(tensors)
    del wrong[f"{LAYER}self_attn.g_proj.weight"]
    del wrong[f"{EXPERT}_packed"]
    wrong[f"{LAYER}self_attn.o_proj.weight"] = wrong[f"{LAYER}self_attn.o_proj.weight"].T.copy()
    wrong[f"{LAYER}input_layernorm.weight"] = np.ones(80, np.int32)
    wrong["language_model.model.layers.2.input_layernorm.weight"] = np.ones(80, np.float32)
    wrong[A_LOG] = np.zeros(100, np.float32)
    wrong[EXPERT.replace("w1", "w2") + "_scale"] = np.zeros((64, 3), np.uint8)
    source = plain_checkpoint(tmp_path / "source", k3_config(), wrong)
    message = refuse(source, tmp_path / "orbax")
    file = source / "model.safetensors"
    for part in (
        f"missing: {LAYER}self_attn.g_proj.weight [128, 80]",
        f"missing: {EXPERT}_packed [64, 32]",
        f"{file}: wrong shape: {LAYER}self_attn.o_proj.weight is [128, 80], the config makes it [80, 128]",
        f"{file}: wrong dtype: {LAYER}input_layernorm.weight is int32",
        f"{file}: unexpected: language_model.model.layers.2.input_layernorm.weight [80]",
        f"{file}: wrong shape: {A_LOG} is [100], the config makes it [4] or [1, 1, 4, 1] or a vector padded with zeros",
        f"{file}: wrong shape: {EXPERT.replace('w1', 'w2')}_scale is [64, 3], the config makes it [64, 2]",
        "(7 problems)",
    ):
        assert part in message
    assert not (tmp_path / "orbax").exists()


def test_all_wrong_values_are_listed_together_and_good_pieces_kept(
    tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    wrong = {name: tensor.copy() for name, tensor in tensors.items()}
    wrong[f"{EXPERT}_scale"][3, 1] = 255
    wrong[f"{LAYER}self_attn.o_proj.weight"][1, 1] = np.nan
    wrong[A_LOG][20] = 1e-30
    source = plain_checkpoint(tmp_path / "source", k3_config(), wrong)
    message = refuse(source, tmp_path / "orbax", array_bytes=2**16)
    file = source / "model.safetensors"
    assert f"{file}: {EXPERT}_scale holds the scale byte 255, which is NaN" in message
    assert f"{file}: {LAYER}self_attn.o_proj.weight holds NaN" in message
    assert (
        f"{file}: {A_LOG} has 128 values for 4 heads with a tail that isn't zero; accepted are [4], [1, 1, 4, 1]"
        in message
    )
    assert "(3 problems)" in message
    marker = read_marker(tmp_path / "orbax")
    assert marker is not None
    assert not marker.complete
    done = len(list((tmp_path / "orbax" / "pieces").iterdir()))
    assert 0 < done < marker.pieces
    # Without conversion the loader finds the same, and names the same.
    with pytest.raises(CheckpointError) as caught:
        load_params(open_checkpoint(source), Decoder(KimiConfig.from_directory(source)), "float32")
    assert sorted(str(caught.value).splitlines()[1:]) == sorted(message.splitlines()[1:])


@pytest.mark.parametrize("tail", [1.0, -0.0, np.nan])
def test_a_tail_of_A_log_that_isnt_zero_is_refused_by_the_loader_too(
    tmp_path: Path, tensors: dict[str, np.ndarray], tail: float
) -> None:
    padded = tensors[A_LOG].copy()
    padded[-1] = tail
    source = plain_checkpoint(tmp_path / "source", k3_config(), tensors | {A_LOG: padded})
    with pytest.raises(CheckpointError, match=f"{A_LOG} has 128 values for 4 heads"):
        load_params(open_checkpoint(source), Decoder(KimiConfig.from_directory(source)), "float32")


# Destinations that can't be written.


def test_destinations_that_hold_something_else_are_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError, match=r"isn't empty and holds no conversion: thesis\.tex"):
        convert(source, tmp_path / "full", progress=False)
    for destination in (source, source / "inside", tmp_path):
        with pytest.raises(CheckpointError, match="must be separate directories"):
            convert(source, destination, progress=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="isn't a directory"):
        convert(source, tmp_path / "file", progress=False)
    convert(source, tmp_path / "orbax", progress=False)
    convert(tmp_path / "orbax", tmp_path / "back", to="hf", progress=False)
    with pytest.raises(CheckpointError, match="already holds a Hugging Face checkpoint"):
        convert(source, tmp_path / "back", progress=False)
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        convert(tmp_path / "orbax", tmp_path / "again", progress=False)
    with pytest.raises(CheckpointError, match="holds no converted checkpoint"):
        convert(source, tmp_path / "again", to="hf", progress=False)


def test_an_unfinished_destination_of_another_source_is_refused(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    wrong = {name: tensor.copy() for name, tensor in tensors.items()}
    wrong[f"{EXPERT}_scale"][0, 0] = 255
    source = plain_checkpoint(tmp_path / "source", k3_config(), wrong)
    refuse(source, tmp_path / "orbax", array_bytes=2**16)
    plain_checkpoint(source, k3_config(), tensors)
    with pytest.raises(
        CheckpointError, match="an unfinished conversion of another source, or of this one before its files"
    ):
        convert(source, tmp_path / "orbax", progress=False)


def test_two_converters_on_one_destination(tmp_path: Path, source: Path) -> None:
    (tmp_path / "orbax").mkdir()
    with hold(tmp_path / "orbax"):
        assert "is being written by process" in refuse(source, tmp_path / "orbax")
    convert(source, tmp_path / "orbax", progress=False)


def test_too_little_disk_or_memory_is_said_before_anything_is_written(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
        message = refuse(source, tmp_path / "orbax")
    assert "needs 16.4 MiB of disk" in message
    assert "(1.0 MiB free)" in message
    with monkeypatch.context() as patched:
        patched.setattr("kimi_jax.checkpoint.resources.available_memory", lambda: 2**29)
        message = refuse(source, tmp_path / "orbax")
    assert "of memory (512.0 MiB available)" in message
    assert not (tmp_path / "orbax").exists()


def test_a_disk_that_fills_up_is_named_and_the_run_can_go_on(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, calls = ocp.save, []

    def full(path: str, tree: Any) -> None:
        calls.append(path)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        save(path, tree)

    with monkeypatch.context() as patched:
        patched.setattr(store.ocp, "save", full)
        message = refuse(source, tmp_path / "orbax", array_bytes=2**16)
    assert "No space left on device" in message
    assert str(tmp_path / "orbax") in message
    done = convert(source, tmp_path / "orbax", progress=False, verify=True)
    assert 0 < done.written < done.nbytes

    def full_file(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full_file)
        message = refuse(tmp_path / "orbax", tmp_path / "back", to="hf")
    assert "no space left on the device" in message
    convert(tmp_path / "orbax", tmp_path / "back", to="hf", progress=False, verify=True)


def test_a_read_only_destination_is_named(source: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        parent = Path(place)
        copy = shutil.copytree(source, parent / "source")
        (parent / "sealed").mkdir(mode=0o555)
        parent.chmod(0o755)
        # The superuser may write anywhere, so somebody else tries.
        before = os.geteuid()
        if before == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(CheckpointError) as caught:
                convert(copy, parent / "sealed" / "orbax", progress=False)
        finally:
            os.seteuid(before)
        assert str(caught.value).startswith(
            f"destination {parent / 'sealed' / 'orbax'} can't be written: Permission denied"
        )


@pytest.mark.parametrize("options", [{"array_bytes": 1}, {"array_bytes": 2**31}])
def test_illegal_arguments(tmp_path: Path, source: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        convert(source, tmp_path / "orbax", **options)
