"""OpenAI responses: the objects of an answer, whole or streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightningrl.types import FinishReason
from lightningrl_server.gateway.dialects.responses import ResponsesRequest
from lightningrl_server.gateway.dialects.responses_tools import OfferedTools, read_input
from lightningrl_server.gateway.request import Answer, AnswerStart
from lightningrl_server.rendering.completion import ToolRequest

__all__ = ["ended", "message", "output_text", "reasoning", "response", "tool_call"]


def response(request: ResponsesRequest, start: AnswerStart, status: str) -> dict[str, Any]:
    """A response without output yet; it says what was asked."""
    body = request.body
    return {
        "id": f"resp_{start.id}",
        "object": "response",
        "created_at": start.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": request.call.parallel_tools,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": body.store is not False,
        "temperature": None,
        "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": None,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": None,
    }


def ended(request: ResponsesRequest, answer: Answer, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The response with its output, its end and what it took."""
    choice = answer.choices[0]
    is_cut = choice.finish_reason is FinishReason.LENGTH
    whole = response(request, answer.start, "incomplete" if is_cut else "completed")
    whole["output"] = list(output)
    whole["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
    whole["usage"] = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": len(choice.token_ids),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + len(choice.token_ids),
    }
    return whole


def reasoning(call_id: str, content: list[dict[str, Any]], *, status: str) -> dict[str, Any]:
    return {"id": f"rs_{call_id}", "type": "reasoning", "status": status, "summary": [], "content": content}


def message(call_id: str, content: list[dict[str, Any]], *, status: str) -> dict[str, Any]:
    return {"id": f"msg_{call_id}", "type": "message", "status": status, "role": "assistant", "content": content}


def output_text(text: str, logprobs: list[dict[str, Any]] | None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def tool_call(call_id: str, index: int, call: ToolRequest, tools: OfferedTools, *, status: str) -> dict[str, Any]:
    """The call as the agent knows the tool; without what it is called with while that is in progress."""
    tool = tools.known_as(call.name)
    item: dict[str, Any] = {
        "id": f"{'ctc' if tool.is_custom else 'fc'}_{call_id}_{index}",
        "type": "custom_tool_call" if tool.is_custom else "function_call",
        "status": status,
        "call_id": call.id,
        "name": tool.name,
    }
    if tool.namespace is not None:
        item["namespace"] = tool.namespace
    key, text = ("input", read_input(call.arguments)) if tool.is_custom else ("arguments", call.arguments)
    return item | {key: "" if status == "in_progress" else text}
