"""A recipe's parts, found and built: everything that can be refused is refused here, before anything heavy starts.

Recipe + PluginManager  ─►  Parts(tasks, scorer, backend factory, agent, adapters)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightningrl.config import Recipe, check_options
from lightningrl.errors import ConfigError
from lightningrl.loading import is_reference, load_callable
from lightningrl.plugins import Plugin, PluginManager
from lightningrl.protocols import Backend, CreditAssigner, IntermediateReward
from lightningrl.rewards import NamedReward, RewardSet
from lightningrl.training.scoring import Scorer
from lightningrl.training.tasks import TaskSets

__all__ = ["Parts", "resolve_model"]

KNOWN_BACKENDS = ("torch", "verl")
"""Backends a recipe may carry settings for although they are not installed here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a run is made of."""

    tasks: TaskSets
    scorer: Scorer
    backend: Callable[[], Backend]
    """Builds the trainer backend; takes seconds (imports torch, loads weights)."""
    model: str
    """Hub name or absolute folder of the policy."""

    @classmethod
    def build(cls, recipe: Recipe, plugins: PluginManager, *, will_run: bool = True) -> Parts:
        """Raises ConfigError or PluginError, one sentence, for whatever cannot be run. With `will_run` False the backend is not asked
        whether this machine can run it: weights are only read."""
        model = resolve_model(recipe)
        for adapter in recipe.adapters:
            plugins.find("lightningrl_adapters", adapter)
        if isinstance(recipe.agent, str):
            check_agent_file(recipe)
        intermediate = {
            name: _part(plugins, "lightningrl_intermediate_rewards", part.use, part.options, recipe.folder)
            for name, part in recipe.intermediate_rewards.items()
        }
        scorer = Scorer(
            rewards=RewardSet([_reward(name, recipe, plugins) for name in recipe.rewards]),
            intermediate=intermediate,
            credit=_credit(recipe, plugins, intermediate),
            whitened=recipe.credit.whiten,
            samples=recipe.samples,
            outcomes=recipe.outcomes,
            trained_agents=recipe.policy.trained_agents,
            plugins=plugins,
        )
        if recipe.samples.aggregation == "constant" and recipe.samples.constant_length is None:
            raise ConfigError("samples.aggregation 'constant' needs samples.constant_length, the tokens per rollout to divide by")
        return cls(
            backend=_backend(recipe, plugins, model, will_run=will_run),
            scorer=scorer,
            model=model,
            tasks=TaskSets.load(recipe, lambda reference: resolve(reference, recipe.folder)),
        )


def resolve(reference: Any, folder: Path) -> Callable[..., Any]:
    """A callable from `"file.py:name"` or the object itself."""
    if isinstance(reference, str):
        return load_callable(reference, folder)
    if not callable(reference):
        raise ConfigError(f"{reference!r} is a {type(reference).__name__}, not callable; give a function or 'file.py:name'")
    return reference  # type: ignore[no-any-return]


def resolve_model(recipe: Recipe) -> str:
    """The policy as a hub name, or the absolute path where a folder of that name lies beside the recipe or here."""
    for base in (recipe.folder, Path.cwd()):
        if (base / recipe.policy.model).is_dir():
            return str(_checked_folder((base / recipe.policy.model).resolve(), recipe.policy.renderer))
    if recipe.policy.model.startswith((".", "/")) or recipe.policy.model.count("/") > 1:
        raise ConfigError(
            f"policy.model: no folder {recipe.policy.model!r}; give a transformers folder or a hub name like 'Qwen/Qwen2.5-0.5B'"
        )
    return recipe.policy.model


def _checked_folder(folder: Path, renderer: str) -> Path:
    """A local model folder that can be served: weights' config, a fast tokenizer, and a chat template or a named renderer."""
    for needed in ("config.json", "tokenizer.json"):
        if not (folder / needed).is_file():
            raise ConfigError(f"model folder {str(folder)!r} has no {needed}; save model and tokenizer there with save_pretrained")
    settings = folder / "tokenizer_config.json"
    has_template = (folder / "chat_template.jinja").is_file() or (
        settings.is_file() and "chat_template" in json.loads(settings.read_text(encoding="utf-8"))
    )
    if renderer == "auto" and not has_template:
        raise ConfigError(
            f"model folder {str(folder)!r} has no chat template; add chat_template.jinja, or name a renderer in policy.renderer"
        )
    return folder


