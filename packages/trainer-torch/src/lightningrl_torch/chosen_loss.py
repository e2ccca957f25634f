"""The loss that a run has chosen, of the table or its user's own, tried on a few tokens before anything heavy starts.

"gspo"           one of `lightningrl_torch.losses.LOSSES`
"file.py:loss"   a function of `(batch: TokenBatch, **options)` that returns `TokenLosses`
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightningrl.errors import ConfigError, describe_raised
from lightningrl.loading import load_callable
from lightningrl.recipe_keys import check_options
from lightningrl_torch.losses import LOSSES, TokenBatch, TokenLosses

__all__ = ["ChosenLoss"]

_CALL, _CALLS = 6, 8
"""Tokens of a call and calls of the batch that a loss is tried on."""


class ChosenLoss:
    """A loss with its options. Raises ConfigError, one sentence, for a loss that cannot be found or does not return
    what it must."""

    def __init__(self, name: str, options: Mapping[str, Any], *, has_reference: bool = False) -> None:
        self.name = name
        self._options = dict(options)
        self._function = LOSSES.get(name) or load_callable(name)
        first, *_ = inspect.signature(self._function).parameters or ("",)
        check_options(self._function, self._options, what=f"loss {name!r}", reserved=(first,))
        batch = _few_tokens(has_reference=has_reference)
        returned, gradient = self._try(batch)
        silent = self._try(replace(batch, advantages=torch.zeros_like(batch.advantages)))[1]
        if silent.any() and not returned.has_other_terms:
            raise ConfigError(
                f"loss {name!r} has a gradient where the advantage is 0; return TokenLosses(..., "
                "has_other_terms=True), so that rows "
                "without an advantage are not left out"
            )
        self.has_other_terms = returned.has_other_terms
        """True if rows without any advantage have a part in the loss."""
        eighth = self._try(replace(batch, advantages=batch.advantages / 8))[1]
        self.is_proportional = not returned.has_other_terms and torch.allclose(eighth * 8, gradient, rtol=1e-4)
        """True if the loss of c · advantage is c times the loss, for c > 0."""

    def __call__(self, batch: TokenBatch) -> TokenLosses:
        if self.name in LOSSES:
            return self._function(batch, **self._options)
        try:
            returned = self._function(batch, **self._options)
        except Exception as error:  # the boundary to a user's own code
            raise ConfigError(f"loss {self.name!r} raised {describe_raised(error)}; fix it, then run again") from error
        self._check(returned, len(batch.logprobs))
        return returned

    def _check(self, returned: Any, tokens: int) -> None:
        if not isinstance(returned, TokenLosses):
            raise ConfigError(
                f"loss {self.name!r} returned a {type(returned).__name__}; return "
                "lightningrl_torch.losses.TokenLosses(losses=...)"
            )
        for name, values in {"losses": returned.losses, **returned.metrics}.items():
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            if shape != (tokens,):
                raise ConfigError(
                    f"loss {self.name!r} gave {name} of shape {shape} for {tokens} tokens; one number a token, "
                    "nothing summed"
                )
        if not returned.losses.requires_grad and tokens:
            raise ConfigError(f"loss {self.name!r} has no gradient; compute it from batch.logprobs, not detached")

    def _try(self, batch: TokenBatch) -> tuple[TokenLosses, Tensor]:
        """Call the loss; returns its value, and its gradient by token."""
        returned = self(batch)
        (gradient,) = torch.autograd.grad(returned.losses.sum(), batch.logprobs, materialize_grads=True)
        bad = int((~(returned.losses.isfinite() & gradient.isfinite())).sum())
        if bad:
            raise ConfigError(
                f"loss {self.name!r} is not finite for {bad} of {len(gradient)} ordinary tokens; fix it, then run again"
            )
        return returned, gradient


def _few_tokens(*, has_reference: bool) -> TokenBatch:
    """Calls whose policy has moved since they were sampled, except the first's; advantages of both signs."""
    random = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(_CALLS * _CALL, generator=random) - 0.01
    calls = torch.arange(_CALLS).repeat_interleave(_CALL)
    moved = old + 0.5 * torch.randn(len(old), generator=random) * (calls > 0)
    return TokenBatch(
        logprobs=moved.clamp(max=-0.001).requires_grad_(),
        old_logprobs=old,
        rollout_logprobs=old,
        reference_logprobs=old if has_reference else None,
        advantages=torch.randn(len(old), generator=random),
        calls=calls,
    )
