"""Two writers at one destination, and locks of writers that are gone."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kimi_jax.checkpoint import CheckpointError
from kimi_jax.checkpoint.lock import LOCK, SILENCE_SECONDS, hold
from tests.kimi_jax.checkpoint.sources import environment

HOLDER = """
import sys, time
from pathlib import Path
from kimi_jax.checkpoint.lock import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def leave(directory: Path, age: float = 0.0, **holder: object) -> Path:
    """A lock file that some process has left."""
    path = directory / LOCK
    path.write_text(json.dumps(holder))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_a_second_writer_is_refused_and_a_killed_one_is_no_obstacle(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError) as caught, hold(tmp_path):
            pass
        assert f"{tmp_path} is being written by process {process.pid} on {socket.gethostname()}" in str(caught.value)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    assert (tmp_path / LOCK).exists()
    with hold(tmp_path) as lock:
        lock.touch()
    assert not (tmp_path / LOCK).exists()


def test_a_second_writer_in_the_same_process_is_refused(tmp_path: Path) -> None:
    with hold(tmp_path), pytest.raises(CheckpointError, match="is being written by process"), hold(tmp_path):
        pass
    with hold(tmp_path):
        pass


def test_a_lock_of_another_machine_holds_while_it_is_touched(tmp_path: Path) -> None:
    leave(tmp_path, age=SILENCE_SECONDS / 2, pid=1, host="elsewhere", started="1")
    with pytest.raises(CheckpointError, match="process 1 on elsewhere"), hold(tmp_path):
        pass
    leave(tmp_path, age=SILENCE_SECONDS * 2, pid=1, host="elsewhere", started="1")
    with hold(tmp_path):
        pass


def test_a_number_that_another_process_has_now_is_no_holder(tmp_path: Path) -> None:
    # The parent lives, but didn't start when the lock says.
    leave(tmp_path, pid=os.getppid(), host=socket.gethostname(), started="1")
    with hold(tmp_path):
        pass


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": "x"}', '{"pid": -1, "host": "h"}'])
def test_a_damaged_lock_is_no_obstacle(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK).write_text(content)
    with hold(tmp_path):
        pass
