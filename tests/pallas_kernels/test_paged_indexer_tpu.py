"""The TPU kernel of the indexer over pages: interpreted and watched for races, and compiled for TPUs that aren't there."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

from kimi_jax.planning import topology_devices
from pallas_kernels.dispatch import noted_choices
from pallas_kernels.lightning_indexer import lightning_indexer, tpu
from pallas_kernels.lightning_indexer.pages import PagedKeys
from pallas_kernels.lightning_indexer.specs import DECODE, PAGED, PREFILL, IndexerSpec
from pallas_kernels.target import traced_for
from tests.pallas_kernels.test_lightning_indexer_tpu import INTERPRET, TOPOLOGIES
from tests.pallas_kernels.test_paged_indexer import arguments_of, check_segments, draw, expected, given, keys_of


def run(k: Any, page_table: jax.Array, **arguments: Any) -> jax.Array:
    """What the interpreted kernel selects, without a race."""
    width = arguments["q"].shape[-1]
    got = tpu.lightning_indexer(**arguments, k=PagedKeys(k, page_table, width), interpret=INTERPRET)
    jax.block_until_ready(got)
    assert interpreter.races is not None
    assert not interpreter.races.races_found
    return got


@pytest.mark.parametrize(
    ("form", "queries", "page", "pages", "top_k"),
    [
        ("mxfp8", 1, 64, 9, 40),
        ("mxfp8", 12, 1024, 5, 300),  # two tiles, of which the second one comes while the first one is scored
        ("bfloat16", 3, 32, 20, 40),
        ("float32", 9, 512, 9, 40),
    ],
)
def test_anywhere(form: str, queries: int, page: int, pages: int, top_k: int) -> None:
    lengths = [pages * page - 7, 0, 1, page]
    inputs = draw(4, queries, pages, page, heads=4, width=128, lengths=lengths, seed=page)
    got = run(**given(inputs, form), top_k=top_k)
    np.testing.assert_array_equal(got, expected(inputs, top_k))


def test_segments() -> None:
    check_segments(partial(run, top_k=30))


def test_what_it_refuses() -> None:
    with traced_for("tpu"):
        assert tpu.obstacle(**keys_of(32), top_k=3, named=False) is None
        assert "pages have 96 keys" in str(tpu.obstacle(**keys_of(96), top_k=3, named=False))
        assert "pages have 8192 keys" in str(tpu.obstacle(**keys_of(8192), top_k=3, named=False))
        assert "pages are bytes" in str(tpu.obstacle(**keys_of(32, "bytes"), top_k=3, named=False))


MORE = tuple(
    replace(spec, name=f"{spec.name}-pages-of-{page}", page=page)
    for spec in (*PREFILL, *DECODE, IndexerSpec("k31-prefill-4096x1m", 1, 4096, 2**20))
    for page in (32, 1024)
)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    ("spec", "mxfp8"),
    [
        *((spec, True) for spec in PAGED[:2]),
        (PAGED[3], False),
        *(pytest.param(spec, mxfp8, marks=pytest.mark.slow) for spec in MORE for mxfp8 in (False, True)),
    ],
    ids=lambda x: getattr(x, "name", "mxfp8" if x else "bfloat16"),
)
def test_compiles_for_tpus_without_copies_of_keys(topology: str, spec: IndexerSpec, mxfp8: bool) -> None:
    place = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])
    began = time.perf_counter()
    function = jax.jit(partial(lightning_indexer, top_k=spec.top_k))
    with traced_for("tpu"), noted_choices() as chosen:
        memory = function.lower(**arguments_of(spec, mxfp8, place)).compile().memory_analysis()
    assert time.perf_counter() - began < 60
    assert chosen["lightning_indexer"].name == "tpu"
    assert memory is not None
    # Scales are turned: 512 bytes for a page of up to 128.
    turned = mxfp8 * spec.batch * spec.keys * max(4, 512 // spec.page)
    assert memory.temp_size_in_bytes < 8 * 2**20 + 2 * turned
