"""The result of a sweep: each setting's mean over seeds, and which settings differ.

runs ─► score of each ─► mean and Student's t interval by setting ─► Welch's interval of each difference ─► a sentence

Of several differences all intervals hold at once in 95 of 100 sweeps (Bonferroni).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from lightningrl.figures import LEVEL, Interval, mean_interval, welch_interval
from lightningrl.recipe import Recipe
from lightningrl_runs.metrics import read_rows
from lightningrl_training.sweeps.plan import Point, SweepPlan
from lightningrl_training.sweeps.runner import read_finished

__all__ = ["Difference", "RunResult", "SettingResult", "SweepResult", "compare_sweep"]

HELD_OUT = "validation/reward"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """A run of a sweep."""

    point: Point
    problem: str | None
    """Reason why it failed; empty = it ended well, None = it has not ended."""
    before: float | None
    """Held-out reward before the first step; None = it was not validated."""
    after: float | None
    """Held-out reward at the end; of a run without validation mean training reward of its last quarter."""
    rollouts: int
    """Rollouts that `after` is a mean of."""
    steps: int
    minutes: float
    tokens: int
    """Tokens sampled in training steps."""
    score: float | None = None
    """The number that settings are compared by: `after`, or the steps to a target, below 0; more is better."""
    grain: float = 0.0
    """The least by which two scores can differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingResult:
    """The runs of a setting."""

    setting: str
    runs: Sequence[RunResult]
    """The ones that ended well."""
    before: float | None
    after: Interval | None
    """None = no run has a score."""
    steps: float | None
    minutes: float | None
    """Mean of a run."""
    tokens: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A setting's mean less another's."""

    setting: str
    other: str
    interval: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """The result of a sweep, so far."""

    measure: str
    """Name of what is compared."""
    settings: Sequence[SettingResult]
    """The best first."""
    differences: Sequence[Difference]
    """Each pair that has two seeds or more, the better one first."""
    failures: Mapping[str, str]
    """Reasons, by a run's name."""
    missing: int
    """Runs that have not ended."""
    verdict: str

    def numbers(self) -> dict[str, Any]:
        """The result for `sweep.json`."""
        return {
            "measure": self.measure,
            "level": LEVEL,
            "settings": [
                {
                    "setting": result.setting,
                    "values": dict(result.runs[0].point.values) if result.runs else {},
                    "seeds": [run.point.seed for run in result.runs],
                    "before": result.before,
                    "after": None if result.after is None else asdict(result.after),
                    "steps": result.steps,
                    "minutes": result.minutes,
                    "tokens": result.tokens,
                    "runs": {run.point.name: run.after for run in result.runs},
                }
                for result in self.settings
            ],
            "differences": [
                {
                    "setting": each.setting,
                    "other": each.other,
                    **asdict(each.interval),
                    "shown": each.interval.is_shown,
                }
                for each in self.differences
            ],
            "failures": dict(self.failures),
            "missing": self.missing,
            "verdict": self.verdict,
        }


def compare_sweep(plan: SweepPlan, folder: Path, recipe: Recipe) -> SweepResult:
    """Compare a sweep's settings by what its runs measured so far. `recipe`: that of a point."""
    finished = read_finished(folder)
    runs = [_read_run(point, folder / point.name, finished.get(point.name)) for point in plan.points]
    measure, runs = _choose_measure(runs, recipe)
    settings = [
        _read_setting(setting, [run for run in runs if run.point.setting == setting], recipe.reward_bounds)
        for setting in plan.settings
    ]
    settings.sort(key=lambda result: max((-math.inf, *_means(result))), reverse=True)
    differences = _differences(settings)
    return SweepResult(
        measure=measure,
        settings=settings,
        differences=differences,
        failures={run.point.name: run.problem for run in runs if run.problem},
        missing=sum(run.problem is None for run in runs),
        verdict=_verdict(measure, settings, differences),
    )


