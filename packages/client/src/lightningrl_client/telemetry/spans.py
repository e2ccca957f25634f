"""Spans of a worker: gathered per rollout in memory, sent as one OTLP/HTTP request when the attempt ends.

They come of whatever `TracerProvider` the agent's own code makes, at import or later, and of ours where it makes none:

made by the agent, global or not  ─►  our processor is added; its exporters, sampler and resource stay as they are
none is global                    ─►  ours holds the place, until the agent sets its own
a `LoggerProvider`                ─►  our processor is added, which makes spans of evaluations alone
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakSet

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk._logs import LoggerProvider, LogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import INVALID_SPAN_ID, SpanContext
from opentelemetry.util._once import Once

from lightningrl import conventions
from lightningrl.instrumentation import Args, Kwargs, Patches
from lightningrl_client.attribution.scope import ActiveRollout, RolloutScope

__all__ = ["OpenSpan", "ProviderWatch", "RolloutSpanProcessor", "WorkerTracerProvider", "encode_otlp"]

MAX_SPANS: Final = 10_000
"""Per attempt; what comes after is dropped with a warning."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class OpenSpan:
    """A span of a rollout while it runs, with its place among the others."""

    span: Span
    rollout: ActiveRollout
    parent: OpenSpan | None
    earlier: OpenSpan | None
    """The span that ran in this context when this one was started."""
    number: int
    """Larger = started later."""
    children: dict[int, OpenSpan] = field(default_factory=dict[int, "OpenSpan"])
    """Children that run, by span id."""
    is_over: bool = False

    def upwards(self) -> Iterator[OpenSpan]:
        """This span and those around it, innermost first."""
        span: OpenSpan | None = self
        while span is not None:
            yield span
            span = span.parent

    @property
    def runs(self) -> bool:
        """True if neither it nor its parent has ended: a span that outlives its parent is an abandoned stream's."""
        return not self.is_over and not (self.parent is not None and self.parent.is_over)


class RolloutSpanProcessor(SpanProcessor):
    """Gives each ended span to the rollout that was current when it started; spans outside of rollouts are nobody's. It
    listens to our provider and to those of the agent's own code, so a shutdown of one of them is not about it."""

    def __init__(self, scope: RolloutScope) -> None:
        self._scope = scope
        self._open: dict[int, OpenSpan] = {}
        self._numbers = itertools.count()
        self._latest: ContextVar[OpenSpan | None] = ContextVar("lightningrl_latest_span", default=None)
        self.translate: Callable[[ReadableSpan, OpenSpan], ReadableSpan] | None = None
        """Puts a span into our words when it ends."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        rollout = self._scope.current()
        if rollout is None:
            return
        parent = self._open.get(span.parent.span_id) if span.parent is not None else None
        earlier = self._latest.get()
        while earlier is not None and (earlier.is_over or earlier.rollout is not rollout):
            earlier = earlier.earlier
        span_id = span.get_span_context().span_id
        self._open[span_id] = opened = OpenSpan(span, rollout, parent, earlier, next(self._numbers))
        if parent is not None:
            parent.children[span_id] = opened
        self._latest.set(opened)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        opened = None if context is None else self._close(context.span_id)
        if opened is not None:
            self._keep(span if self.translate is None else self.translate(span, opened), opened.rollout)

    def add(self, span: ReadableSpan) -> None:
        """Add a span that nobody started to the current rollout; outside of rollouts it is nobody's."""
        rollout = self._scope.current()
        if rollout is not None:
            self._keep(span, rollout)

    def _keep(self, span: ReadableSpan, rollout: ActiveRollout) -> None:
        if len(rollout.spans) == MAX_SPANS:
            logger.warning("rollout %s: more than %d spans; the rest are dropped", rollout.rollout_id, MAX_SPANS)
        if len(rollout.spans) <= MAX_SPANS:
            rollout.spans.append(span)

    def forget(self, rollout: ActiveRollout) -> None:
        """Drop the spans of an attempt that is over and that never ended."""
        for span_id, opened in self._open.copy().items():
            if opened.rollout is rollout:
                self._close(span_id)

    def running_here(self) -> list[OpenSpan]:
        """Spans of the current rollout that run in this context: started last in it, or set in it; innermost first."""
        rollout = self._scope.current()
        latest = self._latest.get()
        while latest is not None and not latest.runs:
            latest = latest.earlier
        ambient = self._open.get(trace.get_current_span().get_span_context().span_id)
        spans = [span for span in (latest, ambient) if span is not None and span.rollout is rollout and span.runs]
        return sorted(spans, key=lambda span: -span.number)

    def innermost(self) -> list[OpenSpan]:
        """The spans of the current rollout that run and have no child that does, in any context."""
        rollout = self._scope.current()
        return [
            span for span in self._open.copy().values() if span.rollout is rollout and span.runs and not span.children
        ]

    def _close(self, span_id: int) -> OpenSpan | None:
        opened = self._open.pop(span_id, None)
        if opened is not None:
            opened.is_over = True
            if opened.parent is not None:
                opened.parent.children.pop(span_id, None)
        return opened

    def shutdown(self) -> None:
        """One of the providers was shut down; the others, and the rollouts, go on."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept back: the worker sends a rollout's spans when the attempt ends."""
        return True


class WorkerTracerProvider(TracerProvider):
    """The provider that the worker hands to adapters; independent of OTEL_* sampling settings."""

    def __init__(self, spans: RolloutSpanProcessor) -> None:
        super().__init__(
            sampler=ALWAYS_ON, resource=Resource({"service.name": "lightningrl-worker"}), shutdown_on_exit=False
        )
        self.add_span_processor(spans)
        self.rollout_spans = spans


def encode_otlp(spans: Sequence[ReadableSpan]) -> bytes:
    """The body of an OTLP/HTTP traces request."""
    return bytes(encode_spans(spans).SerializeToString())


class ProviderWatch:
    """Patches of the OpenTelemetry SDK here. `install` once, before the agent's import; `uninstall` restores them."""

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
    """Makes spans of the evaluations that an agent emits as log records, as the GenAI conventions have it now. It takes
    `gen_ai.evaluation.result`, of whatever `LoggerProvider`, and leaves all else alone."""

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
