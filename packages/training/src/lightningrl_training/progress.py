"""The progress of a run on screen: a live panel on a terminal and in a notebook, one line per step elsewhere.

Before the first step it shows a forecast of one, from the speed that backends measured and a validation's rollouts:

step = rollouts · (sampled ÷ tokens sampled a second + read ÷ tokens read a second + rows ÷ tokens learned a second)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from rich.console import Console, Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichBars
from rich.table import Table
from rich.text import Text

from lightningrl.backends import Speed
from lightningrl.plugins import hookimpl
from lightningrl.recipe import Recipe
from lightningrl.sanitize import as_text
from lightningrl.types import Outcome, Trajectory, Transition

__all__ = [
    "LineProgress",
    "LiveProgress",
    "NotebookProgress",
    "Progress",
    "forecast_step",
    "make_progress",
    "sparkline",
    "step_seconds",
]

BLOCKS = "▁▂▃▄▅▆▇█"
LEARNING = {"loss": "loss", "kl_rollout": "kl"}
"""A learner's metrics that are shown, and their names there."""
NOTHING = 1e-6
"""Less than this is rounding."""
REPLAY_S = 1.0
"""Rollouts that take longer were sampled, not read from the store."""
LONGER: Final = 3
"""Most times that a sampled answer is as long as the likeliest; a 135 M model's sums of two were up to so many."""
UNITS: Final = ((86_400, "days"), (3600, "hours"), (60, "minutes"))


class Progress(Protocol):
    """Shows progress to the user."""

    def phase(self, name: str, done: int, total: int) -> None: ...
    def step(self, step: int, steps: int, metrics: Mapping[str, float], outcomes: Mapping[str, int]) -> None: ...
    def validated(self, step: int, metrics: Mapping[str, float], outcomes: Mapping[str, int]) -> None: ...
    def forecast(self, parts: Sequence[str]) -> None: ...
    def say(self, sentence: str) -> None: ...


