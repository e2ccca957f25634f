"""A rollout: its calls as a conversation or as tokens, beside the tree of its calls.

rollouts/ID                         who said what, tools, judges, rewards, why nothing is learned from a call
rollouts/ID?view=tokens&call=2      a call's sampled tokens: log-probability, advantage, version, mask
rollouts/ID/text?part=task          the whole of a long text
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from lightningrl.errors import RunFolderError
from lightningrl.sanitize import as_text
from lightningrl.types import OtherCall, ToolCall
from lightningrl_runs.dialogue import Exchange, final_text, question_of, read_exchanges
from lightningrl_runs.origin import RunOrigin
from lightningrl_runs.queries.rollout_rows import Neighbours
from lightningrl_runs.reader import read_group
from lightningrl_runs.segments import Segment, SegmentKind
from lightningrl_runs.trace import CallTrace, LineageNode, Trace, Window, read_lineage
from lightningrl_runs.why_no_gradient import NoGradient, Token, explain_calls, explain_rollout
from lightningrl_viewer.page import Budget, LongText, NoSuchPage, Page, PageRequest, PageView, ViewedRun

__all__ = ["PAGE", "TEXT"]

CALLS: Final = 20
TOKENS: Final = 400
"""Calls and tokens of a page."""
PAGE_BYTES: Final = 110_000
"""Bytes of texts in HTML; tables and the tree come on top."""
READ_TOKENS: Final = 8_000
"""Tokens that a page of calls makes text of: more than it has room for."""
PARTS: Final = 60
"""Parts of a call that are shown: a policy may write as many as it has tokens."""
TEXT_BYTES: Final = 150_000
_MOST_PROMPT, _MOST_SAMPLED, _MOST_SHORT = 2_000, 4_000, 600
"""Bytes of a part of a prompt, of what was sampled, of anything else."""
_ROW_PART: Final = re.compile(r"call-(\d{1,9})-(\d{1,9})-(\d{1,9})")
"""A text's name: the call, its first token in the row, one after its last."""
_LEVELS: Final = 3
"""Shades of a colour."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Neighbouring tokens of one speaker."""

    who: str
    is_sampled: bool
    text: LongText
    unread: int
    """Tokens of which no text was made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Item:
    """A tool's call, or another call, with its texts by name; None = it has none of that name."""

    call: ToolCall | OtherCall
    texts: Mapping[str, LongText | None]
    talk: _Talk | None = None
    """Another call's messages, where they can be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Talk:
    """A call that a provider answered, as the page shows it."""

    own: Exchange
    parts: Sequence[_Part]
    parts_left: int
    tools: Sequence[_Item]
    token_call: int | None
    """Index of the call with its tokens; None = the trace has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """A call as the page shows it."""

    trace: CallTrace
    parent: int | None
    seen_in: int | None
    parts: Sequence[_Part]
    parts_left: int
    """Parts that are not shown, of the middle."""
    tools: Sequence[_Item]
    others: Sequence[_Item]
    advantage: tuple[float, float, float] | None
    """Mean, least, greatest; None = nobody scored it."""
    logprob: float
    reason: NoGradient | None


