"""Loading onto meshes: one process with eight devices, and two processes that each read their own half."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kimi_jax.checkpoint.convert import convert
from tests.kimi_jax.checkpoint.sources import (
    CHECKED,
    environment,
    k3_config,
    linear_config,
    plain_checkpoint,
    random_checkpoint,
    run_script,
    tensors_of,
)

DEVICES = "--xla_force_host_platform_device_count={}"

ONE_PROCESS = """
import sys
import jax, numpy as np
from kimi_jax.checkpoint.convert import convert
from kimi_jax.checkpoint.load import load_params
from kimi_jax.checkpoint.opened import open_checkpoint
from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
from kimi_jax.sharding import RULES, ShardingError
source, orbax = sys.argv[1:]
convert(source, orbax, array_bytes=2**16, progress=False)
decoder = Decoder(KimiConfig.from_directory(source))
alone = load_params(open_checkpoint(source), decoder, "bfloat16")
whole, heads = jax.tree.leaves(alone), np.asarray(alone["kda"]["A_log"])
meshes = [((2,), ("tensor",)), ((4,), ("tensor",)), ((8,), ("tensor",)), ((2, 4), ("data", "tensor")),
          ((4, 2), ("expert", "tensor")), ((2, 2, 2), ("context", "expert", "tensor")), ((8,), ("data",))]
for number, (shape, axes) in enumerate(meshes):
    mesh = jax.make_mesh(shape, axes, devices=jax.devices()[: int(np.prod(shape))])
    for path in (source, orbax):
        # One byte in flight: every part waits for the one before it. Otherwise devices' parts are read together.
        bound = 1 if (number + (path == orbax)) % 2 else 2**30
        params = load_params(open_checkpoint(path), decoder, "bfloat16", mesh=mesh, bytes_in_flight=bound)
        leaves = jax.tree.leaves(params)
        for a, b in zip(whole, leaves, strict=True):
            assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert all(leaf.sharding.device_set == set(mesh.devices.flat) for leaf in leaves)
        split = mesh.shape.get("tensor", 1)
        for shard in params["kda"]["A_log"].addressable_shards:
            assert shard.data.shape == (1, 8 // split)
            np.testing.assert_array_equal(np.asarray(shard.data), heads[shard.index])
    print(dict(mesh.shape))
def mesh_of(count, axis):
    return jax.make_mesh((count,), (axis,), devices=jax.devices()[:count])
try:
    load_params(open_checkpoint(orbax), decoder, "bfloat16", mesh=mesh_of(3, "tensor"))
except ShardingError as error:
    print(error)
rules = dict.fromkeys(RULES) | {"embed": "rows"}
rows = load_params(open_checkpoint(orbax), decoder, "bfloat16", mesh=mesh_of(2, "rows"), rules=rules)
print(*rows["embed"].sharding.spec)
"""


def test_any_mesh_gets_the_same_values_as_one_device(tmp_path: Path) -> None:
    """H16 too: each shard of a padded A_log holds its own heads' values."""
    config = k3_config(num_experts=8, moe_intermediate_size=256, num_attention_heads=8, num_key_value_heads=8)
    config["text_config"]["linear_attn_config"] |= {"num_heads": 8}
    source = random_checkpoint(tmp_path / "source", config)
    lines = run_script(CHECKED + ONE_PROCESS, source, tmp_path / "orbax", XLA_FLAGS=DEVICES.format(8)).splitlines()
    assert len(lines) == 9
    assert lines[-2].startswith("vocab_size doesn't allow tensor=3: embed has 256 along its axis 'vocab'")
    assert lines[-1] == "None rows"


TWO_PROCESSES = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from kimi_jax.checkpoint import CheckpointError
from kimi_jax.checkpoint.load import load_params
from kimi_jax.checkpoint.opened import open_checkpoint
from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
from kimi_jax.sharding import automatic
number, count, port, target, damaged, small, *larger = sys.argv[1:]
if int(count) > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(number))
assert len(jax.devices()) == 4 and len(jax.local_devices()) == 4 // int(count)
for path in larger:
    checkpoint = open_checkpoint(path)
    decoder = Decoder(KimiConfig.from_directory(path))
    params = load_params(checkpoint, decoder, "bfloat16", mesh=jax.make_mesh((4,), ("tensor",)))
    print("bytes", checkpoint.bytes_read)
