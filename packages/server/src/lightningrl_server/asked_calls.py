"""Tool calls that the policies' own answers asked for: the join for spans and reports that name no tool-call id.

spans of an export ─► ReadTools.loose ─┐
kept completions ─► AnsweredCall… ─────┴► join_to_answers: same id, else same name and arguments, else same name
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from lightningrl_server.records import ToolCallRecord
from lightningrl_server.rendering.completion import read_recorded
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.spans.tool_spans import comparable
from lightningrl_server.store.protocol import CallLog

__all__ = ["AnsweredCall", "ReadAsked", "join_reports", "join_to_answers", "name_by_answers", "read_kept_answers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredCall:
    """A tool call that a recorded answer asked for."""

    transition_id: str
    id: str
    """The id that the agent was given."""
    name: str
    arguments: str
    """JSON text."""


_ITEM = re.compile(r"(?:.*\|)?(?:fc|ctc)_(lr-[^_]+)_(\d{1,9})")
"""The id of a call's item, also behind its own: `fc_ANSWER_NUMBER`, `call_…|fc_ANSWER_NUMBER`."""


@dataclass(frozen=True, slots=True)
class ReadAsked:
    """Reads what an attempt's answers asked for: the completions in the store, parsed as they were for the agent."""

    log: CallLog
    renderers: Mapping[str, PolicyRenderer]
    """Renderers by policy."""

    async def __call__(self, rollout_id: str, attempt: int) -> Sequence[AnsweredCall]:
        """Read the calls asked for so far, in order, less what somebody reported already."""
        reported = await self.log.tool_call_ids(rollout_id, attempt)
        asked: list[AnsweredCall] = []
        for call in await self.log.calls(rollout_id, attempt):
            renderer = self.renderers.get(call.transition.policy)
            if renderer is None or reported.issuperset(call.transition.tool_call_ids):
                continue
            tools = read_recorded(renderer, call.transition).tool_calls[: len(call.transition.tool_call_ids)]
            asked += [
                AnsweredCall(transition_id=call.transition.id, id=tool.id, name=tool.name, arguments=tool.arguments)
                for tool in tools
                if tool.id not in reported
            ]
            await asyncio.sleep(0)  # other calls' turn
        return asked

    async def mentioned(self, rollout_id: str, attempt: int, names: Collection[str]) -> Collection[str]:
        """Return those of the names that a request offered as tools or an answer wrote, as agents do that act by code;
        all where the attempt has no call to tell by."""
        calls = [call.transition for call in await self.log.calls(rollout_id, attempt)]
        if not calls or any(call.policy not in self.renderers for call in calls):
            return names
        mentioned: set[str] = set()
        for call in calls:
            text = call.offered + self.renderers[call.policy].decode(call.completion_ids.tolist())
            mentioned.update(name for name in names if name in text)
            await asyncio.sleep(0)
        return mentioned


read_kept_answers = ReadAsked


def join_to_answers(
    records: Sequence[ToolCallRecord], loose: frozenset[str], asked: Sequence[AnsweredCall]
) -> list[ToolCallRecord]:
    """Return the records, those of `loose` spans with the id of the call that asked and the transition that it is of.
    Of calls alike, the first asked goes to the first tool. What fits none, or several by name alone, stays as it is."""
    by_id = {call.id: call for call in asked}
    taken = {record.tool_call.id for record in records}
    waiting = [call for call in asked if call.id not in taken]
    tools = [record for record in records if record.span_id in loose and record.tool_call.id not in by_id]
    tools.sort(key=lambda record: record.started_at)
    joined: dict[str | None, ToolCallRecord] = {}

    alike: dict[tuple[str, str], deque[AnsweredCall]] = defaultdict(deque)
    for call in waiting:
        alike[call.name, comparable(call.arguments)].append(call)
    for tool in tools:
        same = alike[tool.tool_call.name, comparable(tool.tool_call.arguments)]
        if same:
            joined[tool.span_id] = _with_asker(tool, same.popleft())

    named: dict[str, list[AnsweredCall]] = defaultdict(list)
    for call in chain.from_iterable(alike.values()):
        named[call.name].append(call)
    left = Counter(tool.tool_call.name for tool in tools if tool.span_id not in joined)
    for tool in tools:
        name = tool.tool_call.name
        if tool.span_id not in joined and left[name] == len(named[name]) == 1:
            joined[tool.span_id] = _with_asker(tool, named[name][0])
    return [joined.get(record.span_id) or _with_arguments(record, by_id.get(record.tool_call.id)) for record in records]


async def name_by_answers(
    records: Sequence[ToolCallRecord], log: CallLog, place: tuple[str, int]
) -> Sequence[ToolCallRecord]:
    """Return the records, those that name their call by its item in a response (Agno) by the id that it was given."""
    items = {record.tool_call.id: match for record in records if (match := _ITEM.fullmatch(record.tool_call.id))}
    if not items:
        return records
    answers = {call.transition.id: call.transition.tool_call_ids for call in await log.calls(*place)}
    ids = {item: answers.get(match[1], ())[int(match[2]) :][:1] for item, match in items.items()}
    return [
        replace(record, tool_call=replace(record.tool_call, id=ids[record.tool_call.id][0]))
        if ids.get(record.tool_call.id)
        else record
        for record in records
    ]


def join_reports(records: Sequence[ToolCallRecord], asked: Sequence[AnsweredCall]) -> list[ToolCallRecord]:
    """Join reports as spans without an id are; one that names the answer, to what that answer asked for."""
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
    """Add what the tool was called with, where its span leaves that out (Google ADK)."""
    if asked is None or record.tool_call.arguments:
        return record
    return replace(record, tool_call=replace(record.tool_call, arguments=asked.arguments))
