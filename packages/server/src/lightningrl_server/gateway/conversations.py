"""Conversations that go on by the id of an earlier answer (`previous_response_id`) instead of being sent again.

call r1   [instructions] m0 ─► a0          kept: the tokens, and digests of what they stand for (durable, in the store)
call r2   previous = r1, [instructions] m2 ─► tokens of r1 + a0 + m2        same instructions and tools: a prefix, id for id
call r3   previous = r2, other instructions ─► rendered again from the messages, which only this process has
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightningrl.records import CallRecord
from lightningrl.types import Transition
from lightningrl_server.gateway.errors import Refusal
from lightningrl_server.gateway.history import PastCall, chain_digests

__all__ = ["Conversation", "Conversations", "digest_head"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Conversation:
    """The messages that one answer ended, as the next call needs them."""

    call: PastCall
    digest: bytes
    """Of all messages up to and including the answer."""
    head: bytes
    """Of the instructions that stand at the beginning of the call's tokens."""
    added: tuple[Mapping[str, Any], ...] | None = None
    """The call's new messages and its answer; None = this process was not there."""
    previous: str | None = None
    parent: str | None = None
    """The answer that its messages go on from, by its id or by saying them again."""
    kept: Transition | None = None
    """Its record in the store, where this process was not there."""


class Conversations:
    """The answers of one attempt that a later call may go on from."""

    def __init__(self) -> None:
        self._by_id: dict[str, Conversation] = {}

    def add(self, conversation: Conversation) -> None:
        self._by_id[conversation.call.id] = conversation

    def find(self, transition_id: str) -> Conversation:
        """Raises Refusal where there is none."""
        found = self._by_id.get(transition_id)
        if found is None:
            raise Refusal(
                f"no previous response 'resp_{transition_id}' in this attempt; send the id of one of its own responses, or the whole input",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return found

    def answer(self, transition_id: str, read: Callable[[Transition], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The message of an answer, by `read` where only the store has it; None where the attempt has none."""
        found = self._by_id.get(transition_id)
        if found is None:
            return None
        return read(found.kept) if found.kept is not None else (found.added or (None,))[-1]

    def holds(self, last: str | None, transition_id: str) -> bool:
        """True if the conversation that the answer `last` ends has this one's."""
        while last is not None and last != transition_id:
            step = self._by_id.get(last)
            last = step.parent if step is not None else None
        return last is not None

    def messages(self, conversation: Conversation) -> tuple[Mapping[str, Any], ...]:
        """The whole conversation without its instructions. Raises Refusal where the process that heard it is gone."""
        parts: list[tuple[Mapping[str, Any], ...]] = []
        step: Conversation | None = conversation
        while step is not None:
            if step.added is None:
                raise Refusal(
                    f"response 'resp_{conversation.call.id}' cannot go on with other instructions or tools: its messages went with a "
                    "restart of the server; send the whole conversation as input",
                    code="previous_response_not_found",
                    param="previous_response_id",
                )
            parts.append(step.added)
            step = self._by_id.get(step.previous) if step.previous is not None else None
        return tuple(message for part in reversed(parts) for message in part)

    def restore(self, calls: Iterable[CallRecord]) -> None:
        """From what the store kept, as after a restart of the server."""
        for call in calls:
            if call.history_key is None:
                continue
            _, answer, tools, *head = (bytes.fromhex(part) for part in call.history_key.split("."))
            if head:
                kept = call.transition
                past = PastCall(kept.id, kept.prompt_ids, kept.completion_ids, tools)
                self.add(Conversation(call=past, digest=answer, head=head[0], parent=kept.parent_id, kept=kept))


def digest_head(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """Digest of a call's instructions."""
    return chain_digests(messages)[-1] if messages else b"\0"
