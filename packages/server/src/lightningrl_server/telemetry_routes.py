"""Telemetry of an attempt, under its key: tools join the answers that asked for them, evaluations become rewards.

OTLP spans, log records ─► ExportReader ─┬─► tool calls, joined to the kept answers
                                         ├─► spans that name agents
                                         ├─► rewards, by the call that they are of
                                         └─► all of it, for the user's own collector (`forward`)
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from lightningrl import control_api as api
from lightningrl.dialects import Dialect, call_of
from lightningrl_server.access import Access
from lightningrl_server.asked_calls import ReadAsked, join_to_answers, name_by_answers
from lightningrl_server.forwarding import ExportForwarder
from lightningrl_server.records import SpanRecord, ToolCallRecord
from lightningrl_server.routes import LONG_BYTES, attempt_of, route
from lightningrl_server.spans.completed import complete_spans
from lightningrl_server.spans.evaluations import Evaluation
from lightningrl_server.spans.otlp import PROTOBUF, Export, ParsedExport, encode_answer, read_media_type
from lightningrl_server.store.protocol import CallLog

__all__ = ["ExportContents", "ExportReader", "telemetry_routes"]


def telemetry_routes(access: Access, spans: ExportReader, log_records: ExportReader) -> list[BaseRoute]:
    async def keep(reader: ExportReader, request: Request) -> Response:
        """Keep what an export holds for us, and hand all of it on."""
        place = attempt_of(request)
        media_type = read_media_type(request.headers.get("content-type", ""))
        encoding = request.headers.get("content-encoding", "")
        contents = await reader.read(place, await request.body(), media_type, encoding)
        writes: list[Awaitable[object]] = []
        if contents.tool_calls:
            writes.append(reader.log.append_tool_calls(*place, contents.tool_calls))
        if contents.spans:
            writes.append(reader.log.append_spans(*place, contents.spans))
        await asyncio.gather(*writes)  # one commit
        for transition_id, rewards in contents.rewards.items():
            await reader.log.add_rewards(*place, rewards, transition_id)
        await reader.forward(place, contents)
        return Response(encode_answer(media_type, contents.rejected), media_type=media_type)

    return [
        route(api.TRACES, access, lambda request, _: keep(spans, request)),
        route(api.LOGS, access, lambda request, _: keep(log_records, request)),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportContents:
    """An attempt's export, joined to what is kept of the attempt."""

    tool_calls: Sequence[ToolCallRecord]
    spans: Sequence[SpanRecord]
    rewards: Mapping[str | None, Mapping[str, float | None]]
    """Reported rewards by transition id; None = the whole attempt's."""
    rejected: int
    """Spans without a usable id."""
    request: Export


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReader:
    """Reads exports of attempts, beside what is kept of them."""

    log: CallLog
    parse: Callable[[bytes, str, str, int], ParsedExport]
    """Parses spans, or log records."""
    limit: int
    """Bytes of an export when unpacked."""
    decoding: MutableMapping[tuple[str, int], asyncio.Lock]
    """Shared by the readers, weak: of each attempt one export is decoded at a time."""
    forwarder: ExportForwarder | None = None
    read_asked: ReadAsked | None = None
    dialects: Sequence[Dialect] = ()

    async def read(
        self, place: tuple[str, int], body: bytes, media_type: str = PROTOBUF, encoding: str = ""
    ) -> ExportContents:
        """Read an export of the attempt at `place` (rollout, number). Raises ServerError with a sentence for bytes that
        are no export, or too many."""
        if encoding or len(body) > LONG_BYTES:  # for a short body a thread costs more than it spares the event loop
            async with self.decoding.setdefault(place, asyncio.Lock()):
                export = await asyncio.to_thread(self.parse, body, media_type, encoding, self.limit)
        else:
            export = self.parse(body, media_type, encoding, self.limit)
        tool_calls = await name_by_answers(export.tool_calls, self.log, place)
        if export.loose and self.read_asked is not None:
            asked = await self.read_asked(*place)
            tool_calls = await asyncio.to_thread(join_to_answers, tool_calls, export.loose, asked)
            tool_calls = await self._without_phantoms(place, tool_calls, export.unoffered)
        tools = {record.span_id: record.tool_call.id for record in tool_calls}
        evaluations = [
            replace(
                each, tool_call_ids=(*each.tool_call_ids, *(tools[span] for span in each.span_ids if span in tools))
            )
            for each in export.evaluations
        ]
        rewards = await find_rewards(self.log, self.dialects, *place, evaluations) if evaluations else {}
        spans = [*export.spans, *await self._named_calls(place, export.answers)]
        return ExportContents(
            tool_calls=tool_calls, spans=spans, rewards=rewards, rejected=export.rejected, request=export.request
        )

    async def _without_phantoms(
        self, place: tuple[str, int], records: Sequence[ToolCallRecord], unoffered: frozenset[str]
    ) -> Sequence[ToolCallRecord]:
        """Leave out what a span calls a tool and nobody offered, asked for or wrote of (Semantic Kernel's prompts)."""
        doubtful = {record.tool_call.name for record in records if record.tool_call.id in unoffered}
        if not doubtful or self.read_asked is None:
            return records
        named = await self.read_asked.mentioned(*place, doubtful)
        return [record for record in records if record.tool_call.id not in unoffered or record.tool_call.name in named]

    async def _named_calls(self, place: tuple[str, int], answers: Sequence[tuple[str, str]]) -> list[SpanRecord]:
        """Return calls that the models' spans name by their answers, as spans inside of those. Whoever made such a call
        need not have said of what span it is."""
        call_ids = await self.log.call_ids(*place) if answers else frozenset()
        calls = [(call_of(answer_id, self.dialects), span_id) for answer_id, span_id in answers]
        named = [(call_id, span_id) for call_id, span_id in calls if call_id in call_ids]
        return [SpanRecord(span_id=call_id, parent_span_id=span_id) for call_id, span_id in named]

    async def forward(self, place: tuple[str, int], contents: ExportContents) -> None:
        """Hand all of it on, once it is kept; a model's span with what is known of its call."""
        if self.forwarder is None:
            return
        if isinstance(contents.request, ExportTraceServiceRequest):
            calls = [record.transition for record in await self.log.calls(*place)]
            renderers = {} if self.read_asked is None else self.read_asked.renderers
            await asyncio.to_thread(complete_spans, contents.request, calls, renderers)
        self.forwarder.offer(contents.request, *place)


async def find_rewards(
    log: CallLog, dialects: Sequence[Dialect], rollout_id: str, attempt: int, evaluations: Sequence[Evaluation]
) -> dict[str | None, dict[str, float | None]]:
    """Return rewards by transition id, None = the rollout's. Of several of one name and call, the last stands."""
    calls = [record.transition for record in await log.calls(rollout_id, attempt)]
    ids = {call.id for call in calls}
    by_span = {call.span_id: call.id for call in calls if call.span_id is not None}
    by_tool = {tool_call_id: call.id for call in calls for tool_call_id in call.tool_call_ids}
    rewards: dict[str | None, dict[str, float | None]] = defaultdict(dict)
    for evaluation in evaluations:
        transition_id = evaluation.answer_id and call_of(evaluation.answer_id, dialects)
        if transition_id not in ids:
            near = [by_span.get(span_id) for span_id in evaluation.span_ids]
            near += [by_tool.get(call_id) for call_id in evaluation.tool_call_ids]
            transition_id = next((call_id for call_id in near if call_id is not None), None)
        rewards[transition_id][evaluation.name] = evaluation.score
    return dict(rewards)
