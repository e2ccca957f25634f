"""Calls that a provider answered, imported or forwarded, as a conversation: messages by role, each shown once.

call 0   system, user │ assistant, tool look_up(…) → its result, by the id of the tool call
call 1   (3 messages as in call 0) │ assistant
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lightningrl.sanitize import as_text
from lightningrl.types import OtherCall, OtherCallKind, Task, ToolCall
from lightningrl_runs.foreign import Message, dict_of
from lightningrl_runs.foreign.bodies import join_events, read_request, read_response
from lightningrl_runs.foreign.messages import digest_text, read_messages
from lightningrl_runs.trace import Trace

__all__ = [
    "Exchange",
    "Speech",
    "answer_in",
    "ask_as_agent",
    "final_text",
    "is_chat",
    "question_of",
    "read_exchange",
    "read_exchanges",
]

_EARLIER: Final = 64
"""Calls that a history is compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speech:
    """A message, or the thoughts before it."""

    who: str
    text: str
    is_answer: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Exchange:
    """A call, with what it adds to those before it."""

    index: int
    """Position among the rollout's exchanges."""
    call: OtherCall
    id: str
    """Name of the answer by its provider or trace; empty = it has none."""
    speeches: tuple[Speech, ...]
    seen: int = 0
    """Messages of its prompt that the call `seen_in` has, too."""
    seen_in: int | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    """Tools that it asked for, each with its result."""

    @property
    def has_failed(self) -> bool:
        return self.call.code is not None or any(tool.status.is_failure for tool in self.tool_calls)


def is_chat(call: OtherCall) -> bool:
    """True for a forwarded call of Chat Completions, Responses or Messages."""
    name = call.path.rstrip("/").rpartition("/")[2]
    return call.kind is OtherCallKind.FORWARDED and name in ("completions", "responses", "messages")


def read_exchange(call: OtherCall, notes: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what a call asked and what was answered, streamed or not, as fields: `messages`, `tools`; `answer`."""
    body = join_events(call.answer) if isinstance(call.answer, str) else call.answer
    return read_request(call.request, notes), read_response(body, notes)


def read_exchanges(trace: Trace) -> tuple[Exchange, ...]:
    """Read the conversation of a rollout's forwarded calls, without those whose messages were too large to be kept."""
    others = [*trace.other_calls, *(other for call in trace.calls for other in call.other_calls)]
    tools = [*trace.tool_calls, *(tool for call in trace.calls for tool in call.tool_calls)]
    records = {tool.id: tool for tool in tools}
    read: list[tuple[OtherCall, list[Message], Message]] = []
    for call in filter(is_chat, others):
        asked, answered = read_exchange(call, set())
        prompt, answer = asked.get("messages") or [], answered.get("answer") or {}
        is_whole = prompt or answer or call.code is not None or "grade" in dict_of(call.answer)
        read += [(call, prompt, answer)] if is_whole else []
    results = {
        message["tool_call_id"]: message.get("content") or ""
        for _, prompt, _ in reversed(read)
        for message in prompt
        if message["role"] == "tool"
    }
    exchanges: list[Exchange] = []
    rows: list[list[bytes]] = []
    joined: set[str] = set()
    for index, (call, prompt, answer) in enumerate(read):
        row = [*map(_digest, prompt)]
        seen, seen_in = _most_alike(row, rows)
        new = [message for message in prompt[seen:] if message.get("tool_call_id", "") not in joined]
        wanted = [_tool_call(request, records, results) for request in answer.get("tool_calls") or ()]
        joined |= {tool.id for tool in wanted if tool.id}
        exchanges.append(
            Exchange(
                index=index,
                call=call,
                id=str(dict_of(call.answer).get("id") or ""),
                speeches=(*_speeches(new), *_speeches([answer] if answer else [], is_answer=True)),
                seen=seen,
                seen_in=seen_in,
                tool_calls=tuple(wanted),
            )
        )
        rows.append([*row, _digest(answer)] if answer else row)
    return tuple(exchanges)


def final_text(output: Any) -> str:
    """Return what an agent answered: of a state with messages, as a graph returns it, the last one's text."""
    messages = read_messages(output, set()) if _is_state(output) else None
    text = messages[-1].get("content") if messages else None
    return text if isinstance(text, str) and text else as_text(output)


def question_of(state: Any) -> str | None:
    """Return the question in a state of messages: a user's only text, with nothing else in the state. None = there is
    no such text."""
    if not _is_state(state) or (isinstance(state, dict) and any(state[key] for key in state if key != "messages")):
        return None
    messages = [message for message in read_messages(state, set()) or () if message["role"] != "system"]
    text = messages[0].get("content") if len(messages) == 1 and messages[0]["role"] == "user" else None
    return text if isinstance(text, str) and text else None


def ask_as_agent(task: Task) -> Task:
    """Return an imported task as its agent's own function takes it: in place of a state of messages, the question."""
    question = question_of(task.input)
    return task if question is None else replace(task, input=question)


def answer_in(output: Any) -> Any:
    """Return what an agent's own function answered: of a state of messages the last one's text."""
    return final_text(output) if _is_state(output) else output


def _is_state(value: Any) -> bool:
    if isinstance(value, dict):
        return isinstance(value.get("messages"), list)
    is_list = isinstance(value, list) and bool(value)
    return is_list and all({"role", "type"} & dict_of(item).keys() and len(item) > 1 for item in value)


def _speeches(messages: Sequence[Message], *, is_answer: bool = False) -> list[Speech]:
    speeches: list[Speech] = []
    for message in messages:
        who = "tool result" if message["role"] == "tool" else str(message["role"])
        calls = () if is_answer else message.get("tool_calls") or ()
        written = "\n".join(f"{call['function']['name']}({call['function']['arguments']})" for call in calls)
        thoughts = message.get("reasoning_content")
        parts = {f"{who} reasoning": thoughts, who: message.get("content"), "tool call": written}
        speeches += [Speech(who=name, text=text, is_answer=is_answer) for name, text in parts.items() if text]
    return speeches


def _tool_call(request: Mapping[str, Any], records: Mapping[str, ToolCall], results: Mapping[str, str]) -> ToolCall:
    """A tool's call as the model asked for it, with the result that was recorded or told to a later call."""
    name, arguments = request["function"]["name"], request["function"]["arguments"]
    record = records.get(request["id"]) or ToolCall(id=request["id"], name=name)
    return replace(record, arguments=arguments, result=record.result or results.get(request["id"], ""))


def _digest(message: Message) -> bytes:
    return hashlib.blake2b(digest_text([message]).encode("utf-8", "replace"), digest_size=16).digest()


def _most_alike(row: Sequence[bytes], rows: Sequence[Sequence[bytes]]) -> tuple[int, int | None]:
    """Return how many messages stand at the beginning of an earlier call, and of which."""
    best: tuple[int, int | None] = (0, None)
    for place, earlier in [*enumerate(rows)][-_EARLIER:]:
        pairs = zip(row, earlier, strict=False)
        alike = next((number for number, (own, other) in enumerate(pairs) if own != other), min(len(row), len(earlier)))
        if alike > best[0]:
            best = alike, place
    return best
