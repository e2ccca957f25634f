"""OpenAI chat completions: the request, checked and put into our own terms.

Fields that SDKs send and that change nothing here (`user`, `store`, `metadata`, …) are ignored. Fields that would
change what is sampled are the run's to decide (`temperature`, `top_p`, penalties, …), honoured (`max_tokens`, `stop`,
`seed`, `n`), shown to the policy (`response_format`), or refused with a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from lightningrl_server.gateway.dialects import checks
from lightningrl_server.gateway.dialects.schemas import read_format, with_instruction
from lightningrl_server.gateway.dialects.synonyms import ROLES, THOUGHT_KEYS, THOUGHT_PARTS, text_of
from lightningrl_server.gateway.dialects.tools import function_tool, hosted_hint, read_offer
from lightningrl_server.gateway.request import AnswerFormat, CallRequest, Refusal

__all__ = ["ChatRequest", "parse_chat_request"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A chat completion request."""

    call: CallRequest
    logprobs: bool
    top_logprobs: int
    include_usage: bool
    """With `stream`: end with a chunk that counts tokens."""


class _StreamOptions(msgspec.Struct):
    include_usage: checks.Flag = None


class _Function(msgspec.Struct):
    name: str
    arguments: Any = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None
    id: str | None = None
    type: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any] | str] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_text: Any = None
    thinking: Any = None
    reasoning_details: Any = None
    thinking_blocks: Any = None
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None
    prefix: Any = None
    partial: Any = None


class _Body(msgspec.Struct):
    messages: list[_Message]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: checks.Flag = None
    n: checks.Number = None
    stream: checks.Flag = None
    stream_options: _StreamOptions | None = None
    max_tokens: checks.Number = None
    max_completion_tokens: checks.Number = None
    stop: str | list[str | None] | None = None
    seed: checks.Number = None
    temperature: Any = None
    top_p: Any = None
    logprobs: checks.Flag = None
    top_logprobs: checks.Number = None
    response_format: str | dict[str, Any] | None = None
    logit_bias: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    web_search_options: Any = None
    previous_response_id: Any = None


_decode = msgspec.json.Decoder(_Body).decode
_OWN = {
    "instructions": "a system message",
    "format": "response_format",
    "bound": "max_tokens",
    "stop": "stop",
    "tools": "tools",
}


