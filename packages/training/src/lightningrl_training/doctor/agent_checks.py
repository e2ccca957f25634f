"""Checks of the agent: its calls, its errors, its histories, its tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from lightningrl.types import FinishReason, OtherCallKind, Outcome, ToolCall, Trajectory, Transition
from lightningrl_credit.trained_calls import explain_left_out, explain_read_answers
from lightningrl_training.doctor.findings import Finding, failed, passed, warned
from lightningrl_training.doctor.observation import Observation
from lightningrl_training.explanations import CACHES, explain_cache, explain_malformed

__all__ = [
    "calls_captured",
    "calls_cut_off",
    "calls_made",
    "context_used",
    "errors",
    "histories_kept",
    "markup_readable",
    "repeats_itself",
    "retries_counted_once",
    "roles_named",
    "time_limit",
    "tools_work",
]

MANY_ERRORS = 0.1
"""Share of rollouts that raise, from which a warning is given."""
SLOW = 0.5
"""Share of the time limit from which a rollout counts as near it."""
MUCH_CUT = 0.3
"""Share of calls that end at their limit of tokens."""
MOSTLY_CUT = 0.75
"""The same, from which too few answers are whole to learn from: a policy that is cut off at once ends some by
chance."""
MANY_LEFT = 0.1
"""Share of calls whose stream was left."""
MUCH_LOST = 0.02
"""Share of sampled tokens that are in no recorded call."""
MANY_MALFORMED = 0.05
"""Share of answers with a malformed tool call, of those that were offered tools, from which a warning is given."""
FEW_CALLS = 4
"""Calls of a tool below which nothing is concluded about it."""


def calls_made(seen: Observation) -> Finding:
    """Check that each rollout calls the policy, and find what other models it calls."""
    silent = [rollout for rollout in seen.rollouts if not rollout.transitions]
    without = f"{len(silent)} of {len(seen.rollouts)} rollouts"
    others = [call for rollout in seen.rollouts for call in rollout.other_calls]
    hosts = Counter(call.path for call in others if call.kind is OtherCallKind.ELSEWHERE)
    refused = [call for call in others if call.kind is OtherCallKind.REFUSED]
    if len(silent) == len(seen.rollouts) and refused:
        return failed(
            f"every call was refused: {refused[0].message}",
            "mend what the sentence says; nothing can be learned from refused calls",
        )
    if hosts:
        where = ", ".join(f"{host} ({count} rollouts)" for host, count in hosts.most_common(3))
        judge = failed if silent else warned
        return judge(
            f"{without} made no call that came here; models were called at {where}",
            "name that endpoint in runtime.base_urls if the policy is to answer in its place",
        )
    if cache := explain_cache(seen.rollouts):
        sentence, _, remedy = cache.rpartition("; ")
        return warned(sentence, remedy)
    if silent:
        judge = failed if len(silent) == len(seen.rollouts) else warned
        return judge(
            f"{without} made no model call; one is {silent[0].rollout_id}",
            "let the agent call the model for every task; where its client has a base URL of its own, name it in "
            f"runtime.base_urls; where it answers from {CACHES}, switch that off",
        )
    refusals = f", {len(refused)} refused: {refused[0].message}" if refused else ""
    counts = [len(rollout.transitions) for rollout in seen.rollouts]
    summary = f"{sum(counts)} calls in {len(counts)} rollouts, {min(counts)} to {max(counts)} each{refusals}"
    if refused:
        return warned(summary, "mend what the sentence says, or let the agent not make the call")
    return passed(summary)


def errors(seen: Observation) -> Finding:
    """Check that the agent ends without raising, and that no attempt had to be run again."""
    every = seen.tried
    wrong = [rollout for rollout in every if rollout.outcome in (Outcome.AGENT_ERROR, Outcome.INFRASTRUCTURE_ERROR)]
    again = seen.attempts - len(seen.every)
    if not wrong:
        retried = f"; {again} attempts were run again" if again > 0 else ""
        return passed(f"none of {len(every)} rollouts raised{retried}")
    first = f"{wrong[0].rollout_id}: {first_line(wrong[0].error)}"
    summary = f"{len(wrong)} of {len(every)} rollouts raised; first, {first}"
    if all(rollout in wrong for rollout in seen.rollouts):
        return failed(summary, "mend the agent: `lightningrl try RECIPE` shows one rollout with its calls")
    if len(wrong) > MANY_ERRORS * len(every):
        return warned(
            summary,
            "mend it where it is the agent's own; the policy learns not to cause it, for such rollouts earn the lowest "
            "reward; what the world causes is named in outcomes.infrastructure",
        )
    return passed(summary)


def time_limit(seen: Observation) -> Finding:
    """Check that rollouts have time enough."""
    limit = seen.recipe.runtime.limit_s
    every = seen.tried
    late = [rollout for rollout in every if rollout.outcome is Outcome.TIMEOUT]
    if late:
        return failed(
            f"{len(late)} of {len(every)} rollouts ran longer than runtime.timeout_s = {limit:g} s",
            "raise runtime.timeout_s, lower sampling.max_tokens, or make the agent stop in time",
        )
    slowest = max(every, key=lambda rollout: rollout.duration_s)
    summary = f"the slowest of {len(every)} rollouts took {slowest.duration_s:.1f} s of the {limit:g} s that it has"
    if slowest.duration_s > SLOW * limit:
        return warned(summary, "raise runtime.timeout_s: a busy machine, or longer answers, bring rollouts over it")
    return passed(summary)


def calls_captured(seen: Observation) -> Finding:
    """Check that every token that the engine sampled was recorded, and no more."""
    calls = [call for rollout in seen.every for call in rollout.transitions if call.replayed_from is None]
    recorded = sum(len(call.completion_ids) for call in calls)
    broken = sum(call.finish_reason is FinishReason.BROKEN_OFF for call in calls)
    left = f", {broken} of them streams that the agent left" if broken else ""
    summary = f"{recorded} sampled tokens are in {len(calls)} recorded calls{left}"
    if broken > MANY_LEFT * len(calls):
        return warned(summary, "read streams to their end; only what the agent had been sent is trained")
    if seen.sampled_tokens is None or seen.attempts > len(seen.every):
        return passed(f"{summary}; attempts that were run again sampled more")
    summary += f", and the engine sampled {seen.sampled_tokens}"
    if seen.sampled_tokens - recorded > MUCH_LOST * max(1, seen.sampled_tokens):
        return warned(
            summary,
            "the agent gives up on calls before their answer: give its client a longer timeout; what it left is not "
            "trained",
        )
    return passed(summary)


def retries_counted_once(seen: Observation) -> Finding:
    """Look for a prompt that a rollout sends twice in a row, as a hand-made retry does."""
    asked = [rollout.rollout_id for rollout in seen.rollouts for _ in _asked_again(rollout.transitions)]
    if not asked:
        return passed("no rollout asks the same prompt twice in a row")
    many = f"{len(asked)} calls of {len(set(asked))} rollouts"
    return warned(
        f"{many} repeat the prompt of the call before them; one is in {asked[0]}",
        "where these are retries, let the client make them (max_retries) or send one x-lightningrl-call-id: they are "
        "then one call; where several answers are wanted, all is well",
    )


def _asked_again(calls: Sequence[Transition]) -> Iterator[Transition]:
    for before, call in pairwise(calls):
        is_choice = call.started_at == before.started_at  # one of n
        if not is_choice and call.agent == before.agent and np.array_equal(call.prompt_ids, before.prompt_ids):
            yield call


def roles_named(seen: Observation) -> Finding:
    """Check that the roles which the recipe names are those of the calls."""
    roles = Counter(call.agent for call in seen.calls)
    counts = ", ".join(f"{name or 'no role'} {count}" for name, count in roles.most_common(8))
    if seen.missing_roles:
        return failed(
            seen.missing_roles,
            "correct the name, or name the role where the agent makes the call: docs/how-to/agents/hand-written.md",
        )
    needed = seen.recipe.credit.compare == "role" or "agents" in seen.requires or _names_roles(seen)
    if needed and roles[None]:
        return warned(
            f"{roles[None]} of {len(seen.calls)} calls have no role ({counts}), and the recipe tells roles apart",
            "name an adapter in `adapters`, a [roles.NAME] table, or `with role(...)` around the calls",
        )
    trained = (explain(seen.rollouts, seen.recipe) for explain in (explain_left_out, explain_read_answers))
    return passed("; ".join(filter(None, (f"calls by role: {counts or 'none'}", *trained))))


def _names_roles(seen: Observation) -> bool:
    policies = seen.recipe.all_policies.values()
    return any(policy.trained_agents or getattr(policy, "agents", ()) for policy in policies) or any(
        policy.agents for policy in seen.recipe.rewards.values()
    )


def histories_kept(seen: Observation) -> Finding:
    """Check that a later call's prompt begins with the exact tokens of the earlier one."""
    continued = [call for call in seen.calls if call.is_break or call.parent_id is not None]
    breaks = sum(call.is_break for call in seen.calls)
    if not breaks:
        return passed(f"{len(continued)} calls go on from an earlier one, none by another rendering")
    return warned(
        f"{breaks} of {len(continued)} calls that go on from an earlier one have another beginning: history was "
        "rendered anew",
        "hand the model's message back as it came, reasoning and tool calls included; until then each such call is a "
        "row of its own",
    )


