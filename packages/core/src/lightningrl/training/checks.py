"""Everything that can be refused of a recipe, refused in seconds and before anything is written."""

from __future__ import annotations

from lightningrl.config import Recipe
from lightningrl.errors import ConfigError, StoreError, gather
from lightningrl.loggers.build import check_loggers
from lightningrl.plugins import PluginManager
from lightningrl.runtime.launcher import check_launcher
from lightningrl.training.agent_check import check_agent
from lightningrl.training.models import check_on_hub
from lightningrl.training.parts import Parts

__all__ = ["build_checked"]


def build_checked(recipe: Recipe, plugins: PluginManager) -> Parts:
    """The recipe's parts. Raises ConfigError with a sentence for each thing that is wrong with it."""

    def build() -> Parts:
        parts = Parts.build(recipe, plugins)
        check_on_hub(parts.models)
        return parts

    with check_agent(recipe) as checked:
        parts: Parts = gather(
            build,
            lambda: check_loggers(recipe.loggers),
            lambda: check_launcher(recipe.runtime, plugins),
            lambda: _check_store(recipe.store_url),
            checked.wait,
        )[0]
    return parts


def _check_store(database: str | None) -> None:
    if database is None:
        return
    from lightningrl.store.schemas import check_database

    try:
        check_database(database)
    except StoreError as error:
        raise ConfigError(f"store_url: {error}") from error
