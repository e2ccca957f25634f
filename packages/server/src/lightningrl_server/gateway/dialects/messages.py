"""Anthropic messages: the request, checked and put into our own terms; answers, server-sent events and errors.

    system                               ─► system message
    user: tool_result…, text…            ─► one tool message for each result, then a user message
    assistant: thinking, text, tool_use  ─► assistant message with reasoning and tool calls

Fields that change nothing here (`metadata`, `cache_control`, `service_tier`, …) are ignored; `temperature`, `top_p` and
`top_k` are the run's to decide; what cannot be honoured is refused with a sentence.

message_start ─► (content_block_start ─► content_block_delta… ─► content_block_stop)… ─► message_delta ─► message_stop
                  thinking, text, tool_use: in this order, as in a whole answer
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from lightningrl.types import FinishReason
from lightningrl_server.gateway.dialects import checks
from lightningrl_server.gateway.dialects.checks import read_format, with_instruction
from lightningrl_server.gateway.dialects.context_edits import read_edits
from lightningrl_server.gateway.dialects.format import PartStream
from lightningrl_server.gateway.dialects.tools import function_tool, hosted_hint, read_offer
from lightningrl_server.gateway.request import CONTEXT_CODE, Answer, AnswerFormat, AnswerStart, CallRequest, Refusal
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.rendering.completion import Choice, TextDelta, ToolRequest
from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = ["MessagesFormat", "MessagesRequest", "MessagesStream", "parse_messages_request"]


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


_encode = msgspec.json.Encoder().encode

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def _error(refusal: Refusal) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    is_long = refusal.code == CONTEXT_CODE
    message = f"prompt is too long: {refusal.message}" if is_long else refusal.message  # agents look for these words
    error = {"type": kind, "message": message} | ({"details": refusal.details} if refusal.details else {})
    return {"type": "error", "error": error, "request_id": refusal.request_id}


def _message(request: MessagesRequest, start: AnswerStart) -> dict[str, Any]:
    return {
        "id": f"msg_{start.id}",
        "type": "message",
        "role": "assistant",
        "model": request.call.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(start.prompt_tokens, 0),
    }


def _usage(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """The whole prompt is input: the agent asked for no cache."""
    return {
        "input_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _edits(request: MessagesRequest) -> dict[str, Any]:
    """None was done: a call with one that would change its prompt is refused."""
    return {"context_management": {"applied_edits": []}} if request.manages_context else {}


def _content(request: MessagesRequest, choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning and request.shows_thinking:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.content or not choice.tool_calls:
        blocks.append({"type": "text", "text": choice.content})
    blocks += [_written_tool_use(call, msgspec.Raw(call.arguments.encode())) for call in choice.tool_calls]
    return blocks


def _written_tool_use(call: ToolRequest, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _stop(request: MessagesRequest, choice: Choice) -> tuple[str, str | None]:
    if choice.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    if choice.tool_calls:
        return "tool_use", None
    if choice.stopped_by in request.call.stop:
        return "stop_sequence", choice.stopped_by
    return "end_turn", None


class MessagesStream(PartStream[MessagesRequest]):
    """Server-sent events of one streamed message."""

    REASONING = "thinking"
    TEXT = "text"
    _index = -1

    def delta(self, delta: TextDelta) -> bytes:
        is_hidden = delta.reasoning and not self._request.shows_thinking
        return super().delta(replace(delta, reasoning="") if is_hidden else delta)

    def error(self, refusal: Refusal) -> bytes:
        return _event(_error(refusal))

    def _start(self, kind: str) -> list[bytes]:
        empty = {"type": "thinking", "thinking": "", "signature": ""}
        return self._block(empty if kind == self.REASONING else {"type": "text", "text": ""})

    def _block(self, block: dict[str, Any]) -> list[bytes]:
        out: list[bytes] = []
        if not self._has_started:
            self._has_started = True
            out.append(_event({"type": "message_start", "message": _message(self._request, self._answer_start)}))
        self._index += 1
        return [*out, _event({"type": "content_block_start", "index": self._index, "content_block": block})]

    def _text(self, kind: str, text: str) -> bytes:
        return self._delta({"type": f"{kind}_delta", kind: text})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self, *, is_cut: bool = False) -> list[bytes]:
        if self._open is None:
            return []
        signature = [self._delta({"type": "signature_delta", "signature": ""})] if self._open == self.REASONING else []
        self._open = None
        return [*signature, _event({"type": "content_block_stop", "index": self._index})]

    def _tool_call(self, index: int, call: ToolRequest) -> list[bytes]:
        return [
            *self._block(_written_tool_use(call, {})),
            self._delta({"type": "input_json_delta", "partial_json": call.arguments}),
            _event({"type": "content_block_stop", "index": self._index}),
        ]

    def _end(self, answer: Answer) -> list[bytes]:
        choice = answer.choices[0]
        reason, stopped_by = _stop(self._request, choice)
        last = {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": stopped_by}}
        last["usage"] = _usage(answer.prompt_tokens, len(choice.token_ids))
        return [_event(last | _edits(self._request)), _event({"type": "message_stop"})]


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (data["type"].encode(), _encode(data))


class MessagesFormat:
    """`POST /messages`."""

    open_stream = MessagesStream

    def parse(self, body: bytes, path: str, settings: GatewaySettings) -> MessagesRequest:
        return parse_messages_request(body, drops_hosted=settings.drops_hosted)

    def write_error(self, refusal: Refusal) -> bytes:
        return _encode(_error(refusal))

    def write_answer(self, request: MessagesRequest, answer: Answer, renderer: PolicyRenderer) -> bytes:
        """A whole `message`."""
        choice = answer.choices[0]
        reason, stopped_by = _stop(request, choice)
        message = _message(request, answer.start)
        message |= {"content": _content(request, choice), "stop_reason": reason, "stop_sequence": stopped_by}
        message["usage"] = _usage(answer.prompt_tokens, len(choice.token_ids))
        return _encode(message | _edits(request))

    def write_count(self, tokens: int) -> bytes:
        """The answer of `count_tokens`."""
        return _encode({"input_tokens": tokens})
