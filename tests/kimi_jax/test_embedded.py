"""The model that comes with the package is found by its name, from the wheel too."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from kimi_jax import Kimi, KimiConfig, cli
from kimi_jax.checkpoint.hub import resolve
from kimi_jax.embedded import MODELS, embedded, names

ROOT = Path(__file__).parents[2]
TINY = MODELS / "kimi-tiny"


def test_names() -> None:
    assert names() == ("kimi-tiny",)
    assert embedded("kimi-tiny") == TINY
    assert resolve(Path("kimi-tiny")) == TINY


@pytest.mark.parametrize("other", ["kimi-large", "", "./kimi-tiny", "x/kimi-tiny", "kimi-tiny/", str(TINY)])
def test_anything_else_is_left_alone(other: str) -> None:
    assert embedded(other) is None


def test_directory_of_that_name_wins_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kimi-tiny").write_text("a file is no model")
    assert embedded("kimi-tiny") == TINY
    (tmp_path / "kimi-tiny").unlink()
    (tmp_path / "kimi-tiny").mkdir()
    assert embedded("kimi-tiny", progress=False) is None
    assert capsys.readouterr().err == ""
    assert resolve("kimi-tiny") == Path("kimi-tiny")
    assert f"is the directory {tmp_path / 'kimi-tiny'}, not the model" in capsys.readouterr().err


def test_loads_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Kimi.from_pretrained("kimi-tiny", dtype="float32", progress=False)
    assert model.config == KimiConfig.from_directory(TINY)
    assert model.config.model_type == "kimi_k31"
    assert model.tokenizer.vocab_size == model.config.vocab_size == 4096
    text = "Once upon a time there was a fox."
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    np.testing.assert_array_equal(
        model.params["embed"], Kimi.from_pretrained(TINY, dtype="float32", progress=False).params["embed"]
    )


def test_inspect_takes_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "kimi-tiny"]) == 0
    assert "kimi_k31" in capsys.readouterr().out


def test_size_of_the_package_data() -> None:
    files = list(TINY.iterdir())
    assert sum(file.stat().st_size for file in files) <= 24e6
    assert {"config.json", "tiktoken.model", "tokenizer_config.json", "haystack.txt"} <= {file.name for file in files}


@pytest.mark.slow
def test_wheel_has_the_model_and_runs_away_from_the_repository(tmp_path: Path) -> None:
    # Built from a copy, so that a build folder left in the repository gets nothing in or out.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("kimi_jax", "pallas_kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    there = {f"kimi_jax/models/kimi-tiny/{path.name}" for path in TINY.iterdir()}
    modules = {
        str(path.relative_to(ROOT))
        for package in ("kimi_jax", "pallas_kernels")
        for path in (ROOT / package).rglob("*.py")
    }
    assert there | modules <= inside
    assert not [name for name in inside if name.startswith(("tests", "recipes", "benchmarks"))]

    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    program = (
        "import kimi_jax, sys\n"
        f"assert kimi_jax.__file__.startswith({str(site)!r}), kimi_jax.__file__\n"
        "from kimi_jax.cli import main\n"
        "sys.exit(main(['inspect', 'kimi-tiny']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=elsewhere, env=environment, capture_output=True, text=True, check=True
    )
    assert "kimi_k31" in shown.stdout
