"""A recipe's parts, found and built: everything that can be refused is refused here, before anything heavy starts.

Recipe + PluginManager  ─►  Parts(tasks, evaluator, scorer, a backend factory for each policy)
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightningrl.advantages.needs import check_answers, check_needs, installed_needs
from lightningrl.credentials import read_key
from lightningrl.dialects import Dialect, build_dialects
from lightningrl.errors import ConfigError, LightningError, describe_raised, gather
from lightningrl.loading import digest_of, is_reference, resolve
from lightningrl.plugins import Plugin, PluginManager
from lightningrl.protocols import Backend, Capabilities, CreditAssigner, CriticTeacher, GroupWitness, Witness
from lightningrl.recipe import Recipe
from lightningrl.recipe_file import check_options
from lightningrl.recipe_tables import RewardConfig
from lightningrl.trained_calls import TrainedCalls, trained_calls_of
from lightningrl_credit.combinators import Combination
from lightningrl_credit.comparison import check_comparison
from lightningrl_credit.judge import Judge
from lightningrl_credit.rewards import NamedReward, Reported, ReportedOfCalls, RewardSet, RewardWeights, TurnReward, WeightedReward
from lightningrl_credit.rewards.potential import Joins, discount_of
from lightningrl_credit.scoring import Scorer
from lightningrl_training.evaluator import Evaluator
from lightningrl_training.models import check_lengths, check_rendering, resolve_model
from lightningrl_training.run_sync import call_in_caller
from lightningrl_training.services import PolicyQueries
from lightningrl_training.task_files import task_source
from lightningrl_training.tasks import TaskSets

__all__ = ["Parts", "build_assigner", "build_backends", "build_credit", "build_scorer", "trained_calls"]

KNOWN_BACKENDS = ("torch", "verl")
"""Backends a recipe may carry settings for although they are not installed here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a run is made of."""

    tasks: TaskSets
    evaluator: Evaluator
    scorer: Scorer
    backends: Mapping[str, Callable[[], Backend]]
    """By policy: builds its trainer backend; takes seconds (imports torch, loads weights)."""
    models: Mapping[str, str]
    """By policy: hub name or absolute folder."""
    dialects: tuple[Dialect, ...]
    without_tools: tuple[str, ...] = ()
    """A sentence for each policy that cannot be offered tools."""

    @classmethod
    def build(cls, recipe: Recipe, plugins: PluginManager, *, will_run: bool = True) -> Parts:
        """Raises ConfigError for whatever cannot be run: a sentence for each part. With `will_run` False the backend is not asked whether
        this machine can run it."""
        return call_in_caller(partial(cls._build, recipe, plugins, will_run=will_run))

    @classmethod
    def _build(cls, recipe: Recipe, plugins: PluginManager, *, will_run: bool) -> Parts:
        models = dict.fromkeys(recipe.all_policies, "")  # the others are looked at, too, where one is not found
        requires: set[str] = set()
        without_tools: list[str] = []

        def find_model(name: str) -> None:
            models[name] = resolve_model(name, recipe.all_policies[name], recipe.folder)
            check_lengths(recipe, {name: models[name]})
            if (why := check_rendering(name, recipe.all_policies[name], models[name])) is not None:
                without_tools.append(why)

        def credit() -> tuple[Evaluator, Scorer]:
            evaluator, scorer = build_credit(recipe, plugins, models)
            requires.update(scorer.requires)
            return evaluator, scorer

        def tasks() -> TaskSets:
            loaded = TaskSets.load(recipe, lambda reference: task_source(reference, recipe.folder))
            check_answers(recipe.credit.use, requires, loaded.train)
            return loaded

        *_, (evaluator, scorer), backends, found, dialects = gather(
            *(partial(find_model, name) for name in recipe.all_policies),
            *(partial(plugins.find, "lightningrl_adapters", adapter) for adapter in recipe.adapters),
            credit,
            lambda: build_backends(recipe, plugins, models, will_run=will_run),
            tasks,
            lambda: build_dialects(plugins),
        )
        return cls(
            tasks=found,
            evaluator=evaluator,
            scorer=scorer,
            backends=backends,
            models=models,
            dialects=dialects,
            without_tools=tuple(without_tools),
        )


def build_credit(recipe: Recipe, plugins: PluginManager, models: Mapping[str, str] | None = None) -> tuple[Evaluator, Scorer]:
    """What rewards rollouts and what credits their calls, as the recipe has them; `models` by policy, for its tokenizers. Raises
    ConfigError or PluginError."""
    return call_in_caller(partial(_build_credit, recipe, plugins, models or {}))


def _build_credit(recipe: Recipe, plugins: PluginManager, models: Mapping[str, str]) -> tuple[Evaluator, Scorer]:
    *parts, assigner, judge, _, _ = gather(
        *(partial(_reward, name, recipe, plugins) for name in recipe.rewards),
        *(partial(_turn_reward, name, recipe, plugins) for name in recipe.intermediate_rewards),
        lambda: _credit(recipe, plugins),
        lambda: _judge(recipe),
        lambda: trained_calls(recipe),
        lambda: _check_samples(recipe),
    )
    rewards, turns = parts[: len(recipe.rewards)], parts[len(recipe.rewards) :]
    discount = discount_of(assigner)
    gamma, joins = discount or (1.0, "sum")
    intermediate = {turn.name: replace(turn, gamma=gamma, joins=joins) for turn in turns}
    _check_potentials(recipe, [name for name, turn in intermediate.items() if turn.is_potential], discount)
    evaluator = Evaluator(
        rewards=RewardSet(rewards),
        intermediate=intermediate,
        credit=assigner,
        outcomes=recipe.outcomes,
        plugins=plugins,
        digests=_digests(recipe, rewards, intermediate, assigner),
        judge=judge,
        policies=PolicyQueries(models, max_tokens=recipe.credit.max_tokens),
    )
    return evaluator, build_scorer(recipe, assigner, farmed=[name for name, turn in intermediate.items() if not turn.is_potential])


def build_scorer(recipe: Recipe, assigner: CreditAssigner, *, farmed: Sequence[str] = ()) -> Scorer:
    """Credit by `assigner`, all else as the recipe has it; `farmed`: turn rewards that a policy could farm. Raises ConfigError."""
    return Scorer(
        credit=assigner,
        rewards=RewardWeights([WeightedReward(**_part_in_return(name, reward)) for name, reward in recipe.rewards.items()]),
        compare=recipe.credit.compare,
        per_reward=recipe.credit.per_reward,
        whitened=recipe.credit.whiten,
        dynamic_sampling=recipe.loop.dynamic_sampling > 0,
        samples=recipe.samples,
        trained=trained_calls(recipe),
        farmed=farmed,
    )


def _digests(
    recipe: Recipe, rewards: Sequence[NamedReward], intermediate: Mapping[str, TurnReward], assigner: CreditAssigner
) -> dict[str, str]:
    """Of what computes values, by the recipe's key: what was kept of another is not taken."""
    digests = {f"rewards.{reward.name}": digest_of(reward.function, recipe.rewards[reward.name].options) for reward in rewards}
    for name, part in recipe.intermediate_rewards.items():
        settings = part.model_dump(exclude_unset=True, exclude={"use", "options"})
        if intermediate[name].is_potential:
            settings |= {"gamma": intermediate[name].gamma, "joins": intermediate[name].joins}
        digests[f"intermediate_rewards.{name}"] = digest_of(intermediate[name].function, {**part.options, **settings})
    judge = None if recipe.judge is None else f"{recipe.judge.model} at {recipe.judge.base_url}"
    nested = {"nested": [digest_of(part, {}) for part in _nested(assigner)]} if isinstance(assigner, Combination) else {}
    files = [digest_of(resolve(reference, recipe.folder), {}) for reference in _files(recipe.credit.options)]
    digests["credit"] = digest_of(assigner, {**recipe.credit.options, "judge": judge, **nested, **({"files": files} if files else {})})
    return digests


