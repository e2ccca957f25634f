"""Evaluations that an agent emits as log records, as the GenAI conventions have it now, become spans below the one they are of."""

from __future__ import annotations

import secrets
import time
from typing import Any

from opentelemetry.sdk._logs import LogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import INVALID_SPAN_ID, SpanContext

from lightningrl.telemetry import semconv
from lightningrl.telemetry.spans import RolloutSpanProcessor

__all__ = ["EvaluationProcessor"]


class EvaluationProcessor(LogRecordProcessor):
    """Takes `gen_ai.evaluation.result`, of whatever `LoggerProvider`, and leaves all else alone."""

    def __init__(self, spans: RolloutSpanProcessor) -> None:
        self._spans = spans

    def on_emit(self, log_record: Any) -> None:
        """Of any version of the SDK: what is emitted holds a `log_record`."""
        record = log_record.log_record
        attributes = dict(record.attributes or {})
        if semconv.EVALUATION_RESULT not in (record.event_name, attributes.get("event.name")):
            return
        trace_id = record.trace_id or secrets.randbits(127) + 1
        around = record.span_id or INVALID_SPAN_ID
        now = record.timestamp or time.time_ns()
        self._spans.add(
            ReadableSpan(
                name=semconv.EVALUATION_RESULT,
                context=SpanContext(trace_id, secrets.randbits(63) + 1, is_remote=False),
                parent=None if around == INVALID_SPAN_ID else SpanContext(trace_id, around, is_remote=False),
                resource=Resource.get_empty(),
                attributes=attributes,
                start_time=now,
                end_time=now,
            )
        )

    def shutdown(self) -> None:
        """One of the providers was shut down; the others, and the rollouts, go on."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept back."""
        return True
