"""Samples to the learner's batches: as rows side by side, or as a prefix tree in which what samples begin alike with
stands once.

    sample 0   a b c d         tree       a b c d x y        depth-first, so a token's ancestors stand before it
    sample 1   a b x y         positions  0 1 2 3 2 3
                               ends       6 6 4 4 6 6        token j is seen by tokens j … ends[j]-1 and by nobody else

Each token of the tree is computed once; every sample's logprobs and gradients are those of its own row (`_paths`,
`_attention`). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightningrl.advantages import sort_by_tokens
from lightningrl.types import Sample
from lightningrl_torch._paths import Costs, Plan, Strip, plan_attention

__all__ = ["Batch", "build_batches", "build_trees", "make_row"]


@dataclass(kw_only=True, slots=True)
class _Tree:
    """Samples that begin alike, or not: under construction, in one row."""

    token_ids: list[NDArray[np.int64]] = field(default_factory=list)
    positions: list[NDArray[np.int64]] = field(default_factory=list)
    paths: list[NDArray[np.int64]] = field(default_factory=list)
    """`paths[sample][t]` = the row's index of its token t."""
    samples: list[Sample] = field(default_factory=list)
    strips: list[Strip] = field(default_factory=list)
    ends: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    size: int = 0

    def add(self, sample: Sample, shared: int) -> None:
        """Append a sample whose first `shared` tokens are the previous sample's."""
        new = len(sample.token_ids) - shared
        if self.paths:
            self.ends[self.paths[-1][shared:]] = self.size
        before = self.paths[-1][:shared] if self.paths else np.zeros(0, np.int64)
        if new and len(before) and before[-1] == self.size - 1:  # it goes on where the row ends
            last = self.strips.pop()
            self.strips.append(Strip(start=last.start, stop=self.size + new, path=last.path))
        elif new:
            self.strips.append(Strip(start=self.size, stop=self.size + new, path=before))
        self.paths.append(np.concatenate([before, np.arange(self.size, self.size + new)]))
        self.token_ids.append(sample.token_ids[shared:].astype(np.int64))
        self.positions.append(np.arange(shared, shared + new))
        self.samples.append(sample)
        self.size += new
        self.ends = np.concatenate([self.ends, np.zeros(new, np.int64)])

    def close(self) -> None:
        self.ends[self.paths[-1]] = self.size


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """One forward and backward: `rows` x `width` tokens, padded on the right, and N trained tokens in it."""

    samples: tuple[Sample, ...]
    """In the order of the trained tokens."""
    token_ids: NDArray[np.int64]
    """(rows, width)."""
    positions: NDArray[np.int64]
    """(rows, width): distance from the sample's start."""
    plan: Plan | None
    """Plan of a tree's attention; None = rows, plain causal attention."""
    sources: NDArray[np.int64]
    """(2, N): row and column whose logits predict the trained token."""
    targets: NDArray[np.int64]
    """(N,): the trained tokens."""
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    weights: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    calls: NDArray[np.int64]
    """(N,): which call each is of, 0 … calls - 1."""
    value_targets: NDArray[np.float32]
    """(N,): NaN where none."""


def make_row(context: NDArray[np.int32], tokens: NDArray[np.int32], temperature: float = 1.0) -> Sample:
    """Tokens after a context as a row to be read: no credit, no weight."""
    length = len(context) + len(tokens)
    mask = np.arange(length) >= len(context)
    zeros = np.zeros(length, np.float32)
    numbers = np.where(mask, 0, -1).astype(np.int32)
    return Sample(
        rollout_id="",
        policy="",
        token_ids=np.concatenate([context, tokens]).astype(np.int32),
        mask=mask,
        logprobs=zeros,
        advantages=zeros,
        weights=zeros,
        versions=numbers,
        calls=numbers,
        temperatures=np.where(mask, np.float32(temperature), np.float32(1.0)),
    )


