"""Answers that are known, as the tokens that the policy would have sampled: what is tuned is what RL trains.

messages, tools ─► as the gateway reads them ─► prompt ids │ ids of the last turn, up to the token that ends it
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightningrl_server.gateway.dialects.chat import parse_chat_request
from lightningrl_server.gateway.prompt import with_tool_names
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.rendering.tokenizer import ways_to_say

__all__ = ["KnownAnswer", "render_answer"]


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """A prompt and the answer to it."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    """With the token that ends it."""


def render_answer(
    renderer: PolicyRenderer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> KnownAnswer:
    """Render a conversation in the form of Chat Completions, whose last message is the assistant's. The prompt is the
    gateway's for the messages before it. Raises Refusal for what a gateway refuses, ValueError where the template
    writes the answer after another prompt than it asks with, or not at all."""
    body = {"model": "", "messages": list(messages), **({"tools": list(tools)} if tools else {})}
    call = parse_chat_request(json.dumps(body).encode(), max_choices=1).call
    turns = with_tool_names(call.messages)
    if turns[-1]["role"] != "assistant":
        raise ValueError(f"the last message is of role {turns[-1]['role']!r}; end a row with the assistant's")
    prompt_ids = renderer.render(turns[:-1], call.tools)
    answer_ids = _find_answer(renderer, turns, call.tools, prompt_ids)
    stops = renderer.stop_token_ids
    end = next((place for place, token in enumerate(answer_ids) if token in stops), None)
    if end is None and not (answer_ids and stops):
        raise ValueError("the chat template writes no answer after the prompt")
    answer_ids = (*answer_ids, stops[0]) if end is None else answer_ids[: end + 1]
    _check_reading(renderer, prompt_ids, answer_ids, turns[-1])
    return KnownAnswer(prompt_ids, answer_ids)


def _check_reading(
    renderer: PolicyRenderer, prompt_ids: tuple[int, ...], answer_ids: tuple[int, ...], answer: Mapping[str, Any]
) -> None:
    """Raise ValueError where the gateway would read another answer: one with a stop token in its text, or calls that
    the template writes with other arguments."""
    read = renderer.parse(answer_ids, prompt_ids)
    calls = [(call.name, _plain(call.arguments)) for call in read.tool_calls]
    functions = [call["function"] for call in answer.get("tool_calls") or ()]
    is_same = calls == [(function["name"], _plain(function["arguments"])) for function in functions]
    if not is_same or read.content.strip() != (answer.get("content") or "").strip():
        raise ValueError("the chat template writes this answer so that it does not read back as it was")


def _plain(arguments: Any) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    return arguments


def _find_answer(
    renderer: PolicyRenderer,
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    prompt_ids: tuple[int, ...],
) -> tuple[int, ...]:
    """The ids after the prompt. Where the tokenizer joins the prompt's last character with the answer's first, the
    answer's text alone is tokenised: a policy samples after the prompt's own tokens."""
    prompt = renderer.decode(prompt_ids)
    problem: Exception | None = None
    for way in ways_to_say(turns):
        try:
            ids = renderer.render_answered(way, tools)
        except Exception as error:  # noqa: BLE001  (a template is user code: this is about these messages)
            problem = problem or error
            continue
        if ids[: len(prompt_ids)] == prompt_ids:
            return ids[len(prompt_ids) :]
        text = renderer.decode(ids)
        if text.startswith(prompt):
            return tuple(renderer.tokenizer.encode(text[len(prompt) :]))
    if problem is not None:
        raise ValueError(f"the chat template cannot render this answer: {problem}") from problem
    raise ValueError("the chat template writes this answer after another prompt than the one that asks for it")
