"""Bodies of OpenAI's API that a trace holds whole: a request, and a response of Chat Completions or Responses, with
vLLM's token ids and our gateway's version of the policy; and streamed answers, as the bodies that they would have been.

data: {"choices": [{"delta": {"content": "4"}}]}⏎⏎data: {…"2"…}   ─►   {"choices": [{"message": {"content": "42"}}]}
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from lightningrl_runs.foreign import dict_of, dicts_of
from lightningrl_runs.foreign.messages import (
    SWITCHES,
    finish_of,
    note_unread,
    read_message,
    read_messages,
    read_tools,
)
from lightningrl_server.gateway.dialects.synonyms import THOUGHT_KEYS

__all__ = [
    "DOUBLED",
    "SAMPLING",
    "binding_of",
    "join_events",
    "note_beside",
    "read_request",
    "read_response",
    "sampling_of",
    "tools_beside",
    "version_of",
]

DOUBLED: Final = "prompt ids doubled by streaming"
SAMPLING: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "seed": "seed",
}
_REQUEST: Final = frozenset(
    {
        *("messages", "input", "instructions", "system", "tools", "functions", "model", *SAMPLING),
        *("stream", "stream_options", "n", "stop", "stop_sequences"),
        *("parallel_tool_calls", "user", "store", "metadata"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logprobs"),
        *("top_logprobs", "timeout"),
        *("reasoning", "reasoning_effort", "thinking", "verbosity", "include", "truncation", "service_tier", "betas"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "extra_headers", "extra_query", "type"),
        *("background", "cache_control", "anthropic_version", "return_token_ids", "skip_special_tokens", "_type"),
        *("client_metadata", "prediction", "request_id", "priority", "cache_salt"),
        *("context_management", "output_config"),
    }
)
"""Keys of a request that are read, or say nothing of its prompt and of what an answer is bound to."""
_BINDING: Final = (
    *("tool_choice", "response_format", "logit_bias", "previous_response_id"),
    *("chat_template_kwargs", "enable_thinking", "think"),
)
_AMOUNTS: Final = ("type", "effort", "enabled", "budget_tokens", "max_tokens")
_VERSION: Final = re.compile(r"[A-Za-z0-9][\w.-]*@(\d{1,9})")


def sampling_of(settings: Any) -> dict[str, Any]:
    """Pick the settings of sampling of a request."""
    if not isinstance(settings, Mapping):
        return {}
    numbers = {SAMPLING[key]: value for key, value in settings.items() if key in SAMPLING}
    return {key: number for key, value in numbers.items() if (number := _number(value)) is not None}


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number.is_integer() and not isinstance(value, float) and "." not in str(value) else number


def version_of(fingerprint: Any) -> int | None:
    """Version of a policy of ours that answered, `policy@12`; None where another server did."""
    match = _VERSION.fullmatch(fingerprint) if isinstance(fingerprint, str) else None
    return None if match is None else int(match[1])


def read_request(body: Any, notes: set[str]) -> dict[str, Any]:
    """Read a request as fields of a `Call`."""
    if not isinstance(body, dict):
        return {}
    body = {**dict_of(body.get("extra_body")), **body}
    free = {key: body[key] for key in ("tool_choice", "response_format", "text") if _is_free(body.get(key))}
    note_unread(body, (_REQUEST | free.keys() | {"extra_body"}) - binding_of(body).keys(), notes)
    fields: dict[str, Any] = {"sampling": sampling_of(body)}
    if body.get("messages"):
        fields["messages"] = read_messages(body["messages"], notes)
        note_beside(body, ("instructions", "input"), fields["messages"], notes)
    elif "input" in body:
        instructions = {"role": "system", "content": body.get("instructions")}
        system = read_message(instructions, notes) if body.get("instructions") else []
        replies = read_messages(body["input"], notes)
        fields["messages"] = None if replies is None else [*system, *_joined(replies)]
    if body.get("system") and fields.get("messages"):  # Anthropic's
        system = read_message({"role": "system", "content": body["system"]}, notes)
        fields["messages"] = [*system, *fields["messages"]]
    if (tools := read_tools(body.get("tools") or body.get("functions"), notes)) is not None:
        fields["tools"] = tools
    return {key: value for key, value in fields.items() if value is not None}


def _is_free(value: Any) -> bool:
    """True for a choice of tools or a format that binds the answer to nothing."""
    kind = value.get("format", value) if isinstance(value, dict) else value
    kind = kind.get("type", "text" if "verbosity" in kind else "") if isinstance(kind, dict) else kind
    return kind in ("auto", "text")


def _is_off(value: Any) -> bool:
    """True for a setting of reasoning that asks for none."""
    amounts = [value.get(key) for key in _AMOUNTS] if isinstance(value, dict) else [value]
    words = [str(amount).lower() for amount in amounts if amount is not None]
    return any(word in ("none", "disabled", "off", "false", "0") for word in words)


def binding_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Pick what changes a call's prompt or binds its answer, and is kept nowhere."""
    free = {key for key in ("tool_choice", "response_format") if _is_free(settings.get(key))}
    keys = {*_BINDING, *(key for key in SWITCHES if _is_off(settings.get(key)))} - free
    return {key: value for key, value in settings.items() if key in keys and value not in (None, {}, [], "")}


