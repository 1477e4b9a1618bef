"""Line charts as SVG, from the standard library alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 270, 84, 24, 40, 48
LEGEND_COLUMNS, LEGEND_LINE = 2, 22
TICKS = 6
FONT = "font-family='system-ui, sans-serif' fill='#222'"


@dataclass(frozen=True)
class Series:
    """One line; `xs` and `ys` are equally long."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: str
    dash: str = ""
    """As SVG's stroke-dasharray; empty: a solid line."""


@dataclass(frozen=True)
class Panel:
    """One chart with its axes. `band` shades what lies between two values of y."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    band: tuple[float, float] | None = None


def svg(panels: Sequence[Panel]) -> str:
    """The panels under each other, and one legend of all names below; equal names share an entry."""
    legend = list({series.name: series for panel in panels for series in panel.series}.values())
    top = len(panels) * PANEL_HEIGHT
    height = top + 16 + LEGEND_LINE * math.ceil(len(legend) / LEGEND_COLUMNS)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}' role='img'>",
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>",
    ]
    for index, panel in enumerate(panels):
        parts += [f"<g transform='translate(0 {index * PANEL_HEIGHT})'>", *_panel(panel), "</g>"]
    for index, series in enumerate(legend):
        x = LEFT + index % LEGEND_COLUMNS * (WIDTH - LEFT - RIGHT) // LEGEND_COLUMNS
        y = top + 12 + index // LEGEND_COLUMNS * LEGEND_LINE
        parts.append(f"<line x1='{x}' x2='{x + 36}' y1='{y}' y2='{y}' {_stroke(series)}/>")
        parts.append(f"<text x='{x + 44}' y='{y + 5}' font-size='13' {FONT}>{escape(series.name)}</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(low: float, high: float) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from at most `low` to at least `high`, about six of them."""
    if not high > low:
        middle, room = low, abs(low) or 1.0
        low, high = middle - room / 2, middle + room / 2
    raw = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _panel(panel: Panel) -> list[str]:
    xs = [x for series in panel.series for x in series.xs]
    ys = [y for series in panel.series for y in series.ys if math.isfinite(y)] + list(panel.band or ())
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    right, bottom = WIDTH - RIGHT, PANEL_HEIGHT - BOTTOM

    def across(x: float) -> float:
        return LEFT + (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (right - LEFT)

    def down(y: float) -> float:
        return bottom - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (bottom - TOP)

    parts = [f"<text x='{LEFT}' y='22' font-size='15' font-weight='600' {FONT}>{escape(panel.title)}</text>"]
    if panel.band is not None:
        low, high = sorted(map(down, panel.band))
        parts.append(f"<rect x='{LEFT}' y='{low:.1f}' width='{right - LEFT}' height='{high - low:.1f}' fill='#e8e8e8'/>")
    for x in x_ticks:
        parts.append(f"<line x1='{across(x):.1f}' x2='{across(x):.1f}' y1='{bottom}' y2='{bottom + 5}' stroke='#222'/>")
        parts.append(f"<text x='{across(x):.1f}' y='{bottom + 20}' font-size='12' text-anchor='middle' {FONT}>{_number(x, x_ticks)}</text>")
    for y in y_ticks:
        parts.append(f"<line x1='{LEFT}' x2='{right}' y1='{down(y):.1f}' y2='{down(y):.1f}' stroke='#ddd'/>")
        parts.append(f"<text x='{LEFT - 8}' y='{down(y) + 4:.1f}' font-size='12' text-anchor='end' {FONT}>{_number(y, y_ticks)}</text>")
    parts.append(f"<path d='M{LEFT} {TOP}V{bottom}H{right}' fill='none' stroke='#222'/>")
    parts.append(
        f"<text x='{(LEFT + right) // 2}' y='{bottom + 38}' font-size='13' text-anchor='middle' {FONT}>{escape(panel.x_label)}</text>"
    )
    middle = (TOP + bottom) // 2
    turned = f"transform='rotate(-90 18 {middle})' text-anchor='middle'"
    parts.append(f"<text x='18' y='{middle}' font-size='13' {turned} {FONT}>{escape(panel.y_label)}</text>")
    for series in panel.series:
        points = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if math.isfinite(y)]
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in points)
        parts.append(f"<polyline points='{path}' fill='none' {_stroke(series)}><title>{escape(series.name)}</title></polyline>")
    return parts


def _stroke(series: Series) -> str:
    dash = f" stroke-dasharray='{series.dash}'" if series.dash else ""
    return f"stroke='{series.colour}' stroke-width='2'{dash}"


def _number(value: float, all_ticks: Sequence[float]) -> str:
    """With as many digits as tell the ticks apart."""
    step = all_ticks[1] - all_ticks[0]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{digits}f}" if digits < 6 else f"{value:.1e}"
