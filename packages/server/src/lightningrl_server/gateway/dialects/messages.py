"""Anthropic messages: the request, checked and put into our own terms.

    system                               ─► system message
    user: tool_result…, text…            ─► one tool message for each result, then a user message
    assistant: thinking, text, tool_use  ─► assistant message with reasoning and tool calls

Fields that change nothing here (`metadata`, `cache_control`, `service_tier`, …) are ignored; `temperature`, `top_p` and
`top_k` are the run's to decide; what cannot be honoured is refused with a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lightningrl_server.gateway.dialects import checks
from lightningrl_server.gateway.dialects.context_edits import read_edits
from lightningrl_server.gateway.dialects.schemas import read_format, with_instruction
from lightningrl_server.gateway.dialects.tools import function_tool, hosted_hint, read_offer
from lightningrl_server.gateway.request import AnswerFormat, CallRequest, Refusal

__all__ = ["MessagesRequest", "parse_messages_request"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MessagesRequest:
    """A messages request."""

    call: CallRequest
    manages_context: bool
    """The answer says which edits of the prompt were done."""
    shows_thinking: bool
    """Thinking blocks are part of the answer only where the agent asked for them; others read `content[0].text`."""


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any] | str]


class _Body(msgspec.Struct):
    messages: list[_Message]
    model: str = ""
    max_tokens: checks.Number = None
    system: str | list[dict[str, Any] | str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | str | None = None
    stop_sequences: list[str] | None = None
    temperature: Any = None
    top_p: Any = None
    stream: bool | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None
    thread: Any = None
    compaction: Any = None
    context_management: Any = None
    previous_response_id: Any = None


_decode = msgspec.json.Decoder(_Body).decode
_CHOICES = "'auto', 'none', 'any', or 'tool' with its name"
_OWN = {
    "instructions": "system",
    "format": "output_config.format",
    "bound": "max_tokens",
    "stop": "stop_sequences",
    "tools": "tools",
}
_REFUSED = {
    "previous_response_id": "a message goes on from no previous_response_id; send the whole history in messages, or "
    "use /responses",
    "mcp_servers": "mcp_servers are not supported; give the agent the server's tools as its own",
    "compaction": "compaction is not supported: the policy would learn from a prompt that the agent did not write; "
    "shorten the messages yourself",
}


def parse_messages_request(data: bytes, *, drops_hosted: bool = False) -> MessagesRequest:
    """Raises Refusal with what is wrong, which, and what next."""
    body = checks.decode_body(_decode, data, "messages request")
    _refuse_unsupported(body)
    if not body.messages:
        raise Refusal("the request has no messages; send at least one", param="messages")
    if body.messages[-1].role == "assistant":
        raise Refusal(
            "the last message is the assistant's: a policy does not go on with an answer that was written for it; end "
            "with the user's",
            param="messages",
        )
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": checks.join_text(body.system, "system")})
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{index}]")
    checks.check_count("messages", messages)
    checks.check_tool_call_ids(messages)
    choice = body.tool_choice if isinstance(body.tool_choice, dict) else {}
    offer = read_offer(body.tools, _tool, body.tool_choice, drops_hosted=drops_hosted, choices=_CHOICES)
    wanted = _format(body)
    call = CallRequest(
        model=body.model,
        messages=tuple(messages) if wanted is None else with_instruction(messages, wanted),
        format=wanted,
        parallel_tools=choice.get("disable_parallel_tool_use") is not True,
        stream=bool(body.stream),
        max_tokens=checks.read_whole("max_tokens", body.max_tokens, 1),
        stop=checks.read_stop("stop_sequences", body.stop_sequences),
        edits=read_edits(body.context_management, messages),
        asked=checks.read_asked(temperature=body.temperature, top_p=body.top_p),
        failed_tools=_failed_tools(body.messages),
        extras=checks.read_extras(data, _Body, own=_OWN),
        **offer,
    )
    manages, shows = body.context_management is not None, (body.thinking or {}).get("type") not in (None, "disabled")
    return MessagesRequest(call=call, manages_context=manages, shows_thinking=shows)


def _refuse_unsupported(body: _Body) -> None:
    checks.refuse_fields(body, _REFUSED)
    if body.thread:  # the SDK's tool runner asks for one first, reads the details, and goes on with whole histories
        raise Refusal(
            "threads are not kept here; send the whole history in messages",
            param="thread",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )
    if any(body.container.values()) if isinstance(body.container, dict) else body.container:
        raise Refusal("containers are not supported; the policy runs no code of its own", param="container")


def _messages(message: _Message, where: str) -> Iterator[dict[str, Any]]:
    if message.role not in ("user", "assistant", "system"):
        raise Refusal.at(where, f"has the role {message.role!r}; known are user, assistant, system", field=".role")
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
    elif message.role == "assistant":
        yield _assistant(message.content, where)
    else:
        yield from _others(message.role, message.content, where)


def _assistant(blocks: list[dict[str, Any] | str], where: str) -> dict[str, Any]:
    texts: list[dict[str, Any] | str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        kind = "text" if isinstance(block, str) else block.get("type")
        if isinstance(block, str) or kind == "text":
            texts.append(block)
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", f"{where}.content[{index}]"))
        elif kind == "tool_use":
            calls.append(_tool_use(block, f"{where}.content[{index}]"))
        elif kind != "redacted_thinking":  # nothing of it can be read
            raise _unsupported(kind, f"{where}.content[{index}]")
    plain: dict[str, Any] = {"role": "assistant", "content": checks.join_text(texts, where)}
    if thoughts:
        plain["reasoning_content"] = "\n".join(thoughts)
    if calls:
        plain["tool_calls"] = calls
    return plain


def _others(role: str, blocks: list[dict[str, Any] | str], where: str) -> Iterator[dict[str, Any]]:
    texts: list[dict[str, Any] | str] = []
    for index, block in enumerate(blocks):
        kind = "text" if isinstance(block, str) else block.get("type")
        if isinstance(block, str) or kind in ("text", *checks.DOCUMENTS):
            texts.append(block)
        elif kind == "tool_result" and role == "user":
            if texts:
                yield {"role": role, "content": checks.join_text(texts, where)}
                texts = []
            yield _tool_result(block, f"{where}.content[{index}]")
        else:
            raise _unsupported(kind, f"{where}.content[{index}]")
    if texts or not blocks:
        yield {"role": role, "content": checks.join_text(texts, where)}


def _tool_use(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = checks.read_arguments(block.get("input"), where)
    if not isinstance(arguments, dict):
        raise Refusal.at(where, "has an input that is no object; send the tool's arguments as one")
    name, call_id = _string(block, "name", where), _string(block, "id", where)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    if not checks.is_parts(content):
        raise Refusal.at(where, "has a content that is neither text nor blocks")
    text = checks.join_text(content, where)
    if _is_failed(block) and not text.lower().startswith("error"):
        text = f"Error: {text}" if text else "Error"  # the other dialects have no flag either: the policy reads it
    return {"role": "tool", "content": text, "tool_call_id": _string(block, "tool_use_id", where)}


def _failed_tools(messages: Sequence[_Message]) -> dict[str, str]:
    """The results of tools with `is_error`, which the policy reads with "Error" before them."""
    blocks = (block for message in messages if not isinstance(message.content, str) for block in message.content)
    return {
        _string(block, "tool_use_id", "messages"): checks.join_text(block.get("content"), "messages")
        for block in blocks
        if isinstance(block, dict) and block.get("type") == "tool_result" and _is_failed(block)
    }


def _is_failed(block: dict[str, Any]) -> bool:
    return block.get("is_error") in (True, 1)


def _string(block: dict[str, Any], key: str, where: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise Refusal.at(where, f"has no {key}; a block of type {block.get('type')!r} needs one")
    return value


def _unsupported(kind: Any, where: str) -> Refusal:
    read = "text, thinking, tool_use of its own and tool_result of the user"
    return Refusal.at(where, f"is a block of type {kind!r}; the policy reads {read}")


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        remedy = f"give it with an input_schema{hosted_hint(kind)}"
        raise Refusal.at(where, f"is of type {kind!r}; only tools of the agent's own are supported: {remedy}")
    return function_tool(where, tool.get("name"), _with_examples(tool, where), tool.get("input_schema"))


def _with_examples(tool: dict[str, Any], where: str) -> str | None:
    """The description, and the examples of the tool's input, which a model reads."""
    description, examples = tool.get("description"), tool.get("input_examples") or []
    if not isinstance(examples, list) or not all(isinstance(example, dict) for example in examples):
        raise Refusal.at(where, "has input_examples that are no list of objects")
    if not examples:
        return description
    shown = "\n".join(json.dumps(example, ensure_ascii=False) for example in examples)
    return f"{description or ''}\n\nExamples of its input:\n{shown}".lstrip()


def _format(body: _Body) -> AnswerFormat | None:
    wanted = (body.output_config or {}).get("format") or body.output_format
    return read_format(wanted, "output_config.format") if isinstance(wanted, dict) else None
