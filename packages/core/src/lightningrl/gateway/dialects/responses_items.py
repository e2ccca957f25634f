"""OpenAI responses: the objects of an answer, whole or streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightningrl.gateway.dialects.responses import ResponsesRequest
from lightningrl.gateway.request import Answer, AnswerStart
from lightningrl.rendering.completion import ToolRequest
from lightningrl.types import FinishReason

__all__ = ["ended", "function_call", "message", "output_text", "reasoning", "response"]


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


def function_call(call_id: str, index: int, call: ToolRequest, *, status: str, arguments: str | None = None) -> dict[str, Any]:
    """`arguments` where they are not all there yet."""
    return {
        "id": f"fc_{call_id}_{index}",
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments if arguments is None else arguments,
    }
