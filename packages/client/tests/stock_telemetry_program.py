"""A program with a stock OpenTelemetry SDK and nothing of ours: what its exporters are told, they read from their
environment."""

from __future__ import annotations

import json
import sys

from openai import OpenAI
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.util.types import AnyValue

question = json.load(sys.stdin)
spans = TracerProvider()
spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
logs = LoggerProvider()
logs.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter()))
tracer, events = spans.get_tracer("my.agent"), logs.get_logger("my.agent")

reply = OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
with tracer.start_as_current_span(
    "execute_tool look", attributes={"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "look"}
):
    pass
said: dict[str, AnyValue] = {
    "gen_ai.evaluation.name": "Relevance",
    "gen_ai.evaluation.score.value": 0.5,
    "gen_ai.response.id": reply.id,
}
events.emit(event_name="gen_ai.evaluation.result", attributes=said)
events.emit(
    event_name="gen_ai.evaluation.result",
    attributes={"gen_ai.evaluation.name": "Done", "gen_ai.evaluation.score.label": "pass"},
)
events.emit(body="a line of the log")
spans.shutdown()
logs.shutdown()
print(reply.choices[0].message.content)