def parse_chat_request(data: bytes, *, max_choices: int, drops_hosted: bool = False) -> ChatRequest:
    """Raises Refusal with what is wrong, which, and what next."""
    body = checks.decode_body(_decode, data, "chat completion")
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    choices = checks.read_whole("n", body.n, 1, max_choices) or 1
    top_logprobs = checks.read_top_logprobs(body.top_logprobs)
    if not body.messages:
        raise Refusal("the request has no messages; send at least one", param="messages")
    checks.check_count("messages", body.messages)
    _refuse_unsupported(body)
    messages = [_message(message, i) for i, message in enumerate(body.messages)]
    checks.check_tool_call_ids(messages)
    is_offering = body.tools or body.tool_choice or body.tool_choice == {}
    offer = read_offer(body.tools, _tool, body.tool_choice, drops_hosted=drops_hosted) if is_offering else {}
    wanted = _format(body.response_format) if body.response_format else None
    call = CallRequest(
        model=body.model or "",
        messages=tuple(messages) if wanted is None else with_instruction(messages, wanted),
        format=wanted,
        parallel_tools=body.parallel_tool_calls is None or bool(body.parallel_tool_calls),
        n=choices,
        stream=bool(body.stream),
        max_tokens=checks.read_whole("max_tokens", limit, 1),
        stop=checks.read_stop("stop", body.stop),
        # each choice is sampled with a seed of its own
        seed=checks.read_whole("seed", body.seed, -(2**63), 2**63 - choices),
        asked=checks.read_asked(temperature=body.temperature, top_p=body.top_p),
        extras=checks.read_extras(data, _Body, own=_OWN),
        **offer,
    )
    return ChatRequest(
        call=call,
        logprobs=bool(body.logprobs),
        top_logprobs=top_logprobs,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _refuse_unsupported(body: _Body) -> None:
    if body.logit_bias and not checks.is_nothing(body.logit_bias):
        raise Refusal.at(
            "logit_bias", "is not supported: the recorded logprobs would not be the ones sampled from; leave it out"
        )
    chosen = None if body.function_call in ("none", "auto") else body.function_call
    if (body.functions and not checks.is_nothing(body.functions)) or (chosen and not checks.is_nothing(chosen)):
        raise Refusal("functions and function_call are not supported; use tools", param="functions")
    if body.stream_options is not None and body.stream_options.include_usage and not body.stream:
        raise Refusal.at("stream_options", "is for streams alone; set stream to true, or leave it out")
    if "audio" in (body.modalities or ()):
        raise Refusal("the policy answers in text only; leave audio out of modalities", param="modalities")
    if body.previous_response_id:
        raise Refusal(
            "chat completions go on from no previous_response_id; send the whole history in messages, or use "
            "/responses",
            param="previous_response_id",
        )
    if body.web_search_options is not None:  # an empty one asks for a search as well
        raise Refusal.at("web_search_options", "is not supported; give the agent a search tool")


def _message(message: _Message, index: int) -> dict[str, Any]:
    where, role = f"messages[{index}]", ROLES.get(message.role, message.role)
    if role not in ("system", "user", "assistant", "tool"):
        raise Refusal.at(
            where, f"has the role {message.role!r}; known are system, developer, user, assistant, tool", field=".role"
        )
    content = message.content
    if role == "assistant" and isinstance(content, list):
        content = [part for part in content if not _is_thought(part)]
    text = content if isinstance(content, str) else checks.join_text(content, where)
    plain: dict[str, Any] = {"role": role, "content": text}
    if message.audio:
        raise Refusal.at(where, "speaks in audio; the policy reads text only: send its text", field=".audio")
    _refuse_prefill(message, where)
    if role == "assistant":
        if message.refusal and not plain["content"]:
            plain["content"] = message.refusal
        if thoughts := _reasoning(message):
            plain["reasoning_content"] = thoughts
        if message.tool_calls:
            plain["tool_calls"] = [_tool_call(call, where) for call in message.tool_calls]
        if message.function_call and not checks.is_nothing(message.function_call):
            raise Refusal(f"{where}.function_call is not supported; use tool_calls", param=f"{where}.function_call")
    elif role == "tool" and (call_id := _call_id(message.tool_call_id)):
        plain["tool_call_id"] = call_id
    if message.name:
        plain["name"] = message.name
    return plain


def _refuse_prefill(message: _Message, where: str) -> None:
    for name in ("prefix", "partial"):  # as Mistral and DeepSeek, and Moonshot and Qwen have it
        if getattr(message, name):
            problem = f"has {name}: a policy does not go on with an answer that was written for it"
            raise Refusal.at(where, f"{problem}; end with the user's message", field=f".{name}")


def _reasoning(message: _Message) -> str:
    """Text of the message's reasoning, under the name that its client gives it, or among the content's parts."""
    parts = [part for part in message.content if _is_thought(part)] if isinstance(message.content, list) else []
    thoughts = filter(None, (*(getattr(message, key) for key in THOUGHT_KEYS), parts))
    return next(filter(None, map(text_of, thoughts)), "")


def _is_thought(part: dict[str, Any] | str) -> bool:
    return isinstance(part, dict) and part.get("type") in THOUGHT_PARTS


def _tool_call(call: _ToolCall, where: str) -> dict[str, Any]:
    if call.function is None:
        raise Refusal.at(
            where, f"has a tool call of type {call.type!r}; only functions are supported", field=".tool_calls"
        )
    value = checks.read_arguments(call.function.arguments, where)
    return {"id": _call_id(call.id), "type": "function", "function": {"name": call.function.name, "arguments": value}}


def _call_id(call_id: str | None) -> str | None:
    """None for an id that is none, in any spelling; Mistral's SDK writes "null"."""
    return None if call_id is None or call_id.strip() in ("", "null") else call_id


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    function = tool.get("function")
    if (tool.get("type") or "function") != "function" or not isinstance(function, dict):
        hint = hosted_hint(tool.get("type"))
        raise Refusal.at(
            where, f"is no function with a name; only functions are supported{hint and ': give the agent one'}{hint}"
        )
    return function_tool(
        where, function.get("name"), function.get("description"), function.get("parameters"), function.get("strict")
    )


def _format(wanted: str | dict[str, Any]) -> AnswerFormat | None:
    return read_format(wanted if isinstance(wanted, dict) else {"type": wanted}, "response_format")
