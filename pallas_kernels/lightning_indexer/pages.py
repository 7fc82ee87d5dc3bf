"""Index keys in pages of a pool that sequences share."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.lightning_indexer.validate import check_floating, check_integers, check_shape
from pallas_kernels.mxfp8 import BLOCK, Mxfp8, from_page


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedKeys:
    """Position s of sequence b is row s mod page of page page_table[b, floor(s / page)].

    Attributes:
        pages: [P, page, K] in any format of keys, or uint8 [P, page · (K + K/32)], the bytes of `mxfp8.to_page`.
        page_table: int32 [B, N]. Numbers that are no page stand for any page.
        width: K.
    """

    # Any, because a pytree of this type also holds shapes, shardings or anything else that jax.tree.map puts there.
    pages: Any
    page_table: Any
    width: int = field(metadata={"static": True})

    @property
    def joined(self) -> bool:
        """Whether a page is bytes, its elements before its scales."""
        return not isinstance(self.pages, Mxfp8) and len(self.pages.shape) == 2

    @property
    def mxfp8(self) -> bool:
        """Whether keys are MXFP8."""
        return self.joined or isinstance(self.pages, Mxfp8)

    @property
    def page(self) -> int:
        """Keys of a page."""
        if not self.joined:
            return self.pages.shape[1]
        return self.pages.shape[1] // (self.width + self.width // BLOCK)

    @property
    def shape(self) -> tuple[int, int, int]:
        """[B, S, K] of the keys that the table names."""
        batch, count = self.page_table.shape
        return batch, count * self.page, self.width

    def tile(self, start: jax.Array, size: int) -> Float[Array, "B C K"] | Mxfp8:
        """Copies of the keys at positions `start .. start + size - 1`."""
        positions = start + jnp.arange(size, dtype=jnp.int32)
        page = jnp.take(self.page_table, positions // self.page, axis=1, mode="clip")
        page = jnp.clip(page, 0, self.pages.shape[0] - 1)
        row = jnp.broadcast_to(positions % self.page, page.shape)
        if not self.joined:
            return jax.tree.map(lambda x: x.at[page, row].get(mode="promise_in_bounds"), self.pages)
        width, groups = self.width, self.width // BLOCK

        def read(page: jax.Array, begin: jax.Array, count: int) -> jax.Array:
            return jax.lax.dynamic_slice(self.pages, (page, begin), (1, count))[0]

        take = jax.vmap(jax.vmap(read, (0, 0, None)), (0, 0, None))
        elements = jax.lax.bitcast_convert_type(take(page, row * width, width), jnp.float8_e4m3fn)
        return Mxfp8(elements, take(page, self.page * width + row * groups, groups))

    def whole(self) -> Float[Array, "B S K"] | Mxfp8:
        """Copies of all keys."""
        page = jnp.clip(self.page_table, 0, self.pages.shape[0] - 1)
        found = jax.tree.map(lambda x: x.at[page].get(mode="promise_in_bounds"), self.pages)
        if self.joined:
            found = from_page(found, self.width)
        return jax.tree.map(lambda x: x.reshape(page.shape[0], -1, x.shape[-1]), found)


def paged_keys(operation: str, q: Any, k: Any, page_table: jax.Array) -> PagedKeys:
    """Pages with their table.

    Raises:
        ValueError: shapes disagree.
        TypeError: a dtype is wrong.
    """
    width = q.shape[-1]
    check_shape(operation, "page_table", page_table, "[B, N]", (q.shape[0], None))
    check_integers(operation, page_table=page_table)
    if not isinstance(k, Mxfp8) and k.ndim == 2:
        row = width + width // BLOCK
        if k.dtype != jnp.uint8 or width % BLOCK or k.shape[1] % row or not k.size:
            raise ValueError(
                f"{operation}: k is {k.dtype} of shape {list(k.shape)} with a page_table; pages of bytes are uint8 "
                f"[P, page * {row}], MXFP8 elements of a page before their scales, and others [P, page, {width}]."
            )
    else:
        check_shape(operation, "k", k, "[P, page, K]", (None, None, width))
        if isinstance(k, Mxfp8):
            k.check(f"{operation}: k")
        else:
            check_floating(operation, k=k)
    # Numbers of more than 32 bits are no pages, and must not become some.
    most = jnp.iinfo(jnp.int32).max
    return PagedKeys(k, jnp.clip(page_table, -1, most).astype(jnp.int32), width)


def last_held(keys: PagedKeys) -> Int[Array, "B 1"]:
    """The last position of each sequence before its first missing page, whose number is none of the pool's; -1: none."""
    table = keys.page_table
    held = (table >= 0) & (table < keys.pages.shape[0])
    first = jnp.min(jnp.where(held, table.shape[1], jnp.arange(table.shape[1], dtype=jnp.int32)), axis=1)
    return first[:, None] * keys.page - 1
