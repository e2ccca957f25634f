"""The picture of a sweep: each setting's held-out reward by step, mean over its seeds, with the seeds' range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final

from lightningrl_runs.metrics import read_rows
from lightningrl_training.loggers.curve import save_picture, start_picture, style_axes
from lightningrl_training.sweeps.comparison import HELD_OUT, SweepResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_sweep"]

COLOURS: Final = ("#1f5fa8", "#e08a2c", "#1b9e5a", "#b2182b", "#8073ac", "#8a8f98", "#00441b", "#d6604d")
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "x", "*")
MOST_DRAWN: Final = 8


def draw_sweep(result: SweepResult, folder: Path, *, title: str) -> Path | None:
    """Draw the best settings of a sweep into `curves.png` of its folder; None where nothing was measured.

    Raises ConfigError when matplotlib cannot be imported, RunFolderError when the picture cannot be written.
    """
    drawn = [setting for setting in result.settings if setting.runs][:MOST_DRAWN]
    names = (HELD_OUT, "reward")
    curves = {}
    for name in names:
        curves = {
            setting.setting or "all seeds": points
            for setting in drawn
            if (points := _points([folder / run.point.name for run in setting.runs], name))
        }
        if curves:
            break
    if not curves:
        return None
    figure, axes = start_picture()
    for index, (label, points) in enumerate(curves.items()):
        _draw(axes, index, label, points)
    style_axes(axes, [value for points in curves.values() for values in points.values() for value in values])
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=12)
    axes.set_ylabel("held-out reward" if name == HELD_OUT else "training reward")
    save_picture(figure, folder / "curves.png")
    return folder / "curves.png"


def _points(runs: Sequence[Path], name: str) -> dict[int, list[float]]:
    """Values by step, of the runs that have one there."""
    points: dict[int, list[float]] = {}
    for run in runs:
        for row in read_rows(run):
            if name in row:
                points.setdefault(int(row["step"]), []).append(float(row[name]))
    return dict(sorted(points.items()))


def _draw(axes: Axes, index: int, label: str, points: Mapping[int, Sequence[float]]) -> None:
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    steps, seeds = list(points), max(map(len, points.values()))
    shown = f"{label} ({seeds} seed{'s' if seeds > 1 else ''})"
    lows, highs, means = (list(map(summary, points.values())) for summary in (min, max, fmean))
    axes.fill_between(steps, lows, highs, color=colour, alpha=0.15)
    axes.plot(steps, means, color=colour, marker=marker, markersize=4, label=shown)
