"""Tools as the dialogue shows them: what an answer asked for, and the result that a later request brings.

answer    tool_calls  [call_1: search {"q": "x"}]                                ─► waiting
request   … {"role": "tool", "tool_call_id": "call_1", "content": "3 results"}     ─► a ToolCallRecord of that call
restart   waiting is read again from the recorded completions; the store records nothing twice

Nobody measured such a tool: its duration is 0, its status `unknown` unless the dialogue says that it failed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightningrl.tool_schemas import canonical, fit_offered, is_offered
from lightningrl.types import ToolCall, ToolStatus, Transition
from lightningrl_server.gateway.request import CallRequest
from lightningrl_server.records import DIALOGUE, CallRecord, ToolCallRecord
from lightningrl_server.rendering.completion import ToolRequest, read_recorded
from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = ["AskedTools", "ShownTool"]

_COMPLAINT: Final = re.compile(
    r"error|exception|invalid|missing|required|unexpected|validation|must be|not valid", re.IGNORECASE
)
"""Words of a tool that could not take its arguments."""
_COMPLAINS_WITHIN: Final = 300
"""Characters of a result that are looked through for it: a page that a tool fetched may speak of errors, too."""


@dataclass(frozen=True, slots=True)
class _AskedTool:
    """A tool call that an answer of the attempt asked for."""

    request: ToolRequest
    asker: Transition
    before: bytes = b""
    """Digest of the last message that the answer was given to; empty where it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownTool:
    """A tool call with its result."""

    request: ToolRequest
    asker: Transition
    result: str
    is_failed: bool
    """The request that brings it says so."""

    @property
    def complains(self) -> bool:
        """True if it speaks of a failure, so that its arguments are held against their schema: slow, the first time."""
        return self.is_failed or _COMPLAINT.search(self.result, 0, _COMPLAINS_WITHIN) is not None

    def record(self) -> ToolCallRecord:
        """The tool call, to be kept."""
        request, asker, status = self.request, self.asker, self._status()
        call = ToolCall(
            id=request.id,
            name=request.name,
            arguments=request.arguments,
            result=self.result,
            status=status,
            transition_id=asker.id,
            agent=asker.agent,
            error_type=status.value if status in (ToolStatus.UNKNOWN_TOOL, ToolStatus.INVALID_ARGUMENTS) else None,
        )
        return ToolCallRecord(
            tool_call=call,
            span_id=f"{DIALOGUE}{request.id}",
            parent_span_id=asker.span_id or asker.id,
            started_at=asker.started_at + asker.duration_s,
        )

    def _status(self) -> ToolStatus:
        """`unknown` unless the dialogue says more: a tool that was not offered, arguments that do not fit and a result
        that says so, a result that the request calls a failure."""
        name, offered = self.request.name, self.asker.offered
        if not is_offered(name, offered):
            return ToolStatus.UNKNOWN_TOOL
        if self.complains and not fit_offered(name, self.request.arguments, offered):
            return ToolStatus.INVALID_ARGUMENTS
        return ToolStatus.ERROR if self.is_failed else ToolStatus.UNKNOWN


