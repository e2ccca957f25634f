"""Warnings about the rollouts of a step or a validation, each said at the first that it is true of; and at a run's end
the likely reason why it has not made its policy better, from what was measured on the way."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Final

from lightningrl.errors import LightningError
from lightningrl.figures import mean_interval
from lightningrl.recipe import Recipe
from lightningrl.types import Outcome, Trajectory
from lightningrl_credit.judge_assigner import EARLIER
from lightningrl_credit.metrics import FAILURES
from lightningrl_credit.scoring import CreditedGroup, ScoredStep, Scorer, unread_rewards
from lightningrl_training import explanations
from lightningrl_training.collector import Rollouts
from lightningrl_training.tasks import TaskSets, plan_validation

__all__ = ["StepWarnings", "count_repeated_answers", "explain_standstill", "has_stood_still", "last_validation"]

logger = logging.getLogger(__name__)

GROWN: Final = 0.2
"""Share of the rollouts by which a failure has to grow to be warned of."""


LEANING: Final = 0.2
"""Part of a judge's grade that may come of a rollout's place before it is warned of."""


class StepWarnings:
    """Warns of what goes wrong in steps and validations. What every later step has, too, is said once."""

    def __init__(self, recipe: Recipe, scorer: Scorer, call_speed: Callable[[], float | None]) -> None:
        """`call_speed`: tokens per second that a call is sampled with; None = nothing was sampled yet."""
        self._recipe = recipe
        self._scorer = scorer
        self._call_speed = call_speed
        self._shares: dict[tuple[Outcome, bool], float] = {}
        """Share of each failure at first, or when it was last warned of: in training and in validation."""
        self._said: set[str] = set()
        """Warnings that are said once, and were."""
        self._asked: set[str] = set()
        """Tasks of which a rollout has called a model since this start."""
        self.silence: str | None = None
        """The reason why the last step had no signal; None = it had one."""

    def rollouts(
        self, step: int, credited: Sequence[CreditedGroup], scored: ScoredStep, seen: Sequence[Trajectory]
    ) -> None:
        """Warn of the rollouts `seen` of a step, before it is learned."""
        where = f"step {step}"
        if step == 1:
            self._warn(where, self._scorer.missing_roles(seen))
            if not self._scorer.remembers:
                self._warn(where, unread_rewards(self._recipe, self._scorer, credited))
        if left := explanations.explain_left_threads(seen):
            self._warn_once("threads", where, f"{left}; threads_left counts them")
        if abs(lead := scored.metrics.get(f"credit/{EARLIER}", 0.0)) > LEANING:
            self._warn_once(
                "places",
                where,
                f"the judge goes by places: a rollout's grade is {lead:+.2f} where it stands earlier in a question "
                "(credit/grade_earlier); two orders or pairs even that out and leave less to learn from: take another "
                "judge, or a rubric that tells good from bad",
            )
        cache = self._explain_cache(seen, is_validation=False)
        if scored.has_signal:  # else it is said why there is none
            self._warn(where, cache)
        self._warn(where, self.explain_timeouts(seen))
        self._warn_of_failed_rewards(where, seen)
        self._warn_of_failures(where, seen, is_validation=False)
        self._warn_of_lost_tasks(where, seen)

    def learned(self, step: int, scored: ScoredStep, *, has_learned: bool) -> None:
        """Warn of a step without a signal, once for each reason."""
        if scored.has_signal:
            self.silence = None
            return
        why = explanations.explain_silence([trajectory for group in scored.groups for trajectory in group.trajectories])
        if why != self.silence:
            stays = "" if has_learned else "; weights stay as they are"
            self._warn(f"step {step}", f"no row carries a signal{stays}: {why}")
        self.silence = why

    def validation(
        self, where: str, seen: Sequence[Trajectory], metrics: Mapping[str, float], *, best: float | None = None
    ) -> bool:
        """Warn of a validation's rollouts, of its having no score, and of one far below the `best` before it. Returns
        true where it is."""
        timeouts, fall = self.explain_timeouts(seen), None
        if "reward" in metrics:
            self._warn(where, timeouts)
            fall = self._explain_fall(seen, metrics["reward"], best)
            if fall is not None and self._is_new(f"below {best}"):
                self._warn(where, fall)
        else:
            logger.warning("%s has no score: %s", where, explanations.explain_no_rewards(seen, timeouts))
        self._warn(where, self._explain_cache(seen, is_validation=True))
        self._warn_of_failed_rewards(where, seen)
        self._warn_of_failures(where, seen, is_validation=True)
        return fall is not None

    def _explain_fall(self, seen: Sequence[Trajectory], score: float, best: float | None) -> str | None:
        """Say that a validation fell: its 95 % interval over tasks ends below the best; None = it did not."""
        rewards = [one.reward for one in seen if one.reward is not None]
        high = mean_interval(rewards, bounds=self._recipe.reward_bounds).high if len(rewards) > 1 else None
        if best is None or high is None or high >= best:
            return None
        return (
            f"the policy became worse: {score:.3f}, at most {high:.3f} within 95 %, and {best:.3f} at its best, "
            "whose checkpoint is kept (`lightningrl export` takes it); a lower learner.learning_rate, or more "
            "rollouts a step (loop.tasks_per_step, loop.group_size), harms less; loop.patience = 2 ends such a run"
        )

    def explain_timeouts(self, seen: Sequence[Trajectory]) -> str | None:
        """The engine's part in rollouts that ran out of time; None where it has none."""
        return explanations.explain_timeouts(
            seen,
            self._call_speed(),
            max_tokens=self._recipe.sampling.max_tokens,
            timeout_s=self._recipe.runtime.limit_s,
        )

    def _explain_cache(self, seen: Sequence[Trajectory], *, is_validation: bool) -> str | None:
        """Remember tasks that models were called for. The sentence about a cache that answers in their place, once for
        training and once for validation."""
        cache = explanations.explain_cache(seen, self._asked, is_validation=is_validation)
        self._asked.update(trajectory.task.id for trajectory in seen if trajectory.transitions)
        return cache if cache and self._is_new(f"cache, {is_validation=}") else None

    def _warn_of_failed_rewards(self, where: str, seen: Sequence[Trajectory]) -> None:
        if failed := [trajectory for trajectory in seen if trajectory.unrewarded is not None]:
            judged = sum(trajectory.reward is not None for trajectory in failed)
            sentence = (
                f"{explanations.explain_failed_rewards(failed)}; {judged} of them, on whose outputs alone it failed, "
                "count as the lowest reward, others are left out; rewards_failed counts them"
            )
            self._warn_once("rewards", where, sentence)

    def _warn_of_failures(self, where: str, seen: Sequence[Trajectory], *, is_validation: bool) -> None:
        """Warn of a kind of failure whose share has grown."""
        for kind in (outcome for outcome in FAILURES if outcome.is_agents_own):
            failed = [trajectory for trajectory in seen if trajectory.outcome is kind]
            share = len(failed) / max(1, len(seen))
            before = self._shares.setdefault((kind, is_validation), share)
            if share - before >= GROWN:
                self._shares[kind, is_validation] = share
                self._warn(
                    where,
                    f"{len(failed)} of {len(seen)} rollouts ended in {kind.value}, {before:.0%} did before; "
                    f"{explanations.quote_failure(failed[0], is_short=True)}; they earn the lowest reward. Where the "
                    "world causes it, name the exception in outcomes.infrastructure; where the policy does, a lower "
                    "learner.learning_rate helps",
                )

    def _warn_of_lost_tasks(self, where: str, seen: Sequence[Trajectory]) -> None:
        """Warn of tasks whose rollouts end in infrastructure errors again and again: an agent can cause these, too."""
        lost = [trajectory for trajectory in seen if trajectory.outcome is Outcome.INFRASTRUCTURE_ERROR]
        tasks = Counter(trajectory.task.id for trajectory in lost)
        again = sum(trajectory.attempt > 1 for trajectory in seen)
        if tasks and (most := tasks.most_common(1)[0])[1] > 1 and self._is_new(f"lost {most[0]}"):
            self._warn(
                where,
                f"{most[1]} rollouts of task {most[0]!r} ended in infrastructure errors in each of their attempts; "
                f"{explanations.quote_failure(lost[0])}; they are left out: see whether the agent causes it there",
            )
        if again >= GROWN * len(seen):
            self._warn_once(
                "again",
                where,
                f"{again} of {len(seen)} rollouts were run again after infrastructure errors (tries_repeated): where "
                "the policy causes these, only what it does otherwise is learned from; "
                "`lightningrl rollouts show ID` has the errors of the earlier attempts",
            )

    def _warn_once(self, kind: str, where: str, sentence: str) -> None:
        if self._is_new(kind):
            self._warn(where, sentence)

    def _is_new(self, kind: str) -> bool:
        is_new = kind not in self._said
        self._said.add(kind)
        return is_new

    @staticmethod
    def _warn(where: str, sentence: str | None) -> None:
        if sentence:
            logger.warning("%s: %s", where, sentence)


