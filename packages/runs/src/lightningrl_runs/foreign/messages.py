"""Chat messages of others in OpenAI's form: content parts, tool calls and results of OpenAI, Anthropic, GenAI's
conventions and LangChain.

    {"role": "assistant", "content": …, "tool_calls": [{"id", "type", "function": {"name", "arguments"}}]}
    {"role": "tool", "tool_call_id": …, "content": …}
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from lightningrl.conventions import parse_attribute
from lightningrl.sanitize import as_text
from lightningrl.tool_schemas import canonical
from lightningrl_runs.foreign import Message, dict_of, dicts_of
from lightningrl_server.gateway.dialects.checks import is_nothing
from lightningrl_server.gateway.dialects.synonyms import (
    ROLES,
    THOUGHT_KEYS,
    THOUGHT_PARTS,
    is_mark,
    is_untrained,
    text_of,
)

__all__ = [
    "FINISHES",
    "NO_TEXT",
    "REPARSED",
    "SWITCHES",
    "UNREAD",
    "UNTRAINED",
    "digest_text",
    "finish_of",
    "note_unread",
    "read_message",
    "read_messages",
    "read_tools",
]

REPARSED: Final = "arguments re-parsed"
"""Arguments came as an object: how the model spelt them is lost."""
NO_TEXT: Final = "parts that are no text"
UNREAD: Final = "not read: "
"""Beginning of a note on a key that holds something and that no reader knows."""
UNTRAINED: Final = "marked as not to be trained on"

FINISHES: Final[Mapping[str, str]] = {
    "stop": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "eos": "stop",
    "completed": "stop",
    "tool_calls": "tool_calls",
    "tool_call": "tool_calls",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "length": "length",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "incomplete": "length",
    "content_filter": "content_filter",
    "refusal": "content_filter",
}
_ROLES: Final = {
    **ROLES,
    "human": "user",
    "ai": "assistant",
    "AIMessage": "assistant",
    "AIMessageChunk": "assistant",
    "HumanMessage": "user",
    "SystemMessage": "system",
    "ToolMessage": "tool",
    "model": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
}
_TEXT_PARTS: Final = {"text", "input_text", "output_text", "refusal"}
_THOUGHTS: Final = {*THOUGHT_PARTS, "summary_text"}
_CALLS: Final = {"tool_call", "tool_use", "function_call"}
_RESULTS: Final = {"tool_call_response", "tool_result", "function_call_output", "tool_response"}
_CALL_LISTS: Final = ("tool_calls", "function_call", "invalid_tool_calls")
_READ: Final = frozenset(
    {
        *("role", "type", "from", "content", "value", "parts", "contents", "id", "name", "refusal", "tool_call_id"),
        *("additional_kwargs", "function_call_name", "function_call_arguments_json", *_CALL_LISTS),
        *THOUGHT_KEYS,
    }
)
_TELLS_NOTHING: Final = frozenset(
    {
        *("annotations", "artifact", "cache_control", "citations", "created", "example", "finish_reason", "index"),
        *("logprobs", "message", "metadata", "model", "object", "response_metadata", "status", "stop_reason"),
        *("stop_sequence", "stop_details", "timestamp", "token_ids", "tool_call_chunks", "usage", "usage_metadata"),
        *("audio", "parsed", "phase", "container", "provider_specific_fields"),
        *("lc_attributes", "uuid", "tool_calls_ids"),
    }
)
"""Keys beside a message that say nothing of its prompt or answer."""


def finish_of(reason: Any) -> str | None:
    """A finish reason in OpenAI's words; None where there is none."""
    if isinstance(reason, list):
        reason = reason[0] if reason else None
    text = str(reason or "").rpartition(".")[2].strip().lower()
    return None if not text or text in ("none", "unknown", "null") else FINISHES.get(text, text)


SWITCHES: Final = ("chat_template_kwargs", "enable_thinking", "think", "thinking", "reasoning", "reasoning_effort")


def note_unread(item: Mapping[str, Any], readable: Collection[str], notes: set[str]) -> None:
    """Note each key that holds something, and that is not readable; attributes with a dot are a span's own."""
    for key, value in item.items():
        # no thoughts, too, is a prompt
        says = value not in (None, {}, [], "") if key in SWITCHES else not is_nothing(value)
        if says and key not in readable and "." not in key:
            notes.add(f"{UNREAD}{key[:60]}")


def read_messages(value: Any, notes: set[str]) -> list[Message] | None:
    """Read a list of messages of whatever form; None where it is none. `notes` takes defects."""
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if isinstance(value, dict):
        value = value.get("messages", [value] if "role" in value or "kwargs" in value else None)
    if not isinstance(value, list):
        return None
    if value and all(isinstance(item, list) and not _is_pair(item) for item in value):  # LangChain's: a batch
        if len(value) > 1:
            notes.add(f"{UNREAD}a batch of {len(value)} prompts")
        value = value[0]
    messages: list[Message] = []
    asked: list[str] = []
    for item in value:
        for message in read_message(item, notes):
            if message["role"] == "assistant":
                asked = [call["id"] for call in message.get("tool_calls") or () if call["id"].startswith(_OLD_CALL)]
            elif message["role"] == "tool" and not message["tool_call_id"] and asked:
                message["tool_call_id"] = asked.pop(0)  # results of 2023 name their function
            messages.append(message)
    return messages or None