class AskedTools:
    """The tool calls of one attempt whose results are still to come."""

    def __init__(self, renderers: Mapping[str, PolicyRenderer]) -> None:
        """`renderers` by policy, to read recorded answers again."""
        self._renderers = renderers
        self._waiting: dict[str, _AskedTool] = {}
        """Calls asked for by their tool-call id, in the order of asking."""
        self._recorded: dict[str, Transition] = {}
        """Answers by the tool-call ids they ask for; each is read where a result of its comes."""
        self._ours: set[str] = set()
        """All ids that the attempt's answers gave."""

    def add(
        self, asker: Transition, requests: Sequence[ToolRequest], messages: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """An answer of this process, what it asks for, and the messages that it was given to."""
        before = _digest(messages[-1]) if requests and messages else b""
        for request in requests:
            self._ours.add(request.id)
            self._waiting[request.id] = _AskedTool(request, asker, before)

    def restore(self, calls: Iterable[CallRecord]) -> None:
        """Take over what the store has, as after a restart of the server."""
        for call in calls:
            self._ours.update(call.transition.tool_call_ids)
            self._recorded.update((call_id, call.transition) for call_id in call.transition.tool_call_ids)

    def find(self, request: CallRequest, parent_id: str | None = None) -> list[ShownTool]:
        """Tools that are waited for, with results in the request. `parent_id`: the call that it goes on from."""
        if not self._waiting and not self._recorded:
            return []
        results: dict[str, Mapping[str, Any]] = {}
        has_others = False
        for message in request.messages:
            if message["role"] != "tool":
                continue
            call_id = message.get("tool_call_id")
            if call_id in self._recorded:
                self._read(self._recorded[call_id])
            if call_id in self._waiting:
                results.setdefault(call_id, message)
            elif call_id not in self._ours:
                has_others = True
        if has_others:
            results |= self._by_name(request.messages, parent_id, results)
        waited = (call_id for call_id in self._waiting if call_id in results)
        return [self._shown(call_id, results[call_id], request.failed_tools) for call_id in waited]

    def settle(self, shown: Iterable[ShownTool]) -> None:
        """Forget those that are recorded now."""
        for tool in shown:
            self._waiting.pop(tool.request.id, None)

    def _shown(self, call_id: str, message: Mapping[str, Any], failed: Mapping[str, str]) -> ShownTool:
        asked, sent_id = self._waiting[call_id], message.get("tool_call_id")
        result = failed.get(sent_id or "", message.get("content") or "")
        return ShownTool(request=asked.request, asker=asked.asker, result=result, is_failed=sent_id in failed)

    def _by_name(
        self, messages: Sequence[Mapping[str, Any]], parent_id: str | None, results: Mapping[str, Any]
    ) -> dict[str, Mapping[str, Any]]:
        """Results of the last answer that came without our ids: by name and arguments of their call, in order."""
        # A client with ids of its own, or with none (`t?`), goes on from the answer that asked for call_1 and call_2:
        #     assistant [tA: search {"q": 1}, tB: search {"q": 2}]      tool tB "two"      tool tA "one"
        #     tB is search {"q": 2}, as is call_2; tA is search {"q": 1}, as is call_1
        last = next((place for place in reversed(range(len(messages))) if messages[place].get("tool_calls")), None)
        if last is None:
            return {}
        for answer in [answer for answer in self._recorded.values() if parent_id in (None, answer.id)]:
            self._read(answer)
        left = ((call_id, asked) for call_id, asked in self._waiting.items() if call_id not in results)
        waiting = {call_id: asked for call_id, asked in left if parent_id in (None, asked.asker.id)}
        # Another conversation of the attempt may ask for the same, and an example in the prompt may show it.
        before = _digest(messages[last - 1]) if last else b""
        joined: dict[str, Mapping[str, Any]] = {}
        following = [message for message in messages[last + 1 :] if message.get("tool_call_id") not in self._ours]
        for message, (name, arguments) in _answered(messages[last]["tool_calls"], following):
            named = [call_id for call_id, asked in waiting.items() if asked.request.name == name]
            alike = [call_id for call_id in named if canonical(waiting[call_id].request.arguments) == arguments]
            if parent_id is None:
                alike = [call_id for call_id in alike if waiting[call_id].before in (b"", before)]
            if alike or (parent_id is not None and named):
                call_id = (alike or named)[0]
                del waiting[call_id]
                joined[call_id] = message
        return joined

    def _read(self, answer: Transition) -> None:
        """Parse a recorded answer for the tools that it asks for."""
        for call_id in answer.tool_call_ids:
            self._recorded.pop(call_id, None)
        renderer = self._renderers.get(answer.policy)
        if renderer is not None:
            self.add(answer, read_recorded(renderer, answer).tool_calls[: len(answer.tool_call_ids)])


def _digest(message: Mapping[str, Any]) -> bytes:
    """Role and text: ids differ where a client has its own."""
    text = f"{message['role']}\n{message.get('content') or ''}".strip()
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _answered(
    calls: Sequence[Mapping[str, Any]], following: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], tuple[str, str]]]:
    """Each result with name and arguments of its call: by the client's own id, else by name, else in order."""
    left = list(calls)
    for message in following:
        if message["role"] != "tool" or not left:
            continue
        call_id, name = message.get("tool_call_id"), message.get("name")
        if call_id is not None:
            same = [call for call in left if call.get("id") == call_id]
        else:
            same = [call for call in left if name in (None, call["function"]["name"])]
        if same:
            left.remove(same[0])
            name, arguments = same[0]["function"]["name"], same[0]["function"]["arguments"]
            yield message, (name, canonical(arguments if isinstance(arguments, str) else json.dumps(arguments)))
