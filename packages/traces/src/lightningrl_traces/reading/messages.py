"""Chat messages of others in OpenAI's form: content parts, tool calls and results of OpenAI, Anthropic, GenAI's
conventions and LangChain.

    {"role": "assistant", "content": …, "tool_calls": [{"id", "type", "function": {"name", "arguments"}}]}
    {"role": "tool", "tool_call_id": …, "content": …}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from lightningrl.sanitize import as_text
from lightningrl.tool_schemas import canonical
from lightningrl_traces.documents import dict_of
from lightningrl_traces.records import Message

__all__ = ["FINISHES", "NO_TEXT", "REPARSED", "digest_text", "finish_of", "read_message", "read_messages", "read_tools"]

REPARSED: Final = "arguments re-parsed"
"""Arguments came as an object: how the model spelt them is lost."""
NO_TEXT: Final = "parts that are no text"

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
    "human": "user",
    "ai": "assistant",
    "AIMessage": "assistant",
    "AIMessageChunk": "assistant",
    "HumanMessage": "user",
    "SystemMessage": "system",
    "ToolMessage": "tool",
    "developer": "system",
    "model": "assistant",
    "function": "tool",
}
_TEXT_PARTS: Final = {"text", "input_text", "output_text", "refusal"}
_THOUGHTS: Final = {"reasoning", "thinking", "redacted_thinking", "summary_text"}
_CALLS: Final = {"tool_call", "tool_use", "function_call"}
_RESULTS: Final = {"tool_call_response", "tool_result", "function_call_output", "tool_response"}


def finish_of(reason: Any) -> str | None:
    """A finish reason in OpenAI's words; None where there is none."""
    if isinstance(reason, list):
        reason = reason[0] if reason else None
    text = str(reason or "").rpartition(".")[2].strip().lower()
    return None if not text or text in ("none", "unknown", "null") else FINISHES.get(text, text)


def read_messages(value: Any, notes: set[str]) -> list[Message] | None:
    """Read a list of messages of whatever form; None where it is none. `notes` takes defects."""
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if isinstance(value, dict):
        value = value.get("messages", [value] if "role" in value or "kwargs" in value else None)
    if not isinstance(value, list):
        return None
    if len(value) == 1 and isinstance(value[0], list):  # LangChain's: a batch of one
        value = value[0]
    messages: list[Message] = []
    for item in value:
        messages += read_message(item, notes)
    return messages or None


def read_message(item: Any, notes: set[str], role: str = "user") -> list[Message]:
    """Read one message, which may hold results of several tools, each a message of its own."""
    if isinstance(item, str):
        return [{"role": role, "content": item}]
    if isinstance(item, Sequence) and len(item) == 2 and all(isinstance(part, str) for part in item):
        return [{"role": _ROLES.get(item[0], item[0]), "content": item[1]}]
    if not isinstance(item, dict):
        return []
    if isinstance(item.get("kwargs"), dict):  # LangChain's constructor
        named = item.get("id")
        kind = named[-1] if isinstance(named, list) and named else ""
        item = {"role": _ROLES.get(str(kind), "user"), **item["kwargs"]}
    elif isinstance(item.get("data"), dict) and "type" in item:
        item = {**item["data"], "role": item["type"]}
    elif str(item.get("type")) in _CALLS | _RESULTS | _THOUGHTS and "role" not in item:  # an item of Responses
        item = {"role": "assistant" if item["type"] not in _RESULTS else "tool", "content": [item]}
    who = str(item.get("role") or item.get("type") or role)
    who = _ROLES.get(who, who)
    body = item["parts"] if "parts" in item else item.get("content")
    text, calls, results, thoughts = _read_parts(body, notes)
    calls += _read_calls(item.get("tool_calls"), notes) or _read_calls(
        (item.get("additional_kwargs") or {}).get("tool_calls"), notes
    )
    messages: list[Message] = list(results)
    if who == "tool" and not results:
        call_id = item.get("tool_call_id") or item.get("id") or ""
        return [{"role": "tool", "tool_call_id": str(call_id), "content": text or ""}]
    if text is None and not calls and not thoughts:
        return messages
    message: Message = {"role": who, "content": text if text is not None or calls else ""}
    if calls:
        message["tool_calls"] = calls
    if thoughts or isinstance(item.get("reasoning_content"), str):
        message["reasoning_content"] = "\n".join(thoughts) or item["reasoning_content"]
    return [*messages, message]


