"""A conversation with its settings, and the /commands that change them; what `kimi-jax chat` shows is elsewhere."""

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_jax import ChatReply, Kimi
    from kimi_jax.generate.chat import ChatStream

HELP = """\
/set NAME VALUE   change a setting, as in /set temperature 0.7; VALUE default takes it back; /set lists them
/system TEXT      speak to the model as the system; without TEXT no more
/tools FILE.json  declare tools; without FILE none
/result TEXT      answer the first tool call that has no answer yet
/reset            forget the conversation, keep the settings
/save FILE        write the conversation and the settings as JSON
/help             this list
/quit             leave, as Ctrl-D does
Ctrl-C ends an answer, and what it has so far stays in the conversation. A line that ends in \\ goes on in the next.
A message that begins with / is written with two of them."""

_OPTIONS = ("thinking", "effort", "tool_choice")
_VIEW = ("show_thinking",)
# Parts of SamplingParams that show nowhere in a chat, or that nobody writes by hand.
_NOT_SETTABLE = ("logprobs", "top_logprobs", "logit_bias", "allowed_token_ids")
_PROBE = [{"role": "user", "content": "x"}]


class Session:
    """A conversation with a model.

    Args:
        model: that answers.
        settings: sampling parameters and chat options to begin with.

    Attributes:
        messages: said so far, without the system's.
        system: what the system says, or "".
        tools: declared tools.
        settings: what was set, by name.
        unanswered: tool calls of the last answer that have no result yet.
    """

    def __init__(self, model: "Kimi", settings: dict[str, Any] | None = None):
        from kimi_jax import SamplingParams

        self.model = model
        self.messages: list[dict[str, Any]] = []
        self.system = ""
        self.tools: list[Any] = []
        self.unanswered: list[Any] = []
        self._unanswered_before: list[Any] = []
        self._sampling = tuple(field.name for field in fields(SamplingParams) if field.name not in _NOT_SETTABLE)
        self.settings: dict[str, Any] = {}
        for name, value in (settings or {}).items():
            self._set(name, value)

    def send(self, text: str) -> "ChatStream":
        """Adds what the user says, and begins an answer.

        Raises:
            ValueError, TypeError: the conversation is too long, or not legal; it is as it was before.
        """
        return self._ask({"role": "user", "content": text})

    def keep(self, reply: "ChatReply") -> None:
        """Adds an answer to the conversation."""
        self.messages.append(reply.to_message())
        self.unanswered = list(reply.message.answerable_calls)

    def forget_last(self) -> None:
        """Takes back the last message, which got no answer."""
        self.messages.pop()
        self.unanswered = self._unanswered_before

    def command(self, line: str) -> "str | ChatStream | None":
        """Runs a command.

        Returns:
            What there is to say; or an answer that begins, as behind a tool's last result; or None to leave.

        Raises:
            ValueError, TypeError, OSError: it can't be done; nothing has changed.
        """
        name, _, rest = line[1:].strip().partition(" ")
        rest = rest.strip()
        match name:
            case "help" | "?":
                return HELP
            case "quit" | "exit" | "q":
                return None
            case "set":
                return self._set_command(rest)
            case "system":
                return self._system_command(rest)
            case "tools":
                return self._tools_command(rest)
            case "result":
                return self._result_command(rest)
            case "reset":
                self.messages, self.unanswered = [], []
                return "The conversation is forgotten."
            case "save":
                return self._save_command(rest)
        raise ValueError(f"/{name} is no command; /help lists them, and // begins a message that begins with /.")

    def _ask(self, message: dict[str, Any]) -> "ChatStream":
        stream = self._stream([*self.messages, message])
        self.messages.append(message)
        self._unanswered_before, self.unanswered = self.unanswered, []
        return stream

    def _stream(self, messages: list[dict[str, Any]]) -> "ChatStream":
        given = {name: value for name, value in self.settings.items() if name not in _VIEW}
        return self.model.chat_stream(self._with_system(messages), tools=self.tools or None, **given)

    def _with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.system}, *messages] if self.system else messages

    def _set_command(self, rest: str) -> str:
        name, _, value = rest.partition(" ")
        if not name:
            shown = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in sorted(self.settings.items())]
            return "\n".join([*(shown or ["Nothing is set."]), f"Settings: {', '.join(self._settable())}."])
        value = value.strip()
        if not value:
            raise ValueError(f"/set {name} needs a value, as in /set temperature 0.7; default takes a setting back.")
        if value == "default":
            self._check_name(name)
            self.settings.pop(name, None)
            return f"{name} is back to its default."
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        self._set(name, parsed)
        return f"{name} = {json.dumps(parsed, ensure_ascii=False)}"

    def _settable(self) -> tuple[str, ...]:
        return (*self._sampling, *_OPTIONS, *_VIEW)

    def _check_name(self, name: str) -> None:
        if name not in self._settable():
            raise ValueError(f"{name!r} is no setting; settings are {', '.join(self._settable())}.")

    def _set(self, name: str, value: Any) -> None:
        from kimi_jax import SamplingParams

        self._check_name(name)
        if name in self._sampling:
            SamplingParams.of(None, {name: value})
        elif name != "effort" and name != "tool_choice" and not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be true or false.")
        if name in _OPTIONS:
            options: dict[str, Any] = {key: self.settings[key] for key in _OPTIONS if key in self.settings}
            options[name] = value
            self.model.chat_prompt(_PROBE, tools=self.tools or None, **options)
        self.settings[name] = value

    def _system_command(self, rest: str) -> str:
        if rest:
            self.model.chat_prompt([{"role": "system", "content": rest}, *_PROBE])
        self.system = rest
        return "The system says so from the beginning of the conversation." if rest else "The system says nothing."

    def _tools_command(self, rest: str) -> str:
        if not rest:
            self.tools = []
            return "There are no tools."
        with Path(rest).expanduser().open(encoding="utf-8") as file:
            try:
                found = json.load(file)
            except ValueError as error:
                raise ValueError(f"{rest} isn't JSON: {error}.") from None
        found = found.get("tools", [found]) if isinstance(found, dict) else found
        self.model.chat_prompt(_PROBE, tools=found)
        self.tools = found
        names = [tool.get("function", {}).get("name", tool.get("type")) for tool in found]
        return f"Tools: {', '.join(map(str, names)) or 'none'}."

    def _result_command(self, rest: str) -> "str | ChatStream":
        if not self.unanswered:
            raise ValueError("no tool call waits for a result.")
        call, *others = self.unanswered
        message = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": rest}
        if others:
            self.model.chat_prompt(self._with_system([*self.messages, message]), tools=self.tools or None)
            self.messages.append(message)
            self.unanswered = others
            return f"{call.name} has its result; {others[0].name} waits for one."
        return self._ask(message)

    def _save_command(self, rest: str) -> str:
        if not rest:
            raise ValueError("/save needs the name of a file.")
        path = Path(rest).expanduser()
        content = {"messages": self._with_system(self.messages), "tools": self.tools, "settings": self.settings}
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(content, file, ensure_ascii=False, indent=1)
        except FileExistsError:
            raise ValueError(f"{path} exists already; /save writes new files only.") from None
        return f"Saved in {path}."