def _read_run(point: Point, run: Path, problem: str | None) -> RunResult:
    rows = read_rows(run)
    trained = [row for row in rows if "rollouts" in row]
    held_out = [row for row in rows if HELD_OUT in row]
    after: float | None
    before = next((float(row[HELD_OUT]) for row in held_out if row["step"] == 0), None)
    if held_out:
        after, rollouts = float(held_out[-1][HELD_OUT]), int(held_out[-1].get("validation/rollouts", 1))
    else:
        last = [row for row in trained[-max(1, len(trained) // 4) :] if "reward" in row]
        after = fmean(row["reward"] for row in last) if last else None
        rollouts = int(sum(row["rollouts"] for row in last))
    return RunResult(
        point=point,
        problem=problem,
        before=before,
        after=after,
        rollouts=max(1, rollouts),
        steps=max((int(row["step"]) for row in rows), default=0),
        minutes=max((float(row["minutes"]) for row in rows if "minutes" in row), default=0.0),
        tokens=int(sum(row.get("completion_tokens", 0.0) for row in trained)),
    )


def _choose_measure(runs: Sequence[RunResult], recipe: Recipe) -> tuple[str, list[RunResult]]:
    """Name what is compared, and give the runs their scores. Runs that all stopped at a target are as good as each
    other: they differ by their steps."""
    low, high = recipe.reward_bounds
    target, ended = recipe.loop.stop_at, [run for run in runs if run.problem == ""]
    if target is not None and ended and all(run.after is not None and run.after >= target for run in ended):
        every = float(recipe.validation.every)
        return (
            f"steps saved until a held-out reward of {target:g}",
            [replace(run, score=-float(run.steps), grain=every) for run in runs],
        )
    is_held_out = any(run.before is not None for run in runs)
    return (
        "held-out reward" if is_held_out else "training reward of the last quarter",
        [replace(run, score=run.after, grain=(high - low) / run.rollouts) for run in runs],
    )


def _read_setting(setting: str, runs: Sequence[RunResult], bounds: tuple[float, float]) -> SettingResult:
    ended = [run for run in runs if run.problem == ""]
    befores = [run.before for run in ended if run.before is not None]
    afters = [run.after for run in ended if run.after is not None]
    grain = min((run.grain for run in ended), default=0.0) if all(run.score == run.after for run in ended) else 0.0
    return SettingResult(
        setting=setting,
        runs=ended,
        before=fmean(befores) if befores else None,
        after=mean_interval(afters, bounds=bounds, grain=grain) if afters else None,
        steps=fmean(run.steps for run in ended) if ended else None,
        minutes=fmean(run.minutes for run in ended) if ended else None,
        tokens=fmean(run.tokens for run in ended) if ended else None,
    )


def _scores(result: SettingResult) -> list[float]:
    return [run.score for run in result.runs if run.score is not None]


def _means(result: SettingResult) -> list[float]:
    """The mean score, where there is one."""
    return [fmean(scores)] if (scores := _scores(result)) else []


def _differences(settings: Sequence[SettingResult]) -> list[Difference]:
    pairs = [pair for pair in itertools.combinations(settings, 2) if all(len(_scores(each)) > 1 for each in pair)]
    level = 1.0 - (1.0 - LEVEL) / max(1, len(pairs))
    return [
        Difference(
            setting=better.setting,
            other=worse.setting,
            interval=welch_interval(
                _scores(better),
                _scores(worse),
                grain=max(run.grain for run in (*better.runs, *worse.runs)),
                level=level,
            ),
        )
        for better, worse in pairs
    ]


def _verdict(measure: str, settings: Sequence[SettingResult], differences: Sequence[Difference]) -> str:
    scored = [result for result in settings if result.after is not None]
    if not scored:
        return "no run has ended with a score: nothing can be said"
    best = scored[0]
    if len(scored) == 1:
        return _learned(measure, best)
    seeds = min(len(result.runs) for result in scored)
    against = {each.other: each for each in differences if each.setting == best.setting}
    if not against:
        return f"one seed of a setting shows no difference, however large ({measure}): give --seeds 3 or more"
    worse = [each for each in against.values() if each.interval.is_shown]
    alike = [each for each in against.values() if not each.interval.is_shown]
    if not worse:
        named = "; ".join(f"{best.setting} against {each.other}: {_shown(each.interval)}" for each in alike)
        return f"no difference shown by {seeds} seeds in {measure}: {named}"
    sentence = f"{best.setting} is better than " + ", than ".join(
        f"{each.other} by {_shown(each.interval)}" for each in worse
    )
    if alike:
        sentence += "; no difference shown from " + ", from ".join(
            f"{each.other}: {_shown(each.interval)}" for each in alike
        )
    return f"{sentence} ({measure}, {seeds} seeds)"


def _learned(measure: str, result: SettingResult) -> str:
    """The verdict on one setting: whether its runs end better than they began."""
    gains = [run.after - run.before for run in result.runs if run.after is not None and run.before is not None]
    if not gains:
        return f"{measure}: {result.after.mean if result.after else 0.0:.3f}; there is nothing to compare it with"
    if len(gains) < 2:
        return f"{measure} changed by {gains[0]:+.3f}; one seed shows no difference: give --seeds 3 or more"
    gain = mean_interval(gains, grain=1.0 / min(run.rollouts for run in result.runs))
    what = ("rose" if gain.mean > 0 else "fell") if gain.is_shown else f"did not change that {len(gains)} seeds show"
    return f"{measure} {what}: {_shown(gain)} ({len(gains)} seeds)"


def _shown(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.mean:+.3f}"
    return f"{interval.mean:+.3f} (95 %: {interval.low:+.3f} to {interval.high:+.3f})"
