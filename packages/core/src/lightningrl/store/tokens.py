"""Rebuilds whole prompts from what each call added: one array per chain of calls, and every prompt a view into it.

    chain   │ suffix₀ completion₀ suffix₁ completion₁ suffix₂ completion₂ │
    call 1  └──────── prompt ────────────┘└ completion ┘

A call whose parent is the end of a chain goes on with it; a second child starts a chain with a copy of what they share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightningrl.store.codec import decode_floats, decode_json, decode_many, decode_span
from lightningrl.types import FinishReason, IntArray, SamplingSettings, Transition

if TYPE_CHECKING:
    from sqlalchemy import Row

__all__ = ["assemble", "build_transition", "prompts_and_completions"]

_FINISH = {reason.value: reason for reason in FinishReason}


def assemble(calls: Iterable[tuple[int | None, NDArray[Any], NDArray[Any]]]) -> list[tuple[IntArray, IntArray]]:
    """From (position of the parent, suffix, completion) to (prompt, completion), as read-only int32 arrays that share memory."""
    chains: list[list[NDArray[Any]]] = []
    lengths: list[int] = []
    tails: list[int] = []  # of each chain, the call it ends with
    places: list[tuple[int, int, int, int]] = []  # of each call: chain, parts, end of prompt, end of completion
    for position, (parent, suffix, completion) in enumerate(calls):
        if parent is not None and tails[places[parent][0]] == parent:
            chain = places[parent][0]
        else:
            chain = len(chains)
            if parent is None:
                chains.append([])
                lengths.append(0)
            else:
                shared, parts, _, end = places[parent]
                chains.append(chains[shared][:parts])
                lengths.append(end)
            tails.append(position)
        prompt_end = lengths[chain] + len(suffix)
        end = prompt_end + len(completion)
        chains[chain] += (suffix, completion)
        lengths[chain], tails[chain] = end, position
        places.append((chain, len(chains[chain]), prompt_end, end))
    tokens = [np.concatenate(parts, dtype=np.int32, casting="unsafe") for parts in chains]
    for array in tokens:
        array.flags.writeable = False
    return [(tokens[chain][:prompt_end], tokens[chain][prompt_end:end]) for chain, _, prompt_end, end in places]


def prompts_and_completions(rows: Sequence[Row[Any]]) -> list[tuple[IntArray, IntArray]]:
    """Of all calls of one attempt, in order."""
    parts = decode_many([data for row in rows for data in (row.suffix, row.completion)])
    return assemble(zip((row.parent for row in rows), parts[::2], parts[1::2], strict=True))


def build_transition(
    row: Row[Any],
    prompt_ids: IntArray,
    completion_ids: IntArray,
    *,
    policy: str,
    sampling: SamplingSettings,
    agent: str | None,
    parent_id: str | None,
    rewards: Mapping[str, float | None],
) -> Transition:
    return Transition(
        id=row.id,
        index=row.idx,
        policy=policy,
        policy_version=row.version,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=decode_floats(row.logprobs),
        finish_reason=_FINISH[row.finish],
        sampling=sampling,
        agent=agent,
        span_id=decode_span(row.span),
        parent_id=parent_id,
        is_break=bool(row.is_break),
        tool_call_ids=() if row.tool_call_ids is None else tuple(decode_json(row.tool_call_ids)),
        rewards=rewards,
        trainable=bool(row.trainable),
        started_at=row.started_at,
        duration_s=row.duration_s,
    )