async def show(viewed: ViewedRun, request: PageRequest) -> PageView:
    current = request.number("call")
    first = max(0, current or 0) // CALLS * CALLS
    as_tokens = request.query.get("view") == "tokens"
    window = Window(first=first, calls=0 if as_tokens else CALLS, tokens=READ_TOKENS)
    trace, reasons, whole = await _read(viewed, request.path["rollout_id"], window)
    rollout, nodes, is_import = trace.rollout, read_lineage(trace), viewed.is_import
    as_tokens = as_tokens and bool(trace.calls)
    exchanges = await asyncio.to_thread(read_exchanges, trace)
    alone = exchanges if not as_tokens and (is_import or not trace.calls) else ()
    count = len(alone or trace.calls)
    if current is not None and not 0 <= current < max(1, count):
        raise NoSuchPage(f"rollout {rollout.spec.id!r} has {count} calls, numbered from 0; there is no call {current}")
    budget = Budget(PAGE_BYTES)
    values: dict[str, Any] = {
        "trace": trace,
        "rollout": rollout,
        "reason": whole,
        "nodes": nodes[:300],
        "nodes_left": max(0, len(nodes) - 300),
        "current": current,
        "as_tokens": as_tokens,
        "task": budget.truncate("task", _asked(trace), _MOST_SHORT),
        "expected": _shorten("expected", rollout.spec.task.answer, budget),
        "attempts": [
            (attempt, _shorten(f"error-{attempt.attempt}", attempt.error or None, budget, 2 * _MOST_SHORT))
            for attempt in rollout.attempts[-20:]
        ],
        "output": _output(trace, budget),
        "steps": _steps(count, alone or nodes, current),
        "exchanges": alone,
        "is_import": is_import,
        "unread": sorted(
            policy
            for policy in {call.call.policy for call in trace.calls}
            if not alone and not viewed.run.has_text(policy)
        ),
        "around": await viewed.run.queries.neighbours(rollout.spec.id),
    }
    if as_tokens:
        call = trace.calls[current or 0]
        return PageView(
            "tokens.html",
            title=rollout.spec.id,
            **values,
            **_token_values(viewed, call, reasons[call.call.id], request),
        )
    page = () if alone else trace.calls[first : first + CALLS]
    talks = _Talks(trace, exchanges, budget, is_alone=bool(alone))
    return PageView(
        "rollout.html",
        title=rollout.spec.id,
        **values,
        calls=[_call(trace, call, reasons[call.call.id], budget, talks) for call in page],
        talks=[talks.show(exchange) for exchange in alone[first : first + CALLS]],
        first=first,
        more=first + CALLS if first + CALLS < count else None,
        before=_items(trace.other_calls, "before", budget, talks) if first == 0 else [],
        loose_tools=_items(trace.tool_calls, "loose", budget, talks),
    )


async def show_text(viewed: ViewedRun, request: PageRequest) -> PageView:
    """Show the whole of one text of a rollout, a page at a time."""
    trace = await viewed.run.trace(request.path["rollout_id"], Window(calls=0, tokens=0))
    name, start = request.query.get("part", ""), max(0, request.number("from") or 0)
    if row := _ROW_PART.fullmatch(name):
        text = await viewed.run.row_text(trace.rollout.spec.id, *map(int, row.groups()))
    else:
        text = next((text for part, text in _texts(trace) if part == name), None)
    if text is None:
        raise NoSuchPage(
            f"rollout {trace.rollout.spec.id!r} has no text {name[:40]!r}; go back to it and follow a link"
        )
    shown = Budget(TEXT_BYTES).truncate(name, text, TEXT_BYTES, start=start)
    place = re.match(r"(?:call|tool|other|talk)-(\d+)-", name)
    return PageView(
        "text.html",
        title=f"{trace.rollout.spec.id} · {name}",
        rollout=trace.rollout,
        name=name,
        found=shown,
        start=start,
        length=len(text),
        back=None if place is None else place[1],
        next=shown.end if shown.rest else None,
    )


async def _read(
    viewed: ViewedRun, rollout_id: str, window: Window
) -> tuple[Trace, Mapping[str, NoGradient | None], NoGradient | None]:
    trace = await viewed.run.trace(rollout_id, window)
    if viewed.is_import:
        return trace, dict.fromkeys(call.call.id for call in trace.calls), None
    try:
        recipe = (await viewed.cache.get("recipe", lambda: asyncio.to_thread(RunOrigin.read, viewed.folder))).recipe
    except RunFolderError:  # a store alone: nobody says what is trained
        return trace, dict.fromkeys(call.call.id for call in trace.calls), None
    group = await read_group(viewed.run, trace.rollout.spec.group_id)
    return trace, explain_calls(trace, group.rollouts, recipe), explain_rollout(trace, recipe)


# ------------------------------------------------------------------ texts, by the names that links have


