"""The responses wire format for the scripted server: items become the messages that an answer function reads, its message becomes items."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.responses import JSONResponse, Response

__all__ = ["respond", "responses_messages", "stream_response_events"]


def responses_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """What a chat request with the same content would carry."""
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    items = body.get("input") or []
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for item in items:
        if item.get("type") == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            messages.append(
                {"role": "assistant", "content": None, "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}
            )
        elif item.get("type") == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text_of(item["output"])})
        elif item.get("role"):
            messages.append({"role": item["role"], "content": text_of(item["content"])})
    return messages


def respond(body: dict[str, Any], message: dict[str, Any]) -> Response:
    """The answer in one piece."""
    return JSONResponse(build_response(body, "completed", list(items_of(message))))


async def stream_response_events(body: dict[str, Any], message: dict[str, Any]) -> AsyncIterator[str]:
    """The answer as server-sent events."""
    events: list[dict[str, Any]] = []
    response = build_response(body, "in_progress", [])
    events += [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]
    items = list(items_of(message))
    for index, item in enumerate(items):
        is_text = item["type"] == "message"
        empty: dict[str, Any] = {"content": []} if is_text else {"arguments": ""}
        begun = {**item, **empty, "status": "in_progress"}
        events.append({"type": "response.output_item.added", "output_index": index, "item": begun})
        where: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if is_text:
            part = item["content"][0]
            where["content_index"] = 0
            events.append({"type": "response.content_part.added", **where, "part": {**part, "text": ""}})
            for piece in re.findall(r"\S+\s*", part["text"]):
                events.append({"type": "response.output_text.delta", **where, "delta": piece, "logprobs": []})
            events.append({"type": "response.output_text.done", **where, "text": part["text"], "logprobs": []})
            events.append({"type": "response.content_part.done", **where, "part": part})
        elif item["type"] == "function_call":
            events.append({"type": "response.function_call_arguments.delta", **where, "delta": item["arguments"]})
            events.append({"type": "response.function_call_arguments.done", **where, "arguments": item["arguments"]})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": {**response, "status": "completed", "output": items}})
    for number, event in enumerate(events):
        yield f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n"


def build_response(body: dict[str, Any], status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": 0,
        "status": status,
        "model": body["model"],
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": 1,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 1,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 2,
        },
    }


def items_of(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A chat message as output items; `items` of the message, where there are any, come first, as they are."""
    yield from message.get("items") or ()
    if message.get("content"):
        part = {"type": "output_text", "text": message["content"], "annotations": []}
        yield {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    for call in message.get("tool_calls") or ():
        yield {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
        }


def text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content)
