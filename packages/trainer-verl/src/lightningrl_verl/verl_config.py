"""From our settings to verl's own config: composed by verl, filled in by us and the `verl` table, checked by verl.

verl's ppo_trainer.yaml  ◄─ what we need  ◄─ the CPU's needs (support package)  ◄─ `verl` table  ─►  validate_config
"""

from __future__ import annotations

import contextlib
import difflib
import io
from pathlib import Path
from typing import Any

from lightningrl.errors import ConfigError
from lightningrl_verl.environment import quiet
from lightningrl_verl.settings import CriticSettings, Settings, flatten, loss_name

__all__ = ["NEVER_ENDS", "build_config"]

NEVER_ENDS = 1_000_000
"""Steps that verl is told to run; LightningRL's loop says when it is over."""

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
_KL_TYPES = {"k2": "k2", "k3": "low_var_kl"}
"""verl's names of `learner.kl_estimator`; `k1` is refused (`Settings`)."""
_OURS = (
    "data.",
    "algorithm.adv_estimator",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.agent.",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.loss_agg_mode",
    "critic.ppo_mini_batch_size",
    "trainer.total_training_steps",
    "trainer.total_epochs",
    "trainer.default_local_dir",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.val_before_train",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.use_v1",
    "trainer.v1.trainer_mode",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
)
"""Keys that the recipe sets elsewhere, or our loop relies on."""
_OPEN = (
    "actor_rollout_ref.model.override_config.",
    "critic.model.override_config.",
    "actor_rollout_ref.rollout.engine_kwargs.",
    "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.",
    "ray_kwargs.ray_init.",
)
"""Tables of verl's config that take any key."""


