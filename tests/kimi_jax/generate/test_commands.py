"""`kimi-jax generate` and `kimi-jax chat`, in this process with a model that says what it's told, and as they are."""

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from kimi_jax import Kimi, cli
from kimi_jax.commands.chat_session import Session
from kimi_jax.generate.language import Language
from kimi_jax.text import collect
from tests.kimi_jax.generate import tiny
from tests.kimi_jax.generate.scripted import Actor
from tests.kimi_jax.generate.test_chat import K2_ANSWER, TOOLS, XTML_ANSWER

ROOT = Path(__file__).parents[3]


class Result:
    def __init__(self, status: int | str | None, out: str, err: str):
        self.status, self.out, self.err = status, out, err


@pytest.fixture
def run(actor: Actor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs a command on the actor's model, which is loaded from nowhere."""
    monkeypatch.setattr(Kimi, "from_pretrained", lambda *_, **__: actor.model)

    def call(*arguments: str, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            status: int | str | None = cli.main(arguments)
        except SystemExit as leaving:
            status = leaving.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Result(status, out, err)

    return call


def says(actor: Actor, text: str, prompt: str = "hello") -> None:
    tokenizer = actor.model.tokenizer
    actor.told([tokenizer.encode(prompt)], [[*tokenizer.encode(text), tiny.EOS]])


# generate


def test_generate_prints_the_text(actor: Actor, run: Callable[..., Result]) -> None:
    says(actor, " world 👋")
    for found in (
        run("generate", "m", "hello"),
        run("generate", "m", "-", stdin="hello"),
        run("generate", "m", stdin="hello"),
    ):
        assert (found.status, found.out) == (0, " world 👋\n")
        assert "new tokens after" in found.err
    assert run("generate", "m", "hello", "--quiet").err == ""
    assert run("generate", "m", "hello", "--stop", "ld", "--stop", "x").out == " wor\n"
    assert run("generate", "m", "hello", "--max-new-tokens", "1").out.strip() in "world"


def test_generate_prints_json(actor: Actor, run: Callable[..., Result]) -> None:
    says(actor, "a\nb")
    found = json.loads(run("generate", "m", "hello", "--json", "--top-logprobs", "2").out)
    assert (found["text"], found["finish_reason"], found["stopped_by"]) == ("a\nb", "stop", tiny.EOS)
    assert len(found["logprobs"]) == len(found["top_logprobs"]) == len(found["token_ids"])
    assert found["timings"]["prefill_seconds"] > 0


def test_generate_from_token_ids(actor: Actor, run: Callable[..., Result]) -> None:
    actor.told([[1, 2, 3]], [[5, 6, tiny.EOS]])
    found = run("generate", "m", "--token-ids", "1, 2,3")
    assert found.out == actor.model.tokenizer.decode([5, 6]) + "\n"
    assert "3 new tokens after 3 of the prompt" in found.err


def test_generate_without_a_tokenizer_prints_ids(actor: Actor, run: Callable[..., Result]) -> None:
    actor.told([[1, 2, 3]], [[5, 6, tiny.END]])
    actor.model._language = Language.of(None, actor.model.config, "tiktoken.model is missing.")
    assert run("generate", "m", "--token-ids", "1,2,3").out == f"5 6 {tiny.END} \n"
    found = run("generate", "m", "hello")
    assert (found.status, found.out) == (1, "")
    assert "This model has no tokenizer: tiktoken.model is missing." in found.err


def test_closed_pipe_is_no_error(actor: Actor, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    says(actor, "more than anybody wants to read")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        found = run("generate", "m", "hello", "--quiet")
    assert (found.status, found.err) == (141, "")


def test_generate_samples(actor: Actor, run: Callable[..., Result]) -> None:
    actor.constant(np.zeros(tiny.VOCABULARY, np.float32))
    flags = ["--temperature", "1.0", "--top-k", "2000", "--top-p", "0.99", "--min-p", "0.001", "--max-new-tokens", "20"]
    one, same, other = (run("generate", "m", "hello", *flags, "--seed", seed).out for seed in ("1", "1", "2"))
    assert one == same != other


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["m", "hello", "--temperature", "-1"], "temperature=-1.0 must be from 0"),
        (["m", "hello", "--top-p", "0"], "top_p=0.0 must be above 0"),
        (["m", "hello", "--max-new-tokens", "0"], "max_new_tokens=0 must be an integer"),
        (["m", "hello", "--max-new-tokens", "99999"], "exceed max_position_embeddings=16384"),
        (["m", "hello", "--stop", ""], "empty string"),
        (["m", "hello", "--token-ids", "1"], "give one of them"),
        (["m", "--token-ids", "1,x"], "must be whole numbers with commas between them"),
        (["m", "--token-ids", "4000"], "holds token id 4000; legal ids are 0 to vocab_size-1=2255"),
        (["m", "hello", "--top-logprobs", "3"], "--json only"),
        (["m", "hello", "--json", "--top-logprobs", "21"], "top_logprobs=21"),
        (["m", ""], "prompt 0 is empty"),
        (["m", "a\udc80"], "lone surrogate"),
    ],
)
def test_generate_refuses_in_a_sentence(run: Callable[..., Result], arguments: list[str], words: str) -> None:
    found = run("generate", *arguments)
    assert found.status == 1
    assert found.out == ""
    assert found.err.startswith("kimi-jax: error: ")
    assert words in found.err
    assert found.err.count("\n") == 1


