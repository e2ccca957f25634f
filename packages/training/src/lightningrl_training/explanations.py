"""Sentences for a user: the reasons why a step teaches nothing, why rollouts fail, and why a run stops."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from lightningrl.recipe import LoopConfig
from lightningrl.records import PolicyStatus
from lightningrl.sanitize import one_line
from lightningrl.types import OtherCallKind, Outcome, Trajectory
from lightningrl_training.checkpoints import LoopState

__all__ = [
    "CACHES",
    "WAYS_OUT",
    "explain_cache",
    "explain_early_stop",
    "explain_failed_rewards",
    "explain_failures",
    "explain_ignored",
    "explain_left_threads",
    "explain_malformed",
    "explain_no_rewards",
    "explain_shared_failure",
    "explain_silence",
    "explain_target",
    "explain_timeouts",
    "quote_failure",
]

CACHES = "a cache (LangChain's `set_llm_cache`, DSPy's on disk, litellm's, one of its own)"
WAYS_OUT: Final = (
    "show two answers in the prompt, tune on good ones first (`warm_start`), reward a part, or take easier tasks "
    "(docs/how-to/it-does-not-learn.md)"
)
"""Remedies where the policy never earns anything: what is never sampled is not learned."""
_LONGEST = 400
"""Characters of somebody else's message."""
_MOST_HOSTS = 3
_FRAME: Final = re.compile(r'File "[^"]*", line \d+')
_SLOW = 4
"""An engine is slow where so many whole answers do not fit into a rollout's time."""


def explain_malformed(trajectories: Sequence[Trajectory]) -> str | None:
    """Count the answers that begin a tool call which cannot be read, and quote one with the form that was expected;
    None where none does."""
    calls = [call for trajectory in trajectories for call in trajectory.transitions]
    malformed = [call for call in calls if call.malformed]
    if not malformed:
        return None
    offered = sum(bool(call.offered or call.malformed) for call in calls)
    return (
        f"{len(malformed)} of {offered} answers that were offered tools begin a tool call that cannot be read, so the "
        f"agent was given it as text; one: {malformed[0].malformed[0]}"
    )


def explain_silence(trajectories: Sequence[Trajectory]) -> str:
    """The reason why no call of a step's trajectories, as they were credited, has an advantage other than 0."""
    calls = [call for trajectory in trajectories for call in trajectory.transitions]
    if not calls:
        return _explain_no_calls(trajectories)
    if not any(call.trainable for call in calls):
        roles = ", ".join(sorted({repr(call.agent) if call.agent else "none" for call in calls}))
        return (
            "no call is of a policy and role that is trained, by trained_agents and [[policy.calls]]; roles of the "
            f"calls: {roles}"
        )
    rewarded = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    if not rewarded:
        return "no rollout has a reward"
    if cache := explain_cache(trajectories):
        return cache
    rewards = sorted({trajectory.reward for trajectory in rewarded if trajectory.reward is not None})
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in rewarded:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    if any(len({rollout.reward for rollout in members}) > 1 for members in groups.values()):
        return "the credit assigner gives every trained call 0"
    if _have_fixed_seeds([members for members in groups.values() if len(members) > 1]):
        return (
            "the agent asks for a fixed seed, by which the rollouts of a group say the same, and earn the same; "
            "let it send no `seed` while it is trained"
        )
    if len(rewards) == 1:
        example = rewarded[0].rollout_id
        ways = f"; {WAYS_OUT}" if rewards[0] == 0 else ""
        return f"all {len(rewarded)} rewards are {rewards[0]:g}; `lightningrl rollouts show {example}` shows one{ways}"
    return (
        f"in each of {len(groups)} groups all rewards are equal (over the step from {rewards[0]:g} to "
        f"{rewards[-1]:g}); "
        "raise loop.group_size or sampling.temperature, or take tasks that the policy solves now and then"
    )


def _have_fixed_seeds(groups: Sequence[Sequence[Trajectory]]) -> bool:
    """True where in each group the first calls of all rollouts were sampled with one seed, which the agent gave."""
    seeds = [
        {rollout.transitions[0].sampling.seed if rollout.transitions else None for rollout in members}
        for members in groups
    ]
    return bool(seeds) and all(len(of_group) == 1 and None not in of_group for of_group in seeds)


