"""Attention of prompts that are computed in one pass: prompts of similar length are rows of one call.

flat tokens of the pass     a a a a b b b c          projections: nothing is padded
call 0                      a a a a                  attention: padded on the right, where causal attention never looks
                            b b b ·
call 1                      c
call 2, after prefixes      [ p p · | d d d ]        keys: what stands before, then the new ones; a mask leaves
                            [ p p p | e e · ]        the padding out
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

__all__ = ["PromptAttention", "plan_calls"]

LEAST: Final = {"cpu": 0.9, "cuda": 0.4}
"""Share of a call's pairs of tokens that must be no padding. A GPU waits for the host to start calls, a CPU for the
arithmetic."""
MOST_KEYS: Final = 2**17
"""Keys of a call, padding included."""


def plan_calls(new: Sequence[int], past: Sequence[int], least: float) -> list[list[int]]:
    """Numbers of the sequences of each call, such that at least the share `least` of its pairs of a token with a token
    that it may read is no padding.

    new, past    tokens of each sequence that are computed, and that stand before them
    """
    calls: list[list[int]] = []
    widest_new = widest_past = pairs = 0
    for number in sorted(
        range(len(new)), key=lambda number: (past[number] > 0, new[number], past[number]), reverse=True
    ):
        own = new[number] * (past[number] + new[number])
        if calls:
            longest = max(widest_past, past[number])
            keys = (len(calls[-1]) + 1) * (longest + widest_new)
            alike = (past[number] > 0) == (widest_past > 0)
            if alike and keys <= MOST_KEYS and pairs + own >= least * widest_new * keys:
                calls[-1].append(number)
                widest_past, pairs = longest, pairs + own
                continue
        calls.append([number])
        widest_new, widest_past, pairs = new[number], past[number], own
    return calls


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Call:
    """Rows of one attention, as places in the flat tokens of the pass."""

    tokens: slice
    rows: int
    queries: Tensor | None
    """(rows, new) places among the call's tokens; None = they stand there as they are asked for."""
    keys: Tensor | None
    """(rows, past + new) places among all past tokens and the call's; None = the queries'."""
    mask: Tensor | None
    """(rows, 1, new, past + new); None = causal."""
    unpadded: Tensor | None
    """Places of the call's tokens among its padded rows; None = there is no padding."""


class PromptAttention:
    """The attention of one pass, planned once for all layers. `order` says in which order the sequences' tokens stand
    in the pass."""

    def __init__(self, lengths: Sequence[int], before: Sequence[Tensor | None], device: torch.device) -> None:
        """`before[n]` (states, heads, tokens, head_dim): what sequence n goes on from."""
        past = [0 if states is None else states.shape[2] for states in before]
        plan = plan_calls(lengths, past, LEAST.get(device.type, LEAST["cuda"]))
        self.order = [number for numbers in plan for number in numbers]
        self._device = device
        self._past, starts = _distinct(before)
        self._past_tokens = sum(states.shape[2] for states in self._past)
        self._calls: list[_Call] = []
        at = 0
        for numbers in plan:
            tokens = slice(at, at := at + sum(lengths[number] for number in numbers))
            new, old = ([counts[number] for number in numbers] for counts in (lengths, past))
            self._calls.append(self._plan_call(tokens, new, old, [starts[number] for number in numbers]))

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """All tokens of the pass, each (tokens, heads, head_dim), on what they may read: (tokens, heads · head_dim)."""
        # a layer's at a time: all layers' together are as large as the remembered prompts
        past = (
            torch.cat([states[2 * layer : 2 * layer + 2] for states in self._past], 2).transpose(1, 2)
            if self._past
            else None
        )
        mixed = [_attend(call, past, queries, keys, values) for call in self._calls]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _plan_call(self, tokens: slice, new: Sequence[int], past: Sequence[int], starts: Sequence[int]) -> _Call:
        widest, most_past = max(new), max(past)
        lengths, olds = torch.tensor(new), torch.tensor(past)
        columns = torch.arange(widest)
        here = columns < lengths[:, None]
        queries = unpadded = keys = mask = None
        if min(new) < widest:
            queries = torch.where(here, (lengths.cumsum(0) - lengths)[:, None] + columns, 0)
            unpadded = here.flatten().nonzero()[:, 0]
        if most_past:
            before = torch.arange(most_past)
            is_past = before < olds[:, None]
            old_keys = torch.where(is_past, torch.tensor(starts)[:, None] + before, 0)
            new_keys = queries if queries is not None else torch.arange(sum(new)).view(len(new), widest)
            keys = torch.cat((old_keys, new_keys + self._past_tokens), 1)
            causal = columns <= columns[:, None]
            mask = torch.cat((is_past[:, None].expand(-1, widest, -1), causal.expand(len(new), -1, -1)), 2)[:, None]
        moved = [None if one is None else one.to(self._device) for one in (queries, keys, mask, unpadded)]
        return _Call(tokens=tokens, rows=len(new), queries=moved[0], keys=moved[1], mask=moved[2], unpadded=moved[3])


def _attend(call: _Call, past: Tensor | None, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`past` (2, tokens, heads, head_dim): keys and values that calls with a mask read, too."""
    q, k, v = (states[call.tokens] for states in (queries, keys, values))
    if call.mask is not None:
        assert past is not None
        k, v = (torch.cat((old, new)) for old, new in zip(past, (k, v), strict=True))
    q = _rows(q, call.queries, call.rows)
    k, v = (_rows(states, call.queries if call.keys is None else call.keys, call.rows) for states in (k, v))
    mixed = _attend_causally(q, k, v) if call.mask is None else _attend_masked(q, k, v, call.mask)
    flat = mixed.transpose(1, 2).reshape(call.rows * q.shape[2], -1)
    return flat if call.unpadded is None else flat[call.unpadded]


def _distinct(before: Sequence[Tensor | None]) -> tuple[list[Tensor], list[int]]:
    """States before any sequence, (states, heads, tokens, head_dim), each once, and where each sequence's
    begins when they are joined. Views that begin at the same place are beginnings of one prompt."""
    longest: dict[int, Tensor] = {}
    for states in before:
        if states is not None:
            place = states.data_ptr()
            if place not in longest or longest[place].shape[2] < states.shape[2]:
                longest[place] = states
    starts, at = {}, 0
    for place, states in longest.items():
        starts[place] = at
        at += states.shape[2]
    return list(longest.values()), [0 if states is None else starts[states.data_ptr()] for states in before]


def _rows(states: Tensor, places: Tensor | None, rows: int) -> Tensor:
    """(tokens, heads, size) as (rows, heads, columns, size)."""
    stacked = states.view(rows, -1, *states.shape[1:]) if places is None else states[places]
    return stacked.transpose(1, 2)


def _attend_causally(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    groups = queries.shape[1] // keys.shape[1]
    if groups > 1 and queries.device.type == "cuda":
        # the kernels that keep no matrix of scores take heads that share keys in bfloat16 alone
        keys, values = (states.repeat_interleave(groups, 1) for states in (keys, values))
        groups = 1
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=groups > 1)


def _attend_masked(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Heads that share keys are queries of one attention."""
    rows, heads, columns, size = queries.shape
    shared = keys.shape[1]
    groups = heads // shared
    grouped = queries.reshape(rows, shared, groups * columns, size)
    mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask.repeat(1, 1, groups, 1))
    return mixed.view(rows, heads, columns, size)
