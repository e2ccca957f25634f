"""Curves as geometry: what a template needs to draw them as SVG, and no drawing itself.

metrics of the training steps ─► make_curves(rows, smoothing) ─► groups of charts, in the order of `METRICS`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightningrl.figures import smooth, wilson
from lightningrl_runs.metrics import HIDDEN, METRICS, Metric, MetricGroup, find_metric
from lightningrl_runs.summary import Point
from lightningrl_viewer.templates import count, duration, nats, percent, plain, size

__all__ = [
    "LARGE",
    "SMALL",
    "SMOOTHINGS",
    "Chart",
    "Curve",
    "CurveGroup",
    "Dot",
    "Frame",
    "MetricCurve",
    "Series",
    "Tick",
    "draw_chart",
    "make_curves",
    "sparkline",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """Size of a chart, and the area of its curves within it."""

    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: int
    """Most of them; likewise `y_ticks`."""
    y_ticks: int


LARGE: Final = Frame(width=720, height=230, left=44.0, right=708.0, top=10.0, bottom=204.0, x_ticks=8, y_ticks=6)
SMALL: Final = Frame(width=340, height=132, left=50.0, right=332.0, top=8.0, bottom=112.0, x_ticks=5, y_ticks=4)
_MOST_DOTS: Final = 60
_ROUNDING: Final = 1e-9
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
    raw: str = ""
    """The line before it was smoothed; empty where it was not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Coordinates, rounded to a tenth."""

    curves: tuple[Curve, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    first: int
    last: int
    low: float
    """Value at the bottom; likewise `high` at the top."""
    high: float
    frame: Frame = LARGE


def draw_chart(
    series: Sequence[Series],
    *,
    frame: Frame = LARGE,
    smoothing: float = 0.0,
    bounds: tuple[float, float] | None = None,
    label: Callable[[float], str] | None = None,
) -> Chart | None:
    """Place the curves; None = there is nothing to draw yet.

    `smoothing`: weight of what was before, from 0 to 1, in curves without dots. `bounds`: least and greatest value
    that there can be; where all means are within them, intervals are drawn no further. `label`: text of a value at the
    side.
    """
    series = tuple(one for one in series if one.points)
    points = [point for one in series for point in one.points]
    if not points:
        return None
    first, last = min(point.step for point in points), max(point.step for point in points)
    y_ticks = nice_ticks(*_range(points, frame, bounds), frame.y_ticks)
    low, high = y_ticks[0], y_ticks[-1]

    def x(step: float) -> float:
        return round(frame.left + (frame.right - frame.left) * (step - first) / max(1, last - first), 1)

    def y(value: float) -> float:
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return round(frame.bottom - (frame.bottom - frame.top) * share, 1)

    x_ticks = [tick for tick in nice_ticks(first, last, frame.x_ticks) if first <= tick <= last and tick == int(tick)]
    say = label or _labels(y_ticks)
    return Chart(
        curves=tuple(_place(shown, x, y, smoothing) for shown in series),
        x_ticks=tuple(Tick(at=x(tick), label=f"{tick:.0f}") for tick in x_ticks),
        y_ticks=tuple(Tick(at=y(tick), label=say(tick)) for tick in y_ticks),
        first=first,
        last=last,
        low=low,
        high=high,
        frame=frame,
    )


def _place(shown: Series, x: Callable[[float], float], y: Callable[[float], float], smoothing: float) -> Curve:
    """Place a series in the chart's coordinates."""
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
    line, is_smooth = _line([(place.x, place.y) for place in places]), smoothing > 0 and not shown.is_dotted
    means = smooth([point.mean for point in shown.points], smoothing) if is_smooth else ()
    return Curve(
        name=shown.name,
        colour=shown.colour,
        line=_line([(place.x, y(mean)) for place, mean in zip(places, means, strict=True)]) if is_smooth else line,
        band="" if shown.is_dotted else _band(places),
        dots=tuple(places) if len(places) <= _MOST_DOTS else (),
        raw=line if is_smooth else "",
    )


def _range(points: Sequence[Point], frame: Frame, bounds: tuple[float, float] | None) -> tuple[float, float]:
    """Return the least and the greatest value that the chart has room for."""
    values = [value for point in points for value in (point.mean, point.low, point.high) if value is not None]
    least, most = min(values), max(values)
    if bounds is not None and all(bounds[0] <= point.mean <= bounds[1] for point in points):
        least, most = max(least, bounds[0]), min(most, bounds[1])
    if frame is LARGE or most - least >= max(_ROUNDING, 1e-4 * abs(most)):
        return least, most
    is_zero = abs(most) < _ROUNDING or bounds == (0.0, 1.0)
    return (0.0, 1.0) if is_zero else (min(0.0, 2 * least), max(0.0, 2 * most))  # a level, away from 0


def _labels(ticks: Sequence[float]) -> Callable[[float], str]:
    """Return what writes these numbers with as many digits as they need."""
    largest = max(map(abs, ticks))
    digits = 0
    while digits < 11 and any(abs(round(tick, digits) - tick) >= 1e-11 for tick in ticks):
        digits += 1
    if largest >= 1e6 or (digits > 4 and largest < 1e-2):
        return lambda tick: f"{tick:.3g}".replace("-", "−", tick < 0)
    if largest >= 10_000:
        return lambda tick: f"{tick / 1000:g}k".replace("-", "−") if tick else "0"
    return lambda tick: f"{tick:.{digits}f}".replace("-", "−")


