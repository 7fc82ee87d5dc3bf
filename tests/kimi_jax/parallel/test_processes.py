"""One model in several processes, on JAX's distributed runtime with gloo between CPUs."""

import json
import socket
import subprocess
import sys
import time

import pytest

from kimi_jax.parallel.hosts import connect, parse_hosts
from tests.golden_data import ROOT
from tests.kimi_jax.checkpoint.sources import environment

SCRIPT = """
import json, os, sys, time
number, count, port, source, dies = sys.argv[1:]
from kimi_jax.parallel.hosts import connect
if int(count) > 1:
    connect(f"127.0.0.1:{port}", int(count), int(number), heartbeat_seconds=10)
import jax
from kimi_jax import Kimi
assert len(jax.devices()) == 4
model = Kimi.from_pretrained(source, dtype="float32", mesh={"context": 2, "tensor": 2}, compilation_cache=False)
prompts = [[1, 2, 3, 4, 5], [7] * 150]
def answers(**sampling):
    return [answer.token_ids for answer in model.generate(prompts, 10, **sampling)]
print(json.dumps({"greedy": answers(), "drawn": answers(temperature=0.9)}), flush=True)
while dies == "1":
    answers()
    if number == "1":
        os._exit(9)
"""


def start(count: int, dies: bool) -> list[subprocess.Popen[str]]:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port = opened.getsockname()[1]
    arguments = [str(count), str(port), str(ROOT / "kimi-k31-d128"), str(int(dies))]
    flags = f"--xla_force_host_platform_device_count={4 // count}"
    return [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(number), *arguments],
            env=environment(XLA_FLAGS=flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]


def end(processes: list[subprocess.Popen[str]]) -> None:
    """Kills what still runs, and closes the pipes."""
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def answers_of(count: int) -> list[dict[str, list[list[int]]]]:
    processes = start(count, dies=False)
    try:
        results = [process.communicate(timeout=300) for process in processes]
    finally:
        end(processes)
    for number, (process, (_, errors)) in enumerate(zip(processes, results, strict=True)):
        assert process.returncode == 0, errors
        # Only the first one speaks of what it does.
        assert ("kimi_jax: loaded" in errors) == (number == 0)
    return [json.loads(printed.splitlines()[-1]) for printed, _ in results]


@pytest.mark.slow
def test_two_and_four_processes_answer_as_one() -> None:
    (alone,) = answers_of(1)
    for count in (2, 4):
        found = answers_of(count)
        assert all(one["greedy"] == alone["greedy"] for one in found)
        # Nobody gave a seed: the processes agreed on one.
        assert all(one["drawn"] == found[0]["drawn"] for one in found)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others_with_a_message() -> None:
    processes = start(2, dies=True)
    try:
        assert processes[1].wait(timeout=300) == 9
        died = time.monotonic()
        _, errors = processes[0].communicate(timeout=60)
    finally:
        end(processes)
    assert time.monotonic() - died < 60
    assert processes[0].returncode not in (0, None)
    assert "Gloo" in errors or "heartbeat" in errors or "unhealthy" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("10.0.0.1:1234", 2, None), "process_id must be given too"),
        ((None, 2, 0), "coordinator must be given too"),
        (("10.0.0.1:1234", 2, 2), "from 0 to num_processes - 1 = 1"),
        (("10.0.0.1", 2, 0), "must be host:port"),
    ],
)
def test_what_doesnt_fit_is_said_before_anybody_waits(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        connect(*arguments)


def test_hosts_are_described_in_one_word() -> None:
    assert parse_hosts("auto") == (None, None, None)
    assert parse_hosts("10.0.0.1:1234,4,0") == ("10.0.0.1:1234", 4, 0)
    for text in ("", "10.0.0.1:1234", "10.0.0.1:1234,4", "10.0.0.1:1234,four,0"):
        with pytest.raises(ValueError, match="legal are auto, or COORDINATOR:PORT,COUNT,NUMBER"):
            parse_hosts(text)
