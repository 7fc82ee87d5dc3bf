"""Golden conversations, answers and token ids."""

import functools
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2] / "golden"


def path(*parts: str) -> Path:
    return ROOT.joinpath(*parts)


@functools.cache
def load(*parts: str) -> Any:
    return json.loads(path(*parts).read_text(encoding="utf-8"))


def chat_cases() -> list[Any]:
    return [load("chat-k3", file.name) for file in sorted(path("chat-k3").glob("[0-9]*.json"))]


def name_of(case: Any) -> str:
    return case["id"]
