"""Everything that can be refused of a recipe, refused in seconds and before anything is written."""

from __future__ import annotations

from contextlib import suppress

from lightningrl.config import Recipe
from lightningrl.errors import ConfigError, PluginError, StoreError, gather
from lightningrl.loggers.build import check_loggers
from lightningrl.plugins import PluginManager
from lightningrl.runtime.launcher import check_launcher
from lightningrl.training.agent_check import check_agent
from lightningrl.training.models import check_on_hub
from lightningrl.training.parts import Parts

__all__ = ["build_checked"]


def build_checked(recipe: Recipe, plugins: PluginManager, *, will_work: bool = False) -> Parts:
    """The recipe's parts. Raises ConfigError with a sentence for each thing that is wrong with it.

    will_work    workers start in a moment and say what is wrong with the agent: it is imported here only where something else is wrong
    """
    if will_work:
        with suppress(ConfigError, PluginError):
            return _build_checked(recipe, plugins, will_work=True)
    return _build_checked(recipe, plugins, will_work=False)


def _build_checked(recipe: Recipe, plugins: PluginManager, *, will_work: bool) -> Parts:
    def build() -> Parts:
        parts = Parts.build(recipe, plugins)
        check_on_hub(parts.models)
        return parts

    with check_agent(recipe, will_work=will_work) as checked:
        found = gather(
            build,
            lambda: check_loggers(recipe.loggers),
            lambda: check_launcher(recipe.runtime, plugins),
            lambda: _check_store(recipe.store_url),
            checked.wait,
        )
    parts: Parts = found[0]
    return parts


def _check_store(database: str | None) -> None:
    if database is None:
        return
    from lightningrl.store.schemas import check_database

    try:
        check_database(database)
    except StoreError as error:
        raise ConfigError(f"store_url: {error}") from error
