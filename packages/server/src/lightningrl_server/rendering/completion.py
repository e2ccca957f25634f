"""A completion as the agent reads it: content, reasoning and tool calls, parsed from its tokens, or as they come.

tokens ─► push ─► TextDelta…      what no later token can change: no half character, stop string, markup, trailing space
       ─► finish ─► Choice        the same text whether it was streamed or not
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict
from uuid import uuid4

from lightningrl.types import FinishReason, Transition
from lightningrl_server.rendering.arguments import is_utf8, parse_arguments, with_texts, write_arguments
from lightningrl_server.rendering.renderer import PROMPT_TAIL, PolicyRenderer

__all__ = ["Choice", "CompletionText", "ShownText", "TextDelta", "ToolReading", "ToolRequest", "read_recorded"]

_MARKS = ("<think>", "<tool_call>", "<｜DSML｜tool_calls>")
"""Markup that opens something else than content, and may come in several tokens."""
_MOST_MALFORMED = 8
"""Sentences on malformed calls of one answer."""
_PROBLEMS = {
    "invalid_json": "its JSON cannot be read",
    "unclosed_block": "the call has no end",
    "missing_name": "a call names no tool",
}
"""Problems by the parser's status."""


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A tool call that the model asks for."""

    id: str
    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """Text that became certain with some tokens."""

    index: int
    """The choice's."""
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[tuple[int, ToolRequest], ...] = ()
    """With their position among the choice's tool calls."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A whole completion."""

    index: int
    content: str
    reasoning: str
    tool_calls: tuple[ToolRequest, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    stopped_by: str | None = None
    """The stop string that ended the content."""
    malformed: tuple[str, ...] = ()
    """A sentence for each tool call that it begins and nobody can read."""

    def as_message(self, *, with_ids: bool = True) -> dict[str, Any]:
        """The message that the agent will send back in its history, in the form histories are compared in."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id if with_ids else None,
                    "type": "function",
                    "function": {"name": call.name, "arguments": parse_arguments(call.arguments)},
                }
                for call in self.tool_calls
            ]
        return message

    def as_delta(self) -> TextDelta:
        """All of it, as if it streamed now."""
        return TextDelta(
            index=self.index,
            content=self.content,
            reasoning=self.reasoning,
            tool_calls=tuple(enumerate(self.tool_calls)),
            token_ids=self.token_ids,
            logprobs=self.logprobs,
        )


@dataclass(slots=True, eq=False)
class ShownText:
    """The part of a streamed choice that was sent to the agent."""

    tokens: int = 0
    """Tokens sampled by then; the text of the last ones may be held back still."""
    content: int = 0
    """Characters."""
    reasoning: int = 0
    """Characters."""
    tool_calls: int = 0


class ToolReading(TypedDict):
    """The way in which tool calls are read from a completion."""

    allow_tools: bool
    """False leaves tool markup in the content."""
    schemas: Mapping[str, Any]
    """Schemas of the offered tools' arguments, by name: they say which of these are text."""
    parallel_tools: bool
    """False = only the first tool call is read."""


@dataclass(slots=True)
class _ParsedText:
    content: str
    reasoning: str
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    stopped_by: str | None = None
    malformed: list[str] = field(default_factory=list[str])


class CompletionText:
    """Turns one choice's tokens into text. Where the prompt ends in the beginning of a tool call that was forced on the
    policy, the text begins with it; tokens and logprobs are those that were sampled."""

    def __init__(
        self,
        renderer: PolicyRenderer,
        prompt_ids: Sequence[int],
        *,
        index: int = 0,
        allow_tools: bool,
        schemas: Mapping[str, Any] | None = None,
        parallel_tools: bool = True,
        stop: Sequence[str] = (),
        tool_call_ids: Sequence[str] = (),
    ) -> None:
        self._renderer = renderer
        self._prompt_ids, self._opening = renderer.split_opening(prompt_ids[-PROMPT_TAIL:])
        self._index = index
        self._allow_tools = allow_tools
        self._schemas = schemas or {}
        self._parallel_tools = parallel_tools
        self._stop = tuple(stop)
        self._call_ids = list(tool_call_ids)
        self._held_marks = (*self._stop, *_MARKS, *renderer.marks)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._is_plain = renderer.is_tagged and not self._opening
        self._text = ""
        self._prefix = 0
        self._decoded = 0
        self._next_parse = 0
        self._sent_content = ""
        self._sent_reasoning = 0
        self._sent_calls = 0
        self._sent_tokens = 0

    @property
    def token_count(self) -> int:
        """Tokens pushed so far."""
        return len(self._ids)

    def push(self, token_ids: Sequence[int], logprobs: Sequence[float], *, stream: bool) -> TextDelta | None:
        """Take the next tokens; returns what can be sent now."""
        self._ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        if not stream:
            return None
        if self._is_plain and not self._renderer.marker_ids.isdisjoint(token_ids):
            self._is_plain = False
        if self._is_plain:
            before, text = len(self._text), self._decode_more()
            self._is_plain = not self._renderer.opens_call(self._text, before, tools=self._allow_tools)
            if self._is_plain:
                return self._delta(_ParsedText(text, ""), final=False)
        if len(self._ids) < self._next_parse:
            return None
        # Parsing everything again each time stays near linear.
        self._next_parse = len(self._ids) + 1 + len(self._ids) // 32
        return self._delta(self._parse(self._ids, final=False), final=False)

    def finish(self, reason: FinishReason) -> tuple[Choice, TextDelta]:
        """The whole completion, and what of it was not sent yet."""
        parsed = self._parse(self._ids, final=True)
        if not parsed.content.startswith(self._sent_content):
            parsed.content = self._sent_content  # cannot be taken back; the history is what the agent saw
        choice = self._choice(parsed, len(self._ids), reason)
        return choice, self._delta(parsed, final=True) or TextDelta(index=self._index)

    def _choice(self, parsed: _ParsedText, count: int, reason: FinishReason) -> Choice:
        """The completion of the first `count` tokens."""
        return Choice(
            index=self._index,
            content=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=self._requests(parsed.calls),
            token_ids=tuple(self._ids[:count]),
            logprobs=tuple(self._logprobs[:count]),
            finish_reason=reason,
            stopped_by=parsed.stopped_by,
            malformed=() if reason is FinishReason.BROKEN_OFF else tuple(parsed.malformed[:_MOST_MALFORMED]),
        )

    def broken_off(self, shown: ShownText) -> Choice:
        """The completion of an agent that left the stream: the first tokens that say all it was shown, and no more."""
        content = self._sent_content[: shown.content]

        def says_it(count: int) -> bool:
            parsed = self._parse(self._ids[:count], final=True)
            if not parsed.content.startswith(content) or len(parsed.calls) < shown.tool_calls:
                return False
            return bool(content) or len(parsed.reasoning) >= shown.reasoning

        # Backwards in growing steps, as it is mostly the last token that matters: 9 8 6 2; then by halves.
        fewer, step = shown.tokens - 1, 1
        while fewer > 0 and says_it(fewer):
            fewer, step = fewer - step, step * 2
        least = max(fewer, 0) + 1
        count = least + bisect_left(range(least, shown.tokens), True, key=says_it)
        return self._choice(self._parse(self._ids[:count], final=True), count, FinishReason.BROKEN_OFF)

    def _decode_more(self) -> str:
        """Decode only the new tail, with a few tokens of context so that joined characters come out whole."""
        end = len(self._ids)
        while end > self._decoded and self._ids[end - 1] in self._renderer.stop_token_ids:
            end -= 1
        before = self._renderer.decode(self._ids[self._prefix : self._decoded])
        after = self._renderer.decode(self._ids[self._prefix : end])
        if len(after) > len(before) and not after.endswith("\ufffd"):
            self._text += after[len(before) :]
            self._prefix, self._decoded = self._decoded, end
        return self._text if self._renderer.is_default else self._text.strip()

    def _parse(self, ids: Sequence[int], *, final: bool) -> _ParsedText:
        """The text of the first tokens; `final`: no more will come."""
        # The answer of a policy that is offered `add`:
        #     <think>sum</think>See:\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"a":
        # </tool_call>
        #     reasoning "sum"   content "See:"   calls [add {"a": 1}]   leftovers ['<tool_call>{"a": </tool_call>']
        # In the end a leftover is text like any other: content 'See:\n<tool_call>{"a": </tool_call>'. Before it, it is
        # held back, as its rest may still come.
        spoken = [*self._opening, *ids]
        response = self._renderer.parse(spoken, self._prompt_ids, tools=self._allow_tools, final=final)
        # renderers strips a thought that has ended, and one within which a call ends, but not one that goes on
        content, reasoning = response.content, response.reasoning.strip()
        if not final and self._renderer.is_thinking(ids, self._prompt_ids):
            return _ParsedText("", reasoning)
        parsed = _ParsedText(content.lstrip("\n") if reasoning else content, reasoning)
        if self._allow_tools:
            parsed.malformed += [self._renderer.explain_malformed(*block) for block in response.problems]
        leftovers: list[str] = []
        for call in response.tool_calls:
            arguments = self._arguments(call)
            if arguments is None:
                leftovers.append(raw := self._raw(call, spoken))
                if self._allow_tools:
                    problem = _PROBLEMS.get(call.status.value, "it has another form")
                    parsed.malformed.append(self._renderer.explain_malformed(raw, problem))
            elif self._parallel_tools or not parsed.calls:
                parsed.calls.append((call.name, arguments))
        if parsed.calls:
            parsed.content = parsed.content.rstrip()
        if final and leftovers:
            parsed.content = "\n".join(part for part in (parsed.content, *leftovers) if part)
        cut = self._cut(parsed.content)
        if cut is not None:
            parsed.stopped_by = next(stop for stop in self._stop if parsed.content.startswith(stop, cut))
            parsed.content = parsed.content[:cut]
        return parsed

    def _arguments(self, call: Any) -> str | None:
        """A tool call's arguments as JSON text; None = what the policy said is no call that an agent could take."""
        if not self._allow_tools or call.status.value == "unclosed_block" or not isinstance(call.arguments, dict):
            return None
        if not isinstance(call.name, str) or not is_utf8(call.name):
            return None
        return write_arguments(with_texts(call.arguments, str(call.raw), self._schemas.get(call.name)))

    def _raw(self, call: Any, spoken: Sequence[int]) -> str:
        """The call's markup, as the policy wrote it."""
        if call.token_span is None:
            return str(call.raw)
        start, end = call.token_span
        stops = self._renderer.stop_token_ids
        return self._renderer.decode([token for token in spoken[start:end] if token not in stops])

    def _cut(self, content: str) -> int | None:
        """Where the first stop string begins; None = there is none."""
        if not self._stop:
            return None
        return min((place for place in map(content.find, self._stop) if place >= 0), default=None)

    def _requests(self, calls: list[tuple[str, str]]) -> tuple[ToolRequest, ...]:
        while len(self._call_ids) < len(calls):
            self._call_ids.append(f"call_{uuid4().hex[:24]}")
        return tuple(ToolRequest(self._call_ids[i], name, arguments) for i, (name, arguments) in enumerate(calls))

    def _delta(self, parsed: _ParsedText, *, final: bool) -> TextDelta | None:
        content, reasoning = parsed.content, parsed.reasoning
        if not final:
            content = "" if self._renderer.may_be_call(content) else self._settled(content)
            reasoning = reasoning.rstrip("\ufffd").rstrip()
        calls = self._requests(parsed.calls)
        new_content = content[len(self._sent_content) :]
        new_reasoning = reasoning[self._sent_reasoning :]
        new_calls = tuple(enumerate(calls))[self._sent_calls :]
        if not (new_content or new_reasoning or new_calls or final):
            return None
        self._sent_content += new_content
        self._sent_reasoning += len(new_reasoning)
        self._sent_calls = len(calls)
        tokens, logprobs = tuple(self._ids[self._sent_tokens :]), tuple(self._logprobs[self._sent_tokens :])
        self._sent_tokens = len(self._ids)
        return TextDelta(
            index=self._index,
            content=new_content,
            reasoning=new_reasoning,
            tool_calls=new_calls,
            token_ids=tokens,
            logprobs=logprobs,
        )

    def _settled(self, content: str) -> str:
        """Without what a later token may still take back."""
        cut = self._cut(content)
        if cut is not None:
            return content[:cut].rstrip() if cut else ""
        content = content.rstrip("\ufffd")
        keep = len(content)
        for mark in self._held_marks:
            for size in range(min(len(mark), len(content)), 0, -1):
                if content.endswith(mark[:size]):
                    keep = min(keep, len(content) - size)
                    break
        return content[:keep].rstrip()


def read_recorded(
    renderer: PolicyRenderer, transition: Transition, index: int = 0, reading: ToolReading | None = None
) -> Choice:
    """A recorded answer, read as the agent wants it now; None = as it was parsed for the agent then."""
    ids = transition.tool_call_ids
    if reading is None:
        schemas = json.loads(transition.offered or "{}")
        reading = {"allow_tools": bool(ids), "schemas": schemas, "parallel_tools": len(ids) != 1}
    tail, stop = transition.prompt_ids[-PROMPT_TAIL:].tolist(), transition.sampling.stop
    text = CompletionText(renderer, tail, index=index, stop=stop, tool_call_ids=ids, **reading)
    text.push(transition.completion_ids.tolist(), transition.logprobs.tolist(), stream=False)
    return text.finish(transition.finish_reason)[0]
