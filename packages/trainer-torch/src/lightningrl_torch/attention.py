"""Attention along the paths of a prefix tree, in transformers' models: a forward that is handed `Paths` follows
them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightningrl_torch.models import read_traits
from lightningrl_torch.packing import Costs, Plan, Strip, plan_attention
from lightningrl_torch.quantized import quantized_numbers

__all__ = ["Paths", "attend", "follow", "follows_paths", "read_costs"]

_CALL = 5e5
"""Cost of a call, in multiply-adds of one head's one dimension for one pair (measured: 0.2 ms on one core)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Paths:
    """A plan on its device, as a model's layers are handed it."""

    calls: tuple[tuple[Tensor, Tensor, Tensor | None], ...]
    """Queries, keys, and which of them see each other (blocks, 1, queries, keys); None = causal."""
    places: Tensor
    """Place of each token of the row among all queries of all calls."""

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


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    paths: Paths | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' `sdpa` attention, and where a forward is handed `paths`, that along them. States are (1, heads,
    tokens, size)."""
    if paths is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    q, k, v = (states[0].transpose(0, 1).flatten(1) for states in (query, key, value))
    size = query.shape[-1]

    def gather(states: Tensor, numbers: Tensor) -> Tensor:
        """(blocks, heads, tokens, size)."""
        return states.index_select(0, numbers.flatten()).view(*numbers.shape, -1, size).transpose(1, 2)

    outputs = []
    for queries, keys, allowed in paths.calls:
        block = gather(q, queries), gather(k, keys), gather(v, keys)
        if allowed is None:
            mixed = sdpa_attention_forward(module, *block, None, **options)[0]
        else:
            mixed = _attend_in_groups(*block, allowed, options.get("scaling"))
        outputs.append(mixed.flatten(0, 1))
    return torch.cat(outputs).index_select(0, paths.places)[None], None


def _attend_in_groups(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float | None) -> Tensor:
    """(blocks, queries, heads, size). Heads that share keys are queries of one attention: keys and values, which stay
    until the backward pass, stand there once."""
    blocks, heads, queries, size = query.shape
    shared = key.shape[1]
    groups = heads // shared
    mask = allowed if groups == 1 else allowed.repeat(1, 1, groups, 1)
    mixed = scaled_dot_product_attention(
        query.reshape(blocks, shared, groups * queries, size), key, value, attn_mask=mask, scale=scale
    )
    return mixed.view(blocks, heads, queries, size).transpose(1, 2)


ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)


def read_costs(model: PreTrainedModel) -> Costs:
    """From its shapes: a pair is 4 · heads · size multiply-adds in each layer, a token two for each weight."""
    config = model.config.get_text_config(decoder=True)
    heads, size = int(config.num_attention_heads), getattr(config, "head_dim", None)
    width = heads * int(size or config.hidden_size // heads)
    ends = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embeddings = {id(parameter) for part in ends for parameter in part.parameters()}
    weights = sum(
        parameter.numel() for parameter in model.parameters() if parameter.ndim >= 2 and id(parameter) not in embeddings
    )
    weights += quantized_numbers(model)
    return Costs(token=2 * weights / (4 * width * int(config.num_hidden_layers)), call=_CALL / width)


def follow(paths: Paths) -> dict[str, Any]:
    """Arguments of a forward. The mask is there already, so that transformers makes none."""
    return {"paths": paths, "attention_mask": torch.ones((1, 1, 1, 1), dtype=torch.bool, device=paths.places.device)}


def follows_paths(model: PreTrainedModel) -> bool:
    """True if all layers attend to all earlier tokens by `attend`, and get the paths of a forward: the model itself
    is asked."""
    traits = read_traits(model, "")
    takes_more = any(
        logits.kind is logits.VAR_KEYWORD for logits in inspect.signature(model.forward).parameters.values()
    )
    if not (takes_more and traits.explicit_masks and traits.attention == "sdpa"):
        return False
    # three tokens, the last of which continues the first: to a model that knows no paths, the one between them makes a
    # difference
    strips = [Strip(start=0, stop=2, path=np.zeros(0, np.int64)), Strip(start=2, stop=3, path=np.zeros(1, np.int64))]
    paths = Paths.build(plan_attention(strips, np.array([3, 2, 3]), Costs(token=0.0, call=0.0)), model.device)
    positions = torch.tensor([[0, 1, 1]], device=model.device)
    with torch.no_grad():
        logits, other = (
            model(
                input_ids=torch.tensor([[1, token, 3]], device=model.device),
                position_ids=positions,
                use_cache=False,
                **follow(paths),
            )
            .logits[0, 2]
            .float()
            for token in (2, 4)
        )
    return float((logits - other).abs().max()) <= 1e-5 * float(logits.abs().max())
