"""Plots as SVG text that needs nothing else: lines over time, bars, one stacked bar.

Owns scales, ticks and marks. It must not know what the numbers mean; colours are the page's, by class
``c0`` to ``c5``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 28
_MAX_POINTS = 300


@dataclass(frozen=True, slots=True)
class Series:
    """One line: a name for its points' tooltips, a value for each x, and the class of its colour."""

    name: str
    values: Sequence[float]
    colour: str


def short_number(value: float) -> str:
    """1234567 as 1.2M; three digits at most."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def short_time(seconds: float) -> str:
    """Seconds as 45s, 3m 05s or 2h 10m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s" if whole % 60 else f"{whole // 60}m"
    return f"{whole // 3600}h {whole % 3600 // 60:02}m" if whole % 3600 else f"{whole // 3600}h"


def line_chart(
    xs: Sequence[float],
    series: Sequence[Series],
    *,
    marks: Sequence[float] = (),
    top: float | None = None,
    format_value: Callable[[float], str] = short_number,
) -> str:
    """Lines over seconds, filled below; a dashed line at each of ``marks``. ``top`` fixes the scale's end."""
    last_x = max(xs[-1], 1e-9)
    thinned = [_thinned(xs, one.values) for one in series]
    ticks = _ticks(top if top is not None else max(y for points in thinned for _, y in points))
    high = ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (_WIDTH - _LEFT - _RIGHT) * x / last_x
        return _LEFT + across, _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(y, high) / high

    parts = [*_grid(ticks, format_value)]
    for x in _time_ticks(last_x):
        anchor = "start" if x == 0 else "middle" if x < 0.94 * last_x else "end"
        parts.append(_text(place(x, 0)[0], _HEIGHT - 9, short_time(x), anchor))
    for mark in marks:
        x = place(mark, 0)[0]
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
    for one, values in zip(series, thinned, strict=True):
        points = [place(x, y) for x, y in values]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        base = _HEIGHT - _BOTTOM
        area = f"{points[0][0]:.1f},{base} {path} {points[-1][0]:.1f},{base}"
        parts.append(f'<polygon class="area {one.colour}" points="{area}"/>')
        title = f"<title>{escape(one.name)}</title>"
        parts.append(f'<polyline class="line {one.colour}" points="{path}">{title}</polyline>')
    return _svg(parts, _HEIGHT)


def bar_chart(bars: Sequence[tuple[str, float]], colour: str) -> str:
    """Upright bars, each with its label below as far as there is room, and its value in a tooltip."""
    ticks = _ticks(max((value for _, value in bars), default=0.0))
    parts = [*_grid(ticks, short_number)]
    pitch = (_WIDTH - _LEFT - _RIGHT) / max(len(bars), 1)
    every = max(1, math.ceil(44 / pitch))
    for index, (label, value) in enumerate(bars):
        height = (_HEIGHT - _TOP - _BOTTOM) * value / ticks[-1]
        left = _LEFT + index * pitch
        parts.append(
            f'<rect class="bar {colour}" x="{left + pitch * 0.08:.1f}" y="{_HEIGHT - _BOTTOM - height:.1f}" '
            f'width="{pitch * 0.84:.1f}" height="{height:.1f}" rx="2">'
            f"<title>{escape(label)}: {value:,.0f}</title></rect>"
        )
        if index % every == 0:
            parts.append(_text(left + pitch / 2, _HEIGHT - 9, label, "middle"))
    return _svg(parts, _HEIGHT)


def stacked_bar(pieces: Sequence[tuple[str, float, str]]) -> str:
    """One lying bar of (name, value, colour), to scale."""
    total = sum(value for _, value, _ in pieces) or 1.0
    parts, left = [], 0.0
    for name, value, colour in pieces:
        width = _WIDTH * value / total
        parts.append(
            f'<rect class="bar {colour}" x="{left:.1f}" y="0" width="{width:.1f}" height="26">'
            f"<title>{escape(name)}: {value:,.0f} ({value / total:.1%})</title></rect>"
        )
        left += width
    return _svg(parts, 26)


def _svg(parts: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _grid(ticks: Sequence[float], format_value: Callable[[float], str]) -> list[str]:
    parts = []
    for tick in ticks:
        y = _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * tick / ticks[-1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 8, y + 4, format_value(tick), "end"))
    return parts


def _ticks(high: float) -> list[float]:
    """Round values from 0 to at least ``high``, four steps or so."""
    if high <= 0:
        return [0.0, 1.0]
    raw = high / 4
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    return [step * index for index in range(math.ceil(high / step - 1e-9) + 1)]


def _time_ticks(last: float) -> list[float]:
    steps = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
    step = next((step for step in steps if last / step <= 6), 86400 * math.ceil(last / 86400 / 6))
    return [float(step * index) for index in range(int(last / step) + 1)]


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """No more points than can be told apart: neighbours become their mean."""
    size = math.ceil(len(xs) / _MAX_POINTS)
    groups = [(xs[at : at + size], ys[at : at + size]) for at in range(0, len(xs), size)]
    return [(sum(x) / len(x), sum(y) / len(y)) for x, y in groups]
