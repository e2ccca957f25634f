"""The calls of an attempt so far: finds the earlier call that a new request continues, by its messages or by its id.

    messages   m0  m1  a1  m2 …         a1 = an answer of ours, as the agent sends it back
    chain      h0  h1  h2  h3           h_i = H(h_{i-1}, m_i)
                        └─ answers[h2] ─► the call whose tokens are the beginning of this prompt

    call r1   [instructions] m0 ─► a0          remembered: the tokens, and digests of their messages, as in the store
    call r2   previous = r1, [instructions] m2 ─► tokens of r1 + a0 + m2      same instructions and tools: a prefix
    call r3   previous = r2, other instructions ─► rendered again from the messages, which only this process has

Messages are compared by meaning: text, tool calls by id, name and parsed arguments. Hashes keep it linear and textless.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import msgspec

from lightningrl.types import IntArray, Transition
from lightningrl_server.gateway.request import Refusal
from lightningrl_server.records import CallRecord
from lightningrl_server.rendering.renderer import pack

__all__ = [
    "Conversation",
    "History",
    "Match",
    "PastCall",
    "chain_digests",
    "digest_head",
    "digest_no_tools",
    "digest_tools",
    "extend_digest",
    "history_key",
    "offered_tools",
]

_encode = msgspec.msgpack.Encoder().encode
_SIZE = 12
_MOST_OFFERED = 128 * 1024
"""Bytes of tools, descriptions included."""


@dataclass(frozen=True, slots=True, eq=False)
class PastCall:
    """A recorded call, as a later one needs it."""

    id: str
    prompt_ids: IntArray
    completion_ids: IntArray
    tools: bytes
    """Digest of the tools that stand in the prompt, and of the policy."""


@dataclass(frozen=True, slots=True)
class Match:
    """The earlier call that a new request continues."""

    call: PastCall | None
    """None = a new history."""
    covered: int = 0
    """Number of the messages that the call's tokens stand for."""
    is_break: bool = False
    """The messages extend an earlier call's, but not its tokens (an edited answer, other tools, another policy)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Conversation:
    """The messages that one answer ended, as the next call needs them."""

    call: PastCall
    digest: bytes
    """Digest of all messages up to and including the answer."""
    head: bytes
    """Digest of the instructions that stand at the beginning of the call's tokens."""
    added: tuple[Mapping[str, Any], ...] | None = None
    """The call's new messages and its answer; None = this process was not there."""
    previous: str | None = None
    parent: str | None = None
    """The answer that its messages go on from, by its id or by saying them again."""
    stored: Transition | None = None
    """Its record in the store, where this process was not there."""


