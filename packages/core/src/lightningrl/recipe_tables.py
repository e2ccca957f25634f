"""The tables of a recipe: agents' tasks, policies, endpoints, rewards, credit, sampling, workers.

Unknown keys are errors here; options that the chosen part does not consume are errors when that part is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit, urlunsplit

import pydantic
from pydantic import Field

from lightningrl.credentials import Address, Endpoint, Variable, read_key
from lightningrl.loading import describe, name_of_path
from lightningrl.types import Outcome, SamplingSettings

__all__ = [
    "POLICY_NAME",
    "CallRule",
    "CreditConfig",
    "IntermediateConfig",
    "JudgeConfig",
    "NamedUpstreamConfig",
    "OtherPolicyConfig",
    "OutcomesConfig",
    "PolicyConfig",
    "Reference",
    "RewardConfig",
    "RoleConfig",
    "RuntimeConfig",
    "SamplesConfig",
    "SamplingConfig",
    "SourceConfig",
    "SplitConfig",
    "Table",
    "TasksConfig",
    "TelemetryConfig",
    "UpstreamConfig",
    "UpstreamModelConfig",
    "ValidationConfig",
    "ValidationSamplingConfig",
]

POLICY_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Policies are addressed by it, and it names their folder in a checkpoint."""


class Table(pydantic.BaseModel):
    """A table of a recipe: frozen, and without keys that nobody knows."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, hide_input_in_errors=True
    )


Reference = Annotated[
    str | Any,
    pydantic.BeforeValidator(name_of_path),
    pydantic.PlainSerializer(describe),
]
"""`"file.py:name"`, `"package.module:name"`, an installed plugin's name, or the object itself in a Python recipe."""


class SplitConfig(Table):
    """A set of tasks of a source (`tasks.use`)."""

    seed: int = 0
    """Seed of a source that generates tasks; one that has fixed tasks may order them by it."""
    count: int | None = Field(default=None, ge=1)
    """Tasks to take; None = all of a source that has an end."""
    split: str | None = None
    """Name of the set, as the source calls it; None = `train` or `validation`, by its key."""


class SourceConfig(Table):
    """One of several task sources in a run."""

    use: Reference
    """A source by its plugin's name, or `"file.py:Name"`."""
    share: float = Field(default=1.0, gt=0)
    """Share of the tasks, beside the shares of the other sources."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of what `use` names."""


class TasksConfig(Table):
    """Tasks: files, data sets or callables (docs/how-to/tasks.md), or a task source (docs/how-to/task-sources.md)."""

    train: Annotated[SplitConfig | Reference, Field(union_mode="left_to_right")]
    """`"data.jsonl"` (`.json`, `.csv`, `.parquet`), `"hf:NAME:SPLIT"`, `"data.py:load"`; a table with `use`."""
    validation: Annotated[SplitConfig | Reference | None, Field(union_mode="left_to_right")] = None
    """Held-out tasks, which nothing is trained on; None = no validation."""
    use: Reference | None = None
    """A task source by its plugin's name, or `"file.py:Name"`; then `train = { seed = 1, count = 2000 }`."""
    sources: dict[Annotated[str, Field(pattern=POLICY_NAME)], SourceConfig] = Field(default_factory=dict)
    """In place of `use`: several sources by name. Ids of their tasks begin with it: `sums/17`."""
    input: str | None = None
    """Column that the agent is called with; None = the first of `input`, `question`, `prompt`."""
    answer: str | None = None
    """Column of the reference answer, for rewards; None = `answer`, where there is one."""
    id: str | None = None
    """Column that names a task; None = `id`, else tasks are numbered. All other columns are metadata."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the source, or of both callables."""

    @pydantic.model_validator(mode="after")
    def _is_one_form(self) -> Self:
        if self.sources and (self.use is not None or self.options):
            raise ValueError("sources are several, each with `use` and `options` of its own; move these there")
        for name, value in (("train", self.train), ("validation", self.validation)):
            if isinstance(value, Mapping):
                raise ValueError(f"{name} takes seed, count (1 or more) and split, got {dict(value)!r}"[:300])
            if value is not None and isinstance(value, SplitConfig) is not bool(self.all_sources):
                table = "{ seed = 1, count = 200 }"
                raise ValueError(f"{name} is a table, {table}, where `use` names a task source, and nowhere else")
        if self.all_sources and (self.input or self.answer or self.id):
            raise ValueError("input, answer and id name columns of files, and a source has none; remove them")
        return self

    @property
    def all_sources(self) -> dict[str, SourceConfig]:
        """Sources by name; one alone has the empty name, files have none."""
        return self.sources if self.use is None else {"": SourceConfig(use=self.use, options=self.options)}


