"""The `opentelemetry` adapter: roles, spans and tools of any framework that others' instrumentation describes.

    OpenInference, GenAI-convention or OpenLLMetry spans, of whatever provider  ─►  RolloutSpanProcessor
      runs when an HTTP request leaves  ─►  call_origin: the model's span, and the agent around it
      ends                              ─►  the same span with our attributes beside its own

It hooks no framework. Where an adapter of its own knows a framework better, that one is asked first.
"""

from __future__ import annotations

from typing import Any, Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.util.types import AttributeValue

from lightningrl import conventions
from lightningrl.call_origin import CallOrigin
from lightningrl.conventions import Kind, SpanReading, SpanState, read_agent, read_kind, read_span
from lightningrl_client.telemetry.spans import OpenSpan, RolloutSpanProcessor, WorkerTracerProvider

__all__ = ["OpenTelemetryAdapter"]

LONGEST_VALUE: Final = 64 * 1024
"""Characters of an attribute; prompts are copied into spans, and the gateway has them anyway."""
OPERATIONS: Final = {
    Kind.AGENT: conventions.INVOKE_AGENT,
    Kind.MODEL: conventions.CHAT,
    Kind.TOOL: conventions.EXECUTE_TOOL,
}


class OpenTelemetryAdapter:
    """Reads the spans of this worker. `uninstrument` makes it inert."""

    is_fallback = True
    """Asked after the adapters that know their framework."""

    def __init__(self) -> None:
        self._spans: RolloutSpanProcessor | None = None

    def instrument(self, **kwargs: Any) -> None:
        provider = kwargs.get("tracer_provider")
        if isinstance(provider, WorkerTracerProvider):
            self._spans = provider.rollout_spans
            self._spans.translate = translate

    def uninstrument(self, **kwargs: Any) -> None:
        if self._spans is not None:
            self._spans.translate = None
        self._spans = None

    def call_origin(self) -> CallOrigin | None:
        """The model's span that runs here, and its agent; else the agent that runs here; None = no span tells."""
        if self._spans is None:
            return None
        here = [span for span in self._spans.running_here() if is_foreign(span.span)]
        span = find_call(here, self._spans.innermost())
        if span is None:
            return None
        agent = next((name for name in (agent_of(open_span) for open_span in (span, *here)) if name is not None), None)
        if agent is not None and kind_of(span) not in (Kind.MODEL, Kind.UNSAID):
            return CallOrigin(agent=agent)  # a bare client inside of an agent: the call has no span of its own
        context = span.span.get_span_context()
        return CallOrigin(agent=agent, trace_id=context.trace_id, span_id=context.span_id)


def find_call(here: list[OpenSpan], innermost: list[OpenSpan]) -> OpenSpan | None:
    """The span of the call that is about to leave: a model's span around it, else what runs here.

    Instrumentations by callback set nothing in the context that makes the request, and say what a span is when it ends.
    So, where no model's span is around, the one innermost running span counts if below ours and maybe a model's.
    """
    for span in here:
        around = next((above for above in span.upwards() if kind_of(above) not in (Kind.UNSAID, Kind.OTHER)), None)
        if around is not None and kind_of(around) is Kind.MODEL:
            return around
    foreign = [span for span in innermost if is_foreign(span.span)]
    if len(foreign) == 1 and kind_of(foreign[0]) is Kind.UNSAID and (not here or here[0] in foreign[0].upwards()):
        return foreign[0]
    return here[0] if here else None


def is_foreign(span: ReadableSpan) -> bool:
    """True if neither we nor an adapter of ours made it."""
    scope = span.instrumentation_scope
    return scope is None or not scope.name.startswith("lightningrl")


def kind_of(span: OpenSpan) -> Kind:
    return read_kind(span.span.attributes or {}) if is_foreign(span.span) else Kind.AGENT


def agent_of(span: OpenSpan) -> str | None:
    """The nearest agent named on the way up."""
    names = (read_agent(above.span.name, above.span.attributes or {}) for above in span.upwards())
    return next((name for name in names if name is not None), None)


def translate(span: ReadableSpan, opened: OpenSpan) -> ReadableSpan:
    """Add our attributes to a span; one of ours is as it is."""
    if not is_foreign(span):
        return span
    attributes = dict(span.attributes or {})
    events = [(event.name, event.attributes or {}) for event in span.events]
    reading = read_span(span.name, attributes, SpanState(span.status.status_code.name.lower()), events)
    added = our_attributes(reading, agent_of(opened))
    whole = {**attributes, **added}
    cut = {key: value[:LONGEST_VALUE] if isinstance(value, str) else value for key, value in whole.items()}
    return ReadableSpan(
        name=span.name,
        context=span.get_span_context(),
        parent=span.parent,
        resource=span.resource,
        attributes=cut,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def our_attributes(reading: SpanReading, agent: str | None) -> dict[str, AttributeValue]:
    """A reading in the GenAI conventions."""
    operation = OPERATIONS.get(reading.kind)
    if operation is None:
        return {} if reading.agent is None else {conventions.AGENT_NAME: reading.agent}
    added: dict[str, AttributeValue] = {conventions.OPERATION_NAME: operation}
    if agent is not None:
        added[conventions.AGENT_NAME] = agent
    if reading.kind is not Kind.TOOL:
        return added
    texts = {
        conventions.TOOL_NAME: reading.tool,
        conventions.TOOL_CALL_ID: reading.tool_call_id,
        conventions.TOOL_CALL_ARGUMENTS: reading.arguments,
        conventions.TOOL_CALL_RESULT: reading.result,
        conventions.ERROR_TYPE: reading.error_type,
    }
    present = {key: text for key, text in texts.items() if text}
    return {**added, **present, conventions.TOOL_STATUS: reading.status.value}
