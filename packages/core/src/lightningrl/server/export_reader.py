"""Exports of an attempt's telemetry, as they are kept: tools joined to the answers that asked for them, evaluations as rewards of calls.

OTLP spans, log records ─► ExportReader ─┬─► tool calls, joined to the kept answers
                                         ├─► spans that name agents
                                         ├─► rewards, by the call that they are of
                                         └─► all of it, for the user's own collector (`forward`)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightningrl.dialects import Dialect, call_of
from lightningrl.records import SpanRecord, ToolCallRecord
from lightningrl.server.asked_calls import ReadAsked, join_to_answers
from lightningrl.server.evaluations import find_rewards
from lightningrl.server.forwarding import ExportForwarder
from lightningrl.server.routes import LONG_BYTES
from lightningrl.store.protocol import CallLog
from lightningrl.telemetry.otlp import PROTOBUF, Export, ParsedExport

__all__ = ["ExportContents", "ExportReader"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportContents:
    """An attempt's export, joined to what is kept of the attempt."""

    tool_calls: Sequence[ToolCallRecord]
    spans: Sequence[SpanRecord]
    rewards: Mapping[str | None, Mapping[str, float | None]]
    """By transition id; None = of the attempt."""
    rejected: int
    """Spans without a usable id."""
    request: Export


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReader:
    """Reads exports of attempts, beside what is kept of them."""

    log: CallLog
    parse: Callable[[bytes, str, str, int], ParsedExport]
    """Of spans, or of log records."""
    limit: int
    """Bytes of an export when unpacked."""
    forwarder: ExportForwarder | None = None
    read_asked: ReadAsked | None = None
    dialects: Sequence[Dialect] = ()

    async def read(self, place: tuple[str, int], body: bytes, media_type: str = PROTOBUF, encoding: str = "") -> ExportContents:
        """`place`: rollout and attempt. Raises ServerError with a sentence for bytes that are no export, or too many."""
        if encoding or len(body) > LONG_BYTES:  # a thread costs more than it spares the event loop, where a body is short
            export = await asyncio.to_thread(self.parse, body, media_type, encoding, self.limit)
        else:
            export = self.parse(body, media_type, encoding, self.limit)
        tool_calls = export.tool_calls
        if export.loose and self.read_asked is not None:
            asked = await self.read_asked(*place)
            tool_calls = await asyncio.to_thread(join_to_answers, tool_calls, export.loose, asked)
        rewards = await find_rewards(self.log, self.dialects, *place, export.evaluations) if export.evaluations else {}
        spans = [*export.spans, *await self._named_calls(place, export.answers)]
        return ExportContents(tool_calls=tool_calls, spans=spans, rewards=rewards, rejected=export.rejected, request=export.request)

    async def _named_calls(self, place: tuple[str, int], answers: Sequence[tuple[str, str]]) -> list[SpanRecord]:
        """Calls that the models' spans name by their answers, as spans inside of those: whoever made them need not have said of what span
        they are."""
        known = await self.log.call_ids(*place) if answers else frozenset()
        calls = [(call_of(answer_id, self.dialects), span_id) for answer_id, span_id in answers]
        return [SpanRecord(span_id=call_id, parent_span_id=span_id) for call_id, span_id in calls if call_id in known]

    def forward(self, place: tuple[str, int], contents: ExportContents) -> None:
        """Hand all of it on, once it is kept."""
        if self.forwarder is not None:
            self.forwarder.offer(contents.request, *place)