def _line(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{'L' if number else 'M'}{x:g} {y:g}" for number, (x, y) in enumerate(places))


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


SMOOTHINGS: Final = {"none": 0.0, "some": 0.6, "much": 0.9}
"""Weights of what was before, by their names in the address."""
_MOST_POINTS: Final = 120
"""Points of a curve: of more steps several share one."""
_MOST_OTHERS: Final = 24
_MOST_SERIES: Final = 6
_UNKNOWN: Final = "A metric of this run's backend, reward or plugin."
_SPENT: Final = {
    "seconds": "the step", "seconds_collect": "rollouts", "seconds_learn": "learning", "seconds_reward": "rewards",
    "seconds_credit": "credit",
}  # fmt: skip
"""Metrics in the chart of seconds, and their names there."""
_INTERVALS: Final = {
    "outcome/succeeded": "rollouts", "groups_without_signal": "groups", "rewards_failed": "rollouts",
}  # fmt: skip
"""Shares of things that were counted one by one, and the metric that says how many there were."""
_WRITE: Final[Mapping[str, Callable[[float | None], str]]] = {
    "share": percent,
    "seconds": duration,
    "bytes": size,
    "tokens": count,
    "nats": nats,
}
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricCurve:
    """A small chart, and what it says."""

    title: str
    name: str
    """Names in `metrics.jsonl`, of which it is drawn."""
    means: str
    healthy: str
    last: str
    """The newest value."""
    chart: Chart


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveGroup:
    """Charts under one heading."""

    name: str
    curves: Sequence[MetricCurve]


def make_curves(rows: Rows, smoothing: float = 0.0) -> list[CurveGroup]:
    """Draw every metric that these steps have, but for the reward, which has a chart of its own."""
    names = dict.fromkeys(name for row in rows for name in row if not name.startswith("validation/"))
    names = {name: None for name in names if name not in HIDDEN and name != "reward"}
    parts = [name for name in names if name.startswith("reward/")]
    if len(parts) == 1:  # it is the reward
        del names[parts[0]]
    drawn = [(metric, _series(metric, names, rows)) for metric in METRICS]
    curves = [(metric.group, _curve(metric, series, smoothing)) for metric, series in drawn if series]
    others = [name for name in names if find_metric(name) is None and not name.startswith("outcome/")]
    for name in others[:_MOST_OTHERS]:
        metric = Metric(name=name, title=name.removeprefix("learn/"), group=MetricGroup.OTHERS, means=_UNKNOWN)
        if series := _series(metric, names, rows):
            curves.append((metric.group, _curve(metric, series, smoothing)))
    groups = [CurveGroup(name=group.value, curves=[own for of, own in curves if of is group]) for group in MetricGroup]
    return [group for group in groups if group.curves]


def _series(metric: Metric, names: Iterable[str], rows: Rows) -> list[Series]:
    """Return a metric's series: one, or one for each policy, each reward, each process."""
    if metric.name == "seconds":
        called = {name: title for name, title in _SPENT.items() if name == "seconds" or name in HIDDEN}
    elif metric.name.endswith("/*"):
        room = metric.name.removesuffix("*")
        own = {other.name for other in METRICS}
        called = {name: name.removeprefix(room) for name in names if name.startswith(room) and name not in own}
    else:
        called = {name: _policy(name) for name in names if name == metric.name or _is_of_policy(name, metric.name)}
    series = [
        Series(name=title, colour=number, points=_points(metric, name, rows))
        for number, (name, title) in enumerate(list(called.items())[:_MOST_SERIES], 1)
    ]
    return [line for line in series if line.points]


def _is_of_policy(name: str, metric: str) -> bool:
    """True for `learn/writer/loss` where the metric is `learn/loss`."""
    return name.count("/") == 2 and name.startswith("learn/") and metric == f"learn/{name.rpartition('/')[2]}"


def _policy(name: str) -> str:
    return name.split("/")[1] if name.count("/") == 2 else ""


def _points(metric: Metric, name: str, rows: Rows) -> list[Point]:
    """Return a metric's points: each is a step, or the mean of as many steps as make `_MOST_POINTS` of all."""
    places: list[tuple[int, float, float]] = []
    for row in rows:
        value, whole = row.get(name), row.get(_INTERVALS.get(name, ""), 0.0)
        divisor = 1.0 if metric.over is None else row.get(metric.over)
        if isinstance(value, int | float) and divisor:
            places.append((row["step"], value / divisor, whole))
    wide = -(-len(places) // _MOST_POINTS)
    return [_join(places[start : start + wide]) for start in range(0, len(places), wide or 1)]


def _join(places: Sequence[tuple[int, float, float]]) -> Point:
    steps, values, wholes = zip(*places, strict=True)
    mean, whole = sum(values) / len(values), sum(wholes)
    low, high = wilson(mean, whole) if whole else (None, None)
    return Point(step=steps[-1], mean=mean, low=low, high=high)


def _curve(metric: Metric, series: Sequence[Series], smoothing: float) -> MetricCurve:
    write = _WRITE.get(metric.unit, plain)
    chart = draw_chart(
        series,
        frame=SMALL,
        smoothing=smoothing,
        bounds=(0.0, 1.0) if metric.unit == "share" else None,
        label=write if metric.unit in {"share", "bytes"} else None,
    )
    assert chart is not None  # a series has points
    lasts = [f"{line.name} {write(line.points[-1].mean)}".strip() for line in series[:3]]
    return MetricCurve(
        title=metric.title,
        name=f"{metric.name} ÷ {metric.over}" if metric.over else metric.name,
        means=metric.means,
        healthy=metric.healthy,
        last=lasts[0] if len(series) == 1 else write(series[0].points[-1].mean) if metric.name == "seconds" else "",
        chart=chart,
    )
