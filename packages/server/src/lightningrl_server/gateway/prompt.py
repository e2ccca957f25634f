"""The prompt of a call: the tokens of the earlier call that it goes on from and what is new, or all messages rendered.

CallRequest ─► history ─► PastCall + new messages ─► bridged  ─┐
                    └───► None ─► all messages    ─► rendered ─┴► + the beginning of a forced tool call ─► Prompt
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np

from lightningrl.types import IntArray
from lightningrl_server.gateway.history import (
    History,
    PastCall,
    chain_digests,
    digest_head,
    digest_no_tools,
    digest_tools,
    extend_digest,
    history_key,
)
from lightningrl_server.gateway.request import CallRequest, ForcedCall, Refusal
from lightningrl_server.rendering.completion import Choice
from lightningrl_server.rendering.renderer import PolicyRenderer, pack

__all__ = ["LONG", "AnsweredPrompt", "Prompt", "PromptBuilder", "Threads", "as_ids"]

T = TypeVar("T")

LONG: Final = 16_384
"""Characters from which on a text is long: a slow machine tokenises as many in about 20 ms."""
_TEXT_TO_DIGEST = 16
"""Least factor by which a text is digested faster than it is tokenised."""
_PART = 65_536
_MESSAGE = 64
"""Characters of text that take as long to render as a message that has none."""


class Threads:
    """Two threads of a gateway, on which long texts are read: more would only compete with its event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2, "lightningrl-gateway")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, or its error, of `size` characters; short ones on the loop, which is cheaper."""
        if size < LONG:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Let go of the threads; what they are at is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredPrompt:
    """A prompt with one answer to it, as a later call finds it."""

    call: PastCall
    digest: bytes
    """Digest of the conversation up to the answer."""
    key: str
    """The digests as the store keeps them."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt and where it comes from."""

    ids: tuple[int, ...]
    array: IntArray
    """The ids as the store keeps them."""
    suffix_start: int
    """First token that the parent does not have."""
    parent_id: str | None
    is_break: bool
    digest: bytes
    tools: bytes
    head: bytes | None
    """Digest of the instructions, where a later call may go on from this one by its id."""

    def answer(self, call_id: str, choice: Choice, *, with_ids: bool) -> AnsweredPrompt:
        """The prompt answered by a choice, whose tool calls a client sends back `with_ids` or without."""
        call = PastCall(call_id, self.array, as_ids(choice.token_ids), self.tools)
        digest = extend_digest(self.digest, choice.as_message(with_ids=with_ids))
        return AnsweredPrompt(call, digest, history_key(self.digest, digest, self.tools, self.head))


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """Builds the prompt of one call; a long one beside the event loop."""

    threads: Threads
    history: History
    request: CallRequest
    policy: str
    renderer: PolicyRenderer
    context_length: int | None
    """None = nobody knows."""

    async def build(self) -> Prompt:
        """The tokens of an earlier call and what is new, or all of them rendered; then the beginning of a forced tool
        call. Raises Refusal; ContextOverflow for one that is far beyond a known context, before all is tokenised."""
        request = self.request
        tools = digest_tools(request.tools, self.policy) if request.tools else digest_no_tools(self.policy)
        head = None
        if request.head is not None or request.previous is not None:
            head = digest_head(request.messages[: request.head or 0])
        if head is None or request.previous is None:
            return await self._from_messages(with_tool_names(request.messages), tools, head)
        return await self._from_answer(request.previous, tools, head)

    async def _from_answer(self, previous: str, tools: bytes, head: bytes) -> Prompt:
        """The prompt of a call that goes on from an earlier answer by its id."""
        count = self.request.head or 0
        earlier = self.history.find(previous)
        new = with_tool_names(self.request.messages[count:], earlier.added or ())
        if earlier.head == head and earlier.call.tools == tools:
            digest = earlier.digest
            for message in new:
                digest = extend_digest(digest, message)
            bridged = await self._bridged(earlier.call, new)
            if bridged is not None:
                return await self._prompt(
                    *bridged, earlier.call.id, is_break=False, digest=digest, tools=tools, head=head
                )
        # Other instructions, tools or policy: the tokens begin otherwise, so the conversation is rendered again.
        messages = (*self.request.messages[:count], *self.history.messages(earlier), *new)
        prompt = await self._from_messages(with_tool_names(messages), tools, head)
        return replace(prompt, is_break=prompt.is_break or prompt.parent_id is None)

    async def _from_messages(self, messages: tuple[Mapping[str, Any], ...], tools: bytes, head: bytes | None) -> Prompt:
        """The prompt of a whole conversation."""
        size = _size(messages)
        chain = await self.threads.run(size // _TEXT_TO_DIGEST, lambda: chain_digests(messages))
        match = self.history.match(messages, chain, tools)
        call, offered = match.call, self.request.tools
        if call is not None:
            bridged = await self._bridged(call, messages[match.covered :])
            if bridged is not None:
                return await self._prompt(*bridged, call.id, match.is_break, digest=chain[-1], tools=tools, head=head)
        size += len(pack(offered)) if offered else 0
        try:
            ids = await self.threads.run(size, lambda: self.renderer.render(messages, offered, self.context_length))
        except ValueError as error:
            raise Refusal(str(error), param="messages") from error
        is_break = match.is_break or call is not None
        return await self._prompt(ids, 0, None, is_break, digest=chain[-1], tools=tools, head=head)

    async def _prompt(
        self,
        ids: tuple[int, ...],
        suffix_start: int,
        parent_id: str | None,
        is_break: bool,
        *,
        digest: bytes,
        tools: bytes,
        head: bytes | None,
    ) -> Prompt:
        """Add the beginning of a forced tool call."""
        if self.request.forced is not None:
            ids = _forced(ids, self.request.forced, self.policy, self.renderer)
        if self.request.edits:
            _refuse_edits(self.request, len(ids))
        array = await self.threads.run(len(ids), lambda: as_ids(ids))
        return Prompt(ids, array, suffix_start, parent_id, is_break, digest, tools, head)

    async def _bridged(self, call: PastCall, new: tuple[Mapping[str, Any], ...]) -> tuple[tuple[int, ...], int] | None:
        """An earlier call's tokens with the new messages', and where these begin; None = they cannot be told."""

        def bridge() -> tuple[tuple[int, ...], int] | None:
            past, completion = call.prompt_ids.tolist(), call.completion_ids.tolist()
            suffix = self.renderer.bridge(past, completion, new, self.request.tools, self.context_length)
            return None if suffix is None else ((*past, *completion, *suffix), len(past) + len(completion))

        return await self.threads.run(_size(new) + len(call.prompt_ids) // _TEXT_TO_DIGEST, bridge)


def with_tool_names(
    messages: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]] = ()
) -> tuple[Mapping[str, Any], ...]:
    """Each tool result with the name of its tool, which templates write: a turn that is bridged holds the result, but
    not the call. `before`: messages that may hold the call as well."""
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


