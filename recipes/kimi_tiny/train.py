"""Trains kimi-tiny.

    python -m recipes.kimi_tiny.train DIR OUT [--seeds 0,1] [--gpus 1] [--until pretrain]

DIR is the work folder with the encoded corpus and the tokenizer (`corpus` and `tokenizer` make it). For each seed, in a
process of its own, OUT/seed-N receives the states to resume from, `metrics.jsonl`, the checkpoint `kimi-tiny` and
`report.json` with what was measured:

1. pretrain: dense attention on rows of 2048 tokens.
2. indexer: everything else frozen; the indexer learns from dense attention.
3. sparse: attention over what the indexer selects, on rows of 8192 tokens, the learning rate falling to 0.
4. dense: the same tokens as 3 from the same start, with dense attention: what 3 is compared with.
5. polish: 3 goes on at a low learning rate with more chats.
6. finish: the mean of what 3 and 5 made, which keeps most of what each is better at, with the experts' biases settled.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kimi_jax.checkpoint.save import save_huggingface
from kimi_jax.config import KimiConfig
from kimi_jax.model import Decoder
from kimi_jax.params import Params
from kimi_jax.train import (
    Checkpoints,
    MetricsLog,
    OptimizerConfig,
    Stage,
    StepConfig,
    TrainStep,
    compile_stage,
    init_params,
    prefetch,
    run_stage,
    wsd_schedule,
)
from recipes.kimi_tiny.data import Data, Mixture, Workers
from recipes.kimi_tiny.evaluate import RECALL_LENGTH, forced_recall, text_quality
from recipes.kimi_tiny.finish import mean, settle

CONFIG = Path(__file__).parent / "config.json"
SHARD_BYTES = 15 * 2**20
SETTLING_BATCHES, SETTLING_ROUNDS, SETTLING_CHATS = 5, 3, 0.08


@dataclass(frozen=True)
class Settings:
    """Numbers of a run; the model that ships had 4250 steps in its first stage (see its card)."""

    learning_rate: float = 3e-3
    final_rate: float = 0.3
    tokens: int = 32768
    short: int = 2048
    long: int = 8192
    pretrain_steps: int = 4000
    indexer_steps: int = 100
    final_steps: int = 450
    polish_rate: float = 0.15
    polish_steps: int = 170
    polish_share: float = 0.5
    recalls: int = 500


def stages(settings: Settings) -> dict[str, tuple[bool, Stage, Mixture]]:
    """(dense attention?, stage, what its batches are made of) of each part of the run."""
    short = Mixture(
        settings.tokens // settings.short,
        settings.short,
        {"recall": 0.22, "tools": 0.12, "arithmetic": 0.06, "lists": 0.06, "smalltalk": 0.01, "stories": 0.03},
        (200, settings.short),
    )
    long = Mixture(
        settings.tokens // settings.long,
        settings.long,
        {"recall": 0.45, "tools": 0.10, "arithmetic": 0.04, "lists": 0.04, "smalltalk": 0.01, "stories": 0.03},
        (min(1000, settings.long), settings.long),
    )
    optimizer = OptimizerConfig(settings.learning_rate)
    first, last = settings.pretrain_steps, settings.final_steps
    warmup = min(10, last // 10)
    falling = wsd_schedule(last, warmup=warmup, decay=last - warmup, peak=settings.final_rate)
    steady = wsd_schedule(first, warmup=min(100, first // 10), decay=first // 4, floor=settings.final_rate)
    polishing = Mixture(
        long.rows,
        long.length,
        {"recall": 0.30, "tools": 0.33, "arithmetic": 0.05, "lists": 0.12, "smalltalk": 0.01, "stories": 0.02},
        long.recall_lengths,
    )
    low = wsd_schedule(
        settings.polish_steps,
        warmup=settings.polish_steps // 10,
        decay=settings.polish_steps - settings.polish_steps // 10,
        peak=settings.polish_rate,
    )
    final = Stage("sparse", last, optimizer, falling, StepConfig(indexer="sparse"))
    return {
        "pretrain": (
            True,
            Stage("pretrain", first, optimizer, steady, StepConfig()),
            short,
        ),
        "indexer": (
            True,
            Stage(
                "indexer",
                settings.indexer_steps,
                replace(optimizer, learning_rate=2e-3),
                wsd_schedule(settings.indexer_steps, warmup=0, decay=settings.indexer_steps // 2),
                StepConfig(indexer="dense", language=False, balance=0.0),
                trainable=_of_indexer,
            ),
            short,
        ),
        "sparse": (False, final, long),
        "dense": (True, replace(final, name="dense", step=StepConfig()), long),
        "polish": (
            False,
            Stage(
                "polish",
                settings.polish_steps,
                optimizer,
                low,
                StepConfig(),
                trainable=lambda path: not _of_indexer(path),
            ),
            polishing,
        ),
    }


def _of_indexer(path: str) -> bool:
    return path.startswith("mla.indexer.")


class SeedRun:
    """All stages of one seed; what an earlier command has done is loaded."""

    def __init__(self, folder: Path, out: Path, seed: int, settings: Settings, workers: int):
        """Starts the processes that make batches, and copies what the end needs: `folder` may be gone by then."""
        self.out, self.seed, self.settings = out, seed, settings
        self.began = time.perf_counter()
        self.config = KimiConfig.from_dict(json.loads(CONFIG.read_text()))
        self.plan = stages(settings)
        self.decoders = {dense: Decoder(self.config, dense_attention=dense) for dense in (True, False)}
        self.kept = out / "data"
        (self.kept / "corpus").mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "corpus" / "heldout.npz", self.kept / "corpus")
        shutil.copytree(folder / "tokenizer", self.kept / "tokenizer", dirs_exist_ok=True)
        self.log = MetricsLog(out / "metrics.jsonl")
        self.data = Data(folder)
        self.workers = Workers(folder, workers)
        self.states = {name: Checkpoints(out / "states" / name, keep=1) for name in self.plan}

    def say(self, line: str) -> None:
        """Prints a line with the time."""
        print(f"[{time.perf_counter() - self.began:6.1f} s] seed {self.seed}: {line}", flush=True)

    def run(self, until: str | None) -> None:
        """Runs the stages, up to the one named."""
        names = list(self.plan)
        names = names[: names.index(until) + 1] if until else names
        left = [name for name in names if self.states[name].latest != self.plan[name][1].steps]
        # Later stages compile while the first one runs, and what is finished is measured while the last one does.
        with ThreadPoolExecutor(8) as pool:
            compiled = {name: pool.submit(self._compile, name) for name in left[:1]}
            if left:
                compiled[left[0]].result()
                self.say(f"{left[0]} is compiled")
            compiled |= {name: pool.submit(self._compile, name) for name in left[1:]}
            params = self._stage("pretrain", init_params(self.decoders[True], self.seed), compiled)
            if until == "pretrain":
                return
            params = self._stage("indexer", params, compiled)
            if until == "indexer":
                return
            start = jax.tree.map(np.asarray, params)
            sparse = jax.tree.map(np.asarray, self._stage("sparse", params, compiled))
            measured = {"sparse": pool.submit(self._measure, "sparse", sparse)}
            dense = jax.tree.map(np.asarray, self._stage("dense", jax.tree.map(jax.numpy.asarray, start), compiled))
            measured["dense"] = pool.submit(self._measure, "dense", dense)
            polished = self._stage("polish", jax.tree.map(jax.numpy.asarray, sparse), compiled)
            finished = self._finish(jax.tree.map(jax.numpy.asarray, sparse), polished)
            self._save(finished, "kimi-tiny")
            measured["kimi-tiny"] = pool.submit(self._measure, "kimi-tiny", finished)
            found = {name: job.result() for name, job in measured.items()}
        found["sparse_over_dense"] = found["sparse"]["bits_per_byte"] / found["dense"]["bits_per_byte"]
        report = {"seed": self.seed, "settings": asdict(self.settings), "seconds": time.perf_counter() - self.began}
        report |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__} | found
        (self.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        self.say(json.dumps(found))

    def close(self) -> None:
        """Ends the processes, once every state is on disk."""
        self.workers.executor.shutdown()
        for states in self.states.values():
            states.close()

    def _compile(self, name: str) -> TrainStep:
        dense, stage, mixture = self.plan[name]
        return compile_stage(self.decoders[dense], stage, self.data.batch(mixture, self.seed, 0))

    def _stage(self, name: str, params: Params, compiled: dict[str, Future]) -> Params:
        dense, stage, mixture = self.plan[name]
        # A stage meets other chats than the one before it, but sparse and dense meet the same tokens.
        data_seed = 1000 * self.seed + {"pretrain": 0, "indexer": 1, "sparse": 2, "dense": 2, "polish": 3}[name]
        batches = partial(prefetch, self.workers.batch_of(mixture, data_seed), workers=self.workers.executor)
        step = compiled[name].result() if name in compiled else None
        return run_stage(
            self.decoders[dense],
            params,
            stage,
            batches,
            train_step=step,
            log=self.log,
            log_every=50,
            checkpoints=self.states[name],
            say=self.say,
        ).params

    def _finish(self, sparse: Params, polished: Params) -> Params:
        settings = self.settings
        rows = settings.tokens // (2 * settings.short)
        batches = [
            self.data.plain_batch(rows, settings.short, SETTLING_CHATS, seed) for seed in range(SETTLING_BATCHES)
        ]
        params = mean(sparse, polished, settings.polish_share)
        return jax.tree.map(np.asarray, settle(self.decoders[False], params, batches, SETTLING_ROUNDS))

    def _measure(self, name: str, params: Params) -> dict[str, Any]:
        decoder = self.decoders[name == "dense"]
        found = text_quality(decoder, params, self.kept)
        if name == "kimi-tiny":
            length = min(RECALL_LENGTH, self.settings.long)
            found["recall"] = forced_recall(decoder, params, self.data.tasks, self.settings.recalls, length)
        self.say(f"measured {name}: {json.dumps(found)}")
        return found

    def _save(self, params: Params, name: str) -> None:
        target = self.out / name
        if target.exists():
            return
        tokenizer = {path.name: path for path in sorted((self.kept / "tokenizer").iterdir())}
        save_huggingface(self.config, params, target, shard_bytes=SHARD_BYTES, side_files=tokenizer)


def main() -> None:
    """Command line: one seed here, several in processes of their own."""
    parser = argparse.ArgumentParser(prog="python -m recipes.kimi_tiny.train", description="Trains kimi-tiny.")
    parser.add_argument("folder", type=Path, help="work folder, with the encoded corpus in it")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--gpus", type=int, default=1, help="seeds are spread over them")
    parser.add_argument(
        "--until", choices=["pretrain", "indexer"], help="stop after this stage; a later command goes on"
    )
    parser.add_argument("--workers", type=int, default=3, help="processes that make batches, for each seed")
    for field in fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = parser.parse_args()
    settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if len(seeds) == 1:
        run = SeedRun(options.folder, options.out / f"seed-{seeds[0]}", seeds[0], settings, options.workers)
        try:
            run.run(options.until)
        finally:
            run.close()
        return
    each = 0.9 / -(-len(seeds) // options.gpus)
    running = []
    for place, seed in enumerate(seeds):
        arguments = [a for a in sys.argv[1:] if a != "--seeds" and a != options.seeds] + ["--seeds", str(seed)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(place % options.gpus)}
        environment |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{each:.2f}"}
        running.append(subprocess.Popen([sys.executable, "-m", __spec__.name, *arguments], env=environment))
    if any(process.wait() for process in running):
        sys.exit("a seed failed; its output is above.")


if __name__ == "__main__":
    main()