def build_batches(samples: Sequence[Sample], *, max_tokens: int, costs: Costs | None) -> Iterator[Batch]:
    """Batches of at most `max_tokens` tokens, padding included; a longer sample has one of its own. With `costs` each
    is a tree, else its rows are samples of similar length."""
    if costs is not None:
        for tree in build_trees(samples, max_tokens=max_tokens, costs=costs):
            yield _build_batch([tree], plan_attention(tree.strips, tree.ends, costs))
        return
    batch: list[_Tree] = []
    for sample in sorted(samples, key=lambda sample: len(sample.token_ids), reverse=True):
        if batch and (len(batch) + 1) * batch[0].size > max_tokens:
            yield _build_batch(batch)
            batch = []
        batch.append(_Tree())
        batch[-1].add(sample, 0)
    if batch:
        yield _build_batch(batch)


def build_trees(samples: Sequence[Sample], *, max_tokens: int, costs: Costs) -> list[_Tree]:
    """Each sample in exactly one. Where not all fit into one tree, the next begins where that repeats the fewest
    tokens."""
    order, shared = sort_by_tokens(samples)
    for number, sample in enumerate(order):
        if not costs.is_worth_sharing(shared[number], len(sample.token_ids)):
            shared[number] = 0
    trees: list[_Tree] = []
    start = 0
    while start < len(order):
        size, stop = len(order[start].token_ids), start + 1
        while stop < len(order) and size + len(order[stop].token_ids) - shared[stop] <= max_tokens:
            size += len(order[stop].token_ids) - shared[stop]
            stop += 1
        if stop < len(order):  # of the tree's second half, so that it is not much smaller than it may be
            half = (start + stop + 1) // 2
            stop = max(range(half, stop + 1), key=lambda number: (-shared[number], number))
        tree = _Tree()
        for number in range(start, stop):
            tree.add(order[number], shared[number] if number > start else 0)
        tree.close()
        trees.append(tree)
        start = stop
    return trees


def _build_batch(rows: Sequence[_Tree], plan: Plan | None = None) -> Batch:
    width = rows[0].size
    token_ids = np.zeros((len(rows), width), np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    sources: list[NDArray[np.int64]] = []
    picked: dict[str, list[NDArray[np.generic]]] = {
        name: [] for name in ("token_ids", "logprobs", "advantages", "weights", "temperatures")
    }
    calls: list[NDArray[np.int64]] = []
    value_targets: list[NDArray[np.float32]] = []
    calls_before = 0
    for number, row in enumerate(rows):
        token_ids[number, : row.size] = np.concatenate(row.token_ids)
        positions[number, : row.size] = np.concatenate(row.positions)
        for sample, path in zip(row.samples, row.paths, strict=True):
            trained = np.flatnonzero(sample.mask)
            sources.append(np.stack([np.full(len(trained), number), path[trained - 1]]))
            for name, parts in picked.items():
                parts.append(getattr(sample, name)[trained])
            targets = sample.value_targets
            value_targets.append(np.full(len(trained), np.nan, np.float32) if targets is None else targets[trained])
            # a call's tokens are all in one sample, so its calls are numbered on from those before:  3 3 5 │ 0 2  ->  0
            # 0 1 │ 2 3
            own_calls, numbers = np.unique(sample.calls[trained], return_inverse=True)
            calls.append(numbers + calls_before)
            calls_before += len(own_calls)
    joined = {name: np.concatenate(parts) for name, parts in picked.items()}
    return Batch(
        samples=tuple(sample for row in rows for sample in row.samples),
        token_ids=token_ids,
        positions=positions,
        plan=plan,
        sources=np.concatenate(sources, axis=1),
        targets=joined["token_ids"].astype(np.int64),
        logprobs=joined["logprobs"].astype(np.float32),
        advantages=joined["advantages"].astype(np.float32),
        weights=joined["weights"].astype(np.float32),
        temperatures=joined["temperatures"].astype(np.float32),
        calls=np.concatenate(calls),
        value_targets=np.concatenate(value_targets),
    )
