"""The example's recipes name agents, tasks and rewards that are there, and settings that the torch backend knows."""

from pathlib import Path

import pytest

from lightningrl.loading import resolve
from lightningrl_client.recipe_file import load_recipe
from lightningrl_client.runtime.agent_loader import check_agent_file
from lightningrl_torch.settings import Settings

EXAMPLE = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ["recipe.toml", "recipe-smollm2.toml", "musique.toml"])
def test_a_recipe_is_complete(name: str) -> None:
    recipe = load_recipe(EXAMPLE / name)
    check_agent_file(recipe)
    for reference in (recipe.tasks.train, recipe.tasks.validation, *(reward.use for reward in recipe.rewards.values())):
        assert callable(resolve(reference, recipe.folder))
    assert Settings(policy=recipe.policy.model, **recipe.backend_options).learning_rate in (4e-4, 2e-5, 1e-6)
