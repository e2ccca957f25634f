"""Builds a recipe's parts: everything that can be refused is refused here, before anything heavy starts.

Recipe + PluginManager  ─►  Parts(tasks, evaluator, scorer, a backend factory for each policy)
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from lightningrl.backends import Backend
from lightningrl.credentials import read_key
from lightningrl.dialects import Dialect, build_dialects
from lightningrl.errors import ConfigError, LightningError, describe_raised
from lightningrl.loading import is_reference, resolve
from lightningrl.plugins import Plugin, PluginManager
from lightningrl.protocols import CreditAssigner, TaskSource
from lightningrl.recipe import Recipe
from lightningrl.recipe_keys import check_options
from lightningrl.recipe_tables import RewardConfig
from lightningrl_client.runtime.task_sources import OF_SOURCE
from lightningrl_credit.combinators import Sum
from lightningrl_credit.comparison import check_comparison
from lightningrl_credit.log_ratios import ReferenceKl
from lightningrl_credit.needs import check_answers, check_needs, installed_needs
from lightningrl_credit.rewards import (
    NamedReward,
    ReportedReward,
    ReportedTurnReward,
    RewardSet,
    RewardWeights,
    TurnReward,
    WeightedReward,
)
from lightningrl_credit.rewards.lineages import discount_of
from lightningrl_credit.scoring import Scorer
from lightningrl_credit.trained_calls import TrainedCalls, trained_calls_of
from lightningrl_runs.origin import template_of
from lightningrl_training import part_checks
from lightningrl_training.evaluator import Evaluator
from lightningrl_training.evidence_services import PolicyQueries
from lightningrl_training.judge import Judge
from lightningrl_training.models import check_lengths, check_rendering, resolve_model
from lightningrl_training.run_sync import in_caller
from lightningrl_training.task_files import task_source
from lightningrl_training.task_sources import build_source, draw_sets, source_reward
from lightningrl_training.tasks import TaskSets

__all__ = [
    "Parts",
    "build_assigner",
    "build_backends",
    "build_credit",
    "build_scorer",
    "build_tasks_and_rewards",
    "trained_calls",
    "with_kl",
]

KNOWN_BACKENDS = ("torch", "verl")
"""Backends a recipe may carry settings for although they are not installed here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Everything built from a recipe before a run starts."""

    tasks: TaskSets
    evaluator: Evaluator
    scorer: Scorer
    backends: Mapping[str, Callable[[], Backend]]
    """Calls that build the trainer backend of each policy; they take seconds (import torch, load weights)."""
    models: Mapping[str, str]
    """Hub name or absolute folder, by policy."""
    dialects: tuple[Dialect, ...]
    without_tools: tuple[str, ...] = ()
    """A sentence for each policy that cannot be offered tools."""

    @classmethod
    @in_caller
    def build(cls, recipe: Recipe, plugins: PluginManager, *, will_run: bool = True) -> Parts:
        """Build the parts. Raises ConfigError for whatever cannot be run: a sentence for each part. With `will_run`
        False the backend is not asked whether this machine can run it."""
        models = dict.fromkeys(recipe.all_policies, "")  # the others are looked at, too, where one is not found
        requires: set[str] = set()
        without_tools: list[str] = []

        def find_model(name: str) -> None:
            models[name] = resolve_model(name, recipe.all_policies[name], recipe.folder)
            check_lengths(recipe, name, models[name])
            why = check_rendering(name, recipe.all_policies[name], models[name], recipe.folder)
            if why is not None:
                without_tools.append(why)

        source = cache(partial(build_source, recipe, plugins))

        def credit() -> tuple[Evaluator, Scorer]:
            evaluator, scorer = build_credit(recipe, plugins, models, source)
            requires.update(scorer.requires)
            return evaluator, scorer

        def tasks() -> TaskSets:
            loaded = load_tasks(recipe, source())
            check_answers(recipe.credit.use, requires, loaded.train)
            return loaded

        *_, (evaluator, scorer), backends, task_sets, dialects = part_checks.gather(
            *(partial(find_model, name) for name in recipe.all_policies),
            *(partial(plugins.find, "lightningrl_adapters", adapter) for adapter in recipe.adapters),
            credit,
            lambda: build_backends(recipe, plugins, models, will_run=will_run),
            tasks,
            lambda: build_dialects(plugins),
        )
        return cls(
            tasks=task_sets,
            evaluator=evaluator,
            scorer=scorer,
            backends=backends,
            models=models,
            dialects=dialects,
            without_tools=tuple(without_tools),
        )


def load_tasks(recipe: Recipe, source: TaskSource | None) -> TaskSets:
    """The tasks of a recipe; `source`: that which it names. Raises ConfigError."""
    if source is not None:
        return draw_sets(recipe, source)
    return TaskSets.load(recipe, lambda reference: task_source(reference, recipe.folder))


@in_caller
def build_tasks_and_rewards(
    recipe: Recipe, plugins: PluginManager
) -> tuple[TaskSource | None, TaskSets, list[NamedReward]]:
    """The task source that a recipe names, its tasks and its terminal rewards. Raises ConfigError or PluginError."""
    source = cache(partial(build_source, recipe, plugins))
    tasks, *rewards = part_checks.gather(
        lambda: load_tasks(recipe, source()),
        *(partial(_reward, name, recipe, plugins, source) for name in recipe.rewards),
    )
    return source(), tasks, rewards


@in_caller
def build_credit(
    recipe: Recipe,
    plugins: PluginManager,
    models: Mapping[str, str] | None = None,
    source: Callable[[], TaskSource | None] | None = None,
) -> tuple[Evaluator, Scorer]:
    """Evaluator and scorer of a recipe; `models` by policy, for its tokenizers; `source` makes its task source, where
    that was made. Raises ConfigError or PluginError."""
    source = source or cache(partial(build_source, recipe, plugins))
    *parts, assigner, judge, _, _ = part_checks.gather(
        *(partial(_reward, name, recipe, plugins, source) for name in recipe.rewards),
        *(partial(_turn_reward, name, recipe, plugins) for name in recipe.intermediate_rewards),
        lambda: _credit(recipe, plugins, models or {}),
        lambda: _judge(recipe),
        lambda: trained_calls(recipe),
        lambda: part_checks.check_samples(recipe),
    )
    rewards, turns = parts[: len(recipe.rewards)], parts[len(recipe.rewards) :]
    discount = discount_of(assigner)
    gamma, joins = discount or (1.0, "sum")
    intermediate = {turn.name: replace(turn, gamma=gamma, joins=joins) for turn in turns}
    part_checks.check_potentials(recipe, [name for name, turn in intermediate.items() if turn.is_potential], assigner)
    part_checks.check_turn_sizes(recipe, turns, assigner)
    evaluator = Evaluator(
        rewards=RewardSet(rewards),
        intermediate=intermediate,
        credit=assigner,
        outcomes=recipe.outcomes,
        plugins=plugins,
        digests=part_checks.digest_parts(recipe, rewards, intermediate, assigner),
        judge=judge,
        policies=PolicyQueries(
            models or {}, template_of=partial(template_of, recipe), max_tokens=recipe.credit.max_tokens
        ),
    )
    return evaluator, build_scorer(
        recipe, assigner, farmed=[name for name, turn in intermediate.items() if not turn.is_potential]
    )


def build_scorer(recipe: Recipe, assigner: CreditAssigner, *, farmed: Sequence[str] = ()) -> Scorer:
    """A scorer by `assigner`, else as in the recipe; `farmed`: turn rewards a policy could farm. Raises ConfigError."""
    return Scorer(
        credit=assigner,
        rewards=RewardWeights(
            [WeightedReward(**_part_in_return(name, reward)) for name, reward in recipe.rewards.items()]
        ),
        compare=recipe.credit.compare,
        per_reward=recipe.credit.per_reward,
        whitened=recipe.credit.whiten,
        dynamic_sampling=recipe.loop.dynamic_sampling > 0,
        samples=recipe.samples,
        trained=trained_calls(recipe),
        farmed=farmed,
    )


def trained_calls(recipe: Recipe) -> dict[str, TrainedCalls]:
    """The trained calls of each policy that is trained. Raises ConfigError where none is."""
    trained = trained_calls_of(recipe)
    if not trained:
        raise ConfigError(
            "every policy has trainable = false, so there is nothing to train; set it to true for one of them"
        )
    return trained


def _part(
    plugins: PluginManager,
    hook: str,
    use: Any,
    options: Mapping[str, Any],
    folder: Path,
    *,
    offered: Mapping[str, Any] | None = None,
) -> Any:
    """An installed plugin's product, a user's class or factory called with `options`, or the object itself. A plugin's
    factory is given what is `offered` where it takes it."""
    if isinstance(use, str) and not is_reference(use):
        plugin = plugins.find(hook, use)
        taken = {
            name: value
            for name, value in (offered or {}).items()
            if name in inspect.signature(plugin.factory).parameters
        }
        check_options(plugin.factory, options, what=f"{use!r}", reserved=tuple(taken))
        if missing := [
            name for name in part_checks.required_settings(plugin.factory) if name not in options and name not in taken
        ]:
            raise ConfigError(*(f"{use!r} needs the setting {name!r}; set it in its options" for name in missing))
        return plugin.build(**options, **taken)
    part = resolve(use, folder) if isinstance(use, str) else use
    if isinstance(part, type):
        check_options(part, options, what=f"{use!r}")
        try:
            return part(**options)
        except LightningError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{use!r} raised {describe_raised(error)} when it was made; mend it, or its options"
            ) from error
    if options:
        check_options(part, options, what=f"{use!r}")
        return partial(part, **options)
    return part


def _reward(name: str, recipe: Recipe, plugins: PluginManager, source: Callable[[], TaskSource | None]) -> NamedReward:
    config = recipe.rewards[name]
    own = {"recipe_folder": recipe.folder, "range": config.range}
    concurrency = config.concurrency
    if config.use == OF_SOURCE:
        tasks_from = source()
        reward: Any = source_reward(name, tasks_from)
        check_options(reward, config.options, what=f"rewards.{name}", reserved=("task", "output", "trajectory"))
        reward = partial(reward, **config.options) if config.options else reward
        concurrency = 1 if tasks_from is not None and "one_at_a_time" in tasks_from.requires else concurrency
    else:
        reward = _part(plugins, "lightningrl_reward_functions", config.use, config.options, recipe.folder, offered=own)
    part_checks.check_reward(name, config.use, reward)
    return NamedReward(
        **_part_in_return(name, config),
        function=reward,
        timeout_s=config.timeout_s,
        retries=config.retries,
        concurrency=concurrency,
        range=config.range or (reward.range if isinstance(reward, ReportedReward) else None),
    )


def _part_in_return(name: str, config: RewardConfig) -> dict[str, Any]:
    return {
        "name": name,
        "weight": config.weight,
        "agents": None if config.agents is None else frozenset(config.agents),
    }


def _turn_reward(name: str, recipe: Recipe, plugins: PluginManager) -> TurnReward:
    config = recipe.intermediate_rewards[name]
    function = _part(plugins, "lightningrl_intermediate_rewards", config.use, config.options, recipe.folder)
    bounds = config.range or (function.range if isinstance(function, ReportedTurnReward) else None)
    return TurnReward(name=name, function=function, weight=config.weight, form=config.form, range=bounds)


def build_assigner(plugins: PluginManager, use: Any, options: Mapping[str, Any], folder: Path) -> CreditAssigner:
    """Build a credit assigner with those that it is made of, each as `{ use = …, options = … }`. Its needs are not
    looked at. Raises ConfigError or PluginError."""

    def build(part: Any) -> CreditAssigner:
        if isinstance(part, str):
            part = {"use": part}
        if not isinstance(part, Mapping) or not {"use"} <= part.keys() <= {"use", "options"}:
            raise ConfigError(
                f"credit assigner {use!r} is made of others, each as {{ use = …, options = … }}; one is {part!r}"
            )
        return build_assigner(plugins, part["use"], part.get("options", {}), folder)

    assigner: CreditAssigner = _part(
        plugins, "lightningrl_credit_assigners", use, options, folder, offered={"build": build, "folder": folder}
    )
    if not isinstance(assigner, CreditAssigner):
        raise ConfigError(f"credit.use {use!r} is no `lightningrl.CreditAssigner`; name a class that inherits from it")
    return assigner


def with_kl(recipe: Recipe, assigner: CreditAssigner) -> CreditAssigner:
    """Add the KL to the starting policy to the reward, where the recipe has it there."""
    policies = {name: recipe.options_of(policy) for name, policy in recipe.all_policies.items() if policy.trainable}
    coefficients = {name: each.get("kl_coef") for name, each in policies.items() if each.get("kl_estimator") == "k1"}
    # what is no number its backend refuses
    weights = {
        name: float(value) for name, value in coefficients.items() if isinstance(value, int | float) and value > 0
    }
    return Sum((assigner, 1.0), (ReferenceKl(weights), 1.0)) if weights else assigner


def _credit(recipe: Recipe, plugins: PluginManager, models: Mapping[str, str]) -> CreditAssigner:
    assigner = build_assigner(plugins, recipe.credit.use, recipe.credit.options, recipe.folder)
    whole = with_kl(recipe, assigner)
    is_paid_by_role = any(reward.agents is not None and reward.weight != 0.0 for reward in recipe.rewards.values())
    requires = whole.requires | ({"agents"} if recipe.credit.compare == "role" or is_paid_by_role else frozenset())
    backend = plugins.trainers.get(recipe.backend)
    capabilities = None if backend is None else backend.capabilities
    part_checks.gather(
        lambda: check_comparison(assigner, recipe.credit.compare),
        lambda: part_checks.check_judge(recipe, assigner),
        lambda: part_checks.check_teacher(recipe, assigner, models),
        lambda: part_checks.check_critic(recipe, assigner, capabilities, is_paid_by_role=is_paid_by_role),
        lambda: check_needs(recipe, recipe.credit.use, requires, capabilities, installed_needs(plugins)),
    )
    return whole


def _judge(recipe: Recipe) -> Judge | None:
    config = recipe.judge
    if config is None:
        return None
    key = None if config.api_key_env is None else read_key(config.api_key_env, os.environ, where="judge")
    return Judge(config, key)


def build_backends(
    recipe: Recipe, plugins: PluginManager, models: Mapping[str, str], *, will_run: bool = True
) -> dict[str, Callable[[], Backend]]:
    """Calls that build the trainer backend of each policy. With `will_run` False a backend is not asked whether this
    machine can run it. Raises ConfigError or PluginError."""
    for name in recipe.backends:
        if name not in plugins.trainers and name not in KNOWN_BACKENDS:
            plugins.find("lightningrl_trainers", name)
    plugin: Plugin = plugins.find("lightningrl_trainers", recipe.backend)
    capabilities = plugin.capabilities
    if recipe.policies and capabilities is not None and not capabilities.several_policies:
        raise ConfigError(
            f"trainer backend {recipe.backend!r} serves one policy in a run and the recipe has "
            f"{len(recipe.all_policies)} ({', '.join(map(repr, recipe.all_policies))}); use backend 'torch', or leave "
            "one"
        )
    backends: dict[str, Callable[[], Backend]] = {}
    for name, policy in recipe.all_policies.items():
        options = recipe.options_of(policy)
        if capabilities is not None:
            part_checks.check_capabilities(recipe.backend, capabilities, options)
        of_loop = {
            "max_staleness": recipe.loop.max_staleness,
            "rollouts_per_step": recipe.loop.tasks_per_step * recipe.loop.group_size,
        }
        taken = of_loop.keys() & inspect.signature(plugin.factory).parameters
        offered: dict[str, Any] = {"policy": models[name], "name": name, **{key: of_loop[key] for key in taken}}
        check_options(plugin.factory, options, what=f"trainer backend {recipe.backend!r}", reserved=tuple(offered))
        backends[name] = partial(plugin.build, **offered, **options)
    if plugin.check is not None and will_run:
        plugin.check(recipe)
    return backends
