"""Compiled programs on disk: found again, never trusted blindly, and never in the caller's way."""

import errno
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from kimi_jax import compile_cache
from kimi_jax.compile_cache import CompileCache, default_folder
from kimi_jax.programs import Programs

ARGUMENT = np.arange(12.0, dtype=np.float32).reshape(3, 4)


def function(x: Any) -> Any:
    return jnp.sin(x) @ jnp.cos(x).T + 3


def compute(cache: CompileCache, capsys: pytest.CaptureFixture[str] | None = None) -> bool:
    """Runs `function` as a new process would; checks the result, and says whether it came from the disk."""
    programs = Programs(cache, progress=True)
    found = programs.add(function, "sample")(ARGUMENT, what="a sample")
    np.testing.assert_allclose(np.asarray(found), np.sin(ARGUMENT) @ np.cos(ARGUMENT).T + 3, rtol=1e-6)
    assert len(programs.compiled) == 1
    assert capsys is not None
    said = capsys.readouterr().err
    assert "kimi_jax: compiling a sample ..." in said
    return "from the cache on disk" in said


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("jit_sample-*-cache"))


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with one program in it."""
    folder = tmp_path / "deep" / "xla"
    assert not compute(CompileCache(folder), capsys)
    assert len(entries(folder)) == 1
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path


def test_second_process_finds_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compute(CompileCache(folder), capsys)
    assert len(entries(folder)) == 1
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_default_folder_is_the_users_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_folder() == home / ".cache" / "kimi_jax" / "xla"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/path")
    assert default_folder() == home / ".cache" / "kimi_jax" / "xla"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "elsewhere"))
    cache = CompileCache(True)
    assert cache.folder == default_folder() == home / "elsewhere" / "kimi_jax" / "xla"
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700


def test_default_folder_that_others_may_write_to_is_not_used(
    home: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    default_folder().mkdir(parents=True)
    default_folder().chmod(0o777)
    cache = CompileCache(True)
    assert cache.folder is None
    assert "others may write to" in caplog.text
    assert not compute(cache, capsys)
    # Someone who names a folder knows why.
    assert CompileCache(default_folder()).folder == default_folder()


def test_switched_off(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert not compute(CompileCache(False), capsys)
    assert not default_folder().exists()


@pytest.mark.parametrize("choice", [None, 3, b"x"])
def test_illegal_choice(choice: object) -> None:
    with pytest.raises(TypeError):
        CompileCache(choice)


def damage(entry: Path, how: str) -> None:
    content = entry.read_bytes()
    middle = len(content) // 2
    changed = {
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "cut": content[:middle],
        "empty": b"",
        "noise": np.random.default_rng(0).bytes(len(content)),
    }
    entry.write_bytes(changed[how])


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "noise"])
def test_damaged_program_is_compiled_again(
    folder: Path, how: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    [entry] = entries(folder)
    damage(entry, how)
    assert not compute(CompileCache(folder), capsys)
    assert f"{entry} is damaged; it is removed and compiled again" in caplog.text
    caplog.clear()
    assert compute(CompileCache(folder), capsys)
    assert caplog.text == ""


@pytest.mark.parametrize("how", ["cut", "empty", "noise"])
def test_damage_that_only_jax_sees(
    folder: Path, how: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The checksum fits: whatever happens, it happens in JAX, and its warning isn't an exception."""
    [entry] = entries(folder)
    damage(entry, how)
    compile_cache._seal_of(entry).write_text(compile_cache._checksum(entry))
    assert not compute(CompileCache(folder), capsys)
    assert "Error reading persistent compilation cache entry" in caplog.text


