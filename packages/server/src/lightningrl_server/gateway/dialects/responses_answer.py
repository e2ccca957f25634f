"""OpenAI responses: whole answers and errors."""

from __future__ import annotations

from typing import Any

from lightningrl.types import FinishReason
from lightningrl_server.gateway.dialects.chat_answer import token_logprobs, write_error
from lightningrl_server.gateway.dialects.responses import ResponsesRequest, parse_responses_request
from lightningrl_server.gateway.dialects.responses_items import ended, message, output_text, reasoning, tool_call
from lightningrl_server.gateway.dialects.responses_stream import ResponsesStream, write_json
from lightningrl_server.gateway.dialects.responses_tools import OfferedTools
from lightningrl_server.gateway.request import Answer, AnswerStart, Refusal
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.rendering.completion import Choice
from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = ["ResponsesFormat"]


class ResponsesFormat:
    """`POST /responses`."""

    def parse(self, body: bytes, path: str, settings: GatewaySettings) -> ResponsesRequest:
        return parse_responses_request(body, drops_hosted=settings.drops_hosted)

    def write_error(self, refusal: Refusal) -> bytes:
        return write_error(refusal)

    def open_stream(self, request: ResponsesRequest, renderer: PolicyRenderer, start: AnswerStart) -> ResponsesStream:
        return ResponsesStream(request, renderer, start)

    def write_answer(self, request: ResponsesRequest, answer: Answer, renderer: PolicyRenderer) -> bytes:
        """A whole `response`."""
        choice = answer.choices[0]
        logprobs = None
        if request.logprobs:
            logprobs = token_logprobs(choice.token_ids, choice.logprobs, renderer, top=bool(request.body.top_logprobs))
        return write_json(ended(request, answer, _output(answer.id, choice, request.tools, logprobs)))


def _output(
    call_id: str, choice: Choice, tools: OfferedTools, logprobs: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    status = "incomplete" if choice.finish_reason is FinishReason.LENGTH else "completed"
    if choice.reasoning:
        items.append(reasoning(call_id, [{"type": "reasoning_text", "text": choice.reasoning}], status="completed"))
    if choice.content or not choice.tool_calls:
        items.append(message(call_id, [output_text(choice.content, logprobs)], status=status))
    items += [
        tool_call(call_id, index, call, tools, status="completed") for index, call in enumerate(choice.tool_calls)
    ]
    return items
