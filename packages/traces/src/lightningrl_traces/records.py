"""Records between an importer of traces and the run that is made of them, one frozen type each.

importer ─► Span, LogRecord ─► spans.py ─┐
         └► Call, ToolRun, Ending ───────┴─► joined into rollouts ─► graded ─► run folder
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from lightningrl.types import ToolStatus
from lightningrl_runs.foreign import Message

__all__ = [
    "Call",
    "Ending",
    "LogRecord",
    "Message",
    "Sample",
    "Span",
    "ToolRun",
    "TraceImporter",
    "TraceRecord",
    "named_scores",
    "read_score",
    "unix_seconds",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A span of whatever convention, as its export has it."""

    trace_id: str
    span_id: str
    parent_id: str | None = None
    name: str = ""
    started_at: float = 0.0
    """Unix seconds; 0.0 = nobody replies."""
    ended_at: float = 0.0
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Attributes by dotted name; nested ones are flattened."""
    events: Sequence[tuple[str, Mapping[str, Any]]] = ()
    """Events by name, with their attributes."""
    error: str | None = None
    """Message of a span whose status is an error; empty = it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRecord:
    """A log record that belongs to a span."""

    trace_id: str
    span_id: str
    event: str
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    body: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A model call, as far as its trace tells. None = the trace does not say."""

    id: str
    trace_id: str
    """Key by which records are one rollout."""
    parent_id: str | None = None
    """The span around it."""
    agent: str | None = None
    model: str = ""
    started_at: float = 0.0
    duration_s: float = 0.0
    messages: list[Message] | None = None
    """Messages of the prompt."""
    tools: list[dict[str, Any]] | None = None
    """Tools offered, as OpenAI's function schemas."""
    answer: Message | None = None
    finish_reason: str | None = None
    """Reason in OpenAI's words: `stop`, `tool_calls`, `length`, `content_filter`."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the request, as recorded: `temperature`, `top_p`, `max_tokens`, `seed`."""
    prompt_ids: Sequence[int] | None = None
    completion_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    prompt_tokens: int | None = None
    """Count by the provider's usage."""
    version: int | None = None
    """Version of a policy of LightningRL that answered."""
    error: str | None = None
    notes: Sequence[str] = ()
    """Defects that reading it showed, as in `lightningrl_traces.grades`."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolRun:
    """An invocation of a tool."""

    id: str
    """The model's tool-call id where there is one, else the span's."""
    trace_id: str
    parent_id: str | None = None
    span_id: str | None = None
    name: str = ""
    arguments: str = ""
    result: str = ""
    status: ToolStatus = ToolStatus.UNKNOWN
    started_at: float = 0.0
    duration_s: float = 0.0
    agent: str | None = None
    error_type: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """Facts of a whole rollout."""

    trace_id: str
    input: Any = None
    """Task, where it is told apart from the first message."""
    output: Any = None
    error: str | None = None
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Scores of the whole rollout by name; those of a call are the call's."""


def read_score(value: Any) -> float | None:
    """A score as a number, also one in text and a yes or no; None for anything else, NaN and infinity too."""
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def named_scores(pairs: Iterable[tuple[Any, Any]]) -> dict[str, float]:
    """Scores by name. Values of one name that differ have names of their own: nobody says which counts."""
    values: dict[str, list[float]] = {}
    for name, value in pairs:
        if (number := read_score(value)) is not None:
            values.setdefault(str(name or "score"), []).append(number)
    return {
        name if len(set(several)) == 1 else f"{name} #{number}": value
        for name, several in values.items()
        for number, value in enumerate(several, 1)
    }


def unix_seconds(value: Any) -> float:
    """Read ISO 8601, or Unix seconds, milliseconds or nanoseconds, as Unix seconds; 0.0 where there is no time. A time
    without a zone is UTC."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        for scale in (1e9, 1e6, 1e3):
            if value > 1e8 * scale:
                return value / scale
        return float(value)
    if not isinstance(value, str) or not value:
        return 0.0
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


TraceRecord = Span | LogRecord | Call | ToolRun | Ending


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The beginning of a file, by which importers tell whether it is theirs."""

    path: Path
    head: bytes
    """The first bytes, unpacked."""
    first: Any = None
    """The first document of a JSON file: a line, an item of a list; None where it is no JSON."""


class TraceImporter(Protocol):
    """A format of traces."""

    def fits(self, sample: Sample) -> bool:
        """True where a file is of this format."""

    def read(self, path: Path) -> Iterator[TraceRecord]:
        """Read a file of any size in bounded memory, the same records in the same order each time. Raises ConfigError
        naming the place of what cannot be read."""
