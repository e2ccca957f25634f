"""A branch: the calls of a recorded rollout up to its branch point, answered once more, word for word.

recorded   c0 c1 c2 c3                    branch after 2 calls
asked      c0 ─► as recorded   c1 ─► as recorded   c2 ─► sampled   …
           x  ─► refused: it diverged, and so is every later call

A call is recognised by what the policy sees of it, the tokens of its prompt: agents that call several models at once
may ask in another order. What was asked later than the branch point is sampled, whenever it comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightningrl.records import DIVERGED_CODE
from lightningrl.types import FinishReason, IntArray, common_tokens
from lightningrl_server.gateway.prompt import with_tool_names
from lightningrl_server.gateway.request import CallRequest, Refusal
from lightningrl_server.records import CallRecord
from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = ["Replay"]

_QUOTED = 60
"""Characters of what was asked and recorded that a sentence quotes, each."""
_TAIL = 4096
"""Tokens around the first difference that are read as text."""
Choices = tuple[CallRecord, ...]
"""The records of one call."""


class Replay:
    """The calls that a branch's attempt is still to repeat."""

    def __init__(self, recorded: Sequence[CallRecord], calls: int) -> None:
        """`calls`: how many of the recorded transitions come before the branch point."""
        by_key: dict[str, list[CallRecord]] = {}
        for record in recorded:
            if record.transition.finish_reason is not FinishReason.BROKEN_OFF:
                by_key.setdefault(record.call_key.partition("#")[0], []).append(record)
        every = [tuple(choices) for choices in by_key.values()]
        self._left: list[Choices] = [choices for choices in every if choices[-1].transition.index < calls]
        self._later: list[Choices] = every[len(self._left) :]
        self._divergence: str | None = None

    def restore(self, calls: Sequence[CallRecord]) -> None:
        """Take over what the attempt repeated already, as after a restart of the server."""
        done = {call.transition.replayed_from for call in calls}
        self._left = [choices for choices in self._left if choices[0].transition.id not in done]

    def take(self, policy: str, prompt_ids: IntArray, request: CallRequest, renderer: PolicyRenderer) -> Choices:
        """The recorded answer; empty = it is sampled. Raises Refusal where nobody recorded it."""
        if self._divergence is None:
            for choices in self._left:
                if _is_asked(choices, policy, prompt_ids, request.n):
                    self._left.remove(choices)
                    return choices
            if not self._left or any(_is_asked(choices, policy, prompt_ids, request.n) for choices in self._later):
                return ()
            self._divergence = _describe(self._left, policy, prompt_ids, request, renderer)
        raise Refusal(self._divergence, status=409, code=DIVERGED_CODE)

    def put_back(self, choices: Choices) -> None:
        """Take choices back that were not given after all."""
        self._left = sorted([*self._left, choices], key=lambda choices: choices[0].transition.index)


def _is_asked(choices: Choices, policy: str, prompt_ids: IntArray, n: int) -> bool:
    recorded = choices[0].transition
    return recorded.policy == policy and len(choices) == n and np.array_equal(recorded.prompt_ids, prompt_ids)


def _describe(
    left: Sequence[Choices], policy: str, prompt_ids: IntArray, request: CallRequest, renderer: PolicyRenderer
) -> str:
    """The difference from the next call that was to come, and which tool answered otherwise, where it was one."""
    same = [choices for choices in left if choices[0].transition.policy == policy]
    if not same:
        then = left[0][0].transition.policy
        return f"the branch diverged: policy {policy!r} was asked, where the recorded rollout asked {then!r}"
    choices = max(same, key=lambda choices: common_tokens(choices[0].transition.prompt_ids, prompt_ids))
    recorded = choices[0].transition
    start = common_tokens(recorded.prompt_ids, prompt_ids)
    what = f"the branch diverged at call {recorded.index}"
    if start == len(prompt_ids) == len(recorded.prompt_ids):
        return f"{what}: it asked for {request.n} choices, where {len(choices)} were recorded"
    window = slice(max(0, start - 2), start + _TAIL)
    decode = renderer.tokenizer.decode
    asked, recorded_text = (decode(ids[window].tolist()) for ids in (prompt_ids, recorded.prompt_ids))
    tool = _changed_tool(request, renderer.tokenizer.decode(recorded.prompt_ids.tolist()))
    who = "its prompt differs" if tool is None else f"tool {tool!r} answered otherwise"
    quoted = f"{_quote(asked)} now, {_quote(recorded_text)} then"
    return f"{what}: {who} from token {start} on: {quoted}; fix clocks, ids and seeds: what an agent sees must repeat"


def _changed_tool(request: CallRequest, recorded: str) -> str | None:
    """The first tool whose result nobody recorded."""
    results = (message for message in with_tool_names(request.messages) if message["role"] == "tool")
    changed = (message for message in results if str(message.get("content") or "").strip() not in recorded)
    return next((str(message.get("name", "?")) for message in changed), None)


def _quote(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…")