def trained_calls(recipe: Recipe) -> dict[str, TrainedCalls]:
    """By policy that is trained. Raises ConfigError where none is."""
    trained = trained_calls_of(recipe)
    if not trained:
        raise ConfigError("every policy has trainable = false, so there is nothing to train; set it to true for one of them")
    return trained


def _part(
    plugins: PluginManager, hook: str, use: Any, options: Mapping[str, Any], folder: Path, *, offered: Mapping[str, Any] | None = None
) -> Any:
    """An installed plugin's product, a user's class or factory called with `options`, or the object itself. A plugin's factory has what is
    `offered` where it takes it."""
    if isinstance(use, str) and not is_reference(use):
        plugin = plugins.find(hook, use)
        taken = {name: value for name, value in (offered or {}).items() if name in inspect.signature(plugin.factory).parameters}
        check_options(plugin.factory, options, what=f"{use!r}", reserved=tuple(taken))
        if missing := [name for name in required_settings(plugin.factory) if name not in options and name not in taken]:
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
            raise ConfigError(f"{use!r} raised {describe_raised(error)} when it was made; mend it, or its options") from error
    if options:
        check_options(part, options, what=f"{use!r}")
        return partial(part, **options)
    return part


def _files(options: Any) -> Iterator[str]:
    """The references into files, `"file.py:name"`, among options and those within them."""
    if isinstance(options, str) and re.fullmatch(r"[^\s:]*\.py:[\w.]+", options):
        yield options
    elif isinstance(options, Mapping):
        for value in options.values():
            yield from _files(value)
    elif isinstance(options, list | tuple):
        for value in options:
            yield from _files(value)


