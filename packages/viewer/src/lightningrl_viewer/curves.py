"""Curves of a run's metrics: which are drawn, in which group, with which series, and how their numbers are written.

metrics of the training steps ─► make_curves(rows, smoothing) ─► groups of charts, in the order of `METRICS`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightningrl.figures import wilson
from lightningrl_viewer.charts import SMALL, Chart, Series, draw_chart
from lightningrl_viewer.reading.metric_table import HIDDEN, METRICS, Metric, MetricGroup, find_metric
from lightningrl_viewer.reading.summary import Point
from lightningrl_viewer.templates import count, duration, nats, percent, plain, size

__all__ = ["SMOOTHINGS", "CurveGroup", "MetricCurve", "make_curves"]

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
