"""Completes spans that go to a user's collector, with what the server alone knows of the calls in them.

kept calls ─► provider, response, usage, messages of the model's span       (GenAI conventions)
spans of ours ─► kind, input and output as OpenInference's viewers read them (Phoenix)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from lightningrl import conventions
from lightningrl.types import Transition
from lightningrl_server.rendering.completion import Choice, read_recorded
from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = ["complete_spans"]

PROVIDER: Final = "lightningrl"
LONGEST: Final = 64 * 1024
"""Characters of a text; the end of a prompt is what is new in it."""
KINDS: Final = {
    conventions.CHAT: "LLM",
    conventions.INVOKE_AGENT: "AGENT",
    conventions.EXECUTE_TOOL: "TOOL",
    conventions.INVOKE_WORKFLOW: "CHAIN",
}
"""OpenInference's name of each operation."""


def complete_spans(
    request: ExportTraceServiceRequest, calls: Iterable[Transition], renderers: Mapping[str, PolicyRenderer]
) -> None:
    """Add attributes, in place; what a span says already stays. `renderers`: by policy; a call of another has no texts.
    Of several calls of one span the last counts, with all of its choices."""
    by_span: dict[str, list[Transition]] = {}
    for call in calls:
        if call.span_id is not None:
            choices = by_span.setdefault(call.span_id, [])
            choices[:] = [*(earlier for earlier in choices if earlier.started_at == call.started_at), call]
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            is_ours = scope.scope.name.startswith("lightningrl")
            for span in scope.spans:
                texts = {pair.key: pair.value.string_value for pair in span.attributes}
                added: dict[str, Any] = {}
                if (answers := by_span.get(span.span_id.hex())) is not None:
                    added |= _describe(answers, renderers.get(answers[0].policy))
                if is_ours:
                    added |= _for_viewers({**added, **texts})
                for key, value in added.items():
                    if key not in texts:
                        span.attributes.append(KeyValue(key=key, value=_any(value)))


def _describe(choices: Sequence[Transition], renderer: PolicyRenderer | None) -> dict[str, Any]:
    """A call, by its choices, in the GenAI conventions."""
    call = choices[0]
    reasons = ["tool_calls" if choice.tool_call_ids else str(choice.finish_reason.value) for choice in choices]
    facts: dict[str, Any] = {
        conventions.PROVIDER_NAME: PROVIDER,
        conventions.RESPONSE_ID: call.id,
        "gen_ai.response.model": call.policy,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": len(call.prompt_ids),
        "gen_ai.usage.output_tokens": sum(len(choice.completion_ids) for choice in choices),
        "lightningrl.policy.version": call.policy_version,
    }
    if renderer is None:
        return facts
    read = [read_recorded(renderer, choice) for choice in choices]
    answers = [
        {"role": "assistant", "parts": _parts(choice), "finish_reason": reason}
        for choice, reason in zip(read, reasons, strict=True)
    ]
    prompt = renderer.decode(call.prompt_ids[-LONGEST:].tolist())[-LONGEST:]
    asked = {"role": "user", "parts": [{"type": "text", "content": prompt}]}
    messages = {"gen_ai.input.messages": [asked], "gen_ai.output.messages": answers}
    texts = {key: json.dumps(value, ensure_ascii=False) for key, value in messages.items()}
    output = "\n".join(choice.content or json.dumps(_parts(choice)) for choice in read)
    return {**facts, **texts, "input.value": prompt, "output.value": output}


def _parts(choice: Choice) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "reasoning", "content": choice.reasoning}] if choice.reasoning else []
    parts += [{"type": "text", "content": choice.content}] if choice.content else []
    calls = choice.tool_calls
    return parts + [
        {"type": "tool_call", "id": tool.id, "name": tool.name, "arguments": tool.arguments} for tool in calls
    ]


def _for_viewers(texts: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of OpenInference for a span of ours."""
    kind = KINDS.get(texts.get(conventions.OPERATION_NAME, ""))
    if kind is None:
        return {}
    pairs = {
        "input.value": texts.get(conventions.TOOL_CALL_ARGUMENTS),
        "output.value": texts.get(conventions.TOOL_CALL_RESULT),
        "tool.name": texts.get(conventions.TOOL_NAME),
        "llm.model_name": texts.get("gen_ai.response.model"),
        "llm.token_count.prompt": texts.get("gen_ai.usage.input_tokens"),
        "llm.token_count.completion": texts.get("gen_ai.usage.output_tokens"),
    }
    return {"openinference.span.kind": kind} | {key: value for key, value in pairs.items() if value is not None}


def _any(value: Any) -> AnyValue:
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, list):
        whole = AnyValue()
        whole.array_value.values.extend(map(_any, value))
        return whole
    return AnyValue(string_value=str(value))
