"""Which tokens of a prefix tree attend to which, in few and small calls: exact, and without a mask of all tokens by all
tokens.

    a b c d │ x y │ z        the tokens of a tree, depth first: x y and z continue a b

    block     keys                        A block is a run of tokens; its keys are the ancestors of its first
    a b c d   a b c d        causal       token, gathered, and itself. Blocks of about one shape are one call
    x y z     a b │ x y z    small mask   of the attention kernel.

Everything but attention sees the tree as one row, in which each token stands once. `_attention` carries the plan out.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Costs", "Plan", "Strip", "plan_attention"]

_PIECE = 256
"""Most queries of a block with a mask."""
_GATHER = 6
"""Cost of gathering a key and its value, in pairs of a query and a key (measured: 0.28 µs to 45 ns on one core)."""
_SKIPPED = 512
"""Keys that the CPU's causal kernel skips together: it saves nothing of a row that is shorter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Cost of a model's forward. The unit is a pair: one query that looks at one key, in every layer."""

    token: float
    """All but attention, of one token."""
    call: float
    """One more call of the attention kernel."""

    def of_attention(self, queries: int, keys: int) -> float:
        """Cost of one block."""
        return queries * keys + _GATHER * keys

    def is_worth_sharing(self, shared: int, length: int) -> bool:
        """True if a row of `length` tokens costs less after its first `shared` ones than as a row of its own."""
        own = sum(
            self.of_attention(min(_PIECE, length - at), min(length, at + _PIECE))
            for at in range(shared, length, _PIECE)
        )
        causal = self.of_attention(length, max(length // 2, min(length, _SKIPPED)))
        return own < shared * self.token + causal


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Strip:
    """The tokens that a sample adds to its tree, and those that they continue, by their numbers in the row."""

    start: int
    stop: int
    path: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """The calls of the attention kernel for one row."""

    calls: tuple[tuple[NDArray[np.int64], NDArray[np.int64] | None], ...]
    """Queries (blocks, queries) and keys (blocks, keys), by their numbers in the row, -1 = none; None = the queries,
    causal."""
    ends: NDArray[np.int64]
    """Token j is seen by tokens j … ends[j] - 1 and by nobody else."""


def plan_attention(strips: Sequence[Strip], ends: NDArray[np.int64], costs: Costs) -> Plan:
    """The cheapest blocks found by going through a row once, and those of about one shape together."""
    causal, masked = [], []
    for block in _merge([piece for strip in strips for piece in _cut(strip)], costs):
        tokens = np.arange(block.start, block.stop)
        if not len(block.path) and any(strip.start <= block.start and block.stop <= strip.stop for strip in strips):
            causal.append((tokens, tokens))
        else:
            masked.append((tokens, np.concatenate([block.path, tokens])))
    calls: list[tuple[NDArray[np.int64], NDArray[np.int64] | None]] = []
    calls += [(_pad([queries for queries, _ in call]), None) for call in _group(causal, costs.call)]
    calls += [
        (_pad([queries for queries, _ in call]), _pad([keys for _, keys in call]))
        for call in _group(masked, costs.call)
    ]
    return Plan(calls=tuple(calls), ends=ends)


def _cut(strip: Strip) -> list[Strip]:
    """Pieces of a long strip, so that no mask is large. What continues nothing needs no mask."""
    if not len(strip.path):
        return [strip]
    return [
        Strip(
            start=at, stop=min(at + _PIECE, strip.stop), path=np.concatenate([strip.path, np.arange(strip.start, at)])
        )
        for at in range(strip.start, strip.stop, _PIECE)
    ]


def _merge(pieces: Sequence[Strip], costs: Costs) -> list[Strip]:
    """Pieces that stand side by side become one block where that costs less: they gather what they continue once, and
    look at each other in vain."""
    blocks: list[Strip] = []
    for piece in pieces:
        if blocks:
            both = Strip(start=blocks[-1].start, stop=piece.stop, path=blocks[-1].path)
            if both.stop - both.start <= _PIECE and _cost(both, costs) < _cost(blocks[-1], costs) + _cost(piece, costs):
                blocks[-1] = both
                continue
        blocks.append(piece)
    return blocks


def _cost(block: Strip, costs: Costs) -> float:
    queries = block.stop - block.start
    return costs.of_attention(queries, queries + len(block.path))


_Block = tuple[NDArray[np.int64], NDArray[np.int64]]


def _group(blocks: Sequence[_Block], call: float) -> list[list[_Block]]:
    """Blocks of about one shape: one joins those before it where the padding costs less than a call of its own."""
    groups: list[list[_Block]] = []
    widest = 0
    for block in sorted(blocks, key=lambda block: (len(block[1]), len(block[0])), reverse=True):
        queries, keys = map(len, block)
        if groups:
            most = len(groups[-1][0][1])
            wider = max(widest, queries)
            padding = (wider - widest) * most * len(groups[-1]) + wider * most - queries * keys
            if padding < call:
                groups[-1].append(block)
                widest = wider
                continue
        groups.append([block])
        widest = queries
    return groups


def _pad(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    padded = np.full((len(parts), max(map(len, parts))), -1, np.int64)
    for number, part in enumerate(parts):
        padded[number, : len(part)] = part
    return padded
