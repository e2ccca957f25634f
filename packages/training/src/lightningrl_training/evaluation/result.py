"""Results of a policy on tasks: every sample's reward, and statistics; and two policies on the same tasks, as pairs.

tasks[task].samples[sample] ─► pass@k, mean reward, slices, tokens, seconds, cost
first[task] - second[task] ─► difference ─┬► t interval
                                          └► a bet, looked at after every task ─► better, worse, not enough tasks

A failure of the agent (an error, a time-out, a context that overflows) is the lowest reward that there is: a policy
that breaks on hard tasks is no better for it. A failure of ours, or of a reward, is none: left out and counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lightningrl.errors import ConfigError
from lightningrl.figures import (
    LEVEL,
    Bet,
    Interval,
    Verdict,
    bet,
    holm,
    mean_interval,
    pass_at_k,
    sign_flip_p,
)
from lightningrl.recipe_tables import OutcomesConfig
from lightningrl.types import OtherCall, OtherCallKind, Outcome, SamplingSettings, Trajectory

__all__ = ["Comparison", "EvaluatedSample", "EvaluatedTask", "Evaluation", "compare", "read_evaluation", "sample_of"]

NEARLY = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedSample:
    """The result of one rollout."""

    rollout_id: str
    reward: float | None
    """None = it failed."""
    outcome: Outcome
    calls: int
    """Calls of models."""
    prompt_tokens: int | None
    """None = the provider does not say."""
    completion_tokens: int | None
    seconds: float

    def value(self, lowest: float) -> float | None:
        """Value that the sample counts with; None = it is no result."""
        if self.reward is None and self.outcome.is_agents_own:
            return lowest
        return self.reward


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedTask:
    """The samples of one task."""

    id: str
    slices: Mapping[str, str]
    """Short values of its metadata and its input, to group tasks by."""
    samples: tuple[EvaluatedSample, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A policy on tasks."""

    policy: str
    step: int | None
    """Training steps that its weights have; None = not known."""
    recipe: str
    samples: int
    """Samples asked for, of each task."""
    sampling: SamplingSettings | None
    """Sampling settings; None = as the agent asks, since a provider answers."""
    bounds: tuple[float, float]
    """Least and most that a reward may be, as the recipe says."""
    passes: float
    """Least reward that passes."""
    tasks: tuple[EvaluatedTask, ...]
    """Tasks in the random order in which they were run."""
    asked: int
    """Tasks that might have been run."""
    price: tuple[float, float] | None = None
    """Price of a million prompt tokens, and of a million completion tokens; None = not given."""
    rollouts: str | None = None
    """Folder that `lightningrl rollouts --run` reads."""
    at: float = 0.0
    """Unix seconds."""
    chosen_among: int = 0
    """Validations whose best chose this checkpoint; 0 = it was not chosen."""
    chosen_by: int = 0
    """Number of `asked` tasks that were among those that chose it: on them the policy looks better than it is."""

    @property
    def lowest(self) -> float:
        """Value of the agent's own failures: the least that a reward may be, or less, where one was."""
        return min([self.bounds[0], *(sample.reward for sample in self._all() if sample.reward is not None)])

    def values(self, lowest: float | None = None) -> dict[str, list[float]]:
        """Values of the samples that have a result, by task; tasks without are left out. `lowest` None = its own."""
        least = self.lowest if lowest is None else lowest
        values_by_task = {
            task.id: [value for sample in task.samples if (value := sample.value(least)) is not None]
            for task in self.tasks
        }
        return {task: values for task, values in values_by_task.items() if values}

    def means(self, lowest: float | None = None) -> dict[str, float]:
        """Means of `values`."""
        return {task: float(np.mean(values)) for task, values in self.values(lowest).items()}

    @property
    def reward(self) -> Interval | None:
        """Mean reward over tasks; None = nothing has a result."""
        means = list(self.means().values())
        return mean_interval(means, bounds=self.bounds if self.fits_bounds else None) if means else None

    @property
    def fits_bounds(self) -> bool:
        """True if every reward is within the recipe's bounds."""
        low, high = self.bounds
        return all(low - NEARLY <= value <= high + NEARLY for values in self.values().values() for value in values)

    def pass_at(self, k: int) -> Interval | None:
        """pass@k, of the tasks that have so many results; None = there are none."""
        chances = [
            pass_at_k(len(values), sum(value >= self.passes - NEARLY for value in values), k)
            for values in self.values().values()
            if len(values) >= k
        ]
        return mean_interval(chances, bounds=(0.0, 1.0)) if chances else None

    @property
    def ks(self) -> list[int]:
        """Values of k to show: 1, 2, 4 … and all samples."""
        return sorted({*(2**power for power in range(int(math.log2(self.samples)) + 1)), self.samples})

    def by_slice(self, key: str) -> dict[str, list[str]]:
        """Task ids by the value that their metadata has for `key`; empty where no task that was run has it."""
        slices: dict[str, list[str]] = {}
        for task in self.tasks:
            if key in task.slices:
                slices.setdefault(task.slices[key], []).append(task.id)
        return dict(sorted(slices.items()))

    def slice_rewards(self, key: str) -> dict[str, Interval]:
        means = self.means()
        return {
            name: mean_interval(values, bounds=self.bounds if self.fits_bounds else None)
            for name, tasks in self.by_slice(key).items()
            if (values := [means[task] for task in tasks if task in means])
        }

    @property
    def without_result(self) -> int:
        return sum(sample.value(self.bounds[0]) is None for sample in self._all())

    @property
    def failed(self) -> int:
        """Samples ended by the agent's error, a time-out or too long a context: they count as the lowest reward."""
        return sum(sample.reward is None and sample.outcome.is_agents_own for sample in self._all())

    @property
    def seconds(self) -> float:
        """Mean seconds of a rollout."""
        return float(np.mean([sample.seconds for sample in self._all()])) if self.tasks else 0.0

    @property
    def tokens(self) -> tuple[float, float] | None:
        """Mean prompt and completion tokens of a rollout; None = the provider does not say."""
        samples = self._all()
        prompt = _sum([sample.prompt_tokens for sample in samples])
        completion = _sum([sample.completion_tokens for sample in samples])
        if not samples or prompt is None or completion is None:
            return None
        return prompt / len(samples), completion / len(samples)

    @property
    def cost(self) -> float | None:
        """Cost of all rollouts together; None = no price or no tokens are known."""
        if self.price is None or self.tokens is None:
            return None
        each = sum(tokens * price for tokens, price in zip(self.tokens, self.price, strict=True))
        return each * len(self._all()) / 1e6

    def _all(self) -> list[EvaluatedSample]:
        return [sample for task in self.tasks for sample in task.samples]


