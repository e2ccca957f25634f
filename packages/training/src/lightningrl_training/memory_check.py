"""Too little memory is said before weights are read: what is needed and for what, what is there, what to change.

recipe ─► each policy's MemoryPlan ─► needed       against the least of what the machine and its containers have left
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol, runtime_checkable

from lightningrl.backends import MemoryPlan
from lightningrl.errors import ConfigError
from lightningrl.machine import free_memory, gigabytes
from lightningrl.plugins import PluginManager
from lightningrl.recipe import Recipe

__all__ = ["check_memory", "check_tuning_memory", "plan_policies", "shared_bytes"]

logger = logging.getLogger(__name__)

LEAST_TOKENS: Final = 256
"""Tokens that surely stand in a microbatch: about one call's."""
LESS_TOKENS: Final = 512
"""A microbatch that is small, and still quick."""


@runtime_checkable
class MemoryPlanner(Protocol):
    """Factory of a trainer backend that plans a policy's memory from the settings that it is built with."""

    def plan_memory(self, **settings: Any) -> MemoryPlan | None: ...


def plan_policies(recipe: Recipe, models: Mapping[str, str], plugins: PluginManager) -> dict[str, MemoryPlan]:
    """Plans of the trained policies whose backend makes them, by name. `models`: place of each policy's weights."""
    factory = plugins.find("lightningrl_trainers", recipe.backend).factory
    if not isinstance(factory, MemoryPlanner):
        return {}
    plans = {
        name: factory.plan_memory(
            **{**recipe.options_of(policy), "policy": models[name], "max_staleness": recipe.loop.max_staleness}
        )
        for name, policy in recipe.all_policies.items()
        if policy.trainable
    }
    return {name: plan for name, plan in plans.items() if plan is not None}


def check_memory(recipe: Recipe, models: Mapping[str, str], plugins: PluginManager) -> None:
    """Raise ConfigError where this machine has less memory than the policies surely need to learn; warn where they may
    need more than there is. A GPU's memory is its backend's."""
    fewer = (
        f"fewer or shorter calls at once (loop.group_size = {recipe.loop.group_size}, sampling.max_tokens = "
        f"{recipe.sampling.max_tokens})"
    )
    plans, beside = plan_policies(recipe, models, plugins), ", beside keys and values of running calls,"
    _check(plans, least=LEAST_TOKENS, most=math.inf, beside=beside, fewer=fewer)


def check_tuning_memory(name: str, factory: object, settings: Mapping[str, Any], *, longest: int, batch: int) -> None:
    """The same of policy `name`, which a backend's `factory` builds with `settings` to learn from rows: the longest of
    `longest` tokens, an update of at most `batch`."""
    plan = factory.plan_memory(**settings) if isinstance(factory, MemoryPlanner) else None
    fewer = f"shorter rows (--set tune.max_tokens=…; the longest has {longest})"
    _check({} if plan is None else {name: plan}, least=longest, most=batch, beside="", fewer=fewer)


def _check(plans: Mapping[str, MemoryPlan], *, least: float, most: float, beside: str, fewer: str) -> None:
    """Check plans of policies that surely compute `least` tokens at once and may compute `most`."""
    plans = {name: plan for name, plan in plans.items() if not plan.on_gpu}
    there = free_memory()
    if not plans or there is None:
        return
    for tokens, verb in ((least, "needs at least"), (most, "may need")):
        # policies learn one after the other, and keep their states
        needed = (
            sum(plan.states for plan in plans.values())
            - shared_bytes(plans)
            + max(plan.activations(tokens) + plan.logits(tokens) for plan in plans.values())
        )
        if needed <= there.free:
            continue
        names, (split, count) = " and ".join(map(repr, plans)), _split(plans, tokens)
        remedies = "; ".join([*_remedies(plans, count), f"{fewer}, a smaller model, or more memory"])
        sentence = (
            f"policy {names} {verb} {gigabytes(needed)} of memory to learn ({split}){beside} and "
            f"{gigabytes(there.free)} are free ({there.where}); {remedies}"
        )
        if tokens == least:
            raise ConfigError(sentence)
        logger.warning("%s", sentence)


def shared_bytes(plans: Mapping[str, MemoryPlan]) -> int:
    """Bytes that sums over plans count more than once: frozen weights under adapters of several policies."""
    bases = [(plan.base, plan.shared) for plan in plans.values() if plan.base is not None]
    return sum(shared for _, shared in bases) - sum(dict(bases).values())


def _split(plans: Mapping[str, MemoryPlan], tokens: float) -> tuple[str, int]:
    """Tell, in words, what the memory is for, and how many tokens are computed at once."""
    largest = max(plans.values(), key=lambda plan: plan.activations(tokens))
    count = int(min(tokens, largest.microbatch))
    parts = {
        "weights": sum(plan.weights for plan in plans.values()) - shared_bytes(plans),
        "their gradient": sum(plan.gradient for plan in plans.values()),
        "Adam's moments": sum(plan.optimizer for plan in plans.values()),
        "copies of weights": sum(plan.copies for plan in plans.values()),
        f"activations of {count} tokens": largest.activations(tokens),
        "logits": largest.logits(tokens),
    }
    return ", ".join(f"{gigabytes(size)} {what}" for what, size in parts.items() if size), count


def _remedies(plans: Mapping[str, MemoryPlan], tokens: int) -> Iterator[str]:
    state = sum(plan.gradient + plan.optimizer for plan in plans.values())
    weights = sum(plan.weights for plan in plans.values()) - shared_bytes(plans)
    if state > weights:
        yield f"train adapters (--set learner.lora=true: {gigabytes(state)} less)"
    if tokens > LESS_TOKENS:
        less = max(plan.activations(tokens) - plan.activations(LESS_TOKENS) for plan in plans.values())
        yield f"compute less at once (--set learner.max_tokens_per_microbatch={LESS_TOKENS}: {gigabytes(less)} less)"