def test_output_to_a_terminal_is_harmless(
    actor: Actor, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    says(actor, "a\x1b]0;title\x07b\x9bc\x7f\td")
    plain = run("generate", "m", "hello").out
    assert plain == "a\x1b]0;title\x07b\x9bc\x7f\td\n"
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    assert run("generate", "m", "hello").out == "a␛]0;title␇b\ufffdc␡\td\n"


# chat


@pytest.fixture
def talk(actor: Actor, run: Callable[..., Result]) -> Callable[..., Result]:
    """A chat with the lines given, in which the model gives one answer whatever it is asked."""

    def call(*lines: str, answer: str = "Hello.<|im_end|>", arguments: tuple[str, ...] = ()) -> Result:
        ids = actor.model.tokenizer.encode(answer, allow_special=True)
        original = actor.model._run

        def told(asked: list[Any], **options: Any) -> Any:
            actor.told([request.token_ids for request in asked], [ids] * len(asked))
            return original(asked, **options)

        actor.model._run = told
        try:
            return run("chat", "m", *arguments, stdin="".join(f"{line}\n" for line in lines))
        finally:
            actor.model._run = original

    return call


def test_chat_answers_each_line(talk: Callable[..., Result]) -> None:
    found = talk("hi", "", "there \\", "two lines")
    assert (found.status, found.out, found.err) == (0, "Hello.\nHello.\n", "")


def test_chat_saves_what_was_said(talk: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    lines = ("/system Be brief.", "/set temperature 0.5", "hi \\", "you", "//help me", f"/save {file}", f"/save {file}")
    found = talk(*lines)
    assert "exists already; /save writes new files only" in found.err
    saved = json.loads(file.read_text())
    assert saved["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi \nyou"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "/help me"},
        {"role": "assistant", "content": "Hello."},
    ]
    assert saved["settings"] == {"temperature": 0.5}
    reset = tmp_path / "reset.json"
    talk("hi", "/reset", f"/save {reset}")
    assert json.loads(reset.read_text())["messages"] == []


def test_chat_tools(talk: Callable[..., Result], tmp_path: Path) -> None:
    file, saved = tmp_path / "tools.json", tmp_path / "saved.json"
    file.write_text(json.dumps(TOOLS))
    found = talk(f"/tools {file}", "weather?", "/result sunny", "/result again", f"/save {saved}", answer=K2_ANSWER)
    assert "Tools: weather." in found.err
    assert found.out.count('[weather({"city": "北京", "days": 3})]') == 3
    roles = [message["role"] for message in json.loads(saved.read_text())["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert "no tool call waits for a result" in talk("hi", "/result x").err
    assert talk("/tools", arguments=("--tools", str(file))).err.endswith("There are no tools.\n")


def test_chat_hides_thinking_from_a_pipe(actor: Actor, talk: Callable[..., Result]) -> None:
    actor.speaks("kimi_k3")
    found = talk("hi", "/set show_thinking true", "hi", answer=XTML_ANSWER)
    first, second = found.out.split("I should look it up.")
    assert first.startswith("One moment 👋\n[weather(")
    assert second.startswith("\nOne moment 👋\n")


def test_chat_settings(actor: Actor, talk: Callable[..., Result]) -> None:
    lines = (
        "/set",
        "/set top_k 5",
        "/set stop END",
        "/set",
        "/set top_k default",
        "/set",
        "/help",
        "/quit",
        "never read",
    )
    found = talk(*lines, arguments=("--temperature", "0.3"))
    assert found.err.count("temperature = 0.3") == 3
    assert found.err.count("top_k = 5") == 2
    assert found.err.count('stop = "END"') == 3
    assert "Ctrl-C ends an answer" in found.err
    assert found.out == ""
    actor.speaks("kimi_k3")
    found = talk("/set effort low", "/set thinking false", "/set effort medium", arguments=("--effort", "high"))
    assert 'effort = "low"' in found.err
    assert "thinking_effort is 'medium'" not in found.err.split("thinking = false")[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temperature -1", "temperature=-1 must be from 0"),
        ("/set temperature hot", "temperature"),
        ("/set temperature", "needs a value"),
        ("/set colour red", "'colour' is no setting; settings are temperature, top_k"),
        ("/set thinking maybe", "thinking='maybe' must be true or false"),
        ("/set effort low", "the K2 format has no form for"),
        ("/dance", "/dance is no command"),
        ("/tools /nowhere.json", "/nowhere.json: No such file or directory."),
        ("/save", "needs the name of a file"),
        ("/save /nowhere/x.json", "No such file or directory"),
        ("bad \udc80 text", "lone surrogate"),
        ("word " * 20_000, "more than max_position_embeddings"),
    ],
)
def test_chat_goes_on_after_a_mistake(talk: Callable[..., Result], line: str, words: str) -> None:
    found = talk(line, "hi")
    assert words in found.err
    assert (found.status, found.out) == (0, "Hello.\n")


def test_chat_reports_malformed_answers(talk: Callable[..., Result]) -> None:
    found = talk("hi", answer="a<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|im_end|>")
    assert found.status == 0
    assert "kimi-jax: " in found.err
    assert "Traceback" not in found.err


def test_chat_survives_a_device_without_memory(
    actor: Actor, talk: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The message that got no answer is forgotten; what was said before isn't, and the next one is answered."""
    file = tmp_path / "chat.json"
    advance, calls = actor.model._runner.advance, []

    class Scarce:
        prepare = staticmethod(advance.prepare)

        def __call__(self, *args: Any, **static: Any) -> Any:
            calls.append(1)
            if len(calls) == 5:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")
            return advance(*args, **static)

    monkeypatch.setattr(actor.model._runner, "advance", Scarce())
    found = talk("one", "two", "three", f"/save {file}", answer="Hi.<|im_end|>")
    assert len(calls) > 5
    assert found.status == 0
    assert "too little memory for this model, prompt or --max-new-tokens: RESOURCE_EXHAUSTED" in found.err
    said = [message["content"] for message in json.loads(file.read_text())["messages"] if message["role"] == "user"]
    assert len(said) == 2
    assert said[-1] == "three"


def test_result_whose_answer_was_broken_off_can_be_given_again(actor: Actor) -> None:
    prompt = actor.model.chat_prompt([{"role": "user", "content": "weather?"}], tools=TOOLS)
    answer = actor.model.tokenizer.encode(K2_ANSWER, allow_special=True)
    session = Session(actor.told([prompt], [answer]))
    session.tools = TOOLS
    stream = session.send("weather?")
    collect(stream)
    session.keep(stream.reply)
    waiting = list(session.unanswered)
    assert [call.name for call in waiting] == ["weather"]
    assert session.command("/result sunny") is not None
    assert session.unanswered == []
    session.forget_last()
    assert session.unanswered == waiting
    assert [message["role"] for message in session.messages] == ["user", "assistant"]


def test_chat_refuses_a_model_that_cannot(run: Callable[..., Result], actor: Actor) -> None:
    actor.model._language = Language.of(None, actor.model.config, "tiktoken.model is missing.")
    found = run("chat", "m", stdin="hi\n")
    assert found.status == 1
    assert found.err.startswith("kimi-jax: error: A chat needs a tokenizer")


# As they are


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-m", "kimi_jax.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, **options)


def test_second_process_compiles_nothing(
    model: Kimi,
    linear_directory: Path,
    compilation_cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What this process has compiled, the next one finds; and the same comes out."""
    prompt = "Once upon a time"
    sampling = {"temperature": 1.0, "seed": 5, "logprobs": True, "top_logprobs": 1}
    want = model.generate(prompt, 8, **sampling)
    capsys.readouterr()
    again = tiny.slow_decay(
        Kimi.from_pretrained(linear_directory, dtype="float32", compilation_cache=compilation_cache)
    )
    found = again.generate(prompt, 8, **sampling)
    assert capsys.readouterr().err.count("from the cache on disk") == len(again.programs.compiled) == 3
    assert replace(found, timings=None) == replace(want, timings=None)

    arguments = ["generate", str(linear_directory), "-", "--dtype", "float32", "--max-new-tokens", "8", "--temperature"]
    arguments += ["1", "--seed", "5", "--json", "--top-logprobs", "1", "--compilation-cache", str(compilation_cache)]
    # Programs are kept by the devices that there are.
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", str(jax.device_count()))
    result = process(*arguments, input=prompt)
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["token_ids"]) == 8
    assert result.stderr.count("kimi_jax: compiling ") == result.stderr.count("from the cache on disk") == 3
    assert "the weights are random numbers" in result.stderr


def test_missing_model_is_one_sentence() -> None:
    found = process("chat", "/nowhere/model")
    assert found.returncode == 1
    assert found.stderr.count("\n") == 1
    assert found.stderr.startswith("kimi-jax: error: ")


MISTAKES = """
import sys
from kimi_jax import Kimi, SamplingParams

model = Kimi.from_pretrained(sys.argv[1], dtype="float32", compilation_cache=False, progress=False)
calls = [(model.generate, [1], {"sampling": wrong}) for wrong in (5, "greedy", {"temperature": 1.0}, SamplingParams)]
calls += [(Kimi.from_pretrained, wrong, {}) for wrong in (5, None, b"m", "", "no-such-model", "..", "/nowhere/m")]
calls += [(model.generate, [1], {"max_new_tokens": "5"}), (model.generate, [1], {"seed": "x"})]
options = [{"thinking": 0}, {"thinking": "no"}, {"effort": 3}, {"tool_choice": True}, {"tools": {"name": "f"}}]
calls += [(model.chat, [{"role": "user", "content": "x"}], one) for one in options]
for call, argument, options in calls:
    try:
        call(argument, **options)
    except Exception as error:
        print(type(error).__name__, str(error).replace(chr(10), " "))
"""


def test_mistakes_are_explained(linear_directory: Path) -> None:
    """As users have it: without the type checks that tests put around every function."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MISTAKES, str(linear_directory)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    lines = found.stdout.splitlines()
    assert found.stderr == ""
    assert len(lines) == 18
    for line in lines[:4]:
        assert line.startswith("TypeError sampling=")
        assert line.endswith(" must be SamplingParams, a list of one for each prompt, or None.")
    for line in lines[4:7]:
        assert line.startswith("TypeError directory=")
        assert line.endswith(" must be the path of a model's directory, or owner/name on the hub.")
    for line, name, reason in (
        (lines[7], "", "there is no such directory"),
        (lines[8], "no-such-model", "there is no such directory"),
        (lines[9], "..", "there is no config.json in it"),
        (lines[10], "/nowhere/m", "there is no such directory"),
    ):
        assert line == (
            f"FileNotFoundError {name!r} is no model: {reason}. Legal are a Hugging Face or converted directory, or "
            "owner/name on the Hugging Face hub."
        )
    assert lines[11] == "TypeError max_new_tokens='5' must be an integer of at least 1."
    assert lines[12] == "TypeError seed='x' must be an integer from 0 to 9223372036854775807."
    assert lines[13:] == [
        "MessageError thinking is 0; legal is True, False or None.",
        "MessageError thinking is 'no'; legal is True, False or None.",
        "MessageError thinking_effort is 3, which the K2 format has no form for; legal is None.",
        "MessageError tool_choice is True, which the K2 format has no form for; legal is None or 'auto'.",
        "MessageError tools is {'name': 'f'}; legal is a list.",
    ]


TERMINAL = """
import sys, time
import jax.numpy as jnp, numpy as np
from kimi_jax import Kimi, cli
from kimi_jax.generate.language import Language
from tests.kimi_jax.generate.scripted import Actor

actor = Actor(sys.argv[1])
actor.speaks("kimi_k3")
tokenizer = actor.model.tokenizer
thought = tokenizer.encode("hmm<|close|>think<|sep|><|open|>response<|sep|>", allow_special=True)
word = tokenizer.encode("x")
run, advance = actor.model._run, actor.model._runner.advance

def told(asked, **options):
    actor.told([request.token_ids for request in asked], [[*thought, *word * 1000] for _ in asked])
    return run(asked, **options)

class Slow:
    prepare = staticmethod(advance.prepare)
    def __call__(self, *args, **static):
        time.sleep(0.05)
        return advance(*args, **static)

actor.model._run = told
actor.model._runner.advance = Slow()
Kimi.from_pretrained = classmethod(lambda *_, **__: actor.model)
sys.exit(cli.main(["chat", "m", "--max-new-tokens", "400"]))
"""
# A suite in the background may ignore Ctrl-C, and what it starts would inherit that.
PTY = """
import pty, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.exit(pty.spawn(sys.argv[1:]) >> 8)
"""


class Terminal:
    """A program in a terminal of its own, made by a process that has no threads, which a fork would not survive."""

    def __init__(self, *command: str | Path):
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "TERM": "xterm"}
        environment.pop("NO_COLOR", None)
        self._process = subprocess.Popen(
            [sys.executable, "-c", PTY, sys.executable, *map(str, command)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.shown = ""
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while chunk := os.read(self._process.stdout.fileno(), 4096):
            with self._lock:
                self.shown += chunk.decode("utf-8", "replace")

    def type(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def expect(self, text: str, seconds: float = 120) -> str:
        """Waits until `text` is shown; returns what was shown up to it, and forgets that."""
        limit = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < limit, self.shown
            assert self._process.poll() is None or text in self.shown, self.shown
            time.sleep(0.02)
        with self._lock:
            before, _, self.shown = self.shown.partition(text)
        return before

    def wait(self) -> int:
        status = self._process.wait(timeout=60)
        self._reader.join(timeout=10)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        return status


def test_chat_in_a_terminal(actor: Actor, compilation_cache: Path, tmp_path: Path) -> None:
    # Compiled here, for the process too.
    actor.told([[1]], [[5]]).generate([1], 2)
    script = tmp_path / "chat.py"
    script.write_text(TERMINAL)
    terminal = Terminal(script, compilation_cache)
    terminal.expect("/help lists commands")
    terminal.expect("> ")
    terminal.type("hello\n")
    # Thinking is dimmed, the answer isn't.
    terminal.expect("\x1b[2mh")
    assert "x" not in terminal.expect("xxx").partition("m\x1b[0m\r\n")[0]
    terminal.type("\x03")
    terminal.expect("Interrupted.")
    terminal.expect("> ")
    # The session goes on: its settings, its memory, its history.
    terminal.type("/set max_new_tokens 12\n")
    terminal.expect("max_new_tokens = 12")
    terminal.type("again\n")
    terminal.expect("cut off by max_new_tokens")
    terminal.expect("> ")
    terminal.type(f"/save {tmp_path / 'saved.json'}\n")
    terminal.expect("Saved in")
    terminal.expect("> ")
    messages = json.loads((tmp_path / "saved.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert set(messages[1]["content"]) == {"x"}
    assert len(messages[1]["content"]) < 380
    # Ctrl-C in front of the prompt takes back the line; Ctrl-D leaves.
    terminal.type("half a line\x03")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.wait() == 0
    assert "Traceback" not in terminal.shown
