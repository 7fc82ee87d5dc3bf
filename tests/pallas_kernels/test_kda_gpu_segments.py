"""KDA's Hopper prefill in segments, with states on the way: interpreted on a CPU, and how it cuts sequences."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import gpu, gpu_prefill
from pallas_kernels.kda import segments as segments_by_time
from pallas_kernels.kda.gpu_prefill import plan
from tests import oracle_kda as oracle
from tests.pallas_kernels.test_kda_gpu import BF16, BOUND, CLOSE, SCALE, WIDTH, draw, error, interpreter, oracle_inputs


def test_segments_and_states_on_the_way() -> None:
    """Slow decay, so that what enters the second segment matters to its last token."""
    inputs = draw(1, 128, 1, seed=4)
    inputs["dt_bias"] -= 6.0
    inputs["initial_state"] *= 10
    positions = [0, 21, 64, 200]
    arrays: dict[str, Any] = {name: jnp.asarray(x) for name, x in inputs.items()}
    o, last, states = gpu.kda_with_states(
        **arrays,
        lengths=None,
        segment_ids=None,
        num_segments=None,
        state_positions=jnp.asarray([positions]),
        scale=SCALE,
        gate_lower_bound=BOUND,
        segments=3,
        interpret=interpreter(),
    )
    wide: dict[str, Any] = oracle_inputs(inputs)
    want, wanted = oracle.kda(*(wide[name] for name in oracle.NAMES))
    assert error(np.asarray(o, float), want) < CLOSE
    assert error(np.asarray(last), wanted[-1]) < CLOSE
    assert states is not None
    for index, position in enumerate(positions):
        assert error(np.asarray(states[:, index]), wanted[min(position, 128)]) < CLOSE
    np.testing.assert_array_equal(states[:, 0], inputs["initial_state"])


@pytest.mark.parametrize("segments", [1, 2, 3, 7])
def test_segments_depend_on_their_own_sequence_alone(segments: int) -> None:
    def cuts(sizes: list[int]) -> list[np.ndarray]:
        """For every sequence the numbers of its chunks that begin its segments."""
        ids = jnp.asarray(np.repeat([*range(len(sizes)), -1], [*sizes, 1024 - sum(sizes)])[None], jnp.int32)
        work = plan(1, 1024, None, ids, len(sizes))
        begins, counts = np.asarray(gpu_prefill.cut(work, segments)).reshape(2, len(sizes), segments)
        whole, number = np.asarray(work.parts)
        np.testing.assert_array_equal(begins[:, 0], whole)
        np.testing.assert_array_equal(begins[:, 1:], (begins + counts)[:, :-1])
        np.testing.assert_array_equal(counts.sum(axis=1), number)
        own = np.where(
            np.arange(segments) == segments - 1, np.asarray(work.own)[:, None] - begins + whole[:, None], counts
        )
        assert own.min() >= 0
        assert (own.max(axis=1) - own.min(axis=1)).max() <= 1
        return [*(begins - whole[:, None])]

    first, second = cuts([320, 0, 448]), cuts([64, 64, 448])
    np.testing.assert_array_equal(first[2], second[2])
    lengths = [jnp.asarray(x) for x in ([640, 1024], [640, 1])]
    rows = [np.asarray(gpu_prefill.cut(plan(2, 1024, x, None, None), segments))[:, :segments] for x in lengths]
    np.testing.assert_array_equal(rows[0], rows[1])


def test_states_on_the_way_have_chunks_that_end_there() -> None:
    lengths, positions = np.array([200, 70, 0]), np.array([[70, 0, 200, 8, 70], [70, 3, 500, 64, 1], [0, 4, 0, 0, 0]])
    work, index = gpu_prefill.plan_stops(3, 200, jnp.asarray(lengths), jnp.asarray(positions))
    tokens, parts, stops, index = (np.asarray(x) for x in (work.tokens, work.parts, work.stops, index))
    for row, length in enumerate(lengths):
        begin, count = parts[:, row]
        seen, at = [], {}
        for chunk in range(begin, begin + count):
            own, first, start, end, written = tokens[:, chunk]
            assert own == row
            seen += range(first + start, first + written)
            if stops[chunk] >= 0:
                at[stops[chunk]] = first + end
        assert seen == [*range(200)]
        for position, which in zip(positions[row], index[row], strict=True):
            assert (at[which] if which >= 0 else 0) == min(position, length)


def test_the_number_of_segments_follows_the_model_of_their_time() -> None:
    chunks, processors = 128, 132
    assert segments_by_time.best(1, 96, chunks, processors) == 1  # the heads alone fill the chip
    assert segments_by_time.best(1, 12, chunks, processors) > 2
    assert segments_by_time.best(16, 12, chunks, processors) == 1
    assert segments_by_time.best(1, 12, 1, processors) == 1
    for heads in (1, 12, 24, 32, 96):
        best = segments_by_time.best(1, heads, chunks, processors)
        times = [segments_by_time.seconds(n, 1, heads, chunks, processors) for n in range(1, 17)]
        assert times[best - 1] <= min(times) / segments_by_time.WORTH
    q = jnp.zeros((1, 8192, 12, WIDTH), BF16)
    assert gpu.in_words(q, None, 4).startswith("4 segments of a sequence")
    assert "by the model" in gpu.in_words(q, None, None)


@pytest.mark.parametrize("packed", [False, True])
def test_it_lowers_for_a_gpu_that_is_not_here(packed: bool) -> None:
    token = jax.ShapeDtypeStruct((1, 512, 12, WIDTH), BF16)
    numbers = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((12,), (12, WIDTH))]

    def run(q: Any, k: Any, v: Any, g: Any, beta: Any, a_log: Any, bias: Any, whole: Any) -> Any:
        how: dict[str, Any] = {"segment_ids": whole, "num_segments": 3, "state_positions": None}
        how = how if packed else {"segment_ids": None, "num_segments": None, "state_positions": whole[:, :5]}
        how |= {"initial_state": None, "lengths": None, "scale": SCALE, "gate_lower_bound": BOUND, "segments": 4}
        return gpu.kda_with_states(q, k, v, g, beta, a_log, bias, **how)

    arguments = (*(token,) * 4, jax.ShapeDtypeStruct(token.shape[:3], BF16), *numbers)
    arguments = (*arguments, jax.ShapeDtypeStruct((1, 512), jnp.int32))
    lowered = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("kda_chunks", "kda_summarise", "kda_combine", "kda_pass"):
        assert name in lowered