def context_used(seen: Observation) -> Finding:
    """Check that prompts leave room for whole answers."""
    every = seen.tried
    over = [rollout for rollout in every if rollout.outcome is Outcome.CONTEXT_OVERFLOW]
    if over:
        lengths = ", ".join(map(str, sorted(set(seen.contexts.values()))))
        return failed(
            f"{len(over)} of {len(every)} rollouts went over the context of {lengths} tokens; one is "
            f"{over[0].rollout_id}",
            "shorten what the agent sends, or take a policy with a longer context; such rollouts earn the least",
        )
    wanted = seen.recipe.sampling.max_tokens
    calls = [call for call in seen.calls if call.policy in seen.contexts]
    if not calls:
        return passed("no call was made")
    used = {call.id: len(call.prompt_ids) + min(wanted, call.sampling.max_tokens) for call in calls}
    longest = max(calls, key=lambda call: used[call.id] / seen.contexts[call.policy])
    context = seen.contexts[longest.policy]
    cramped = [
        call
        for call in calls
        if len(call.prompt_ids) + wanted > seen.contexts[call.policy] and call.finish_reason is FinishReason.LENGTH
    ]
    summary = f"the longest prompt has {len(longest.prompt_ids)} of {context} tokens, and an answer may have {wanted}"
    if cramped:
        return warned(
            f"{len(cramped)} of {len(calls)} answers were cut off by the context: {summary}",
            "shorten what the agent sends, or lower sampling.max_tokens to what there is room for",
        )
    if len(longest.prompt_ids) > 0.9 * context:
        return warned(summary, "a longer task, or one more turn, goes over it: shorten what the agent sends")
    return passed(summary)


