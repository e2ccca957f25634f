"""Chat messages of an own run's calls, read from the recorded tokens and held against the gateway's renderer.

    call 0   system, user                        │ answer      the whole prompt is read, and its tools
    call 1   (call 0's messages and answer) tool │ answer      only what it adds
             └► parse_chat_request ─► render ─► the recorded ids?  exact | same text | rerendered

What a template writes of its own accord (a default system message, the text around tools and results) is learned by
rendering a probe with sentinels. A reading that is wrong does not render back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightningrl.types import FinishReason, ToolCall, Trajectory, Transition
from lightningrl_runs.segments import SegmentKind, SegmentReader
from lightningrl_server.gateway.dialects.chat import parse_chat_request
from lightningrl_server.gateway.prompt import with_tool_names
from lightningrl_server.gateway.request import Refusal
from lightningrl_server.rendering.completion import Choice, CompletionText, read_recorded
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_traces.curation.rules import ChatCall, LeftOut, Likeness, UnreadCall
from lightningrl_traces.curation.tools_in_prompts import find_tools
from lightningrl_traces.records import Message

__all__ = ["PromptReader", "render_prompt"]

_K = SegmentKind
_SPOKEN: Final = (_K.ASSISTANT, _K.REASONING, _K.TOOL_CALL)
_ROLES: Final = {_K.SYSTEM: "system", _K.USER: "user", _K.TOOL_RESULT: "tool"}
_SENTINELS: Final = tuple(f"lightningrl{name}probe" for name in ("system", "user", "first", "second"))
_BEGINNINGS: Final = (("user",), ("system", "user"), ("system",))
"""Roles of a prompt's messages, the likeliest of those without an assistant's turn."""
_GOINGS_ON: Final = (("user",), ("system",), ("user", "user"))
"""Roles of the messages that come after an answer, beside results of tools."""
_MOST_PROBES: Final = 64
_MOST_CALLS: Final = 32
"""Tool calls of an answer that the agent itself put into its history."""
_OPENS: Final = ("<think>", "<tool_call>", "[TOOL_CALLS]", "<｜tool▁calls▁begin｜>")
"""Tokens that begin what an assistant says."""


def render_prompt(
    renderer: PolicyRenderer, messages: Sequence[Message], tools: Sequence[Message] = ()
) -> tuple[int, ...]:
    """Return the prompt's ids, as the gateway makes them of a request with these messages and tools. Raises ValueError
    or Refusal where it would not take them."""
    body: dict[str, Any] = {"model": renderer.name, "messages": list(messages)}
    if tools:
        body["tools"] = list(tools)
    call = parse_chat_request(json.dumps(body).encode(), max_choices=1).call
    return renderer.render(with_tool_names(call.messages), call.tools)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Around:
    """Text that a template writes around the messages of a kind, within their segment."""

    before: str = ""
    after: str = ""
    between: str | None = None
    """Between two of them in one segment; None = each has a segment of its own."""

    def strip(self, text: str) -> list[str]:
        """Return the messages in a segment's text."""
        text = text.removeprefix(self.before).removesuffix(self.after)
        return text.split(self.between) if self.between else [text]


