"""A rollout on a terminal: who spoke, what was new, which tokens were sampled and what they earned."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lightningrl.console import number
from lightningrl.sanitize import as_text, printable
from lightningrl.types import OtherCall, ToolCall
from lightningrl_runs.dialogue import Exchange, final_text, question_of, read_exchanges
from lightningrl_runs.reader import Group, StoredRun, read_group
from lightningrl_runs.segments import Segment, SegmentKind
from lightningrl_runs.trace import CallTrace, Trace, whole_row

__all__ = ["show_rollout"]

_LONGEST: Final = 900
"""Largest number of characters of a prompt's part that are shown, mostly of its end."""
_FRAME_LINES: Final = 12
"""Lines of an error that are shown below its first."""
_STYLES: Final = {1: "bold green", -1: "bold red", 0: "bold"}
"""Style of a sampled token, by the sign of its advantage."""


async def show_rollout(run: StoredRun, rollout_id: str, *, full: bool) -> RenderableType:
    """Draw a rollout; `full`: every call's whole row, markup included. Raises UnknownRecord naming rollouts near it
    where there is none."""
    trace = await run.trace(rollout_id)
    group = await read_group(run, trace.rollout.spec.group_id)
    names = {call.call.id: call.call.index for call in trace.calls}
    shows_policy = len({call.call.policy for call in trace.calls}) > 1
    exchanges = {id(exchange.call): exchange for exchange in read_exchanges(trace)}
    ids = {exchange.id for exchange in exchanges.values()}
    asked = {tool.id for exchange in exchanges.values() for tool in exchange.tool_calls}
    parts: list[RenderableType] = [_rows(_head(trace, group)), *_others(trace.other_calls, exchanges, full=full)]
    for call in trace.calls:
        if full or call.call.id not in ids:
            parts += [Text(), Rule(_title(call, names, shows_policy=shows_policy), align="left", style="blue")]
            parts.append(_rows(_call(trace, call, names, full=full)))
        parts += _others(call.other_calls, exchanges, full=full)
    parts += [Text(), Rule(Text("end"), align="left", style="blue"), _rows(_end(trace, asked))]
    if frames := _frames(trace, full=full):
        parts += [Text(), *frames]
    return Lines(*parts)


