"""Registers the backend. Imports no torch: the factory does, when a run asks for it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightningrl.plugins import Plugin, hookimpl

if TYPE_CHECKING:
    from lightningrl.backends import MemoryPlan
    from lightningrl.recipe import Recipe
    from lightningrl_torch.backend import TorchBackend
    from lightningrl_torch.gguf.format import GgufFormat

__all__ = ["check_recipe", "create_backend", "create_gguf", "lightningrl_model_formats", "lightningrl_trainers"]


def create_backend(**settings: Any) -> TorchBackend:
    """A `TorchBackend` of these `Settings`."""
    from lightningrl_torch.backend import TorchBackend

    return TorchBackend(**settings)


def plan_memory(**settings: Any) -> MemoryPlan | None:
    """Bytes that a policy of these `Settings` takes, by what for, before its weights are read; None where that is not
    known. Imports torch where there is a GPU that the settings do not leave out."""
    from lightningrl_torch.memory import plan_memory
    from lightningrl_torch.settings import Settings

    wanted = Settings(**settings)
    on_gpu = False
    if _may_have_gpu(wanted.device):
        from lightningrl_torch.device import pick_device

        on_gpu = pick_device(wanted.device).type == "cuda"
    return plan_memory(wanted, on_gpu=on_gpu)


def describe_rate(*, parameters: int | None = None, **settings: Any) -> str | None:
    """The learning rate of these `Settings`, with its reason, where they name none. `parameters`: the policy's; None =
    read from the heads of its weight files. None where they name a number, or its size is not known."""
    from lightningrl_torch.memory import ADAPTED, plan_memory
    from lightningrl_torch.rates import explain_rate
    from lightningrl_torch.settings import Settings

    wanted = Settings(**settings)
    if isinstance(wanted.learning_rate, float):
        return None
    if parameters is None:
        plan = plan_memory(wanted.model_copy(update={"lora": None}), on_gpu=True)  # without adapters
        parameters = None if plan is None else plan.parameters
    if parameters is None:
        return None
    has_adapters = wanted.adapters is not None or (
        wanted.lora is None and parameters >= ADAPTED and not _may_have_gpu(wanted.device)
    )
    usual = explain_rate(parameters, adapters=has_adapters, rollouts=wanted.rollouts_per_step)
    return f"auto: {usual}, confirmed or moved by a probe" if wanted.learning_rate == "auto" else usual


def _may_have_gpu(device: str) -> bool:
    return device != "cpu" and any(Path("/dev").glob("nvidia[0-9]*"))


def check_recipe(recipe: Recipe) -> None:
    """Raises ConfigError for a policy's settings that cannot be, and BackendError where its engine, or bitsandbytes, is
    needed and not installed. Imports torch where a GPU or a loss of the user's own is asked for."""
    from lightningrl_torch.bits import check_bits
    from lightningrl_torch.losses import LOSSES
    from lightningrl_torch.settings import Settings
    from lightningrl_torch.vllm_check import check_vllm

    served_by_vllm: dict[str, Settings] = {}
    for name, policy in recipe.all_policies.items():
        settings = Settings(policy=policy.model, name=name, **recipe.options_of(policy))
        check_bits(settings)
        if settings.engine == "vllm":
            served_by_vllm[name] = settings
        if settings.device == "cuda":
            from lightningrl_torch.device import pick_device

            pick_device("cuda")
        if settings.loss not in LOSSES:
            from lightningrl_torch.chosen_loss import ChosenLoss

            ChosenLoss(settings.loss, settings.loss_arguments, has_reference=settings.has_kl_loss)
    check_vllm(recipe, served_by_vllm)


@hookimpl
def lightningrl_trainers() -> Iterable[Plugin]:
    from lightningrl_torch.learner_settings import declare
    from lightningrl_torch.settings import Settings

    # for `check_options`, without torch
    create_backend.__signature__ = inspect.signature(Settings)  # type: ignore[attr-defined]
    # what is said of settings before a policy is built
    create_backend.plan_memory = plan_memory  # type: ignore[attr-defined]
    create_backend.describe_rate = describe_rate  # type: ignore[attr-defined]
    yield Plugin(
        name="torch",
        summary="transformers + torch on one machine, CPU or one CUDA GPU; full fine-tuning or LoRA",
        factory=create_backend,
        check=check_recipe,
        capabilities=declare(Settings, several_policies=True, services=frozenset({"logprobs", "values"})),
    )


def create_gguf() -> GgufFormat:
    """The format of llama.cpp's model files."""
    from lightningrl_torch.gguf.format import GgufFormat

    return GgufFormat()


@hookimpl
def lightningrl_model_formats() -> Iterable[Plugin]:
    yield Plugin(name="gguf", summary="llama.cpp's model files, quantised ones too, in and out", factory=create_gguf)
