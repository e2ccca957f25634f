"""The recipe: everything a run is, in one frozen value, from one TOML file or one Python file.

    recipe.toml | recipe.py (`recipe = Recipe(...)`)  +  `--set key=value`  ─►  Recipe  ─►  <run folder>/recipe.json

Unknown keys are errors here; keys that the chosen part does not consume are errors when the part is built (`check_options`).
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import pydantic
from pydantic import Field
from pydantic_core import ErrorDetails

from lightningrl.clean import DEEPEST, is_deeper
from lightningrl.credentials import Address, Endpoint, Variable, names_secret, read_key
from lightningrl.errors import ConfigError
from lightningrl.hints import ELSEWHERE, LEARNER, key_hint
from lightningrl.loading import absolute_reference, is_reference
from lightningrl.types import Outcome, SamplingSettings

__all__ = [
    "CallRule",
    "CreditConfig",
    "JudgeConfig",
    "LoopConfig",
    "NamedUpstreamConfig",
    "OtherPolicyConfig",
    "OutcomesConfig",
    "PolicyConfig",
    "Recipe",
    "RewardConfig",
    "RoleConfig",
    "RuntimeConfig",
    "SamplesConfig",
    "SamplingConfig",
    "TasksConfig",
    "TelemetryConfig",
    "UpstreamConfig",
    "UpstreamModelConfig",
    "ValidationConfig",
    "ValidationSamplingConfig",
    "check_options",
    "key_parts",
    "load_recipe",
    "parse_setting",
    "read_recipe",
    "recipe_file",
]


LONG_KEY = re.compile(r"""(?:(?<![\w-])(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+)""" f"{{{DEEPEST}}}")
"""A dotted key that would be nested deeper than anything here, which takes the parser seconds."""
POLICY_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Policies are addressed by it, and it names their folder in a checkpoint."""
MISSING = {
    "agent": 'name the function that is called with a task\'s input: agent = "agent.py:answer"',
    "policy": 'say which model is trained: [policy] model = "Qwen/Qwen2.5-0.5B-Instruct"',
    "policy.model": 'say which model is trained, a hub name or a folder: model = "Qwen/Qwen2.5-0.5B-Instruct"',
    "rewards": 'say what is good: [rewards.right] use = "reward.py:right", a function of (task, output, trajectory)',
    "tasks": 'say where tasks come from: [tasks] train = "data.jsonl", or a function that returns them: train = "data.py:train_tasks"',
    "tasks.train": 'name a file of tasks: train = "data.jsonl", or the function that returns them: train = "data.py:train_tasks"',
}
"""What to write, by key."""


STORE_VARIABLES = ("PGPASSWORD", "PGPASSFILE", "PGSERVICE", "PGSERVICEFILE", "PGSSLKEY")
"""Open the database of `store_url`."""
LOGGER_VARIABLES = {"wandb": ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")}
"""Keys of loggers."""


class _FrozenModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, hide_input_in_errors=True)


def _describe(value: Any) -> Any:
    """A Python object in a recipe, as `file.py:name`, for the frozen copy."""
    if isinstance(value, str):
        return value
    target = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    has_file = getattr(sys.modules.get(target.__module__), "__file__", None)  # a notebook's cells have one for each kernel
    return f"{(inspect.getsourcefile(target) if has_file else target.__module__) or '?'}:{target.__qualname__}"


def _name_of_path(value: Any) -> Any:
    return str(value) if isinstance(value, PurePath) else value


Reference = Annotated[str | Any, pydantic.BeforeValidator(_name_of_path), pydantic.PlainSerializer(_describe)]
"""`"file.py:name"`, `"package.module:name"`, an installed plugin's name, or the object itself in a Python recipe."""


class TasksConfig(_FrozenModel):
    """Where tasks come from (docs/tasks.md): files, data sets, or callables that return iterables of `Task` or of dicts with its fields."""

    train: Reference
    """`"data.jsonl"` (`.json`, `.csv`, `.parquet`), `"hf:NAME:SPLIT"`, `"data.py:load"`; read once, when the run starts."""
    validation: Reference | None = None
    """Held-out tasks, which nothing is trained on; None = no validation."""
    input: str | None = None
    """Column that the agent is called with; None = the first of `input`, `question`, `prompt`."""
    answer: str | None = None
    """Column of the reference answer, for rewards; None = `answer`, where there is one."""
    id: str | None = None
    """Column that names a task; None = `id`, where there is one, else tasks are numbered. All other columns are metadata."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for both callables."""


class CallRule(_FrozenModel):
    """One rule of which calls are the policy's training data. Of those in `policy.calls`, the first whose conditions all hold decides; with
    none, every call fits. Of a call that no rule fits, `trained_agents` decides, and side calls (titles, commit messages) are left out."""

    role: str | None = None
    """Role of the call; naming one takes what lies below it too."""
    system: str | None = None
    """Shell-style pattern of the call's first system message: `"*title of this conversation*"`."""
    offers_tools: bool | None = None
    """True = calls that offer the policy tools, false = those that offer none."""
    train: bool = True
    """False = such calls are recorded and shown, and get no gradient."""


class _Policy(_FrozenModel):
    model: str
    """Hub name or local folder (relative to the recipe)."""
    trainable: bool = True
    """False = it is served and its calls are recorded; its weights stay as they are, bit for bit."""
    trained_agents: tuple[str, ...] | None = None
    """Roles whose calls are trained; None = all of them."""
    calls: tuple[CallRule, ...] = ()
    """Rules of which calls are trained, before `trained_agents`: `calls = [{ train = true }]` takes side calls in, too. See
    `[[policy.calls]]`."""
    renderer: str = "auto"
    """Name of a renderer of the `renderers` library; `auto` picks by model name and falls back to the model's own chat template."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Switches of the chat template, for each prompt of this policy: `{ enable_thinking = false }`. One that the template never reads is
    an error."""
    learner: dict[str, Any] = Field(default_factory=dict)
    """Settings for this policy alone; they go before those of `[learner]`."""


class PolicyConfig(_Policy):
    """The model being trained. It answers every call that no other policy is given."""

    name: str = Field(default="policy", pattern=POLICY_NAME)
    """What it is called in metrics and checkpoints, and by calls that ask for it by name."""
    hosted_tools: Literal["refuse", "drop"] = "refuse"
    """Tools that a provider's servers run (web search, file search, code, MCP, …), which an agent offers beside its own: such calls are
    refused, or the policies are not told of those tools, with a warning. A call that offers nothing else is always refused."""


class OtherPolicyConfig(_Policy):
    """One more policy of the run, with weights, engine and optimiser of its own. It answers calls to its name."""

    agents: tuple[str, ...] = ()
    """Roles whose calls it answers as well, whatever model they ask for."""


class RoleConfig(_FrozenModel):
    """How calls of one role are told where nobody names it: shell-style patterns, both must fit where both are given. With neither, the
    agent names it itself (`lightningrl.role`)."""

    model: str | None = None
    """Of the model that the call asks for: `"gpt-4o*"`."""
    system: str | None = None
    """Of the first system message: `"You are a critic*"`."""


class UpstreamModelConfig(_FrozenModel):
    """Where calls to one model go. What is left out is the upstream's."""

    base_url: Address | None = None
    """With its version: `https://api.openai.com/v1`."""
    api_key_env: Variable | None = None
    """Name of the environment variable that has the key; the key itself stands in no file. None = it asks for none."""


class NamedUpstreamConfig(UpstreamModelConfig):
    """Where calls to one model go, and what it is called there."""

    model: str | None = None
    """None = as the agent calls it."""


class UpstreamConfig(UpstreamModelConfig):
    """The user's own provider: answers embeddings and models that are no policies. Such calls are recorded, never trained."""

    models: dict[str, NamedUpstreamConfig] = Field(default_factory=dict[str, NamedUpstreamConfig])
    """By model name or pattern (`"gpt-5*"`): answered by the upstream although a default policy serves every other name."""


class TelemetryConfig(_FrozenModel):
    """Where the spans that reach the server go as well, and those of the trainer's own steps."""

    forward: Address | None = None
    """The user's own collector, OTLP over HTTP: `http://collector:4318/v1/traces`."""
    headers_env: dict[Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")], Variable] = Field(default_factory=dict[str, str])
    """Request headers, each with the name of the environment variable that has its value; the value itself stands in no file."""

    def target(self, environment: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
        """The collector's whole address, and the request headers; None where `forward` is not set. Raises ConfigError for a header whose
        variable is not set, or holds what no header can carry."""
        if self.forward is None:
            return None
        headers = {
            name.lower(): read_key(variable, environment, where=f"telemetry.headers_env.{name!r}", what="the header's value")
            for name, variable in self.headers_env.items()
        }
        parts = urlsplit(self.forward)
        return urlunsplit(parts._replace(path=parts.path if parts.path.strip("/") else "/v1/traces")), headers


class JudgeConfig(_FrozenModel):
    """An OpenAI-compatible endpoint that the credit assigner asks about finished rollouts. Its calls are recorded, never trained."""

    base_url: Address
    """With its version: `https://api.openai.com/v1`."""
    model: str
    """By the name that the endpoint knows."""
    api_key_env: Variable | None = None
    """Name of the environment variable that has the key; the key itself stands in no file. None = it asks for none."""
    concurrency: int = Field(default=8, ge=1)
    """Calls under way at a time."""
    retries: int = Field(default=4, ge=0)
    """Further tries where no answer comes, it is overloaded or it limits rates."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Of one call, in seconds."""
    max_calls: int = Field(default=64, ge=1)
    """That one rollout may make; those that a judge ranks together have theirs together."""
    max_tokens: int = Field(default=100_000, ge=1)
    """Of prompts and answers that one rollout may use, as the endpoint counts them."""


class RewardConfig(_FrozenModel):
    """One terminal reward. A recipe may have several; their weighted sum is the return."""

    use: Reference
    """A function of (task, output, trajectory), sync or async: `"reward.py:right"`, or one of the library by its name."""
    weight: float = 1.0
    """In the sum; 0.0 = it is computed and reported, and teaches nothing."""
    agents: tuple[str, ...] | None = None
    """Roles that this reward pays; None = all. What others do never earns it."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Of one try, in seconds."""
    retries: int = Field(default=2, ge=0)
    """Further tries where it raises, takes too long or returns NaN: after half a second, a second, two …"""
    concurrency: int = Field(default=16, ge=1)
    """At work at a time. An async one is on the loop; a sync one has a process for each, another where calls wait for a second."""
    range: tuple[float, float] | None = None
    """Least and most that it may return, as [0, 1]; another value is a failure. None = any; of `reported`, which the agent itself may
    tell, 0 to 1."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of what `use` names."""


class IntermediateConfig(_FrozenModel):
    """One automatic intermediate reward (AIR). Its values are turn rewards, which credit per turn adds up."""

    use: Reference
    """One of the library by its name (docs/credit/intermediate.md), or your own."""
    weight: float = 1.0
    """0.0 = switched off: it adds nothing."""
    form: Literal["plain", "potential"] = "plain"
    """`potential`: calls are paid its change, which no policy gains by (Ng, Harada & Russell 1999); with the γ of the credit."""
    range: tuple[float, float] | None = None
    """Least and most that it may return, before form and weight; another value is a failure. None = any; of `reported`, -1 to 1."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of what `use` names."""


class CreditConfig(_FrozenModel):
    """How a return is spread over calls."""

    use: Reference = "grpo"
    """One of docs/credit/index.md, or your own."""
    compare: Literal["group", "role"] = "group"
    """With whom a call is compared: all calls of its group, or those of its role (Dr. MAS, arXiv 2602.08847)."""
    per_reward: bool = False
    """Compare each terminal reward by itself, then add them by their weights; with `whiten` this is GDPO (arXiv 2601.05242)."""
    whiten: bool = False
    """Give the step's trained tokens together mean 0 and deviation 1 (REINFORCE++, arXiv 2501.03262)."""
    max_tokens: int = Field(default=4_000_000, ge=1)
    """That policies and critics may read for the evidence of one rollout."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of what `use` names."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _of_before(cls, data: Any) -> Any:
        """Recipes of runs that were begun with `per_agent`."""
        if isinstance(data, Mapping) and isinstance(data.get("per_agent"), bool):
            data = dict(data)
            data.setdefault("compare", "role" if data.pop("per_agent") else "group")
        return data


class SamplesConfig(_FrozenModel):
    """How scored trajectories become rows."""

    rows: Literal["call", "merged"] = "merged"
    """`merged`: calls that continue each other's tokens share a row, which is computed once. `call`: each has its own."""
    aggregation: Literal["rollout_mean", "token_mean", "constant"] = "token_mean"
    """What weighs the same in a step's loss: each trained token, each rollout, or each token divided by `constant_length`."""
    constant_length: int | None = None
    """Tokens per rollout that `constant` (Dr. GRPO) divides by."""


class SamplingConfig(_FrozenModel):
    """How the policy is sampled. Overrides what the agent asks for, so that the recorded logprobs are those of the training policy."""

    temperature: float = Field(default=1.0, ge=0)
    """0.0 = greedy, which explores nothing."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Least share of probability that is sampled from; 1.0 = all."""
    top_k: int = Field(default=0, ge=0)
    """So many likeliest tokens are sampled from; 0 = all."""
    max_tokens: int = Field(default=256, gt=0)
    """Of one answer; an agent may ask for fewer."""

    def settings(self) -> SamplingSettings:
        return SamplingSettings(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, max_tokens=self.max_tokens)


class ValidationSamplingConfig(_FrozenModel):
    """How it is sampled there. None = as `[sampling]` says."""

    temperature: float = Field(default=0.0, ge=0)
    """0.0 = greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    max_tokens: int | None = Field(default=None, gt=0)


class ValidationConfig(_FrozenModel):
    """How the policy is judged on held-out tasks."""

    every: int = Field(default=10, ge=0)
    """Steps between validations, beside one before the first step and one after the last; 0 = none at all."""
    tasks: int | None = None
    """Use the first so many validation tasks; None = all."""
    sampling: ValidationSamplingConfig = ValidationSamplingConfig()


class OutcomesConfig(_FrozenModel):
    """What becomes of a rollout that did not succeed: left out (`drop`), or trained with the reward its output earns (`train`)."""

    agent_error: Literal["drop", "train"] = "drop"
    timeout: Literal["drop", "train"] = "drop"
    context_overflow: Literal["drop", "train"] = "drop"
    infrastructure_error: Literal["drop"] = "drop"
    cancelled: Literal["drop"] = "drop"
    diverged: Literal["drop"] = "drop"
    max_failed_rewards: float = Field(default=0.25, ge=0, le=1)
    """The run stops where a reward fails, after all its tries, on more than this share of a step's (or a validation's) rollouts. Up to
    it, such rollouts are left out and counted (`rewards_failed`)."""

    def is_trained(self, outcome: Outcome) -> bool:
        return outcome is Outcome.SUCCEEDED or getattr(self, outcome.value) == "train"


class RuntimeConfig(_FrozenModel):
    """The Lightning Client: worker processes that run the agent."""

    workers: int = Field(default=2, ge=0)
    """Warm worker processes; 0 = none, others join with `lightningrl work`."""
    launcher: str = "local"
    """Where they run, by its plugin name: `local` = this machine, `ray` = over a Ray cluster."""
    launchers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings for one launcher alone, by its name; tables of launchers that do not run are left unread."""
    server_host: str = "127.0.0.1"
    """Address that the server of a training run listens on; `0.0.0.0` where workers of other machines take part."""
    server_port: int = Field(default=0, ge=0, lt=65536)
    """0 = any free one. Further servers take the ports after it."""
    servers: int = Field(default=1, ge=1, le=64)
    """Server processes; workers are spread over them. Above 1 with `store_url` alone."""
    concurrency: int = Field(default=1, ge=1)
    """Rollouts at a time in each worker; above 1 only for agents without threads or shared runtimes of their own."""
    environment: tuple[str, ...] = ()
    """Environment variables that agents get although the run has secrets in them: those that `judge`, `upstream` and `telemetry` name,
    `PGPASSWORD` and its like with a `store_url`, `WANDB_API_KEY` with its logger. All others they get anyway."""
    base_urls: tuple[Endpoint, ...] = ()
    """Model endpoints that the agent's own code names, beside OpenAI's and Anthropic's; calls to them go to the gateway."""
    timeout_s: float | None = Field(default=None, gt=0)
    """A rollout that takes longer ends as `timeout`. None = 120, or the time of eight answers of `sampling.max_tokens` where the policy's
    engine, measured at the start, is so slow that this is more."""
    max_attempts: int = Field(default=3, ge=1)
    """Tries at a rollout whose attempt ended in an infrastructure error."""

    @property
    def limit_s(self) -> float:
        """`timeout_s`, or what it is where nobody said and no engine was measured."""
        return 120.0 if self.timeout_s is None else self.timeout_s


class LoopConfig(_FrozenModel):
    """The training loop."""

    steps: int = Field(default=100, ge=0)
    """Updates of the policy, each from the rollouts of `tasks_per_step` tasks."""
    tasks_per_step: int = Field(default=16, ge=1)
    """More than there are: each step asks for some of them more than once, and a warning says so."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts per task, G."""
    dynamic_sampling: int = Field(default=0, ge=0)
    """DAPO's: a step takes groups until as many teach as it has tasks, of at most so many times as many further ones; those that teach
    nothing are left out. 0 = they stay what they are, rows without a gradient."""
    max_staleness: int = Field(default=0, ge=0)
    """Versions that the weights may be ahead of those that a rollout was sampled by. 0 = on-policy: nothing is out while a step is
    learned; n = rollouts of n more steps are."""
    asynchronous: bool = False
    """A step takes the groups that are finished first. One that has become older than `max_staleness` is left out and counted
    (`groups_stale`). False = groups are taken in the order of their tasks."""
    seed: int = 0
    """Of task order, sampling and minibatches. On the torch backend one seed gives one run, as far as rounding goes, unless
    `max_staleness` lets time decide which weights sample what."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """The newest so many, and the best by validation beside them."""
    keep_rollouts: int | None = Field(default=None, ge=1)
    """Steps whose rollouts stay in the store, the newest so many, and all since the oldest kept checkpoint: for runs of hundreds of
    thousands of rollouts. None = all. Curves, metrics and the record of steps stay; pages, X-ray and certificate see what is there."""
    patience: int | None = Field(default=None, ge=1)
    """Stop after so many validations in a row that are no better than the best; None = only `steps` and `minutes` count."""
    minutes: float | None = Field(default=None, gt=0)
    """Stop after so many minutes of training, validation and checkpoint included; None = only `steps` counts."""

    @pydantic.model_validator(mode="after")
    def _may_be_stale(self) -> Self:
        if self.asynchronous and not self.max_staleness:
            raise ValueError("asynchronous collection samples while weights change; set loop.max_staleness to 1 or more")
        return self


class Recipe(_FrozenModel):
    """One run: agent, tasks, policy, rewards, credit, loop, learner."""

    name: str = "run"
    """Name of its run folders; the time is put behind it."""
    agent: Reference
    """The agent's entry point; called with a task's input."""
    adapters: tuple[str, ...] = ()
    """Of the agent's framework, by plugin name (`lightningrl plugins`): `["langchain"]`. Calls are recorded without them."""
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
    store_url: str | None = None
    """A PostgreSQL database that keeps the run's rollouts, each run's in a schema of its own: `postgresql://user@host/name`, without a
    password. None = a file in the run folder."""
    loop: LoopConfig = LoopConfig()
    backend: str = "torch"
    """Trainer backend, by its plugin name."""
    learner: dict[str, Any] = Field(default_factory=dict)
    """Optimiser and loss settings, for whichever backend runs; one that it does not know is an error."""
    backends: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings for one backend alone, by its name; tables of backends that do not run are left unread."""
    loggers: tuple[str, ...] = ()
    """Beside metrics.jsonl: `tensorboard`, `wandb`, `trackio`."""
    folder: Path = Field(default=Path(), exclude=True)
    """Where relative references start; set by `load_recipe`."""

    @pydantic.field_validator("store_url")
    @classmethod
    def _is_postgresql(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "")
        query = dict(parse_qsl(parts.query))
        if url is None:
            return None
        if parts.password is not None or any(names_secret(name) and name != "sslkey" for name in query):
            raise ValueError("a recipe is copied into its run folder, so it names no password; set PGPASSWORD or write it to ~/.pgpass")
        if parts.scheme not in ("postgresql", "postgresql+psycopg") or not parts.path.strip("/"):
            raise ValueError("write 'postgresql://user@host/name', or leave it out: the store is then a file in the run folder")
        if "options" in query:
            raise ValueError("each run makes a schema of its own in the database; leave ?options= out")
        return url

    @pydantic.model_validator(mode="after")
    def _servers_share_a_store(self) -> Self:
        if self.runtime.servers > 1 and self.store_url is None:
            raise ValueError("runtime.servers is above 1, and SQLite has one; set store_url to a PostgreSQL database, or leave it at 1")
        return self

    @pydantic.model_validator(mode="after")
    def _policies_differ(self) -> Self:
        if self.policy.name in self.policies:
            raise ValueError(f"two policies are named {self.policy.name!r}; rename policies.{self.policy.name} or set policy.name")
        taken: dict[str, str] = {}
        for name, policy in self.policies.items():
            for role in policy.agents:
                if role in taken:
                    raise ValueError(f"role {role!r} is given to two policies, {taken[role]!r} and {name!r}; give it to one")
                taken[role] = name
        return self

    @pydantic.model_validator(mode="after")
    def _may_lose_patience(self) -> Self:
        if self.loop.patience is not None and not (self.tasks.validation and self.validation.every):
            lacking = "set validation.every above 0" if self.tasks.validation else "name held-out tasks: tasks.validation"
            raise ValueError(f"loop.patience counts validations, and there are none; {lacking}, or remove it")
        return self

    @property
    def all_policies(self) -> dict[str, PolicyConfig | OtherPolicyConfig]:
        """Every policy of the run by name, the one under `[policy]` first."""
        return {self.policy.name: self.policy, **self.policies}

    @property
    def withheld_variables(self) -> tuple[str, ...]:
        """Environment variables that are the run's own secrets, so that no agent's process gets them; `runtime.environment` lets some
        through."""
        upstreams = [] if self.upstream is None else [self.upstream, *self.upstream.models.values()]
        named = [
            *(asked.api_key_env for asked in (self.judge, *upstreams) if asked is not None),
            *(() if self.telemetry is None else self.telemetry.headers_env.values()),
            *(STORE_VARIABLES if self.store_url is not None else ()),
            *(variable for logger in self.loggers for variable in LOGGER_VARIABLES.get(logger, ())),
        ]
        return tuple(dict.fromkeys(name for name in named if name is not None and name not in self.runtime.environment))

    @property
    def validation_sampling(self) -> SamplingSettings:
        """How validation rollouts are sampled: `[validation.sampling]` before `[sampling]`."""
        said = self.validation.sampling.model_dump(exclude_none=True)
        return replace(self.sampling.settings(), **said)

    @property
    def reward_bounds(self) -> tuple[float, float]:
        """Least and most of the weighted sum of the rewards. One that says no `range` is taken to be in [0, 1]."""
        low = high = 0.0
        for reward in self.rewards.values():
            ends = sorted(reward.weight * end for end in reward.range or (0.0, 1.0))
            low, high = low + ends[0], high + ends[1]
        return low, high if high > low else low + 1.0

    @property
    def backend_options(self) -> dict[str, Any]:
        """What the chosen backend is given for `[policy]`."""
        return self.options_of(self.policy)

    def options_of(self, policy: PolicyConfig | OtherPolicyConfig) -> dict[str, Any]:
        """What the chosen backend is given for a policy: the policy's own `learner`, before the backend's table, before `[learner]`, before
        the loop's seed. What lies beside the recipe, a loss's file or a critic's model, is named by its whole path, for processes of any
        folder."""
        options = {"seed": self.loop.seed, **self.learner, **self.backends.get(self.backend, {}), **policy.learner}
        if isinstance(loss := options.get("loss"), str) and is_reference(loss):
            options["loss"] = absolute_reference(loss, self.folder)
        critic = options.get("critic")
        if isinstance(critic, Mapping) and critic.get("model") and (self.folder / str(critic["model"])).is_dir():
            options["critic"] = {**critic, "model": str((self.folder / critic["model"]).resolve())}
        return options

    def with_settings(self, settings: Mapping[str, Any]) -> Recipe:
        """A recipe with dotted keys replaced: `{"loop.steps": 5}`. Raises ConfigError."""
        return _all_right(*_set(self, settings))

    def frozen_text(self) -> str:
        """The recipe as JSON text, as kept in the run folder; what validation takes from `[sampling]` is written out."""
        data = self.model_dump(mode="json", fallback=_describe)
        sampling = self.validation_sampling
        data["validation"]["sampling"] = {name: getattr(sampling, name) for name in ValidationSamplingConfig.model_fields}
        return json.dumps(data, indent=2, sort_keys=True) + "\n"


def recipe_file(path: Path) -> Path:
    """The file that a recipe's name means: a folder's `recipe.toml`."""
    return path / "recipe.toml" if path.is_dir() else path


def load_recipe(path: Path, settings: Mapping[str, Any] | None = None) -> Recipe:
    """Read a `.toml` or `.py` recipe and apply `settings` (dotted keys). Raises ConfigError with file, key and remedy."""
    return _all_right(*read_recipe(path, settings or {}))


def read_recipe(source: Path | Recipe, settings: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """As `load_recipe`, less the keys that are wrong, with a sentence for each: what else is wrong can be looked for. Raises ConfigError
    where what is left is no recipe."""
    recipe, wrong = (source, []) if isinstance(source, Recipe) else _read(source)
    if not settings:
        return recipe, wrong
    try:
        recipe, more = _set(recipe, settings)
    except ConfigError as error:
        raise ConfigError(*wrong, *error.args) from None
    return recipe, [*wrong, *more]


def _all_right(recipe: Recipe, wrong: Sequence[str]) -> Recipe:
    if wrong:
        raise ConfigError(*wrong)
    return recipe


def _read(path: Path) -> tuple[Recipe, list[str]]:
    path, wrong = recipe_file(path), list[str]()
    if not path.is_file():
        raise ConfigError(f"no recipe at {str(path)!r}; give a .toml or .py file, or a folder with a recipe.toml")
    if path.suffix == ".py":
        recipe = _run_python(path)
    elif path.suffix == ".toml":
        try:
            data = _parse_toml(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe {str(path)!r} is not valid TOML: {error}") from error
        recipe, wrong = _validate(data, str(path))
    else:
        raise ConfigError(f"recipe {str(path)!r} ends in {path.suffix!r}; a recipe is a .toml or .py file")
    return recipe.model_copy(update={"folder": path.resolve().parent}), wrong


def _parse_toml(text: str) -> dict[str, Any]:
    """Raises TOMLDecodeError, also for what is nested deeper than anything in a recipe."""
    try:
        if LONG_KEY.search(text) is None and not is_deeper(data := tomllib.loads(text), DEEPEST):
            return data
    except RecursionError:
        pass
    raise tomllib.TOMLDecodeError(f"it is nested deeper than {DEEPEST} levels")


def _set(recipe: Recipe, settings: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    data = _values(recipe)
    for key, value in settings.items():
        if len(parts := key_parts(key)) > DEEPEST:
            raise ConfigError(f"setting {key[:40]!r}… has {len(parts)} parts; no key of a recipe is nested deeper than {DEEPEST} levels")
        _assign(data, parts, value, key)
    return _validate(data, "--set")


def parse_setting(text: str) -> tuple[str, Any]:
    """`"loop.steps=5"` → `("loop.steps", 5)`; the value is read as TOML, or as Python writes true and false, else as a plain string."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"setting {text!r} is not KEY=VALUE; write for example --set loop.steps=20")
    try:
        return key.strip(), _parse_toml(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), {"True": True, "False": False}.get(value.strip(), value)


def check_options(factory: Callable[..., Any], options: Mapping[str, Any], *, what: str, reserved: Sequence[str] = ()) -> None:
    """Raise ConfigError with those of `options` that `factory` does not take: a setting that nobody consumes is an error."""
    parameters = inspect.signature(factory).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [
        name
        for name, parameter in parameters.items()
        if name not in reserved and parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(*(f"{what} has no setting {name!r}; {key_hint(name, known, _all_keys())}" for name in unknown))


def _run_python(path: Path) -> Recipe:
    from lightningrl.loading import run_recipe_file

    recipe = getattr(run_recipe_file(path), "recipe", None)
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"recipe {str(path)!r} defines no `recipe = Recipe(...)`")
    return recipe


def _values(model: pydantic.BaseModel) -> dict[str, Any]:
    """Only what was set, objects kept as they are, so that `with_settings` can validate again."""
    values: dict[str, Any] = {}
    for name in model.model_fields_set:
        value = getattr(model, name)
        if isinstance(value, pydantic.BaseModel):
            value = _values(value)
        elif isinstance(value, dict):
            value = {key: _values(item) if isinstance(item, pydantic.BaseModel) else item for key, item in value.items()}
        values[name] = value
    return values


def _assign(data: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    for part in path[:-1]:
        below = data.get(part, {})
        if not isinstance(below, dict):
            raise ConfigError(f"setting {key!r}: {part!r} is a value, not a table; see `lightningrl train --help`")
        data[part] = dict(below)  # a table of options is the recipe's own, which stays as it is
        data = data[part]
    data[path[-1]] = value


def key_parts(key: str) -> list[str]:
    """Of a dotted key; a part that holds a dot stands in quotes, as in TOML: `policies."qwen2.5".model`."""
    if '"' not in key and "'" not in key:
        return key.split(".")
    try:
        table = _parse_toml(f"{key} = 0")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"setting {key!r} is no dotted key ({error}); quote the part that holds a dot") from None
    parts: list[str] = []
    while isinstance(table, dict):
        (part,) = table
        parts.append(part)
        table = table[part]
    return parts


def _validate(data: Mapping[str, Any], source: str) -> tuple[Recipe, list[str]]:
    """The recipe less the keys that are wrong, and a sentence for each. Raises ConfigError where what is left is none."""
    try:
        return Recipe.model_validate(data), []
    except pydantic.ValidationError as error:
        wrong = error.errors()
    slips = _learner_slips(data)
    sentences = [*map(_sentence, wrong), *slips.values()]
    left: dict[str, Any] = _without(_tables(data), wrong)
    if slips:
        left["learner"] = {name: value for name, value in left["learner"].items() if name not in slips}
    try:
        recipe = Recipe.model_validate(left)
    except pydantic.ValidationError as error:
        sentences += [_sentence(one) for one in error.errors() if one["type"] == "value_error"]  # of keys that are right by themselves
        recipe = None
    sentences = [f"{source}: {sentence}" for sentence in dict.fromkeys(sentences)]
    if recipe is None:
        raise ConfigError(*sentences)
    return recipe, sentences


def _tables(data: Any) -> Any:
    """Copies of tables; values are the same."""
    return {name: _tables(value) for name, value in data.items()} if isinstance(data, dict) else data


def _without(data: dict[str, Any], wrong: Sequence[ErrorDetails]) -> dict[str, Any]:
    """Less the values that are wrong, and tables that nobody knows. Others stay, and so does what is wrong with them: what stands in a
    table may be what the rest of the recipe speaks of."""
    for error in wrong:
        table, is_unknown = data, error["type"] == "extra_forbidden"
        for depth, part in enumerate(error["loc"], start=1):
            below = table.get(str(part))
            if not isinstance(below, dict) or (is_unknown and depth == len(error["loc"])):
                table.pop(str(part), None)
                break
            table = below
    return data


def _sentence(error: ErrorDetails) -> str:
    """What is wrong, and what to write."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {key_hint(str(error['loc'][-1]), _known_keys(error['loc'][:-1]), _all_keys())}"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
    if error["type"] in {"missing", "too_short"}:
        return f"{key!r} is missing; {MISSING.get(key, 'add it')}"
    got = "" if isinstance(error["input"], dict | list) else f", got {error['input']!r}"
    return f"{key!r}: {error['msg']}{got}"[:400]


def _learner_slips(data: Mapping[str, Any]) -> dict[str, str]:
    """Settings of the learner that surely are another name's, with a sentence for each. Only a backend knows all of its own, and it is
    not asked where nothing is left of a recipe."""
    learner = data.get("learner")
    names = [name for name in learner if name in ELSEWHERE and name not in LEARNER] if isinstance(learner, Mapping) else []
    return {name: f"unknown key {f'learner.{name}'!r}; {key_hint(name, sorted(LEARNER), _all_keys())}" for name in names}


@cache
def _all_keys() -> tuple[str, ...]:
    """Every key that has its place in a recipe, with its tables."""
    return tuple(_keys_of(Recipe, ""))


def _keys_of(model: type[pydantic.BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, pydantic.BaseModel):
            yield from _keys_of(field.annotation, f"{prefix}{name}.")
        elif name != "folder":
            yield f"{prefix}{name}"


def _known_keys(location: Sequence[int | str]) -> list[str]:
    """Field names of the table at `location`, for the hint."""
    model: Any = Recipe
    for part in location:
        if isinstance(part, int):  # one of a list of tables
            continue
        if not (inspect.isclass(model) and issubclass(model, pydantic.BaseModel)) or part not in model.model_fields:
            break
        annotation = model.model_fields[str(part)].annotation
        arguments = [argument for argument in getattr(annotation, "__args__", ()) if inspect.isclass(argument)]
        model = arguments[-1] if arguments else annotation
    return list(model.model_fields) if inspect.isclass(model) and issubclass(model, pydantic.BaseModel) else []
