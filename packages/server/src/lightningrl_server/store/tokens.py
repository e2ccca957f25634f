"""Rows of calls to transitions, with whole prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import itemgetter
from typing import Any, Final

from sqlalchemy import Row

from lightningrl.types import IntArray, SamplingSettings, Transition
from lightningrl.wire import assemble
from lightningrl_server.store.codec import decode_many
from lightningrl_server.store.schema import calls

__all__ = ["AS_THEY_ARE", "build_transition", "prompts_and_completions"]


def prompts_and_completions(rows: Sequence[Row[Any]]) -> list[tuple[IntArray, IntArray]]:
    """Of all calls of one attempt, in order."""
    parts = decode_many([data for row in rows for data in (row.suffix, row.completion)])
    return assemble(list(zip((row.parent for row in rows), parts[::2], parts[1::2], strict=True)))


def build_transition(
    row: Row[Any],
    prompt_ids: IntArray,
    completion_ids: IntArray,
    *,
    policy: str,
    sampling: SamplingSettings,
    agent: str | None,
    offered: str,
    parent_id: str | None,
    rewards: Mapping[str, float | None],
    reported: Mapping[str, float | None],
) -> Transition:
    """`row`: of `calls`; the columns that are fields of a Transition are taken as they are."""
    return Transition(
        **dict(zip(AS_THEY_ARE, _as_they_are(row), strict=True)),
        index=row.idx,
        policy=policy,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        sampling=sampling,
        agent=agent,
        offered=offered,
        parent_id=parent_id,
        rewards=rewards,
        reported=reported,
    )


AS_THEY_ARE: Final = tuple(
    field.name for field in fields(Transition) if field.name in calls.c and field.name not in ("policy", "sampling", "agent")
)
"""Fields of a Transition that are columns of their own; the others are interned words, tokens without their parent's, or elsewhere."""
_as_they_are = itemgetter(*(list(calls.c.keys()).index(name) for name in AS_THEY_ARE))