def _texts(trace: Trace) -> Iterator[tuple[str, str]]:
    yield "task", _asked(trace)
    yield "expected", as_text(trace.rollout.spec.task.answer)
    for attempt in trace.rollout.attempts:
        yield f"error-{attempt.attempt}", attempt.error or ""
        yield f"output-{attempt.attempt}", final_text(attempt.output)
    items: dict[str, Sequence[ToolCall | OtherCall]] = {"loose": trace.tool_calls, "before": trace.other_calls}
    for call in trace.calls:
        items |= {f"tool-{call.call.index}": call.tool_calls, f"other-{call.call.index}": call.other_calls}
    for exchange in read_exchanges(trace):
        items[f"talk-{exchange.index}-tool"] = exchange.tool_calls
        yield from ((f"talk-{exchange.index}-{n}", speech.text) for n, speech in enumerate(exchange.speeches))
    for place, calls in items.items():
        for number, item in enumerate(calls):
            yield from ((f"{place}-{number}-{name}", as_text(value)) for name, value in _values(item).items())


def _asked(trace: Trace) -> str:
    asked = trace.rollout.spec.task.input
    return question_of(asked) or as_text(asked)


def _values(item: ToolCall | OtherCall) -> dict[str, Any]:
    if isinstance(item, ToolCall):
        return {"arguments": item.arguments, "result": item.result}
    return {"message": item.message, "request": item.request, "answer": item.answer}


# ------------------------------------------------------------------ what the page shows


class _Talks:
    """Conversations of a rollout, and which of its items are parts of them."""

    def __init__(self, trace: Trace, exchanges: Sequence[Exchange], budget: Budget, *, is_alone: bool) -> None:
        self._budget = budget
        self._calls = {call.call.id: call.call.index for call in trace.calls}
        self._talks = {id(exchange.call): exchange for exchange in exchanges}
        asked = {tool.id for exchange in exchanges for tool in exchange.tool_calls}
        self._hidden = {id(tool) for tool in trace.tool_calls if tool.id in asked}
        self._hidden |= self._talks.keys() if is_alone else set()

    def has(self, item: ToolCall | OtherCall) -> bool:
        """True for what a conversation shows in its place."""
        return id(item) in self._hidden

    def of(self, item: ToolCall | OtherCall) -> _Talk | None:
        """Show another call between those of a policy, where it has messages."""
        exchange = self._talks.get(id(item))
        return None if exchange is None else self.show(exchange)

    def show(self, exchange: Exchange) -> _Talk:
        place = f"talk-{exchange.index}"
        parts = [
            _Part(
                who=speech.who,
                is_sampled=speech.is_answer,
                text=self._budget.truncate(f"{place}-{number}", speech.text, _MOST_SAMPLED),
                unread=0,
            )
            for number, speech in _ends([*enumerate(exchange.speeches)])
        ]
        tools = _items(exchange.tool_calls, f"{place}-tool", self._budget)
        left = len(exchange.speeches) - len(parts)
        return _Talk(own=exchange, parts=parts, parts_left=left, tools=tools, token_call=self._calls.get(exchange.id))


