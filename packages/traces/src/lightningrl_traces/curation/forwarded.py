"""Calls that a provider answered in place of a policy, as chat messages: requests and answers as the gateway saw
them."""

from __future__ import annotations

from collections.abc import Iterator

from lightningrl.types import OtherCall, Trajectory
from lightningrl_traces.curation.chat_calls import ChatCall, LeftOut, Likeness, UnreadCall
from lightningrl_viewer.reading.dialogue import is_chat, read_exchange
from lightningrl_viewer.reading.foreign.messages import REPARSED

__all__ = ["read_forwarded"]

_ENDED = ("stop", "tool_calls")


def read_forwarded(trajectory: Trajectory) -> Iterator[ChatCall | UnreadCall]:
    """Read the answered calls of chat, streamed or not; a body too large to be kept is unreadable."""
    for number, call in enumerate(trajectory.other_calls):
        if call.code is None and is_chat(call):
            yield _read(call, f"{trajectory.rollout_id}/{number}")


def _read(call: OtherCall, name: str) -> ChatCall | UnreadCall:
    notes: set[str] = set()
    asked, answered = read_exchange(call, notes)
    messages, answer = asked.get("messages"), answered.get("answer")
    # Anthropic's answers have a tool's arguments as an object, so that their text is ours
    if not answer:
        return UnreadCall(id=name, reason=LeftOut.UNKEPT)
    if not messages or notes - {REPARSED}:
        return UnreadCall(id=name, reason=LeftOut.UNREADABLE)
    if answered.get("finish_reason") not in (None, *_ENDED):
        return UnreadCall(id=name, reason=LeftOut.CUT)
    return ChatCall(
        id=name,
        role=call.agent,
        prompt=tuple(messages),
        answer={**answer, "role": "assistant"},
        tools=tuple(asked.get("tools") or ()),
        likeness=Likeness.FOREIGN,
        grade="sft-safe",
        rewards={},
    )