def calls_cut_off(seen: Observation) -> Finding:
    """Check that answers end by themselves."""
    cut = [call for call in seen.calls if call.finish_reason is FinishReason.LENGTH]
    if not cut:
        return passed(f"all {len(seen.calls)} answers ended by themselves")
    limits = Counter(call.sampling.max_tokens for call in cut)
    limit, _ = limits.most_common(1)[0]
    whose = (
        "sampling.max_tokens"
        if limit == seen.recipe.sampling.max_tokens
        else "the agent's own max_tokens, or the context"
    )
    summary = f"{len(cut)} of {len(seen.calls)} answers were cut off, most at {limit} tokens ({whose})"
    if len(cut) > MOSTLY_CUT * len(seen.calls):
        return failed(
            summary,
            "raise the limit, or begin with a policy that ends its answers: a reward of cut-off answers teaches little",
        )
    if len(cut) > MUCH_CUT * len(seen.calls):
        return warned(summary, "raise the limit, or reward short answers")
    return passed(summary)


def markup_readable(seen: Observation) -> Finding:
    """Check that tool calls which answers begin can be read."""
    offered = sum(bool(call.offered or call.malformed) for call in seen.calls)
    sentence = explain_malformed(seen.rollouts)
    if sentence is None:
        return passed(f"all tool calls of {offered} answers can be read" if offered else "no call offered tools")
    malformed = sum(bool(call.malformed) for call in seen.calls)
    if malformed < MANY_MALFORMED * offered:
        return passed(sentence)
    return warned(
        sentence,
        "show a call in the system prompt, raise sampling.max_tokens where calls have no end, or let it learn: "
        "intermediate_rewards.NAME.use = 'malformed_calls'",
    )


