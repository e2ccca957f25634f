"""Curves as geometry: what a template needs to draw them as SVG, and no drawing itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightningrl_viewer.reading.summary import Point

__all__ = ["Chart", "Curve", "Dot", "Series", "Tick", "draw_chart", "sparkline"]

WIDTH, HEIGHT = 720, 230
LEFT, RIGHT, TOP, BOTTOM = 44.0, 708.0, 10.0, 204.0
_MOST_DOTS: Final = 60
_STEPS: Final = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Curve to be drawn: a name, its class of colour (1 to 6), its points."""

    name: str
    colour: int
    points: Sequence[Point]
    is_dotted: bool = False
    """True for a dot at each point."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    x: float
    y: float
    low: float | None
    high: float | None
    point: Point


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A series in the chart's coordinates."""

    name: str
    colour: int
    line: str
    band: str
    """Outline of its intervals; empty where it has none."""
    dots: tuple[Dot, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Coordinates, rounded to a tenth."""

    curves: tuple[Curve, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    first: int
    last: int
    width: int = WIDTH
    height: int = HEIGHT
    left: float = LEFT
    right: float = RIGHT
    top: float = TOP
    bottom: float = BOTTOM


def draw_chart(series: Sequence[Series]) -> Chart | None:
    """Place the curves; None = there is nothing to draw yet."""
    series = tuple(one for one in series if one.points)
    points = [point for one in series for point in one.points]
    if not points:
        return None
    first, last = min(point.step for point in points), max(point.step for point in points)
    values = [value for point in points for value in (point.mean, point.low, point.high) if value is not None]
    y_ticks = nice_ticks(min(values), max(values))
    low, high = y_ticks[0], y_ticks[-1]

    def x(step: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (step - first) / max(1, last - first), 1)

    def y(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 1)

    def draw(shown: Series) -> Curve:
        places = [
            Dot(
                x=x(point.step),
                y=y(point.mean),
                low=None if point.low is None else y(point.low),
                high=None if point.high is None else y(point.high),
                point=point,
            )
            for point in shown.points
        ]
        line = " ".join(f"{'L' if number else 'M'}{place.x:g} {place.y:g}" for number, place in enumerate(places))
        return Curve(
            name=shown.name,
            colour=shown.colour,
            line=line,
            band="" if shown.is_dotted else _band(places),
            dots=tuple(places) if len(places) <= _MOST_DOTS else (),
        )

    digits = next(
        number
        for number in range(12)
        if all(abs(round(tick, number) - tick) < 1e-11 for tick in y_ticks) or number == 11
    )
    x_ticks = [tick for tick in nice_ticks(first, last, 8) if first <= tick <= last and tick == int(tick)]
    return Chart(
        curves=tuple(map(draw, series)),
        x_ticks=tuple(Tick(at=x(tick), label=f"{tick:.0f}") for tick in x_ticks),
        y_ticks=tuple(Tick(at=y(tick), label=f"{tick:.{digits}f}".replace("-", "−")) for tick in y_ticks),
        first=first,
        last=last,
    )


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers from at most `low` to at least `high`."""
    scale = max(1.0, abs(low), abs(high))
    if high - low < 1e-9 * scale:  # no float lies between numbers that are large and near each other
        low, high = low - max(0.5, 1e-6 * scale), high + max(0.5, 1e-6 * scale)
    raw = (high - low) / (most - 1)
    size = 10.0 ** math.floor(math.log10(raw))
    step = size * next(factor for factor in _STEPS if factor * size >= raw * (1 - 1e-9))
    begin, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(begin, end + 1)]


def sparkline(values: Sequence[float], width: int = 120, height: int = 28) -> str:
    """Draw values as a path with at most one point for each pixel; empty for less than two values."""
    if len(values) < 2:
        return ""
    if len(values) > width:
        parts = [values[len(values) * number // width : len(values) * (number + 1) // width] for number in range(width)]
        values = [sum(part) / len(part) for part in parts]
    low, high = min(values), max(values)
    span = high - low or 1.0
    places = [
        (width * number / (len(values) - 1), height - 2 - (height - 4) * (value - low) / span)
        for number, value in enumerate(values)
    ]
    return " ".join(f"{'L' if number else 'M'}{x:.1f} {y:.1f}" for number, (x, y) in enumerate(places))


def _band(places: Sequence[Dot]) -> str:
    spans = [(place.x, place.low, place.high) for place in places if place.low is not None and place.high is not None]
    if len(spans) < 2:
        return ""
    above = " ".join(f"{'L' if number else 'M'}{x:g} {high:g}" for number, (x, _, high) in enumerate(spans))
    below = " ".join(f"L{x:g} {low:g}" for x, low, _ in reversed(spans))
    return f"{above} {below}Z"
