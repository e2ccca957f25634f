"""Why tokens have no gradient: reasons of a rollout, of a call, of a token, in one sentence each; and the tokens.

    rollout   still running · validation · the world ended it · a reward failed · no reward ·
              left out for its age · not taken yet
    call      repeats a recorded answer · its policy is frozen · no training data: a rule, its role, a side call ·
              credit says nothing of it · all of it is 0
    token     of the prompt · its advantage is 0

In the order in which training decides: what is left out as a rollout is never asked by its calls. A token that no
reason names is in a row of the learner, with an advantage; what the loss clips of it there is in the step's metrics
(`learn/clip_fraction`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from lightningrl.recipe import Recipe
from lightningrl.records import RolloutRecord
from lightningrl.types import Outcome, RolloutMode
from lightningrl_credit.trained_calls import LeftOut, calls_left_out, trained_calls_of
from lightningrl_runs.segments import SegmentReader
from lightningrl_runs.trace import CallTrace, Trace

__all__ = ["NoGradient", "NoGradientKind", "Token", "explain_calls", "explain_rollout", "read_tokens"]

_OTHER_TERMS: Final = ("kl_coef", "entropy_coef")
"""Settings of a learner that give a token a gradient where its advantage does not."""


class NoGradientKind(StrEnum):
    """Kinds of reasons."""

    RUNNING = "running"
    VALIDATION = "validation"
    OUTCOME = "outcome"
    REWARD_FAILED = "reward_failed"
    NO_REWARD = "no_reward"
    BRANCH = "branch"
    NOT_TAKEN = "not_taken"
    REPLAYED = "replayed"
    FROZEN = "frozen"
    ROLE = "role"
    RULE = "rule"
    SIDE = "side"
    SILENT_GROUP = "silent_group"
    UNSCORED = "unscored"
    EQUAL_REWARDS = "equal_rewards"
    ALONE = "alone"
    ZERO = "zero"


@dataclass(frozen=True, slots=True)
class NoGradient:
    """Reason why there is no gradient."""

    kind: NoGradientKind
    sentence: str

    @property
    def is_masked(self) -> bool:
        """True where no row of the learner trains it at all; else rows have it, with an advantage of 0."""
        return self.kind not in (NoGradientKind.EQUAL_REWARDS, NoGradientKind.ALONE, NoGradientKind.ZERO)


_K = NoGradientKind


def explain_calls(trace: Trace, group: Sequence[RolloutRecord], recipe: Recipe) -> dict[str, NoGradient | None]:
    """Explain for each call, by its id, why none of its tokens has a gradient; None = some have.

    `group`: the whole group's rollouts.
    """
    whole = explain_rollout(trace, recipe)
    side = {call.call.id for call in trace.calls if call.is_side}
    left_out = calls_left_out([call.call for call in trace.calls], trained_calls_of(recipe), side)
    return {
        call.call.id: whole or _explain_call(call, left_out.get(call.call.id), trace.rollout, group, recipe)
        for call in trace.calls
    }


def explain_rollout(trace: Trace, recipe: Recipe) -> NoGradient | None:
    """Explain why the rollout as a whole has none; None = it was taken by a step."""
    rollout = trace.rollout
    outcome, mode = rollout.outcome, rollout.spec.mode
    if outcome is None:
        return NoGradient(_K.RUNNING, "The rollout has not ended yet, so nothing is credited.")
    if mode is RolloutMode.VALIDATION:
        return NoGradient(_K.VALIDATION, "It is a validation rollout: it judges the policy and is never trained.")
    if not recipe.outcomes.is_trained(outcome):
        return NoGradient(_K.OUTCOME, _of_outcome(outcome))
    if trace.unrewarded is not None and rollout.reward is None:
        return NoGradient(_K.REWARD_FAILED, f"It has no reward, because one failed: {trace.unrewarded}.")
    if rollout.trained_step is not None:
        if rollout.reward is None:
            return NoGradient(_K.NO_REWARD, "No reward says anything of it, so there is nothing to compare.")
        return None
    if mode is RolloutMode.BRANCH:
        return NoGradient(_K.BRANCH, "It is a branch: what it earned is credited to the rollout that it left.")
    return NoGradient(_K.NOT_TAKEN, "No step has taken its group yet.")


def _of_outcome(outcome: Outcome) -> str:
    if outcome is Outcome.DIVERGED:
        problem = "The branch diverged: its agent did not ask again what was recorded"
        return f"{problem}, so it says nothing of the state that it should leave."
    return f"It ended as {outcome.value}, which says nothing of the policy and is never trained."


def _explain_call(
    call: CallTrace, left_out: LeftOut | None, rollout: RolloutRecord, group: Sequence[RolloutRecord], recipe: Recipe
) -> NoGradient | None:
    made = call.call
    if made.replayed_from is not None:
        return NoGradient(
            _K.REPLAYED, f"It repeats the recorded answer of {made.replayed_from}: nothing was sampled here."
        )
    policy = recipe.all_policies.get(made.policy)
    if not made.trainable or policy is None or not policy.trainable:
        return NoGradient(_K.FROZEN, f"Its policy {made.policy!r} is not trained.")
    if left_out is LeftOut.RULE:
        return NoGradient(_K.RULE, f"A rule of [[policy.calls]] of policy {made.policy!r} leaves it out of training.")
    if left_out is LeftOut.SIDE:
        return NoGradient(
            _K.SIDE,
            "It is a side call, as a title or a commit message is: in a history of its own, offered no tools, "
            "where others are, and no later call's prompt holds its answer. `calls = [{ train = true }]` of policy "
            f"{made.policy!r} takes such calls in.",
        )
    if left_out is LeftOut.ROLE:
        roles = policy.trained_agents or ()
        who = "It names no role" if made.agent is None else f"Its role {made.agent!r} is not trained"
        return NoGradient(
            _K.ROLE, f"{who}: trained_agents of policy {made.policy!r} has {', '.join(map(repr, roles))}."
        )
    if call.advantages is not None and call.advantages.any():
        return None
    why, kind = _why_silent(rollout, group, recipe)
    if call.advantages is None:
        if recipe.loop.dynamic_sampling and kind is not _K.ZERO:
            return NoGradient(_K.SILENT_GROUP, f"{why}; loop.dynamic_sampling leaves such a group out.")
        return NoGradient(_K.UNSCORED, f"Credit assigner {recipe.credit.use!r} says nothing of this call.")
    options = recipe.options_of(policy)
    in_reward = {"kl_coef"} if options.get("kl_estimator") == "k1" else set[str]()
    terms = [name for name in _OTHER_TERMS if options.get(name) and name not in in_reward]
    rest = f"; learner.{' and '.join(terms)} moves its tokens all the same." if terms else "."
    return NoGradient(kind, why + rest)


def _why_silent(rollout: RolloutRecord, group: Sequence[RolloutRecord], recipe: Recipe) -> tuple[str, NoGradientKind]:
    """Return the sentence without its full stop, and the kind."""
    if rollout.spec.mode is RolloutMode.BRANCH:  # its group is not that of its credit
        return f"Credit assigner {recipe.credit.use!r} gives every token of it 0", _K.ZERO
    rewards = [one.reward for one in group if one.reward is not None and one.trained_step == rollout.trained_step]
    if len(rewards) == 1:
        return (
            f"It is the only rollout of its group with a reward, {rewards[0]:g}: there is none to compare it with",
            _K.ALONE,
        )
    if len(set(rewards)) == 1:
        return (
            f"All {len(rewards)} rewards of its group are {rewards[0]:g}: nothing is better than anything else",
            _K.EQUAL_REWARDS,
        )
    return (
        f"Credit assigner {recipe.credit.use!r} gives every token of it 0: it earned what it is compared with",
        _K.ZERO,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A token that the policy sampled."""

    position: int
    """In the call's row: prompt, then completion."""
    id: int
    text: str
    """Empty where it is a part of a character that a later token completes."""
    logprob: float
    """log π(token), as the engine sampled it."""
    advantage: float | None
    """None = nobody scored it."""
    version: int
    """Version of the policy that sampled it."""
    mask: bool
    """True where a row of the learner trains it."""
    reason: str | None
    """Reason why it has no gradient; None = it has one."""


def read_tokens(
    call: CallTrace, reason: NoGradient | None, reader: SegmentReader, *, start: int = 0, count: int | None = None
) -> Iterator[Token]:
    """Yield `count` sampled tokens from the completion's `start`-th on. `reason`: why the whole call has no gradient
    (`look.why_no_gradient`); `reader`: its policy's."""
    made = call.call
    stop = len(made.completion_ids) if count is None else min(start + count, len(made.completion_ids))
    before = made.completion_ids[:start] if start else made.prompt_ids
    chosen = made.chosen
    for number, text in enumerate(reader.pieces(made.completion_ids[start:stop], before), start=start):
        advantage = None if call.advantages is None else float(call.advantages[number])
        why = reason.sentence if reason is not None else None
        if why is None and not chosen[number]:
            why = "The answer's grammar left no other token."
        elif why is None and not advantage:
            why = "Its advantage is 0." if advantage is not None else "Nobody scored it."
        yield Token(
            position=call.prompt_tokens + number,
            id=int(made.completion_ids[number]),
            text=text,
            logprob=float(made.logprobs[number]),
            advantage=advantage,
            version=made.policy_version,
            mask=bool(chosen[number]) and (reason is None or not reason.is_masked),
            reason=why,
        )
