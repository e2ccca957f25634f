"""The prompt of a call: the tokens of the earlier call that it goes on from and what is new, or all messages rendered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightningrl.gateway.conversations import Conversations, digest_head
from lightningrl.gateway.errors import Refusal
from lightningrl.gateway.history import History, chain_digests, digest_tools, extend_digest
from lightningrl.gateway.rendering import PolicyRenderer
from lightningrl.gateway.request import CallRequest

__all__ = ["Prompt", "build_prompt"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """A prompt and where it comes from."""

    ids: tuple[int, ...]
    suffix_start: int
    """First token that the parent does not have."""
    parent_id: str | None
    is_break: bool
    digest: bytes
    tools: bytes
    head: bytes | None = None
    """Digest of the instructions, where a later call may go on from this one by its id."""


def build_prompt(history: History, conversations: Conversations, request: CallRequest, policy: str, renderer: PolicyRenderer) -> Prompt:
    """The call's tokens: those of an earlier call and what is new, or all of them rendered; then the beginning of a forced tool call."""
    prompt = _free_prompt(history, conversations, request, policy, renderer)
    if request.forced is None:
        return prompt
    opening = renderer.open_call(prompt.ids, request.forced.name)
    if opening is None:
        raise Refusal(
            f"tool_choice: a tool call cannot be forced on policy {policy!r}: its tool-call markup is not one that we can begin for it, or "
            "its prompt opens a reasoning block; leave tool_choice out, or name the renderer 'qwen3' where its markup is the same",
            param="tool_choice",
        )
    return replace(prompt, ids=(*prompt.ids, *opening))


def _free_prompt(history: History, conversations: Conversations, request: CallRequest, policy: str, renderer: PolicyRenderer) -> Prompt:
    tools = digest_tools(request.tools, policy)
    if request.previous is None:
        prompt = _prompt_of(history, request.messages, tools, request, renderer)
        return prompt if request.head is None else replace(prompt, head=digest_head(request.messages[: request.head]))
    count = request.head or 0
    head, new = digest_head(request.messages[:count]), request.messages[count:]
    earlier = conversations.find(request.previous)
    if earlier.head == head and earlier.call.tools == tools:
        past, said = earlier.call.prompt_ids.tolist(), earlier.call.completion_ids.tolist()
        suffix = renderer.bridge(past, said, new, request.tools)
        if suffix is not None:
            digest = earlier.digest
            for message in new:
                digest = extend_digest(digest, message)
            return Prompt(
                ids=(*past, *said, *suffix),
                suffix_start=len(past) + len(said),
                parent_id=earlier.call.id,
                is_break=False,
                digest=digest,
                tools=tools,
                head=head,
            )
    # Other instructions, tools or policy: the tokens begin otherwise, so the conversation is rendered again.
    messages = (*request.messages[:count], *conversations.messages(earlier), *new)
    prompt = _prompt_of(history, messages, tools, request, renderer)
    return replace(prompt, head=head, is_break=prompt.is_break or prompt.parent_id is None)


def _prompt_of(
    history: History, messages: tuple[Mapping[str, Any], ...], tools: bytes, request: CallRequest, renderer: PolicyRenderer
) -> Prompt:
    chain = chain_digests(messages)
    match = history.match(messages, chain, tools)
    call = match.call
    if call is not None:
        past, said = call.prompt_ids.tolist(), call.completion_ids.tolist()
        suffix = renderer.bridge(past, said, messages[match.covered :], request.tools)
        if suffix is not None:
            return Prompt(
                ids=(*past, *said, *suffix),
                suffix_start=len(past) + len(said),
                parent_id=call.id,
                is_break=match.is_break,
                digest=chain[-1],
                tools=tools,
            )
    try:
        ids = renderer.render(messages, request.tools)
    except ValueError as error:
        raise Refusal(str(error), param="messages") from error
    return Prompt(ids=ids, suffix_start=0, parent_id=None, is_break=match.is_break or call is not None, digest=chain[-1], tools=tools)
