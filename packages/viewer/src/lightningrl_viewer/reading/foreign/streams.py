"""Streamed answers of chat as the bodies that they would have been: Chat Completions, Responses and Messages.

data: {"choices": [{"delta": {"content": "4"}}]}⏎⏎data: {…"2"…}   ─►   {"choices": [{"message": {"content": "42"}}]}
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lightningrl_server.gateway.dialects.synonyms import THOUGHT_KEYS
from lightningrl_viewer.reading.foreign import dict_of, dicts_of

__all__ = ["join_events"]

Event = dict[str, Any]


def join_events(text: str) -> dict[str, Any] | None:
    """Join a stream of server-sent events to one body; None where it is none of these, or broke off."""
    events = _read_events(text)
    kinds = {str(event.get("type")) for event in events}
    if any("choices" in event for event in events):
        return _join_chat(events)
    if "message_start" in kinds:
        return _join_messages(events) if "message_stop" in kinds else None
    ends = [event for event in events if event.get("type") in ("response.completed", "response.incomplete")]
    return dict_of(ends[-1].get("response")) if ends else None


def _read_events(text: str) -> list[Event]:
    """Read the JSON objects of a stream; other data, such as `[DONE]`, is left out."""
    events: list[Any] = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        lines = (line.removeprefix("data:").removeprefix(" ") for line in block.split("\n") if line.startswith("data:"))
        try:
            events.append(json.loads("\n".join(lines)))
        except (ValueError, RecursionError):
            continue
    return dicts_of(events)


def _join_chat(events: Sequence[Event]) -> dict[str, Any] | None:
    """Join the pieces of the first choice."""
    texts: defaultdict[str, list[str]] = defaultdict(list)
    calls: dict[int, dict[str, Any]] = {}
    reason = None
    for choice in (choice for event in events for choice in dicts_of(event.get("choices"))):
        if choice.get("index", 0) != 0:
            continue
        reason = choice.get("finish_reason") or reason
        delta = dict_of(choice.get("delta"))
        for name, piece in {**delta, "text": choice.get("text")}.items():
            if name in ("content", "refusal", "text", *THOUGHT_KEYS) and isinstance(piece, str):
                texts[name].append(piece)
        old = dict_of(delta.get("function_call"))
        for number, part in enumerate([{"function": old}] if old else dicts_of(delta.get("tool_calls"))):
            place, function = part.get("index"), dict_of(part.get("function"))
            call = calls.setdefault(place if isinstance(place, int) else number, {"name": "", "arguments": []})
            call["id"] = part.get("id") or call.get("id")
            call["name"] = function.get("name") or call["name"]
            call["arguments"].append(str(function.get("arguments") or ""))
    if reason is None:
        return None
    message: dict[str, Any] = {name: "".join(pieces) for name, pieces in texts.items() if name != "text"}
    if calls:
        message["content"] = message.get("content") or None
        message["tool_calls"] = [
            {
                "id": calls[place]["id"],
                "type": "function",
                "function": {"name": calls[place]["name"], "arguments": "".join(calls[place]["arguments"])},
            }
            for place in sorted(calls)
        ]
    choice = {"text": "".join(texts["text"])} if texts["text"] else {"message": {"role": "assistant", **message}}
    return {"model": events[0].get("model"), "choices": [{**choice, "finish_reason": reason}]}


def _join_messages(events: Sequence[Event]) -> dict[str, Any]:
    """Join the content blocks of Anthropic's Messages."""
    body = dict_of(next(event for event in events if event.get("type") == "message_start").get("message"))
    blocks: dict[int, dict[str, Any]] = {}
    pieces: defaultdict[tuple[int, str], list[str]] = defaultdict(list)
    for event in events:
        place, delta = event.get("index"), dict_of(event.get("delta"))
        if event.get("type") == "message_delta":
            body = {**body, "stop_reason": delta.get("stop_reason")}
        if not isinstance(place, int):
            continue
        if event.get("type") == "content_block_start":
            blocks[place] = dict(dict_of(event.get("content_block")))
        for name, field in (("text", "text"), ("thinking", "thinking"), ("partial_json", "input")):
            if isinstance(delta.get(name), str) and place in blocks:
                pieces[place, field].append(delta[name])
    for (place, field), more in pieces.items():
        before = blocks[place].get(field)
        blocks[place][field] = "".join([before if isinstance(before, str) else "", *more])
    for block in blocks.values():
        if isinstance(block.get("input"), str):
            with suppress(ValueError, RecursionError):  # malformed arguments stay as they were written
                block["input"] = json.loads(block["input"] or "{}")
    return {**body, "content": [blocks[place] for place in sorted(blocks)]}
