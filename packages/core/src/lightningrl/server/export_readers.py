"""Exports of an attempt's telemetry, as they are kept: tools joined to the answers that asked for them, evaluations as rewards of calls.

OTLP spans ─► SpanReader ─┬─► tool calls, joined to the kept answers
                          ├─► spans that name agents
                          ├─► rewards, by the call that they are of ◄─ LogReader ◄─ OTLP log records
                          └─► all of it, for the user's own collector (`forward`)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lightningrl.dialects import Dialect, call_of
from lightningrl.server.asked_calls import ReadAsked, join_to_answers
from lightningrl.server.evaluations import find_rewards
from lightningrl.server.forwarding import ExportForwarder
from lightningrl.server.routes import LONG_BYTES
from lightningrl.store.protocol import CallLog, SpanRecord, ToolCallRecord
from lightningrl.telemetry.otlp import PROTOBUF, parse_export, parse_logs

__all__ = ["LogReader", "ReadLogs", "ReadSpans", "SpanReader"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSpans:
    """What an export tells of its attempt."""

    tool_calls: Sequence[ToolCallRecord]
    spans: Sequence[SpanRecord]
    rewards: Mapping[str | None, Mapping[str, float | None]]
    """By transition id; None = of the attempt."""
    rejected: int
    """Spans without a usable id."""
    request: ExportTraceServiceRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanReader:
    """Reads exports of attempts, beside what is kept of them."""

    log: CallLog
    limit: int
    """Bytes of an export when unpacked."""
    forwarder: ExportForwarder | None = None
    read_asked: ReadAsked | None = None
    dialects: Sequence[Dialect] = ()

    async def read(self, place: tuple[str, int], body: bytes, media_type: str = PROTOBUF, encoding: str = "") -> ReadSpans:
        """`place`: rollout and attempt. Raises ServerError with a sentence for bytes that are no spans, or too many."""
        export = await _parse(parse_export, body, media_type, encoding, self.limit)
        tool_calls = export.tool_calls
        if export.loose and self.read_asked is not None:
            asked = await self.read_asked(*place)
            tool_calls = await asyncio.to_thread(join_to_answers, tool_calls, export.loose, asked)
        rewards = await find_rewards(self.log, self.dialects, *place, export.evaluations) if export.evaluations else {}
        spans = [*export.spans, *await self._named_calls(place, export.answers)]
        return ReadSpans(tool_calls=tool_calls, spans=spans, rewards=rewards, rejected=export.rejected, request=export.request)

    async def _named_calls(self, place: tuple[str, int], answers: Sequence[tuple[str, str]]) -> list[SpanRecord]:
        """Calls that the models' spans name by their answers, as spans inside of those: whoever made them need not have said of what span
        they are."""
        known = await self.log.call_ids(*place) if answers else frozenset()
        calls = [(call_of(answer_id, self.dialects), span_id) for answer_id, span_id in answers]
        return [SpanRecord(span_id=call_id, parent_span_id=span_id) for call_id, span_id in calls if call_id in known]

    def forward(self, place: tuple[str, int], read: ReadSpans) -> None:
        """Hand all of it on, once it is kept."""
        if self.forwarder is not None:
            self.forwarder.offer(read.request, *place)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadLogs:
    """What an export of log records tells of its attempt."""

    rewards: Mapping[str | None, Mapping[str, float | None]]
    """By transition id; None = of the attempt."""
    request: ExportLogsServiceRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class LogReader:
    """Reads exports of log records."""

    log: CallLog
    limit: int
    """Bytes of an export when unpacked."""
    forwarder: ExportForwarder | None = None
    dialects: Sequence[Dialect] = ()

    async def read(self, place: tuple[str, int], body: bytes, media_type: str, encoding: str) -> ReadLogs:
        """`place`: rollout and attempt. Raises ServerError with a sentence for bytes that are no log records, or too many."""
        export = await _parse(parse_logs, body, media_type, encoding, self.limit)
        rewards = await find_rewards(self.log, self.dialects, *place, export.evaluations) if export.evaluations else {}
        return ReadLogs(rewards=rewards, request=export.request)

    def forward(self, place: tuple[str, int], read: ReadLogs) -> None:
        """Hand all of it on, once it is kept."""
        if self.forwarder is not None:
            self.forwarder.offer(read.request, *place)


async def _parse(parse: Callable[[bytes, str, str, int], T], body: bytes, media_type: str, encoding: str, limit: int) -> T:
    """A thread costs more than it spares the event loop, where a body is short."""
    if encoding or len(body) > LONG_BYTES:
        return await asyncio.to_thread(parse, body, media_type, encoding, limit)
    return parse(body, media_type, encoding, limit)
