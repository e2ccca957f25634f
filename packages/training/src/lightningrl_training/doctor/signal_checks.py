"""Checks of the signal: sampling, rewards, and whether they reach the weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from statistics import fmean

from lightningrl.types import Outcome, Trajectory, TrajectoryGroup
from lightningrl_training.doctor.bill import way_at_end
from lightningrl_training.doctor.findings import Finding, Verdict, failed, passed, warned
from lightningrl_training.doctor.observation import Lesson, Observation
from lightningrl_training.explanations import WAYS_OUT

__all__ = ["reward_reaches_tokens", "reward_varies", "rewards_given", "rewards_to_gain", "sampling_free"]

LITTLE = 0.1
"""Share of the way to where learning leads: training for less of it makes no difference that one sees."""
NO_GAIN = 0.02
"""Share of the range of rewards that is too little to gain."""
NEARLY = 1e-9
FEW_GROUPS = 4
"""Groups below which nothing is concluded about all of them."""


def sampling_free(seen: Observation) -> Finding:
    """Check that the members of a group are sampled independently, as the recipe says."""
    groups = [group for group in seen.groups if len([one for one in group.trajectories if one.transitions]) > 1]
    equal = [group for group in groups if _are_equal(group)]
    settings = Counter(
        (call.sampling.temperature, call.sampling.seed is not None, call.sampling.stop) for call in seen.calls
    )
    if groups and len(equal) == len(groups):
        return failed(f"the members of all {len(groups)} groups said the same{_cause(seen)}", _equal_remedy(seen))
    fixed = len({call.sampling.seed for call in seen.calls if call.sampling.seed is not None})
    with_seed = sum(count for (_, has_seed, _), count in settings.items() if has_seed)
    if with_seed and fixed < with_seed:
        return warned(
            f"{with_seed} of {len(seen.calls)} calls ask for a fixed seed, {fixed} of them different: equal prompts "
            "get equal answers",
            "let the agent send no `seed` while it is trained",
        )
    if seen.overridden:
        asked = ", ".join(f"{name} in {count} calls" for name, count in seen.overridden.items())
        ours = f"temperature={seen.recipe.sampling.temperature:g}, top_p={seen.recipe.sampling.top_p:g}"
        return warned(
            f"the agent asks for {asked}; the run samples with {ours}",
            "it has to be so while it is trained; set [validation.sampling], with which it is judged, to what you "
            "will serve with",
        )
    differ = f"members differ in {len(groups) - len(equal)} of {len(groups)} groups"
    return passed(f"{differ}; nothing that the agent asks for is overridden")


def _are_equal(group: TrajectoryGroup) -> bool:
    answers = {
        tuple(tuple(call.completion_ids.tolist()) for call in rollout.transitions)
        for rollout in group.trajectories
        if rollout.transitions
    }
    return len(answers) == 1


def _cause(seen: Observation) -> str:
    asked = [call.sampling for call in seen.calls]
    stop = next((sampling.stop for sampling in asked if sampling.stop), None)
    causes = {
        "sampling.temperature = 0": any(sampling.temperature == 0 for sampling in asked),
        "the agent sends a fixed seed": any(sampling.seed is not None for sampling in asked),
        f"the agent stops at {stop!r}": stop is not None,
        "the agent allows 1 token": all(sampling.max_tokens == 1 for sampling in asked),
    }
    reasons = [cause for cause, is_so in causes.items() if is_so]
    return f": {', '.join(reasons)}" if reasons else ""


def _equal_remedy(seen: Observation) -> str:
    if seen.recipe.sampling.temperature == 0:
        return "set sampling.temperature = 1.0: a group whose members are equal teaches nothing"
    return (
        "send no seed, and no stop text that ends every answer at once; else raise sampling.temperature: equal "
        "members teach nothing"
    )


def rewards_given(seen: Observation) -> Finding:
    """Check that each rollout that succeeded has a finite reward within its range."""
    if seen.reward_error is not None:
        return failed(seen.reward_error, "mend the function")
    every = seen.tried
    failures = [rollout for rollout in every if rollout.unrewarded is not None]
    if failures:
        first = f"{failures[0].rollout_id}: {failures[0].unrewarded}"
        judge = failed if len(failures) > max(1, seen.recipe.outcomes.max_failed_rewards * len(every)) else warned
        return judge(
            f"a reward or evidence failed on {len(failures)} of {len(every)} rollouts; first, {first}",
            "mend it: more than outcomes.max_failed_rewards of them stop the run, and until then such rollouts count "
            "as the lowest reward, or are left out where it fails on all",
        )
    asked = [rollout for rollout in every if seen.recipe.outcomes.asks_rewards(rollout.outcome)]
    without = [rollout for rollout in asked if rollout.reward is None]
    if asked and len(without) == len(asked):
        silent = sorted({name for rollout in without for name, value in rollout.rewards.items() if value is None})
        return failed(
            f"no rollout of {len(asked)} has a reward: {', '.join(silent) or 'all'} said nothing (None)",
            "return numbers",
        )
    if without:
        return warned(
            f"{len(without)} of {len(asked)} rollouts have no reward: one of theirs said nothing (None)",
            "return numbers",
        )
    if not asked:
        return passed("no rollout succeeded, so none was asked for")
    values = [rollout.reward for rollout in asked if rollout.reward is not None]
    parts = sorted({name for rollout in asked for name in rollout.rewards})
    return passed(
        f"{', '.join(parts)}: {min(values):g} to {max(values):g}, mean {sum(values) / len(values):.3f} over "
        f"{len(values)} rollouts"
    )


def reward_varies(seen: Observation) -> Finding:
    """Check that rollouts of one task earn different rewards: that is what is learned from."""
    groups = [{one.reward for one in group.trajectories if one.reward is not None} for group in seen.groups]
    varied = sum(len(rewards) > 1 for rewards in groups)
    everything: set[float] = set().union(*groups)
    summary = f"rewards differ within {varied} of {len(groups)} groups of {seen.recipe.loop.group_size}"
    if not everything:
        return passed("no rollout was rewarded, so there is nothing to compare")
    if "group" not in seen.requires and seen.recipe.loop.group_size == 1:
        return passed(f"the credit compares nothing; {len(everything)} different rewards were given")
    if varied:
        return passed(summary)
    if len(everything) == 1:
        (only,) = everything
        if "judge" in seen.requires and any(seen.signals):
            return passed(f"all rewards are {only:g}; the judge's grades differ within groups")
        if not any(one.outcome is Outcome.SUCCEEDED for group in seen.groups for one in group.trajectories):
            return passed(f"every rollout failed and earned the lowest, {only:g}: what it ends in says why")
        return failed(
            f"all rewards are {only:g}",
            f"look at one with `lightningrl try`: is the reward right? Where the policy solves none, {WAYS_OUT}",
        )
    judge = failed if len(groups) >= FEW_GROUPS else warned
    return judge(
        summary, "raise loop.group_size or sampling.temperature, or take tasks that the policy solves now and then"
    )


def reward_reaches_tokens(seen: Observation) -> Finding:
    """Check that one learning step raises tokens with a positive advantage, on a copy of the weights."""
    if not seen.lessons:
        return failed(
            "no call of a trained policy and role was recorded, so nothing would be learned", "see the findings above"
        )
    findings = [_taught(name, lesson, many=len(seen.lessons) > 1) for name, lesson in seen.lessons.items()]
    worst = max(findings, key=lambda finding: list(Verdict).index(finding.verdict))
    way, steps = way_at_end(seen), seen.recipe.loop.steps
    if worst.verdict is Verdict.PASS and way is not None and way < LITTLE:
        worst = warned(
            f"{worst.evidence}: in {steps} step{'s' if steps > 1 else ''} that is {100 * way:.2g} % of the way to "
            "where it leads",
            "raise learner.learning_rate, say ten times, and look again; or loop.steps",
        )
    return replace(worst, evidence=worst.evidence + _after_rehearsal(seen))


def rewards_to_gain(seen: Observation) -> Finding:
    """Check that there is something left to gain: what all rollouts earn, the best of each group, and the likeliest."""
    groups = [
        earned
        for group in seen.groups
        if (earned := [(_likelihood(one), one.reward) for one in group.trajectories if one.reward is not None])
    ]
    if not groups or seen.reward_error is not None:
        return passed("no rollout was rewarded")
    low, high = seen.recipe.reward_bounds
    mean = fmean(reward for earned in groups for _, reward in earned)
    bests = [max(reward for _, reward in earned) for earned in groups]
    size, solved = seen.recipe.loop.group_size, sum(best >= high - NEARLY for best in bests)
    likeliest = fmean(max(earned)[1] for earned in groups)
    summary = (
        f"mean reward {mean:.2f} of {low:g} to {high:g}; best of {size} {fmean(bests):.2f}, and {solved} of "
        f"{len(groups)} groups reach {high:g} (pass@{size}); the likeliest rollouts earn {likeliest:.2f}"
    )
    left = (high - mean) / (high - low)
    if left < NO_GAIN:
        return warned(summary, "harder tasks: these are solved before any step")
    return passed(summary)


def _likelihood(rollout: Trajectory) -> float:
    """Σ log π of the trained tokens."""
    return sum(float(call.logprobs.sum()) for call in rollout.transitions if call.trainable)


def _after_rehearsal(seen: Observation) -> str:
    """Mean rewards of the first step and of those after it; empty where there are none after it."""
    before, after = (
        [
            rollout.reward
            for step in steps
            for group in step.groups
            for rollout in group.trajectories
            if rollout.reward is not None
        ]
        for steps in (seen.steps[:1], seen.steps[1:])
    )
    if not before or not after:
        return ""
    steps = f"{len(seen.rehearsed)} more step{'s' if len(seen.rehearsed) > 1 else ''}"
    return f"; mean reward {fmean(before):.3f}, in {steps} {fmean(after):.3f}"


def _taught(policy: str, lesson: Lesson, *, many: bool) -> Finding:
    of = f"policy {policy!r}: " if many else ""
    if not lesson.rows:
        return failed(
            f"{of}no row can be trained",
            "see that its calls are of a role in `trained_agents`, and, with loop.dynamic_sampling, that some group "
            "has unlike rewards",
        )
    if lesson.error is not None:
        remedy = (
            "see 'memory'"
            if lesson.is_out_of_memory
            else "mend that: the run would end so; with a loss of your own, look there"
        )
        return failed(f"{of}the learner failed on {lesson.rows} rows: {lesson.error}", remedy)
    rate = "" if lesson.learning_rate is None else f" at learning rate {lesson.learning_rate:g}"
    how = "a planted advantage of +1" if lesson.is_planted else "the recorded advantages"
    if lesson.gain is None:
        if lesson.gradient is None or not lesson.gradient > 0:
            return warned(
                f"{of}the backend tells neither log-probabilities nor a gradient",
                "look at the first steps' reward curve",
            )
        return passed(
            f"{of}one step on {lesson.rows} rows had a gradient of norm {lesson.gradient:.3g}; its backend tells no "
            "log-probabilities"
        )
    moved = f"moved their tokens by {lesson.gain:+.3g} nats each in the direction asked for"
    summary = f"{of}one step on {lesson.rows} rows{rate}, with {how}, {moved}"
    if lesson.gain == 0.0 or not math.isfinite(lesson.gain):
        return failed(
            summary,
            "nothing changed: set learner.learning_rate above 0, and see that the policy has weights that are trained",
        )
    if lesson.gain < 0:
        return failed(summary, "it learns the opposite: look at learner.loss and its sign, or lower the learning rate")
    return passed(summary)