def _read_parts(body: Any, notes: set[str]) -> tuple[str | None, list[Any], list[Message], list[str]]:
    """Split content into text, tool calls, results of tools and thoughts."""
    if body is None or isinstance(body, str):
        return body, [], [], []
    texts, calls, results, thoughts = list[str](), list[Any](), list[Message](), list[str]()
    for part in body if isinstance(body, list) else [body]:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = None if not isinstance(part, dict) or part.get("type") is None else str(part["type"])
        if kind in _TEXT_PARTS or (kind is None and isinstance(part, dict) and isinstance(part.get("text"), str)):
            texts.append(str(part.get("text", part.get("content", part.get("refusal"))) or ""))
        elif kind in _THOUGHTS:
            thoughts.append(_thought(part))
        elif kind in _CALLS:
            calls += _read_calls([part], notes)
        elif kind in _RESULTS:
            results.append(_read_result(part, notes))
        else:
            notes.add(NO_TEXT)
    return "".join(texts) if texts else None, calls, results, [thought for thought in thoughts if thought]


def _thought(part: Mapping[str, Any]) -> str:
    text = part.get("content") or part.get("thinking") or part.get("text") or part.get("summary") or ""
    parts = text if isinstance(text, list) else [text]
    return "\n".join(str(one.get("text") or "") if isinstance(one, dict) else str(one) for one in parts).strip()


def _read_result(part: Mapping[str, Any], notes: set[str]) -> Message:
    call_id = part.get("tool_use_id") or part.get("tool_call_id") or part.get("call_id") or part.get("id") or ""
    value = next((part[key] for key in ("response", "result", "content", "output") if part.get(key) is not None), "")
    if isinstance(value, list):
        text = _read_parts(value, notes)[0]
        value = value if text is None else text
    return {"role": "tool", "tool_call_id": str(call_id), "content": as_text(value)}


def _read_calls(calls: Any, notes: set[str]) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = []
    for call in calls if isinstance(calls, list) else ():
        if not isinstance(call, dict):
            continue
        function: dict[str, Any] = call["function"] if isinstance(call.get("function"), dict) else call
        arguments = next((function[key] for key in ("arguments", "args", "input") if key in function), "")
        if not isinstance(arguments, str):
            notes.add(REPARSED)
            arguments = json.dumps(arguments, ensure_ascii=False)
        call_id = call.get("call_id") or call.get("id") or ""
        name = str(function.get("name") or "")
        read.append({"id": str(call_id), "type": "function", "function": {"name": name, "arguments": arguments}})
    return read


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Read tools that a request offered as OpenAI's schemas, of OpenAI's, Anthropic's or Responses' form; None = the
    trace does not say."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        return None
    tools: list[dict[str, Any]] = []
    for item in value:
        if isinstance(item, str):
            tools += read_tools(item) or ()
            continue
        tool = dict_of(item)
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        schema = next(
            (function[key] for key in ("parameters", "input_schema", "json_schema") if function.get(key)), None
        )
        if isinstance(schema, str):
            schema = _parsed(schema)
        if not function.get("name"):
            continue
        described = {key: function[key] for key in ("name", "description") if function.get(key)}
        strict = {"strict": function["strict"]} if function.get("strict") is not None else {}
        parameters = {"parameters": schema} if isinstance(schema, dict) else {}
        tools.append({"type": "function", "function": {**described, **parameters, **strict}})
    return tools


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


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
