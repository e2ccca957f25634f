"""Recomputing logprobs: one forward of a batch, logits only where a token is trained, and of a few tokens at a time.

    batch ─► states (N, hidden) ─► parts of rows ─► logits (part, vocabulary) ─► log p(target), entropy
                                                      └─ overwritten with their own gradient in the backward pass

A number for each word of a large vocabulary is the most that a step keeps: 2,000 trained tokens of 150,000 words are
1.2 GB, and log-softmax, its entropy and their gradients each want that again. Here a part's logits are the only such
array: few stay, and many are computed again for the gradient, which takes their place.

    ∂ log p_t / ∂ z_j = [j = t] - p_j        ∂ H / ∂ z_j = -p_j (log p_j + H)        z = logits ÷ temperature
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightningrl_torch.attention import Paths, follow
from lightningrl_torch.llama import FAMILIES
from lightningrl_torch.packing import Batch

__all__ = ["Scores", "look_up", "read_states", "score_batch", "to_tensor"]


MOST_LOGITS: Final = 2**26
"""Numbers that stay for the gradient: 256 MB; more are computed again."""
PART: Final = 2**24
"""Numbers that are computed at a time; on a GPU, which wants larger parts, eight times as many."""


class Scores(NamedTuple):
    """Scores of each trained token, N of them."""

    logprobs: Tensor
    entropies: Tensor
    """With a gradient where a loss has a term of them."""
    states: Tensor
    """(N, hidden): what the output embeddings saw where the token was predicted."""


def to_tensor(values: NDArray[Any], model: PreTrainedModel) -> Tensor:
    """An array on the model's device."""
    return torch.from_numpy(values).to(model.device)


def score_batch(model: PreTrainedModel, batch: Batch, *, autocast: bool, entropy_gradient: bool = False) -> Scores:
    """Logprobs and entropies, float32 at least, in the softmax at the token's temperature."""
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    targets, temperatures = to_tensor(batch.targets, model), to_tensor(batch.temperatures, model)
    # other families may do more to logits than their embeddings do, and embeddings with adapters are more than a weight
    if type(head) is not nn.Linear or head.bias is not None or model.config.model_type not in FAMILIES:
        logits, states = _forward(model, batch, autocast=autocast)
        return Scores(*_score_logits(logits, targets, temperatures, entropy_gradient=entropy_gradient), states)
    states = read_states(model, batch, autocast=autocast)
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=autocast):
        logprobs, entropies = look_up(states, head.weight, targets, temperatures)
    return Scores(logprobs, entropies if entropy_gradient else entropies.detach(), states)


def _score_logits(
    logits: Tensor, targets: Tensor, temperatures: Tensor, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """The targets' logprobs, and entropies, from logits (N, vocabulary)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if (temperatures != 1.0).any():
        # greedy tokens have their logprob at temperature 1, see TokenChunk.logprobs
        logits = logits / temperatures.where(temperatures != 0.0, 1.0)[:, None]
    logprobs = logits.log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropies


def read_states(model: PreTrainedModel, batch: Batch, *, autocast: bool) -> Tensor:
    """The states of `Scores` alone: no logits but a token's."""
    return _forward(model, batch, autocast=autocast, logits=False)[1]


def _forward(model: PreTrainedModel, batch: Batch, *, autocast: bool, logits: bool = True) -> tuple[Tensor, Tensor]:
    """Logits (trained tokens, vocabulary) and states (trained tokens, hidden)."""
    arguments: dict[str, Any] = {}
    rows, columns = to_tensor(batch.sources, model)
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=autocast):
        if batch.plan is not None:
            arguments = {
                "position_ids": to_tensor(batch.positions, model),
                **follow(Paths.build(batch.plan, model.device)),
            }
        head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        with _only_at(head, rows, columns, logits=logits) as states:
            all_logits: Tensor = model(input_ids=to_tensor(batch.token_ids, model), use_cache=False, **arguments).logits
    return all_logits[0], states[0]