def build_config(settings: Settings, *, context_length: int, cpu: bool, resume_from: Path | None = None) -> Any:
    """verl's config as an OmegaConf `DictConfig`. Raises ConfigError with a key that verl lacks, or its objection."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf, open_dict

    GlobalHydra.instance().clear()
    engine = "megatron" if settings.strategy == "megatron" else "dp"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_megatron_trainer" if engine == "megatron" else "ppo_trainer")
    values = _base(settings, context_length)
    if resume_from is not None:
        values |= {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(resume_from)}
    if cpu:
        values |= _cpu_overrides(settings)
    flat = dict(flatten(settings.verl))
    for key in flat:
        _check_key(config, key)
    with open_dict(config):
        for key, value in {**values, **flat}.items():
            OmegaConf.update(config, key, value, force_add=True)
    _validate(config)
    return config


def _base(settings: Settings, context_length: int) -> dict[str, Any]:
    """Settings that every run of ours needs."""
    values = _actor(settings, context_length) | _rollout(settings, context_length) | _trainer(settings, context_length)
    values |= _optimiser(_ACTOR, settings, learning_rate=settings.learning_rate)
    values |= _correction(settings)
    if settings.strategy != "megatron":
        values |= _fsdp(settings)
    if (lora := settings.adapters) is not None:
        targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
        values |= {
            f"{_MODEL}.lora_rank": lora.rank,
            f"{_MODEL}.lora_alpha": int(lora.scale),
            f"{_MODEL}.target_modules": targets,
        }
        values |= {f"{_ROLLOUT}.load_format": "safetensors"}  # the adapters' base weights are never sent
    if settings.critic is not None:
        values |= _critic(settings, context_length)
    if settings.mode == "separate_async":
        values |= {
            "actor_rollout_ref.hybrid_engine": False,
            f"{_ROLLOUT}.nnodes": settings.rollout_nodes,
            f"{_ROLLOUT}.n_gpus_per_node": settings.rollout_gpus_per_node,
            f"{_ROLLOUT}.checkpoint_engine.backend": "nccl",
            "trainer.v1.separate_async.parameter_sync_step": settings.sync_every,
        }
    return values


def _actor(settings: Settings, context_length: int) -> dict[str, Any]:
    return {
        f"{_MODEL}.path": settings.policy,
        f"{_MODEL}.enable_gradient_checkpointing": settings.gradient_checkpointing,
        f"{_ACTOR}.ppo_mini_batch_size": 1,  # set to each step's rows before verl reads it
        f"{_ACTOR}.use_dynamic_bsz": True,
        f"{_ACTOR}.ppo_max_token_len_per_gpu": max(settings.max_tokens_per_microbatch, context_length),
        f"{_ACTOR}.ppo_epochs": settings.epochs,
        f"{_ACTOR}.data_loader_seed": settings.seed,
        f"{_ACTOR}.shuffle": settings.minibatches > 1,
        f"{_ACTOR}.clip_ratio": settings.clips[0],
        f"{_ACTOR}.clip_ratio_low": settings.clips[0],
        f"{_ACTOR}.clip_ratio_high": settings.clips[1],
        f"{_ACTOR}.policy_loss.loss_mode": loss_name("own" if settings.is_loss_named else settings.loss),
        # a term without weights of ours: the batch is averaged by verl (recipe_check allows it where that is the same)
        f"{_ACTOR}.loss_agg_mode": "token-mean" if settings.is_averaged else "token-sum",
        f"{_ACTOR}.use_kl_loss": settings.kl_coef > 0,
        f"{_ACTOR}.kl_loss_coef": settings.kl_coef,
        f"{_ACTOR}.kl_loss_type": _KL_TYPES[settings.kl_estimator],
        f"{_ACTOR}.entropy_coeff": settings.entropy_coef,
    }


def _rollout(settings: Settings, context_length: int) -> dict[str, Any]:
    return {
        f"{_ROLLOUT}.name": "vllm" if settings.engine == "vllm" else "lightningrl_transformers",
        f"{_ROLLOUT}.n": 1,
        f"{_ROLLOUT}.dtype": settings.dtype,
        f"{_ROLLOUT}.tensor_model_parallel_size": settings.tensor_parallel,
        f"{_ROLLOUT}.max_model_len": context_length,
        f"{_ROLLOUT}.calculate_log_probs": True,
        f"{_ROLLOUT}.agent.num_workers": 1,
        f"{_ROLLOUT}.agent.agent_loop_manager_class": "lightningrl_verl.runner.BatchManager",
        f"{_ROLLOUT}.seed": settings.seed,
    }


def _trainer(settings: Settings, context_length: int) -> dict[str, Any]:
    return {
        "data.custom_cls.path": "pkg://lightningrl_verl.runner",
        "data.custom_cls.name": "EndlessPrompts",
        "data.train_batch_size": settings.sync_every,
        "data.max_prompt_length": context_length,
        "data.max_response_length": context_length,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "algorithm.adv_estimator": "gae" if settings.critic is not None else "lightningrl",
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.nnodes": settings.nodes,
        "trainer.n_gpus_per_node": settings.gpus_per_node,
        "trainer.total_training_steps": NEVER_ENDS,
        "trainer.total_epochs": 1,
        "trainer.logger": ["file"],
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.v1.trainer_mode": settings.mode,
        "trainer.v1.sampler.max_off_policy_threshold": None,  # LightningRL's loop bounds the staleness
        "trainer.v1.sampler.custom_sampler.path": "pkg://lightningrl_verl.sampler",
        "trainer.v1.sampler.custom_sampler.name": "PromptAsyncSampler" if settings.is_async else "PromptSampler",
        "ray_kwargs.ray_init.include_dashboard": False,
    }


def _optimiser(prefix: str, settings: Settings, *, learning_rate: float) -> dict[str, Any]:
    values = {
        f"{prefix}.optim.lr": learning_rate,
        f"{prefix}.optim.weight_decay": settings.weight_decay,
        f"{prefix}.optim.betas": list(settings.betas),
        f"{prefix}.optim.clip_grad": settings.max_grad_norm or 1e9,
        f"{prefix}.optim.lr_warmup_steps": settings.warmup_steps,
        f"{prefix}.optim.lr_scheduler_type": settings.schedule,
        f"{prefix}.optim.min_lr_ratio": settings.minimum_factor,
        f"{prefix}.optim.zero_indexed_step": False,
    }
    if settings.schedule != "constant":
        # verl's horizon is its number of steps; the run may not go on after it
        values["trainer.total_training_steps"] = settings.total_steps
    return values


WHOLE_RATIO = 1e9
"""A cap beyond every ratio that verl gives (at most e²⁰): the loss weighs tokens itself (`environment.IMPORTANCE`)."""


def _correction(settings: Settings) -> dict[str, Any]:
    """Ratios to the rollout's logprobs without another forward pass; with a cap, to recomputed ones, weighted."""
    if not settings.is_corrected and settings.critic is None:
        return {"algorithm.rollout_correction.bypass_mode": True}
    values: dict[str, Any] = {"algorithm.rollout_correction.bypass_mode": False}
    if settings.is_corrected:
        bounds = settings.importance_mask
        threshold = settings.importance_cap if bounds is None else f"{bounds[0]}_{bounds[1]}"
        values |= {
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_threshold": threshold
            if settings.sequence_mask is None
            else WHOLE_RATIO,
        }
    return values


