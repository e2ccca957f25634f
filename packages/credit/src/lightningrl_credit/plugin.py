"""LightningRL's credit assigners and rewards, a plugin as anybody's: a method is imported when a run uses it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from lightningrl.plugins import Plugin, hookimpl


class _Lazy:
    """A factory by its place in this package, `"module:name"`, imported when it is called or its settings are read."""

    def __init__(self, place: str, *arguments: Any) -> None:
        """`arguments` go before the settings."""
        self._place = place
        self._arguments = arguments

    def __call__(self, **options: Any) -> Any:
        return self._load()(**options)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._load())

    def _load(self) -> Callable[..., Any]:
        module, _, name = self._place.partition(":")
        return partial(getattr(importlib.import_module(f"lightningrl_credit.{module}"), name), *self._arguments)


def _plugin(name: str, summary: str, place: str, *arguments: Any) -> Plugin:
    return Plugin(name=name, summary=summary, factory=_Lazy(place, *arguments))


@hookimpl
def lightningrl_credit_assigners() -> Iterable[Plugin]:
    with_epsilon, without_epsilon = (f"baselines:{name}" for name in ("with_epsilon", "without_epsilon"))
    yield _plugin("grpo", "each call gets (R - mean) / std of its group", with_epsilon, "grpo")
    yield _plugin("dr_grpo", "each call gets R - mean of its group", without_epsilon, "dr_grpo")
    yield _plugin("rloo", "each call gets R - mean of the others", without_epsilon, "rloo")
    yield _plugin("maxrl", "each call gets (R - mean) / mean of its group", with_epsilon, "maxrl")
    yield _plugin("opo", "each call gets R - mean of its group by tokens", without_epsilon, "opo")
    yield _plugin("reinforce", "each call gets R, with no baseline", without_epsilon, "none")
    yield _plugin("turns", "turn rewards to go and the outcome, each with its baseline", "turns:TurnReturns")
    yield _plugin("states", "calls in the same state are compared (GiGPO, ECPO)", "states:StateGroups")
    branches = "the value of each state by branching there (VinePPO); it cost more rollouts than it saved in our study"
    yield _plugin("branches", branches, "branches:Branches")
    sum_of = "weighted sum of other assigners, each compared by role or whitened where its part says so"
    yield _plugin("sum", sum_of, "combinators:sum_of")
    yield _plugin("clip", "another assigner, cut at a bound", "combinators:clip")
    turn_gae = "advantages over turns or tokens, with a critic (Turn-PPO; PPO; bi-level as in VAGEN)"
    yield _plugin("turn_gae", turn_gae, "turn_gae:TurnGae")
    judge = "a judge grades each turn, or the rollouts of a group beside each other"
    yield _plugin("judge", judge, "judge_assigner:judge")
    teacher = "each token gets how much likelier a teacher finds it: on-policy distillation (reverse KL)"
    yield _plugin("teacher", teacher, "log_ratios:TeacherCredit")


@hookimpl
def lightningrl_credit_needs() -> Iterable[Plugin]:
    from lightningrl_credit.needs import PLUGINS

    yield from PLUGINS


@hookimpl
def lightningrl_reward_functions() -> Iterable[Plugin]:
    exact = "1 for the task's answer, regardless of case, punctuation and articles"
    check = "what the check of a coding harness says of its work: exit status, or the share of tests that passed"
    yield _plugin("check", check, "rewards.recorded:Check")
    yield _plugin("exact", exact, "rewards.matching:Exact")
    yield _plugin("numeric", "1 for the task's number, within a tolerance", "rewards.matching:Numeric")
    yield _plugin("f1", "words shared with the task's answer (token F1)", "rewards.matching:F1")
    yield _plugin("pattern", "1 where a regular expression matches", "rewards.matching:Pattern")
    yield _plugin("json_schema", "1 for JSON that fits a schema", "rewards.matching:JsonSchema")
    execution = "what a command of yours says of the output: exit status or stdout"
    yield _plugin("execution", execution, "rewards.execution:Execution")
    overlong = "0 down to -1 as a call comes near its most tokens (DAPO's soft overlong punishment)"
    yield _plugin("overlong", overlong, "rewards.recorded:Overlong")
    reported = "the value that the agent or its telemetry reported under `name`"
    yield _plugin("reported", reported, "rewards.recorded:ReportedReward")


@hookimpl
def lightningrl_intermediate_rewards() -> Iterable[Plugin]:
    yield _plugin("execution_errors", "charges for tools that fail while they run", "rewards.tools:ExecutionErrors")
    yield _plugin("latency_budget", "charges calls that take longer than a budget", "rewards.tools:LatencyBudget")
    malformed = "charges answers that begin a tool call which cannot be read"
    yield _plugin("malformed_calls", malformed, "rewards.tools:MalformedCalls")
    repeated = "charges for a tool called again with the same arguments"
    yield _plugin("repeated_calls", repeated, "rewards.tools:RepeatedCalls")
    reported = "what the agent or its telemetry reported of its calls, under `name` or all"
    yield _plugin("reported", reported, "rewards.recorded:ReportedTurnReward")
    yield _plugin("token_budget", "charges calls that sample more tokens than a budget", "rewards.tools:TokenBudget")
    status = "pays for tools that work, charges for those that fail"
    yield _plugin("tool_status", status, "rewards.tools:ToolStatusReward")
    arguments = "charges for arguments that fit no schema of the tool"
    yield _plugin("valid_arguments", arguments, "rewards.tools:ValidArguments")
