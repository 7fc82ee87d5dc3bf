"""What the H200's suite asks of KDA, asked of plain JAX; and that the suite sees faults."""

import dataclasses
import pathlib
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks import kda_check, kda_table


def test_plain_jax_keeps_the_laws() -> None:
    for group, found in kda_check.laws_of(("one", "packed", "gradients"), "xla"):
        assert found
        assert [law for law in found if not law.passes] == [], group


def test_the_recurrence_backwards_is_the_derivative() -> None:
    rng = np.random.default_rng(0)
    x = {name: rng.standard_normal((3, 1, 4)) for name in ("q", "k", "v")}
    x |= {
        "g": -rng.uniform(0, 1, (3, 1, 4)),
        "beta": rng.uniform(0, 1, (3, 1)),
        "first": rng.standard_normal((1, 4, 4)),
    }
    d_o, d_state = rng.standard_normal((3, 1, 4)), rng.standard_normal((1, 4, 4))
    _, _, found = kda_check.recurrence(x, d_o, d_state)

    def total(name: str, where: tuple[int, ...], step: float) -> float:
        moved = x | {name: x[name].copy()}
        moved[name][where] += step
        o, state, _ = kda_check.recurrence(moved)
        return float(np.sum(o * d_o) + np.sum(state * d_state))

    for name, value in x.items():
        where = tuple(size // 2 for size in value.shape)
        slope = (total(name, where, 1e-5) - total(name, where, -1e-5)) / 2e-5
        assert found[name][where] == pytest.approx(slope, rel=1e-6), name


@pytest.mark.parametrize("value", [0.006, float("nan"), float("inf")])
def test_faults_are_seen(value: float) -> None:
    assert not kda_check.Law("o", value, 0.005).passes
    assert not kda_check.Law("bits", 1.0, 0).passes
    assert kda_check.Law("bits", 0.0, 0).passes
    assert np.isnan(kda_check.error(np.asarray([np.nan, 1.0]), np.ones(2)))
    assert kda_check.differing(np.float32([0.0, 1.0]), np.float32([-0.0, 1.0])) == 1


def test_rows_of_the_table_are_cases() -> None:
    for row in kda_table.ROWS:
        assert dataclasses.is_dataclass(row.case())
    assert len({row.name for row in kda_table.ROWS}) == len(kda_table.ROWS)


def test_a_worker_is_waited_for_and_told(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "good.py").write_text(
        "import sys\nprint('noise')\nprint('{\"ready\": {}}', flush=True)\n"
        "sys.stdin.readline()\nprint('{\"ms\": 1.5}', flush=True)\n"
    )
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "bad.py").write_text('print(\'{"missing": "nothing here"}\')\n')
    workers = [kda_table.Worker(name) for name in ("good", "slow", "bad", "none")]
    for worker, seconds in zip(workers, (20, 0.2, 20, 20), strict=True):
        worker.wait(seconds)
    assert workers[0].go() == {"ms": 1.5}
    assert "time" in workers[1].go()["failed"]
    assert workers[2].go() == {"missing": "nothing here"}
    assert "ended" in workers[3].go()["failed"]
    for worker in workers:
        worker.close()


def test_a_table_without_a_gpu_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Nothing:
        said: ClassVar[dict[str, Any]] = {"ready": {"device": "none"}}

        def __init__(self, *command: str, environment: Any = None):
            self.fla = command[0].endswith("fla")

        def wait(self, seconds: float) -> None:
            pass

        def go(self) -> dict[str, Any]:
            return {"missing": "FLA not installed"} if self.fla else {"ms": 1.0, "floor_ms": 0.5}

        def close(self) -> None:
            pass

    monkeypatch.setattr(kda_table, "Worker", Nothing)
    monkeypatch.setattr("sys.argv", ["kda_table"])
    kda_table.main()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(kda_table.ROWS) + 3
    assert printed[3].split()[1:] == [
        "1.0000",
        "0.5000",
        "2.00",
        "-",
        "-",
        "1.200",
        "0.600",
        *["at", "least", "(FLA", "not", "installed)"],
    ]
    assert "(FLA has no such kernel)" in "".join(printed)
