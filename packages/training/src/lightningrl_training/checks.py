"""Checks all that can be refused of a recipe, in seconds and before anything is written."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pydantic

from lightningrl.errors import ConfigError, PluginError, StoreError
from lightningrl.plugins import PluginManager
from lightningrl.recipe import Recipe
from lightningrl.recipe_keys import check_options
from lightningrl_client.runtime.launcher import check_launcher
from lightningrl_training.agent_check import check_agent
from lightningrl_training.build import Parts
from lightningrl_training.models import check_on_hub, resolve_model
from lightningrl_training.part_checks import gather

__all__ = ["build_checked", "check_logger_options"]


def build_checked(
    recipe: Recipe, plugins: PluginManager, *, will_work: bool = False, wrong: Sequence[str] = ()
) -> Parts:
    """Build the recipe's parts. Raises ConfigError with a sentence for each thing that is wrong with it.

    will_work    workers start in a moment and say what is wrong with the agent: imported here only for other problems
    wrong        sentences about keys that the recipe is read without (`read_recipe`)
    """
    if will_work and not wrong:
        with suppress(ConfigError, PluginError):
            return _build_checked(recipe, plugins, wrong, will_work=True)
    return _build_checked(recipe, plugins, wrong, will_work=False)


def _build_checked(recipe: Recipe, plugins: PluginManager, wrong: Sequence[str], *, will_work: bool) -> Parts:
    plugins.check()
    with check_agent(recipe, plugins, will_work=will_work) as wait_for_agent:
        parts, *_ = gather(
            lambda: Parts.build(recipe, plugins),
            *(partial(_check_on_hub, recipe, name) for name in recipe.all_policies),
            *(partial(_check_logger, name, recipe, plugins) for name in dict.fromkeys(recipe.loggers)),
            *(partial(check_logger_options, name, recipe, plugins) for name in recipe.logger_options),
            lambda: check_launcher(recipe.runtime, plugins),
            lambda: _check_store(recipe.store_url),
            wait_for_agent,
            problems=wrong,
        )
    return parts  # type: ignore[no-any-return]


def _check_logger(name: str, recipe: Recipe, plugins: PluginManager) -> None:
    """Raise PluginError or ConfigError for a logger that does not exist or whose package is not installed."""
    logger = plugins.find("lightningrl_loggers", name)
    if logger.check is not None:
        logger.check(recipe)


def check_logger_options(name: str, recipe: Recipe, plugins: PluginManager) -> None:
    """Raise ConfigError for options that the logger does not have, or of another kind than it takes; PluginError for a
    logger that does not exist."""
    factory, options = plugins.find("lightningrl_loggers", name).factory, recipe.logger_options[name]
    check_options(factory, options, what=f"logger_options.{name}", reserved=("folder", "run", "config"))
    hints = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    for option, value in options.items():
        try:
            pydantic.TypeAdapter(hints.get(option, Any)).validate_python(value)
        except pydantic.ValidationError as error:
            message = error.errors()[0]["msg"]
            raise ConfigError(f"logger_options.{name}.{option} is {value!r}: {message}") from None


def _check_on_hub(recipe: Recipe, policy: str) -> None:
    check_on_hub(policy, resolve_model(policy, recipe.all_policies[policy], recipe.folder))


def _check_store(database: str | None) -> None:
    if database is None:
        return
    from lightningrl_server.store.postgresql import check_database

    try:
        check_database(database)
    except StoreError as error:
        raise ConfigError(f"store_url: {error}") from error