def test_program_without_its_checksum_is_compiled_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As an interrupted process leaves it."""
    [entry] = entries(folder)
    compile_cache._seal_of(entry).unlink()
    assert not compute(CompileCache(folder), capsys)
    assert compute(CompileCache(folder), capsys)


def test_folder_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = CompileCache(tmp_path / "file" / "xla")
    assert cache.folder is None
    assert "The compilation cache can't be used" in caplog.text
    assert not compute(cache, capsys)


def test_read_only_folder(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    cache = CompileCache(folder)
    assert cache.folder is None
    assert "Read-only file system" in caplog.text
    assert not compute(cache, capsys)


def test_folder_that_becomes_unusable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    cache = CompileCache(tmp_path / "xla")
    (tmp_path / "xla").rmdir()
    (tmp_path / "xla").write_text("in the way")
    assert not compute(cache, capsys)
    assert "persistent compilation cache" in caplog.text


def test_program_of_another_jaxlib_is_not_used(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jax._src import cache_key

    monkeypatch.setattr(cache_key, "jaxlib_version_str", "0.0.1")
    assert not compute(CompileCache(folder), capsys)
    assert len(entries(folder)) == 2


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[Path]:
    """A cache that the caller has configured in JAX."""
    own = tmp_path / "own"
    jax.config.update("jax_compilation_cache_dir", str(own))
    jax_cache.reset_cache()
    yield own
    jax.config.update("jax_compilation_cache_dir", None)
    jax_cache.reset_cache()


def test_callers_own_cache_is_left_alone(
    configured: Path, home: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert CompileCache(True).folder is None
    assert caplog.text == ""
    cache = CompileCache(home / "other")
    assert cache.folder is None
    assert f"isn't used: JAX is configured with the cache {configured}" in caplog.text
    compute(cache, capsys)
    assert jax.config.jax_compilation_cache_dir == str(configured)
    assert not (home / "other").exists()
    assert not default_folder().exists()


def test_callers_cache_that_is_configured_later_is_used(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = CompileCache(folder)
    assert compute(cache, capsys)
    own, before = tmp_path / "own", jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(own))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        jax_cache.reset_cache()
        compute(cache, capsys)
        assert len(entries(own)) == 1
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
        jax_cache.reset_cache()


def test_callers_own_programs_stay_out_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compute(CompileCache(folder), capsys)
    assert jax.config.jax_compilation_cache_dir is None
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1.0
    before = sorted(folder.iterdir())
    jax.jit(lambda x: jnp.tan(x) + 17)(ARGUMENT).block_until_ready()
    assert sorted(folder.iterdir()) == before


def test_shapes_and_static_values_each_get_their_program(capsys: pytest.CaptureFixture[str]) -> None:
    programs = Programs(progress=True)
    program = programs.add(lambda x, times: x * times, "times", static_argnames="times")
    for x, times in ((ARGUMENT, 2), (ARGUMENT + 1, 2), (ARGUMENT, 3), (ARGUMENT[:1], 2), (ARGUMENT.astype(int), 2)):
        np.testing.assert_array_equal(program(x, times=times, what=f"times {times}"), x * times)
    assert programs.compiled == ["times 2", "times 3", "times 2", "times 2"]
    assert programs.seconds > 0
    assert capsys.readouterr().err.count(" s\n") == 4
    quiet = Programs()
    quiet.add(lambda x: x + 1, "plus")(ARGUMENT, what="plus")
    assert capsys.readouterr().err == ""


def test_threads_that_need_one_program_compile_it_once() -> None:
    programs = Programs()
    program = programs.add(lambda x: jnp.cos(x) * 3, "thrice")
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(program, ARGUMENT, what="thrice") for _ in range(4)]
    for one in found:
        np.testing.assert_allclose(np.asarray(one.result()), np.cos(ARGUMENT) * 3, rtol=1e-6)
    assert programs.compiled == ["thrice"]


def test_log_is_a_log(caplog: pytest.LogCaptureFixture, home: Path) -> None:
    (home / ".cache").write_text("no folder")
    with caplog.at_level(logging.WARNING, logger="kimi_jax"):
        assert CompileCache(True).folder is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
