"""Warnings about the rollouts of a step or a validation, each said at the first that it is true of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from lightningrl.recipe import Recipe
from lightningrl.types import Trajectory
from lightningrl_credit.scoring import CreditedGroup, ScoredStep, Scorer
from lightningrl_credit.unread import unread_rewards
from lightningrl_training.explanations import (
    explain_cache,
    explain_failed_rewards,
    explain_left_threads,
    explain_no_rewards,
    explain_silence,
    explain_timeouts,
)

__all__ = ["StepWarnings"]

logger = logging.getLogger(__name__)


class StepWarnings:
    """Warns of what goes wrong in steps and validations. What every later step has, too, is said once."""

    def __init__(self, recipe: Recipe, scorer: Scorer, call_speed: Callable[[], float | None]) -> None:
        """`call_speed`: tokens per second that a call is sampled with; None = nothing was sampled yet."""
        self._recipe = recipe
        self._scorer = scorer
        self._call_speed = call_speed
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
        if left := explain_left_threads(seen):
            self._warn_once("threads", where, f"{left}; threads_left counts them")
        cache = self._explain_cache(seen, is_validation=False)
        if scored.has_signal:  # else it is said why there is none
            self._warn(where, cache)
        self._warn(where, self.explain_timeouts(seen))
        self._warn_of_failed_rewards(where, seen)

    def learned(self, step: int, scored: ScoredStep, *, has_learned: bool) -> None:
        """Warn of a step without a signal, once for each reason."""
        if scored.has_signal:
            self.silence = None
            return
        why = explain_silence([trajectory for group in scored.groups for trajectory in group.trajectories])
        if why != self.silence:
            stays = "" if has_learned else "; weights stay as they are"
            self._warn(f"step {step}", f"no row carries a signal{stays}: {why}")
        self.silence = why

    def validation(self, where: str, seen: Sequence[Trajectory], metrics: Mapping[str, float]) -> None:
        """Warn of a validation's rollouts, and of its having no score."""
        timeouts = self.explain_timeouts(seen)
        if "reward" in metrics:
            self._warn(where, timeouts)
        else:
            logger.warning("%s has no score: %s", where, explain_no_rewards(seen, timeouts))
        self._warn(where, self._explain_cache(seen, is_validation=True))
        self._warn_of_failed_rewards(where, seen)

    def explain_timeouts(self, seen: Sequence[Trajectory]) -> str | None:
        """The engine's part in rollouts that ran out of time; None where it has none."""
        return explain_timeouts(
            seen,
            self._call_speed(),
            max_tokens=self._recipe.sampling.max_tokens,
            timeout_s=self._recipe.runtime.limit_s,
        )

    def _explain_cache(self, seen: Sequence[Trajectory], *, is_validation: bool) -> str | None:
        """Remember tasks that models were called for. The sentence about a cache that answers in their place, once for
        training and once for validation."""
        cache = explain_cache(seen, self._asked, is_validation=is_validation)
        self._asked.update(trajectory.task.id for trajectory in seen if trajectory.transitions)
        return cache if cache and self._is_new(f"cache, {is_validation=}") else None

    def _warn_of_failed_rewards(self, where: str, seen: Sequence[Trajectory]) -> None:
        if failed := [trajectory for trajectory in seen if trajectory.unrewarded is not None]:
            sentence = f"{explain_failed_rewards(failed)}; such rollouts are left out, rewards_failed counts them"
            self._warn_once("rewards", where, sentence)

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
