"""Lineages of an attempt's calls, and potentials along them: no discount or potential crosses branches of a history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from lightningrl.protocols import CreditAssigner
from lightningrl.types import Transition

__all__ = ["Joins", "discount_of", "following", "lambda_of", "shape", "successors"]


def following(transitions: Sequence[Transition]) -> list[list[int]]:
    """For each call the calls that came of it, itself first: all later ones but those grown beside it from its root.

    A root is a history's first call. A call's choices, which share prompt and start, have a root that is none of them:

        main ─► left                  following(main) = main left right        following(left) = left
             └► right                 following(right) = right
    """
    count = len(transitions)
    position = {transition.id: t for t, transition in enumerate(transitions)}
    roots: dict[object, int] = {}
    origins: list[int] = []
    """Each call's parent, or its root, numbered from -1 downwards."""
    for t, call in enumerate(transitions):
        parent = position.get(call.parent_id or "", t)
        request = (call.agent, call.policy, call.started_at, call.prompt_ids.tobytes())
        origins.append(parent if parent < t else roots.setdefault(request, -1 - len(roots)))
    if len(set(origins)) == count:  # nothing branches
        return [list(range(t, count)) for t in range(count)]
    lineages: list[tuple[int, ...]] = []
    """Each call's root, then its ancestors, itself last."""
    for t, origin in enumerate(origins):
        lineages.append((*(lineages[origin] if origin >= 0 else (origin,)), t))
    return [[k for k in range(t, count) if lineages[k][0] != lineages[t][0] or t in lineages[k]] for t in range(count)]


def successors(transitions: Sequence[Transition]) -> list[list[int]]:
    """For each call those that come next: one, or the first of each branch that grew from it; none after the last.

    main ─► left ─► more        successors(main) = left right        successors(right) = none: it never pays for `more`
         └► right
    """
    came_of = following(transitions)
    nexts: list[list[int]] = []
    for later in came_of:
        beyond: set[int] = set()
        direct: list[int] = []
        for k in later[1:]:
            if k not in beyond:
                direct.append(k)
                beyond.update(came_of[k])
        nexts.append(direct)
    return nexts


Joins = Literal["sum", "mean", "first"]
"""Way that credit joins the returns of several branches of one call."""

_GRID = 2.0**40
"""Potentials are multiples of 1/_GRID, so that sums of them are exact and with γ = 1 cancel to exactly nothing."""


def discount_of(assigner: CreditAssigner) -> tuple[float, Joins] | None:
    """Discount by which an assigner adds up the pay of calls: its `gamma`, per call, and `joins`, "sum" by default.
    None = it has no gamma."""
    gamma = getattr(assigner, "gamma", None)
    return (gamma, getattr(assigner, "joins", "sum")) if isinstance(gamma, int | float) else None


def lambda_of(assigner: CreditAssigner) -> float:
    """Share λ of what calls earn, against the value of the state ahead, in an assigner's returns: its `lam`. 1.0, or
    none = what they earn to the end alone, of which a potential leaves -Φ(s_t): nothing that call t can change."""
    lam = getattr(assigner, "lam", None)
    return float(lam) if isinstance(lam, int | float) else 1.0


def shape(
    transitions: Sequence[Transition], values: Sequence[float | None], *, gamma: float, joins: Joins = "sum"
) -> list[float]:
    """Shaping reward of each call. `values`: the plain reward's; None = no opinion, the potential stays."""
    later_calls = following(transitions)
    potentials = np.zeros(len(transitions))
    for t, value in enumerate(values):
        if value is not None:
            potentials[later_calls[t][1:]] = round(value * _GRID) / _GRID
    shaping = -potentials
    if joins == "sum":
        for t in reversed(range(len(transitions))):
            later = later_calls[t][1:]
            shaping[t] -= gamma ** np.arange(1, len(later) + 1) @ shaping[later]
    else:
        for t, joined in enumerate(successors(transitions)):
            if joined:
                shaping[t] += gamma * potentials[joined if joins == "mean" else joined[:1]].mean()
    return [float(value) + 0.0 for value in shaping]
