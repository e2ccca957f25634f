"""Digests of a recipe's parts: a value that was kept is taken again only where the part that computed it is the
same."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightningrl.loading import resolve
from lightningrl.protocols import CreditAssigner
from lightningrl.recipe import Recipe
from lightningrl_credit.combinators import Combination
from lightningrl_credit.rewards import NamedReward, TurnReward

__all__ = ["digest_parts"]


def digest_parts(
    recipe: Recipe, rewards: Sequence[NamedReward], intermediate: Mapping[str, TurnReward], assigner: CreditAssigner
) -> dict[str, str]:
    """Digests of rewards, intermediate rewards and credit, by the recipe's key."""
    digests = {
        f"rewards.{reward.name}": _digest(reward.function, recipe.rewards[reward.name].options) for reward in rewards
    }
    for name, part in recipe.intermediate_rewards.items():
        settings = part.model_dump(exclude_unset=True, exclude={"use", "options"})
        if intermediate[name].is_potential:
            settings |= {"gamma": intermediate[name].gamma, "joins": intermediate[name].joins}
        digests[f"intermediate_rewards.{name}"] = _digest(intermediate[name].function, {**part.options, **settings})
    judge = None if recipe.judge is None else f"{recipe.judge.model} at {recipe.judge.base_url}"
    nested = (
        {"nested": [_digest(part, {}) for part in _list_nested(assigner)]} if isinstance(assigner, Combination) else {}
    )
    files = [_digest(resolve(reference, recipe.folder), {}) for reference in _list_files(recipe.credit.options)]
    digests["credit"] = _digest(
        assigner, {**recipe.credit.options, "judge": judge, **nested, **({"files": files} if files else {})}
    )
    return digests


def _digest(part: Any, options: Mapping[str, Any]) -> str:
    """Digest of a part that was built from `options`: it changes with them, and with the file that defines the part,
    not with what that file imports."""
    while isinstance(part, partial):
        part = part.func
    target = part if inspect.isroutine(part) or inspect.isclass(part) else type(part)
    settings = json.dumps(options, sort_keys=True, default=lambda value: type(value).__qualname__)
    text = f"{target.__module__}:{target.__qualname__} {settings} {_source(target)}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _source(target: Any) -> str:
    """The text of its file, or its own where there is none (a notebook's cell); empty where there is neither."""
    with contextlib.suppress(OSError, TypeError):
        return Path(inspect.getsourcefile(target) or "").read_text(encoding="utf-8")
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(target)
    return ""


def _list_files(options: Any) -> Iterator[str]:
    """The references into files, `"file.py:name"`, among options and those within them."""
    if isinstance(options, str) and re.fullmatch(r"[^\s:]*\.py:[\w.]+", options):
        yield options
    elif isinstance(options, Mapping):
        for value in options.values():
            yield from _list_files(value)
    elif isinstance(options, list | tuple):
        for value in options:
            yield from _list_files(value)


def _list_nested(assigner: CreditAssigner) -> Iterator[CreditAssigner]:
    for part in assigner.parts if isinstance(assigner, Combination) else ():
        yield part
        yield from _list_nested(part)