def sample_of(trajectory: Trajectory, outcomes: OutcomesConfig) -> EvaluatedSample:
    """A sample of a rewarded rollout. A failure of the agent's own has none: it counts as the lowest there is."""
    forwarded = [call for call in trajectory.other_calls if call.kind is OtherCallKind.FORWARDED]
    sampled = [(len(call.prompt_ids), len(call.completion_ids)) for call in trajectory.transitions]
    counts = [*sampled, *map(_usage, forwarded)]
    return EvaluatedSample(
        rollout_id=trajectory.rollout_id,
        reward=trajectory.reward if outcomes.asks_rewards(trajectory.outcome) else None,
        outcome=trajectory.outcome,
        calls=len(counts),
        prompt_tokens=_sum([prompt for prompt, _ in counts]),
        completion_tokens=_sum([completion for _, completion in counts]),
        seconds=trajectory.duration_s,
    )


PROMPT_NAMES, COMPLETION_NAMES = ("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")


def _usage(call: OtherCall) -> tuple[int | None, int | None]:
    """Prompt and completion tokens of a call; None = the provider does not say."""
    if call.status is not None and call.status >= 400:
        return 0, 0
    counts = _streamed_usage(call.answer) if isinstance(call.answer, str) else _usage_in(call.answer)
    prompt, completion = (
        next((counts[name] for name in names if isinstance(counts.get(name), int)), None)
        for names in (PROMPT_NAMES, COMPLETION_NAMES)
    )
    return prompt, 0 if completion is None and call.path == "embeddings" else completion


