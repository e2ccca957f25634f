"""The picture of a run of `lightningrl tune`: losses by update, from its `metrics.jsonl`."""

from __future__ import annotations

from pathlib import Path

from lightningrl_runs.metrics import read_metrics
from lightningrl_training.loggers.curve import TRAINING, VALIDATION, save_picture, start_picture

__all__ = ["draw_losses"]

_LINES = {"learn/loss": ("training", TRAINING), "validation/loss": ("held-out rows", VALIDATION)}


def draw_losses(metrics: Path, picture: Path, *, title: str) -> None:
    """Draw the losses of training and of held-out rows. Raises ConfigError without matplotlib, RunFolderError where the
    picture cannot be written."""
    entries = read_metrics(metrics)
    figure, axes = start_picture()
    for name, (label, color) in _LINES.items():
        points = [(entry["step"], entry[name]) for entry in entries if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1.8, marker="o", markersize=3, label=label)
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=12)
    axes.set_xlabel("update")
    axes.set_ylabel("loss")
    axes.grid(axis="y", color="#e3e5e8", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save_picture(figure, picture)
