"""Which role makes a call, and which policy answers it.

role      said by an adapter or the agent  >  the first rule of the run that fits (model asked for, system prompt)
policy    one of that name  >  the one that the role is given to  >  the default  >  None: the upstream's, or refused
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from lightningrl.recipe_tables import RoleConfig
from lightningrl.roles import is_role_among
from lightningrl_server.gateway.request import Refusal

__all__ = ["Routing", "fitting_patterns"]


class Routing:
    """The run's policies and what leads to each."""

    def __init__(
        self,
        policies: Collection[str],
        *,
        default: str | None = None,
        agents: Mapping[str, Collection[str]] | None = None,
        rules: Mapping[str, RoleConfig] | None = None,
    ) -> None:
        """`agents`: roles by the policy that answers them; `rules`: how calls of a role are told. `default` None = the
        only policy, where there is just one."""
        self._policies = tuple(policies)
        self._default = default if default is not None or len(self._policies) != 1 else self._policies[0]
        self._agents = {policy: frozenset(roles) for policy, roles in (agents or {}).items() if roles}
        self._rules = {role: rule for role, rule in (rules or {}).items() if rule.model is not None or rule.system is not None}

    def find(self, agent: str | None, model: str, messages: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
        """The role of a call, and the policy that answers it. Raises Refusal where none does."""
        role = self.role(agent, model, messages)
        policy = self.policy(model, role)
        if policy is not None:
            return role, policy
        asked = f"no policy {model!r} in this run" + (f", none for the role {role!r}" if role is not None else "")
        raise Refusal(
            f"{asked}, and no default policy; it serves {', '.join(sorted(self._policies))}. To have other models "
            "answered "
            "by your provider, configure [upstream] base_url and api_key_env in the recipe",
            status=404,
            code="model_not_found",
            param="model",
        )

    def role(self, agent: str | None, model: str, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The role of a call: the one that it names itself, else the first rule that fits; None = nobody knows."""
        if agent is not None:
            return agent
        return next((role for role, rule in self._rules.items() if _fits(rule, model, messages)), None)

    def policy(self, model: str, role: str | None) -> str | None:
        """The policy that answers; None = none does."""
        if model in self._policies:
            return model
        if role is not None:
            for policy, roles in self._agents.items():
                if is_role_among(role, roles):
                    return policy
        return self._default if self._default in self._policies else None

    def may_serve(self, model: str, agent: str | None) -> bool:
        """True if a policy may answer, by what is known before the messages are read."""
        if self.policy(model, self.role(agent, model, ())) is not None:
            return True
        return agent is None and any(
            rule.system is not None and (rule.model is None or fnmatchcase(model, rule.model)) and self.policy("", role) is not None
            for role, rule in self._rules.items()
        )


def fitting_patterns(patterns: Sequence[str], messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The patterns that the first system message fits."""
    if not patterns:
        return ()
    system = _system_prompt(messages)
    return tuple(pattern for pattern in patterns if fnmatchcase(system, pattern))


def _fits(rule: RoleConfig, model: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    if rule.model is not None and not fnmatchcase(model, rule.model):
        return False
    return rule.system is None or fnmatchcase(_system_prompt(messages), rule.system)


def _system_prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    if not messages or messages[0].get("role") not in ("system", "developer"):
        return ""
    return str(messages[0].get("content") or "")
