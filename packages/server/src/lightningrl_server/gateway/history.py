"""The calls of an attempt so far: finds the earlier call that a new request continues.

    messages   m0  m1  a1  m2 …         a1 = an answer of ours, as the agent sends it back
    chain      h0  h1  h2  h3           h_i = H(h_{i-1}, m_i)
                        └─ answers[h2] ─► the call whose tokens are the beginning of this prompt

Messages are compared by meaning: text, tool calls by id, name and parsed arguments. Hashes keep it linear and forget the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from lightningrl.records import CallRecord
from lightningrl.types import IntArray

__all__ = [
    "History",
    "Match",
    "PastCall",
    "as_ids",
    "chain_digests",
    "digest_tools",
    "extend_digest",
    "history_key",
    "offered_tools",
    "pack",
]

_encode = msgspec.msgpack.Encoder().encode
_SIZE = 12
_PART = 65_536
_MOST_OFFERED = 128 * 1024
"""Bytes of tools, descriptions included."""


@dataclass(frozen=True, slots=True, eq=False)
class PastCall:
    """A recorded call, as a later one needs it."""

    id: str
    prompt_ids: IntArray
    completion_ids: IntArray
    tools: bytes


@dataclass(frozen=True, slots=True)
class Match:
    """The earlier call that a new request continues."""

    call: PastCall | None
    """None = a new history."""
    covered: int = 0
    """How many of the messages the call's tokens stand for."""
    is_break: bool = False
    """The messages extend an earlier call's, but its tokens cannot begin this prompt (an edited answer, other tools, another policy)."""


class History:
    """The calls of one attempt by the digest of their messages."""

    def __init__(self) -> None:
        self._answers: dict[bytes, list[PastCall]] = {}
        self._prompts: set[bytes] = set()

    def add(self, call: PastCall, prompt_digest: bytes, answer_digest: bytes) -> None:
        self._answers.setdefault(answer_digest, []).append(call)
        self._prompts.add(prompt_digest)

    def match(self, messages: Sequence[Mapping[str, Any]], chain: Sequence[bytes], tools: bytes) -> Match:
        """The latest call that these messages continue."""
        # Earlier: [u1] ─► a1, [u1 a1 u2] ─► a2. Now, from the end:
        #     [u1 a1 u2 a2 u3]    a2 is an answer: its call stands for 4 messages, u3 is bridged to its tokens
        #     [u1 a1 u2 a2* u3]   a2* is none of ours, but [u1 a1 u2] was asked: a break; a1's call stands for 2 messages
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

    def restore(self, calls: Iterable[CallRecord]) -> None:
        """From what the store kept, as after a restart of the server."""
        for call in calls:
            if call.history_key is None:
                continue
            prompt, answer, tools, *_ = (bytes.fromhex(part) for part in call.history_key.split("."))
            kept = call.transition
            self.add(PastCall(kept.id, kept.prompt_ids, kept.completion_ids, tools), prompt, answer)


def history_key(prompt: bytes, answer: bytes, tools: bytes, head: bytes | None = None) -> str:
    """What the store keeps of it. `head`: digest of the instructions, where a later call may go on from this one by its id."""
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
    return hashlib.blake2b(digest + _encode(meaning), digest_size=_SIZE).digest()


def digest_tools(tools: Sequence[Mapping[str, Any]] | None, policy: str = "") -> bytes:
    """Digest of the tools offered, which stand in the prompt, and of whose tokens it is made."""
    return hashlib.blake2b(pack((policy, tools or ())), digest_size=_SIZE).digest()


def offered_tools(tools: Sequence[Mapping[str, Any]] | None) -> str:
    """`Transition.offered`: names and schemas of the arguments, the same text for the same tools. Empty for more than are kept."""
    if not tools or len(pack(tools)) > _MOST_OFFERED:
        return ""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    return json.dumps(schemas, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def pack(value: Any) -> bytes:
    """Bytes that tell values apart."""
    try:
        return _encode(value)
    except OverflowError:  # a number in a schema is beyond 64 bits
        return json.dumps(value).encode()


def as_ids(token_ids: Sequence[int]) -> IntArray:
    """Token ids as the store and the learner keep them; in parts, between which other threads have their turn."""
    if len(token_ids) <= _PART:
        return np.asarray(token_ids, dtype=np.int32)
    return np.concatenate([np.asarray(token_ids[start : start + _PART], dtype=np.int32) for start in range(0, len(token_ids), _PART)])


def _call_meaning(call: Mapping[str, Any]) -> tuple[Any, ...]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(_same_numbers(arguments), sort_keys=True)
    return (call.get("id"), function["name"], arguments)


def _same_numbers(value: Any) -> Any:
    """With one spelling of each number: a policy's `20.0` is `20` once a client in JavaScript sends it back."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {key: _same_numbers(entry) for key, entry in value.items()}
    return [_same_numbers(entry) for entry in value] if isinstance(value, list) else value
