"""The command line from outside: exit status, standard output and error."""

import io
import json
import os
import pty
import subprocess
from pathlib import Path

import pytest

from kimi_jax.checkpoint.progress import Progress, amount, duration
from kimi_jax.cli import COMMANDS, main
from tests.kimi_jax.checkpoint.sources import CONFIGS, command, environment, run


def test_init_convert_inspect_and_back(tmp_path: Path) -> None:
    """One checkpoint's whole way through the command line."""
    source, orbax, back = tmp_path / "source", tmp_path / "orbax", tmp_path / "back"
    made = run("init", CONFIGS / "kimi-k3-tiny-mxfp4.json", source, "--shard-mib", "1")
    assert "init 1,002/1,002 tensors" in made.stderr
    assert made.stdout == ""
    converted = run("convert", source, orbax, "--verify")
    first, *others = converted.stderr.splitlines()
    for part in (f"{source} to {orbax}", "reads 2.5 MiB, writes 2.5 MiB", "of disk", "of memory"):
        assert part in first
    assert "convert 1,002/1,002 tensors, 2.5 MiB of 2.5 MiB" in others[-2]
    assert "\r" not in converted.stderr
    assert converted.stdout.startswith(f"{orbax}: 1,002 tensors, 2.5 MiB; wrote 2.5 MiB in")
    found = json.loads(run("inspect", orbax, "--json", "--mesh", "expert=8,tensor=2", "--verify").stdout)
    assert found["ok"]
    assert found["random"]
    assert found["bytes_per_device"] < found["bytes"] / 2
    assert "was finished already" in run("convert", source, orbax).stdout
    assert run("convert", orbax, back, "--to", "hf", "--quiet").stderr == ""


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run on whatever platform they run on; only a command of its own may choose."""
    monkeypatch.setattr("jax.config.update", lambda name, value: None)


@pytest.mark.usefixtures("in_process")
def test_failures_are_one_message_and_status_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, part in (
        (("convert", tmp_path / "absent", tmp_path / "b"), "config.json"),
        (("inspect", tmp_path), "config.json"),
        (("inspect", tmp_path, "--mesh", "rows=2"), "mesh axis 'rows'"),
        (("init", tmp_path / "absent.json", tmp_path / "c"), "absent.json"),
        (("init", CONFIGS / "kimi-k3.json", tmp_path / "c", "--seed", "-1"), "seed=-1"),
        (("convert", tmp_path, tmp_path / "b", "--array-mib", "0"), "array_bytes=0"),
    ):
        assert main(list(map(str, arguments))) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith("kimi-jax: error: ")
        assert part in printed.err
        assert "Traceback" not in printed.err
        assert printed.out == ""


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status in (
        (["--help"], 0),
        ([], 2),
        (["frobnicate"], 2),
        (["convert"], 2),
        (["convert", "--help"], 0),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == status
    printed = capsys.readouterr()
    assert all(name in printed.out for name in COMMANDS)
    assert "The same command continues an interrupted run" in " ".join(printed.out.split())


@pytest.mark.usefixtures("in_process")
def test_an_interruption_is_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kimi_jax.checkpoint.convert.convert", interrupted)
    assert main(["convert", "a", "b"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_on_a_terminal_one_line_is_rewritten(tmp_path: Path) -> None:
    reading, writing = pty.openpty()
    process = subprocess.Popen(
        command("init", CONFIGS / "kimi-k3-tiny-mxfp4.json", tmp_path / "a"), env=environment(), stderr=writing
    )
    os.close(writing)
    printed = b""
    while True:
        try:
            piece = os.read(reading, 4096)
        except OSError:
            break
        if not piece:
            break
        printed += piece
    os.close(reading)
    assert process.wait() == 0
    assert printed.count(b"\n") == 2
    assert b"init 1,002/1,002 tensors" in printed


class Stream(io.StringIO):
    """Keeps what is written, and claims to be a terminal or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def test_progress_says_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for terminal, end in ((True, "\r"), (False, "\n")):
        stream = Stream(terminal)
        progress = Progress("convert", 10, 1000 * 2**20, stream=stream)
        progress.skip(2, 200 * 2**20)
        assert "time left unknown" in progress.line()
        now[0] += 10
        progress.add(3, 300 * 2**20)
        line, _, rest = stream.getvalue().partition(end)
        assert line.strip() == "kimi_jax: convert 5/10 tensors, 500.0 MiB of 1,000.0 MiB, 30.0 MiB/s, 17 s left"
        assert rest == ""
        progress.add(1, 1)
        assert stream.getvalue().count(end) == 1
        now[0] += 10
        progress.add(4, 500 * 2**20 - 1)
        progress.finish()
        assert stream.getvalue().rstrip().endswith("10/10 tensors, 1,000.0 MiB of 1,000.0 MiB, 40.0 MiB/s, took 20 s")


def test_amounts_and_durations() -> None:
    assert [amount(size) for size in (0, 1023, 1536, 2**30, 1560860324864)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 GiB",
        "1.4 TiB",
    ]
    assert [duration(seconds) for seconds in (0.4, 99.0, 600.0, 7200.0)] == ["0 s", "99 s", "10 min", "2.0 h"]