def _explain_no_calls(trajectories: Sequence[Trajectory]) -> str:
    others = [(trajectory, call) for trajectory in trajectories for call in trajectory.other_calls]
    refusals = [(trajectory, call) for trajectory, call in others if call.kind is OtherCallKind.REFUSED]
    if refusals:
        trajectory, first = refusals[0]
        return (
            f"every model call was refused ({len(refusals)}); first, of {trajectory.rollout_id!r}: "
            f"{one_line(first.message, _LONGEST)}"
        )
    none = f"none of {len(trajectories)} rollouts made a model call that came here"
    hosts = Counter(call.path for _, call in others if call.kind is OtherCallKind.ELSEWHERE)
    if hosts:
        named = ", ".join(f"{host!r} ({count} rollouts)" for host, count in hosts.most_common(_MOST_HOSTS))
        return (
            f"{none}: the agent called models at {named}; if the policy is to answer in their place, name them in "
            "runtime.base_urls"
        )
    return (
        f"{none}; where the agent's client has a base URL of its own, name it in runtime.base_urls; where it answers "
        f"from {CACHES}, switch that off"
    )


def explain_cache(
    trajectories: Sequence[Trajectory], asked: Collection[str] = (), *, is_validation: bool = False
) -> str | None:
    """Rollouts without a model call although others of their group, or earlier ones of their task (`asked`: ids of such
    tasks), or, in a validation where no rollout made one, any other of the run did; None = there are none."""
    silent = [
        rollout
        for rollout in trajectories
        if rollout.outcome is Outcome.SUCCEEDED and not rollout.transitions and not rollout.other_calls
    ]
    groups = {one.group_id for one in trajectories if one.transitions}
    beside = [one for one in silent if one.group_id in groups]
    before = [one for one in silent if one.task.id in asked]
    if beside:
        repeating, although = beside, "others of their group did"
    elif before:
        repeating, although = before, "earlier ones of their tasks did"
    elif is_validation and asked and len(silent) == len(trajectories):
        repeating, although = silent, "those of training do"
    else:
        return None
    effect = (
        "validation says what the policy was, not what it is"
        if is_validation
        else "they repeat what was sampled once, and teach nothing"
    )
    return (
        f"{len(repeating)} of {len(trajectories)} rollouts made no model call although {although}: the agent's client "
        f"answers from {CACHES}, so {effect}; switch it off for training"
    )


def explain_failures(trajectories: Sequence[Trajectory]) -> str:
    """Count outcomes, and quote the first failure."""
    outcomes = Counter(trajectory.outcome.value for trajectory in trajectories)
    counts = ", ".join(f"{count} {name}" for name, count in outcomes.items())
    failed = next(trajectory for trajectory in trajectories if trajectory.outcome is not Outcome.SUCCEEDED)
    return f"every rollout failed ({counts}); {quote_failure(failed)}"


def quote_failure(failed: Trajectory, *, is_short: bool = False) -> str:
    """Quote the error of the first rollout that failed; `is_short`: its first line alone."""
    error = failed.error or "no message"
    if is_short:
        error = error.partition("\n")[0]
    elif not failed.outcome.is_agents_own:  # nothing is wrong with the lines of the agent that it came through
        error = error.partition('\n  File "')[0]
    return f"first, {failed.rollout_id!r}: {one_line(error, _LONGEST)}"


def explain_shared_failure(trajectories: Sequence[Trajectory]) -> str | None:
    """The one way in which the agent failed in every rollout, as its exception and line; None where some ended
    otherwise. The task, or chance, would have them fail in different ways."""
    if not trajectories or not all(trajectory.outcome.is_agents_own for trajectory in trajectories):
        return None
    ways = {_way(trajectory) for trajectory in trajectories}
    return ways.pop() if len(ways) == 1 else None


def _way(failed: Trajectory) -> str:
    """`timeout`, or `ValueError at File "agent.py", line 12`: the exception and the innermost line."""
    if failed.outcome is not Outcome.AGENT_ERROR:
        return failed.outcome.value
    error = failed.error or ""
    lines = _FRAME.findall(error)
    return f"{error.partition(':')[0]} at {lines[-1]}" if lines else error