def check_agent_file(recipe: Recipe) -> None:
    """Only whether it can be found; workers import it."""
    source, _, name = recipe.agent.rpartition(":")
    if not source or not name:
        raise ConfigError(f"agent {recipe.agent!r} names no callable; write 'agent.py:answer' or 'package.module:answer'")
    if source.endswith(".py") and not (recipe.folder / source).is_file():
        raise ConfigError(f"agent {recipe.agent!r}: no file {str(recipe.folder / source)!r}; paths are relative to the recipe")


def _part(plugins: PluginManager, hook: str, use: Any, options: Mapping[str, Any], folder: Path) -> Any:
    """An installed plugin's product, a user's class or factory called with `options`, or the object itself."""
    if isinstance(use, str) and not is_reference(use):
        plugin = plugins.find(hook, use)
        check_options(plugin.factory, options, what=f"{use!r}")
        return plugin.factory(**options)
    part = resolve(use, folder) if isinstance(use, str) else use
    if isinstance(part, type):
        check_options(part, options, what=f"{use!r}")
        return part(**options)
    if options:
        check_options(part, options, what=f"{use!r}")
        return partial(part, **options)
    return part


def _reward(name: str, recipe: Recipe, plugins: PluginManager) -> NamedReward:
    config = recipe.rewards[name]
    reward = _part(plugins, "lightningrl_reward_functions", config.use, config.options, recipe.folder)
    return NamedReward(name=name, function=reward, weight=config.weight, timeout_s=config.timeout_s)


def _credit(recipe: Recipe, plugins: PluginManager, intermediate: Mapping[str, IntermediateReward]) -> CreditAssigner:
    from lightningrl.credit import PerAgent

    assigner: CreditAssigner = _part(plugins, "lightningrl_credit_assigners", recipe.credit.use, recipe.credit.options, recipe.folder)
    if not hasattr(assigner, "assign"):
        raise ConfigError(f"credit.use {recipe.credit.use!r} has no `assign(group)`; name a class with `requires` and `assign`")
    if recipe.credit.per_agent:
        assigner = PerAgent(assigner)
    provided = {"group"} if recipe.loop.group_size > 1 else set()
    provided |= {"turn_rewards"} if intermediate else set()
    provided |= {"agents"} if recipe.adapters else set()
    remedies = {
        "group": "set loop.group_size above 1",
        "turn_rewards": "add an [intermediate_rewards.NAME] table",
        "agents": "name an adapter in `adapters`",
    }
    for need in sorted(assigner.requires - provided):
        raise ConfigError(f"credit assigner {recipe.credit.use!r} needs {need!r}; {remedies.get(need, 'this run cannot provide it')}")
    return assigner


def _backend(recipe: Recipe, plugins: PluginManager, model: str, *, will_run: bool) -> Callable[[], Backend]:
    for name in recipe.backends:
        if name not in plugins.trainers and name not in KNOWN_BACKENDS:
            plugins.find("lightningrl_trainers", name)
    plugin: Plugin = plugins.find("lightningrl_trainers", recipe.backend)
    options = {"seed": recipe.loop.seed, **recipe.backend_options}
    check_options(plugin.factory, options, what=f"trainer backend {recipe.backend!r}", reserved=("policy", "name"))
    if plugin.check is not None and will_run:
        plugin.check(recipe)
    return partial(plugin.factory, policy=model, name=recipe.policy.name, **options)
