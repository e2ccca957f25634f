"""The settings that every trainer backend of ours has, and what a backend with such settings can do. Imports no
torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import pydantic
from pydantic import Field
from pydantic_core import ErrorDetails

from lightningrl.backends import Capabilities
from lightningrl.errors import ConfigError
from lightningrl.loading import is_reference
from lightningrl.recipe_keys import check_options
from lightningrl_torch.losses import LOSSES
from lightningrl_torch.rates import format_rate

__all__ = [
    "AtLeast0",
    "Count",
    "LearnerSettings",
    "LoraSettings",
    "SequenceMask",
    "SettingsTable",
    "Whole",
    "declare",
]

AtLeast0 = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, strict=True)]
Whole = Annotated[int, Field(ge=0, strict=True)]
_Ratio = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
_Beta = Annotated[float, Field(ge=0, lt=1, strict=True)]


class SettingsTable(pydantic.BaseModel):
    """A frozen table of settings."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class LoraSettings(SettingsTable):
    """Low-rank adapters instead of full fine-tuning (Hu et al. 2021)."""

    rank: Whole = 16
    """0 = none."""
    alpha: AtLeast0 | None = None
    """None = twice the rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the modules that get adapters."""

    @property
    def scale(self) -> float:
        """`alpha`, or what it is where nobody said."""
        return 2 * self.rank if self.alpha is None else self.alpha


