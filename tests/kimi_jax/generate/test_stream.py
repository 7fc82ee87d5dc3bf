"""Text that comes as it is generated: whole characters, all of it, up to a stop string."""

import functools
import operator
import random
from typing import Any

import numpy as np
import pytest

from kimi_jax import Generation, Kimi, SamplingParams
from kimi_jax.generate import batch
from kimi_jax.programs import Program
from kimi_jax.text import collect
from tests.kimi_jax.generate import tiny
from tests.kimi_jax.generate.scripted import Actor
from tests.kimi_jax.text.streams import check_deltas, merged, random_cuts

PROMPT = [1, 2, 3]
TEXTS = (
    "plain words, and more of them",
    "中文👋 and 👩‍👧 family, é, ﷺ 𠀀",
    "line\nline\r\n\ttab  END of it END",
    "\x00\x1f\u2028 odd ones",
)


def encode(model: Kimi, text: str) -> list[int]:
    """As bytes, a token each: the worst case for a stream."""
    ids = {model.tokenizer.token_bytes(id): id for id in range(model.tokenizer.num_ranks)}
    return [ids[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("steps", [1, 3, 64])
def test_pieces_are_whole_characters_and_add_up(
    actor: Actor, text: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch._Pace, "adapt", lambda self, *_: setattr(self, "steps", steps))
    answer = encode(actor.model, text)
    model = actor.told([PROMPT], [answer])
    pieces = list(model.stream(PROMPT, 200))
    assert "".join(map(str, pieces)) == text
    assert all("\ufffd" not in str(piece) for piece in pieces)
    assert functools.reduce(operator.iadd, (piece.token_ids for piece in pieces), []) == [*answer, tiny.EOS]
    assert [piece.result is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert pieces[-1].result.text == text
    assert len(pieces) > 5 or steps == 64


def test_unfinished_character_at_the_end(actor: Actor) -> None:
    answer = encode(actor.model, "ab👋")[:-1]
    pieces = list(actor.told([PROMPT], [answer]).stream(PROMPT, len(answer)))
    assert "".join(map(str, pieces)) == "ab\ufffd" == pieces[-1].result.text
    assert pieces[-1].result.finish_reason == "length"


@pytest.mark.parametrize(
    ("stop", "want", "by"),
    [
        ("END", "line\nline\r\n\ttab  ", "END"),
        (["it END", "D of"], "line\nline\r\n\ttab  EN", "D of"),
        (["line\nlime", "\r"], "line\nline", "\r"),
        (["nothing like it"], "line\nline\r\n\ttab  END of it END", tiny.EOS),
        ("l", "", "l"),
        (["END of it END"], "line\nline\r\n\ttab  ", "END of it END"),
    ],
)
def test_stop_strings_across_tokens(actor: Actor, stop: list[str] | str, want: str, by: str | int) -> None:
    for answer in (encode(actor.model, TEXTS[2]), actor.model.tokenizer.encode(TEXTS[2])):
        model = actor.told([PROMPT], [answer])
        whole = model.generate(PROMPT, 200, stop=stop)
        pieces = list(model.stream(PROMPT, 200, stop=stop))
        assert "".join(map(str, pieces)) == want == whole.text
        assert (whole.finish_reason, whole.stopped_by) == ("stop", by)
        # Nothing is lost: the tokens go on to the one that completed the stop string, and no further.
        decoded = model.tokenizer.decode(whole.token_ids, skip_special=True)
        assert decoded.startswith(want + (by if isinstance(by, str) else ""))
        if isinstance(by, str):
            assert by not in model.tokenizer.decode(whole.token_ids[:-1])


class Counted:
    """A program that remembers how many steps its calls were asked for."""

    def __init__(self, program: Program):
        self.program = program
        self.steps: list[int] = []

    def prepare(self, *args: Any, **static: Any) -> Any:
        return self.program.prepare(*args, **static)

    def __call__(self, *args: Any, **static: Any) -> Any:
        self.steps.append(int(args[4]))
        return self.program(*args, **static)


@pytest.fixture
def counted(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> Counted:
    program = Counted(actor.model._runner.advance)
    monkeypatch.setattr(actor.model._runner, "advance", program)
    return program


def test_stop_string_ends_the_work_on_the_device(actor: Actor, counted: Counted) -> None:
    """Calls go on for one more at most, and the calls before it were short."""
    model = actor.told([PROMPT], [encode(actor.model, "a STOP b") + [7] * 1000])
    assert model.generate(PROMPT, 400, stop="STOP").text == "a "
    assert sum(counted.steps) <= 4 * len("a STOP")


def test_first_token_waits_for_nothing(actor: Actor, counted: Counted) -> None:
    stream = actor.told([PROMPT], [[5] * 100]).stream(PROMPT, 100)
    next(stream)
    assert counted.steps == []
    next(stream)
    # One call has come back, the next one is under way.
    assert counted.steps == [1, 1]


def test_prompts_that_end_early_are_handed_on_early(actor: Actor) -> None:
    answers = [encode(actor.model, "ab"), encode(actor.model, "x" * 300), encode(actor.model, "c"), []]
    model = actor.told([PROMPT] * 4, answers)
    pieces = list(model.stream([PROMPT] * 4, 400))
    ends = [place for place, piece in enumerate(pieces) if piece.result is not None]
    assert [pieces[place].index for place in ends] == [3, 2, 0, 1]
    assert ends[2] < len(pieces) / 2
    for row, text in enumerate(("ab", "x" * 300, "c", "")):
        assert "".join(str(piece) for piece in pieces if piece.index == row) == text


def test_errors_come_at_the_call_and_work_when_asked(actor: Actor) -> None:
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        actor.model.stream([[]])
    stream = actor.told([PROMPT], [[5] * 50]).stream(PROMPT, 10)
    assert next(stream).token_ids == [5]
    stream.close()


def test_streams_that_take_turns_or_are_left_do_not_see_each_other(actor: Actor) -> None:
    model = actor.constant(np.zeros(tiny.VOCABULARY, np.float32))
    want = [model.generate(PROMPT, 60, temperature=1.0, seed=seed).token_ids for seed in range(3)]
    rng = random.Random(3)
    streams = [model.stream(PROMPT, 60, temperature=1.0, seed=seed) for seed in range(3)]
    found: list[list[int]] = [[], [], []]
    waiting = [0, 1, 2]
    left = model.stream(PROMPT, 60, temperature=1.0, seed=9)
    next(left)
    while waiting:
        number = rng.choice(waiting)
        piece = next(streams[number], None)
        if piece is None:
            waiting.remove(number)
        else:
            found[number] += piece.token_ids
    assert found == want
    del left


def test_ctrl_c_inside_a_stream_leaves_the_model_in_order(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = actor.constant(np.zeros(tiny.VOCABULARY, np.float32))
    want = model.generate(PROMPT, 40, temperature=1.0, seed=1).token_ids
    original = batch._Pace.adapt

    def interrupt(pace: Any, steps: int, seconds: float) -> None:
        original(pace, steps, seconds)
        if pace.steps > 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(batch._Pace, "adapt", interrupt)
        stream = model.stream(PROMPT, 40, temperature=1.0, seed=1)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        assert list(stream) == []
        chat = model.chat_stream([{"role": "user", "content": "x"}], 40, temperature=1.0, seed=1)
        with pytest.raises(KeyboardInterrupt):
            list(chat)
        chat.close()
        assert chat.reply.finish_reason == "interrupted"
        assert 1 <= len(chat.reply.generation.token_ids) < 40
    assert model.generate(PROMPT, 40, temperature=1.0, seed=1).token_ids == want


def test_no_half_characters_in_what_chance_writes(actor: Actor) -> None:
    """Whatever the model says: pieces add up to the text, and no piece ends or begins inside a character."""
    model = actor.constant(np.zeros(tiny.VOCABULARY, np.float32))
    for seed in range(20):
        pieces = list(model.stream(PROMPT, 60, temperature=1.0, seed=seed))
        result = pieces[-1].result
        assert "".join(map(str, pieces)) == result.text
        assert result.text == model.tokenizer.decode(result.token_ids, skip_special=True)


@pytest.mark.parametrize("family", ["kimi_linear", "kimi_k3"])
def test_five_hundred_answers_in_any_division_parse_to_the_same(actor: Actor, family: str) -> None:
    """Answers that chance makes of markers, tags and a few letters, as a model gone wrong might."""
    model = actor.speaks(family)
    rng = random.Random(7)
    words = ["message", "think", "response", "tools", "call", "argument", "json", ' tool="f"', ' index="1"', ' key="k"']
    words += ["functions.f:0", '{"a": 1}', "{", "}", "<think>", "</think>", "a", "中", "👋"]
    allowed = {id for word in words for id in model.tokenizer.encode(word)}
    logits = np.full(tiny.VOCABULARY, -30.0, np.float32)
    logits[sorted(allowed)] = 0.0
    markers = [token.id for token in model.tokenizer.control_tokens if not token.name.startswith("<|reserved")]
    logits[markers] = 0.5
    actor.constant(logits)
    answers: list[Generation] = []
    for seed in range(0, 250, 4):
        sampling = [SamplingParams(temperature=1.0, seed=seed + row) for row in range(4)]
        answers += model.generate([PROMPT] * 4, 48, sampling=sampling)
    assert len(answers) >= 250
    format = model._language.need_chat()[1]
    for answer in answers:
        parser = format.parser(model.tokenizer)
        whole = parser.push_ids(answer.token_ids) + parser.finish(truncated=answer.finish_reason == "length")
        check_deltas(whole)
        for _ in range(3):
            cuts = random_cuts(rng, len(answer.token_ids))
            parser, deltas = format.parser(model.tokenizer), []
            for begin, end in zip([0, *cuts], [*cuts, len(answer.token_ids)], strict=True):
                deltas += parser.push_ids(answer.token_ids[begin:end])
            deltas += parser.finish(truncated=answer.finish_reason == "length")
            assert merged(deltas) == merged(whole)
            assert collect(deltas) == collect(whole)


def test_pace_follows_the_device() -> None:
    pace = batch._Pace(True)
    assert pace.steps == 1
    for _ in range(20):
        pace.adapt(pace.steps, pace.steps * 0.0001)
    assert pace.steps == batch.STEPS
    pace.adapt(64, 64 * 0.02)
    assert pace.steps == 2
    pace.adapt(2, 2 * 3.0)
    assert pace.steps == 1
    assert batch._Pace(False).steps == batch.STEPS