SCORE: Final = "validation/reward"
LR: Final = re.compile(r"learn/(.+/)?lr")
MOST: Final = 0.8
"""A share that says what the matter is."""


WORSE: Final = 0.1
"""Share of the range of rewards by which a validation has to fall to be worse, and not only no better."""


def has_stood_still(rows: Sequence[Mapping[str, float]], top: float) -> bool:
    """True where no validation was better than before the first step, unless a policy earned `top` from the start."""
    first, *later = _scores(rows) or (top,)
    return bool(later) and first < top and max(later) <= first


def last_validation(rows: Sequence[Mapping[str, float]]) -> int:
    """The step that the last validation was made after."""
    return max(int(row["step"]) for row in rows if SCORE in row)


async def count_repeated_answers(
    rollouts: Rollouts, tasks: TaskSets, recipe: Recipe, step: int
) -> tuple[int, int] | None:
    """Count the validation tasks that are answered after this step in the tokens of before the first, and all of them;
    None where answers differ by chance, or are no longer there."""
    if recipe.validation_sampling.temperature > 0:
        return None
    plans = (plan_validation(tasks.validation, recipe, validated) for validated in (0, step))
    try:
        before, after = [await rollouts.trajectories([spec.id for spec in plan]) for plan in plans]
    except LightningError:  # forgotten (loop.keep_rollouts), or lost, which was said at the start
        return None
    answers = [
        [[call.completion_ids.tolist() for call in rollout.transitions] for rollout in validation]
        for validation in (before, after)
    ]
    return sum(first == last for first, last in zip(*answers, strict=True)), len(before)