class SequenceMask(SettingsTable):
    """Calls that are left out whole, by their tokens' ratios π_before / π_rollout."""

    geometric: tuple[_Ratio, _Ratio] | None = None
    """Bounds of the geometric mean over a call's tokens: 0.99 and 1.01 for small differences. None = no such mask."""
    outlier: tuple[_Ratio, _Ratio] | None = None
    """Bounds of every token's ratio: a call with one outside is left out; 0.0001 and 100. None = no such mask."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> SequenceMask:
        if self.geometric is None and self.outlier is None:
            raise ValueError(
                "sequence_mask masks nothing; give bounds: geometric = [0.99, 1.01], or outlier = [0.0001, 100.0]"
            )
        for name in ("geometric", "outlier"):
            _check_bounds(f"sequence_mask.{name}", getattr(self, name))
        return self


class LearnerSettings(SettingsTable):
    """Keyword parameters that the torch and the verl backend share, with the same meaning. Raises ConfigError for
    values that cannot be."""

    policy: str
    """Hub name or folder of a transformers causal language model with tokenizer and chat template."""
    name: str | None = None
    """Name of the policy in the run; None = `policy`."""
    seed: int = 0
    """Seed of sampling (each call of a rollout has its own, drawn from it), minibatch order and LoRA's start."""
    context_length: Annotated[int, Field(ge=2, strict=True)] | None = None
    """Most tokens of prompt and completion together; None = the model's."""

    learning_rate: AtLeast0 | Literal["auto"] | None = None
    """AdamW's. None = the usual one of what learns and of the policy's size (docs/how-to/laptop.md has the table): 2e-6
    for all weights of 135 million parameters, 3e-4 for adapters. "auto" = that, confirmed or moved by a probe on the
    first step's own rows, before its update."""
    warmup_steps: Whole = 0
    """Over which the learning rate rises from 0."""
    total_steps: Count | None = None
    """Where a schedule that is not `constant` ends; it needs it."""
    minimum_factor: AtLeast0 = 0.0
    """End of the schedule, as a fraction of the learning rate."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    """AdamW's."""
    weight_decay: AtLeast0 = 0.0
    """AdamW's, on matrices alone."""
    max_grad_norm: AtLeast0 = 1.0
    """The gradient is scaled down to this norm; 0 = never."""

    loss: str = "ppo_clip"
    """`ppo_clip`, `gspo` (one ratio a call), `cispo` (clipped weights), `reinforce` (no ratio), or your own:
    `"file.py:loss"`, see docs/reference/losses.md."""
    clip_low: AtLeast0 | None = None
    """See `clip_high`."""
    clip_high: AtLeast0 | None = None
    """The ratio to the rollout policy counts within 1 - clip_low … 1 + clip_high. None = the loss's own: `ppo_clip` 0.2
    and 0.2, `gspo` 0.0003 and 0.0004, `cispo` 1 (no lower bound) and 4."""
    loss_options: dict[str, Any] = {}
    """Keyword parameters of a loss of your own; `dual_clip` of `ppo_clip` (3 in verl)."""
    kl_coef: AtLeast0 = 0.0
    """Weight of the KL to the starting policy; 0 = no reference is kept."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """`k3` and `k2`: a term of the loss, with the gradient of the forward KL(π_ref ‖ π_θ), as in GRPO, and of the
    reverse KL(π_θ ‖ π_ref). `k1`: in the reward (PPO, REINFORCE++): each token earns -kl_coef · log(π_θ / π_ref) of
    itself and of all that came of it, before `credit.whiten`; the reverse KL of the whole rollout. Not on verl."""
    importance_cap: AtLeast0 | None = None
    """A number: ratios are to the policy before the step, recomputed, and tokens are weighted by min(π_before /
    π_rollout, importance_cap): for rollouts of older versions or of an engine that computes differently. 0: never,
    ratios are to the rollout logprobs. None: on torch, with `loop.max_staleness`, 2 in steps that have tokens of older
    versions; else as 0."""
    importance_mask: tuple[_Ratio, _Ratio] | None = None
    """In place of `importance_cap` two numbers: tokens are weighted by π_before / π_rollout where it lies within them,
    and left out where it does not (IcePop, arXiv 2510.18855: 0.5 and 5)."""
    sequence_mask: SequenceMask | None = None
    """A table with `geometric`, `outlier` or both, beside the two above or alone: a call is left out whole where the
    geometric mean of its tokens' π_before / π_rollout, or any token's, lies outside the bounds. None = no call is."""
    entropy_coef: AtLeast0 = 0.0
    """Weight of the policy's entropy, which is added to what is maximised; 0 = no such term."""
    minibatches: Count = 1
    """Optimiser updates in an epoch."""
    epochs: Count = 1
    """Times that a step's rows are learned from."""
    lora: LoraSettings | None = None
    """A table with any of `rank`, `alpha`, `target_modules`, or true: adapters learn; false: all weights do. None = all
    weights, or, where the policy is on a CPU and has 250 million parameters or more, adapters."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            raise ConfigError(_sentence(error.errors()[0], type(self))) from None

    @pydantic.field_validator("lora", mode="before")
    @classmethod
    def _as_table(cls, lora: Any) -> Any:
        return {True: {}, False: {"rank": 0}}[lora] if isinstance(lora, bool) else lora

    @pydantic.model_validator(mode="after")
    def _check(self) -> LearnerSettings:
        schedule = getattr(self, "schedule", "constant")
        if schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule {schedule!r} needs to know where it ends; set total_steps")
        if self.kl_estimator != "k3" and not self.kl_coef:
            raise ValueError(f"kl_estimator is {self.kl_estimator!r} and kl_coef is 0, so there is no KL; set kl_coef")
        if self.importance_mask is not None:
            if self.importance_cap:
                raise ValueError("importance_cap and importance_mask correct the same ratio; remove one of them")
            _check_bounds("importance_mask", self.importance_mask)
        if self.loss in LOSSES:
            check_options(LOSSES[self.loss], self.loss_arguments, what=f"loss {self.loss!r}", reserved=("batch",))
        elif not is_reference(self.loss):
            raise ValueError(
                f"loss is {self.loss!r}; choose {', '.join(map(repr, LOSSES))}, or your own: 'file.py:loss'"
            )
        return self

    @property
    def adapters(self) -> LoraSettings | None:
        """Adapters that learn; None = all weights do."""
        return self.lora if self.lora is not None and self.lora.rank else None

    @property
    def has_kl_loss(self) -> bool:
        """True if the loss has a KL to the starting policy; False also where it is in the reward."""
        return self.kl_coef > 0 and self.kl_estimator != "k1"

    @property
    def is_corrected(self) -> bool:
        """True if ratios are to the policy before the step, recomputed, and tokens weighted, or calls left out, by how
        much likelier it made them."""
        return bool(self.importance_cap) or self.importance_mask is not None or self.sequence_mask is not None

    @property
    def importance_arguments(self) -> dict[str, Any]:
        """Arguments of `losses.weigh_tokens` that the recipe names."""
        bounds = {"geometric": None, "outlier": None} if self.sequence_mask is None else dict(self.sequence_mask)
        named = {"cap": self.importance_cap or None, "mask": self.importance_mask, **bounds}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def loss_arguments(self) -> dict[str, Any]:
        """Arguments of the loss beside its tokens."""
        clips = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return {name: value for name, value in clips.items() if value is not None} | self.loss_options

    def describe(self, *, parameters: int, trained: int, dtype: str, where: str, rate: str | None = None) -> str:
        """A line that says what learns; `where`: the threads or devices; `rate`: the learning rate in other words."""
        learns = (
            "all learn"
            if self.adapters is None
            else f"LoRA {self.adapters.rank} ({100 * trained / parameters:.2g} %) learns"
        )
        if rate is None:
            rate = format_rate(self.learning_rate) if isinstance(self.learning_rate, float) else self.learning_rate
        return f"{parameters:,} parameters, {learns}, lr {rate}, {dtype}, {where}"


def _check_bounds(name: str, bounds: tuple[float, float] | None) -> None:
    if bounds is not None and bounds[0] > bounds[1]:
        low, high = bounds
        raise ValueError(f"{name} keeps ratios from {low:g} to {high:g}, which are none; put the lower bound first")


def declare(
    settings: type[LearnerSettings], *, several_policies: bool, services: frozenset[str] = frozenset()
) -> Capabilities:
    """Capabilities of a backend with these settings: read off the table of losses and the fields."""
    fields = settings.model_fields
    return Capabilities(
        losses=frozenset(LOSSES),
        own_losses=True,
        devices=frozenset(get_args(fields["device"].annotation)) - {"auto"},
        lora="lora" in fields,
        reference_kl="kl_coef" in fields,
        critic="critic" in fields,
        several_policies=several_policies,
        services=services,
    )


def _sentence(error: ErrorDetails, table: type[pydantic.BaseModel]) -> str:
    """Which setting, what it is, and what it may be."""
    where, also = error["loc"], ""
    if "learning_rate" in where[:-1]:  # of the union's members the number's fault is told
        where, also = where[:-1], " or 'auto'"
    *above, name = where or ("",)
    key, kind = ".".join(map(str, where)), error["type"]
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind == "extra_forbidden":
        inner = table.model_fields[str(above[0])].annotation if above else table
        names = next(
            model
            for model in (inner, *get_args(inner))
            if isinstance(model, type) and issubclass(model, pydantic.BaseModel)
        ).model_fields
        return f"{above[-1] if above else 'the learner'} has no setting {name!r}; it takes: {', '.join(sorted(names))}"
    if kind == "missing":
        return f"setting {key!r} is missing; add it"
    if kind == "model_type":
        return f"{key} is {error['input']!r}; write a table [learner.{key}]" + (
            ", or true or false" if key == "lora" else ""
        )
    remedy = error["msg"].replace("Input should be", "choose" if kind == "literal_error" else "use")
    if kind == "greater_than_equal":
        remedy = f"use a number of at least {error['ctx']['ge']:g}"
    if kind.startswith(("bool", "int_")):
        remedy = "use true or false" if kind.startswith("bool") else "use a whole number"
    return f"{key} is {error['input']!r}; {remedy}{also}"