mesh = automatic(jax.make_mesh((2, 2), ("expert", "tensor")))
decoder = Decoder(KimiConfig.from_directory(small))
try:
    load_params(open_checkpoint(damaged), decoder, "float32", mesh=mesh)
except CheckpointError as error:
    print("refused:", " ".join(str(error).split()))
params = load_params(open_checkpoint(small), decoder, "float32", mesh=mesh, verify=True)
logits = jax.jit(decoder.logits, out_shardings=NamedSharding(mesh, PartitionSpec()))
found = logits(params, np.arange(24, dtype=np.int32).reshape(2, 12))
np.save(f"{target}-{number}.npy", np.asarray(found.addressable_shards[0].data))
"""


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def launch(count: int, devices: int, *arguments: str | Path) -> list[str]:
    """Runs the script in `count` processes; returns what each prints."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(number), str(count), port, *map(str, arguments)],
            env=environment(XLA_FLAGS=DEVICES.format(devices)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    try:
        results = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
    return [printed for printed, _ in results]


def bytes_read(printed: str) -> list[int]:
    return [int(line.split()[1]) for line in printed.splitlines() if line.startswith("bytes ")]


def two_layers() -> dict[str, Any]:
    """One KDA layer and one of full attention, one dense MLP and one of experts: little to compile."""
    config = linear_config(
        hidden_size=64,
        vocab_size=320,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_hidden_layers=2,
    )
    config["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": [2], "head_dim": 16}
    return config


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """One with a NaN in its last expert, a small converted one, and a larger one in both formats."""
    place = tmp_path_factory.mktemp("two")
    random_checkpoint(place / "small", two_layers())
    random_checkpoint(place / "large", linear_config(num_experts=16, vocab_size=2048))
    for name in ("small", "large"):
        convert(place / name, place / f"{name}-orbax", progress=False)
    tensors = tensors_of(place / "small")
    tensors["model.layers.1.block_sparse_moe.experts.7.w2.weight"][0, 0] = np.nan
    plain_checkpoint(place / "damaged", two_layers(), tensors)
    return place / "damaged", place / "small-orbax", place / "large", place / "large-orbax"


@pytest.mark.slow
def test_two_processes_each_read_about_half_and_compute_the_same(tmp_path: Path, checkpoints: tuple[Path, ...]) -> None:
    alone = launch(1, 4, tmp_path / "alone", *checkpoints)
    together = launch(2, 2, tmp_path / "together", *checkpoints)
    total = sum(file.stat().st_size for file in checkpoints[2].glob("*.safetensors"))
    for read in (read for printed in together for read in bytes_read(printed)):
        assert 0.5 < read / total < 0.52
    # No byte is read twice for two devices of one process, although chunks hold some of what each needs.
    for read in bytes_read(alone[0]):
        assert 0.99 < read / total < 1.02
    # Only the second process holds the last experts, and both must stop.
    refusals = [line for printed in together for line in printed.splitlines() if line.startswith("refused: ")]
    assert refusals[0] == "refused: The checkpoint can't be loaded; process 1 says what is wrong with it."
    assert "model.layers.1.block_sparse_moe.experts.7.w2.weight holds NaN." in refusals[1]
    expected = np.load(tmp_path / "alone-0.npy")
    for number in range(2):
        np.testing.assert_allclose(np.load(tmp_path / f"together-{number}.npy"), expected, rtol=0, atol=1e-5)
