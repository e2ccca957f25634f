"""Agents that evaluate their own calls, in their telemetry."""

from __future__ import annotations

from openai import OpenAI
from opentelemetry import trace
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.util.types import AnyValue

tracer = trace.get_tracer("my.agent")


def evaluate(span: trace.Span, name: str, **said: object) -> None:
    attributes = {
        "gen_ai.evaluation.name": name,
        **{f"gen_ai.{key.replace('__', '.')}": value for key, value in said.items()},
    }
    span.add_event("gen_ai.evaluation.result", attributes)  # type: ignore[arg-type]


def ask(question: str) -> str:
    """The span is the call's own: the adapter `opentelemetry` says so to the gateway."""
    with tracer.start_as_current_span(
        "chat", attributes={"gen_ai.operation.name": "chat", "gen_ai.request.model": "policy"}
    ) as span:
        reply = OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
        text = reply.choices[0].message.content or ""
        evaluate(span, "brief", evaluation__score__value=1.0 / len(text))
        return text


def answers(question: str) -> str:
    """Two calls, one evaluated by its id and one by its span, and the whole by neither."""
    first = OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
    second = ask("again")
    here = trace.get_current_span()  # the attempt's, since nothing else is open
    evaluate(here, "relevant", evaluation__score__value=0.25, response__id=first.id)
    evaluate(here, "done", evaluation__score__label="pass")
    return second


def says_nothing_else(question: str) -> str:
    """No span but the attempt's own, and an event on that."""
    reply = OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
    evaluate(trace.get_current_span(), "relevant", evaluation__score__value=0.5)
    return reply.choices[0].message.content or ""


def logs(question: str) -> str:
    """As the conventions have it now: events are log records, of the span that is current."""
    events = LoggerProvider().get_logger("my.agent")
    with tracer.start_as_current_span(
        "chat", attributes={"gen_ai.operation.name": "chat", "gen_ai.request.model": "policy"}
    ):
        reply = OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
        scores: dict[str, AnyValue] = {"gen_ai.evaluation.name": "brief", "gen_ai.evaluation.score.value": 0.125}
        events.emit(event_name="gen_ai.evaluation.result", attributes=scores)
        events.emit(event_name="something.else", attributes={**scores, "gen_ai.evaluation.name": "else"})
    events.emit(event_name="gen_ai.evaluation.result", attributes={**scores, "gen_ai.evaluation.name": "whole"})
    return reply.choices[0].message.content or ""