def explain_standstill(
    rows: Sequence[Mapping[str, float]], recipe: Recipe, *, answers: tuple[int, int] | None, earned: float | None
) -> str:
    """A sentence from metrics, by step. `answers`: of the validation tasks those that are answered as at the start, and
    all; `earned`: the highest reward that was trained on."""
    first, *later = _scores(rows)
    steps = [row for row in rows if row["step"] > 0 and "groups" in row]
    low, high = recipe.reward_bounds
    if first - max(later) > WORSE * (high - low):
        cause = (
            f"it became worse{_reach(steps, recipe)}: lower learner.learning_rate, or take more rollouts a step "
            "(loop.tasks_per_step, loop.group_size)"
        )
    else:
        cause = _cause(steps, recipe, answers, earned)
    return f"validation is no better than before the first step: {first:.3f} then, {max(later):.3f} since; {cause}"


def _cause(
    steps: Sequence[Mapping[str, float]], recipe: Recipe, answers: tuple[int, int] | None, earned: float | None
) -> str:
    groups, silent = (int(sum(row[name] for row in steps)) for name in ("groups", "groups_without_signal"))
    if silent >= MOST * groups:
        return (
            f"{silent} of {groups} groups taught nothing, for their rewards were equal: raise loop.group_size or "
            "sampling.temperature, or take tasks that the policy solves now and then"
        )
    reach = _reach(steps, recipe)
    if answers is not None and answers[0] >= MOST * answers[1]:
        remedy = "raise learner.learning_rate, or loop.steps"
        return f"{answers[0]} of {answers[1]} answers are what they were, to the letter{reach}: {remedy}"
    top = recipe.reward_bounds[1]
    if earned is not None and earned < top:
        return (
            f"no rollout that was learned from earned more than {earned:.3g} of {top:g}, and what is never sampled is "
            f"not learned: {explanations.WAYS_OUT}"
        )
    early, late = _ends([row["reward"] for row in steps if "reward" in row])
    if late > early:
        return (
            f"training rewards rose from {early:.3f} to {late:.3f}: see whether validation has harder tasks, or too few"
        )
    return (
        f"training rewards did not rise either ({early:.3f}, then {late:.3f}){reach}: try another learner.learning_rate"
    )


def _reach(steps: Sequence[Mapping[str, float]], recipe: Recipe) -> str:
    """The furthest that weights can have moved: an update by AdamW moves each by its learning rate, or little more."""
    learned = [[value for name, value in row.items() if LR.fullmatch(name)] for row in steps]
    rates = [max(values) for values in learned if values]
    if not rates:
        return ""
    options = recipe.backend_options
    moved = sum(rates) * int(options.get("minibatches", 1)) * int(options.get("epochs", 1))
    return (
        f", and {len(rates)} steps at a learning rate of {max(rates):.2g} move no weight by more than some {moved:.1g}"
    )


def _ends(rewards: Sequence[float]) -> tuple[float, float]:
    """Means of the first third, and of the last."""
    part = max(1, len(rewards) // 3)
    return fmean(rewards[:part] or [0.0]), fmean(rewards[-part:] or [0.0])


def _scores(rows: Sequence[Mapping[str, float]]) -> list[float]:
    """Scores of the validations, the one before the first step first; none where that is missing."""
    scores = {row["step"]: row[SCORE] for row in rows if SCORE in row}
    return [scores[step] for step in sorted(scores)] if 0 in scores else []
