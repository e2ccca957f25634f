"""Which role makes a call, and which policy answers it."""

from __future__ import annotations

from typing import Any

import pytest

from lightningrl.recipe_tables import RoleConfig
from lightningrl_server.gateway.calls import Routing

CRITIC = [{"role": "system", "content": "You are a critic.\nBe strict."}, {"role": "user", "content": "hi"}]
PLAIN = [{"role": "user", "content": "hi"}]
RULES = {
    "critic": RoleConfig(system="You are a critic*"),
    "planner": RoleConfig(model="gpt-4o-mini", system="*plan*"),
    "writer": RoleConfig(model="gpt-4o*"),
    "editor": RoleConfig(),
}


@pytest.mark.parametrize(
    ("said", "model", "messages", "role"),
    [
        (None, "gpt-4o", PLAIN, "writer"),
        (None, "gpt-4o", CRITIC, "critic"),
        (None, "gpt-4o-mini", [{"role": "developer", "content": "You plan."}, *PLAIN], "planner"),
        (None, "other", PLAIN, None),
        ("editor", "gpt-4o", CRITIC, "editor"),
    ],
)
def test_the_first_rule_that_fits_names_the_role_and_what_an_adapter_says_goes_before(
    said: str | None, model: str, messages: list[dict[str, Any]], role: str | None
) -> None:
    assert Routing(["policy"], rules=RULES).role(said, model, messages) == role


def test_a_name_goes_before_a_role_and_a_role_before_the_default() -> None:
    routing = Routing(["policy", "judge"], default="policy", agents={"judge": ["critic"]})
    assert routing.policy("judge", "writer") == "judge"
    assert routing.policy("gpt-4o", "critic") == "judge"
    assert routing.policy("gpt-4o", "critic/strict") == "judge"
    assert routing.policy("policy", "critic") == "policy"
    assert routing.policy("gpt-4o", None) == "policy"


def test_without_a_default_an_unknown_model_is_nobodys() -> None:
    routing = Routing(["a", "b"], agents={"b": ["critic"]}, rules=RULES)
    assert routing.policy("gpt-5", None) is None
    assert not routing.may_serve("gpt-5", "writer")
    assert routing.may_serve("gpt-5", None), "its system prompt may make it the critic's"
    assert routing.may_serve("gpt-5", "critic")
    assert routing.may_serve("a", None)