def _is_pair(item: Sequence[Any]) -> bool:
    return len(item) == 2 and all(isinstance(part, str) for part in item)


def read_message(item: Any, notes: set[str], role: str = "user") -> list[Message]:
    """Read one message, which may hold results of several tools, each a message of its own."""
    if isinstance(item, str):
        return [{"role": role, "content": item}]
    if isinstance(item, Sequence) and _is_pair(item):
        item = {"role": item[0], "content": item[1]}
    if not isinstance(item, dict):
        return []
    item = _unwrapped(item)
    who = str(item.get("role") or item.get("from") or item.get("type") or role)
    who = _ROLES.get(who, who)
    if who not in ("system", "user", "assistant", "tool"):
        notes.add(f"{UNREAD}{who[:60]}")
    sides = (item, dict_of(item.get("additional_kwargs")))
    for side in sides:
        note_unread(side, _READ | _TELLS_NOTHING | {key for key in side if is_mark(key, side[key])}, notes)
    bodies = (item.get(key) for key in ("parts", "content", "value"))  # a table of rows fills in those that lack
    body = next((each for each in bodies if each not in (None, [], "")), item.get("content"))
    text, calls, results, thoughts = _read_parts(body, notes, may_join=who == "assistant")
    text = as_text(item["refusal"]) if text is None and item.get("refusal") else text
    calls = _told_apart([*(_read_calls(side.get(key), notes) for side in sides for key in _CALL_LISTS), calls])
    named = {"name": item["name"]} if isinstance(item.get("name"), str) and item["name"] and "role" in item else {}
    if who == "tool" and not results:
        call_id = item.get("tool_call_id") or item.get("id") or ""
        return [{"role": "tool", "tool_call_id": str(call_id), "content": text or "", **named}]
    places = (*sides, dict_of(item.get("provider_specific_fields")))
    keyed = next(filter(None, (text_of(side.get(key)) for side in places for key in THOUGHT_KEYS)), "")
    thought = "\n".join(thoughts) or keyed
    message: Message = {"role": who, "content": text if text is not None or calls else "", **named}
    message |= {"tool_calls": calls} if calls else {}
    message |= {"reasoning_content": thought} if thought else {}
    message |= {"weight": 0} if is_untrained(item) else {}
    return [*results, *([message] if text is not None or calls or thought else ())]


def _unwrapped(item: dict[str, Any]) -> dict[str, Any]:
    """A message of LangChain's constructors, of Responses or of OpenInference as one with a role."""
    if isinstance(item.get("kwargs"), dict):
        named = item.get("id")
        kind = named[-1] if isinstance(named, list) and named else ""
        return {"role": _ROLES.get(str(kind), "user"), **item["kwargs"]}
    if isinstance(item.get("data"), dict) and "type" in item:
        return {**item["data"], "role": item["type"]}
    if str(item.get("type")) in _CALLS | _RESULTS | _THOUGHTS and "role" not in item:
        return {"role": "assistant" if item["type"] not in _RESULTS else "tool", "content": [item]}
    if item.get("function_call_name"):
        old = {"name": item["function_call_name"], "arguments": item.get("function_call_arguments_json") or ""}
        return {"function_call": old, **item}
    return item


_OLD_CALL: Final = "function-"
"""Beginning of the id that a call of 2023, which has none, is given."""


