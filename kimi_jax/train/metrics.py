"""A run's metrics: one JSON line a record, and a plot of them."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class MetricsLog:
    """Appends records to a file of JSON lines, each written whole; opened again, a run goes on where it stopped."""

    def __init__(self, path: str | os.PathLike[str]):
        """Creates the file and its folder where they don't exist."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def write(self, **record: Any) -> None:
        """Adds a record; numbers of any kind become JSON numbers, those that JSON can't hold null."""
        plain = {name: _plain(value) for name, value in record.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain, allow_nan=False) + "\n")

    def drop_after(self, stage: str, step: int) -> None:
        """Removes the records of later steps of a stage: those that a resumed run will write again."""
        kept = [r for r in read_metrics(self.path) if r.get("stage") != stage or r.get("step", 0) <= step]
        lines = "".join(json.dumps(record) + "\n" for record in kept)
        partial = self.path.with_suffix(".partial")
        partial.write_text(lines, encoding="utf-8")
        partial.replace(self.path)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a file; a last line that a crash cut short is left out."""
    records = []
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines) - 1:
                raise ValueError(f"{path}: line {number + 1} isn't JSON.") from None
    return records


def plot_metrics(
    records: Iterable[Mapping[str, Any]], path: str | os.PathLike[str], names: Iterable[str] = ("loss",)
) -> None:
    """Draws metrics over steps, a panel each, a line a stage; needs matplotlib (the extra `train`)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'kimi-jax[train]'.") from error
    names, records = list(names), list(records)
    figure = Figure(figsize=(7, 2.6 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 1, squeeze=False, sharex=True)[:, 0]
    for name, panel in zip(names, panels, strict=True):
        for stage in dict.fromkeys(record["stage"] for record in records):
            points = [(r["step"], r[name]) for r in records if r["stage"] == stage and r.get(name) is not None]
            if points:
                panel.plot(*zip(*points, strict=True), label=stage, linewidth=1)
        panel.set_ylabel(name)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    panels[-1].set_xlabel("step")
    figure.savefig(path)


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool | int) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None
