"""A call's tokens one by one: what the policy sampled, how likely it was, what it earned, and why it is not trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightningrl_viewer.reading.segments import SegmentReader
from lightningrl_viewer.reading.trace import CallTrace
from lightningrl_viewer.reading.why_no_gradient import NoGradient

__all__ = ["Token", "read_tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A token that the policy sampled."""

    position: int
    """In the call's row: prompt, then completion."""
    id: int
    text: str
    """Empty where it is a part of a character that a later token completes."""
    logprob: float
    """log π(token), as the engine sampled it."""
    advantage: float | None
    """None = nobody scored it."""
    version: int
    """Version of the policy that sampled it."""
    mask: bool
    """True where a row of the learner trains it."""
    reason: str | None
    """Reason why it has no gradient; None = it has one."""


def read_tokens(
    call: CallTrace, reason: NoGradient | None, reader: SegmentReader, *, start: int = 0, count: int | None = None
) -> Iterator[Token]:
    """Yield `count` sampled tokens from the completion's `start`-th on. `reason`: why the whole call has no gradient
    (`look.why_no_gradient`); `reader`: its policy's."""
    made = call.call
    stop = len(made.completion_ids) if count is None else min(start + count, len(made.completion_ids))
    before = made.completion_ids[:start] if start else made.prompt_ids
    chosen = made.chosen
    for number, text in enumerate(reader.pieces(made.completion_ids[start:stop], before), start=start):
        advantage = None if call.advantages is None else float(call.advantages[number])
        why = reason.sentence if reason is not None else None
        if why is None and not chosen[number]:
            why = "The answer's grammar left no other token."
        elif why is None and not advantage:
            why = "Its advantage is 0." if advantage is not None else "Nobody scored it."
        yield Token(
            position=call.prompt_tokens + number,
            id=int(made.completion_ids[number]),
            text=text,
            logprob=float(made.logprobs[number]),
            advantage=advantage,
            version=made.policy_version,
            mask=bool(chosen[number]) and (reason is None or not reason.is_masked),
            reason=why,
        )
