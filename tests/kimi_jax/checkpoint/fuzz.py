"""Mutated headers, index files and records: each must be read within its file's bounds or refused, never anything else.

python -m tests.kimi_jax.checkpoint.fuzz SECONDS [SEED]
"""

import contextlib
import copy
import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kimi_jax.checkpoint import CheckpointError, CheckpointReader, SafetensorsFile
from kimi_jax.checkpoint.boxes import Box
from kimi_jax.checkpoint.convert import convert
from kimi_jax.checkpoint.converted import ConvertedCheckpoint
from kimi_jax.checkpoint.locate import compare
from kimi_jax.checkpoint.manifest import MARKER
from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
from tests.kimi_jax.checkpoint.sources import INDEX, k3_config, random_checkpoint

# Of the processor, so that other work on the machine doesn't count; of the clock, for one that waits for ever.
SECONDS_PER_CASE = 10
MOST_WAIT = 300
MOST_MEMORY = 300 * 2**20

HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**53,
    2**63,
    2**64,
    10**30,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "..",
    "../x.safetensors",
    "/etc/passwd",
    "a\0b",
    "x" * 100_000,
    "\ud800",
    "x" * 300 + ".safetensors",
    "\ud800.safetensors",
    "F32",
    "BOOL",
    "F8_E8M0",
    [],
    {},
    [0, 8],
    [8, 0],
    [1] * 40,
    [2**40, 2**40],
    [[[[[[]]]]]],
    {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]},
]


