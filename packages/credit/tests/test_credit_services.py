"""What evidence may ask of a backend: refused when the run starts where nobody can answer."""

from __future__ import annotations

from typing import Any

import pytest

from lightningrl.backends import Capabilities
from lightningrl.errors import ConfigError
from lightningrl.recipe import Recipe
from lightningrl_credit.needs import check_needs


def make_recipe(**values: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "agent": "a.py:a",
            "tasks": {"train": "a.py:t"},
            "policy": {"model": "m"},
            "rewards": {"r": {"use": "a.py:r"}},
            **values,
        }
    )


def declared(*services: str) -> Capabilities:
    return Capabilities(
        losses=frozenset(), devices=frozenset(), lora=False, reference_kl=False, services=frozenset(services)
    )


@pytest.mark.parametrize(
    ("services", "learner", "need", "remedy"),
    [
        ((), {}, "logprobs", "use a trainer backend that tells logprobs of given tokens: backend = 'torch'"),
        (("logprobs",), {"critic": {}}, "values", "use a trainer backend with a critic that tells values"),
        (("logprobs", "values"), {}, "values", r".*a table \[learner\.critic\]"),
        (("logprobs", "values"), {}, "logprobs", None),
        (("logprobs", "values"), {"critic": {}}, "values", None),
    ],
)
def test_a_service_that_the_backend_does_not_have_is_refused_at_the_start(
    services: tuple[str, ...], learner: dict[str, Any], need: str, remedy: str | None
) -> None:
    recipe = make_recipe(learner=learner)
    if remedy is None:
        check_needs(recipe, "mine", {need}, declared(*services))
        return
    with pytest.raises(ConfigError, match=rf"credit assigner 'mine' needs '{need}'; {remedy}"):
        check_needs(recipe, "mine", {need}, declared(*services))