def sparkline(values: list[float], width: int = 40) -> str:
    """The last `width` values as block characters, lowest to highest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(BLOCKS[int((value - low) / span * (len(BLOCKS) - 1))] for value in shown)


def _outcome_text(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items(), key=lambda pair: -pair[1])) or "-"


def _failed_rewards(metrics: Mapping[str, float]) -> list[str]:
    failed = metrics.get("rewards_failed", 0)
    return [f"rewards failed {failed:.0f}/{metrics['rollouts']:.0f}"] if failed else []


def _learning(metrics: Mapping[str, float]) -> list[str]:
    """Loss and KL, of each policy that is trained."""
    shown = []
    for key in sorted(metrics, reverse=True):  # loss before kl
        if key.startswith("learn/") and (name := LEARNING.get(key.rpartition("/")[2])):
            policy = key.split("/")[1] + " " if key.count("/") == 2 else ""
            value = metrics[key]
            shown.append(f"{policy}{name} {0 if abs(value) < NOTHING else value:.2g}")
    return shown


class _Progress:
    """The common part of all progress: a console, and what was seen of the run."""

    def __init__(self, console: Console, minutes: float | None = None, *, is_resumed: bool = False) -> None:
        self._console = console
        self._minutes = minutes
        self._began: tuple[float, int] | None = None
        """When the first step ended, and which it was."""
        self._answered: Trajectory | None = None
        """The latest rollout that succeeded."""
        self._may_replay, self._is_replay = is_resumed, False
        """In the first steps of a resumed run all rollouts are in its store, at once."""
        self._asked = 0.0

    @hookimpl
    def lightningrl_rollout_finished(self, trajectory: Trajectory) -> None:
        """Take a rollout that has ended and been rewarded."""
        if trajectory.outcome is Outcome.SUCCEEDED:
            self._answered = trajectory

    def _begin_phase(self, name: str, done: int, total: int) -> None:
        """Tell rollouts that a resumed run finds in its store from new ones."""
        if name == "rollouts" and self._may_replay:
            if done == 0:
                self._asked = time.monotonic()
            self._is_replay = self._may_replay = done in {0, total} and time.monotonic() - self._asked < REPLAY_S

    def _left(self, step: int, steps: int, metrics: Mapping[str, float]) -> str:
        """Time left, `left 3:20` and the like, from the pace of this process since its first step ended: that one
        imports what all of them need, so that nothing is said after it."""
        now = time.monotonic()
        if self._began is None or step <= self._began[1]:
            self._began = now, step
            return ""
        start, before = self._began
        left = (now - start) / (step - before) * (steps - step)
        left = left if self._minutes is None else max(0.0, min(left, (self._minutes - metrics["minutes"]) * 60))
        minutes, seconds = divmod(round(left), 60)
        return f"left {minutes}:{seconds:02d}"

    def _sample(self, width: int) -> str | None:
        """The latest rollout that succeeded, in a line: shows what the policy does now."""
        if self._answered is None:
            return None
        reward = "-" if self._answered.reward is None else f"{self._answered.reward:.3f}"
        line = f"{self._answered.task.id} \u2192 {' '.join(as_text(self._answered.output).split())}"
        room = max(8, width - len(reward) - 10)
        return f"{line if len(line) <= room else line[: room - 2] + ' …'}  reward {reward}"

    def _speed(self, metrics: Mapping[str, float]) -> str:
        return "replayed" if self._is_replay else f"{metrics['tokens_per_second']:.0f} tok/s"


class LineProgress(_Progress):
    """A line per step, broken between its fields where it is longer than the page: for logs, pipes and CI."""

    def __enter__(self) -> LineProgress:
        return self

    def __exit__(self, *raised: Any) -> None: ...

    def phase(self, name: str, done: int, total: int) -> None:
        """Say what is waited for where there is nothing to count; else a line per step is enough."""
        self._begin_phase(name, done, total)
        if not total:
            self._say([f"{name} …"])

    def step(self, step: int, steps: int, metrics: Mapping[str, float], outcomes: Mapping[str, int]) -> None:
        left = self._left(step, steps, metrics)
        silent = f"groups without signal {metrics['groups_without_signal']:.0f}/{metrics['groups']:.0f}"
        self._say(
            [
                f"step {step:>{len(str(steps))}}/{steps}",
                f"reward {metrics.get('reward', float('nan')):.3f}",
                *_learning(metrics),
                f"calls {metrics['calls_per_rollout']:.2f}",
                *([silent] if metrics["groups_without_signal"] else []),
                *_failed_rewards(metrics),
                self._speed(metrics),
                f"{metrics['seconds']:.1f} s",
                *([f"[{_outcome_text(outcomes)}]"] if set(outcomes) != {Outcome.SUCCEEDED.value} else []),
                *([left] if left else []),
            ]
        )

    def validated(self, step: int, metrics: Mapping[str, float], outcomes: Mapping[str, int]) -> None:
        score = f"score {metrics['reward']:.3f}" if "reward" in metrics else "no score"
        self._say([f"validation after step {step}: {score}", *_failed_rewards(metrics), f"[{_outcome_text(outcomes)}]"])
        if sample := self._sample(self._console.width - 2):
            self._console.print(f"  {sample}", highlight=False, markup=False, soft_wrap=True)

    def say(self, sentence: str) -> None:
        """A line of its own."""
        self._say([sentence])

    def forecast(self, parts: Sequence[str]) -> None:
        """Show the forecast of a step."""
        self._say(["forecast:", *parts])

    def _say(self, fields: list[str]) -> None:
        lines = [""]
        for field in fields:
            gap = "  " if lines[-1].strip() else ""
            if lines[-1].strip() and len(lines[-1]) + len(gap) + len(field) > self._console.width:
                lines.append(f"    {field}")
            else:
                lines[-1] += f"{gap}{field}"
        for line in lines:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class LiveProgress(_Progress):
    """A live panel: bars, reward sparkline, validation scores, loss, a sample, tokens/s, outcomes, time left."""

    def __init__(self, console: Console, minutes: float | None = None, *, is_resumed: bool = False) -> None:
        super().__init__(console, minutes, is_resumed=is_resumed)
        self._bars = RichBars(
            TextColumn("{task.description:>12}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._steps: TaskID = self._bars.add_task("steps", total=None, note="")
        self._phase: TaskID = self._bars.add_task("starting", total=None, note="")
        self._shown = "starting"
        self._rewards: list[float] = []
        self._scores: list[tuple[int, float]] = []
        self._latest: Mapping[str, float] = {}
        self._forecast = ""
        self._outcomes: Mapping[str, int] = {}
        self._live = Live(get_renderable=self.__rich__, console=console, refresh_per_second=4)

    def __enter__(self) -> LiveProgress:
        self._live.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Remove the bars of what is over, and leave the panel as it stands then."""
        self._bars.remove_task(self._phase)
        if self._latest:
            self._bars.update(self._steps, note="")
        else:
            self._bars.remove_task(self._steps)
        self._show_last(*raised)

    def _show_last(self, *raised: Any) -> None:
        self._live.__exit__(*raised)

    def phase(self, name: str, done: int, total: int) -> None:
        """Show a phase, with a clock of its own; rollouts that are all there are being learned from."""
        self._begin_phase(name, done, total)
        if name == "rollouts" and done == total:
            name, done, total = "learning", 0, 0
        if name != self._shown or done == 0:
            self._bars.remove_task(self._phase)
            self._phase = self._bars.add_task(name, total=total or None, note="")
            self._shown = name
        self._bars.update(self._phase, completed=done)

    def step(self, step: int, steps: int, metrics: Mapping[str, float], outcomes: Mapping[str, int]) -> None:
        self._bars.update(self._steps, completed=step, total=steps, note=self._left(step, steps, metrics))
        self._latest, self._outcomes = metrics, outcomes
        if "reward" in metrics:
            self._rewards.append(metrics["reward"])

    def validated(self, step: int, metrics: Mapping[str, float], outcomes: Mapping[str, int]) -> None:
        if "reward" in metrics:
            self._scores.append((step, metrics["reward"]))

    def say(self, sentence: str) -> None:
        """A line above the panel."""
        self._console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def forecast(self, parts: Sequence[str]) -> None:
        """Shown until the first step says it better."""
        self._forecast = ", ".join(parts)

    def __rich__(self) -> RenderableType:
        """The panel as it stands; any console can print it."""
        table = Table.grid(padding=(0, 2))
        latest = self._latest
        if self._forecast and not latest:
            table.add_row("forecast", "", self._forecast)
        if self._rewards:
            table.add_row("reward", f"{self._rewards[-1]:.3f}", Text(sparkline(self._rewards), style="green"))
        if self._scores:
            history = "  ".join(f"{step}: {score:.3f}" for step, score in self._scores[-8:])
            table.add_row("validation", f"{self._scores[-1][1]:.3f}", history)
        if latest:
            if learning := _learning(latest):
                table.add_row("learner", "", Text("  ".join(learning)))
            calls = f"{latest['calls_per_rollout']:.2f} calls a rollout"
            table.add_row("speed", "", f"{self._speed(latest)}, {calls}")
            silent = f"{latest['groups_without_signal']:.0f} of {latest['groups']:.0f} groups without signal"
            table.add_row(
                "last step", "", Text("; ".join([_outcome_text(self._outcomes), silent, *_failed_rewards(latest)]))
            )
        if sample := self._sample(self._console.width - 24):
            table.add_row("sample", "", Text(sample, style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(self._bars, table)


class NotebookProgress(LiveProgress, JupyterMixin):
    """The same panel below a notebook's cell; the last one stays there."""

    def __enter__(self) -> LiveProgress:
        from IPython.display import display

        self._cell: Any = display(self, display_id=True)  # type: ignore[no-untyped-call]
        return self

    def _show_last(self, *raised: Any) -> None:
        self._cell.update(self)

    def phase(self, name: str, done: int, total: int) -> None:
        super().phase(name, done, total)
        self._cell.update(self)


def make_progress(
    console: Console, minutes: float | None = None, *, is_resumed: bool = False
) -> LineProgress | LiveProgress:
    """The live panel on a terminal and in a notebook, lines elsewhere."""
    kind = NotebookProgress if console.is_jupyter else LiveProgress if console.is_terminal else LineProgress
    return kind(console, minutes, is_resumed=is_resumed)


def forecast_step(recipe: Recipe, speed: Speed, seen: Sequence[Trajectory]) -> list[str]:
    """Forecast a step, in parts of a sentence: in time as this machine was when it was measured, and in CPU time, which
    is the same on a busy one. `seen`: rollouts of the policy; none = each is one longest answer."""
    sampled, read, like = _expect(recipe, seen)
    rollouts, steps = recipe.loop.tasks_per_step * recipe.loop.group_size, recipe.loop.steps

    def take(steps: int) -> str:
        wall = _ends(steps * rollouts, sampled, read, (speed.sampled, speed.read, speed.learned))
        if speed.sampled_cpu is None or speed.read_cpu is None or speed.learned_cpu is None:
            return wall
        cpu = speed.sampled_cpu, speed.read_cpu, speed.learned_cpu
        return f"{wall}, {_ends(steps * rollouts, sampled, read, cpu)} of CPU"

    return [
        f"{_count(speed.parameters)} parameters",
        *([f"{_count(speed.trained)} learn"] if speed.trained != speed.parameters else []),
        f"{speed.sampled:.3g} tokens/s sampled, {speed.calls} calls at once",
        f"{speed.learned:.3g} learned",
        f"a step of {rollouts} rollouts {take(1)}",
        *([f"{steps} steps {take(steps)}"] if steps > 1 else []),
        f"if each {like}",
    ]


def step_seconds(recipe: Recipe, speed: Speed, seen: Sequence[Trajectory]) -> float:
    """Forecast the seconds of a step, at most."""
    (_, most), read, _ = _expect(recipe, seen)
    rollouts = recipe.loop.tasks_per_step * recipe.loop.group_size
    return _seconds(rollouts, most, read, (speed.sampled, speed.read, speed.learned))


def _expect(recipe: Recipe, seen: Sequence[Trajectory]) -> tuple[tuple[float, float], float, str]:
    """Tokens that a rollout may be expected to sample, from … to; those that it reads; and what it is like."""
    calls = [call for rollout in seen for call in rollout.transitions]
    most = recipe.sampling.max_tokens
    if not calls:
        return (most, most), 0.0, f"samples one answer of sampling.max_tokens = {most}"
    count = len(calls) / len(seen)
    sampled = sum(len(call.completion_ids) for call in calls) / len(seen)
    prompt = sum(len(call.prompt_ids) for call in calls) / len(seen)
    read = sum(_read(rollout.transitions, recipe.loop.group_size) for rollout in seen) / len(seen)
    like = (
        f"is like these {len(seen)}: {count:.1f} calls, {sampled:.0f} tokens sampled, {prompt:.0f} in prompts, of "
        f"which {read:.0f} are computed (what is shared is once)"
    )
    # the likeliest answer is a short one
    is_greedier = recipe.validation_sampling.temperature < recipe.sampling.temperature
    longer = max(sampled, min(LONGER * sampled, count * most)) if is_greedier else sampled
    if longer > sampled:
        like += f", or samples {longer:.0f}, as at temperature {recipe.sampling.temperature:g} it may"
    return (sampled, longer), read, like


def _read(calls: Sequence[Transition], group_size: int) -> float:
    """Prompt tokens of a rollout that the engine computes: none that a call continues, a group's beginning once."""
    lengths = {call.id: len(call.prompt_ids) + len(call.completion_ids) for call in calls}
    return sum(
        max(0, len(call.prompt_ids) - lengths[call.parent_id])
        if call.parent_id in lengths
        else len(call.prompt_ids) / group_size
        for call in calls
    )


def _ends(rollouts: int, sampled: Sequence[float], read: float, rates: tuple[float, float, float]) -> str:
    """Time of so many rollouts, from … to. `rates`: tokens a second that are sampled, read and learned."""
    return " to ".join(dict.fromkeys(_time(_seconds(rollouts, tokens, read, rates)) for tokens in sampled))


def _seconds(rollouts: int, sampled: float, read: float, rates: tuple[float, float, float]) -> float:
    samples, reads, learns = rates
    return rollouts * (sampled / samples + read / reads + (sampled + read) / learns)


def _count(number: float) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _time(seconds: float) -> str:
    unit, name = next(((unit, name) for unit, name in UNITS if seconds >= 2 * unit), (1, "seconds"))
    return f"{seconds / unit:.{0 if seconds >= 10 * unit else 1}f} {name}"