def _usage_in(body: Any) -> Mapping[str, Any]:
    usage = body.get("usage") if isinstance(body, Mapping) else None
    return usage if isinstance(usage, Mapping) else {}


def _streamed_usage(text: str) -> Mapping[str, Any]:
    """Usage that the events of a streamed answer tell, the last of each number: in the event, or in what it carries."""
    usage: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            event = msgspec.json.decode(line.removeprefix("data:")) if line.startswith("data:") else None
        except msgspec.MsgspecError:  # `[DONE]`, or half an event
            continue
        if isinstance(event, dict):
            for part in (event.get("message"), event.get("response"), event):
                usage |= _usage_in(part)
    return usage


def _sum(counts: Sequence[int | None]) -> int | None:
    counted = [count for count in counts if count is not None]
    return sum(counted) if len(counted) == len(counts) else None


def read_evaluation(path: Path) -> Evaluation:
    """Read the first evaluation of a file that `lightningrl eval` wrote. Raises ConfigError."""
    try:
        report = msgspec.json.decode(path.read_bytes())
        return msgspec.convert(report["evaluations"][0], Evaluation)
    except (OSError, msgspec.MsgspecError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{str(path)!r} is no evaluation ({type(error).__name__}: {error}); give a file that `lightningrl eval` "
            "wrote"
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceDifference:
    """The policies on the tasks of one slice."""

    key: str
    value: str
    tasks: int
    difference: Interval
    p: float
    """Holm's p-value, corrected for all slices that are shown together."""

    @property
    def verdict(self) -> Verdict:
        if self.p >= 1.0 - LEVEL:
            return Verdict.NOT_ENOUGH
        return Verdict.BETTER if self.difference.mean > 0.0 else Verdict.WORSE


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Comparison of two policies: a difference above 0 is in favour of the first."""

    tasks: int
    """Tasks that both have results of."""
    difference: Interval
    """Difference of the mean reward, with Student's t interval over tasks; valid for one look, after all tasks."""
    sequential: Bet | None
    """Test that is valid for any number of looks; None = rewards lie outside the bounds that the recipe gives them."""
    slices: tuple[SliceDifference, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """Verdict of the sequential test."""
        return Verdict.NOT_ENOUGH if self.sequential is None else self.sequential.verdict


def compare(first: Evaluation, second: Evaluation, slices: Sequence[str] = ()) -> Comparison:
    """Compare two evaluations on the tasks of both. Raises ConfigError where no task is in both."""
    lowest = min(first.lowest, second.lowest)  # a policy that breaks is no better than one that is wrong
    ours, theirs = first.means(lowest), second.means(lowest)
    both = [task.id for task in first.tasks if task.id in ours and task.id in theirs]
    if not both:
        raise ConfigError(
            f"{first.policy!r} and {second.policy!r} have results of no task in common; evaluate both on the same tasks"
        )
    differences = {task: ours[task] - theirs[task] for task in both}
    low, high = min(first.bounds[0], second.bounds[0]), max(first.bounds[1], second.bounds[1])
    bounds = (low - high, high - low) if first.fits_bounds and second.fits_bounds else None
    values = list(differences.values())
    parts = {
        (key, name): values_of_slice
        for key in slices
        for name, tasks in first.by_slice(key).items()
        if (values_of_slice := [differences[task] for task in tasks if task in differences])
    }
    p_values = holm({part: sign_flip_p(values_of_slice) for part, values_of_slice in parts.items()})
    horizon = max(len(both), first.asked)
    return Comparison(
        tasks=len(both),
        difference=mean_interval(values, bounds=bounds),
        sequential=None if bounds is None else bet(values, bounds=bounds, horizon=horizon),
        slices=tuple(
            SliceDifference(
                key=key,
                value=name,
                tasks=len(values_of_slice),
                difference=mean_interval(values_of_slice, bounds=bounds),
                p=p_values[key, name],
            )
            for (key, name), values_of_slice in parts.items()
        ),
    )