def tools_work(seen: Observation) -> Finding:
    """Check that tools answer, as far as they are seen."""
    tools: dict[str, list[ToolCall]] = {}
    for tool in (tool for rollout in seen.rollouts for tool in rollout.tool_calls):
        tools.setdefault(tool.name, []).append(tool)
    if not tools:
        return passed("; ".join(("no tool was seen", *seen.without_tools)))
    wrong = {name: [tool for tool in calls if tool.status.is_failure] for name, calls in tools.items()}
    summary = ", ".join(f"{name}: {len(wrong[name])} of {len(calls)} failed" for name, calls in tools.items())
    poor = [name for name, calls in tools.items() if 2 * len(wrong[name]) > len(calls) >= FEW_CALLS]
    broken = [name for name in poor if len(wrong[name]) == len(tools[name])]
    if not poor:
        return passed(summary)
    name = (broken or poor)[0]
    evidence = f"{summary}; {name} said: {wrong[name][0].result or wrong[name][0].error_type or ''}"
    if broken:
        return failed(evidence, f"mend the tool {name!r}: it never worked")
    return warned(
        evidence, "where the policy is the cause it may learn; see that the tool's description says what it takes"
    )


def repeats_itself(seen: Observation) -> Finding:
    """Check that the agent asks the same again when it is answered the same: branches and re-runs need it."""
    changed = sorted({name for repeat in seen.repeats for name in _changed_tools(repeat.recorded, repeat.again)})
    diverged = [repeat.again for repeat in seen.repeats if repeat.again.outcome is Outcome.DIVERGED]
    if not seen.repeats:
        return passed("no rollout had a call to repeat")
    if not changed and not diverged:
        return passed(
            f"{len(seen.repeats)} rollouts were run again with the same answers: they asked and their tools answered "
            "the same"
        )
    evidence: list[str] = []
    if changed:
        evidence.append(f"the same call of {', '.join(map(repr, changed))} was answered otherwise")
    if diverged:
        other = (
            f"{len(diverged)} of {len(seen.repeats)} rollouts, run again with the same answers, asked something else"
        )
        evidence.append(f"{other}: {first_line(diverged[0].error)}")
    judge = failed if "branches" in seen.requires else warned
    return judge(
        "; ".join(evidence),
        "fix clocks, ids and seeds in what the agent sees; rewards are then the policy's doing alone (credit from "
        "branches needs it)",
    )


def _changed_tools(recorded: Trajectory, again: Trajectory) -> Iterator[str]:
    """Tools whose every answer to some arguments is new."""
    for key, before in _answers(recorded).items():
        now = _answers(again).get(key)
        if now is not None and not before & now:
            yield key[0]


def _answers(trajectory: Trajectory) -> dict[tuple[str, str], set[str]]:
    answers: dict[tuple[str, str], set[str]] = {}
    for tool in trajectory.tool_calls:
        answers.setdefault((tool.name, tool.arguments), set()).add(tool.result)
    return answers


def first_line(error: str | None) -> str:
    """First line of an agent's traceback."""
    return next(iter((error or "").strip().splitlines()), "no message")