def explain_no_rewards(trajectories: Sequence[Trajectory], remedy: str | None = None) -> str:
    """The reason why none has a reward, and what next; `remedy`: for failures of the rollouts themselves."""
    if failed := [trajectory for trajectory in trajectories if trajectory.unrewarded is not None]:
        return f"no rollout of {len(trajectories)} has a reward; {explain_failed_rewards(failed)}; mend that"
    if any(trajectory.outcome is Outcome.SUCCEEDED for trajectory in trajectories):
        return f"no rollout of {len(trajectories)} has a reward; check that the rewards return numbers"
    is_agents_own = any(trajectory.outcome.is_agents_own for trajectory in trajectories)
    return f"{explain_failures(trajectories)}; {remedy or ('mend the agent' if is_agents_own else 'mend that')}"


def explain_failed_rewards(failed: Sequence[Trajectory]) -> str:
    """Count the `unrewarded`, and quote the first failure of a reward."""
    return (
        f"a reward or evidence failed on {len(failed)} rollouts; first, on {failed[0].rollout_id!r}: "
        f"{failed[0].unrewarded}"
    )


def explain_ignored(policies: Sequence[PolicyStatus]) -> str | None:
    """Fields of the agent's calls that change nothing here; None = there are none."""
    counts = sum((Counter(policy.ignored) for policy in policies), Counter[str]())
    if not counts:
        return None
    named = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
    return f"fields of the agent's calls that nobody here reads, and in how many calls: {named}"


def explain_left_threads(trajectories: Sequence[Trajectory]) -> str | None:
    """Threads that rollouts left running; None = there are none."""
    left = [rollout.left_threads for rollout in trajectories]
    names = sorted({name for threads in left for name in threads})
    if not names:
        return None
    shown = ", ".join(map(repr, names[:_MOST_HOSTS])) + (" …" if len(names) > _MOST_HOSTS else "")
    return (
        f"{sum(map(bool, left))} of {len(left)} rollouts left threads running ({shown}); model calls that they make "
        "from now on are taken for those of the rollouts that follow: join them before the agent returns, or use "
        "ThreadPoolExecutor or asyncio.to_thread"
    )


def explain_timeouts(
    trajectories: Sequence[Trajectory], call_speed: float | None, *, max_tokens: int, timeout_s: float
) -> str | None:
    """The engine's part in rollouts that ran out of time; None where none did, or where it is fast enough for something
    else to be the cause. `call_speed`: tokens per second of one call; None = nothing was sampled."""
    late = sum(trajectory.outcome is Outcome.TIMEOUT for trajectory in trajectories)
    if not late or call_speed is None or max_tokens * _SLOW < call_speed * timeout_s:
        return None
    answer = (
        f"an answer of {max_tokens} tokens takes {max_tokens / call_speed:.0f} s" if call_speed else "no answer comes"
    )
    return (
        f"{late} of {len(trajectories)} rollouts ran out of time: the engine samples {call_speed:.3g} tokens/s for a "
        f"call, so {answer} of the {timeout_s:g} s that a rollout has; "
        "raise runtime.timeout_s, or give a new run a lower sampling.max_tokens"
    )


def explain_early_stop(state: LoopState, run: Path) -> str:
    """The end of a run that lost its patience, and the command that goes on with it."""
    since = state.validations_since_best
    return (
        f"stopped early after step {state.step}: {since} validations were no better than the best, "
        f"{state.best_score:.3f}; to go on, raise loop.patience: lightningrl train --resume "
        f"--run {shlex.quote(str(run))} --set loop.patience={2 * since}"
    )


def explain_target(state: LoopState, loop: LoopConfig, run: Path) -> str:
    """The end of a run that reached `loop.stop_at`, and the command that goes on with it."""
    more = (
        f"; to go on, raise it: lightningrl train --resume --run {shlex.quote(str(run))} --set loop.stop_at=VALUE"
        if state.step < loop.steps
        else ""
    )
    return f"validation reached {state.best_score:.3f} after step {state.step} (loop.stop_at = {loop.stop_at:g}){more}"
