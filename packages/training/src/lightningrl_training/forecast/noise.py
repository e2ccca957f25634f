"""Signal to noise of a step's policy gradient, from the rollouts alone.

The gradient of a group is Σ A ∇log π over its tokens. ∇log π of a token is, in the weights of the last layer, the
token's row times the state that it was sampled in. Here two features stand for that state, its place in the call and
the token before it, so that two groups' gradients agree where the same tokens are wanted in the same places:

    v_g[place, token]  = Σ A     v_g[token before, token] = Σ A     over the group's trained tokens
    |G|²  = (|Σ v|² - Σ |v|²) / (n (n - 1))        unbiased, for n groups
    tr(Σ) = Σ |v|² / n - |G|²                      noise of one group's gradient
    snr   = n · |G|² / tr(Σ)                       = n / B_simple

with B_simple in groups: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv 1812.06162),
appendix A.1, with batches of 1 and n. Real gradients of each group would cost a backward pass each, and not every
backend has them to give. What the surrogate leaves out, that states of different tasks resemble each other more or
less, it takes for alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lightningrl.types import Advantages, TrajectoryGroup

__all__ = ["group_gradient", "signal_to_noise"]

Gradient = dict[tuple[str, int, int], float]
LONGEST = 10_000.0
"""Most that a signal to noise is."""


def signal_to_noise(groups: Sequence[tuple[TrajectoryGroup, Advantages]]) -> float | None:
    """Signal to noise of the gradient of a step of these groups; 0 where the groups' gradients agree in nothing, None
    where fewer than two have any."""
    gradients = [group_gradient(group, advantages) for group, advantages in groups]
    if sum(bool(gradient) for gradient in gradients) < 2:
        return None
    total: Gradient = defaultdict(float)
    for gradient in gradients:
        for key, value in gradient.items():
            total[key] += value
    n = len(gradients)
    each = sum(value * value for gradient in gradients for value in gradient.values())
    square = (sum(value * value for value in total.values()) - each) / (n * (n - 1))
    noise = each / n - square
    if square <= 0.0:
        return 0.0
    return LONGEST if noise <= 0.0 else min(LONGEST, n * square / noise)


def group_gradient(group: TrajectoryGroup, advantages: Advantages) -> Gradient:
    """Sum of a group's advantages by feature and token; features without any are left out."""
    gradient: Gradient = defaultdict(float)
    for rollout, credit in zip(group.members, advantages, strict=False):
        for number, (call, of_call) in enumerate(zip(rollout.transitions, credit, strict=True)):
            if of_call is None or not call.trainable:
                continue
            before = -1 - number
            for place, (token, advantage) in enumerate(
                zip(call.completion_ids.tolist(), of_call.tolist(), strict=True)
            ):
                gradient["place", 10_000 * number + place, token] += advantage
                gradient["before", before, token] += advantage
                before = token
    return {key: value for key, value in gradient.items() if abs(value) > 1e-12}