class CallRule(Table):
    """A rule for which calls are training data: the first of `policy.calls` whose conditions all hold decides. Where
    none does, `trained_agents` decides, and side calls (titles, commit messages) are left out."""

    role: str | None = None
    """Role of the call; naming one takes what lies below it too."""
    system: str | None = None
    """Shell-style pattern of the call's first system message: `"*title of this conversation*"`."""
    offers_tools: bool | None = None
    """True = calls that offer the policy tools, false = those that offer none."""
    train: bool = True
    """False = such calls are recorded and shown, and get no gradient."""


class _Policy(Table):
    model: str
    """Hub name, `package:NAME`, or a folder or GGUF file (relative to the recipe)."""
    trainable: bool = True
    """False = it is served and its calls are recorded; its weights stay as they are, bit for bit."""
    trained_agents: tuple[str, ...] | None = None
    """Roles whose calls are trained; None = all of them."""
    calls: tuple[CallRule, ...] = ()
    """Rules before `trained_agents`: `[{ train = true }]` takes side calls in, too. See `[[policy.calls]]`."""
    renderer: str = "auto"
    """Renderer of the `renderers` library; `auto` picks one by the model's name, else its chat template."""
    chat_template: str | None = None
    """In place of the model's own: a Jinja file beside the recipe, or `hermes` (tools for models in ChatML)."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Switches of the chat template: `{ enable_thinking = false }`. One that the template never reads is an error."""
    learner: dict[str, Any] = Field(default_factory=dict)
    """Settings for this policy alone; they go before those of `[learner]`."""


class PolicyConfig(_Policy):
    """The model being trained. It answers every call that no other policy is given."""

    name: str = Field(default="policy", pattern=POLICY_NAME)
    """Its name in metrics, in checkpoints, and in calls that ask for it by name."""
    hosted_tools: Literal["refuse", "drop"] = "refuse"
    """Calls that offer tools of a provider's servers (web search, …): refuse them, or drop those tools and warn."""


class OtherPolicyConfig(_Policy):
    """One more policy of the run, with weights, engine and optimiser of its own. It answers calls to its name."""

    agents: tuple[str, ...] = ()
    """Roles whose calls it answers as well, whatever model they ask for."""


class RoleConfig(Table):
    """Patterns (shell-style, both must fit) that give a call its role. With neither, the agent names it (`role`)."""

    model: str | None = None
    """Pattern of the model that the call asks for: `"gpt-4o*"`."""
    system: str | None = None
    """Pattern of the first system message: `"You are a critic*"`."""


class UpstreamModelConfig(Table):
    """Where calls to one model go. What is left out is the upstream's."""

    base_url: Address | None = None
    """With its version: `https://api.openai.com/v1`."""
    api_key_env: Variable | None = None
    """Environment variable that has the key; the key itself stands in no file. None = it asks for none."""


class NamedUpstreamConfig(UpstreamModelConfig):
    """Where calls to one model go, and what it is called there."""

    model: str | None = None
    """None = as the agent calls it."""


class UpstreamConfig(UpstreamModelConfig):
    """The user's own provider, for embeddings and models that are no policies: calls are recorded, never trained."""

    models: dict[str, NamedUpstreamConfig] = Field(default_factory=dict[str, NamedUpstreamConfig])
    """Models, by name or pattern (`"gpt-5*"`), that it answers although a default policy serves every other name."""


