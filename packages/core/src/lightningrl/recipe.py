"""The recipe: all of a run in one frozen value (`lightningrl_client.recipe_file` reads it from TOML or Python)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import parse_qsl, urlsplit

import pydantic
from pydantic import Field

from lightningrl.credentials import names_secret
from lightningrl.loading import absolute_reference, describe, is_reference
from lightningrl.recipe_tables import (
    POLICY_NAME,
    CreditConfig,
    IntermediateConfig,
    JudgeConfig,
    OtherPolicyConfig,
    OutcomesConfig,
    PolicyConfig,
    Reference,
    RewardConfig,
    RoleConfig,
    RuntimeConfig,
    SamplesConfig,
    SamplingConfig,
    Table,
    TasksConfig,
    TelemetryConfig,
    UpstreamConfig,
    ValidationConfig,
    ValidationSamplingConfig,
)
from lightningrl.types import SamplingSettings

__all__ = ["LoopConfig", "Recipe"]


class LoopConfig(Table):
    """The training loop."""

    steps: int = Field(default=100, ge=0)
    """Updates of the policy, each from the rollouts of `tasks_per_step` tasks."""
    tasks_per_step: int = Field(default=16, ge=1)
    """More than there are: each step asks for some of them more than once, and a warning says so."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts per task, G."""
    dynamic_sampling: int = Field(default=0, ge=0)
    """DAPO's: a step leaves out groups that teach nothing, and takes up to so many times as many others. 0 = off."""
    max_staleness: int = Field(default=0, ge=0)
    """Versions that the weights may be ahead of a rollout's: rollouts of n more steps are out. 0 = on-policy."""
    asynchronous: bool = False
    """Take groups as they finish, but wait for one that would get older than `max_staleness`. False = in order."""
    seed: int = 0
    """Seed of task order, sampling and minibatches: one seed gives one torch run, but for rounding and staleness."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """The newest so many, and the best by validation beside them."""
    keep_rollouts: int | None = Field(default=None, ge=1)
    """Newest steps whose rollouts stay in the store, with all since the oldest kept checkpoint. None = all."""
    patience: int | None = Field(default=None, ge=1)
    """Stop after so many validations in a row that are no better than the best; None = `steps` and `minutes` count."""
    stop_at: float | None = None
    """Stop once a validation's mean reward is at least this; None = `steps` and `minutes` count."""
    minutes: float | None = Field(default=None, gt=0)
    """Stop after so many minutes of training, validation and checkpoint included; None = only `steps` counts."""

    @pydantic.model_validator(mode="after")
    def _may_be_stale(self) -> Self:
        if self.asynchronous and not self.max_staleness:
            raise ValueError("asynchronous collection samples while weights change; set loop.max_staleness above 0")
        return self


