"""Numbers that a step begins with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

__all__ = ["Before", "ByToken", "Reference"]

Reference = Callable[[], contextlib.AbstractContextManager[PreTrainedModel]]
"""Gives the model that the KL is measured to, for the time of a `with` block."""

ByToken = Mapping[int, NDArray[np.float32]]
"""A number for each trained token of a sample, by `id(sample)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Before:
    """Numbers from before the step."""

    logprobs: ByToken | None = None
    """Logprobs of the policy; None: ratios are to the rollout's."""
    weigh: Callable[[Tensor, Tensor], Tensor] | None = None
    """Importance weights of log π_before - log π_rollout and the tokens' calls; None without `logprobs`."""
    values: ByToken | None = None
    """Values of the critic; None: its values are not clipped."""