class TelemetryConfig(Table):
    """Where the spans that reach the server go as well, and those of the trainer's own steps."""

    forward: Address | None = None
    """The user's own collector, OTLP over HTTP: `http://collector:4318/v1/traces`."""
    headers_env: dict[Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")], Variable] = Field(
        default_factory=dict[str, str]
    )
    """Request headers, each with the environment variable that has its value; the value stands in no file."""

    def target(self, environment: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
        """The collector's whole address and the request headers; None where `forward` is not set. Raises ConfigError
        for a header whose variable is not set, or holds what no header can carry."""
        if self.forward is None:
            return None
        headers = {
            name.lower(): read_key(
                variable, environment, where=f"telemetry.headers_env.{name!r}", what="the header's value"
            )
            for name, variable in self.headers_env.items()
        }
        parts = urlsplit(self.forward)
        return urlunsplit(parts._replace(path=parts.path if parts.path.strip("/") else "/v1/traces")), headers


class JudgeConfig(Table):
    """An OpenAI-compatible endpoint that credit asks about finished rollouts. Its calls are recorded, never trained."""

    base_url: Address
    """With its version: `https://api.openai.com/v1`."""
    model: str
    """The name that the endpoint knows it by."""
    api_key_env: Variable | None = None
    """Environment variable that has the key; the key itself stands in no file. None = it asks for none."""
    concurrency: int = Field(default=8, ge=1)
    """Calls under way at a time."""
    retries: int = Field(default=4, ge=0)
    """Further tries where no answer comes, it is overloaded or it limits rates."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that one call may take."""
    max_calls: int = Field(default=64, ge=1)
    """Most calls for one rollout; those that a judge ranks together have theirs together."""
    max_tokens: int = Field(default=100_000, ge=1)
    """Most tokens of prompts and answers for one rollout, as the endpoint counts them."""


class RewardConfig(Table):
    """One terminal reward. A recipe may have several; their weighted sum is the return."""

    use: Reference
    """A function of (task, output, trajectory), sync or async: `"reward.py:right"`, or one of the library by name."""
    weight: float = 1.0
    """In the sum; 0.0 = it is computed and reported, and teaches nothing."""
    agents: tuple[str, ...] | None = None
    """Roles that this reward pays; None = all. What others do never earns it."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that one try may take."""
    retries: int = Field(default=2, ge=0)
    """Further tries where it raises, takes too long or returns NaN: after half a second, a second, two …"""
    concurrency: int = Field(default=16, ge=1)
    """Calls at a time: an async reward's on the loop, a sync one's in as many processes as are kept busy."""
    range: tuple[float, float] | None = None
    """Least and most that it may return; another value is a failure. None = any; for `reported` 0 to 1."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of what `use` names."""


class IntermediateConfig(Table):
    """One automatic intermediate reward (AIR). Its values are turn rewards, which credit per turn adds up."""

    use: Reference
    """One of the library by its name (docs/reference/intermediate-rewards.md), or your own."""
    weight: float = 1.0
    """0.0 = switched off: it adds nothing."""
    form: Literal["plain", "potential"] = "plain"
    """`potential`: calls are paid its change by the credit's γ; no policy gains by it (Ng, Harada & Russell 1999)."""
    range: tuple[float, float] | None = None
    """Least and most that it may return, before form and weight. None = any; for `reported` -1 to 1."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of what `use` names."""


class CreditConfig(Table):
    """The method that spreads a return over calls."""

    use: Reference = "grpo"
    """One of docs/explanation/credit/index.md, or your own."""
    compare: Literal["group", "role"] = "group"
    """Calls that a call is compared with: its group's, or those of its role there (Dr. MAS, arXiv 2602.08847)."""
    per_reward: bool = False
    """Compare each terminal reward by itself, then add them by weight; with `whiten`: GDPO (arXiv 2601.05242)."""
    whiten: bool = False
    """Give the step's trained tokens together mean 0 and deviation 1 (REINFORCE++, arXiv 2501.03262; its KL in the
    reward is `learner.kl_estimator = "k1"`)."""
    max_tokens: int = Field(default=4_000_000, ge=1)
    """Most tokens that policies and critics may read for the evidence of one rollout."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of what `use` names."""


class SamplesConfig(Table):
    """The rows that scored trajectories become."""

    rows: Literal["call", "merged"] = "merged"
    """`merged`: calls that continue each other's tokens share a row, computed once. `call`: each has its own."""
    aggregation: Literal["rollout_mean", "token_mean", "constant"] = "token_mean"
    """Equal weight in a step's loss: of each trained token, each rollout, or each token over `constant_length`."""
    constant_length: int | None = None
    """Tokens per rollout that `constant` (Dr. GRPO) divides by."""


class SamplingConfig(Table):
    """Sampling of the policy. Overrides what the agent asks for: recorded logprobs are those of the training policy."""

    temperature: float = Field(default=1.0, ge=0)
    """0.0 = greedy, which explores nothing."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Least share of probability that is sampled from; 1.0 = all."""
    top_k: int = Field(default=0, ge=0)
    """So many likeliest tokens are sampled from; 0 = all."""
    max_tokens: int = Field(default=256, gt=0)
    """Most tokens of one answer; an agent may ask for fewer."""

    def settings(self) -> SamplingSettings:
        return SamplingSettings(**self.model_dump())


class ValidationSamplingConfig(Table):
    """Sampling in validation. None = as `[sampling]` says."""

    temperature: float = Field(default=0.0, ge=0)
    """0.0 = greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    max_tokens: int | None = Field(default=None, gt=0)


class ValidationConfig(Table):
    """Validation of the policy on held-out tasks."""

    every: int = Field(default=10, ge=0)
    """Steps between validations, beside one before the first step and one after the last; 0 = none at all."""
    tasks: int | None = None
    """Use the first so many validation tasks; None = all."""
    go_back: bool = True
    """True = where a validation falls below the best, by more than its 95 % interval over tasks, the policy goes back
    to the best weights, and learns on at half the rate; not on verl."""
    sampling: ValidationSamplingConfig = ValidationSamplingConfig()


class OutcomesConfig(Table):
    """Failures: those that the policy caused are trained, or it would learn to break what is hard; those that the world
    caused are run again (`runtime.max_attempts`) and teach nothing."""

    agent_error: Literal["lowest", "reward"] = "lowest"
    """`lowest`: it earns the least that the recipe's rewards can give. `reward`: they are asked, and see no output."""
    timeout: Literal["lowest", "reward"] = "lowest"
    context_overflow: Literal["lowest", "reward"] = "lowest"
    infrastructure: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")], ...] = ()
    """Exceptions of the agent that the world causes: `["psycopg.OperationalError"]`; beside failures of the network,
    and hosts that limit rates or are overloaded."""
    max_failed_rewards: float = Field(default=0.05, ge=0, le=1)
    """Share of a step's (or a validation's) rollouts on which rewards may fail, one at least; above it the run stops.
    0 = none may."""

    @pydantic.field_validator("agent_error", "timeout", "context_overflow", mode="before")
    @classmethod
    def _is_no_drop(cls, value: object) -> object:
        if value == "drop":
            raise ValueError(
                "a failure that the policy caused is trained; write 'lowest' or 'reward', and name exceptions that the "
                "world causes in outcomes.infrastructure"
            )
        return value

    def is_trained(self, outcome: Outcome) -> bool:
        """True where the rollout has a reward."""
        return outcome is Outcome.SUCCEEDED or outcome.is_agents_own

    def asks_rewards(self, outcome: Outcome) -> bool:
        """True where the rewards are asked for it; else it earns the lowest, or nothing."""
        return outcome is Outcome.SUCCEEDED or (outcome.is_agents_own and getattr(self, outcome.value) == "reward")


class RuntimeConfig(Table):
    """The Lightning Client: worker processes that run the agent."""

    workers: int = Field(default=2, ge=0)
    """Warm worker processes; 0 = none, others join with `lightningrl work`."""
    launcher: str = "local"
    """Where they run, by its plugin name: `local` = this machine, `ray` = over a Ray cluster."""
    launchers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings for one launcher alone, by its name; tables of launchers that do not run are left unread."""
    server_host: str = "127.0.0.1"
    """Address that the server of a run listens on; `0.0.0.0` where workers of other machines take part."""
    server_port: int = Field(default=0, ge=0, lt=65536)
    """0 = any free one. Further servers take the ports after it."""
    servers: int = Field(default=1, ge=1, le=64)
    """Server processes; workers are spread over them. Above 1 with `store_url` alone."""
    concurrency: int = Field(default=1, ge=1)
    """Rollouts at a time in each worker; above 1 only for agents without threads or shared runtimes of their own."""
    environment: tuple[str, ...] = ()
    """Variables with secrets (of `judge`, `upstream`, `telemetry`, PostgreSQL, loggers) that agents get anyway."""
    base_urls: tuple[Endpoint, ...] = ()
    """Model endpoints that the agent's own code names, beside OpenAI's and Anthropic's; calls to them come here."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds after which a rollout ends as `timeout`. None = 120, or eight longest answers of a slow engine."""
    max_attempts: int = Field(default=3, ge=1)
    """Tries at a rollout whose attempt ended in an infrastructure error."""

    @property
    def limit_s(self) -> float:
        """`timeout_s`, or its default where no engine was measured."""
        return 120.0 if self.timeout_s is None else self.timeout_s
