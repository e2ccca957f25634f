"""Tool calls that the policies' own answers asked for: the join for spans and reports that name no tool-call id.

spans of an export ─► ReadTools.loose ─┐
kept completions ─► AskedCall… ────────┴► join_to_answers: same id, else same name and arguments, else the only one of that name
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from lightningrl.records import ToolCallRecord
from lightningrl.types import Transition
from lightningrl_server.rendering.completion import read_recorded
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.spans.tool_spans import comparable
from lightningrl_server.store.protocol import CallLog

__all__ = ["AnsweredCall", "ReadAsked", "join_reports", "join_to_answers", "read_kept_answers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredCall:
    """A tool call that a recorded answer asked for."""

    transition_id: str
    id: str
    """As the agent was given it."""
    name: str
    arguments: str
    """JSON text."""


ReadAsked = Callable[[str, int], Awaitable[Sequence[AnsweredCall]]]
"""From a rollout and an attempt to what its answers asked for so far, in order, less what somebody told of already."""


def read_kept_answers(log: CallLog, renderers: Mapping[str, PolicyRenderer]) -> ReadAsked:
    """From the completions in the store, parsed as they were for the agent. `renderers` by policy name."""

    async def read(rollout_id: str, attempt: int) -> Sequence[AnsweredCall]:
        told = await log.tool_call_ids(rollout_id, attempt)
        asked: list[AnsweredCall] = []
        for call in await log.calls(rollout_id, attempt):
            renderer = renderers.get(call.transition.policy)
            if renderer is None or told.issuperset(call.transition.tool_call_ids):
                continue
            asked += [answered for answered in _parse(renderer, call.transition) if answered.id not in told]
            await asyncio.sleep(0)  # other calls' turn
        return asked

    return read


def _parse(renderer: PolicyRenderer, transition: Transition) -> list[AnsweredCall]:
    return [
        AnsweredCall(transition_id=transition.id, id=call.id, name=call.name, arguments=call.arguments)
        for call in read_recorded(renderer, transition).tool_calls[: len(transition.tool_call_ids)]
    ]


def join_to_answers(records: Sequence[ToolCallRecord], loose: frozenset[str], asked: Sequence[AnsweredCall]) -> list[ToolCallRecord]:
    """The records, those of `loose` spans with the id of the call that asked and the transition that it is of. Of calls that are alike,
    the one asked first goes to the tool that ran first. What fits none, or one of several by its name alone, stays as it is."""
    known = {one.id: one for one in asked}
    taken = {record.tool_call.id for record in records}
    waiting = [one for one in asked if one.id not in taken]
    tools = [record for record in records if record.span_id in loose and record.tool_call.id not in known]
    tools.sort(key=lambda record: record.started_at)
    joined: dict[str | None, ToolCallRecord] = {}

    alike: dict[tuple[str, str], deque[AnsweredCall]] = defaultdict(deque)
    for one in waiting:
        alike[one.name, comparable(one.arguments)].append(one)
    for tool in tools:
        same = alike[tool.tool_call.name, comparable(tool.tool_call.arguments)]
        if same:
            joined[tool.span_id] = _with_asker(tool, same.popleft())

    named: dict[str, list[AnsweredCall]] = defaultdict(list)
    for one in chain.from_iterable(alike.values()):
        named[one.name].append(one)
    left = Counter(tool.tool_call.name for tool in tools if tool.span_id not in joined)
    for tool in tools:
        name = tool.tool_call.name
        if tool.span_id not in joined and left[name] == len(named[name]) == 1:
            joined[tool.span_id] = _with_asker(tool, named[name][0])
    return [joined.get(record.span_id) or _with_arguments(record, known.get(record.tool_call.id)) for record in records]


def join_reports(records: Sequence[ToolCallRecord], asked: Sequence[AnsweredCall]) -> list[ToolCallRecord]:
    """Reports joined as spans without an id are; one that names the answer, to what that answer asked for."""
    joined = list(records)
    for answer in {record.tool_call.transition_id for record in records}:
        places = [place for place, record in enumerate(records) if record.tool_call.transition_id == answer]
        reports = [records[place] for place in places]
        of_answer = [call for call in asked if answer in (None, call.transition_id)]
        loose = frozenset(record.span_id for record in reports if record.span_id is not None)
        for place, record in zip(places, join_to_answers(reports, loose, of_answer), strict=True):
            joined[place] = record
    return joined


def _with_asker(record: ToolCallRecord, asked: AnsweredCall) -> ToolCallRecord:
    call = record.tool_call
    whole = replace(call, id=asked.id, transition_id=asked.transition_id, arguments=call.arguments or asked.arguments)
    return replace(record, tool_call=whole)


def _with_arguments(record: ToolCallRecord, asked: AnsweredCall | None) -> ToolCallRecord:
    """A tool that is known by its id, and whose span leaves out what it was called with (Google ADK)."""
    if asked is None or record.tool_call.arguments:
        return record
    return replace(record, tool_call=replace(record.tool_call, arguments=asked.arguments))