@dataclass(frozen=True, slots=True)
class _Conversation:
    """Messages of a row of tokens, and how many tokens it has."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    split: int = 0
    """First token of the answer."""
    end: int = 0


class PromptReader:
    """Reads the calls of one policy; trajectories come one after the other."""

    def __init__(self, renderer: PolicyRenderer, segments: SegmentReader) -> None:
        self._renderer = renderer
        self._segments = segments
        self._probes: dict[str, Mapping[SegmentKind, _Around]] = {}
        self._defaults: dict[str, str | None] = {}
        self._written: dict[str, str | None] = {}
        """Prompts of sentinels, by roles and tools; None where the template takes none."""
        added = renderer.tokenizer.added_tokens_decoder
        self._marks = tuple(token.content for number, token in added.items() if _is_mark(token, number, renderer))

    def read(self, trajectory: Trajectory, calls: Sequence[Transition]) -> Iterator[ChatCall | UnreadCall]:
        """Read those of a trajectory's calls that are this policy's, in their order."""
        results = {tool.id: tool for tool in trajectory.tool_calls}
        rows: dict[str, _Conversation] = {}
        for call in calls:
            choice = read_recorded(self._renderer, call)
            answer = _as_message(choice)
            try:
                read, likeness = self._conversation(call, rows.get(call.parent_id or ""), results)
            except (ValueError, Refusal, KeyError, IndexError):  # what templates and messages have is any program's
                yield UnreadCall(id=call.id, reason=LeftOut.UNREADABLE)
                continue
            split, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.completion_ids)
            rows[call.id] = _Conversation((*read.messages, answer), read.tools, split, end)
            if problem := _problem(call, choice):
                yield UnreadCall(id=call.id, reason=problem)
                continue
            yield ChatCall(
                id=call.id,
                role=call.agent,
                prompt=read.messages,
                answer=answer,
                tools=read.tools,
                likeness=likeness,
                grade="rl-safe",
                rewards={**call.reported, **call.rewards},
            )

    def _conversation(
        self, call: Transition, parent: _Conversation | None, results: Mapping[str, ToolCall]
    ) -> tuple[_Conversation, Likeness]:
        """Return the messages whose rendering comes nearest to the recorded prompt. Raises ValueError."""
        ids = list(self._renderer.split_opening(call.prompt_ids.tolist())[0])
        best: tuple[_Conversation, Likeness] | None = None
        for read in self._whole(call, ids) if parent is None else self._added(ids, parent, results):
            likeness = self._likeness(read, ids)
            if likeness is Likeness.EXACT:
                return read, likeness
            if best is None or best[1] is Likeness.RERENDERED:
                best = read, likeness
        if best is None:
            raise ValueError("its markup does not say who speaks")
        return best

    def _likeness(self, read: _Conversation, ids: Sequence[int]) -> Likeness:
        try:
            rendered = render_prompt(self._renderer, read.messages, read.tools)
        except (ValueError, Refusal):
            return Likeness.RERENDERED
        if list(rendered) == list(ids):
            return Likeness.EXACT
        same = self._renderer.decode(rendered) == self._renderer.decode(ids)
        return Likeness.SAME_TEXT if same else Likeness.RERENDERED

    def _whole(self, call: Transition, ids: list[int]) -> Iterator[_Conversation]:
        """Yield readings of a prompt that goes on from no other call's."""
        offered: Mapping[str, Any] = json.loads(call.offered or "{}")
        text = self._renderer.decode(ids)
        for tools in find_tools(offered, text):
            for roles in _BEGINNINGS:
                asked = _sentinels(roles)
                contents = self._match(text, asked, tools)
                if contents is not None:
                    yield _Conversation(_filled(asked, contents), tools)
            messages = self._messages(ids, tools, kind=_K.MARKUP)
            systems = [message for message in messages[:1] if message["role"] == "system"]
            written = self._default_system(tools)
            if systems and written is not None and self._first_segment(ids) == written:
                yield _Conversation(tuple(messages[1:]), tools)
            if not systems or systems[0]["content"]:
                yield _Conversation(tuple(messages), tools)

    def _added(self, ids: list[int], parent: _Conversation, results: Mapping[str, ToolCall]) -> Iterator[_Conversation]:
        """Yield readings of a prompt that begins with another call's tokens."""
        asked: Sequence[Message] = parent.messages[-1].get("tool_calls") or ()
        suffix = self._renderer.decode(ids[parent.end :])
        for roles in (("tool",) * len(asked), *_GOINGS_ON) if asked else _GOINGS_ON:
            new = _sentinels(roles, asked)
            row = ids[: parent.split], ids[parent.split : parent.end]
            bridged = self._renderer.bridge(*row, with_tool_names(new, parent.messages), parent.tools or None)
            contents = None if bridged is None else self._unfill(suffix, self._renderer.decode(bridged), new)
            if contents is not None:
                added = _filled(new, contents)
                yield _Conversation((*parent.messages, *added), parent.tools)
                recorded = tuple(_with_result(message, results) for message in added)
                if recorded != added:
                    yield _Conversation((*parent.messages, *recorded), parent.tools)
        is_closed = ids[parent.end - 1] in self._renderer.stop_token_ids
        read = self._messages(
            ids[parent.end :],
            parent.tools,
            kind=_K.MARKUP if is_closed else _K.ASSISTANT,
            before=ids[max(0, parent.end - 8) : parent.end],
            asked=asked,
            results=results,
        )
        yield _Conversation((*parent.messages, *read), parent.tools)

    def _match(self, text: str, messages: Sequence[Message], tools: tuple[Message, ...]) -> list[str] | None:
        """Return the contents with which these messages are rendered to a prompt's text; None = there are none."""
        key = json.dumps([[message["role"] for message in messages], tools])
        if key not in self._written:
            if len(self._written) >= _MOST_PROBES:
                self._written.clear()
            try:
                self._written[key] = self._renderer.decode(render_prompt(self._renderer, messages, tools))
            except (ValueError, Refusal):
                self._written[key] = None
        written = self._written[key]
        return None if written is None else self._unfill(text, written, messages)

    def _unfill(self, text: str, written: str, messages: Sequence[Message]) -> list[str] | None:
        """Return the texts that stand where `written` has the messages' sentinels; None where it does not fit, or one
        of them holds markup."""
        sentinels = [message["content"] for message in messages]
        if any(written.count(sentinel) != 1 for sentinel in sentinels):
            return None
        pattern = re.escape(written)
        for sentinel in sentinels:
            pattern = pattern.replace(re.escape(sentinel), "(.*?)")
        match = re.fullmatch(pattern, text, re.DOTALL)
        if match is None or any(mark in content for content in match.groups() for mark in self._marks):
            return None
        order = sorted(range(len(sentinels)), key=lambda number: written.index(sentinels[number]))
        contents = dict(zip(order, match.groups(), strict=True))
        return [contents[number] for number in range(len(sentinels))]

    def _messages(
        self,
        ids: list[int],
        tools: tuple[Message, ...],
        *,
        kind: SegmentKind,
        before: Sequence[int] = (),
        asked: Sequence[Message] = (),
        results: Mapping[str, ToolCall] | None = None,
    ) -> list[Message]:
        """Read the messages in some tokens. `asked`: tool calls that the first results answer. Raises ValueError."""
        around = self._around(tools)
        waiting = list(asked)
        messages: list[Message] = []
        spoken = 0
        for segment in self._segments.read(ids, (), before=before, kind=kind)[0]:
            if segment.kind is _K.MARKUP or segment.start < spoken or not segment.text.strip():
                continue
            if segment.kind in _SPOKEN:
                turn = self._turn(ids, segment.start, tools, len(messages))
                if turn is None:
                    if segment.start == 0:  # the rest of an answer that has no close
                        continue
                    break  # it begins the answer
                message, spoken = turn
                messages.append(message)
                waiting = list(message.get("tool_calls") or ())
                continue
            if segment.kind not in _ROLES:
                raise ValueError("its markup does not say who speaks")
            for text in around.get(segment.kind, _Around()).strip(segment.text):
                if segment.kind is _K.TOOL_RESULT:
                    messages.append(_result(text, waiting, results or {}))
                else:
                    messages.append({"role": _ROLES[segment.kind], "content": text})
        return messages

    def _turn(self, ids: list[int], start: int, tools: tuple[Message, ...], number: int) -> tuple[Message, int] | None:
        """Read an assistant's turn around `start`, and the position after it; None where it has no end."""
        stops = self._renderer.stop_token_ids
        end = next((place for place in range(start, len(ids)) if ids[place] in stops), None)
        if end is None:
            return None
        while start and self._renderer.decode(ids[start - 1 : start]).strip() in _OPENS:
            start -= 1
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        call_ids = [f"call_{number}_{place}" for place in range(_MOST_CALLS)]
        text = CompletionText(
            self._renderer, ids[:start], allow_tools=bool(tools), schemas=schemas, tool_call_ids=call_ids
        )
        text.push(ids[start : end + 1], [0.0] * (end + 1 - start), stream=False)
        return _as_message(text.finish(FinishReason.STOP)[0]), end + 1

    def _around(self, tools: tuple[Message, ...]) -> Mapping[SegmentKind, _Around]:
        key = json.dumps(tools)
        if key not in self._probes:
            if len(self._probes) >= _MOST_PROBES:
                self._probes.clear()
            self._probes[key] = self._probe(tools)
        return self._probes[key]

    def _probe(self, tools: tuple[Message, ...]) -> Mapping[SegmentKind, _Around]:
        """Learn what stands around messages by a conversation of sentinels."""
        system, user, first, second = _SENTINELS
        spoken: list[Message] = [{"role": "user", "content": user}]
        if tools:
            name = tools[0]["function"]["name"]
            asked = [
                {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": "{}"}}
                for place in range(2)
            ]
            spoken.append({"role": "assistant", "content": "", "tool_calls": asked})
            spoken += [
                {"role": "tool", "tool_call_id": f"call_{place}", "content": text}
                for place, text in enumerate((first, second))
            ]
        systems: list[Message] = [{"role": "system", "content": system}]
        around: dict[SegmentKind, _Around] = {}
        for messages in (systems + spoken, spoken, systems + spoken[:1], spoken[:1]):
            try:
                ids = render_prompt(self._renderer, messages, tools)
            except (ValueError, Refusal):
                continue
            for segment in self._segments.read(ids, (), kind=_K.MARKUP)[0]:
                marks = [mark for mark in _SENTINELS if mark in segment.text]
                if marks and segment.kind not in around:
                    head, _, rest = segment.text.partition(marks[0])
                    between, _, tail = rest.rpartition(marks[-1])
                    is_several = len(marks) > 1
                    around[segment.kind] = _Around(
                        before=head, after=tail if is_several else rest, between=between if is_several else None
                    )
        return around

    def _default_system(self, tools: tuple[Message, ...]) -> str | None:
        """Return the system segment that the template writes without a system message; None = it writes none."""
        key = json.dumps(tools)
        if key not in self._defaults:
            if len(self._defaults) >= _MOST_PROBES:
                self._defaults.clear()
            try:
                ids = render_prompt(self._renderer, [{"role": "user", "content": _SENTINELS[1]}], tools)
            except (ValueError, Refusal):
                ids = ()
            self._defaults[key] = self._first_segment(ids)
        return self._defaults[key]

    def _first_segment(self, ids: Sequence[int]) -> str | None:
        """Return the text of the system segment that a prompt begins with; None = it begins otherwise."""
        segments = self._segments.read(ids, (), kind=_K.MARKUP)[0]
        first = next((segment for segment in segments if segment.kind is not _K.MARKUP), None)
        return first.text if first is not None and first.kind is _K.SYSTEM else None


def _sentinels(roles: Sequence[str], asked: Sequence[Message] = ()) -> list[Message]:
    """Return messages of these roles that say something that nobody says; tools answer the calls `asked`, in order."""
    messages: list[Message] = []
    for number, role in enumerate(roles):
        message: Message = {"role": role, "content": f"lightningrl{number}sentinel"}
        if role == "tool":
            message |= {"tool_call_id": asked[number]["id"], "name": asked[number]["function"]["name"]}
        messages.append(message)
    return messages


def _filled(messages: Sequence[Message], contents: Sequence[str]) -> tuple[Message, ...]:
    return tuple({**message, "content": content} for message, content in zip(messages, contents, strict=True))


def _is_mark(token: Any, number: int, renderer: PolicyRenderer) -> bool:
    """True for a token that no message holds: it begins or ends a turn."""
    return bool(token.special) or number in renderer.stop_token_ids


def _as_message(choice: Choice) -> Message:
    """Return an answer as OpenAI's chat API has it."""
    message: Message = {"role": "assistant", "content": choice.content}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ]
    return message


def _problem(call: Transition, choice: Choice) -> LeftOut | None:
    if call.replayed_from is not None:
        return LeftOut.REPLAYED
    if call.finish_reason is not FinishReason.STOP:
        return LeftOut.CUT
    if call.malformed or (not choice.content.strip() and not choice.tool_calls):
        return LeftOut.MALFORMED
    return None


def _result(text: str, waiting: list[Message], results: Mapping[str, ToolCall]) -> Message:
    """Return the message of a tool's result: it answers the waiting call that has this result, else the first."""
    if not waiting:
        raise ValueError("a tool's result answers no call")
    same = (place for place, call in enumerate(waiting) if (tool := results.get(call["id"])) and tool.result == text)
    call = waiting.pop(next(same, 0))
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}


def _with_result(message: Message, results: Mapping[str, ToolCall]) -> Message:
    """Return a tool's message with the result that the store has."""
    tool = results.get(message.get("tool_call_id") or "")
    return message if tool is None else {**message, "content": tool.result}
