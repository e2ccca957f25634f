"""Completes spans that go to a user's collector, with what the server alone knows of the calls in them.

kept calls ─► provider, response, usage, messages of the model's span       (GenAI conventions)
spans of ours ─► kind, input and output as OpenInference's viewers read them (Phoenix)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from lightningrl import conventions
from lightningrl.types import Transition
from lightningrl_server.rendering.completion import read_recorded
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
    Of several calls of one span the last counts."""
    by_span = {call.span_id: call for call in calls if call.span_id is not None}
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            is_ours = scope.scope.name.startswith("lightningrl")
            for span in scope.spans:
                texts = {pair.key: pair.value.string_value for pair in span.attributes}
                added: dict[str, Any] = {}
                if (call := by_span.get(span.span_id.hex())) is not None:
                    added |= _describe(call, renderers.get(call.policy))
                if is_ours:
                    added |= _for_viewers({**added, **texts})
                for key, value in added.items():
                    if key not in texts:
                        span.attributes.append(KeyValue(key=key, value=_any(value)))


def _describe(call: Transition, renderer: PolicyRenderer | None) -> dict[str, Any]:
    """A call in the GenAI conventions."""
    reason = "tool_calls" if call.tool_call_ids else str(call.finish_reason.value)
    facts: dict[str, Any] = {
        conventions.PROVIDER_NAME: PROVIDER,
        conventions.RESPONSE_ID: call.id,
        "gen_ai.response.model": call.policy,
        "gen_ai.response.finish_reasons": [reason],
        "gen_ai.usage.input_tokens": len(call.prompt_ids),
        "gen_ai.usage.output_tokens": len(call.completion_ids),
        "lightningrl.policy.version": call.policy_version,
    }
    if renderer is None:
        return facts
    choice = read_recorded(renderer, call)
    parts: list[dict[str, Any]] = [{"type": "reasoning", "content": choice.reasoning}] if choice.reasoning else []
    parts += [{"type": "text", "content": choice.content}] if choice.content else []
    parts += [
        {"type": "tool_call", "id": tool.id, "name": tool.name, "arguments": tool.arguments}
        for tool in choice.tool_calls
    ]
    prompt = renderer.decode(call.prompt_ids[-LONGEST:].tolist())[-LONGEST:]
    asked = {"role": "user", "parts": [{"type": "text", "content": prompt}]}
    answer = {"role": "assistant", "parts": parts, "finish_reason": reason}
    messages = {"gen_ai.input.messages": [asked], "gen_ai.output.messages": [answer]}
    texts = {key: json.dumps(value, ensure_ascii=False) for key, value in messages.items()}
    return {**facts, **texts, "input.value": prompt, "output.value": choice.content or json.dumps(parts)}


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
