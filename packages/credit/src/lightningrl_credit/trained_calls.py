"""Decides which calls of a rollout are training data, when it is read: the calls of its attempt are all known then.

    the first of the policy's rules that fits   >   its trained_agents   >   side calls are left out   >   trained

A side call (a title, a commit message) names no role and stands in a history of its own that is offered no tools, in an
attempt whose other calls are offered some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from lightningrl.call_origin import is_role_among
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import CallRule
from lightningrl.types import Trajectory, Transition

__all__ = [
    "LeftOut",
    "TrainedCalls",
    "calls_left_out",
    "explain_left_out",
    "leave_out",
    "only_trained",
    "side_calls",
    "trained_calls_of",
]


class LeftOut(StrEnum):
    """Reason why a call is no training data."""

    POLICY = "policy"
    """Its policy is not trained."""
    RULE = "rule"
    ROLE = "role"
    SIDE = "side"


_WORDS: Final = {
    LeftOut.RULE: "by a rule of policy.calls",
    LeftOut.ROLE: "by trained_agents",
    LeftOut.SIDE: "as side calls, like titles and commit messages (a history of its own, offered no tools, no role)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedCalls:
    """The calls of a policy that are trained."""

    agents: frozenset[str] | None = None
    """Roles; None = all."""
    rules: tuple[CallRule, ...] = ()
    """They go before the roles; the first that fits counts."""


def trained_calls_of(recipe: Recipe) -> dict[str, TrainedCalls]:
    """The trained calls of each policy that is trained."""
    return {
        name: TrainedCalls(
            agents=None if policy.trained_agents is None else frozenset(policy.trained_agents), rules=policy.calls
        )
        for name, policy in recipe.all_policies.items()
        if policy.trainable
    }


def calls_left_out(
    calls: Sequence[Transition], trained: Mapping[str, TrainedCalls], side: Collection[str] | None = None
) -> dict[str, LeftOut]:
    """Reasons of an attempt's calls that are not trained, by id. `trained`: by policy; `side`: side calls, if known."""
    side = side_calls(calls) if side is None else side
    reasons = ((call.id, _reason(call, trained.get(call.policy), is_side=call.id in side)) for call in calls)
    return {call_id: reason for call_id, reason in reasons if reason is not None}


def explain_left_out(trajectories: Sequence[Trajectory], recipe: Recipe) -> str | None:
    """Count the calls of trained policies that are no training data, with the reasons; None where all are."""
    trained = trained_calls_of(recipe)
    counts = Counter(
        reason for trajectory in trajectories for reason in calls_left_out(trajectory.transitions, trained).values()
    )
    parts = [f"{counts[reason]} {words}" for reason, words in _WORDS.items() if counts[reason]]
    if not parts:
        return None
    calls = sum(len(trajectory.transitions) for trajectory in trajectories)
    hint = "; policy.calls = [{ train = true }] takes side calls in" if counts[LeftOut.SIDE] else ""
    return f"left out of training, of {calls} calls: {', '.join(parts)}{hint}"


def only_trained(trajectory: Trajectory, trained: Mapping[str, TrainedCalls]) -> Trajectory:
    """Mark calls that are no training data: they stay in the trajectory and out of the gradient."""
    left_out = calls_left_out(trajectory.transitions, trained)
    return leave_out(trajectory, lambda call: call.id in left_out)


def leave_out(trajectory: Trajectory, is_left_out: Callable[[Transition], bool]) -> Trajectory:
    """Mark some of the calls as not trained."""
    calls = trajectory.transitions
    marked = (replace(call, trainable=False) if call.trainable and is_left_out(call) else call for call in calls)
    return replace(trajectory, transitions=tuple(marked))


def side_calls(calls: Sequence[Transition]) -> frozenset[str]:
    """The ids of an attempt's side calls."""
    # t0 [title …]                     no tools, a root                      ─► a side call
    # p0 [plan …]                      no tools, a root, but m0 goes on from it
    # m0 [plan …, p0's answer, tools]  a break: other tools, other tokens
    # m1 [m0 …]
    # f0 [m1's messages]               no tools, a break of m1's             ─► the main history's last word
    by_root: dict[str, list[Transition]] = {}
    root_of: dict[str, str] = {}
    for call in calls:
        root = root_of[call.id] = root_of.get(call.parent_id or "", call.id)
        by_root.setdefault(root, []).append(call)
    if not any(map(_has_tools, calls)):
        return frozenset()
    breaks = [call for call in calls if call.is_break]
    apart = [
        history
        for history in by_root.values()
        if not history[0].is_break
        and not any(_has_tools(call) or call.agent is not None for call in history)
        and not any(_goes_on(later, call) for later in breaks for call in history)
    ]
    return frozenset(call.id for history in apart for call in history)


def _reason(call: Transition, trained: TrainedCalls | None, *, is_side: bool) -> LeftOut | None:
    if trained is None:
        return LeftOut.POLICY
    rule = next((rule for rule in trained.rules if _fits(rule, call)), None)
    if rule is not None:
        return None if rule.train else LeftOut.RULE
    if trained.agents is not None and (call.agent is None or not is_role_among(call.agent, trained.agents)):
        return LeftOut.ROLE
    return LeftOut.SIDE if is_side else None


def _fits(rule: CallRule, call: Transition) -> bool:
    if rule.role is not None and (call.agent is None or not is_role_among(call.agent, {rule.role})):
        return False
    if rule.system is not None and rule.system not in call.fits:
        return False
    return rule.offers_tools is None or rule.offers_tools == _has_tools(call)


def _goes_on(later: Transition, call: Transition) -> bool:
    """True where a call that was rendered anew holds the answer of an earlier call."""
    if later.index <= call.index:
        return False
    answer = call.completion_ids[:-1] if len(call.completion_ids) > 1 else call.completion_ids  # less what ended it
    prompt, size = later.prompt_ids.tobytes(), answer.itemsize
    place = prompt.find(answer.tobytes())
    while place >= 0 and place % size:  # between two tokens
        place = prompt.find(answer.tobytes(), place + 1)
    return place >= 0


def _has_tools(call: Transition) -> bool:
    return bool(call.offered or call.tool_call_ids)