def _ends(parts: Sequence[T]) -> Sequence[T]:
    """The first and the last of many."""
    return [*parts[: PARTS // 2], *parts[PARTS // 2 :][-PARTS // 2 :]]


def _call(trace: Trace, call: CallTrace, reason: NoGradient | None, budget: Budget, talks: _Talks) -> _Call:
    made, index = call.call, {earlier.call.id: earlier.call.index for earlier in trace.calls}
    segments = [segment for segment in call.segments if _is_shown(segment, call)]
    advantages = call.advantages
    return _Call(
        trace=call,
        parent=index.get(made.parent_id or ""),
        seen_in=index.get(call.seen_in or ""),
        parts=[_part(made.index, segment, budget) for segment in _ends(segments)],
        parts_left=max(0, len(segments) - PARTS),
        tools=_items(call.tool_calls, f"tool-{made.index}", budget, talks),
        others=_items(call.other_calls, f"other-{made.index}", budget, talks),
        advantage=None
        if advantages is None
        else (float(advantages.mean()), float(advantages.min()), float(advantages.max())),
        logprob=float(made.logprobs.sum()),
        reason=reason,
    )


def _is_shown(segment: Segment, call: CallTrace) -> bool:
    is_new = segment.start >= call.seen and segment.kind is not SegmentKind.MARKUP
    return is_new and (bool(segment.text.strip()) or _is_gap(segment))


def _is_gap(segment: Segment) -> bool:
    """True for tokens that were not read."""
    return segment.kind is SegmentKind.UNKNOWN and not segment.text


def _part(index: int, segment: Segment, budget: Budget) -> _Part:
    most = _MOST_SAMPLED if segment.is_sampled else _MOST_PROMPT
    return _Part(
        who="" if _is_gap(segment) else segment.kind.value.replace("_", " "),
        is_sampled=segment.is_sampled,
        text=budget.truncate(
            f"call-{index}-{segment.start}-{segment.end}", segment.text, most, start=_blank_lines(segment.text)
        ),
        unread=segment.end - segment.start if _is_gap(segment) else 0,
    )


def _blank_lines(text: str) -> int:
    """Count the line breaks that it begins with."""
    return len(text) - len(text.lstrip("\n"))


def _items(
    items: Sequence[ToolCall | OtherCall], place: str, budget: Budget, talks: _Talks | None = None
) -> list[_Item]:
    """Shorten the texts of the first fifty."""
    most = {"result": 2 * _MOST_SHORT}
    return [
        _Item(
            call=item,
            texts={
                name: _shorten(f"{place}-{number}-{name}", value, budget, most.get(name, _MOST_SHORT))
                for name, value in _values(item).items()
            },
            talk=None if talks is None else talks.of(item),
        )
        for number, item in enumerate(items[:50])
        if talks is None or not talks.has(item)
    ]


def _shorten(name: str, value: Any, budget: Budget, most: int = _MOST_SHORT) -> LongText | None:
    return None if value is None else budget.truncate(name, as_text(value), most)


def _output(trace: Trace, budget: Budget) -> LongText | None:
    shown = trace.shown_attempt
    if shown is None or shown.outcome is None:
        return None
    return budget.truncate(f"output-{shown.attempt}", final_text(shown.output), 2 * _MOST_SHORT)


def _steps(count: int, calls: Sequence[LineageNode | Exchange], current: int | None) -> Neighbours[int]:
    """Calls that the keys go to, by index."""
    here = -1 if current is None else current
    failed = sorted(call.index for call in calls if call.has_failed)
    return Neighbours(
        before=here - 1 if here > 0 else None,
        after=here + 1 if here + 1 < count else None,
        failed_before=next((index for index in reversed(failed) if index < here), None),
        failed_after=next((index for index in failed if index > here), None),
    )


def _token_values(
    viewed: ViewedRun, call: CallTrace, reason: NoGradient | None, request: PageRequest
) -> dict[str, object]:
    count = len(call.call.completion_ids)
    start = min(max(0, request.number("from") or 0), max(0, count - 1))
    colour = "advantage" if request.query.get("colour") == "advantage" else "logprob"
    tokens = viewed.run.tokens(call, reason, start=start, count=TOKENS)
    largest = float(abs(call.advantages).max(initial=0.0)) if call.advantages is not None else 0.0
    return {
        "call": call,
        "call_reason": reason,
        "tokens": [(token, _level(token, largest, colour)) for token in tokens],
        "colour": colour,
        "as_table": request.query.get("form") == "table",
        "start": start,
        "count": count,
        "next": start + TOKENS if start + TOKENS < count else None,
        "previous": max(0, start - TOKENS) if start else None,
    }


def _level(token: Token, largest: float, colour: str) -> int:
    """Return the shade of its colour, -3 to 3."""
    if colour == "logprob":
        return -min(_LEVELS, int(-token.logprob))
    if not token.advantage or not largest:
        return 0
    return max(1, round(_LEVELS * abs(token.advantage) / largest)) * (1 if token.advantage > 0 else -1)


PAGE = Page("rollouts/{rollout_id}", show)
TEXT = Page("rollouts/{rollout_id}/text", show_text)
