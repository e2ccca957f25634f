"""A terminal reward for length: answers that come near the limit of their tokens are charged, in proportion.

R(y) = 0                           |y| ≤ L - C
((L - C) - |y|) / C         L - C < |y| ≤ L        (soft overlong punishment, DAPO, arXiv 2503.14476, eq. 13)
-1                          L < |y|, and so at L itself, where the engine cuts off
"""

from __future__ import annotations

from typing import Any

from lightningrl.errors import ConfigError
from lightningrl.types import Task, Trajectory

__all__ = ["Overlong"]


class Overlong:
    """Gives 0.0 down to -1.0 by the longest call of a rollout, as the limit is one of calls."""

    def __init__(self, *, tokens: int, margin: int) -> None:
        """Take `sampling.max_tokens` for `tokens`, L; `margin` is C, its last part, in which the charge grows. DAPO
        has 20480 and 4096."""
        if not 0 < margin <= tokens:
            raise ConfigError(
                f"reward 'overlong': margin {margin!r} is not from 1 to tokens, which is {tokens!r}; take a fifth of it"
            )
        self.tokens = tokens
        self.margin = margin

    def __call__(self, task: Task, output: Any, trajectory: Trajectory, /) -> float:
        longest = max((len(call.completion_ids) for call in trajectory.transitions if call.trainable), default=0)
        return min(0.0, max(-1.0, (self.tokens - self.margin - longest) / self.margin))
