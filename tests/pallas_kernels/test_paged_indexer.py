"""The indexer over pages of a shared pool: out of order, shared, partly filled, with anything where nobody looks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import UnsupportedImplementationError
from pallas_kernels.lightning_indexer import TwoStage, gpu, lightning_indexer
from pallas_kernels.lightning_indexer.pages import PagedKeys, paged_keys
from pallas_kernels.lightning_indexer.specs import PAGED, IndexerSpec
from pallas_kernels.mxfp8 import Mxfp8, to_page
from pallas_kernels.sparse_mla import paged_sparse_mla, sparse_mla
from tests import oracle_dsa as oracle
from tests.pallas_kernels.test_lightning_indexer_gpu import interpreter

BF16 = jnp.dtype("bfloat16")
RNG = np.random.default_rng
SHAPE = jax.ShapeDtypeStruct
FORMATS = ("float32", "bfloat16", "mxfp8", "bytes")


def draw(
    batch: int,
    queries: int,
    pages: int,
    page: int,
    *,
    heads: int = 3,
    width: int = 32,
    lengths: Any = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Exact numbers in a pool, of which every row has some pages, the first one that of all rows, and NaN elsewhere.

    Args:
        batch: rows.
        queries: of a row, the last ones of its tokens; -1 where it has fewer.
        pages: in a row of the table.
        page: keys of each.
        heads: of a query.
        width: of a head.
        lengths: of the rows.
        seed: of all numbers.
    """
    rng = RNG(seed)
    lengths = rng.integers(0, pages * page + 1, batch) if lengths is None else np.asarray(lengths)
    pool = np.full((batch * pages + 3, page, width), np.nan, np.float32)
    free = list(rng.permutation(len(pool)))
    # What is behind a row's end: no page, or a page of somebody else's.
    table = np.where(rng.random((batch, pages)) < 0.5, rng.integers(0, len(pool), (batch, pages)), 10**6)
    table[rng.random((batch, pages)) < 0.3] = -1
    keys = np.zeros((batch, pages * page, width), np.float32)
    shared = free.pop()
    pool[shared] = rng.integers(-2, 3, (page, width))
    for row, length in enumerate(lengths):
        for number in range(-(-length // page)):
            some = min(page, length - number * page)
            whole = number == 0 and some == page
            place = table[row, number] = shared if whole else free.pop()
            if not whole:
                pool[place, :some] = rng.integers(-2, 3, (some, width))
            keys[row, number * page : number * page + some] = pool[place, :some]
    positions = lengths[:, None] - queries + np.arange(queries)
    return {
        "q": rng.integers(-2, 3, (batch, queries, heads, width)).astype(np.float32),
        "pool": pool,
        "keys": keys,
        "w": (rng.integers(-4, 5, (batch, queries, heads)) / 4).astype(np.float32),
        "q_positions": np.maximum(positions, -1),
        "page_table": table.astype(np.int32),
    }


def given(inputs: dict[str, Any], form: str) -> dict[str, Any]:
    """Arguments of `lightning_indexer`."""
    pool = jnp.asarray(inputs["pool"])
    pages: Any = Mxfp8.quantize(pool) if form in ("mxfp8", "bytes") else pool.astype(form)
    q = jnp.asarray(inputs["q"])
    return {
        "q": Mxfp8.quantize(q) if form == "mxfp8" else q if form == "float32" else q.astype(BF16),
        "k": to_page(pages) if form == "bytes" else pages,
        "w": jnp.asarray(inputs["w"]),
        "q_positions": jnp.asarray(inputs["q_positions"]),
        "page_table": jnp.asarray(inputs["page_table"]),
    }


def expected(inputs: dict[str, Any], top_k: int) -> np.ndarray:
    chosen = oracle.selections(inputs["q"], inputs["keys"], inputs["w"], top_k, inputs["q_positions"])
    return oracle.padded(chosen, top_k)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("form", FORMATS)
def test_anywhere(implementation: Any, form: str) -> None:
    # Many keys at a time, tiles that begin and end inside pages, and one key at a time; more places than tokens.
    for page, top_k, budget in ((8, 11, 2**28), (5, 11, 40000), (3, 70, 1)):
        inputs = draw(5, 4, 9, page, lengths=[9 * page, 0, 1, page, 4 * page + 2], seed=page)
        options = {"top_k": top_k, "budget_bytes": budget, "implementation": implementation}
        got = jax.jit(partial(lightning_indexer, **options))(**given(inputs, form))
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, expected(inputs, top_k), err_msg=str(page))


@pytest.mark.parametrize(
    ("form", "queries", "page", "beforehand"),
    [
        ("mxfp8", 1, 64, False),
        ("bytes", 2, 96, False),
        ("bfloat16", 8, 64, False),
        ("bytes", 8, 32, False),
        ("mxfp8", 8, 256, True),
    ],
)
def test_hopper_kernels_interpreted(
    monkeypatch: pytest.MonkeyPatch, form: str, queries: int, page: int, beforehand: bool
) -> None:
    """A few queries, and blocks of eight, whose keys are converted on the way or beforehand."""
    monkeypatch.setattr(gpu, "FEW_QUERIES", 2)
    if not beforehand:
        monkeypatch.setattr(gpu, "WIDE_BYTES", 0)
    lengths = [2 * page + 7, 0] if page < 256 else [300, 1]
    inputs = draw(len(lengths), queries, 3, page, heads=32, width=128, lengths=lengths, seed=page)
    arguments = given(inputs, form)
    pages, table = arguments.pop("k"), arguments.pop("page_table")
    arguments["k"] = PagedKeys(pages, table, 128)
    assert gpu.unfit(arguments["q"], arguments["k"], arguments["w"], 40, False) is None
    got = gpu.lightning_indexer(**arguments, top_k=40, interpret=interpreter())
    np.testing.assert_array_equal(got, expected(inputs, 40))


def test_a_sequence_ends_before_its_first_missing_page() -> None:
    inputs = draw(3, 2, 6, 4, lengths=[24, 24, 24])
    inputs["page_table"][0, 3], inputs["page_table"][1, 0], inputs["page_table"][2, 5] = -1, len(inputs["pool"]), -7
    got = lightning_indexer(**given(inputs, "float32"), top_k=5)
    inputs["q_positions"] = np.minimum(inputs["q_positions"], np.array([[11], [-1], [19]]))
    np.testing.assert_array_equal(got, expected(inputs, 5))


def check_segments(select: Callable[..., jax.Array]) -> None:
    """`select` chooses 30 keys of the segments that it is given."""
    page = 64
    inputs = draw(2, 6, 5, page, width=128, lengths=[300, 200])
    keys = np.sort(RNG(1).integers(0, 3, (2, 5 * page)), axis=1)
    keys[:, 100:110] = -1
    own = np.array([[0, 1, 2, 2, -1, 2], [1, 0, 2, 1, 0, 0]])
    arguments = given(inputs, "mxfp8") | {"segment_ids": jnp.asarray(own), "key_segment_ids": jnp.asarray(keys)}
    got = select(**arguments)
    table = oracle.scores(inputs["q"], inputs["keys"], inputs["w"])
    for row in range(2):
        for query in range(6):
            limit = inputs["q_positions"][row, query]
            mask = oracle.visible(limit, 5 * page, keys[row], own[row, query])
            want = oracle.select(table[row, query], mask, 30)
            np.testing.assert_array_equal(got[row, query], want + [-1] * (30 - len(want)))


def test_segments() -> None:
    check_segments(partial(lightning_indexer, top_k=30))


def test_memory_follows_the_budget_and_not_the_pages() -> None:
    """Pages of 64 MiB, of which nothing but a tile is ever copied."""
    arguments = {
        "q": SHAPE((1, 64, 4, 128), jnp.float32),
        "k": SHAPE((2048, 64, 128), jnp.float32),
        "w": SHAPE((1, 64, 4), jnp.float32),
        "q_positions": SHAPE((1, 64), jnp.int32),
        "page_table": SHAPE((1, 2048), jnp.int32),
    }
    options: dict[str, Any] = {"top_k": 64, "budget_bytes": 2**24, "implementation": "xla"}
    memory = jax.jit(partial(lightning_indexer, **options)).lower(**arguments).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2**25


# --- which calls are taken -------------------------------------------------------------------------------------------


def refusal(inputs: dict[str, Any], form: str, **change: Any) -> str:
    arguments = {**given(inputs, form), **change}
    with pytest.raises((ValueError, TypeError)) as caught:
        paged_keys("lightning_indexer", *(arguments[name] for name in ("q", "k", "page_table")))
    return str(caught.value)


def test_what_is_refused() -> None:
    inputs = draw(2, 2, 3, 4)
    table = jnp.asarray(inputs["page_table"])
    assert "page_table has shape [1, 3]; it must be [B, N] = [2, any]" in refusal(inputs, "mxfp8", page_table=table[:1])
    assert "page_table has dtype float32" in refusal(inputs, "mxfp8", page_table=table.astype(jnp.float32))
    assert "it must be [P, page, K] = [any, any, 32]" in refusal(inputs, "mxfp8", k=jnp.zeros((9, 4, 16)))
    assert "pages of bytes are uint8 [P, page * 33]" in refusal(inputs, "bytes", k=jnp.zeros((9, 34), jnp.uint8))
    with pytest.raises(ValueError, match="two_stage with a page_table"):
        lightning_indexer(**given(inputs, "mxfp8"), top_k=3, two_stage=TwoStage())
    with pytest.raises(UnsupportedImplementationError, match="NVIDIA Hopper GPUs, and the platform is 'cpu'"):
        lightning_indexer(**given(inputs, "mxfp8"), top_k=3, implementation="gpu")


def keys_of(page: int, form: str = "mxfp8") -> dict[str, Any]:
    """What kernels look at before they take a call: four pages of 128 channels."""

    def array(*shape: int) -> Any:
        if form not in ("mxfp8", "bytes"):
            return jnp.zeros(shape, form)
        return Mxfp8(SHAPE(shape, jnp.float8_e4m3fn), SHAPE((*shape[:-1], shape[-1] // 32), jnp.uint8))

    pages = SHAPE((4, page * 132), jnp.uint8) if form == "bytes" else array(4, page, 128)
    keys = PagedKeys(pages, SHAPE((1, 2), jnp.int32), 128)
    return {"q": array(1, 1, 32, 128), "k": keys, "w": jnp.zeros((1, 1, 32))}


def test_what_the_hopper_kernels_refuse() -> None:
    assert gpu.unfit(**keys_of(96, "bytes"), top_k=3, segmented=False) is None
    assert "pages have 48 keys; it copies 32 at a time" in str(gpu.unfit(**keys_of(48), top_k=3, segmented=False))
    assert "k is float32" in str(
        gpu.unfit(**keys_of(32, "float32") | {"q": keys_of(32)["q"]}, top_k=3, segmented=False)
    )


def arguments_of(spec: IndexerSpec, mxfp8: bool, place: Any = None) -> dict[str, Any]:
    """Abstract arguments."""

    def at(shape: tuple[int, ...], dtype: Any) -> Any:
        return SHAPE(shape, dtype, sharding=place)

    arguments: dict[str, Any] = {name: at(x.shape, x.dtype) for name, x in spec.arguments().items()}
    for name in "qk" if mxfp8 else "":
        *outer, width = arguments[name].shape
        arguments[name] = Mxfp8(at((*outer, width), jnp.float8_e4m3fn), at((*outer, width // 32), jnp.uint8))
    return arguments


@pytest.mark.parametrize("spec", PAGED, ids=lambda spec: spec.name)
@pytest.mark.parametrize("mxfp8", [False, True])
def test_it_lowers_for_a_gpu_that_is_not_here(spec: IndexerSpec, mxfp8: bool) -> None:
    def run(arguments: dict[str, Any]) -> jax.Array:
        keys = PagedKeys(arguments.pop("k"), arguments.pop("page_table"), spec.key_width)
        return gpu.lightning_indexer(**arguments, k=keys, top_k=spec.top_k)

    lowered = jax.jit(run).trace(arguments_of(spec, mxfp8)).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_selected_positions_name_latents_of_the_same_table() -> None:
    """The selection and the attention over one page table: as over keys and latents in order."""
    page, pages, top_k = 8, 4, 6
    inputs = draw(3, 2, pages, page, lengths=[32, 9, 1])
    rng = RNG(5)
    latents = rng.standard_normal((len(inputs["pool"]), page, 24)).astype(np.float32)
    table = np.clip(inputs["page_table"], 0, len(latents) - 1)
    q = jnp.asarray(rng.standard_normal((3, 2, 2, 24)), jnp.float32)
    chosen = lightning_indexer(**given(inputs, "float32"), top_k=top_k)
    options: dict[str, Any] = {"latent_width": 16, "scale": 0.3}
    got = paged_sparse_mla(
        q, jnp.asarray(latents), chosen, page_table=given(inputs, "float32")["page_table"], **options
    )
    in_order = jnp.asarray(latents[table].reshape(3, pages * page, 24))
    want = sparse_mla(q, in_order, jnp.asarray(expected(inputs, top_k)), **options)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
