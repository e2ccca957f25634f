"""The prompt of a call: the tokens of the earlier call that it goes on from and what is new, or all messages rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightningrl.types import IntArray
from lightningrl_server.gateway.conversations import Conversations, digest_head
from lightningrl_server.gateway.errors import Refusal
from lightningrl_server.gateway.history import (
    History,
    PastCall,
    as_ids,
    chain_digests,
    digest_tools,
    extend_digest,
    pack,
)
from lightningrl_server.gateway.request import CallRequest, ForcedCall
from lightningrl_server.gateway.threads import Threads
from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = ["Prompt", "PromptBuilder"]


_TEXT_TO_DIGEST = 16
"""How much faster a text is digested than it is tokenised, at least."""
_MESSAGE = 64
"""Characters of text that take as long to render as a message that has none."""


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
    array: IntArray = field(default_factory=lambda: as_ids(()))
    """The ids as the store keeps them."""


class PromptBuilder:
    """Builds the prompts of a gateway's calls; long ones beside the event loop."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    async def build(
        self,
        history: History,
        conversations: Conversations,
        request: CallRequest,
        policy: str,
        renderer: PolicyRenderer,
        context_length: int | None,
    ) -> Prompt:
        """The call's tokens: those of an earlier call and what is new, or all of them rendered; then the beginning of a forced tool call.
        Raises Refusal; ContextOverflow for one that is far beyond a known context, before it is tokenised to its end."""
        prompt = await self._free_prompt(history, conversations, request, policy, renderer, context_length)
        ids = prompt.ids if request.forced is None else _forced(prompt.ids, request.forced, policy, renderer)
        return replace(prompt, ids=ids, array=await self._threads.run(len(ids), lambda: as_ids(ids)))

    async def _free_prompt(
        self,
        history: History,
        conversations: Conversations,
        request: CallRequest,
        policy: str,
        renderer: PolicyRenderer,
        context_length: int | None,
    ) -> Prompt:
        tools = digest_tools(request.tools, policy)
        if request.previous is None:
            prompt = await self._prompt_of(history, with_tool_names(request.messages), tools, request, renderer, context_length)
            return prompt if request.head is None else replace(prompt, head=digest_head(request.messages[: request.head]))
        count = request.head or 0
        earlier = conversations.find(request.previous)
        head, new = digest_head(request.messages[:count]), with_tool_names(request.messages[count:], earlier.added or ())
        if earlier.head == head and earlier.call.tools == tools:
            digest = earlier.digest
            for message in new:
                digest = extend_digest(digest, message)
            bridged = await self._bridged(earlier.call, new, request, renderer, context_length)
            if bridged is not None:
                ids, start = bridged
                return Prompt(ids=ids, suffix_start=start, parent_id=earlier.call.id, is_break=False, digest=digest, tools=tools, head=head)
        # Other instructions, tools or policy: the tokens begin otherwise, so the conversation is rendered again.
        messages = with_tool_names((*request.messages[:count], *conversations.messages(earlier), *new))
        prompt = await self._prompt_of(history, messages, tools, request, renderer, context_length)
        return replace(prompt, head=head, is_break=prompt.is_break or prompt.parent_id is None)

    async def _prompt_of(
        self,
        history: History,
        messages: tuple[Mapping[str, Any], ...],
        tools: bytes,
        request: CallRequest,
        renderer: PolicyRenderer,
        context_length: int | None,
    ) -> Prompt:
        size = _size(messages)
        chain = await self._threads.run(size // _TEXT_TO_DIGEST, lambda: chain_digests(messages))
        match = history.match(messages, chain, tools)
        call = match.call
        if call is not None:
            bridged = await self._bridged(call, messages[match.covered :], request, renderer, context_length)
            if bridged is not None:
                ids, start = bridged
                return Prompt(ids=ids, suffix_start=start, parent_id=call.id, is_break=match.is_break, digest=chain[-1], tools=tools)
        is_break = match.is_break or call is not None
        size += len(pack(request.tools)) if request.tools else 0
        try:
            ids = await self._threads.run(size, lambda: renderer.render(messages, request.tools, context_length))
        except ValueError as error:
            raise Refusal(str(error), param="messages") from error
        return Prompt(ids=ids, suffix_start=0, parent_id=None, is_break=is_break, digest=chain[-1], tools=tools)

    async def _bridged(
        self,
        call: PastCall,
        new: tuple[Mapping[str, Any], ...],
        request: CallRequest,
        renderer: PolicyRenderer,
        context_length: int | None,
    ) -> tuple[tuple[int, ...], int] | None:
        """The tokens of an earlier call with those of the new messages, and where these begin; None = they cannot be told."""

        def bridge() -> tuple[tuple[int, ...], int] | None:
            past, said = call.prompt_ids.tolist(), call.completion_ids.tolist()
            suffix = renderer.bridge(past, said, new, request.tools, context_length)
            return None if suffix is None else ((*past, *said, *suffix), len(past) + len(said))

        return await self._threads.run(_size(new) + len(call.prompt_ids) // _TEXT_TO_DIGEST, bridge)


def with_tool_names(messages: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]] = ()) -> tuple[Mapping[str, Any], ...]:
    """Each tool result with the name of its tool, which templates write: a turn that is bridged holds the result, but not the call.
    `before`: messages that may hold the call as well."""
    # The same id may come back, and then means the later call; calls without one are answered in their order.
    names: dict[str, str] = {}
    nameless: list[str] = []
    named: list[Mapping[str, Any]] = []
    for message in (*before, *messages):
        for call in message.get("tool_calls") or ():
            if call.get("id"):
                names[call["id"]] = call["function"]["name"]
            else:
                nameless.append(call["function"]["name"])
        if message["role"] == "tool":
            call_id = message.get("tool_call_id")
            name = names.get(call_id) if call_id else nameless.pop(0) if nameless else None
            message = message if name is None else {"name": name, **message}
        named.append(message)
    return tuple(named[len(before) :])


def _forced(ids: tuple[int, ...], forced: ForcedCall, policy: str, renderer: PolicyRenderer) -> tuple[int, ...]:
    """The prompt and the beginning of the tool call that its answer has to be. Raises Refusal."""
    opening = renderer.open_call(ids, forced.name)
    if opening is None:
        raise Refusal(
            f"tool_choice: a tool call cannot be forced on policy {policy!r}: its tool-call markup is not one that we can begin for "
            "it, or its prompt opens a reasoning block; leave tool_choice out, or name the renderer 'qwen3' where its markup is the "
            "same",
            param="tool_choice",
        )
    return (*ids, *opening)


def _size(messages: Sequence[Mapping[str, Any]]) -> int:
    """About how many characters are rendered for them."""
    texts = sum(len(message.get("content") or "") + len(message.get("reasoning_content") or "") for message in messages)
    texts += _MESSAGE * len(messages)
    return texts + sum(len(pack(message["tool_calls"])) for message in messages if "tool_calls" in message)