def _reward(name: str, recipe: Recipe, plugins: PluginManager) -> NamedReward:
    config = recipe.rewards[name]
    own = {"recipe_folder": recipe.folder, "range": config.range}
    reward = _part(plugins, "lightningrl_reward_functions", config.use, config.options, recipe.folder, offered=own)
    _check_reward(name, config.use, reward)
    return NamedReward(
        **_part_in_return(name, config),
        function=reward,
        timeout_s=config.timeout_s,
        retries=config.retries,
        concurrency=config.concurrency,
        range=config.range or (reward.range if isinstance(reward, Reported) else None),
    )


def _part_in_return(name: str, config: RewardConfig) -> dict[str, Any]:
    return {"name": name, "weight": config.weight, "agents": None if config.agents is None else frozenset(config.agents)}


def _turn_reward(name: str, recipe: Recipe, plugins: PluginManager) -> TurnReward:
    config = recipe.intermediate_rewards[name]
    function = _part(plugins, "lightningrl_intermediate_rewards", config.use, config.options, recipe.folder)
    bounds = config.range or (function.range if isinstance(function, ReportedOfCalls) else None)
    return TurnReward(name=name, function=function, weight=config.weight, form=config.form, range=bounds)


def _check_reward(name: str, use: Any, reward: Any) -> None:
    try:
        signature = inspect.signature(reward)
        signature.bind("task", "output", "trajectory")
    except ValueError:  # a builtin says nothing of what it takes
        return
    except TypeError:
        if not callable(reward):
            return  # said by NamedReward
        raise ConfigError(
            f"reward {name!r} ({use!r}) takes ({', '.join(signature.parameters)}); a reward is called with (task, output, trajectory)"
        ) from None


def required_settings(factory: Callable[..., Any]) -> list[str]:
    """Names of the keyword parameters that have no default."""
    parameters = inspect.signature(factory).parameters.values()
    return [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY and one.default is inspect.Parameter.empty]


def build_assigner(plugins: PluginManager, use: Any, options: Mapping[str, Any], folder: Path) -> CreditAssigner:
    """A credit assigner with those that it is made of, each as `{ use = …, options = … }`. What it needs is not looked at. Raises
    ConfigError or PluginError."""

    def build(part: Any) -> CreditAssigner:
        if isinstance(part, str):
            part = {"use": part}
        if not isinstance(part, Mapping) or not {"use"} <= part.keys() <= {"use", "options"}:
            raise ConfigError(f"credit assigner {use!r} is made of others, each as {{ use = …, options = … }}; one is {part!r}")
        return build_assigner(plugins, part["use"], part.get("options", {}), folder)

    assigner: CreditAssigner = _part(
        plugins, "lightningrl_credit_assigners", use, options, folder, offered={"build": build, "folder": folder}
    )
    if not hasattr(assigner, "assign"):
        raise ConfigError(f"credit.use {use!r} has no `assign(group)`; name a class with `requires` and `assign`")
    return assigner


def _nested(assigner: CreditAssigner) -> Iterator[CreditAssigner]:
    for part in assigner.parts if isinstance(assigner, Combination) else ():
        yield part
        yield from _nested(part)


def _credit(recipe: Recipe, plugins: PluginManager) -> CreditAssigner:
    assigner = build_assigner(plugins, recipe.credit.use, recipe.credit.options, recipe.folder)
    is_paid_by_role = any(reward.agents is not None and reward.weight != 0.0 for reward in recipe.rewards.values())
    requires = assigner.requires | ({"agents"} if recipe.credit.compare == "role" or is_paid_by_role else frozenset())
    backend = plugins.trainers.get(recipe.backend)
    capabilities = None if backend is None else backend.capabilities
    gather(
        lambda: check_comparison(assigner, recipe.credit.compare),
        lambda: _check_judge(recipe, assigner),
        lambda: _check_critic(recipe, assigner, capabilities, is_paid_by_role=is_paid_by_role),
        lambda: check_needs(recipe, recipe.credit.use, requires, capabilities, installed_needs(plugins)),
    )
    return assigner


def _check_potentials(recipe: Recipe, names: Sequence[str], discount: tuple[float, Joins] | None) -> None:
    """Raise ConfigError for those that would pay, because they cannot be discounted as returns are."""
    if not names:
        return
    potential = (
        f"intermediate reward {names[0]!r} is a potential, which is discounted call by call as returns are, and credit.use "
        f"{recipe.credit.use!r}"
    )
    if discount is None:
        raise ConfigError(f"{potential} has no `gamma` per call; take credit per turn, such as 'discounted', or a plain reward")
    gamma, joins = discount
    is_trained = all(
        policy.trainable and policy.trained_agents is None and all(rule.train for rule in policy.calls)
        for policy in recipe.all_policies.values()
    )
    if gamma != 1.0 and joins == "mean" and not is_trained:  # its returns pass over calls that are not trained
        raise ConfigError(
            f"{potential} discounts nothing at calls that are not trained; set its gamma to 1, train every role, or take a plain reward"
        )


