"""Listens to whatever `TracerProvider` the agent's own code makes, at import or later, and to ours where it makes none.

made by the agent, global or not  ─►  our processor is added; its exporters, sampler and resource stay as they are
none is global                    ─►  ours holds the place, until the agent sets its own
a `LoggerProvider`                ─►  our processor is added, which makes spans of evaluations alone
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from opentelemetry import trace
from opentelemetry.sdk._logs import LoggerProvider, LogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import INVALID_SPAN_ID, SpanContext
from opentelemetry.util._once import Once

from lightningrl import conventions
from lightningrl.instrumentation import Args, Kwargs, Patches
from lightningrl_client.telemetry.spans import RolloutSpanProcessor, WorkerTracerProvider

__all__ = ["ProviderWatch"]


class ProviderWatch:
    """Patches of the OpenTelemetry SDK in this process. `install` once, before the agent is imported; `uninstall`
    restores them."""

    def __init__(self, provider: WorkerTracerProvider) -> None:
        self._provider = provider
        self._processor: SpanProcessor = provider.rollout_spans
        self._evaluations = EvaluationProcessor(provider.rollout_spans)
        self._heard: WeakSet[TracerProvider] = WeakSet()
        self._patches = Patches()

    def install(self) -> None:
        """Hear of each provider that is made from now on."""
        self._add = TracerProvider.add_span_processor
        self._patches.wrap(TracerProvider, "__init__", self._made)
        self._patches.wrap(TracerProvider, "add_span_processor", self._added)
        self._patches.wrap(trace, "set_tracer_provider", self._set)
        self._patches.wrap(LoggerProvider, "__init__", self._made_logger)

    def uninstall(self) -> None:
        """Restore the SDK."""
        self._patches.restore()

    def take_global(self) -> None:
        """Listen to the global provider; where there is none, ours is it for the time being."""
        existing = trace.get_tracer_provider()
        if isinstance(existing, TracerProvider):
            self._listen(existing)
        else:
            trace.set_tracer_provider(self._provider)

    def _listen(self, provider: TracerProvider) -> None:
        if provider is not self._provider and provider not in self._heard:
            self._heard.add(provider)
            # not the subclass's own method, which may know defaults that ours must not replace
            self._add(provider, self._processor)

    def _made(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> None:
        wrapped(*args, **kwargs)
        if not isinstance(instance, WorkerTracerProvider):
            self._listen(instance)

    def _made_logger(self, wrapped: Callable[..., Any], instance: LoggerProvider, args: Args, kwargs: Kwargs) -> None:
        wrapped(*args, **kwargs)
        instance.add_log_record_processor(self._evaluations)

    def _added(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> None:
        """Some providers drop all of their processors when the first one of the user's comes."""
        wrapped(*args, **kwargs)
        processors = getattr(getattr(instance, "_active_span_processor", None), "_span_processors", None)
        if instance in self._heard and processors is not None and self._processor not in processors:
            self._add(instance, self._processor)

    def _set(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> None:
        """A global provider can be set once only, and ours must not be the one that keeps the agent's out."""
        given = args[0] if args else kwargs["tracer_provider"]
        if trace.get_tracer_provider() is self._provider and given is not self._provider:
            trace._TRACER_PROVIDER = None
            trace._TRACER_PROVIDER_SET_ONCE = Once()
        wrapped(*args, **kwargs)
        if isinstance(given, TracerProvider) and not isinstance(given, WorkerTracerProvider):
            self._listen(given)


class EvaluationProcessor(LogRecordProcessor):
    """Makes spans of the evaluations that an agent emits as log records, as the GenAI conventions have it now.

    It takes `gen_ai.evaluation.result`, of whatever `LoggerProvider`, and leaves all else alone.
    """

    def __init__(self, spans: RolloutSpanProcessor) -> None:
        self._spans = spans

    def on_emit(self, log_record: Any) -> None:
        record = log_record.log_record  # in each version of the SDK, where what is emitted holds one
        attributes = dict(record.attributes or {})
        if conventions.EVALUATION_RESULT not in (record.event_name, attributes.get("event.name")):
            return
        trace_id = record.trace_id or secrets.randbits(127) + 1
        around = record.span_id or INVALID_SPAN_ID
        now = record.timestamp or time.time_ns()
        self._spans.add(
            ReadableSpan(
                name=conventions.EVALUATION_RESULT,
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