@contextlib.contextmanager
def _only_at(head: nn.Module, rows: Tensor, columns: Tensor, *, logits: bool) -> Iterator[list[Tensor]]:
    """Let the output embeddings see hidden states at (rows, columns) alone: the vocabulary is most of a small model's
    work. Of this thread's forward passes: the engine's go on beside it. Gives a list that the hidden states are put
    into."""
    ours = threading.get_ident()
    states: list[Tensor] = []

    def pick(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if threading.get_ident() != ours:
            return arguments
        states.append(arguments[0][rows, columns])
        return ((states[0] if logits else states[0][:1])[None], *arguments[1:])

    hook = head.register_forward_pre_hook(pick)
    try:
        yield states
    finally:
        hook.remove()


def look_up(states: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets` and entropies, (N,) each, float32 at least, in the softmax of `states · weightᵀ` at each
    token's temperature (0 = as at 1). Both have a gradient. Under autocast the product alone is in its numbers."""
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    # greedy tokens have their logprob at temperature 1, see TokenChunk.logprobs
    scales = temperatures.where(temperatures != 0.0, 1.0).reciprocal()[:, None]
    factor = 8 if kind == "cuda" else 1
    is_kept = torch.is_grad_enabled() and len(states) * len(weight) <= factor * MOST_LOGITS
    part = max(1, factor * PART // len(weight))
    logprobs, entropies = _LookUp.apply(  # type: ignore[no-untyped-call]
        states, weight, targets, scales, _Way(dtype=dtype, part=part, is_kept=is_kept)
    )
    return logprobs, entropies


class _Way(NamedTuple):
    """The way in which a product is computed: its numbers, rows at a time, and if logits stay for the gradient."""

    dtype: torch.dtype
    part: int
    is_kept: bool


class _LookUp(torch.autograd.Function):
    """The arithmetic of `look_up`; `scales` are inverse temperatures (N, 1)."""

    @staticmethod
    def forward(
        context: Any, states: Tensor, weight: Tensor, targets: Tensor, scales: Tensor, way: _Way
    ) -> tuple[Tensor, Tensor]:
        stored, logprobs, entropies, norms = [], [], [], []
        matrix = weight.to(way.dtype)
        for at in range(0, len(states), way.part):
            part = slice(at, at + way.part)
            logits = _logits(states[part], matrix, scales[part])
            norm = logits.logsumexp(-1, keepdim=True)
            of_words = logits.sub_(norm)
            logprobs.append(of_words.gather(-1, targets[part, None])[:, 0])
            entropies.append(-(of_words.exp().mul_(of_words)).sum(-1))
            norms.append(norm)
            if way.is_kept:
                stored.append(of_words)
        joined = [torch.cat(part) if part else scales.new_zeros(0) for part in (logprobs, entropies)]
        norm = torch.cat(norms) if norms else scales.new_zeros((0, 1))
        context.save_for_backward(states, weight, targets, scales, norm, joined[1])
        context.stored, context.way = stored, way
        return joined[0], joined[1]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Each part's logits become their gradient in place. Once: what stayed is used up."""
        states, weight, targets, scales, norms, entropies = context.saved_tensors
        of_logprobs, of_entropies = gradients
        way: _Way = context.way
        matrix = weight.to(way.dtype)
        has_entropy = bool((of_entropies != 0).any())
        wants_states, wants_weight = context.needs_input_grad[:2]
        of_states = torch.empty_like(states) if wants_states else None
        of_weight = torch.zeros_like(weight) if wants_weight else None
        stored, context.stored = context.stored, []
        for number, at in enumerate(range(0, len(states), way.part)):
            part = slice(at, at + way.part)
            if stored:
                of_words, stored[number] = stored[number], None
            else:
                of_words = _logits(states[part], matrix, scales[part]).sub_(norms[part])
            slope = of_logprobs[part, None].neg()
            if has_entropy:
                gradient = (slope - of_entropies[part, None] * (of_words + entropies[part, None])) * of_words.exp_()
            else:
                gradient = of_words.exp_().mul_(slope)
            gradient.scatter_add_(-1, targets[part, None], of_logprobs[part, None])
            gradient = gradient.mul_(scales[part]).to(way.dtype)
            if of_states is not None:
                of_states[part] = gradient @ matrix
            if of_weight is not None:
                seen = states[part].to(way.dtype)
                if of_weight.dtype is way.dtype:
                    of_weight.addmm_(gradient.t(), seen)
                else:
                    of_weight += gradient.t() @ seen
        return of_states, of_weight, None, None, None


def _logits(states: Tensor, matrix: Tensor, scales: Tensor) -> Tensor:
    """(part, vocabulary), float32 at least, divided by the temperature."""
    logits = states.to(matrix.dtype) @ matrix.t()
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).mul_(scales)
