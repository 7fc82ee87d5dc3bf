"""Keys that a warpgroup of the Hopper kernel copies one by one, from places in shared memory."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lightning_indexer.gpu_prefill import SWIZZLED, WIDTH, inline, words
from pallas_kernels.lightning_indexer.gpu_select import COLUMNS

_SCALAR, _REF = plgpu.Layout.WG_SPLAT(()), plgpu.RefType()


def copy_listed(warp: Any, sources: list[Any], targets: list[Any], places: Any, num_keys: int) -> None:
    """Starts copying this warp's 32 of a tile's listed keys, in the words of `gpu_warp.Warp`.

    Args:
        warp: the words.
        sources: where keys of 256 bytes are, or those of 128 and their scales of 4.
        targets: where a tile of them is in shared memory: the former as tiles of 8 x 64, 128 bytes swizzled.
        places: where the tile's positions are; those past the end are read as the last key, which nobody sees.
        num_keys: in the row.
    """
    packed = len(sources) == 2
    chunks = 8 if packed else 16  # of four integers
    first = warp.mul(warp.number, 32)

    def key_at(which: Any) -> Any:
        return warp.smaller(warp.load(places, which), num_keys - 1)

    for part in range(chunks):
        which = warp.add(warp.add(first, 32 // chunks * part), warp.quotient(warp.lane, chunks))
        chunk = warp.both(warp.lane, chunks - 1)
        begin = warp.add(warp.mul(key_at(which), 4 * chunks), warp.mul(chunk, 4))
        if packed:
            target = warp.add(warp.mul(which, 32), warp.mul(chunk, 4))
        else:
            line = warp.add(warp.mul(warp.quotient(which, 8), 512), warp.mul(warp.both(which, 7), 32))
            column = warp.differ(warp.both(chunk, 7), warp.both(which, 7))
            target = warp.add(line, warp.add(warp.mul(warp.quotient(chunk, 8), 256), warp.mul(column, 4)))
        warp.copy(sources[0], begin, targets[0], target, 4)
    if packed:
        which = warp.add(first, warp.lane)
        warp.copy(sources[1], key_at(which), targets[1], which, 1)


class Copies:
    """Rows of keys that a warpgroup copies by itself; each warp its own 32 rows of a tile."""

    def __init__(self, num_keys: int, num_scales: int) -> None:
        self.num_keys, self.num_scales = num_keys, num_scales

    def gather(self, keys: list[Any], targets: list[Any], places: Any, row: Array) -> None:
        """Starts copying the keys at 128 places; those past the end are keys that nobody sees."""

        def emit(context: Any, *given: Any) -> None:
            *refs, places, row = given
            warp, place = words()
            sources, targets = refs[: len(refs) // 2], refs[len(refs) // 2 :]
            each = [self.num_keys * (WIDTH // 4 if len(sources) == 2 else WIDTH // 2), self.num_scales]
            rows = [
                warp.row(place(source), row.registers.item(), size) for source, size in zip(sources, each, strict=False)
            ]
            copy_listed(warp, rows, [place(target) for target in targets], place(places), self.num_keys)

        swizzled = plgpu.RefType(SWIZZLED) if len(keys) == 1 else _REF
        types = (*(_REF for _ in keys), *(swizzled for _ in keys), _REF, _SCALAR)
        inline(emit, types)(*keys, *targets, places, row)

    def commit(self) -> None:
        """Ends a group of copies."""
        inline(lambda context: words()[0].commit_copies(), ())()

    def arrived(self, running: int) -> None:
        """Until at most that many of this warp's last groups are still on their way."""

        def emit(context: Any) -> None:
            warp, _ = words()
            warp.wait_for_copies(running)
            warp.meet()

        inline(emit, ())()


class PlainCopies:
    """The same for the interpreter, at once."""

    def gather(self, keys: list[Any], targets: list[Any], places: Any, row: Array) -> None:
        """Copies the keys at 128 places."""
        last = keys[0].shape[1] - 1

        def copy(which: Array, carry: tuple[()]) -> tuple[()]:
            at = jnp.minimum(places[which], last)
            targets[0][which] = keys[0][row, at]
            if len(keys) == 2:
                each = WIDTH // 4
                line, begin = lax.div(at, each), lax.rem(at, each) * 4
                scale = keys[1][row, line, pl.ds(begin, 4)]
                targets[1][lax.div(which, each), pl.ds(lax.rem(which, each) * 4, 4)] = scale
            return carry

        # One by one: a gather waits for a thread of XLA's, all of which may be waiting for this one.
        lax.fori_loop(0, COLUMNS, copy, ())

    def commit(self) -> None:
        """Nothing is on its way here."""

    def arrived(self, running: int) -> None:
        """Nothing is on its way here."""
