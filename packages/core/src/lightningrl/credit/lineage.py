"""Which calls came of which: a discount, a history and a state go along these and never across."""

from __future__ import annotations

from collections.abc import Sequence

from lightningrl.types import Transition

__all__ = ["following"]


def following(transitions: Sequence[Transition]) -> list[list[int]]:
    """For each call the calls that came of it, itself first: all later ones but those that grew beside it from one root.

    A root is a history's first call. The choices of one call, which share prompt and start, have a root that is none of them:

        main ─► left                  following(main) = main left right        following(left) = left
             └► right                 following(right) = right
    """
    count = len(transitions)
    position = {transition.id: t for t, transition in enumerate(transitions)}
    roots: dict[object, int] = {}
    origins: list[int] = []
    """Of each call its parent, or its root, numbered from -1 downwards."""
    for t, call in enumerate(transitions):
        parent = position.get(call.parent_id or "", t)
        if parent < t:
            origins.append(parent)
            continue
        request = (call.agent, call.policy, call.started_at, call.prompt_ids.tobytes())
        origins.append(roots.setdefault(request, -1 - len(roots)))
    if len(set(origins)) == count:  # nothing branches
        return [list(range(t, count)) for t in range(count)]
    lineages: list[tuple[int, ...]] = []
    """Of each call its root, then its ancestors, itself last."""
    for t, origin in enumerate(origins):
        lineages.append((*(lineages[origin] if origin >= 0 else (origin,)), t))
    return [[k for k in range(t, count) if lineages[k][0] != lineages[t][0] or t in lineages[k]] for t in range(count)]
