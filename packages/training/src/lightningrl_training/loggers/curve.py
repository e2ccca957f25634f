"""The learning curve of a run as a picture, from its `metrics.jsonl`."""

from __future__ import annotations

import base64
import html
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.figures import smooth
from lightningrl.files import create_private, whole_file
from lightningrl_runs.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Curve", "draw_curve", "save_picture", "show_in_notebook", "start_picture", "style_axes"]

_VALIDATION = "validation/reward"
SHORT = 2.0
"""Minutes of a run whose times are told apart by seconds alone."""
VALIDATION, TRAINING, CONTROL = "#1f5fa8", "#e08a2c", "#8a8f98"
Points = tuple[list[float], list[float]]


class Curve(PosixPath):
    """Where the picture lies; a notebook shows the picture itself."""

    def _repr_png_(self) -> bytes | None:
        return self.read_bytes() if self.is_file() else None


def show_in_notebook(
    folder: Path, progress: str, metrics: Sequence[Mapping[str, float]], draw: Callable[[], Path]
) -> str:
    """HTML of a run: where it lies, how far it is, its curve, and the line that opens its pages."""
    try:
        image = base64.b64encode(draw().read_bytes()).decode()
        shown = f'<img alt="learning curve" style="max-width: 720px; width: 100%" src="data:image/png;base64,{image}">'
    except (ConfigError, RunFolderError) as why:
        shown = html.escape(str(why))
    tested = [row[_VALIDATION] for row in metrics if _VALIDATION in row]
    best = f", validation {tested[0]:.3f} → {tested[-1]:.3f}" if tested else ""
    view = html.escape(f"lightningrl view {shlex.quote(str(folder))}")
    return (
        f"<p><b>{html.escape(str(folder))}</b>: {progress}{best}</p>"
        f"<p>{shown}</p><p>rollouts, tokens, credit: <code>{view}</code></p>"
    )


def draw_curve(
    metrics_path: Path,
    png_path: Path,
    *,
    title: str = "",
    control_path: Path | None = None,
    validation_temperature: float | None = None,
) -> bool:
    """Draw validation score and training reward by step, with minutes on the upper edge. The file is whole or absent.

    `control_path` is another run's metrics, drawn in grey. The legend says how validation was sampled, unless
    `validation_temperature` is None. False where there is nothing to draw yet. Raises ConfigError when matplotlib
    cannot be imported, RunFolderError when the picture cannot be written.
    """
    entries = read_metrics(metrics_path)
    scores, rewards = _points(entries, _VALIDATION), _points(entries, "reward")
    if not scores[0] and not rewards[0]:
        return False
    control = _points(read_metrics(control_path), _VALIDATION) if control_path is not None else ([], [])
    figure, axes = start_picture()
    _draw(axes, scores, rewards, control, validation_temperature)
    axes.set_title(title or png_path.resolve().parent.name, loc="left", fontsize=13, fontweight="bold", pad=12)
    _add_minutes(axes, entries)
    save_picture(figure, png_path)
    return True


def start_picture() -> tuple[Figure, Axes]:
    """An empty picture. Raises ConfigError when matplotlib cannot be imported."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"the learning curve cannot be drawn ({error}); install it with `pip install 'lightningrl[plot]'`"
        ) from error
    figure = Figure(figsize=(8.0, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def save_picture(figure: Figure, png_path: Path) -> None:
    """Write a picture, whole or not at all. Raises RunFolderError."""
    try:
        with whole_file(png_path) as scratch, create_private(scratch) as file:
            figure.savefig(file, format="png")
    except OSError as error:
        raise RunFolderError(
            f"the learning curve cannot be written to {str(png_path)!r}: {error}; free some space"
        ) from error


def _draw(axes: Axes, scores: Points, rewards: Points, control: Points, temperature: float | None) -> None:
    if rewards[0]:
        axes.plot(*rewards, color=TRAINING, linewidth=1.0, alpha=0.35)
        smoothed = smooth(rewards[1], 1.0 - 10.0 / max(10, len(rewards[1])))  # over about a tenth of the run
        axes.plot(rewards[0], smoothed, color=TRAINING, linewidth=1.6, label="training reward (sampled, smoothed)")
    if control[0]:
        axes.plot(
            *control,
            color=CONTROL,
            linewidth=1.6,
            linestyle="--",
            marker="o",
            markersize=3,
            label="control: learning rate 0",
        )
    if scores[0]:
        sampled = "" if temperature is None else f"temperature {temperature:g}, " if temperature else "greedy, "
        label = f"validation score ({sampled}unseen tasks)"
        axes.plot(*scores, color=VALIDATION, linewidth=2.4, marker="o", markersize=5, label=label)
        ends = {0: (scores[0][0], scores[1][0]), -1: (scores[0][-1], scores[1][-1])}
        for x, y in dict.fromkeys(ends.values()):
            axes.annotate(
                f"{y:.2f}",
                (x, y),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                color=VALIDATION,
                fontsize=10,
                fontweight="bold",
            )
    style_axes(axes, [*scores[1], *rewards[1], *control[1]])


def style_axes(axes: Axes, values: Sequence[float]) -> None:
    """Give a picture of these rewards by step its scale, grid and legend."""
    from matplotlib.ticker import MaxNLocator

    if min(values) >= 0.0 and max(values) <= 1.0:
        axes.set_ylim(0.0, 1.05)
    else:
        axes.margins(y=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("training step")
    axes.set_ylabel("reward")
    axes.grid(axis="y", color="#e3e5e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, fontsize=9
    )  # where no line can lead


def _add_minutes(axes: Axes, entries: Sequence[dict[str, Any]]) -> None:
    """Add training minutes (seconds of a short run) above the steps below: by metric `minutes`, else lines' times."""
    minutes = {entry["step"]: float(entry["minutes"]) for entry in entries if "minutes" in entry}
    if minutes:
        minutes.setdefault(0, 0.0)
    elif all("time" in entry for entry in entries):
        minutes = {entry["step"]: (entry["time"] - entries[0]["time"]) / 60 for entry in entries}
    steps = sorted(minutes)
    if len(steps) < 2 or minutes[steps[-1]] <= 0:
        return
    low, high = axes.get_xlim()
    marked = [tick for tick in axes.get_xticks() if max(low, steps[0]) <= tick <= min(high, steps[-1])]
    above = axes.secondary_xaxis("top")
    taken = [minutes[min(steps, key=lambda step: abs(step - tick))] for tick in marked]
    is_short = minutes[steps[-1]] < SHORT
    above.set_xticks(marked, [f"{60 * after:.0f}" if is_short else f"{after:.1f}" for after in taken])
    above.set_xlabel("seconds" if is_short else "minutes")
    above.spines["top"].set_visible(False)
    above.tick_params(length=0)


def _points(entries: Sequence[dict[str, Any]], name: str) -> Points:
    places = [(float(entry["step"]), float(entry[name])) for entry in entries if name in entry]
    return [step for step, _ in places], [value for _, value in places]
