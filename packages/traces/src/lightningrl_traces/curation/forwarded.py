"""Calls that a provider answered in place of a policy, as chat messages: requests and answers as the gateway saw
them."""

from __future__ import annotations

from collections.abc import Iterator

from lightningrl.types import OtherCall, OtherCallKind, Trajectory
from lightningrl_traces.curation.chat_calls import ChatCall, LeftOut, Likeness, UnreadCall
from lightningrl_traces.reading.bodies import read_request, read_response
from lightningrl_traces.reading.messages import REPARSED
from lightningrl_traces.reading.streams import join_events

__all__ = ["read_forwarded"]

_ENDED = ("stop", "tool_calls")


def read_forwarded(trajectory: Trajectory) -> Iterator[ChatCall | UnreadCall]:
    """Read the answered calls of chat, streamed or not; a body too large to be kept is unreadable."""
    for number, call in enumerate(trajectory.other_calls):
        is_chat = call.path.rstrip("/").rpartition("/")[2] in ("completions", "responses", "messages")
        if call.kind is OtherCallKind.FORWARDED and call.code is None and is_chat:
            yield _read(call, f"{trajectory.rollout_id}/{number}")


def _read(call: OtherCall, name: str) -> ChatCall | UnreadCall:
    notes: set[str] = set()
    body = join_events(call.answer) if isinstance(call.answer, str) else call.answer
    asked, answered = read_request(call.request, notes), read_response(body, notes)
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
