"""Eight CPU devices; shapes and dtypes of annotated functions are checked; nothing is written to the user's folders."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

# Meshes need devices; a program that names none runs on the first of them, as it would with one.
jax.config.update("jax_num_cpu_devices", 8)

install_import_hook(["kimi_jax", "pallas_kernels"], "beartype.beartype")


# What takes minutes, longest first: a process that gets such a file last keeps the other one waiting.
LONG = (
    "kimi_jax/parallel/test_decoder.py",
    "kimi_jax/test_golden.py",
    "kimi_jax/train/test_step.py",
    "kimi_jax/test_laws.py",
    "kimi_jax/parallel/test_processes.py",
    "kimi_jax/test_unrolled.py",
    "kimi_jax/test_depth.py",
    "kimi_jax/parallel/test_collectives.py",
    "pallas_kernels/test_kda.py",
    "pallas_kernels/test_kda_decode.py",
    "pallas_kernels/test_sparse_mla_gpu.py",
    "pallas_kernels/test_grouped_matmul_gpu.py",
    "pallas_kernels/test_paged_indexer.py",
    "pallas_kernels/test_paged_indexer_tpu.py",
    "pallas_kernels/test_sparse_mla_backward_gpu.py",
    "kimi_jax/parallel/test_gradients.py",
    "kimi_jax/parallel/test_quantised_caches.py",
    "pallas_kernels/test_kda_tpu.py",
    "kimi_jax/parallel/test_experts.py",
    "kimi_jax/test_cache_formats.py",
    "kimi_jax/test_precision.py",
    "pallas_kernels/test_expert_layer_gpu.py",
    "pallas_kernels/test_lightning_indexer_tpu.py",
    "pallas_kernels/test_sparse_mla.py",
    "test_cache_quality.py",
    "test_notebooks.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long files first; others stay in their order."""
    folder = Path(__file__).parent
    place = {folder / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(LONG)))


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
