"""Recomputing logprobs: one forward of a batch, logits only where a token is trained, and of a few tokens at a time
(`_head`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightningrl_torch._attention import Paths, follow
from lightningrl_torch._head import look_up
from lightningrl_torch._llama import FAMILIES
from lightningrl_torch._packing import Batch

__all__ = ["Scores", "read_states", "score_batch", "to_tensor"]


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
        return Scores(*_look_up(logits, targets, temperatures, entropy_gradient=entropy_gradient), states)
    states = read_states(model, batch, autocast=autocast)
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=autocast):
        logprobs, entropies = look_up(states, head.weight, targets, temperatures)
    return Scores(logprobs, entropies if entropy_gradient else entropies.detach(), states)


def _look_up(logits: Tensor, targets: Tensor, temperatures: Tensor, *, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
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
