"""What credit assigners may need is an open set: an installed distribution adds to it, with a remedy, and is heard
wherever needs are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from distributions import install_in_place, write_blocks

from lightningrl.backends import Capabilities
from lightningrl.errors import ConfigError, PluginError
from lightningrl.plugins import Plugin, PluginManager, hookimpl, load_plugins
from lightningrl.protocols import Need
from lightningrl.recipe import Recipe
from lightningrl_credit.baselines import IdenticalAssignment
from lightningrl_credit.needs import check_needs, find_unrecorded, installed_needs
from lightningrl_testing.credit_conformance import CreditConformance, grpo_advantages
from lightningrl_testing.groups import make_group
from lightningrl_training.build import build_credit

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "plugins" / "credit.md"
REMEDY = "credit assigner .* needs 'large_group'; the median of few says little: set loop.group_size to 4 or more"


class Careful(IdenticalAssignment):
    requires = frozenset({"group", "large_group"})


@pytest.fixture(autouse=True)
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    """With the project of the page installed."""
    write_blocks(PAGE, tmp_path)
    monkeypatch.syspath_prepend(str(install_in_place(tmp_path / "lightningrl-median")))
    return load_plugins()


def make_recipe(**values: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "agent": "a.py:a",
            "tasks": {"train": "a.py:t"},
            "policy": {"model": "m"},
            "rewards": {"r": {"use": lambda task, output, trajectory: 1.0}},
            "credit": {"use": Careful},
            **values,
        }
    )


def test_a_run_that_does_not_have_it_is_refused_with_its_remedy(plugins: PluginManager) -> None:
    with pytest.raises(ConfigError, match=REMEDY):
        build_credit(make_recipe(loop={"group_size": 2}), plugins)
    assert "large_group" in build_credit(make_recipe(loop={"group_size": 4}), plugins)[1].requires


def test_recorded_groups_that_do_not_have_it_are_left_alone(plugins: PluginManager) -> None:
    few, enough = (make_group(*[(None,)] * count, rewards=(1.0,) * count) for count in (2, 4))
    assert "set loop.group_size to 4" in str(find_unrecorded(Careful.requires, [few], installed_needs(plugins)))
    assert find_unrecorded(Careful.requires, [enough], installed_needs(plugins)) is None


def test_what_nobody_provides_is_named_with_all_that_there_is(plugins: PluginManager) -> None:
    with pytest.raises(
        ConfigError, match=r"needs 'larg_group'; which no run provides; there are: agents, .*, large_group, logprobs"
    ):
        check_needs(make_recipe(), "mine", {"larg_group"}, needs=installed_needs(plugins))


def test_a_trainer_backend_may_provide_it_by_declaring_it(plugins: PluginManager) -> None:
    needs = {"hidden_states": Need(lambda recipe: True, "use a backend that tells them", is_service=True)}

    def declared(*services: str) -> Capabilities:
        return Capabilities(
            losses=frozenset(), devices=frozenset(), lora=False, reference_kl=False, services=frozenset(services)
        )

    check_needs(make_recipe(), "mine", {"hidden_states"}, declared("hidden_states"), needs)
    with pytest.raises(ConfigError, match="needs 'hidden_states'; use a backend that tells them"):
        check_needs(make_recipe(), "mine", {"hidden_states"}, declared("logprobs"), needs)


def test_two_needs_of_one_name_are_refused_also_where_one_is_ours(plugins: PluginManager) -> None:
    class Again:
        @hookimpl
        def lightningrl_credit_needs(self) -> Iterator[Plugin]:
            yield Plugin(name="group", summary="", factory=lambda: None)

    plugins.register(Again(), distribution="again 1.0")
    with pytest.raises(
        PluginError,
        match=r"two credit needs are named 'group': from lightningrl-credit .* and again 1.0; uninstall one",
    ):
        installed_needs(plugins)


class TestAnAssignerThatNeedsIt(CreditConformance):
    def make_assigner(self) -> Careful:
        return Careful()

    def expected(self, rewards: Sequence[float]) -> list[float]:
        return grpo_advantages(rewards)
