"""Eight CPU devices; shapes and dtypes of annotated functions are checked; nothing is written to the user's folders."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

# Meshes need devices; a program that names none runs on the first of them, as it would with one.
jax.config.update("jax_num_cpu_devices", 8)

install_import_hook(["kimi_jax", "pallas_kernels"], "beartype.beartype")


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled programs are shared within a session, processes that tests start included, and forgotten after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


# Linux lets a process map 65 530 pieces of memory, a compiled program takes some of them, and XLA crashes without.
MAPS = Path("/proc/self/maps")
MANY_MAPS = 20_000


@pytest.fixture(scope="module", autouse=True)
def room_for_programs() -> Iterator[None]:
    """Forgets compiled programs between modules once there are many."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()
