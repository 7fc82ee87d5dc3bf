"""Chats in the terminal. /help in the chat lists its commands."""

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kimi_jax.commands import model_arguments
from kimi_jax.commands.chat_session import Session

HELP = "chat in the terminal"

if TYPE_CHECKING:
    from kimi_jax.generate.chat import ChatStream
    from kimi_jax.text import ErrorMark

_PROMPT, _CONTINUED = "> ", ". "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    model_arguments.add_arguments(parser)
    chat = parser.add_argument_group("chat")
    chat.add_argument("--system", metavar="TEXT", help="what the system says first")
    chat.add_argument("--tools", metavar="FILE.json", help="declare tools")
    chat.add_argument("--no-thinking", action="store_true", help="answer without thinking")
    chat.add_argument("--effort", help="how much to think, where the model has a form for it: low, high, max")


def run(arguments: argparse.Namespace) -> int:
    """Loads the model and chats until the end of the input."""
    if arguments.hosts is not None:
        raise ValueError("chat talks with one terminal: with --hosts use generate, or Kimi.chat in every process.")
    settings = model_arguments.sampling_changes(arguments)
    if arguments.no_thinking:
        settings["thinking"] = False
    if arguments.effort is not None:
        settings["effort"] = arguments.effort
    with model_arguments.memory_explained():
        session = Session(model_arguments.load(arguments), settings)
        for name in ("system", "tools"):
            if getattr(arguments, name):
                session.command(f"/{name} {getattr(arguments, name)}")
        # A model that can't chat says so now, and not after the first message.
        session.model.chat_prompt([{"role": "user", "content": "x"}])
        Terminal(session, quiet=arguments.quiet).loop()
    return 0


class Terminal:
    """Reads what the user writes, and shows what the model answers.

    With a terminal, thinking is shown dimmed, and so is what becomes of tools. Without one, standard output has only
    the answers, and every line of standard input is a message or a command.
    """

    def __init__(self, session: Session, *, quiet: bool = False):
        self._session = session
        self._quiet = quiet
        self._output = model_arguments.Output(sys.stdout)
        self._interactive = sys.stdin.isatty() and self._output.is_terminal

    def loop(self) -> None:
        """Chats until the end of the input or /quit."""
        if self._interactive:
            _use_line_editing()
            if not self._quiet:
                self._output.line("/help lists commands, Ctrl-C ends an answer, Ctrl-D leaves.", dim=True)
        while True:
            try:
                line = self._read()
                if line.strip() and not self._take(line):
                    return
            except EOFError:
                if self._interactive:
                    self._output.write("\n")
                return
            except KeyboardInterrupt:
                self._output.write("\n")
            except OSError as error:
                self._complain(f"{error.filename}: {error.strerror}." if error.filename else str(error))
            except (ValueError, TypeError) as error:
                self._complain(str(error))

    def _read(self) -> str:
        """A line, with those that it goes on in."""
        lines = [self._read_line(_PROMPT)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._read_line(_CONTINUED))
        return "\n".join(lines)

    def _read_line(self, prompt: str) -> str:
        if self._interactive:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    def _take(self, line: str) -> bool:
        """Answers a line; False when it was the last."""
        if not line.startswith("/") or line.startswith("//"):
            self._show(self._session.send(line[1:] if line.startswith("//") else line))
            return True
        found = self._session.command(line)
        if found is None:
            return False
        if not isinstance(found, str):
            self._show(found)
        elif self._output.is_terminal:
            self._output.line(found, dim=True)
        elif not self._quiet:
            print(found, file=sys.stderr)
        return True

    def _show(self, stream: "ChatStream") -> None:
        """Shows an answer as it comes, and keeps it."""
        try:
            with model_arguments.memory_explained(), _interrupting(stream):
                marks = self._show_deltas(stream)
        except KeyboardInterrupt:
            # It came in the middle of something: what there is of the answer can't be relied on.
            self._session.forget_last()
            self._remark("Interrupted; the message is forgotten.")
            return
        except (ValueError, RuntimeError):
            self._session.forget_last()
            self._output.end_line()
            raise
        self._session.keep(stream.reply)
        self._output.end_line()
        self._close(stream, marks)

    def _show_deltas(self, stream: "ChatStream") -> "list[ErrorMark]":
        """Shows an answer until it ends or is interrupted; returns what went wrong in it."""
        from kimi_jax.text import ErrorMark, ReasoningDelta, TextDelta, ToolCallEnd

        marks: list[ErrorMark] = []
        show_thinking = self._session.settings.get("show_thinking", self._output.is_terminal)
        thinking = False
        for delta in stream:
            if thinking and not isinstance(delta, ReasoningDelta):
                self._output.end_line()
                thinking = False
            match delta:
                case ReasoningDelta() if show_thinking:
                    self._output.write(delta.text, dim=True)
                    thinking = True
                case TextDelta():
                    self._output.write(delta.text)
                case ToolCallEnd():
                    self._output.line(f"[{delta.call.name}({delta.call.arguments_text})]", dim=True)
                case ErrorMark():
                    marks.append(delta)
        return marks

    def _close(self, stream: "ChatStream", marks: "list[ErrorMark]") -> None:
        """Says what else there is to say about an answer."""
        for mark in marks:
            self._remark(f"{mark.message} {mark.text}".strip())
        generation = stream.reply.generation
        if generation.finish_reason == "interrupted":
            self._remark("Interrupted.")
        for call in self._session.unanswered[:1]:
            self._remark(f"/result TEXT gives {call.name} its result.")
        if self._output.is_terminal and not self._quiet and generation.timings is not None:
            rate = generation.timings.tokens_per_second
            speed = "" if rate is None else f", {rate:,.1f} tokens/s"
            limit = ", cut off by max_new_tokens" if generation.finish_reason == "length" else ""
            self._remark(f"{len(generation.token_ids)} tokens{speed}{limit}")

    def _remark(self, text: str) -> None:
        if self._output.is_terminal:
            self._output.line(f"[{text}]", dim=True)
        elif not self._quiet:
            print(f"kimi-jax: {text}", file=sys.stderr)

    def _complain(self, text: str) -> None:
        if self._interactive:
            self._output.line(f"[{text}]", dim=True)
        else:
            print(f"kimi-jax: error: {text}", file=sys.stderr, flush=True)


@contextmanager
def _interrupting(stream: "ChatStream") -> Iterator[None]:
    """While an answer comes, the first Ctrl-C asks for its end and leaves the work in order; the second one insists."""
    asked = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        stream.interrupt()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _use_line_editing() -> None:
    """Arrow keys and a history of the session, where Python has them."""
    try:
        import readline
    except ImportError:
        return
    readline.set_auto_history(True)