def _told_apart(lists: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Join what several keys of a message say of its calls. A call is there once, by its id; where a key tells no id,
    by its name and arguments."""
    calls: list[dict[str, Any]] = []
    words: list[str] = []
    keys: set[tuple[str, str]] = set()
    for more in lists:
        by_id, lacking, alike = (defaultdict[str, deque[int]](deque) for _ in range(3))
        for place, call in enumerate(calls):
            (lacking[words[place]] if _lacks_id(call) else by_id[call["id"]]).append(place)
            alike[words[place]].append(place)
        taken: set[int] = set()
        for call in more:
            same = f"{call['function']['name']} {canonical(call['function']['arguments'])}"
            waiting = [alike[same]] if _lacks_id(call) else [by_id[call["id"]], lacking[same]]
            match = next((each for queue in waiting if (each := _take(queue, taken)) is not None), None)
            if match is not None:
                calls[match] = call if _lacks_id(calls[match]) and call["id"] else calls[match]
            elif not call["id"] or (call["id"], same) not in keys:
                calls.append(call)
                words.append(same)
                keys.add((call["id"], same))
    return calls


def _take(queue: deque[int], taken: set[int]) -> int | None:
    """Take the first place of a queue that was not taken through another."""
    while queue:
        if (place := queue.popleft()) not in taken:
            taken.add(place)
            return place
    return None


def _lacks_id(call: Mapping[str, Any]) -> bool:
    return not call["id"] or call["id"].startswith(_OLD_CALL)


def _read_parts(
    body: Any, notes: set[str], *, may_join: bool = False
) -> tuple[str | None, list[Any], list[Message], list[str]]:
    """Split content into text, tool calls, results of tools and thoughts. Between texts is a newline, as the gateway
    joins them; an answer that is cut at its citations (`may_join`) goes on."""
    if body is None or isinstance(body, str):
        return body, [], [], []
    texts, calls, results, thoughts = list[str](), list[Any](), list[Message](), list[str]()
    gap = "" if may_join and any(part.get("citations") for part in dicts_of(body)) else "\n"
    for part in body if isinstance(body, list) else [body]:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = None if not isinstance(part, dict) or part.get("type") is None else str(part["type"])
        if kind in _TEXT_PARTS or (kind is None and isinstance(part, dict) and isinstance(part.get("text"), str)):
            note_unread(part, _TELLS_NOTHING | {"type", "text", "content", "refusal", "id", "extras"}, notes)
            texts.append(str(part.get("text", part.get("content", part.get("refusal"))) or ""))
        elif kind in _THOUGHTS:
            thoughts.append(text_of(part).strip())
        elif kind in _CALLS:
            calls += _read_calls([part], notes)
        elif kind in _RESULTS:
            results.append(_read_result(part, notes))
        else:
            notes.add(NO_TEXT)
    text = gap.join(filter(None, texts)) if texts else None
    return text, calls, results, [thought for thought in thoughts if thought]


def _read_result(part: Mapping[str, Any], notes: set[str]) -> Message:
    call_id = part.get("tool_use_id") or part.get("tool_call_id") or part.get("call_id") or part.get("id") or ""
    value = next((part[key] for key in ("response", "result", "content", "output") if part.get(key) is not None), "")
    if isinstance(value, list):
        text = _read_parts(value, notes)[0]
        value = value if text is None else text
    text = as_text(value)
    if part.get("is_error") in (True, 1) and not text.lower().startswith("error"):
        text = f"Error: {text}" if text else "Error"  # as the gateway writes it
    return {"role": "tool", "tool_call_id": str(call_id), "content": text}


def _read_calls(calls: Any, notes: set[str]) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = []
    calls = parse_attribute(calls) or calls  # a table's column of JSON
    is_old = isinstance(calls, dict)  # `function_call` of 2023
    for call in calls if isinstance(calls, list) else [calls] if calls else ():
        call = parse_attribute(call)
        if not isinstance(call, dict):
            notes.add(f"{UNREAD}tool_calls")
            continue
        function: dict[str, Any] = next((call[key] for key in ("function", "custom") if dict_of(call.get(key))), call)
        note_unread({**call, **function}, _CALL_KEYS, notes)
        arguments = next((function[key] for key in ("arguments", "args", "input") if key in function), "")
        if not isinstance(arguments, str):
            notes.add(REPARSED)
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = str(function.get("name") or "")
        call_id = str(call.get("call_id") or call.get("id") or "")
        if is_old and name and not call_id:
            call_id = (
                f"{_OLD_CALL}{blake2b(f'{name} {arguments}'.encode('utf-8', 'replace'), digest_size=6).hexdigest()}"
            )
        if name or arguments or call_id:
            read.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return read


_CALL_KEYS: Final = frozenset(
    {
        *("id", "call_id", "type", "function", "custom", "name", "arguments", "args", "input", "index", "status"),
        *("error", "caller", "cache_control", "extra_content", "provider_specific_fields"),
        *("thought_signature", "object"),
    }
)


_SCHEMAS: Final = ("parameters", "input_schema", "json_schema", "inputSchema", "args_schema", "schema")


def read_tools(value: Any, notes: set[str]) -> list[dict[str, Any]] | None:
    """Read tools that a request offered as OpenAI's schemas, of OpenAI's, Anthropic's or Responses' form; None = the
    trace does not say. `notes` takes those that cannot be read, such as a provider's own without a name."""
    value = parse_attribute(value) or value
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        note_unread({"tools": value}, (), notes)
        return None
    tools: list[dict[str, Any]] = []
    for item in value:
        if isinstance(item, str):
            tools += read_tools(item, notes) or ()
            continue
        tool = dict_of(item)
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        schema = parse_attribute(next((function[key] for key in _SCHEMAS if function.get(key)), None))
        is_hosted = schema is None and str(tool.get("type") or "function") not in ("function", "custom")
        if is_hosted or not function.get("name"):
            note_unread({"tools": item}, (), notes)
            continue
        described = {key: function[key] for key in ("name", "description") if function.get(key)}
        strict = {"strict": function["strict"]} if function.get("strict") is not None else {}
        parameters = {"parameters": schema} if isinstance(schema, dict) else {}
        tools.append({"type": "function", "function": {**described, **parameters, **strict}})
    return tools


def digest_text(messages: Iterable[Message]) -> str:
    """Write messages as one text that is equal where they say the same, however arguments are spelt."""
    lines: list[Any] = []
    for message in messages:
        calls = [
            (call.get("id"), call["function"]["name"], canonical(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ]
        lines.append((message["role"], (message.get("content") or "").strip(), calls, message.get("tool_call_id")))
    return json.dumps(lines, ensure_ascii=False)