def as_ids(token_ids: Sequence[int]) -> IntArray:
    """Token ids as the store and the learner keep them; in parts, between which other threads have their turn."""
    if len(token_ids) <= _PART:
        return np.asarray(token_ids, dtype=np.int32)
    starts = range(0, len(token_ids), _PART)
    return np.concatenate([np.asarray(token_ids[start : start + _PART], dtype=np.int32) for start in starts])


def _forced(ids: tuple[int, ...], forced: ForcedCall, policy: str, renderer: PolicyRenderer) -> tuple[int, ...]:
    """The prompt and the beginning of the tool call that its answer has to be. Raises Refusal."""
    opening = renderer.open_call(ids, forced.name)
    if opening is None:
        raise Refusal(
            f"tool_choice: a tool call cannot be forced on policy {policy!r}: its tool-call markup is not one that we "
            "can begin for it, or its prompt opens a reasoning block; leave tool_choice out, or name the renderer "
            "'qwen3' where its markup is the same",
            param="tool_choice",
        )
    return (*ids, *opening)


def _refuse_edits(request: CallRequest, prompt_tokens: int) -> None:
    """Raise Refusal where an edit would change the prompt: the policy would learn from one that no agent wrote."""
    for edit in request.edits:
        if prompt_tokens > edit.beyond:
            raise Refusal.at(
                "context_management",
                f"asks for {edit.name!r}, which would now change the prompt of {prompt_tokens} "
                "tokens, and that is not supported: the policy would learn from a prompt that the agent did not write; "
                "keep more or trigger it later, or shorten the messages yourself",
            )


def _size(messages: Sequence[Mapping[str, Any]]) -> int:
    """About how many characters are rendered for them."""
    texts = sum(len(message.get("content") or "") + len(message.get("reasoning_content") or "") for message in messages)
    texts += _MESSAGE * len(messages)
    return texts + sum(len(pack(message["tool_calls"])) for message in messages if "tool_calls" in message)
