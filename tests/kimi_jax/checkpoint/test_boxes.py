"""Cutting arrays into boxes, and reading boxes of tensors, against plain NumPy slicing."""

from pathlib import Path

import numpy as np
import pytest

from kimi_jax.checkpoint import CheckpointError, SafetensorsFile, write_safetensors
from kimi_jax.checkpoint.boxes import Box

SHAPES = [(), (7,), (1, 9), (4, 6, 5), (3, 1, 2, 8), (2, 3, 4, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most", [1, 2, 3, 7, 16, 1000])
def test_parts_are_adjacent_runs_that_make_up_the_whole(shape: tuple[int, ...], most: int) -> None:
    values = np.arange(int(np.prod(shape))).reshape(shape)
    parts = list(Box.whole(shape).split(most))
    for part in parts:
        assert part.size <= most
        assert part.is_run(shape)
        assert values[part.slices].reshape(-1)[0] == part.first(shape)
    np.testing.assert_array_equal(
        np.concatenate([values[part.slices].reshape(-1) for part in parts]), values.reshape(-1)
    )


def test_parts_of_a_cut_have_nearly_equal_sizes() -> None:
    rows = [part.shape[0] for part in Box.whole((10, 3)).split(12)]
    assert sum(rows) == 10
    assert max(rows) - min(rows) <= 1


def test_cutting_stops_at_the_axes_that_may_be_cut() -> None:
    assert [part.shape for part in Box.whole((2, 3, 5)).split(1, axes=2)] == [(1, 1, 5)] * 6
    assert list(Box.whole((4, 5)).split(1, axes=0)) == [Box.whole((4, 5))]


def test_boxes_that_arent_runs() -> None:
    assert not Box((0, 0), (2, 3)).is_run((2, 4))
    assert not Box((0, 2), (1, 3)).is_run((2, 4))
    assert Box((1, 1), (1, 3)).is_run((2, 4))


def test_intersections_equal_those_of_index_sets() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        boxes = []
        for _ in range(2):
            start = random.integers(0, 4, 3)
            boxes.append(Box(tuple(start.tolist()), tuple((random.integers(1, 4, 3)).tolist())))
        grids = [np.zeros((8, 8, 8), bool) for _ in boxes]
        for grid, box in zip(grids, boxes, strict=True):
            grid[box.slices] = True
        shared = boxes[0].intersect(boxes[1])
        both = grids[0] & grids[1]
        assert (shared is None) == (not both.any())
        if shared is not None:
            np.testing.assert_array_equal(np.argwhere(both)[0], shared.start)
            assert both.sum() == shared.size
            assert shared.within(boxes[0]).start == tuple(np.subtract(shared.start, boxes[0].start))


def test_slices_of_shardings_become_boxes() -> None:
    assert Box.of_slices((slice(None), slice(2, 4), slice(3, None)), (5, 6, 7)) == Box((0, 2, 3), (5, 2, 4))


@pytest.mark.parametrize("shape", SHAPES)
def test_any_box_of_a_tensor_is_read_as_numpy_slices_it(tmp_path: Path, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    values = random.integers(0, 1 << 16, shape, np.uint16)
    before, after = np.ones(3, np.uint8), np.zeros(5, np.uint8)
    write_safetensors(tmp_path / "a.safetensors", {"before": before, "values": values, "zafter": after})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    for _ in range(40):
        start = tuple(int(random.integers(0, size)) for size in shape)
        box = Box(start, tuple(int(random.integers(1, size - a + 1)) for a, size in zip(start, shape, strict=True)))
        out = np.zeros(box.shape, np.uint16)
        read = file.bytes_read
        file.read_box("values", box, out)
        np.testing.assert_array_equal(out, values[box.slices])
        assert file.bytes_read - read == out.nbytes


def test_many_short_rows_are_read_with_what_lies_between(tmp_path: Path) -> None:
    values = np.arange(5000 * 40, dtype=np.int32).reshape(5000, 40)
    write_safetensors(tmp_path / "a.safetensors", {"a": values})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    out = np.zeros((5000, 10), np.int32)
    file.read_box("a", Box((0, 20), (5000, 10)), out)
    np.testing.assert_array_equal(out, values[:, 20:30])
    assert file.bytes_read == values.nbytes


def test_the_first_elements_can_be_seen_in_another_shape(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"a": np.arange(10, dtype=np.float32)})
    out = np.zeros((1, 2), np.float32)
    SafetensorsFile(tmp_path / "a.safetensors").read_box("a", Box((1, 1), (1, 2)), out, (2, 4))
    np.testing.assert_array_equal(out, [[5, 6]])


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"a": np.zeros(4096, np.float32)})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    out = np.zeros(4096, np.float32)
    file.read_box("a", Box.whole((4096,)), out)
    with (tmp_path / "a.safetensors").open("r+b") as opened:
        opened.truncate(1000)
    with pytest.raises(CheckpointError, match=r"a\.safetensors had .* and is shorter now"):
        file.read_box("a", Box.whole((4096,)), out)
    with pytest.raises(CheckpointError, match="holds no tensor 'b'"):
        file.read_box("b", Box.whole((1,)), out)
