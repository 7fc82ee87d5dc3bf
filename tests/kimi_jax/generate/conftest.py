from pathlib import Path

import pytest

from kimi_jax import Kimi, api
from tests.kimi_jax.generate import tiny
from tests.kimi_jax.generate.scripted import Actor


@pytest.fixture(scope="session")
def linear_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint("kimi_linear", tmp_path_factory.mktemp("linear"))


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the processes of this session share."""
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="session")
def model(linear_directory: Path, compilation_cache: Path) -> Kimi:
    """A Kimi-Linear of two layers in float32, shared so that a shape is compiled once."""
    loaded = Kimi.from_pretrained(
        linear_directory, dtype="float32", compilation_cache=compilation_cache, progress=False
    )
    return tiny.slow_decay(loaded)


@pytest.fixture(scope="session")
def the_actor(compilation_cache: Path) -> Actor:
    return Actor(compilation_cache)


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats have caches of the size that everything else has, so that there are fewer programs to compile."""
    monkeypatch.setattr(api, "CHAT_NEW_TOKENS", 256)


@pytest.fixture
def actor(the_actor: Actor) -> Actor:
    """Speaks as Kimi-Linear does until it's told otherwise."""
    the_actor.speaks("kimi_linear")
    return the_actor


@pytest.fixture
def k3_actor(the_actor: Actor) -> Actor:
    the_actor.speaks("kimi_k3")
    return the_actor