def _fsdp(settings: Settings) -> dict[str, Any]:
    values: dict[str, Any] = {
        "actor_rollout_ref.actor.strategy": settings.strategy,
        "actor_rollout_ref.actor.fsdp_config.strategy": settings.strategy,
        "actor_rollout_ref.actor.fsdp_config.seed": settings.seed,
        "actor_rollout_ref.ref.fsdp_config.strategy": settings.strategy,
    }
    if settings.dtype == "float32":
        # FSDPEngineConfig.mixed_precision; without it verl computes the forward pass in bfloat16
        exact = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        values |= {
            "actor_rollout_ref.actor.fsdp_config.mixed_precision": exact,
            "actor_rollout_ref.ref.fsdp_config.mixed_precision": exact,
        }
    return values


def _critic(settings: Settings, context_length: int) -> dict[str, Any]:
    critic = settings.critic or CriticSettings()
    values: dict[str, Any] = {
        "algorithm.gamma": critic.gamma,
        "algorithm.lam": critic.lam,
        "critic.model.path": critic.model or settings.policy,
        "critic.model.enable_gradient_checkpointing": settings.gradient_checkpointing,
        "critic.ppo_max_token_len_per_gpu": max(settings.max_tokens_per_microbatch, context_length),
        "critic.strategy": settings.strategy,
        "critic.fsdp.strategy": settings.strategy,
    }
    if settings.dtype == "float32":
        values["critic.fsdp.mixed_precision"] = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    optimiser = _optimiser("critic", settings, learning_rate=critic.learning_rate)
    optimiser.pop("trainer.total_training_steps", None)
    return values | optimiser


def _cpu_overrides(settings: Settings) -> dict[str, Any]:
    from lightningrl_verl_cpu.settings import overrides

    settings_of_verl: dict[str, Any] = overrides(
        settings.engine,
        gpus=settings.gpus,
        critic=settings.critic is not None,
        reference=settings.kl_coef > 0 and settings.adapters is None,
        separate=settings.mode == "separate_async",
    )
    return settings_of_verl


def _check_key(config: Any, key: str) -> None:
    """Raise ConfigError for a setting that verl does not have, or that is LightningRL's to make."""
    from omegaconf import DictConfig

    if any(key == ours or (ours.endswith(".") and key.startswith(ours)) for ours in _OURS):
        raise ConfigError(
            f"verl setting {key!r} is made by LightningRL from the recipe; remove it from the `verl` table"
        )
    if key.startswith(_OPEN):
        return
    node, path = config, key.split(".")
    for depth, part in enumerate(path):
        if not isinstance(node, DictConfig) or part not in node:
            keys = [str(name) for name in node] if isinstance(node, DictConfig) else []
            table = ".".join(path[:depth]) or "the top"
            guess = difflib.get_close_matches(part, keys, n=1)
            hint = (
                f"did you mean {guess[0]!r}?" if guess else f"{table} takes: {', '.join(sorted(keys)) or 'no settings'}"
            )
            raise ConfigError(f"verl has no setting {key!r}; {hint}"[:600])
        node = node._get_node(part)
        if depth < len(path) - 1 and not isinstance(node, DictConfig):
            node = None


def _validate(config: Any) -> None:
    from hydra.errors import InstantiationException
    from omegaconf.errors import ValidationError
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    try:
        with contextlib.redirect_stdout(io.StringIO()), quiet():  # verl says that there is no critic
            validate_config(config, need_reference_policy(config), need_critic(config))
            for part in (config.actor_rollout_ref.model, config.actor_rollout_ref.rollout):
                omega_conf_to_dataclass(part)
    except (AssertionError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"verl refuses its settings: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"verl refuses its settings: {str(error).splitlines()[0]}") from error
    except InstantiationException as error:
        raise ConfigError(f"verl refuses its settings: {error.__cause__ or error}") from error
