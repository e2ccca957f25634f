"""A critic: what is to be expected after a token, read off the policy's own layers or off a model of its own.

    trunk    policy ─► hidden state ─► head ─► value       one layer more; nothing else is kept or computed
    a model  critic ─► hidden state ─► head ─► value       weights, gradients and optimiser of its own

The head starts at zero: before the first step every value is 0.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightningrl.errors import ConfigError
from lightningrl_torch.bits import make_optimizer
from lightningrl_torch.models import ModelTraits, check_rotation, read_traits
from lightningrl_torch.packing import Batch
from lightningrl_torch.policy import load_weights, silence_dropout
from lightningrl_torch.scoring import read_states
from lightningrl_torch.settings import CriticSettings, Settings

__all__ = ["Critic", "value_losses"]


class Critic:
    """Values of states, with parameters and an optimiser of their own."""

    def __init__(self, policy: PreTrainedModel, traits: ModelTraits, settings: Settings, own: CriticSettings) -> None:
        self.settings = own
        self._policy = policy
        self._autocast = settings.dtype == "bfloat16"
        self._model, self._traits = policy, traits
        if own.model != "trunk":
            self._model = _load_model(own.model, policy)
            self._traits = read_traits(self._model, own.model)
            most = getattr(policy.config.get_text_config(decoder=True), "max_position_embeddings", 0)
            check_rotation(self._model.config, own.model, settings.context_length or most)
            if self._traits.vocabulary < traits.vocabulary:
                raise ConfigError(
                    f"critic {own.model!r} reads {self._traits.vocabulary} tokens and the policy has "
                    f"{traits.vocabulary}; "
                    "take a model with the policy's tokenizer"
                )
        size = int(self._model.config.get_text_config(decoder=True).hidden_size)
        self._head = nn.Linear(size, 1, device=policy.device)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self.parameters: dict[str, nn.Parameter] = {
            f"head.{name}": parameter for name, parameter in self._head.named_parameters()
        }
        if not self.reads_policy:
            # also where they are the output's
            used = {id(parameter) for parameter in self._model.get_input_embeddings().parameters()}
            output: nn.Module = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
            unused = {id(parameter) for parameter in output.parameters()} - used
            self.parameters |= {
                f"model.{name}": parameter
                for name, parameter in self._model.named_parameters()
                if id(parameter) not in unused
            }
        group = {"params": list(self.parameters.values()), "weight_decay": 0.0}
        self.optimizer = make_optimizer([group], settings, rate=own.rate, fused=False)

    @property
    def model(self) -> PreTrainedModel:
        """The policy, or the model of its own."""
        return self._model

    @property
    def reads_policy(self) -> bool:
        """True if it is a head on the policy's layers."""
        return self._model is self._policy

    @property
    def weight(self) -> float:
        """Weight of its loss beside the policy's: without a part in the policy's gradient, it is 1."""
        return self.settings.coefficient if self.settings.joint else 1.0

    def clip_gradient(self, limit: float) -> float:
        """Scale the gradient down to a norm; returns what it was."""
        return float(torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), limit))

    def values(self, batch: Batch, states: Tensor | None = None) -> Tensor:
        """The value before each of the batch's trained tokens, float32. `states`: the policy's, where they are at
        hand."""
        if states is None or not self.reads_policy:
            states = read_states(self._model, batch, autocast=self._autocast)
        elif not self.settings.joint:
            states = states.detach()
        values: Tensor = self._head(states.float())
        return values[:, 0]

    def state(self) -> dict[str, Any]:
        """All but the weights."""
        return {"optimizer": self.optimizer.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.optimizer.load_state_dict(state["optimizer"])


def value_losses(values: Tensor, targets: Tensor, old: Tensor | None, clip: float | None) -> Tensor:
    """½ max((V - G)², (clip(V, V_old - ε, V_old + ε) - G)²), one for each target; ½ (V - G)² without a bound, or
    without V_old.

    PPO's clipped value loss, as OpenAI's baselines have it and verl.
    """
    plain = (values - targets).square()
    if clip is None or old is None:
        return 0.5 * plain
    return 0.5 * plain.maximum(((old + (values - old).clamp(-clip, clip)) - targets).square())


def _load_model(name: str, policy: PreTrainedModel) -> PreTrainedModel:
    model: PreTrainedModel = load_weights(
        "model of the critic", AutoModelForCausalLM.from_pretrained, name, dtype=torch.float32
    ).to(policy.device)
    silence_dropout(model)
    return model.eval()  # type: ignore[no-untyped-call,no-any-return]
