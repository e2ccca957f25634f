"""Settings of a server process; passed as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lightningrl.credentials import read_key
from lightningrl.dialects import DIALECTS, Dialect
from lightningrl.errors import ConfigError
from lightningrl.recipe_tables import RoleConfig, TelemetryConfig, UpstreamConfig, UpstreamModelConfig
from lightningrl.types import SamplingSettings
from lightningrl_server.gateway.settings import GatewaySettings, Upstream

__all__ = ["PolicySettings", "ServerSettings", "read_upstream"]


class PolicySettings(BaseModel):
    """One policy's tokenizer, renderer and sampling."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | Path
    """Folder or hub name of the tokenizer."""
    renderer: Any = "auto"
    """Name of the `renderers` library, or "auto"."""
    chat_template: str | None = None
    """Text of the template in place of the tokenizer's; None = its own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    """Training settings; a rollout's own go before them."""
    trainable: bool = True
    agents: tuple[str, ...] = ()
    """Roles whose calls it answers, whatever model they ask for."""
    system_patterns: tuple[str, ...] = ()
    """Patterns of the first system message, for the rules of which calls are trained."""


class ServerSettings(BaseModel):
    """Everything that a server process is told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store_url: str
    """`sqlite:///path`"""
    run_key: str = Field(min_length=8, repr=False)
    """Opens the control API and the engine link."""
    folder: Path | None = None
    """The run's, whose pages are at /view; None = it has none."""
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """0 = any free one."""
    drops_hosted: bool = False
    """Policies are not told of tools that a provider's servers run."""
    policies: Mapping[str, PolicySettings] = Field(default_factory=dict[str, PolicySettings])
    default_policy: str | None = None
    """Serves model names that are no policy's; None = the only policy."""
    dialects: tuple[Dialect, ...] = DIALECTS
    """The APIs that the gateway speaks."""
    roles: Mapping[str, RoleConfig] = Field(default_factory=dict[str, RoleConfig])
    """Rules that give a role to calls that name none; the first that fits counts."""
    upstream: UpstreamConfig | None = None
    """Answers embeddings and models that are no policies; keys are read from the server's environment."""
    telemetry: TelemetryConfig | None = None
    """Where ingested spans go as well; header values are read from the server's environment."""
    plain_rollout: str | None = None
    """A rollout whose first attempt answers below `/v1` as well, for clients that know nothing of rollouts."""
    engine_wait_s: float = Field(default=600.0, gt=0)
    """Seconds that one call waits while its policy is held or has no engine."""
    max_body_bytes: int = Field(default=32 * 2**20, gt=0)
    longest_wait_s: float = Field(default=60.0, gt=0)
    """Seconds of a long poll."""
    log_level: str = "warning"
    parent_pid: int = 0
    """The process that started it, with which it goes; 0 = the one that it has when it starts."""

    def read_gateway(self, environment: Mapping[str, str]) -> GatewaySettings:
        """The gateway's part. Raises ConfigError where the environment lacks an upstream's key."""
        upstream, upstream_models = read_upstream(self.upstream, environment)
        return GatewaySettings(
            default_policy=self.default_policy,
            agents={name: policy.agents for name, policy in self.policies.items()},
            roles=self.roles,
            sampling={name: policy.sampling for name, policy in self.policies.items()},
            system_patterns={name: policy.system_patterns for name, policy in self.policies.items()},
            trainable=frozenset(name for name, policy in self.policies.items() if policy.trainable),
            upstream=upstream,
            upstream_models=upstream_models,
            drops_hosted=self.drops_hosted,
            max_body_bytes=self.max_body_bytes,
            plain_rollout=self.plain_rollout,
        )


def read_upstream(
    config: UpstreamConfig | None, environment: Mapping[str, str]
) -> tuple[Upstream | None, dict[str, Upstream]]:
    """Return the default upstream and those by model, with keys. Raises ConfigError for a missing key or address."""
    if config is None:
        return None, {}
    default = _read_upstream(config, environment, "upstream") if config.base_url is not None else None
    models: dict[str, Upstream] = {}
    for name, model in config.models.items():
        if model.base_url is None and config.base_url is None:
            raise ConfigError(f"upstream.models.{name!r} has no base_url, and [upstream] has none; set one of them")
        key_env = model.api_key_env if model.base_url is not None else model.api_key_env or config.api_key_env
        whole = UpstreamModelConfig(base_url=model.base_url or config.base_url, api_key_env=key_env)
        models[name] = replace(_read_upstream(whole, environment, f"upstream.models.{name!r}"), model=model.model)
    if default is None and not models:
        example = "set it to your provider's address, for example 'https://api.openai.com/v1'"
        raise ConfigError(f"[upstream] has no base_url; {example}")
    return default, models


def _read_upstream(config: UpstreamModelConfig, environment: Mapping[str, str], where: str) -> Upstream:
    assert config.base_url is not None
    key = None if config.api_key_env is None else read_key(config.api_key_env, environment, where=where)
    return Upstream(base_url=config.base_url, api_key=key)
