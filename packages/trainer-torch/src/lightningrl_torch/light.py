"""A small policy as its folder has it, read without transformers, whose import takes longer than everything else of a
run's start.

folder ─► LightPolicy ─► LlamaForward (the engine)          at once
                    └──► transformers' model (the learner)  later, on the same weights
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from lightningrl_torch.exported import DTYPES, cast, note_dtype
from lightningrl_torch.llama import FAMILIES, LlamaForward

__all__ = ["LightPolicy", "read_light", "union_of_tokens"]

MOST_BYTES: Final = 2**28
"""Weights of more are read once, by transformers: reading takes longer than its import, and two copies too much
memory."""
NEEDED: Final = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
WEIGHTS: Final = "model.safetensors"


class LightPolicy:
    """Weights, float32, by transformers' names, and what the engine must know."""

    def __init__(self, folder: Path, config: Mapping[str, Any], device: torch.device) -> None:
        self.folder = folder
        self.config = config
        weights = load_file(folder / WEIGHTS, device=str(device))
        stored = config.get("dtype") or config.get("torch_dtype")
        self.dtype: torch.dtype = DTYPES.get(str(stored)) or next(iter(weights.values())).dtype
        """The folder's own word on its weights; where it has none, the first weight's dtype."""
        self.parameters = {name: nn.Parameter(weight.float()) for name, weight in weights.items()}
        self._tokenizer = _read(folder / "tokenizer_config.json")
        self._device = device

    @cached_property
    def text(self) -> Tokenizer:
        """The tokenizer's core."""
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @property
    def context_length(self) -> int:
        """Most tokens that model and tokenizer take."""
        return min(int(self.config["max_position_embeddings"]), int(self._tokenizer.get("model_max_length") or 10**30))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion, from the generation configuration, the model's and the tokenizer's."""
        end = self._tokenizer.get("eos_token")
        of_tokenizer = None if end is None else self.text.token_to_id(end["content"] if isinstance(end, dict) else end)
        of_generation = _read(self.folder / "generation_config.json").get("eos_token_id")
        return union_of_tokens(of_generation, self.config.get("eos_token_id"), of_tokenizer)

    def forward(self, dtype: torch.dtype) -> LlamaForward:
        """The engine's forward passes."""
        config = SimpleNamespace(**self.config)
        head_dim = self.config.get("head_dim") or config.hidden_size // config.num_attention_heads
        base = float((self.config.get("rope_parameters") or self.config)["rope_theta"])
        # theta_i = base^(-2i/d)  (Su et al. 2021, eq. 15)
        frequencies = 1.0 / (base ** (torch.arange(0, head_dim, 2, device=self._device).float() / head_dim))
        modules = _as_modules(self.parameters)
        modules.model.rotary_emb = SimpleNamespace(inv_freq=frequencies, attention_scaling=1.0)
        if not hasattr(modules, "lm_head"):
            modules.lm_head = SimpleNamespace(weight=modules.model.embed_tokens.weight, bias=None)
        modules.config = config
        return LlamaForward(modules, dtype)

    def write(self, folder: Path, dtype: torch.dtype) -> None:
        """An ordinary transformers folder of the weights as they are, in a dtype, with all else that stood beside
        them."""
        for path in self.folder.iterdir():
            if path.is_file() and path.suffix not in {".safetensors", ".bin", ".pt", ".pth", ".md"}:
                shutil.copyfile(path, folder / path.name)
        config = {name: value for name, value in self.config.items() if name != "torch_dtype"}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        note_dtype(folder, dtype)
        save_file(cast(self.parameters, dtype), folder / WEIGHTS, metadata={"format": "pt"})


def read_light(folder: Path, device: torch.device) -> LightPolicy | None:
    """None for what transformers must read: large, of another family, with anything special to it, or not whole."""
    weights, tokenizer = folder / WEIGHTS, _read(folder / "tokenizer_config.json")
    if not (weights.is_file() and (folder / "tokenizer.json").is_file() and weights.stat().st_size <= MOST_BYTES):
        return None
    config = _read(folder / "config.json")
    rotary = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta")}
    is_known = (
        config.get("model_type") in FAMILIES
        and config.get("architectures") == [f"{config['model_type'].capitalize()}ForCausalLM"]
        and all(isinstance(config.get(name), int | float) for name in NEEDED)
        and config.get("hidden_act") == "silu"
        and isinstance(rotary.get("rope_theta"), int | float)
        and set(rotary) <= {"rope_theta", "rope_type"}
        and rotary.get("rope_type", "default") == "default"
        and not config.get("rope_scaling")
        and not config.get("use_sliding_window")
        and set(config.get("layer_types") or ()) <= {"full_attention"}
        and "quantization_config" not in config
        and not tokenizer.get("clean_up_tokenization_spaces")
    )
    if not is_known:
        return None
    try:
        policy = LightPolicy(folder, config, device)
        forward = policy.forward(torch.float32)
    except Exception:  # noqa: BLE001  a file that is torn or lacks a part: transformers says what is wrong with it
        return None
    is_tied = bool(config.get("tie_word_embeddings"))
    is_whole = forward.layers == config["num_hidden_layers"] and forward.vocabulary == config.get("vocab_size")
    return policy if is_whole and is_tied != ("lm_head.weight" in policy.parameters) else None


def _as_modules(parameters: Mapping[str, nn.Parameter]) -> Any:
    """`model.layers.0.mlp.up_proj.weight` and so on as attributes, layers as a list, as transformers' modules have
    them."""
    root = SimpleNamespace()
    for name, parameter in parameters.items():
        *above, last = name.split(".")
        place = root
        for part in above:
            if not hasattr(place, part):
                setattr(place, part, SimpleNamespace(bias=None))
            place = getattr(place, part)
        setattr(place, last, parameter)
    layers = root.model.layers
    root.model.layers = [getattr(layers, str(number)) for number in range(len(vars(layers)) - 1)]
    return root


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def union_of_tokens(*sources: int | Sequence[int] | None) -> tuple[int, ...]:
    """Token ids that any of the sources names, sorted."""
    named = ([source] if isinstance(source, int) else source or () for source in sources)
    return tuple(sorted({token for tokens in named for token in tokens}))