def note_beside(
    body: Mapping[str, Any], keys: Sequence[str], messages: Sequence[Mapping[str, Any]] | None, notes: set[str]
) -> None:
    """Note what stands beside messages that are the whole prompt, and in none of them."""
    texts = [body.get("messages"), *(message.get("content") for message in messages or ())]
    note_unread({key: body[key] for key in keys if key in body and body[key] not in texts}, (), notes)


def tools_beside(settings: Any, notes: set[str]) -> list[dict[str, Any]] | None:
    """Tools among the settings of a call, told beside its messages. Notes others of them that change its prompt or bind
    its answer."""
    given = {**dict_of(dict_of(settings).get("extra_body")), **dict_of(settings)}
    note_unread(binding_of(given), (), notes)
    return read_tools(given.get("tools") or given.get("functions"), notes)


def read_response(body: Any, notes: set[str]) -> dict[str, Any]:
    """Read a response as fields of a `Call`."""
    if not isinstance(body, dict):
        return {}
    usage = dict_of(body.get("usage"))
    fields: dict[str, Any] = {
        "version": version_of(body.get("system_fingerprint")),
        "model": body.get("model") or None,
        "prompt_tokens": usage.get("prompt_tokens", usage.get("input_tokens")),
    }
    choices = dicts_of(body.get("choices"))
    if choices:  # of several the first by its index, as of a stream
        choice = next((choice for choice in choices if choice.get("index") in (0, None)), choices[0])
        fields |= _read_choice(choice, notes)
        fields["prompt_ids"] = _prompt_ids(body, choice, fields["prompt_tokens"], notes)
    elif isinstance(body.get("output"), list):
        items = dicts_of(body["output"])
        replies = _joined([message for item in items for message in read_message(item, notes, "assistant")])
        fields["answer"] = replies[-1] if replies else None
        reason = finish_of(body.get("status"))
        fields["finish_reason"] = (
            "tool_calls" if reason == "stop" and replies and "tool_calls" in replies[-1] else reason
        )
    elif body.get("type") == "message" and isinstance(body.get("content"), list):  # Anthropic's
        replies = read_message({"role": "assistant", "content": body["content"]}, notes)
        fields |= {"answer": replies[-1] if replies else None, "finish_reason": finish_of(body.get("stop_reason"))}
    return {key: value for key, value in fields.items() if value is not None}


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join what Responses tells as several items, text, thoughts and tool calls, to one message each turn."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is None or message["role"] != "assistant" or last["role"] != "assistant":
            joined.append(dict(message))
            continue
        last["content"] = "".join(part for part in (last.get("content"), message.get("content")) if part) or None
        calls = last.get("tool_calls", [])  # an item that is told twice is one call
        if more := [call for call in message.get("tool_calls", ()) if not call["id"] or call not in calls]:
            last["tool_calls"] = [*calls, *more]
        if "reasoning_content" in message:
            thoughts = (last.get("reasoning_content"), message["reasoning_content"])
            last["reasoning_content"] = "\n".join(filter(None, thoughts))
    return joined


def _read_choice(choice: Mapping[str, Any], notes: set[str]) -> dict[str, Any]:
    raw = choice.get("message")
    replies = read_message({"role": "assistant", **raw}, notes) if isinstance(raw, dict) else []
    if not replies and isinstance(choice.get("text"), str):
        replies = [{"role": "assistant", "content": choice["text"]}]
    logprobs = choice.get("logprobs")
    listed = logprobs.get("content") if isinstance(logprobs, dict) else None
    ids = choice.get("token_ids")
    return {
        "answer": replies[-1] if replies else None,
        "finish_reason": finish_of(choice.get("finish_reason")),
        "completion_ids": ids if isinstance(ids, list) and ids else None,
        "logprobs": [token.get("logprob") for token in listed] if isinstance(listed, list) and listed else None,
    }


def _prompt_ids(
    body: Mapping[str, Any], choice: Mapping[str, Any], counted: int | None, notes: set[str]
) -> list[int] | None:
    """Return the prompt's ids. A client that adds up the chunks of a stream adds these, too: `[1, 2, 1, 2]`."""
    ids = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
    if not isinstance(ids, list) or not ids:
        return None
    half = len(ids) // 2
    if len(ids) % 2 == 0 and ids[:half] == ids[half:] and counted != len(ids):
        notes.add(DOUBLED)
        return ids[:half]
    return ids


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
