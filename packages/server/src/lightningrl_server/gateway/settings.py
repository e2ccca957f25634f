"""Settings of the gateway: policies, training-time sampling, the upstream for all other models, bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lightningrl.recipe_tables import RoleConfig
from lightningrl.types import SamplingSettings

__all__ = ["CallWatch", "GatewaySettings", "Upstream"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Upstream:
    """The user's own provider of models that are no policies."""

    base_url: str
    """With its version: `https://api.openai.com/v1`."""
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    """The model that calls ask it for; None = the one that the agent asks for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings:
    """Everything the gateway needs beside its store, engines and renderers."""

    default_policy: str | None = None
    """Serves every model name that is neither a policy's nor listed for the upstream (an unchanged agent's own). None =
    such calls are refused or the upstream's; where there is only one policy, it is the default."""
    agents: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Roles by the policy that answers their calls, whatever model they ask for."""
    roles: Mapping[str, RoleConfig] = field(default_factory=dict[str, RoleConfig])
    """Rules that tell apart calls which name no role; the first one that fits counts."""
    sampling: Mapping[str, SamplingSettings] = field(default_factory=dict[str, SamplingSettings])
    """Training settings by policy; a rollout's own settings go before them, the agent's temperature does not."""
    system_patterns: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Patterns by policy that its calls' first system messages are held against (`Transition.fits`)."""
    trainable: frozenset[str] | None = None
    """Policies whose calls are marked trainable; None = all."""
    drops_hosted: bool = False
    """Tools that a provider's servers run are left out where others are offered; False = such calls are refused."""
    upstream: Upstream | None = None
    """Answers embeddings, and models that no policy serves; None = such calls are refused."""
    upstream_models: Mapping[str, Upstream] = field(default_factory=dict[str, Upstream])
    """Upstreams by model name or pattern (`gpt-5*`): answered there although a default policy serves other names."""
    plain_rollout: str | None = None
    """A rollout whose first attempt answers below `/v1`, too, for clients without one; None = `/v1` is refused."""
    max_body_bytes: int = 16 * 1024 * 1024
    max_choices: int = 64
    """Largest `n`."""
    max_attempts_in_memory: int = 20_000
    """Histories of attempts without a goodbye are dropped, oldest first, and read back from the store when needed."""


class CallWatch(Protocol):
    """Counts what the gateway does; told of each call, so it has to be quick. `ServerMetrics` is one."""

    def answered(self, policy: str, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        """A call was sampled and recorded."""

    def refused(self, code: str) -> None:
        """A call was not answered with a completion."""
