"""Attention along the paths of a prefix tree: exact, and without a mask of all tokens by all tokens.

    a b c d │ x y │ z        the tokens of a tree, depth first: x y and z continue a b

    block     keys                          A block is a run of tokens; its keys are the ancestors of its first one, gathered, and itself.
    a b c d   a b c d        causal         Blocks of about one shape are one call of the attention kernel.
    x y z     a b │ x y z    a small mask

Everything but attention sees the tree as one row, in which each token stands once.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightningrl_torch._models import read_traits

__all__ = ["Costs", "Paths", "Plan", "Strip", "attend", "follow", "follows_paths", "plan_attention", "read_costs"]

_PIECE = 256
"""Most queries of a block with a mask."""
_GATHER = 6
"""What it costs to gather a key and its value, in pairs of a query and a key (measured: 0.28 µs to 45 ns on one core)."""
_SKIPPED = 512
"""Keys that the CPU's causal kernel skips together: it saves nothing of a row that is shorter."""
_CALL = 5e5
"""What a call costs, in multiply-adds of one head's one dimension for one pair (measured: 0.2 ms on one core)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What a model's forward costs. The unit is a pair: one query that looks at one key, in every layer."""

    token: float
    """All but attention, of one token."""
    call: float
    """One more call of the attention kernel."""

    def of_attention(self, queries: int, keys: int) -> float:
        """Of one block."""
        return queries * keys + _GATHER * keys

    def is_worth_sharing(self, shared: int, length: int) -> bool:
        """Whether a row of `length` tokens costs less as what follows its first `shared` ones than as a row of its own."""
        own = sum(self.of_attention(min(_PIECE, length - at), min(length, at + _PIECE)) for at in range(shared, length, _PIECE))
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
    """Queries (blocks, queries) and keys (blocks, keys), by their numbers in the row, -1 = none; None = the queries, causal."""
    ends: NDArray[np.int64]
    """Token j is seen by tokens j … ends[j] - 1 and by nobody else."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Paths:
    """A plan on its device, as a model's layers are handed it."""

    calls: tuple[tuple[Tensor, Tensor, Tensor | None], ...]
    """Queries, keys, and which of them see each other (blocks, 1, queries, keys); None = causal."""
    places: Tensor
    """Of each token of the row among all queries of all calls."""

    @classmethod
    def build(cls, plan: Plan, device: torch.device) -> Paths:
        calls: list[tuple[Tensor, Tensor, Tensor | None]] = []
        places = np.zeros(len(plan.ends), np.int64)
        ends = torch.from_numpy(plan.ends).to(device)
        before = 0
        for query_numbers, key_numbers in plan.calls:
            flat = query_numbers.ravel()
            here = np.flatnonzero(flat >= 0)
            places[flat[here]] = here + before
            before += len(flat)
            queries = torch.from_numpy(query_numbers).to(device)
            if key_numbers is None:
                queries = queries.clamp(min=0)
                calls.append((queries, queries, None))
                continue
            keys = torch.from_numpy(key_numbers).to(device)
            is_query, is_key = queries >= 0, keys >= 0
            queries, keys = queries.clamp(min=0), keys.clamp(min=0)
            q, k = queries[:, :, None], keys[:, None, :]
            allowed = (k <= q) & (q < ends[keys][:, None, :]) & is_key[:, None, :]
            allowed[:, :, 0] |= ~is_query  # nobody reads what comes of these; without any key it would not be a number
            calls.append((queries, keys, allowed[:, None]))
        return cls(calls=tuple(calls), places=torch.from_numpy(places).to(device))


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
    calls += [(_pad([queries for queries, _ in call]), _pad([keys for _, keys in call])) for call in _group(masked, costs.call)]
    return Plan(calls=tuple(calls), ends=ends)


def _cut(strip: Strip) -> list[Strip]:
    """Pieces of a long strip, so that no mask is large. What continues nothing needs no mask."""
    if not len(strip.path):
        return [strip]
    return [
        Strip(start=at, stop=min(at + _PIECE, strip.stop), path=np.concatenate([strip.path, np.arange(strip.start, at)]))
        for at in range(strip.start, strip.stop, _PIECE)
    ]


def _merge(pieces: Sequence[Strip], costs: Costs) -> list[Strip]:
    """Pieces that stand side by side become one block where that costs less: they gather what they continue once, and look at each other
    in vain."""
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
    found = np.full((len(parts), max(map(len, parts))), -1, np.int64)
    for number, part in enumerate(parts):
        found[number, : len(part)] = part
    return found


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, paths: Paths | None = None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' `sdpa` attention, and where a forward is handed `paths`, that along them. States are (1, heads, tokens, size)."""
    if paths is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    q, k, v = (states[0].transpose(0, 1).flatten(1) for states in (query, key, value))
    size = query.shape[-1]

    def gather(states: Tensor, numbers: Tensor) -> Tensor:
        """(blocks, heads, tokens, size)."""
        return states.index_select(0, numbers.flatten()).view(*numbers.shape, -1, size).transpose(1, 2)

    found = [
        sdpa_attention_forward(module, gather(q, queries), gather(k, keys), gather(v, keys), allowed, **options)[0].flatten(0, 1)
        for queries, keys, allowed in paths.calls
    ]
    return torch.cat(found).index_select(0, paths.places)[None], None


ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)


def read_costs(model: PreTrainedModel) -> Costs:
    """From its shapes: a pair is 4 · heads · size multiply-adds in each layer, a token two for each weight."""
    config = model.config.get_text_config(decoder=True)
    heads, size = int(config.num_attention_heads), getattr(config, "head_dim", None)
    width = heads * int(size or config.hidden_size // heads)
    embeddings = {id(one) for part in (model.get_input_embeddings(), model.get_output_embeddings()) for one in part.parameters()}  # type: ignore[no-untyped-call]
    weights = sum(one.numel() for one in model.parameters() if one.ndim >= 2 and id(one) not in embeddings)
    return Costs(token=2 * weights / (4 * width * int(config.num_hidden_layers)), call=_CALL / width)


def follow(paths: Paths) -> dict[str, Any]:
    """Arguments of a forward. The mask is there already, so that transformers makes none."""
    return {"paths": paths, "attention_mask": torch.ones((1, 1, 1, 1), dtype=torch.bool, device=paths.places.device)}


def follows_paths(model: PreTrainedModel) -> bool:
    """Whether all layers attend to all earlier tokens by `attend`, and are handed the paths of a forward: asked of the model itself."""
    traits = read_traits(model, "")
    takes_more = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(model.forward).parameters.values())
    if not (takes_more and traits.explicit_masks and traits.attention == "sdpa"):
        return False
    # three tokens, the last of which continues the first: to a model that knows no paths, the one between them makes a difference
    strips = [Strip(start=0, stop=2, path=np.zeros(0, np.int64)), Strip(start=2, stop=3, path=np.zeros(1, np.int64))]
    paths = Paths.build(plan_attention(strips, np.array([3, 2, 3]), Costs(token=0.0, call=0.0)), model.device)
    positions = torch.tensor([[0, 1, 1]], device=model.device)
    with torch.no_grad():
        one, other = (
            model(input_ids=torch.tensor([[1, token, 3]], device=model.device), position_ids=positions, use_cache=False, **follow(paths))
            .logits[0, 2]
            .float()
            for token in (2, 4)
        )
    return float((one - other).abs().max()) <= 1e-5 * float(one.abs().max())
