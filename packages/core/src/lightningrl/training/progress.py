"""What a person sees of a run: a live panel on a terminal, one line per step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichBars
from rich.table import Table
from rich.text import Text

__all__ = ["LineProgress", "LiveProgress", "make_progress", "sparkline"]

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """The last `width` values as block characters, lowest to highest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(BLOCKS[int((value - low) / span * (len(BLOCKS) - 1))] for value in shown)


def _outcome_text(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items(), key=lambda pair: -pair[1])) or "-"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


class _Clock:
    """Time left, from the pace of this process since its first step began: starting and the first validation say nothing of it."""

    def __init__(self, minutes: float | None) -> None:
        self._minutes = minutes
        self._began: tuple[float, int] | None = None
        """When the first step began, and how many were done before it."""

    def left(self, step: int, steps: int, metrics: Mapping[str, float]) -> float:
        now = time.monotonic()
        if self._began is None:
            self._began = now - metrics["seconds"], step - 1
        start, before = self._began
        left = (now - start) / (step - before) * (steps - step)
        return left if self._minutes is None else max(0.0, min(left, (self._minutes - metrics["minutes"]) * 60))


class LineProgress:
    """One line per step: for logs, pipes and CI."""

    def __init__(self, console: Console, minutes: float | None = None) -> None:
        self._console = console
        self._clock = _Clock(minutes)

    def __enter__(self) -> LineProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def phase(self, name: str, done: int, total: int) -> None:
        """Quiet: a line per step is enough here."""

    def step(self, step: int, steps: int, metrics: Mapping[str, float], outcomes: Mapping[str, int]) -> None:
        left = _duration(self._clock.left(step, steps, metrics))
        self._console.print(
            f"step {step:>4}/{steps}  reward {metrics.get('reward', float('nan')):.3f}  "
            f"calls/rollout {metrics['calls_per_rollout']:.2f}  "
            f"groups without signal {metrics['groups_without_signal']:.0f}/{metrics['groups']:.0f}  "
            f"{metrics['tokens_per_second']:.0f} tok/s  {metrics['seconds']:.1f} s  [{_outcome_text(outcomes)}]  left {left}",
            highlight=False,
            soft_wrap=True,
        )

    def validated(self, step: int, metrics: Mapping[str, float], outcomes: Mapping[str, int]) -> None:
        score = f"score {metrics['reward']:.3f}" if "reward" in metrics else "no score"
        self._console.print(
            f"validation after step {step}: {score}  [{_outcome_text(outcomes)}]",
            highlight=False,
            soft_wrap=True,
        )


class LiveProgress:
    """A live panel: bars, reward sparkline, validation scores, tokens/s, outcomes, time left."""

    def __init__(self, console: Console, minutes: float | None = None) -> None:
        self._clock = _Clock(minutes)
        self._bars = RichBars(
            TextColumn("{task.description:>12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._steps: TaskID = self._bars.add_task("steps", total=None, note="starting")
        self._phase: TaskID = self._bars.add_task("starting", total=None, note="")
        self._rewards: list[float] = []
        self._scores: list[tuple[int, float]] = []
        self._latest: Mapping[str, float] = {}
        self._outcomes: Mapping[str, int] = {}
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)

    def __enter__(self) -> LiveProgress:
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.__exit__(kind, error, trace)

    def phase(self, name: str, done: int, total: int) -> None:
        self._bars.update(self._phase, description=name, completed=done, total=total)

    def step(self, step: int, steps: int, metrics: Mapping[str, float], outcomes: Mapping[str, int]) -> None:
        left = _duration(self._clock.left(step, steps, metrics))
        self._bars.update(self._steps, completed=step, total=steps, note=f"left {left}")
        self._latest, self._outcomes = metrics, outcomes
        if "reward" in metrics:
            self._rewards.append(metrics["reward"])

    def validated(self, step: int, metrics: Mapping[str, float], outcomes: Mapping[str, int]) -> None:
        if "reward" in metrics:
            self._scores.append((step, metrics["reward"]))

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        latest = self._latest
        if self._rewards:
            table.add_row("reward", f"{self._rewards[-1]:.3f}", Text(sparkline(self._rewards), style="green"))
        if self._scores:
            history = "  ".join(f"{step}: {score:.3f}" for step, score in self._scores[-8:])
            table.add_row("validation", f"{self._scores[-1][1]:.3f}", history)
        if latest:
            table.add_row("tokens/s", f"{latest['tokens_per_second']:.0f}", f"{latest['calls_per_rollout']:.2f} calls a rollout")
            table.add_row(
                "rollouts",
                f"{latest['rollouts']:.0f}",
                f"{_outcome_text(self._outcomes)}; {latest['groups_without_signal']:.0f} groups without signal",
            )
        return Group(self._bars, table)


def make_progress(console: Console, minutes: float | None = None) -> LineProgress | LiveProgress:
    """The live panel on a terminal, lines elsewhere."""
    return LiveProgress(console, minutes) if console.is_terminal else LineProgress(console, minutes)
