"""Grades of foreign calls, with reasons.

rl-safe      token ids, a log-probability each, the temperature and a version of our policy; off-policy for any other
sft-safe     whole messages, schemas where tools are used, an answer that ended by itself, results that match, no secret
judge-only   can be read and judged
unusable     no messages, no answer, or a call that failed

Reasons of an `rl-safe` call say why it is no data for tuning; of a `sft-safe` one, why it is not `rl-safe`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from lightningrl_runs.foreign.bodies import DOUBLED
from lightningrl_runs.foreign.messages import NO_TEXT, UNREAD, UNTRAINED
from lightningrl_server.gateway.dialects.synonyms import is_untrained
from lightningrl_traces.records import Call

__all__ = ["ENDED", "Grade", "GradedCall", "Reason", "grade_call"]


class Grade(StrEnum):
    """Use that a foreign call can be put to."""

    RL = "rl-safe"
    SFT = "sft-safe"
    JUDGE = "judge-only"
    UNUSABLE = "unusable"


class Reason(StrEnum):
    """Why a call has no better grade."""

    NO_MESSAGES = "no messages"
    NO_ANSWER = "no answer"
    FAILED = "the call failed"
    NO_SCHEMAS = "no tool schemas"
    NO_FINISH = "no finish reason"
    CUT = "the answer was cut off"
    UNMATCHED = "tool results match no call"
    UNANSWERED = "tool calls without results"
    NO_TOOL_IDS = "tool calls without ids"
    BAD_ARGUMENTS = "tool arguments are no JSON"
    NO_TEXT = NO_TEXT
    NOT_WHOLE = "no system prompt recorded"
    SECRET = "secret masked"  # noqa: S105  (a sentence)
    PERSONAL = "personal data masked"
    DOUBTFUL = "may hold a secret that no rule names"
    UNTRAINED = UNTRAINED
    NO_IDS = "no token ids"
    NO_LOGPROBS = "no log-probability for each token"
    NO_TEMPERATURE = "no temperature"
    NO_VERSION = "no version of our policy"
    DOUBLED = DOUBLED
    REPEATED = "the same call is in another rollout"


ENDED: Final = frozenset({"stop", "tool_calls"})
"""Finish reasons of an answer that ended by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradedCall:
    """A call with its grade."""

    call: Call
    grade: Grade
    reasons: tuple[str, ...]


def grade_call(call: Call) -> GradedCall:
    """Grade a call whose text is masked already (`notes` say what was)."""
    for_rl = _rl_problems(call)
    no_use = _unusable(call)
    for_sft = _sft_problems(call)
    if not for_rl:
        return GradedCall(call=call, grade=Grade.RL, reasons=(*no_use, *for_sft))
    if no_use:
        return GradedCall(call=call, grade=Grade.UNUSABLE, reasons=tuple(no_use))
    if for_sft:
        return GradedCall(call=call, grade=Grade.JUDGE, reasons=tuple(for_sft))
    others = [note for note in call.notes if note not in for_rl]
    return GradedCall(call=call, grade=Grade.SFT, reasons=(*for_rl, *others))


def _unusable(call: Call) -> list[str]:
    problems = []
    if call.error is not None:
        problems.append(Reason.FAILED.value)
    if not call.messages:
        problems.append(Reason.NO_MESSAGES.value)
    if not call.answer or not (call.answer.get("content") or call.answer.get("tool_calls")):
        problems.append(Reason.NO_ANSWER.value)
    return problems


def _rl_problems(call: Call) -> list[str]:
    problems = []
    logprobs = call.logprobs or ()
    if not call.prompt_ids or not call.completion_ids or not _are_ids([*call.prompt_ids, *call.completion_ids]):
        problems.append(Reason.NO_IDS.value)
    elif len(logprobs) != len(call.completion_ids) or not all(map(_is_logprob, logprobs)):
        problems.append(Reason.NO_LOGPROBS.value)
    if "temperature" not in call.sampling:
        problems.append(Reason.NO_TEMPERATURE.value)
    if call.version is None:
        problems.append(Reason.NO_VERSION.value)
    if call.error is not None:
        problems.append(Reason.FAILED.value)
    problems += [
        reason for reason in (Reason.DOUBLED.value, Reason.SECRET.value, Reason.PERSONAL.value) if reason in call.notes
    ]
    return problems


def _are_ids(ids: list[int]) -> bool:
    return all(type(token) is int and 0 <= token < 2**31 for token in ids)


def _is_logprob(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value <= 1e-3


def _sft_problems(call: Call) -> list[str]:
    answer, messages = call.answer or {}, call.messages or []
    uses_tools = any(
        message.get("tool_calls") or message["role"] == "tool" for message in (*messages, answer) if message
    )
    problems = []
    if uses_tools and not _has_schemas(call, answer):
        problems.append(Reason.NO_SCHEMAS)
    if call.finish_reason is None:
        problems.append(Reason.NO_FINISH)
    elif call.finish_reason not in ENDED:
        problems.append(Reason.CUT)
    problems += _dialogue_problems(call)
    spoiling = (Reason.NO_TEXT, Reason.NOT_WHOLE, Reason.SECRET, Reason.DOUBTFUL, Reason.UNTRAINED)
    problems += [reason for reason in spoiling if reason.value in call.notes]
    if is_untrained(answer) and Reason.UNTRAINED not in problems:
        problems.append(Reason.UNTRAINED)
    return [*(problem.value for problem in problems), *(note for note in call.notes if note.startswith(UNREAD))]


def _has_schemas(call: Call, answer: Mapping[str, object]) -> bool:
    if not call.tools:
        return False
    return all("parameters" in tool["function"] or "description" in tool["function"] for tool in call.tools)


def _dialogue_problems(call: Call) -> list[Reason]:
    """Hold each result against the call that asked for it."""
    problems: dict[Reason, None] = {}
    open_ids: set[str] = set()
    answered: set[str] = set()
    for message in (*(call.messages or ()), call.answer or {}):
        if message.get("role") == "tool":
            call_id = message.get("tool_call_id") or ""
            if call_id not in open_ids and call_id not in answered:
                problems[Reason.UNMATCHED] = None
            open_ids.discard(call_id)
            answered.add(call_id)
            continue
        if message.get("role") == "assistant":
            if open_ids:
                problems[Reason.UNANSWERED] = None
            open_ids = set()
            for request in message.get("tool_calls") or ():
                if not request["id"]:
                    problems[Reason.NO_TOOL_IDS] = None
                if not _is_object(request["function"]["arguments"]):
                    problems[Reason.BAD_ARGUMENTS] = None
                open_ids.add(request["id"])
    return list(problems)


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        return False
