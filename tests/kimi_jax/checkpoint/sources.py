"""Small checkpoints to convert, and running the command line in a process of its own."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kimi_jax.checkpoint import CheckpointReader, write_safetensors
from kimi_jax.checkpoint.random_weights import init_random

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
GOLDEN = ROOT / "tests" / "golden"
FAMILIES = ("kimi-linear-tiny", "kimi-k3-tiny", "kimi-k3-tiny-mxfp4", "kimi-k31-tiny", "kimi-k31-d128")
INDEX = "model.safetensors.index.json"
CHECKED = """
from jaxtyping import install_import_hook
install_import_hook(["kimi_jax", "pallas_kernels"], "beartype.beartype")
"""
"""First lines of a script in a process of its own that checks types as this one does."""


def k3_config(**changes: Any) -> dict[str, Any]:
    """A K3 model of two layers and four packed experts."""
    tree = json.loads((CONFIGS / "kimi-k3-tiny-mxfp4.json").read_text())
    text = tree["text_config"]
    text |= {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_token": 2, "attn_res_block_size": 2}
    text["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": [2]}
    text |= changes
    return tree


def linear_config(**changes: Any) -> dict[str, Any]:
    """A Kimi-Linear model of about 100 MB in bfloat16: 48B names, fewer and narrower layers."""
    tree = json.loads((CONFIGS / "kimi-linear-tiny.json").read_text())
    tree |= {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "kv_lora_rank": 128,
        "num_experts": 64,
        "num_experts_per_token": 4,
        "moe_intermediate_size": 128,
    }
    tree["linear_attn_config"] = {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 8,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
    }
    return tree | changes


def random_checkpoint(directory: Path, config: Mapping[str, Any], shard_bytes: int = 2**30, seed: int = 0) -> Path:
    """A random checkpoint of a config."""
    file = directory.with_name(directory.name + ".json")
    file.write_text(json.dumps(config))
    return init_random(file, directory, seed=seed, shard_bytes=shard_bytes, progress=False)


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a Hugging Face directory, as copies."""
    reader = CheckpointReader(directory)
    return {name: np.array(reader.read(name)) for name in reader.names()}


def plain_checkpoint(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """A Hugging Face directory of one file, without our marker."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
    return directory


def changed(config: Mapping[str, Any], **text: Any) -> dict[str, Any]:
    """A nested config with other values in its text part."""
    tree = copy.deepcopy(dict(config))
    tree["text_config"] |= text
    return tree


def environment(**extra: str) -> dict[str, str]:
    """That of a child process: the project on its path, CPU only."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **extra}


def command(*arguments: str | Path) -> list[str]:
    """A command line of `kimi-jax`."""
    return [sys.executable, "-W", "error", "-m", "kimi_jax.cli", *map(str, arguments)]


def run(*arguments: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs `kimi-jax` to its end."""
    done = subprocess.run(
        command(*arguments), env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == status, done.stderr
    return done


def run_script(script: str, *arguments: str | Path, **extra: str) -> str:
    """Runs Python code in a process of its own and returns what it prints."""
    line: Sequence[str] = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    done = subprocess.run(line, env=environment(**extra), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