def nodes(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a JSON tree."""
    members = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in members:
        yield (*path, key)
        yield from nodes(value, (*path, key))


def mutate_tree(tree: Any, chance: random.Random) -> Any:
    """The tree with a few values replaced, removed, repeated or moved."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.randint(1, 3)):
        paths = list(nodes(tree))
        if not paths:
            return chance.choice(HOSTILE)
        *outer, key = chance.choice(paths)
        parent = tree
        for step in outer:
            parent = parent[step]
        kind = chance.random()
        if kind < 0.5:
            parent[key] = copy.deepcopy(chance.choice(HOSTILE))
        elif kind < 0.65:
            del parent[key]
        elif kind < 0.8 and isinstance(parent, list):
            parent.insert(chance.randrange(len(parent) + 1), copy.deepcopy(chance.choice(parent or HOSTILE)))
        elif isinstance(parent[key], int) and not isinstance(parent[key], bool):
            parent[key] += chance.choice([-1, 1, 8, -8, 2**32])
        elif isinstance(parent, dict):
            parent[chance.choice(["", "x", "\ud800", "__metadata__", *list(parent)[:5]])] = parent[key]
    return tree


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """The bytes with a few changed, removed, repeated or cut off."""
    mutated = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        if not mutated:
            break
        place = chance.randrange(len(mutated))
        kind = chance.random()
        if kind < 0.4:
            mutated[place] ^= 1 << chance.randrange(8)
        elif kind < 0.6:
            del mutated[place : place + chance.randint(1, 20)]
        elif kind < 0.8:
            mutated[place:place] = mutated[place : place + chance.randint(1, 50)]
        elif kind < 0.9:
            mutated[place:place] = chance.choice([b"[" * 5000, b'{"a":' * 3000, b"9" * 5000, b"\xff", b"\0", b"NaN"])
        else:
            del mutated[place:]
    return bytes(mutated)


def mutate_json(tree: Any, chance: random.Random) -> bytes:
    """Text of a mutated tree, or mutated text."""
    if chance.random() < 0.7:
        return json.dumps(mutate_tree(tree, chance)).encode()
    return mutate_bytes(json.dumps(tree).encode(), chance)


class Fuzzer:
    """Mutates one small checkpoint in both formats, over and over."""

    def __init__(self, place: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.results: Counter[str] = Counter()
        self.source = random_checkpoint(place / "source", k3_config(), shard_bytes=200_000)
        self.orbax = place / "orbax"
        convert(self.source, self.orbax, array_bytes=2**17, progress=False)
        self.specs = Decoder(KimiConfig.from_directory(self.source)).specs
        self.targets: list[tuple[str, Callable[[], None]]] = [
            ("header", self.header),
            ("directory", self.directory),
            ("index", self.index),
            ("marker", self.marker),
            ("record", self.record),
        ]

    def run(self, seconds: float) -> None:
        """Mutates for so long; an exception other than CheckpointError passes through."""
        signal.signal(signal.SIGPROF, _too_long)
        signal.signal(signal.SIGALRM, _too_long)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            name, target = self.chance.choice(self.targets)
            state = self.chance.getstate()
            signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_CASE)
            signal.alarm(MOST_WAIT)
            try:
                target()
                self.results[f"{name} read"] += 1
            except CheckpointError as error:
                self.results[f"{name} refused"] += 1
                if len(str(error)) > 100_000:
                    raise AssertionError(f"a message of {len(str(error))} characters") from error
            except BaseException:
                print(f"failed: {name} from random state {hash(state)}", file=sys.stderr)
                raise
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.alarm(0)

    def header(self) -> None:
        file = self.mutated_file()
        opened = SafetensorsFile(file)
        for name in opened.names():
            read_whole(
                opened.shape(name),
                opened.dtype(name),
                file.stat().st_size,
                partial(opened.read_box, name),
            )
            opened.tensor(name)

    def directory(self) -> None:
        mutated = self.mutated_file()
        with replaced(self.victim, mutated):
            reader = CheckpointReader(self.source)
            compare(reader, self.specs)

    def index(self) -> None:
        path = self.source / INDEX
        before = path.read_bytes()
        try:
            path.write_bytes(mutate_json(json.loads(before), self.chance))
            compare(CheckpointReader(self.source), self.specs)
        finally:
            path.write_bytes(before)

    def marker(self) -> None:
        self.converted(self.orbax / MARKER)

    def record(self) -> None:
        self.converted(self.chance.choice(sorted((self.orbax / "pieces").iterdir())))

    def converted(self, path: Path) -> None:
        before = path.read_bytes()
        try:
            path.write_bytes(mutate_json(json.loads(before), self.chance))
            checkpoint = ConvertedCheckpoint(self.orbax)
            compare(checkpoint, self.specs)
            for piece in checkpoint.pieces:
                for array in piece.arrays:
                    if array.nbytes <= 2**20:
                        whole = Box.whole(array.box.shape)
                        checkpoint.read_array(piece.name, array, whole, np.empty(whole.shape, array.dtype))
        finally:
            path.write_bytes(before)

    def mutated_file(self) -> Path:
        self.victim = self.chance.choice(sorted(self.source.glob("*.safetensors")))
        data = self.victim.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = mutate_json(json.loads(data[8 : 8 + length]), self.chance)
        stated = len(header)
        if self.chance.random() < 0.1:
            stated = self.chance.choice([0, 1, stated - 1, stated + 1, 2**31, 2**63, 2**64 - 1, len(data)])
        body = data[8 + length :]
        if self.chance.random() < 0.1:
            body = body[: self.chance.randrange(len(body))]
        target = self.source.parent / "mutated.safetensors"
        target.write_bytes(struct.pack("<Q", stated % 2**64) + header + body)
        return target


@contextlib.contextmanager
def replaced(place: Path, new: Path) -> Iterator[None]:
    """Puts one file in another's place for a while."""
    kept = place.with_suffix(".kept")
    place.rename(kept)
    try:
        shutil.copyfile(new, place)
        yield
    finally:
        kept.replace(place)


def read_whole(shape: tuple[int, ...], dtype: np.dtype, most: int, read: Callable[[Box, np.ndarray], None]) -> None:
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    assert size <= most, f"a tensor of {size} bytes in a file of {most}"
    read(Box.whole(shape), np.empty(shape, dtype))


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError(f"one case took more than {SECONDS_PER_CASE} s of processor time or {MOST_WAIT} s")


def main(seconds: float, seed: int) -> Counter[str]:
    """Fuzzes and returns how often what happened."""
    with tempfile.TemporaryDirectory() as place:
        fuzzer = Fuzzer(Path(place), seed)
        fuzzer.run(1.0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        fuzzer.run(seconds)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert grown < MOST_MEMORY, f"memory grew by {grown} bytes"
        return fuzzer.results


if __name__ == "__main__":
    print(json.dumps(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
