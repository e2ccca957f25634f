"""`lightningrl recipe show`: what a run would be, value by value, with where each is from."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Column

from lightningrl.console import escape
from lightningrl.errors import LightningError
from lightningrl.plugins import load_plugins
from lightningrl_client.commands import RecipeArgument, SetOption, read_settings
from lightningrl_training.commands.printing import Page, make_table

if TYPE_CHECKING:
    from lightningrl.recipe import Recipe

__all__ = ["recipes"]

recipes = typer.Typer(name="recipe", no_args_is_help=True, help="Look at a recipe.")


@recipes.command("show")
def show_recipe(source: RecipeArgument, settings: SetOption = None) -> None:
    """Show every value that a run of RECIPE would have, and where it is from: the file, --set, or a default."""
    from lightningrl_client.recipe_file import load_recipe
    from lightningrl_runs.recipe import list_recipe_keys, written_keys

    chosen = read_settings(settings)
    written, recipe = set(written_keys(load_recipe(source))), load_recipe(source, chosen)
    keys = list_recipe_keys(recipe, settings=chosen, written=written, plugins=load_plugins())
    resolved = _resolve_rate(recipe)
    table = make_table(
        Column("key", no_wrap=True), Column("value", overflow="fold"), Column("from", no_wrap=True), gap=1
    )
    for shown in keys:
        whence = source.name if shown.origin == "recipe" else shown.origin
        value = json.dumps(shown.value, ensure_ascii=False, default=str)
        if shown.key == "learner.learning_rate" and resolved is not None:
            value = resolved
        table.add_row(escape(shown.key), escape(value), whence, style="dim" if whence == "default" else None)
    Page().table(table)


def _resolve_rate(recipe: Recipe) -> str | None:
    """The learning rate that a run would take, with its reason, where the recipe leaves it to the backend and no probe
    is needed to know it; None where the recipe has a number, or the policy's size is not known here."""
    plugin = load_plugins().trainers.get(recipe.backend)
    describe = getattr(getattr(plugin, "factory", None), "describe_rate", None)
    if describe is None:
        return None
    with suppress(LightningError):  # which `train` and `doctor` are there to say
        model, parameters = _find(recipe)
        rollouts = recipe.loop.tasks_per_step * recipe.loop.group_size
        settings = {**recipe.options_of(recipe.policy), "policy": model, "rollouts_per_step": rollouts}
        rate: str | None = describe(parameters=parameters, **settings)
        return rate
    return None


def _find(recipe: Recipe) -> tuple[str, int | None]:
    """The policy's place and, of a model file, its parameters: nothing is read that is not in the file's head."""
    from lightningrl_runs.model_files import find_model, model_format

    model = recipe.policy.model
    bases = (recipe.folder, Path.cwd())
    place = find_model(model, bases)
    if place is not None and place.is_file():
        facts = model_format(place.suffix.removeprefix(".").lower()).describe(place)
        return str(place), int(facts["parameters"])
    folders = [place] if place is not None else [base / model for base in bases]
    return next((str(folder) for folder in folders if folder.is_dir()), model), None
