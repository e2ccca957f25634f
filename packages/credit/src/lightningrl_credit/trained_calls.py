"""Decides which calls of a rollout are training data, when it is read: the calls of its attempt are all known then.

    the first of the policy's rules that fits   >   its trained_agents   >   side calls are left out   >   trained

A side call (a title, a commit message) names no role, stands in a history of its own that is offered no tools, in an
attempt whose other calls are offered some, and no later call of the work holds its answer:

    m0 [task, tools] ─► m1 ─► m2
    t0 [title?]                         a side call: nobody reads its answer
    s0 [summarise: m0 m1 m2]            a compaction: part of the work, as
    m3 [task, s0's answer, tools]       a later prompt holds what it answered
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightningrl.call_origin import is_role_among
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import CallRule
from lightningrl.types import IntArray, Trajectory, Transition

__all__ = [
    "LeftOut",
    "TrainedCalls",
    "calls_left_out",
    "explain_left_out",
    "explain_read_answers",
    "leave_out",
    "only_trained",
    "read_answers",
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
    LeftOut.SIDE: "as side calls, like titles and commit messages (a history of its own, offered no tools, no role, an "
    "answer that no later call's prompt holds)",
}
_STRETCH: Final = 16
"""Tokens in a row, about a dozen words: more than a title has, and few enough that a stretch of a summary is split into
the same tokens in another prompt, wherever white space or an odd split of the policy's changes those around it."""
_FACTOR: Final = 0x9E3779B97F4A7C15
"""Base of the stretches' hashes: odd, so that no token's bits are lost."""


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
    """Count the calls of trained policies that are no training data, with the reasons; None where all are. A single
    rollout's calls are named by their numbers."""
    trained = trained_calls_of(recipe)
    numbers: dict[LeftOut, list[int]] = {}
    for trajectory in trajectories:
        left_out = calls_left_out(trajectory.transitions, trained)
        for call in trajectory.transitions:
            if call.id in left_out:
                numbers.setdefault(left_out[call.id], []).append(call.index)
    names = {reason: f" ({_name(numbers[reason])})" if len(trajectories) == 1 else "" for reason in numbers}
    parts = [f"{len(numbers[reason])}{names[reason]} {words}" for reason, words in _WORDS.items() if reason in numbers]
    if not parts:
        return None
    calls = sum(len(trajectory.transitions) for trajectory in trajectories)
    hint = "; policy.calls = [{ train = true }] takes side calls in" if LeftOut.SIDE in numbers else ""
    return f"left out of training, of {calls} calls: {', '.join(parts)}{hint}"


def explain_read_answers(trajectories: Sequence[Trajectory], recipe: Recipe) -> str | None:
    """Count the calls that are trained because a later call's prompt holds their answers; None where there are none. A
    single rollout's calls are named by their numbers."""
    trained = trained_calls_of(recipe)
    pairs: list[tuple[int, int]] = []
    for trajectory in trajectories:
        index = {call.id: call.index for call in trajectory.transitions}
        left_out = calls_left_out(trajectory.transitions, trained)
        read = read_answers(trajectory.transitions)
        pairs += [(index[call], index[later]) for call, later in read.items() if call not in left_out]
    if not pairs:
        return None
    which = ", ".join(f"call {call} is in the prompt of call {later}" for call, later in pairs)
    names = f" ({which})" if len(trajectories) == 1 else ""
    calls = sum(len(trajectory.transitions) for trajectory in trajectories)
    words = "for their answers, which later calls' prompts hold, as they hold a summary's"
    return f"kept in training, of {calls} calls: {len(pairs)}{names} {words}"


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
    return _sort_apart(calls)[0]


def read_answers(calls: Sequence[Transition]) -> Mapping[str, str]:
    """Ids of the calls that would be side calls if no later call of the work held their answers, each with the first
    such call's id."""
    return _sort_apart(calls)[1]


