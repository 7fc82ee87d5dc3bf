"""Conversions of 100 MB that are killed, and the memory that conversions take."""

import json
import random
import subprocess
import time
from pathlib import Path

import pytest

from kimi_jax.checkpoint import CheckpointError, CheckpointReader
from kimi_jax.checkpoint.convert import convert
from kimi_jax.checkpoint.converted import ConvertedCheckpoint
from kimi_jax.checkpoint.manifest import MARKER
from kimi_jax.checkpoint.opened import open_checkpoint
from kimi_jax.checkpoint.to_huggingface import JOURNAL
from tests.kimi_jax.checkpoint.sources import command, environment, linear_config, random_checkpoint, run, run_script

KILLS = 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("linear") / "source", linear_config(), shard_bytes=2**24)


def records(directory: Path) -> list[object]:
    """What a converted directory says it holds, with the checksum of every tensor."""
    return [json.loads(path.read_text())["arrays"] for path in sorted((directory / "pieces").iterdir())]


def count(directory: Path) -> int:
    """Steps that a conversion has finished."""
    journal = directory / JOURNAL
    if journal.exists():
        return journal.read_text().count("\n")
    pieces = directory / "pieces"
    return len(list(pieces.glob("*.json"))) if pieces.is_dir() else 0


def kill_after(arguments: list[str], directory: Path, steps: int, delay: float) -> bool:
    """Starts a conversion, waits for so many more finished steps and a moment, and kills it; False if it had ended."""
    until = count(directory) + steps
    process = subprocess.Popen(arguments, env=environment(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None and count(directory) < until:
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    return process.wait() != 0


@pytest.mark.slow
def test_killed_conversions_end_as_undisturbed_ones(tmp_path: Path, source: Path) -> None:
    moments = random.Random(0)
    calm, killed, back = tmp_path / "calm", tmp_path / "killed", tmp_path / "back"
    options = ("--array-mib", "4")
    convert(source, calm, array_bytes=4 * 2**20, progress=False)
    for _ in range(KILLS):
        assert kill_after(
            command("convert", source, killed, *options), killed, moments.randint(1, 5), moments.random() / 20
        )
        with pytest.raises(CheckpointError, match="hasn't finished"):
            open_checkpoint(killed)
    done = count(killed)
    assert done >= KILLS
    stamps = {path: path.stat().st_mtime_ns for path in (killed / "pieces").iterdir()}
    last = run("convert", source, killed, *options, "--verify")
    assert f"continues an earlier run, which did {done} of {count(calm)} pieces" in last.stderr
    assert "every checksum verified" in last.stdout
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert records(killed) == records(calm)
    assert {path.name for path in killed.iterdir()} == {path.name for path in calm.iterdir()}

    # The way back is killed too.
    assert kill_after(command("convert", killed, back, "--to", "hf"), back, moments.randint(2, 8), 0.0)
    with pytest.raises(CheckpointError, match="hasn't finished"):
        open_checkpoint(back)
    assert not (back / "config.json").exists()
    assert "continues an earlier run" in run("convert", killed, back, "--to", "hf", "--verify").stderr
    a, b = CheckpointReader(source), CheckpointReader(back)
    assert [file.path.name for file in a.files] == [file.path.name for file in b.files]
    for file in a.files:
        assert (back / file.path.name).read_bytes() == file.path.read_bytes()
    assert not (back / JOURNAL).exists()


def test_a_conversion_killed_while_it_finishes_can_be_continued(tmp_path: Path, source: Path) -> None:
    """Between the last piece and the marker, and with rests of every kind lying about."""
    target = tmp_path / "orbax"
    convert(source, target, array_bytes=2**25, progress=False)
    marker = json.loads((target / MARKER).read_text())
    (target / MARKER).write_text(json.dumps(marker | {"complete": False}))
    (target / "config.json").unlink()
    (target / ".config.json.partial").write_text("{")
    (target / ".kimi_jax.json.0000.partial").write_text("{")
    (target / "pieces" / ".000001.json.0000.partial").write_text("{")
    (target / "arrays" / "000001.orbax-checkpoint-tmp").mkdir()
    # A piece whose record is there and whose data isn't is done again.
    data = max((target / "arrays" / "000002").rglob("*"), key=lambda path: path.stat().st_size)
    data.unlink()
    last = run("convert", source, target, "--array-mib", "64", "--verify")
    pieces = len(ConvertedCheckpoint(target).pieces)
    assert f"which did {pieces - 1} of {pieces} pieces" in last.stderr
    assert not list(target.rglob("*partial*")) + list(target.rglob("*tmp*"))


MEMORY = """
import resource, sys
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
from kimi_jax.checkpoint.convert import convert
convert(sys.argv[1], sys.argv[2], array_bytes=2**22, progress=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for source in sys.argv[3:]:
    convert(source, Path(sys.argv[2]).with_name("orbax-" + Path(source).name), array_bytes=2**22, progress=False)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_memory_doesnt_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Above what a first conversion took, larger ones take no more than the bound on arrays explains."""
    layers = [linear_config(num_experts=experts, vocab_size=1024) for experts in (16, 48, 96)]
    directories = [random_checkpoint(tmp_path / f"source{number}", config) for number, config in enumerate(layers)]
    sizes = [sum(file.stat().st_size for file in directory.glob("*.safetensors")) for directory in directories]
    assert sizes[2] > 3 * sizes[0]
    printed = run_script(MEMORY, directories[0], tmp_path / "orbax", *directories[1:])
    assert max(map(int, printed.split())) < 2 * 2**22 + 24 * 2**20 < sizes[2] / 2
