"""What an unknown key of a recipe was meant to be (a name that other trainers use, a key of another table, a slip of the pen), and what
installs a missing package."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

__all__ = ["key_hint", "missing_hint"]

ELSEWHERE: Final[Mapping[str, str]] = {
    "adam_beta1": "learner.betas",
    "adam_beta2": "learner.betas",
    "ahead": "loop.max_staleness",
    "base_model": "policy.model",
    "batch_size": "loop.tasks_per_step",
    "beta": "learner.kl_coef",
    "bf16": "learner.dtype",
    "clip_range": "learner.clip_low",
    "cliprange": "learner.clip_low",
    "cliprange_value": "learner.critic.clip",
    "ent_coef": "learner.entropy_coef",
    "entropy_coeff": "learner.entropy_coef",
    "epsilon": "learner.clip_low",
    "epsilon_high": "learner.clip_high",
    "eval_steps": "validation.every",
    "fp16": "learner.dtype",
    "kl_beta": "learner.kl_coef",
    "loss_type": "samples.aggregation",
    "lr": "learner.learning_rate",
    "lr_scheduler_type": "learner.schedule",
    "max_failed": "outcomes.max_failed_rewards",
    "max_completion_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "max_steps": "loop.steps",
    "mini_batch_size": "learner.minibatches",
    "model_name": "policy.model",
    "model_name_or_path": "policy.model",
    "num_epochs": "loop.steps",
    "num_generations": "loop.group_size",
    "num_iterations": "learner.epochs",
    "num_rollouts": "loop.group_size",
    "num_train_epochs": "loop.steps",
    "num_workers": "runtime.workers",
    "per_device_train_batch_size": "loop.tasks_per_step",
    "ppo_epochs": "learner.epochs",
    "report_to": "loggers",
    "reward_funcs": "rewards",
    "rollouts_per_task": "loop.group_size",
    "save_steps": "loop.checkpoint_every",
    "save_total_limit": "loop.keep_checkpoints",
    "scale_rewards": "credit.use",
    "train_batch_size": "loop.tasks_per_step",
    "vf_coef": "learner.critic.coefficient",
    "warmup_ratio": "learner.warmup_steps",
}
"""Names that TRL, verl and others use, and where the same is said here."""
LEARNER: Final = frozenset(
    {"betas", "clip_high", "clip_low", "context_length", "device", "dtype", "epochs", "gradient_checkpointing", "kl_coef"}
    | {"learning_rate", "lora", "loss", "max_grad_norm", "minibatches", "schedule", "warmup_steps", "weight_decay"}
)
"""Settings that a trainer backend usually takes."""

EXTRAS: Final[Mapping[str, frozenset[str]]] = {
    "plot": frozenset({"matplotlib"}),
    "server": frozenset(
        {"httptools", "jinja2", "jsonschema", "prometheus_client", "renderers", "sqlalchemy", "starlette", "tokenizers", "transformers"}
        | {"uvicorn", "uvloop", "websockets"}
    ),
}
"""What each extra of the core brings, by the names of import."""


def missing_hint(module: str) -> str | None:
    """What installs a module that a bare `lightningrl` lacks; None where no extra of ours brings it."""
    package = module.partition(".")[0]
    for extra, brings in EXTRAS.items():
        if package in brings:
            return f"{package!r} is not installed; it comes with: pip install 'lightningrl[{extra}]'"
    return None


def key_hint(name: str, known: Sequence[str], elsewhere: Iterable[str] = ()) -> str:
    """What to write instead of `name` where `known` may stand; `elsewhere`: dotted keys of other tables."""
    there = ELSEWHERE.get(name)
    if there is not None and there.rpartition(".")[2] in known:
        return f"did you mean {there.rpartition('.')[2]!r}?"
    if there is None and name in LEARNER and name not in known:
        there = f"learner.{name}"
    if there is None:
        there = min((key for key in elsewhere if key.rpartition(".")[2] == name), key=len, default=None)
    if there is not None:
        table = there.rpartition(".")[0]
        return f"here it is {there!r}" + (f", which belongs in [{table}]" if table else "")
    guess = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {guess[0]!r}?" if guess else f"it takes: {', '.join(sorted(known)) or 'none'}"