def _sort_apart(calls: Sequence[Transition]) -> tuple[frozenset[str], dict[str, str]]:
    """Side calls, and the answers of histories like theirs that the work reads, each with its first reader."""
    # t0 [title …]                     no tools, a root                      ─► a side call
    # p0 [plan …]                      no tools, a root, but m0 goes on from it
    # m0 [plan …, p0's answer, tools]  a break: other tools, other tokens
    # m1 [m0 …]
    # f0 [m1's messages]               no tools, a break of m1's             ─► the main history's last word
    # c0, c1 [summarise …]             no tools, roots, read by c2
    # c2 [merge c0's and c1's answers] no tools, a root, read by m2, so all three are part of the work
    # m2 [task, c2's answer, tools]    a root
    by_root: dict[str, list[Transition]] = {}
    root_of: dict[str, str] = {}
    for call in calls:
        root = root_of[call.id] = root_of.get(call.parent_id or "", call.id)
        by_root.setdefault(root, []).append(call)
    if not any(map(_has_tools, calls)):
        return frozenset(), {}
    apart = {
        root: history
        for root, history in by_root.items()
        if not history[0].is_break and not any(_has_tools(call) or call.agent is not None for call in history)
    }
    answers = [call for history in apart.values() for call in history]
    pairs = _pair_with_readers(answers, calls)
    work = by_root.keys() - apart.keys()
    while grown := {root_of[earlier] for earlier, later in pairs if root_of[later] in work} - work:
        work |= grown
    read: dict[str, str] = {}
    for earlier, later in pairs:
        if root_of[later] in work and root_of[earlier] != root_of[later]:
            read.setdefault(earlier, later)
    return frozenset(call.id for call in answers if root_of[call.id] not in work), read


def _pair_with_readers(answers: Sequence[Transition], calls: Sequence[Transition]) -> list[tuple[str, str]]:
    """Ids of answers and of later calls whose prompts hold them, by the later calls' order."""
    # What an answer says anew, in stretches of 16 tokens, is looked up in what each later prompt adds to its history:
    # every token of the attempt is read once, however many answers there are.
    #
    #     c0 prompt  … blue, 2 pieces …              a copy of this proves nothing: the later prompt may copy it, too
    #     c0 answer  The order is: blue, 2 pieces    ◄─ "order is: blue" is new
    #     m2 prompt  task. So far: The order is: blue, 2 pieces. Go on.
    places: dict[int, set[int]] = {}
    for place, call in enumerate(answers):
        for stretch in _hash_stretches(call.completion_ids).tolist():
            places.setdefault(stretch, set()).add(place)
    find = _finder(places)
    for place, call in enumerate(answers):
        for stretch in find(call.prompt_ids):
            places[stretch].discard(place)
    by_id = {call.id: call for call in calls}
    pairs: list[tuple[str, str]] = []
    for later in calls:
        parent = by_id.get(later.parent_id or "")
        start = 0 if parent is None else len(parent.prompt_ids) + len(parent.completion_ids)
        holds = {place for stretch in find(later.prompt_ids[start:]) for place in places[stretch]}
        if later.is_break:
            holds |= {place for place, call in enumerate(answers) if _goes_on(later, call)}
        pairs += [(answers[place].id, later.id) for place in sorted(holds) if answers[place].index < later.index]
    return pairs


def _finder(stretches: Collection[int]) -> Callable[[IntArray], set[int]]:
    """Find those of the stretches, given by their hashes, that stand in tokens."""
    # A table by the hashes' first 20 bits rules out most of a long prompt at once.
    is_likely = np.zeros(1 << 20, np.bool_)
    is_likely[np.fromiter(stretches, np.uint64, len(stretches)) >> np.uint64(44)] = True

    def find(tokens: IntArray) -> set[int]:
        if not stretches:
            return set()
        hashes = _hash_stretches(tokens)
        return {each for each in hashes[is_likely[hashes >> np.uint64(44)]].tolist() if each in stretches}

    return find


def _hash_stretches(tokens: IntArray) -> NDArray[np.uint64]:
    """Hash of every stretch of tokens, by where it begins."""
    if len(tokens) < _STRETCH:
        return np.empty(0, np.uint64)
    hashes, width = tokens.astype(np.uint64), 1
    while width < _STRETCH:  # two halves make a whole
        hashes = hashes[:-width] * np.uint64(pow(_FACTOR, width, 2**64)) + hashes[width:]
        width *= 2
    return hashes


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


def _name(numbers: Sequence[int]) -> str:
    return f"call{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _has_tools(call: Transition) -> bool:
    return bool(call.offered or call.tool_call_ids)
