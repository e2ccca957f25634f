"""Spans of a worker: gathered per rollout in memory, sent as one OTLP/HTTP request when the attempt ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from lightningrl.tracing.scope import ActiveRollout, RolloutScope

__all__ = ["OTLP_CONTENT_TYPE", "RolloutSpanProcessor", "build_tracer_provider", "encode_otlp", "watch_global_provider"]

OTLP_CONTENT_TYPE: Final = "application/x-protobuf"
MAX_SPANS: Final = 10_000
"""Per attempt; what comes after is dropped with a warning."""

logger = logging.getLogger(__name__)


class RolloutSpanProcessor(SpanProcessor):
    """Gives each ended span to the rollout that was current when it started; spans outside of rollouts are nobody's."""

    def __init__(self, scope: RolloutScope) -> None:
        self._scope = scope
        self._open: dict[int, ActiveRollout] = {}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        rollout = self._scope.current()
        if rollout is not None:
            self._open[span.get_span_context().span_id] = rollout

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        rollout = None if context is None else self._open.pop(context.span_id, None)
        if rollout is None:
            return
        if len(rollout.spans) >= MAX_SPANS:
            if len(rollout.spans) == MAX_SPANS:
                logger.warning("rollout %s: more than %d spans; the rest are dropped", rollout.rollout_id, MAX_SPANS)
                rollout.spans.append(span)
            return
        rollout.spans.append(span)

    def forget(self, rollout: ActiveRollout) -> None:
        """Drop the spans of an attempt that is over and that never ended."""
        for span_id in [span_id for span_id, owner in self._open.copy().items() if owner is rollout]:
            self._open.pop(span_id, None)

    def shutdown(self) -> None:
        self._open.clear()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept back: the worker sends a rollout's spans when the attempt ends."""
        return True


def build_tracer_provider(processor: SpanProcessor) -> TracerProvider:
    """The provider that the worker hands to adapters; independent of OTEL_* sampling settings."""
    provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource({"service.name": "lightningrl-worker"}), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


def watch_global_provider(provider: TracerProvider, processor: SpanProcessor) -> None:
    """See the spans that the agent's own instrumentation makes: through its provider if it has set one, else through ours."""
    existing = trace.get_tracer_provider()
    if isinstance(existing, TracerProvider):
        existing.add_span_processor(processor)
    else:
        trace.set_tracer_provider(provider)


def encode_otlp(spans: Sequence[ReadableSpan]) -> bytes:
    """The body of an OTLP/HTTP traces request."""
    return bytes(encode_spans(spans).SerializeToString())
