"""Draws stacked bars of memory as SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

GIB = 2**30

# Apart also for those who don't tell red from green, and in grey.
_COLORS: Mapping[str, str] = {
    "parameters": "#30638e",
    "optimizer": "#6a4c93",
    "cache": "#3bb273",
    "other arguments": "#7d8597",
    "outputs": "#e1bc29",
    "temporaries": "#e15554",
    "program": "#4d4d4d",
    "too large": "#a4161a",
}
_OTHERS = ("#00798c", "#d1495b", "#edae49", "#8d96a3")
_FREE = "#eef1f4"

_WIDTH, _LEFT, _RIGHT, _TOP, _BAR, _GAP = 960, 150, 190, 78, 34, 22


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        name: written before it.
        segments: bytes by name, from left to right.
    """

    name: str
    segments: Mapping[str, int]


def memory_picture(title: str, subtitle: str, bars: Sequence[Bar], limit: int) -> str:
    """An SVG of horizontal bars whose parts are the parts of a device's memory; what is left of the limit is pale.

    Args:
        title: first line.
        subtitle: second line.
        bars: one a program.
        limit: bytes of one device, drawn as a line across all bars.
    """
    largest = max([limit, *(sum(bar.segments.values()) for bar in bars)])
    scale = (_WIDTH - _LEFT - _RIGHT) / largest
    names = list(dict.fromkeys(name for bar in bars for name in bar.segments))
    bottom = _TOP + len(bars) * (_BAR + _GAP)
    per_row = 5
    height = bottom + 46 + 22 * (-(-(len(names) + 1) // per_row))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label={quoteattr(title)} font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="17" font-weight="600" fill="#1b1f24">{escape(title)}</text>',
        f'<text x="16" y="50" fill="#57606a">{escape(subtitle)}</text>',
    ]
    for number, bar in enumerate(bars):
        parts += _bar(bar, _TOP + number * (_BAR + _GAP), scale, limit)
    line = _LEFT + limit * scale
    parts += [
        f'<line x1="{line:.1f}" y1="{_TOP - 8}" x2="{line:.1f}" y2="{bottom - _GAP + 8}" stroke="#1b1f24" '
        'stroke-width="1.5" stroke-dasharray="4 3"/>',
        f'<text x="{line:.1f}" y="{bottom - _GAP + 24}" text-anchor="end" fill="#1b1f24">'
        f"{limit / GIB:.2f} GiB may be used</text>",
    ]
    step = (_WIDTH - 32) / per_row
    for number, name in enumerate([*names, "free"]):
        x, y = 16 + step * (number % per_row), bottom + 30 + 22 * (number // per_row)
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="12" height="12" fill="{_color(name)}" stroke="#d0d7de" stroke-width="0.5"/>'
            f'<text x="{x + 18:.1f}" y="{y + 11}" fill="#1b1f24">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(bar: Bar, y: int, scale: float, limit: int) -> list[str]:
    middle = y + _BAR / 2 + 4.5
    parts = [
        f'<text x="{_LEFT - 12}" y="{middle}" text-anchor="end" fill="#1b1f24">{escape(bar.name)}</text>',
        f'<rect x="{_LEFT}" y="{y}" width="{limit * scale:.1f}" height="{_BAR}" fill="{_FREE}"/>',
    ]
    x, used = float(_LEFT), sum(bar.segments.values())
    for name, size in bar.segments.items():
        width = size * scale
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{_color(name)}">'
            f"<title>{escape(name)}: {_written(size)}</title></rect>"
        )
        if width > 62:
            parts.append(
                f'<text x="{x + width / 2:.1f}" y="{middle}" text-anchor="middle" fill="#ffffff">{_written(size)}</text>'
            )
        x += width
    over = used > limit
    said = "not compiled" if not bar.segments else _written(used)
    parts.append(
        f'<text x="{max(x, _LEFT + limit * scale) + 8:.1f}" y="{middle}" fill="{"#a4161a" if over else "#1b1f24"}" '
        f'font-weight="600">{said}{" (too large)" if over and "too large" not in bar.segments else ""}</text>'
    )
    return parts


def _color(name: str) -> str:
    if name == "free":
        return _FREE
    return _COLORS.get(name, _OTHERS[sum(name.encode()) % len(_OTHERS)])


def _written(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:.2f} MiB"