def _rows(rows: Iterator[tuple[str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True, min_width=len("tool result"))
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    return table


def _head(trace: Trace, group: Group) -> Iterator[tuple[str, Text]]:
    rollout = trace.rollout
    spec = rollout.spec
    yield "rollout", _join(spec.id, (rollout.outcome or rollout.state).value, f"reward {number(rollout.reward)}")
    yield "task", _join(spec.task.id, _short(question_of(spec.task.input) or spec.task.input))
    if spec.task.answer is not None:
        yield "answer", _plain(_short(spec.task.answer))
    trained = [] if rollout.trained_step is None else [f"trained in step {rollout.trained_step}"]
    yield "mode", _join(spec.mode.value, f"attempt {trace.attempt or 0} of {len(rollout.attempts)}", *trained)
    if len(group.rollouts) > 1:
        rewards = "no rewards" if group.mean is None else f"rewards {number(group.mean)} ± {number(group.std)}"
        yield "group", _join(spec.group_id, f"{len(group.rollouts)} rollouts", rewards)
    for attempt in rollout.attempts:
        if attempt.attempt != trace.attempt and attempt.outcome is not None:
            yield f"attempt {attempt.attempt}", _join(attempt.outcome.value, _first_line(attempt.error or ""))
        if attempt.results_refused:
            refused = f"{attempt.results_refused} further results that said something else"
            yield "refused", _join(refused, style="yellow")
        if attempt.left_threads:
            yield "left threads", _join(*attempt.left_threads, style="yellow")


def _title(call: CallTrace, names: dict[str, int], *, shows_policy: bool) -> Text:
    made = call.call
    words = [f"call {made.index}", made.agent or ("side call" if call.is_side else "no role")]
    words += [made.policy] if shows_policy else []
    words += [f"version {made.policy_version}", f"{call.prompt_tokens} → {len(made.completion_ids)} tokens"]
    words += [f"as recorded in {made.replayed_from}"] if made.replayed_from is not None else []
    if made.is_break:
        words.append("BREAK: history rendered anew")
    elif made.parent_id is not None:
        words.append(f"after call {names[made.parent_id]}")
    return _join(*words)


def _call(trace: Trace, call: CallTrace, names: dict[str, int], *, full: bool) -> Iterator[tuple[str, Text]]:
    segments = whole_row(trace, call) if full else [segment for segment in call.segments if segment.start >= call.seen]
    before = [segment for segment in call.segments if segment.end <= call.seen]
    if not full and any(segment.kind is not SegmentKind.MARKUP for segment in before):
        yield "…", Text(f"{call.seen} tokens as in call {names[call.seen_in or '']}", style="dim")
    for segment in segments:
        is_own = segment.start >= call.prompt_tokens
        text = _sampled(segment, call) if is_own else Text(_cut(segment.text, full=full), style="dim")
        if full or (segment.kind is not SegmentKind.MARKUP and text.plain.strip()):
            yield segment.kind.value.replace("_", " ") + (" ▸" if is_own else ""), _trimmed(text)
    for sentence in call.call.malformed:
        yield "malformed", _join(sentence, style="yellow")
    yield "credit", _credit(call)
    for tool in call.tool_calls:
        yield _tool(tool)


def _others(calls: Sequence[OtherCall], exchanges: Mapping[int, Exchange], *, full: bool) -> Iterator[RenderableType]:
    """Draw calls of others: those that can be read as conversations, the rest as lines."""
    if lines := [call for call in calls if id(call) not in exchanges]:
        yield _rows(map(_other, lines))
    for exchange in (exchanges[id(call)] for call in calls if id(call) in exchanges):
        call = exchange.call
        seen = [f"{exchange.seen} messages as in call {exchange.seen_in}"] if exchange.seen else []
        words = f"call {exchange.index}", call.agent or "no role", call.model, f"{call.duration_s:.1f} s", *seen
        yield from (Text(), Rule(_join(*words), align="left", style="blue"), _rows(_exchange(exchange, full=full)))


def _exchange(exchange: Exchange, *, full: bool) -> Iterator[tuple[str, Text]]:
    for speech in exchange.speeches:
        style = "bold" if speech.is_answer else "dim"
        yield speech.who + (" ▸" if speech.is_answer else ""), Text(_cut(speech.text, full=full), style=style)
    yield from map(_tool, exchange.tool_calls)
    if exchange.call.code is not None:
        yield _other(exchange.call)


def _sampled(segment: Segment, call: CallTrace) -> Text:
    """Each token in the colour of its advantage's sign."""
    advantages = np.zeros(len(call.call.completion_ids)) if call.advantages is None else call.advantages
    signs = np.sign(advantages[segment.start - call.prompt_tokens :]).astype(int).tolist()
    text = Text()
    for sign, tokens in groupby(zip(signs, segment.pieces, strict=False), key=lambda token: token[0]):
        text.append(printable("".join(piece for _, piece in tokens)), style=_STYLES[sign])
    return text


def _credit(call: CallTrace) -> Text:
    made, advantages = call.call, call.advantages
    if not made.trainable:
        credit = Text("policy not trained" if made.replayed_from is None else "not sampled here, so not trained")
    elif advantages is None:
        credit = Text("not scored")
    else:
        low, high, mean = float(advantages.min()), float(advantages.max()), float(advantages.mean())
        sentence = f"advantage {mean:+.3f}" + ("" if low == high else f" ({low:+.3f} to {high:+.3f})")
        credit = Text(sentence, style=_STYLES[int(np.sign(mean))])
    rewards = [*_named(made.rewards), *_named(made.reported, "reported ")]
    logprob = f"logprob {float(made.logprobs.sum()):.2f}"
    return credit.append_text(_join("", *rewards, logprob, made.finish_reason.value, f"{made.duration_s:.1f} s"))


def _tool(tool: ToolCall) -> tuple[str, Text]:
    failed = "red" if tool.status.is_failure else ""
    text = _join(f"{tool.name}({_short(tool.arguments)})", *([f"by {tool.agent}"] if tool.agent else []))
    text.append(f"\n→ {tool.status.value}", style=failed)
    if tool.contradicted:
        text.append(f" (contradicted {tool.contradicted} times; the worst stands)", style="yellow")
    text.append_text(_plain(f" {_short(tool.error_type or '')} {_short(tool.result)}".replace("  ", " ").rstrip()))
    return "tool", text


def _other(call: OtherCall) -> tuple[str, Text]:
    answered = " ".join(str(part) for part in (call.status, call.code, call.message) if part not in (None, ""))
    words = [f"{call.path} {call.model}".strip(), call.agent or "no role", answered or "not seen"]
    return call.kind.value, _join(*words, style="yellow")


def _end(trace: Trace, asked: Collection[str]) -> Iterator[tuple[str, Text]]:
    rollout = trace.rollout
    shown = trace.shown_attempt
    yield from (_tool(tool) for tool in trace.tool_calls if tool.id not in asked)
    seconds = [] if shown is None else [f"{shown.duration_s:.1f} s"]
    yield "outcome", _join((rollout.outcome or rollout.state).value, *seconds)
    if shown is not None:
        if shown.output is not None or not shown.error:
            yield "output", _plain(_short(final_text(shown.output)))
        if shown.error:
            yield "error", Text(printable(_first_line(shown.error)), style="red")
    yield "reward", _join(number(rollout.reward), *_named(trace.rewards))
    if trace.reported:
        yield "reported", _join(*_named(trace.reported))
    if trace.unrewarded:
        yield "failed", _plain(_short(trace.unrewarded))


def _frames(trace: Trace, *, full: bool) -> list[Text]:
    """Return all but the first line of the error, its end where it is long: a traceback's innermost frames.

    Over the whole width, as it was written.
    """
    shown = trace.shown_attempt
    lines = [] if shown is None or not shown.error else printable(shown.error).rstrip().split("\n")[1:]
    left_out = 0 if full else max(0, len(lines) - _FRAME_LINES)
    note = [Text(f"… {left_out} lines before (--full)", style="dim")] if left_out else []
    return [*note, *(Text(line, overflow="fold") for line in lines[left_out:])]


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _named(values: Mapping[str, float | None], prefix: str = "") -> list[str]:
    return [f"{prefix}{name} {number(value)}" for name, value in values.items()]


def _plain(text: str) -> Text:
    return Text(printable(text))


def _join(*words: str, style: str = "") -> Text:
    return Text(" · ".join(map(printable, words)), style=style)


def _trimmed(text: Text) -> Text:
    """Cut off the blank lines around a text."""
    plain = text.plain
    return text[len(plain) - len(plain.lstrip("\n")) : max(len(plain.rstrip()), 1)]


def _cut(text: str, *, full: bool) -> str:
    if full or len(text) <= _LONGEST:
        return printable(text)
    return printable(f"{text[: _LONGEST // 3]} … {text[-_LONGEST * 2 // 3 :]}")


def _short(value: Any, limit: int = 600) -> str:
    text = as_text(value)
    return text if len(text) <= limit else f"{text[:limit]} …"
