"""Samples to the learner's batches: checked, dealt to minibatches, and laid out as rows side by side, or as a prefix
tree in which what samples begin alike with stands once. Imports no torch.

    sample 0   a b c d         tree       a b c d x y        depth-first, so a token's ancestors stand before it
    sample 1   a b x y         positions  0 1 2 3 2 3
                               ends       6 6 4 4 6 6        token j is seen by tokens j … ends[j]-1 and by nobody else

Each token of the tree is computed once; every sample's logprobs and gradients are those of its own row. Everything but
attention sees the tree as one row. Which tokens attend to which is a plan of few and small calls, without a mask of all
tokens by all tokens, which `attention` carries out:

    a b c d │ x y │ z        the tokens of a tree: x y and z continue a b

    block     keys                        A block is a run of tokens; its keys are the ancestors of its first
    a b c d   a b c d        causal       token, gathered, and itself. Blocks of about one shape are one call
    x y z     a b │ x y z    small mask   of the attention kernel.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightningrl.advantages import sort_by_tokens
from lightningrl.errors import BackendError
from lightningrl.types import Sample

__all__ = [
    "Batch",
    "Costs",
    "Plan",
    "Strip",
    "build_batches",
    "build_trees",
    "check_samples",
    "count_targets",
    "deal",
    "make_row",
    "plan_attention",
    "some_rows",
]

_PIECE = 256
"""Most queries of a block with a mask."""
_GATHER = 6
"""Cost of gathering a key and its value, in pairs of a query and a key (measured: 0.28 µs to 45 ns on one core)."""
_SKIPPED = 512
"""Keys that the CPU's causal kernel skips together: it saves nothing of a row that is shorter."""


def count_targets(sample: Sample) -> int:
    """Count the tokens of a sample that teach a critic."""
    return 0 if sample.value_targets is None else int(np.isfinite(sample.value_targets[sample.mask]).sum())


def check_samples(samples: Sequence[Sample], vocabulary: int) -> None:
    """Raise BackendError for samples that cannot be trained on."""
    if not any(sample.mask.any() for sample in samples):
        raise BackendError(f"none of {len(samples)} samples has a trained token; skip the step")
    for sample in samples:
        if not len(sample.token_ids):
            raise BackendError(f"a sample of rollout {sample.rollout_id!r} has no tokens; leave it out")
        if sample.mask[0]:
            raise BackendError(
                f"a sample of rollout {sample.rollout_id!r} trains its first token, which nothing predicts; start "
                "with a prompt"
            )
        if sample.token_ids.min() < 0 or sample.token_ids.max() >= vocabulary:
            raise BackendError(
                f"a sample of rollout {sample.rollout_id!r} has token ids outside 0..{vocabulary - 1}; another "
                "policy sampled it"
            )
        for name in ("logprobs", "advantages", "weights", "temperatures"):
            if not np.isfinite(getattr(sample, name)).all():
                raise BackendError(
                    f"a sample of rollout {sample.rollout_id!r} has {name} that are not finite; check rewards and "
                    "credit"
                )


def deal(samples: Sequence[Sample], minibatches: int, generator: random.Random) -> list[list[Sample]]:
    """Rollouts at random to minibatches of about the same size; a rollout's rows stay together."""
    if minibatches == 1:
        return [list(samples)]
    by_rollout: dict[str, list[Sample]] = {}
    for sample in samples:
        by_rollout.setdefault(sample.rollout_id, []).append(sample)
    rollouts = list(by_rollout.values())
    generator.shuffle(rollouts)
    count = min(minibatches, len(rollouts))
    return [[sample for rollout in rollouts[start::count] for sample in rollout] for start in range(count)]


def some_rows(samples: Sequence[Sample], tokens: int) -> list[Sample]:
    """Rows with a trained token, evenly from all of them, of about so many tokens together; at least one."""
    rows = [sample for sample in samples if sample.mask.any()]
    mean = sum(len(row.token_ids) for row in rows) / len(rows)
    count = max(1, min(len(rows), int(tokens / mean)))
    return [rows[number * len(rows) // count] for number in range(count)]


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