class History:
    """The calls of one attempt, by the digest of their messages and by their ids."""

    def __init__(self) -> None:
        self._answers: dict[bytes, list[PastCall]] = {}
        self._prompts: set[bytes] = set()
        self._conversations: dict[str, Conversation] = {}

    def add(self, call: PastCall, prompt_digest: bytes, answer_digest: bytes) -> None:
        self._answers.setdefault(answer_digest, []).append(call)
        self._prompts.add(prompt_digest)

    def match(self, messages: Sequence[Mapping[str, Any]], chain: Sequence[bytes], tools: bytes) -> Match:
        """The latest call that these messages continue."""
        # Earlier: [u1] ─► a1, [u1 a1 u2] ─► a2. Now, from the end:
        #     [u1 a1 u2 a2 u3]    a2 is an answer: its call stands for 4 messages, u3 is bridged to its tokens
        #     [u1 a1 u2 a2* u3]   a2* is none of ours, but [u1 a1 u2] was asked: a break; a1's call stands for 2
        # messages
        #     [u1* a1 u2]         nothing before a1 was asked: a new history
        broken = False
        for i in range(len(messages) - 2, -1, -1):
            if messages[i]["role"] != "assistant":
                continue
            calls = self._answers.get(chain[i])
            if calls is not None:
                same = [call for call in calls if call.tools == tools]
                return Match(same[-1], i + 1, broken) if same else Match(None, 0, True)
            broken = broken or (i > 0 and chain[i - 1] in self._prompts)
        return Match(None, 0, broken)

    def add_conversation(self, conversation: Conversation) -> None:
        """Keep an answer that a later call may go on from by its id."""
        self._conversations[conversation.call.id] = conversation

    def find(self, transition_id: str) -> Conversation:
        """Raises Refusal where there is none."""
        conversation = self._conversations.get(transition_id)
        if conversation is None:
            problem = f"no previous response 'resp_{transition_id}' in this attempt"
            remedy = "send the id of one of its own responses, or the whole input"
            raise Refusal(f"{problem}; {remedy}", code="previous_response_not_found", param="previous_response_id")
        return conversation

    def answer(self, transition_id: str, read: Callable[[Transition], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The message of an answer, by `read` where only the store has it; None where the attempt has none."""
        conversation = self._conversations.get(transition_id)
        if conversation is None:
            return None
        return read(conversation.stored) if conversation.stored is not None else (conversation.added or (None,))[-1]

    def holds(self, last: str | None, transition_id: str) -> bool:
        """True if the conversation that the answer `last` ends has this one's."""
        while last is not None and last != transition_id:
            step = self._conversations.get(last)
            last = step.parent if step is not None else None
        return last is not None

    def messages(self, conversation: Conversation) -> tuple[Mapping[str, Any], ...]:
        """The whole conversation without its instructions. Raises Refusal where the process that heard it is gone."""
        parts: list[tuple[Mapping[str, Any], ...]] = []
        step: Conversation | None = conversation
        while step is not None:
            if step.added is None:
                raise Refusal(
                    f"response 'resp_{conversation.call.id}' cannot go on with other instructions or tools: its "
                    "messages went with a restart of the server; send the whole conversation as input",
                    code="previous_response_not_found",
                    param="previous_response_id",
                )
            parts.append(step.added)
            step = self._conversations.get(step.previous) if step.previous is not None else None
        return tuple(message for part in reversed(parts) for message in part)

    def restore(self, calls: Iterable[CallRecord]) -> None:
        """Take over what the store has, as after a restart of the server."""
        for call in calls:
            if call.history_key is None:
                continue
            stored = call.transition
            prompt, answer, tools, *heads = (bytes.fromhex(part) for part in call.history_key.split("."))
            past = PastCall(stored.id, stored.prompt_ids, stored.completion_ids, tools)
            self.add(past, prompt, answer)
            for head in heads:
                self.add_conversation(
                    Conversation(call=past, digest=answer, head=head, parent=stored.parent_id, stored=stored)
                )


def history_key(prompt: bytes, answer: bytes, tools: bytes, head: bytes | None = None) -> str:
    """The digests as the store keeps them. `head`: the instructions', where a later call may go on by its id."""
    key = f"{prompt.hex()}.{answer.hex()}.{tools.hex()}"
    return key if head is None else f"{key}.{head.hex()}"


def chain_digests(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Digest of every beginning of the conversation."""
    chain: list[bytes] = []
    digest = b""
    for message in messages:
        digest = extend_digest(digest, message)
        chain.append(digest)
    return chain


def extend_digest(digest: bytes, message: Mapping[str, Any]) -> bytes:
    """Digest of a conversation with one more message."""
    content = message.get("content") or ""
    if message["role"] == "assistant":
        content = content.strip()  # agents trim what they were answered
        calls = [_call_meaning(call) for call in message.get("tool_calls") or ()]
        meaning: tuple[Any, ...] = ("assistant", content, calls)
    else:
        meaning = (message["role"], content, message.get("tool_call_id"))
        if message["role"] != "tool" and "name" in message:  # the template may show who speaks
            meaning += (message["name"],)
    return hashlib.blake2b(digest + _encode(meaning), digest_size=_SIZE).digest()


def digest_head(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """Digest of a call's instructions."""
    return chain_digests(messages)[-1] if messages else b"\0"


def digest_tools(tools: Sequence[Mapping[str, Any]] | None, policy: str = "") -> bytes:
    """Digest of the tools offered, which stand in the prompt, and of whose tokens it is made."""
    return hashlib.blake2b(pack((policy, tools or ())), digest_size=_SIZE).digest()


digest_no_tools = lru_cache(partial(digest_tools, None))
"""Digest where none is offered, of a policy's name: every call of most agents asks for it."""


def offered_tools(tools: Sequence[Mapping[str, Any]] | None) -> str:
    """`Transition.offered`: names and schemas of the arguments, one text for the same tools. Empty beyond the limit."""
    if not tools or len(pack(tools)) > _MOST_OFFERED:
        return ""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    return json.dumps(schemas, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _call_meaning(call: Mapping[str, Any]) -> tuple[Any, ...]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(_same_numbers(arguments), sort_keys=True)
    return (call.get("id"), function["name"], arguments)


def _same_numbers(value: Any) -> Any:
    """The value with one spelling of each number: a policy's `20.0` is `20` once JavaScript sends it back."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {key: _same_numbers(entry) for key, entry in value.items()}
    return [_same_numbers(entry) for entry in value] if isinstance(value, list) else value
