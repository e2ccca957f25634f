"""Too little memory is said before weights are read: what is needed and for what, what is there, what to change.

recipe ─► each policy's MemoryPlan ─► needed       against the least of what the machine and its containers have left
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from lightningrl.errors import ConfigError
from lightningrl.plugins import PluginManager
from lightningrl.recipe import Recipe

__all__ = [
    "FreeMemory",
    "MemoryPlan",
    "check_memory",
    "check_tuning_memory",
    "free_memory",
    "gigabytes",
    "plan_policies",
    "shared_bytes",
]

logger = logging.getLogger(__name__)

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")
LEAST_TOKENS: Final = 256
"""Tokens that surely stand in a microbatch: about one call's."""
LESS_TOKENS: Final = 512
"""A microbatch that is small, and still quick."""


class MemoryPlan(Protocol):
    """Bytes that a policy of a trainer backend takes, by what for."""

    @property
    def weights(self) -> int: ...
    @property
    def gradient(self) -> int: ...
    @property
    def optimizer(self) -> int: ...
    @property
    def copies(self) -> int:
        """Weights that stand twice."""
        ...

    @property
    def states(self) -> int:
        """The four above."""
        ...

    @property
    def microbatch(self) -> int:
        """Most tokens of a forward and backward."""
        ...

    @property
    def packed(self) -> int:
        """Weights that stand a second time while several calls are decoded."""
        ...

    @property
    def base(self) -> str | None:
        """Equal for policies whose adapters stand on the same frozen weights."""
        ...

    @property
    def shared(self) -> int:
        """Bytes of weights that are there once for all policies of one base."""
        ...

    @property
    def on_gpu(self) -> bool: ...

    def activations(self, tokens: float = ...) -> int:
        """Bytes that a step of so many different tokens keeps at a time."""
        ...

    def logits(self, tokens: float = ...) -> int:
        """Bytes of the words' numbers for so many trained tokens."""
        ...

    def caches(self, calls: int, longest: int, prompts: int) -> int:
        """Bytes of keys and values of `calls` at once, and of `prompts` tokens that are remembered."""
        ...


@runtime_checkable
class MemoryPlanner(Protocol):
    """Factory of a trainer backend that plans a policy's memory from the settings that it is built with."""

    def plan_memory(self, **settings: Any) -> MemoryPlan | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeMemory:
    """Memory that is left to new work here."""

    free: int
    """Bytes."""
    total: int
    where: str
    """Name of the limit: `MemAvailable`, or a container's."""


def free_memory() -> FreeMemory | None:
    """The least of what the machine has available and of what each control group of this process leaves; None where the
    system does not say."""
    try:
        lines = (PROC / "meminfo").read_text(encoding="ascii").splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        total, available = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, ValueError, KeyError, IndexError):
        return None
    sizes_left = [FreeMemory(free=available, total=total, where=f"MemAvailable of {gigabytes(total)}"), *_limits(total)]
    return min(sizes_left, key=lambda left: left.free)


def _limits(total: int) -> Iterator[FreeMemory]:
    """Yield what control groups leave: of version 2 this process's and all above it, of version 1 its own."""
    for folder in dict.fromkeys(_groups()):
        for limit, used, idle in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            try:
                most = int((folder / limit).read_text(encoding="ascii"))
                inside = int((folder / used).read_text(encoding="ascii"))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            except (OSError, ValueError):  # no such version, or no limit: `max`
                continue
            if most < total:
                inside -= int(stat.get(idle, 0))  # files that the kernel drops when room is needed
                yield FreeMemory(free=max(0, most - inside), total=most, where=f"the container's {gigabytes(most)}")


def _groups() -> Iterator[Path]:
    try:
        lines = (PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = CGROUPS / "memory" if "memory" in controllers.split(",") else CGROUPS
        if not controllers or root != CGROUPS:
            place = root / path.lstrip("/")
            yield from (folder for folder in (place, *place.parents) if folder.is_relative_to(root))
    yield from (CGROUPS, CGROUPS / "memory")


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


def gigabytes(size: float) -> str:
    """A size as people say it."""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
