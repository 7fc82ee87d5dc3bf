"""Safetensors files: agreement with the safetensors package, and all ways in which a file or directory can be wrong."""

import gc
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from kimi_jax.checkpoint import CheckpointError, CheckpointReader, SafetensorsFile, write_safetensors

GOLDEN = Path(__file__).parents[1] / "golden"
INDEX = "model.safetensors.index.json"
F32_PAIR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}

NATIVE = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
)
NARROW = {
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


def native_tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {name: random.integers(0, 2, (3, 5)).astype(name) for name in NATIVE}
    return tensors | {
        "scalar": np.array(7, np.int64),
        "empty": np.empty((0, 4), np.float32),
        "one": np.ones(1, np.bool_),
    }


def raw(path: Path, header: Mapping[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> Path:
    """Writes a file byte by byte, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def save(path: Path, **tensors: np.ndarray) -> Path:
    write_safetensors(path, tensors)
    return path


def write_index(directory: Path, weight_map: Mapping[str, Any]) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


def ones(count: int = 2) -> np.ndarray:
    return np.ones(count, np.float32)


# Agreement with the format.


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    tensors = native_tensors()
    safetensors.numpy.save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "np"})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert set(file.names()) == set(tensors)
    assert file.metadata == {"format": "np"}
    for name, tensor in tensors.items():
        assert file.shape(name) == tensor.shape
        assert file.dtype(name) == file.tensor(name).dtype == tensor.dtype
        np.testing.assert_array_equal(file.tensor(name), tensor)


def test_the_package_reads_what_we_write(tmp_path: Path) -> None:
    tensors = native_tensors()
    # Views that aren't contiguous are stored in their logical order.
    tensors["transposed"] = np.arange(12, dtype=np.float32).reshape(3, 4).T
    tensors["strided"] = np.arange(12, dtype=np.int32)[::3]
    write_safetensors(tmp_path / "a.safetensors", tensors, {"format": "np"})
    found = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name], tensor)


def test_narrow_floats_keep_every_bit(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8)
    tensors: dict[str, np.ndarray] = {name: codes.view(dtype) for name, dtype in NARROW.items()}
    write_safetensors(tmp_path / "a.safetensors", tensors)
    data = (tmp_path / "a.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    file = SafetensorsFile(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        assert header[name]["dtype"] == name
        start, stop = header[name]["data_offsets"]
        assert data[8 + length + start : 8 + length + stop] == codes.tobytes()
        assert file.dtype(name) == tensor.dtype
        np.testing.assert_array_equal(file.tensor(name).view(np.uint8), codes)
    # bfloat16 is the upper half of float32.
    upper = (codes.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(file.tensor("BF16").astype(np.float32), upper)


def test_written_tensors_are_aligned(tmp_path: Path) -> None:
    file = SafetensorsFile(
        save(tmp_path / "a.safetensors", a=np.ones(3, np.uint8), b=np.ones(3, np.float64), c=ones(1))
    )
    assert all(file.tensor(name).flags.aligned for name in file.names())


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    values = np.array([1.5, -2.5], np.float32)
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    file = SafetensorsFile(raw(tmp_path / "a.safetensors", header, b"\x07" + values.tobytes()))
    np.testing.assert_array_equal(file.tensor("b"), values)


def test_tensors_are_read_only_views_that_release_the_file(tmp_path: Path) -> None:
    path = save(tmp_path / "a.safetensors", a=np.zeros(1 << 20, np.float32))

    def mapped() -> bool:
        return str(path.resolve()) in Path("/proc/self/maps").read_text()

    file = SafetensorsFile(path)
    assert not mapped()
    tensor = file.tensor("a")
    assert mapped()
    assert not tensor.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        tensor[0] = 1
    del file
    assert tensor.sum() == 0
    del tensor
    gc.collect()
    assert not mapped()


@pytest.mark.parametrize("family", ["kimi-linear-tiny", "kimi-k3-tiny", "kimi-k3-tiny-mxfp4", "kimi-k31-tiny"])
def test_reads_reference_checkpoints(family: str) -> None:
    reader = CheckpointReader(GOLDEN / family)
    weight_map = json.loads((GOLDEN / family / INDEX).read_text())["weight_map"]
    assert reader.names() == weight_map.keys()
    sizes = [reader.read(name).nbytes for name in reader.names()]
    total = json.loads((GOLDEN / family / INDEX).read_text())["metadata"]["total_size"]
    assert sum(sizes) == total
    for name, file in weight_map.items():
        assert reader.file_of(name) == GOLDEN / family / file
        assert reader.read(name).shape == reader.shape(name)
    floats = [name for name in weight_map if reader.dtype(name) == np.float32]
    with safetensors.safe_open(GOLDEN / family / weight_map[floats[0]], framework="numpy") as file:
        np.testing.assert_array_equal(reader.read(floats[0]), file.get_tensor(floats[0]))


# Files that aren't what they claim.


@pytest.mark.parametrize(
    ("header", "data", "part"),
    [
        ({"a": F32_PAIR | {"dtype": "F4"}}, b"\0" * 8, "dtype 'F4'"),
        ({"a": F32_PAIR | {"dtype": ["F32"]}}, b"\0" * 8, "dtype ['F32']"),
        ({"a": F32_PAIR | {"shape": [3]}}, b"\0" * 8, "has 8 bytes; F32 of shape [3] needs 12"),
        ({"a": F32_PAIR | {"shape": [-2]}}, b"\0" * 8, "shape [-2]"),
        ({"a": F32_PAIR | {"shape": [2.0]}}, b"\0" * 8, "shape [2.0]"),
        ({"a": F32_PAIR | {"shape": [True, 2]}}, b"\0" * 8, "shape [True, 2]"),
        ({"a": F32_PAIR | {"shape": 2}}, b"\0" * 8, "shape 2"),
        ({"a": F32_PAIR | {"shape": [1] * 33 + [2]}}, b"\0" * 8, "at most 32"),
        ({"a": F32_PAIR | {"shape": [2**62, 2**62]}}, b"\0" * 8, "has 8 bytes"),
        ({"a": F32_PAIR}, b"\0" * 7, "data_offsets [0, 8]"),
        ({"a": F32_PAIR}, b"\0" * 9, "1 bytes after the last tensor"),
        ({"a": F32_PAIR | {"data_offsets": [8, 0]}}, b"\0" * 8, "ascending"),
        ({"a": F32_PAIR | {"data_offsets": [-8, 0]}}, b"\0" * 8, "data_offsets [-8, 0]"),
        ({"a": F32_PAIR | {"data_offsets": [0]}}, b"\0" * 8, "data_offsets [0]"),
        ({"a": F32_PAIR | {"data_offsets": [0, 2**64]}}, b"\0" * 8, "data_offsets"),
        ({"a": F32_PAIR, "b": F32_PAIR}, b"\0" * 8, "overlaps"),
        ({"a": F32_PAIR, "b": F32_PAIR | {"data_offsets": [4, 12]}}, b"\0" * 12, "'b' overlaps 'a'"),
        ({"a": F32_PAIR, "b": F32_PAIR | {"data_offsets": [12, 20]}}, b"\0" * 20, "gap of 4 bytes after 'a'"),
        ({"a": F32_PAIR | {"data_offsets": [4, 12]}}, b"\0" * 12, "gap of 4 bytes after the header"),
        ({}, b"\0", "1 bytes after the last tensor"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, "data_offsets, dtype, shape"),
        ({"a": F32_PAIR | {"stride": 1}}, b"\0" * 8, "exactly"),
        ({"a": 1}, b"", "exactly"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
        ({"__metadata__": "pt"}, b"", "__metadata__"),
        (b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": 1}', b"", "more than once: 'a'"),
        (b"[]", b"", "isn't a JSON object"),
        (b"", b"", "damaged"),
        (b"{", b"", "damaged"),
        (b'{"\xff": 1}', b"", "damaged"),
        (b'{"a":' * 100_000, b"", "nests deeper"),
        (b'{"a":[' + b"[]," * 9_000_000 + b"0]}", b"", "more than 8000000 values"),
        (b'{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}', b"", "isn't valid Unicode"),
    ],
)
def test_a_faulty_header_names_file_and_fault(
    tmp_path: Path, header: dict[str, Any] | bytes, data: bytes, part: str
) -> None:
    path = raw(tmp_path / "a.safetensors", header, data)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    assert part in str(caught.value)


@pytest.mark.parametrize("length", [3, 100, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(CheckpointError, match="at most 2"):
        SafetensorsFile(raw(tmp_path / "a.safetensors", {}, length=length))


def test_a_header_of_more_than_100_megabytes_is_refused_unread(tmp_path: Path) -> None:
    path = raw(tmp_path / "a.safetensors", {}, length=100_000_001)
    with path.open("r+b") as file:
        file.truncate(200_000_000)
    with pytest.raises(CheckpointError, match="at most 100000000"):
        SafetensorsFile(path)


def test_what_isnt_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.safetensors").write_bytes(b"1234567")
    with pytest.raises(CheckpointError, match="7 bytes, too few"):
        SafetensorsFile(tmp_path / "short.safetensors")
    with pytest.raises(CheckpointError, match="isn't a regular file"):
        SafetensorsFile(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="isn't a regular file"):
        SafetensorsFile(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match=r"absent\.safetensors can't be read: No such file"):
        SafetensorsFile(tmp_path / "absent.safetensors")


def test_a_file_truncated_after_opening_is_refused(tmp_path: Path) -> None:
    file = SafetensorsFile(save(tmp_path / "a.safetensors", a=ones(4096)))
    os.truncate(tmp_path / "a.safetensors", 1000)
    with pytest.raises(CheckpointError, match="has 1000 now"):
        file.tensor("a")


def test_bools_other_than_0_and_1_are_refused(tmp_path: Path) -> None:
    header = {"a": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}}
    file = SafetensorsFile(raw(tmp_path / "a.safetensors", header, b"\x01\x02"))
    with pytest.raises(CheckpointError, match="'a' is BOOL"):
        file.tensor("a")


def test_an_absent_tensor_is_named(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", a=ones())
    with pytest.raises(CheckpointError, match="holds no tensor 'b'"):
        SafetensorsFile(tmp_path / "model.safetensors").tensor("b")
    with pytest.raises(CheckpointError, match="holds no tensor 'b'"):
        CheckpointReader(tmp_path).shape("b")


# Directories.


def test_a_directory_without_index_takes_model_safetensors_alone(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", a=ones())
    save(tmp_path / "adapter.safetensors", b=ones())
    assert set(CheckpointReader(tmp_path).names()) == {"a"}


def test_a_directory_without_index_takes_all_shards(tmp_path: Path) -> None:
    save(tmp_path / "model-00001-of-00002.safetensors", a=ones())
    save(tmp_path / "model-00002-of-00002.safetensors", b=ones(3))
    reader = CheckpointReader(str(tmp_path))
    assert set(reader.names()) == {"a", "b"}
    assert reader.shape("b") == (3,)
    assert reader.file_of("b") == tmp_path / "model-00002-of-00002.safetensors"


def test_missing_numbers_of_shards_are_listed(tmp_path: Path) -> None:
    save(tmp_path / "model-00002-of-000004.safetensors", a=ones())
    with pytest.raises(CheckpointError, match="missing: 1, 3, 4"):
        CheckpointReader(tmp_path)
    save(tmp_path / "other-1-of-999999999.safetensors", b=ones())
    with pytest.raises(CheckpointError, match="999999999 files"):
        CheckpointReader(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "x.safetensors", a=ones(), b=ones())
    save(tmp_path / "y.safetensors", a=ones())
    with pytest.raises(CheckpointError, match=r"y\.safetensors and x\.safetensors both hold: 'a'"):
        CheckpointReader(tmp_path)


def test_empty_and_absent_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match="absent isn't a directory"):
        CheckpointReader(tmp_path / "absent")


def test_everything_wrong_with_an_index_is_listed_at_once(tmp_path: Path) -> None:
    save(tmp_path / "x.safetensors", a=ones(), unlisted=ones(), elsewhere=ones())
    save(tmp_path / "y.safetensors", b=ones(), elsewhere=ones())
    raw(tmp_path / "damaged.safetensors", b"{")
    write_index(
        tmp_path,
        {
            "a": "x.safetensors",
            "absent": "x.safetensors",
            "b": "y.safetensors",
            "elsewhere": "y.safetensors",
            "c": "gone-1.safetensors",
            "d": "gone-2.safetensors",
            "e": "damaged.safetensors",
            "f": "../up.safetensors",
        },
    )
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(tmp_path)
    message = str(caught.value)
    for part in (
        str(tmp_path),
        "'gone-1.safetensors', 'gone-2.safetensors'",
        "x.safetensors lacks tensors that model.safetensors.index.json says it holds: 'absent'",
        "x.safetensors holds tensors that model.safetensors.index.json doesn't say it holds: 'elsewhere', 'unlisted'",
        "damaged.safetensors: The header is damaged",
        "'../up.safetensors'",
        "5 problems",
    ):
        assert part in message


@pytest.mark.parametrize(
    "file",
    [
        "../a.safetensors",
        "sub/../../a.safetensors",
        "/etc/a.safetensors",
        "..\\a.safetensors",
        "C:a.safetensors",
        "a\0.safetensors",
        "model.safetensors.index.json",
        "",
        ".",
    ],
)
def test_paths_that_leave_the_directory_are_refused(tmp_path: Path, file: str) -> None:
    inside = tmp_path / "model"
    (inside / "sub").mkdir(parents=True)
    save(tmp_path / "a.safetensors", a=ones())
    write_index(inside, {"a": file})
    with pytest.raises(CheckpointError, match=r"names .*which isn't a (path inside the directory|safetensors file)"):
        CheckpointReader(inside)


def test_links_are_followed_inside_the_directory_only(tmp_path: Path) -> None:
    inside = tmp_path / "model"
    (inside / "sub").mkdir(parents=True)
    save(inside / "sub" / "real.safetensors", a=ones())
    (inside / "model.safetensors").symlink_to("sub/real.safetensors")
    assert set(CheckpointReader(inside).names()) == {"a"}

    save(tmp_path / "outside.safetensors", a=ones())
    (inside / "model.safetensors").unlink()
    (inside / "model.safetensors").symlink_to("../outside.safetensors")
    with pytest.raises(CheckpointError, match="outside the directory"):
        CheckpointReader(inside)

    (inside / "model.safetensors").unlink()
    (inside / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointError, match=r"leads nowhere|don't exist"):
        CheckpointReader(inside)


def test_a_linked_directory_is_the_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    save(tmp_path / "real" / "model.safetensors", a=ones())
    (tmp_path / "link").symlink_to("real")
    assert set(CheckpointReader(tmp_path / "link").names()) == {"a"}


def test_snapshots_of_the_hugging_face_cache_are_read(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--someone--something" / "snapshots" / "0123abc"
    blobs = tmp_path / "models--someone--something" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save(blobs / "feed", a=ones())
    (snapshot / "model.safetensors").symlink_to("../../blobs/feed")
    assert set(CheckpointReader(snapshot).names()) == {"a"}


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"{", "valid JSON"),
        (b"[]", "no weight_map"),
        (b'{"weight_map": {}}', "no weight_map"),
        (b'{"weight_map": ["a"]}', "no weight_map"),
        (b'{"weight_map": {"a": 1}}', "no file name for 'a'"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "more than once: 'a'"),
    ],
)
def test_a_faulty_index_is_refused_by_name(tmp_path: Path, content: bytes, part: str) -> None:
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(tmp_path)
    assert str(tmp_path / INDEX) in str(caught.value)
    assert part in str(caught.value)


def test_an_index_behind_a_broken_link_isnt_ignored(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", a=ones())
    (tmp_path / INDEX).symlink_to("absent.json")
    with pytest.raises(CheckpointError, match="No such file"):
        CheckpointReader(tmp_path)


# Writing.


def test_what_the_format_cant_hold_is_refused_before_writing(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(CheckpointError, match="'a' has dtype complex128"):
        write_safetensors(path, {"a": np.ones(2, np.complex128)})
    with pytest.raises(CheckpointError, match="'a' has dtype >f4"):
        write_safetensors(path, {"a": np.ones(2, ">f4")})
    with pytest.raises(CheckpointError, match="can't be the name"):
        write_safetensors(path, {"__metadata__": ones()})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.safetensors", a=ones())
    before = path.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(path, a=ones(100))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_replaces_the_old_file(tmp_path: Path) -> None:
    path = save(tmp_path / "a.safetensors", a=ones())
    view = SafetensorsFile(path).tensor("a")
    save(path, b=np.zeros(3, np.float32))
    assert set(SafetensorsFile(path).names()) == {"b"}
    # The file that was mapped lives on until its last view goes.
    np.testing.assert_array_equal(view, ones())