class Recipe(Table):
    """One run: agent, tasks, policy, rewards, credit, loop, learner."""

    name: str = "run"
    """Name of its run folders; the time is put behind it."""
    agent: Reference
    """The agent's entry point, called with a task's input; or `{ harness = "pi" }` (docs/how-to/agents/harnesses.md)"""
    adapters: tuple[str, ...] = ()
    """Adapters of the agent's framework (`lightningrl plugins`): `["langchain"]`. Calls are recorded without them."""
    tasks: TasksConfig
    policy: PolicyConfig
    policies: dict[Annotated[str, Field(pattern=POLICY_NAME)], OtherPolicyConfig] = Field(default_factory=dict)
    """Further policies by name."""
    roles: dict[str, RoleConfig] = Field(default_factory=dict)
    """Roles by what their calls look like; the first that fits counts."""
    upstream: UpstreamConfig | None = None
    telemetry: TelemetryConfig | None = None
    rewards: dict[str, RewardConfig] = Field(min_length=1)
    intermediate_rewards: dict[str, IntermediateConfig] = Field(default_factory=dict)
    credit: CreditConfig = CreditConfig()
    judge: JudgeConfig | None = None
    samples: SamplesConfig = SamplesConfig()
    sampling: SamplingConfig = SamplingConfig()
    validation: ValidationConfig = ValidationConfig()
    outcomes: OutcomesConfig = OutcomesConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    tune: dict[str, Any] = Field(default_factory=dict)
    """Settings of `lightningrl tune` (docs/how-to/tune.md), which `train` reads for a warm start alone."""
    warm_start: dict[str, Any] = Field(default_factory=dict)
    """Traces or a teacher that the policy is tuned on before its first step (docs/how-to/warm-start.md)."""
    store_url: str | None = None
    """A PostgreSQL database for rollouts, without a password: `postgresql://user@host/name`. None = the run folder."""
    loop: LoopConfig = LoopConfig()
    backend: str = "torch"
    """Trainer backend, by its plugin name."""
    learner: dict[str, Any] = Field(default_factory=dict)
    """Optimiser and loss settings, for whichever backend runs; one that it does not know is an error."""
    backends: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings for one backend alone, by its name; tables of backends that do not run are left unread."""
    loggers: tuple[str, ...] = ()
    """Beside metrics.jsonl: `tensorboard`, `wandb`, `mlflow`, `trackio`, `swanlab` (docs/how-to/loggers.md)."""
    logger_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of a logger by its name: `[logger_options.wandb]` with `project`, `tags`."""
    folder: Path = Field(default=Path(), exclude=True)
    """Where relative references start; set by `load_recipe`."""

    @pydantic.field_validator("store_url")
    @classmethod
    def _is_postgresql(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        if parts.password is not None or any(names_secret(name) and name != "sslkey" for name in query):
            raise ValueError(
                "a recipe is copied into its run folder, so it names no password; set PGPASSWORD or write it to "
                "~/.pgpass"
            )
        if parts.scheme not in ("postgresql", "postgresql+psycopg") or not parts.path.strip("/"):
            raise ValueError(
                "write 'postgresql://user@host/name', or leave it out: the store is then a file in the run folder"
            )
        if "options" in query:
            raise ValueError("each run makes a schema of its own in the database; leave ?options= out")
        return url

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.runtime.servers > 1 and self.store_url is None:
            raise ValueError(
                "runtime.servers is above 1, and SQLite has one; set store_url to a PostgreSQL database, or leave it "
                "at 1"
            )
        if (name := self.policy.name) in self.policies:
            raise ValueError(f"two policies are named {name!r}; rename policies.{name} or set policy.name")
        owners: dict[str, str] = {}
        for name, policy in self.policies.items():
            for role in policy.agents:
                if role in owners:
                    raise ValueError(
                        f"role {role!r} is given to two policies, {owners[role]!r} and {name!r}; give it to one"
                    )
                owners[role] = name
        unmet = [name for name in ("patience", "stop_at") if getattr(self.loop, name) is not None]
        if unmet and not (self.tasks.validation and self.validation.every):
            held_out = "name held-out tasks: tasks.validation"
            lacking = "set validation.every above 0" if self.tasks.validation else held_out
            raise ValueError(f"loop.{unmet[0]} counts validations, and there are none; {lacking}, or remove it")
        return self

    @property
    def all_policies(self) -> dict[str, PolicyConfig | OtherPolicyConfig]:
        """Every policy of the run by name, the one under `[policy]` first."""
        return {self.policy.name: self.policy, **self.policies}

    @property
    def validation_sampling(self) -> SamplingSettings:
        """Sampling of validation rollouts: `[validation.sampling]` before `[sampling]`."""
        return replace(self.sampling.settings(), **self.validation.sampling.model_dump(exclude_none=True))

    @property
    def reward_bounds(self) -> tuple[float, float]:
        """Least and most of the weighted sum of the rewards. A reward without a `range` is taken to be in [0, 1]."""
        ends = (sorted(reward.weight * end for end in reward.range or (0.0, 1.0)) for reward in self.rewards.values())
        low, high = map(sum, zip(*ends, strict=True))
        return low, high if high > low else low + 1.0

    @property
    def backend_options(self) -> dict[str, Any]:
        """Options of the chosen backend for `[policy]`."""
        return self.options_of(self.policy)

    def options_of(self, policy: PolicyConfig | OtherPolicyConfig) -> dict[str, Any]:
        """Options of the chosen backend for a policy: the policy's own `learner`, before the backend's table, before
        `[learner]`, before the loop's seed. A loss's file and a critic's folder are named by their whole paths."""
        options = {"seed": self.loop.seed, **self.learner, **self.backends.get(self.backend, {}), **policy.learner}
        if isinstance(loss := options.get("loss"), str) and is_reference(loss):
            options["loss"] = absolute_reference(loss, self.folder)
        critic = options.get("critic")
        if isinstance(critic, Mapping) and critic.get("model") and (self.folder / str(critic["model"])).is_dir():
            options["critic"] = {**critic, "model": str((self.folder / critic["model"]).resolve())}
        return options

    def frozen_text(self) -> str:
        """The recipe as JSON text for the run folder, with what validation takes from `[sampling]` written out."""
        data = self.model_dump(mode="json", fallback=describe)
        sampling = self.validation_sampling
        names = ValidationSamplingConfig.model_fields
        data["validation"]["sampling"] = {name: getattr(sampling, name) for name in names}
        return json.dumps(data, indent=2, sort_keys=True) + "\n"
