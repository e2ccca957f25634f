"""Policy as the driver knows it without its weights: context, stop tokens, and whether vLLM can serve it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightningrl.errors import BackendError
from lightningrl_verl.settings import Settings

__all__ = ["PolicyFacts", "count_parameters", "read_policy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyFacts:
    """Read from config and tokenizer."""

    model: str
    context_length: int
    eos_ids: tuple[int, ...]
    dtype: Any
    """The torch.dtype that its folder says of the weights; float32 where it says nothing."""
    tokenizer: Any
    text_of: Callable[[Sequence[int]], str]


def read_policy(settings: Settings) -> PolicyFacts:
    """Raises BackendError for a policy that cannot be found, or that vLLM has no model for."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(settings.policy)
        tokenizer = AutoTokenizer.from_pretrained(settings.policy)
    except (OSError, ValueError) as error:
        raise BackendError(f"policy {settings.policy!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    if settings.engine == "vllm":
        _check_served(settings.policy, list(config.architectures or ()))
    longest = int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0)
    context = settings.context_length or longest
    if not context:
        raise BackendError(f"policy {settings.policy!r} does not say how long its context is; set context_length")
    if longest and context > longest:
        raise BackendError(
            f"context_length is {context} but policy {settings.policy!r} has positions for {longest}; lower it"
        )
    try:
        end = GenerationConfig.from_pretrained(settings.policy).eos_token_id
    except OSError:
        end = config.eos_token_id
    stops = [*(end if isinstance(end, list) else [end]), tokenizer.eos_token_id]
    eos = [int(token) for token in stops if token is not None]

    def text_of(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

    return PolicyFacts(
        model=settings.policy,
        context_length=context,
        eos_ids=tuple(dict.fromkeys(eos)),
        dtype=config.dtype or torch.float32,
        tokenizer=tokenizer,
        text_of=text_of,
    )


def count_parameters(settings: Settings) -> tuple[int, int]:
    """Parameters of the policy without adapters, and of the adapters; its weights are not read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(settings.policy)
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        parameters, lora = int(model.num_parameters()), settings.adapters
        if lora is None:
            return parameters, 0
        from peft import LoraConfig, get_peft_model

        targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
        adapted = get_peft_model(model, LoraConfig(r=lora.rank, target_modules=targets, task_type="CAUSAL_LM"))
    return parameters, sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)


def _check_served(policy: str, architectures: Sequence[str]) -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    supported = ModelRegistry.get_supported_archs()
    if not any(name in supported for name in architectures):
        named = ", ".join(architectures) or "nothing"
        raise BackendError(
            f"vLLM cannot serve policy {policy!r}: its architecture ({named}) is none of the {len(supported)} that "
            "the installed vLLM knows; "
            "use another model or a newer vLLM"
        )