def _check_judge(recipe: Recipe, assigner: CreditAssigner) -> None:
    if recipe.judge is not None and not isinstance(assigner, Witness | GroupWitness):
        raise ConfigError(f"[judge] is set, and credit.use {recipe.credit.use!r} asks none: it has no `score`; remove the table")


def _check_critic(recipe: Recipe, assigner: CreditAssigner, capabilities: Capabilities | None, *, is_paid_by_role: bool) -> None:
    """Raise ConfigError for a critic that nobody teaches, and for one that would have to expect several returns at a time."""
    if isinstance(assigner, CriticTeacher):
        if is_paid_by_role:
            raise ConfigError(
                f"credit.use {recipe.credit.use!r} teaches a critic the rollout's return, and rewards with `agents` pay each role another; "
                "remove `agents` from them, or take another credit assigner"
            )
        return
    has_critic = any(recipe.options_of(policy).get("critic") is not None for policy in recipe.all_policies.values())
    if has_critic and capabilities is not None and "values" in capabilities.services:
        raise ConfigError(
            f"[learner.critic] is set, and credit.use {recipe.credit.use!r} teaches it nothing; set credit.use = 'turn_gae' or 'gae', "
            "or remove the table"
        )


def _check_samples(recipe: Recipe) -> None:
    if recipe.samples.aggregation == "constant" and recipe.samples.constant_length is None:
        raise ConfigError("samples.aggregation 'constant' needs samples.constant_length, the tokens per rollout to divide by")


def _judge(recipe: Recipe) -> Judge | None:
    config = recipe.judge
    if config is None:
        return None
    key = None if config.api_key_env is None else read_key(config.api_key_env, os.environ, where="judge")
    return Judge(api_key=key, **config.model_dump(exclude={"api_key_env"}))


def build_backends(
    recipe: Recipe, plugins: PluginManager, models: Mapping[str, str], *, will_run: bool = True
) -> dict[str, Callable[[], Backend]]:
    """By policy, a call that builds its trainer backend. With `will_run` False it is not asked whether this machine can run it. Raises
    ConfigError or PluginError."""
    for name in recipe.backends:
        if name not in plugins.trainers and name not in KNOWN_BACKENDS:
            plugins.find("lightningrl_trainers", name)
    plugin: Plugin = plugins.find("lightningrl_trainers", recipe.backend)
    capabilities = plugin.capabilities
    if recipe.policies and capabilities is not None and not capabilities.several_policies:
        raise ConfigError(
            f"trainer backend {recipe.backend!r} serves one policy in a run and the recipe has {len(recipe.all_policies)} "
            f"({', '.join(map(repr, recipe.all_policies))}); use backend 'torch', or leave one"
        )
    backends: dict[str, Callable[[], Backend]] = {}
    for name, policy in recipe.all_policies.items():
        options = recipe.options_of(policy)
        if capabilities is not None:
            _check_capabilities(recipe.backend, capabilities, options)
        offered: dict[str, Any] = {"policy": models[name], "name": name}
        if "max_staleness" in inspect.signature(plugin.factory).parameters:  # such a backend can serve while it learns
            offered["max_staleness"] = recipe.loop.max_staleness
        check_options(plugin.factory, options, what=f"trainer backend {recipe.backend!r}", reserved=tuple(offered))
        backends[name] = partial(plugin.build, **offered, **options)
    if plugin.check is not None and will_run:
        plugin.check(recipe)
    return backends


def _check_capabilities(backend: str, can: Capabilities, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for what a recipe asks of a trainer backend that does not declare it."""
    loss, device = options.get("loss"), options.get("device", "auto")
    refused = {
        "loss": isinstance(loss, str) and (not can.own_losses if is_reference(loss) else loss not in can.losses),
        "device": device != "auto" and device not in can.devices,
        "lora": options.get("lora") not in (None, False) and not can.lora,
        "kl_coef": bool(options.get("kl_coef")) and not can.reference_kl,
        "critic": options.get("critic") is not None and not can.critic,
    }
    if any(refused.values()):
        asked = {name: options[name] for name in refused if refused[name]}
        lacking = (f"learner.{name} is {value!r}, which trainer backend {backend!r} does not have" for name, value in asked.items())
        raise ConfigError(*(f"{sentence}; it has: {can}" for sentence in lacking))
