"""Alarms of a run, by its last steps: each with what it means, what to do, and which rollouts show it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final, Literal

from lightningrl.types import Outcome
from lightningrl_runs.queries.rollout_counts import ToolCount
from lightningrl_runs.queries.rollout_query import Mark

__all__ = ["Alarm", "find_alarms"]

RECENT: Final = 5
"""Steps that are looked at."""
Level = Literal["fine", "warn", "bad"]
Unit = Literal["share", "number", "nats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """One thing that was looked at, fine or not."""

    name: str
    level: Level
    value: float
    unit: Unit = "share"
    means: str
    remedy: str
    where: Mapping[str, str] = field(default_factory=dict[str, str])
    """The query of the rollouts that show it; empty = it is not a matter of single rollouts."""


_TEXTS: Final = {
    "Groups without signal": (
        "All rollouts of such a group earned the same, so nothing is learned from it.",
        "Choose tasks that are neither always solved nor never, enlarge loop.group_size, or give partial rewards.",
    ),
    "Completions cut short": (
        "They ended at max_tokens: the policy had not finished, and its answer is judged as it stands.",
        "Raise sampling.max_tokens, or look whether the policy repeats itself.",
    ),
    "Breaks": (
        "A call's messages go on from an earlier call's, but its tokens do not: the history was rendered anew.",
        "Look where the agent changes what was said; a break costs memory and time, and splits the rollout's row.",
    ),
    "Calls refused": (
        "The gateway answered with an error, which the agent saw.",
        "Open one: the refused call says what was wrong with it, most often a prompt that is too long.",
    ),
    "Rollouts that failed": (
        "None did.",
        "Open one: its error is at the end. Time-outs: runtime.timeout_s; errors: the agent's own code.",
    ),
    "Tool errors": (
        "No call of a tool failed.",
        "A tool that fails by itself teaches nothing: mend it, or reward calls that work (see intermediate rewards).",
    ),
    "Rewards that failed": (
        "The reward or the judge raised an error; where it works on others, that counts as the lowest reward.",
        "Open one: the failure is named at its end; rewards.NAME.retries and timeout_s say how often and how long.",
    ),
    "Staleness": (
        "So many versions lie between the weights that sampled a token and those that learn from it.",
        "Lower loop.max_staleness, or collect less far ahead.",
    ),
    "Probability gap": (
        "How far the trainer's probabilities of the sampled tokens are from the engine's (KL, nats per token).",
        "Engine and trainer should compute alike: the same weights, template, temperature and precision.",
    ),
    "Entropy left": (
        "Of the entropy that the policy's tokens had at first: near none, it no longer tries anything else.",
        "Lower the learning rate, or set learner.entropy_coef; where the reward is at its best, nothing is wrong.",
    ),
}
"""Meaning and remedy of each alarm, by its name."""


def find_alarms(
    rows: Sequence[Mapping[str, Any]],
    endings: Mapping[int, Mapping[str, int]],
    tools: Sequence[ToolCount],
    cut: Mapping[int, int],
) -> tuple[Alarm, ...]:
    """Return the alarms, worst first.

    `rows`: metrics of the training steps; `endings`: their rollouts by outcome; `cut`: completions that ended at
    max_tokens, by step.
    """
    if not rows:
        return ()
    recent = rows[-RECENT:]
    steps = {"from": str(recent[0]["step"]), "to": str(recent[-1]["step"])}
    trained = {**steps, "mode": "train"}
    alarms: list[Alarm] = []
    if groups := _sum(recent, "groups"):
        share = _sum(recent, "groups_without_signal") / groups
        alarms.append(_alarm("Groups without signal", share, 0.5, 0.9, where={**trained, "mark": Mark.SILENT}))
    if calls := sum(row.get("calls_per_rollout", 0.0) * row.get("rollouts", 0.0) for row in recent):
        short, refused = sum(cut.get(row["step"], 0) for row in recent), _sum(recent, "calls_refused")
        alarms += [
            _alarm("Completions cut short", short / calls, 0.02, 0.2, where={**trained, "mark": Mark.CUT}),
            _alarm("Breaks", _sum(recent, "breaks") / calls, 0.01, 0.1, where={**trained, "mark": Mark.BREAK}),
            _alarm("Calls refused", refused / calls, 0.001, 0.05, where={**trained, "mark": Mark.REFUSED}),
        ]
    alarms += [*_of_endings([endings.get(row["step"], {}) for row in recent], trained), *_of_tools(tools)]
    failed = _sum(recent, "rewards_failed") / max(1.0, _sum(recent, "rollouts"))
    alarms.append(_alarm("Rewards that failed", failed, 0.001, 0.1, where={**steps, "mark": Mark.FAILED_REWARD}))
    if stale := _learned(recent, "staleness_max"):
        alarms.append(_alarm("Staleness", max(stale), 4, 16, unit="number"))
    if gaps := _learned(recent, "kl_rollout"):
        alarms.append(_alarm("Probability gap", max(gaps), 0.01, 0.1, unit="nats"))
    first, last = _learned(rows[:RECENT], "entropy"), _learned(recent, "entropy")
    if len(rows) > RECENT and last and first and fmean(first):
        alarms.append(_alarm("Entropy left", fmean(last) / fmean(first), 0.1, 0.02))
    order = {"bad": 0, "warn": 1, "fine": 2}
    return tuple(sorted(alarms, key=lambda alarm: order[alarm.level]))


def _alarm(
    name: str,
    value: float,
    warn: float,
    bad: float,
    *,
    means: str | None = None,
    where: Mapping[str, str] | None = None,
    unit: Unit = "share",
) -> Alarm:
    """`warn` and `bad`: from there on, upwards; downwards where `bad` is the smaller one."""
    is_past = operator.lt if bad < warn else operator.ge
    level: Level = "bad" if is_past(value, bad) else "warn" if is_past(value, warn) else "fine"
    usual, remedy = _TEXTS[name]
    return Alarm(name=name, level=level, value=value, unit=unit, means=means or usual, remedy=remedy, where=where or {})


def _of_endings(endings: Sequence[Mapping[str, int]], steps: Mapping[str, str]) -> list[Alarm]:
    total = sum(sum(counts.values()) for counts in endings)
    if not total:
        return []
    failed = {name: sum(counts.get(name, 0) for counts in endings) for name in Outcome if name is not Outcome.SUCCEEDED}
    worst = max(failed, key=lambda name: failed[name])
    ended = worst.value.replace("_", " ")
    means = f"What the policy breaks earns the lowest reward, what the world breaks is run again; most: {ended}."
    where, share = {**steps, "outcome": worst.value}, sum(failed.values()) / total
    return [_alarm("Rollouts that failed", share, 0.05, 0.3, means=means if failed[worst] else None, where=where)]


def _of_tools(tools: Sequence[ToolCount]) -> list[Alarm]:
    total = sum(tool.count for tool in tools)
    if not total:
        return []
    failures = Counter[str]()
    for tool in tools:
        if tool.status.is_failure:
            failures[tool.name] += tool.count
    worst = max(failures, key=lambda name: failures[name], default=None)
    means = f"Over the whole run; most failures are of {worst!r}." if worst else None
    where = {"mark": Mark.TOOL_ERROR, **({"tool": worst} if worst else {})}
    return [_alarm("Tool errors", failures.total() / total, 0.05, 0.3, means=means, where=where)]


def _sum(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(row.get(name, 0.0) for row in rows))


def _learned(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """`learn/NAME`, and `learn/POLICY/NAME` of several policies."""
    return [
        value
        for row in rows
        for key, value in row.items()
        if key.startswith("learn/") and key.rpartition("/")[2] == name
    ]
