"""A transformers folder as a GGUF file: what llama.cpp, Ollama and LM Studio run.

config.json ─► metadata      tokenizer.json ─► vocabulary      safetensors ─► tensors, one in memory at a time
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    get_tensor_name_map,
)
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors import safe_open

from lightningrl.errors import ConfigError
from lightningrl.files import whole_file
from lightningrl_torch.gguf.tokenizer import read_vocabulary

__all__ = ["PRECISIONS", "check_writable", "llama3_factors", "usual_scalar", "write_gguf"]

PRECISIONS: Final = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """Traits of a model's type in a file."""

    architecture: MODEL_ARCH
    turns: bool = False
    """Queries and keys are stored with the halves of each head interleaved."""
    shift: float = 0.0
    """Added to the weights of norms, which llama.cpp multiplies by as they are."""
    period: int = 1
    """Every so many layers one attends to everything; others have a sliding window."""


FAMILIES: Final = {
    "llama": _Family(architecture=MODEL_ARCH.LLAMA, turns=True),
    "mistral": _Family(architecture=MODEL_ARCH.LLAMA, turns=True),
    "qwen2": _Family(architecture=MODEL_ARCH.QWEN2),
    "qwen3": _Family(architecture=MODEL_ARCH.QWEN3),
    "gemma2": _Family(architecture=MODEL_ARCH.GEMMA2, shift=1.0, period=2),
    "gemma3_text": _Family(architecture=MODEL_ARCH.GEMMA3, shift=1.0, period=6),
    "phi3": _Family(architecture=MODEL_ARCH.PHI3),
    "granite": _Family(architecture=MODEL_ARCH.GRANITE, turns=True),
}


def check_writable(folder: Path, precision: str) -> None:
    """Raise ConfigError where no GGUF file can be made of a folder's kind of model. Reads no weights."""
    if precision not in PRECISIONS:
        raise ConfigError(
            f"a GGUF file is written as {', '.join(PRECISIONS)}, not as {precision!r}; choose one of them"
        )
    config = _config(folder)
    family = FAMILIES[config["model_type"]]
    _check_layers(config, family, folder)
    _rotation(config, folder)
    read_vocabulary(folder, int(config["vocab_size"]))


def write_gguf(folder: Path, file: Path, precision: str) -> None:
    """Write a transformers folder as a GGUF file, beside and then renamed. Raises ConfigError."""
    check_writable(folder, precision)
    config = _config(folder)
    family = FAMILIES[config["model_type"]]
    name = MODEL_ARCH_NAMES[family.architecture]
    try:
        with whole_file(file) as scratch:
            writer = GGUFWriter(scratch, name)
            kind, file_type = PRECISIONS[precision]
            writer.add_type("model")
            writer.add_name(file.stem)
            _add_metadata(writer, config, family)
            for key, value in _rotation(config, folder).items():
                if not isinstance(value, np.ndarray):
                    writer.add_key_value(f"{name}.rope.{key}", *_typed(value))
            writer.add_file_type(file_type)
            writer.add_quantization_version(2)
            vocabulary = read_vocabulary(folder, int(config["vocab_size"]))
            vocabulary.add_to(writer)
            _add_sampling(writer, folder)
            _write_tensors(writer, folder, config, family, kind)
            writer.close()
    except OSError as error:
        raise ConfigError(
            f"GGUF file {str(file)!r} cannot be written: {error.strerror or error}; free space or give another place"
        ) from error


def _add_sampling(writer: GGUFWriter, folder: Path) -> None:
    """Write the sampling of a folder's generation configuration, llama.cpp's default where its caller says nothing."""
    path = folder / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "do_sample" in config:
        writer.add_sampling_temp(config.get("temperature", 1.0) if config["do_sample"] else 0.0)
        writer.add_sampling_top_p(config.get("top_p", 1.0))
        writer.add_sampling_top_k(config.get("top_k", 50))


def _config(folder: Path) -> dict[str, Any]:
    """The configuration as transformers completes it."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {str(folder)!r} has no config.json; give a transformers folder")
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(
            f"a model of type {kind!r} is not written as GGUF; these are: {', '.join(FAMILIES)}. Convert its "
            "transformers folder with llama.cpp's convert_hf_to_gguf.py"
        )
    config: dict[str, Any] = AutoConfig.from_pretrained(folder).to_dict()
    return config


def _check_layers(config: Mapping[str, Any], family: _Family, folder: Path) -> None:
    """Raise ConfigError for layers that llama.cpp would compute otherwise."""
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    usual = [
        "full_attention" if family.period == 1 or number % family.period == family.period - 1 else "sliding_attention"
        for number in range(config["num_hidden_layers"])
    ]
    scalar = config.get("query_pre_attn_scalar")
    problems = {
        "sliding windows in other layers than llama.cpp has them": kinds != usual or config.get("use_sliding_window"),
        "another scale of its queries than llama.cpp's": scalar is not None and scalar != usual_scalar(config),
        "activations other than llama.cpp's": config.get("hidden_act", "silu") != "silu",
        "attention in both directions": bool(config.get("use_bidirectional_attention")),
    }
    if (problem := next((what for what, is_so in problems.items() if is_so), None)) is not None:
        raise ConfigError(
            f"model folder {str(folder)!r} has {problem}; serve the transformers folder instead (vLLM reads it)"
        )


def usual_scalar(config: Mapping[str, Any]) -> float:
    """Scale of gemma's queries in llama.cpp: by the width of a head; for the largest model, by the heads' share."""
    widest = {"gemma2": 46, "gemma3_text": 62}.get(config["model_type"])
    share = config["hidden_size"] / config["num_attention_heads"]
    return float(share if config["num_hidden_layers"] == widest else config["head_dim"])


def _add_metadata(writer: GGUFWriter, config: Mapping[str, Any], family: _Family) -> None:
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    context = config["max_position_embeddings"]
    kind, window = config["model_type"], config.get("sliding_window")
    if kind == "mistral" and window:  # llama.cpp reads no window here: within it, both are the same
        context = min(context, window)
    writer.add_context_length(context)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if kind != "phi3":
        writer.add_key_length(width)
        writer.add_value_length(width)
    if family.architecture in (MODEL_ARCH.LLAMA, MODEL_ARCH.GRANITE):
        writer.add_rope_dimension_count(width)
    if family.period > 1:
        writer.add_sliding_window(int(window or 0))
    if kind == "phi3":
        writer.add_sliding_window(window or 0)
    for key, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("attention_multiplier", writer.add_attention_scale),
    ):
        if config.get(key) is not None:
            add(config[key])


def _rotation(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Values below `rope.` and, as arrays, tensors. Raises ConfigError for a scaling that llama.cpp has no name for."""
    rotation = dict(config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)})
    values: dict[str, Any] = {}
    if "full_attention" in rotation:
        local = rotation.get("sliding_attention", {})
        rotation = rotation["full_attention"]
        if local.get("rope_type", "default") != "default" or local.get("rope_theta", 10000.0) != 10000.0:
            raise ConfigError(f"model folder {str(folder)!r} turns its sliding layers otherwise than llama.cpp does")
    kind, base = rotation.get("rope_type", "default"), float(rotation["rope_theta"])
    values["freq_base"] = base
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    turned = int(width * rotation.get("partial_rotary_factor", 1.0))
    if config["model_type"] == "phi3":
        values["dimension_count"] = turned
        values["scaling.original_context_length"] = int(
            config.get("original_max_position_embeddings") or config["max_position_embeddings"]
        )
    elif turned != width:
        raise ConfigError(f"model folder {str(folder)!r} turns a part of each head alone; it is not written as GGUF")
    if kind == "llama3":
        values["freqs"] = llama3_factors(
            width,
            base,
            rotation["factor"],
            rotation["low_freq_factor"],
            rotation["high_freq_factor"],
            rotation["original_max_position_embeddings"],
        ).astype(np.float32)
    elif kind == "longrope" and config["model_type"] == "phi3":
        values["factors_long"] = np.array(rotation["long_factor"], np.float32)
        values["factors_short"] = np.array(rotation["short_factor"], np.float32)
        original = values["scaling.original_context_length"]
        scale = config["max_position_embeddings"] / original
        usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1.0 else 1.0
        values["scaling.attn_factor"] = float(rotation.get("attention_factor") or usual)
    elif kind == "longrope" and rotation["long_factor"] == rotation["short_factor"]:
        values["freqs"] = np.array(rotation["long_factor"], np.float32)  # as we read it from a file
    elif kind in ("linear", "yarn"):
        values["scaling.type"] = RopeScalingType(kind).value
        values["scaling.factor"] = float(rotation["factor"])
        if kind == "yarn":
            values["scaling.original_context_length"] = int(rotation["original_max_position_embeddings"])
    elif kind != "default":
        raise ConfigError(
            f"model folder {str(folder)!r} scales its rotary embeddings by {kind!r}, which is not written; serve "
            "the transformers folder (vLLM reads it)"
        )
    return values


def llama3_factors(
    width: int, base: float, factor: float, low: float, high: float, original: int
) -> NDArray[np.float64]:
    """Divisors of the frequencies: 1 for short waves, `factor` for long ones, smooth between (Llama 3.1's report)."""
    frequencies = 1.0 / base ** (np.arange(0, width, 2) / width)
    waves = 2 * np.pi / frequencies
    smooth = (original / waves - low) / (high - low)
    between = 1.0 / ((1.0 - smooth) / factor + smooth)
    return np.where(waves < original / high, 1.0, np.where(waves > original / low, factor, between))


def _typed(value: Any) -> tuple[Any, Any]:
    if isinstance(value, str):
        return value, GGUFValueType.STRING
    return value, GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.UINT32


def _write_tensors(
    writer: GGUFWriter, folder: Path, config: Mapping[str, Any], family: _Family, kind: GGMLQuantizationType
) -> None:
    names = get_tensor_name_map(family.architecture, config["num_hidden_layers"])
    extra = {
        f"rope_{key}.weight": value for key, value in _rotation(config, folder).items() if isinstance(value, np.ndarray)
    }
    with ExitStack() as files:
        places: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            opened = files.enter_context(safe_open(path, "pt"))
            places |= dict.fromkeys(opened.keys(), opened)
        stored: list[tuple[str, str, GGMLQuantizationType]] = []
        for weight, opened in places.items():
            if weight == "lm_head.weight" and config["tie_word_embeddings"]:
                continue
            name = names.get_name(weight, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise ConfigError(
                    f"model folder {str(folder)!r} has a weight {weight!r} that llama.cpp has no name for"
                )
            shape = tuple(opened.get_slice(weight).get_shape())
            type_ = _type_of(shape, kind)
            stored.append((weight, name, type_))
            block, size = GGML_QUANT_SIZES[type_]
            writer.add_tensor_info(name, shape, np.dtype(np.float32), math.prod(shape) // block * size, type_)
        for name, values in extra.items():
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for weight, _, type_ in stored:
            values = places[weight].get_tensor(weight).to(torch.float32)
            writer.write_tensor_data(_encode(_arranged(values, weight, config, family), type_, weight))
        for values in extra.values():
            writer.write_tensor_data(values)


def _type_of(shape: tuple[int, ...], kind: GGMLQuantizationType) -> GGMLQuantizationType:
    """Type that a tensor is stored in: vectors whole, rows that do not fill blocks in 16 bits."""
    if len(shape) < 2:
        return GGMLQuantizationType.F32
    block, _ = GGML_QUANT_SIZES[kind]
    return kind if shape[-1] % block == 0 else GGMLQuantizationType.F16


def _arranged(values: torch.Tensor, weight: str, config: Mapping[str, Any], family: _Family) -> NDArray[np.float32]:
    """A weight as llama.cpp reads it."""
    if family.shift and weight.endswith("norm.weight"):
        values = values + family.shift
    for part, heads in (("q_proj", config["num_attention_heads"]), ("k_proj", config["num_key_value_heads"])):
        if family.turns and f".self_attn.{part}." in weight:
            # the two halves of a head, which rotate together, become neighbours
            rows = values.shape[0]
            values = (
                values.reshape(heads, 2, rows // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
            )
    array: NDArray[np.float32] = values.contiguous().numpy()
    return array


def _encode(values: NDArray[np.float32], kind: GGMLQuantizationType, weight: str) -> NDArray[Any]:
    if kind is GGMLQuantizationType.F16:
        made = values.astype(np.float16)
        if np.isfinite(values).all() and not np.isfinite(made).all():
            raise ConfigError(
                f"weight {weight!r} goes beyond what float16 can hold ({np.abs(values).max():g}); write it as bf16"
            )
        return made
    encoded: NDArray[Any] = values if kind is GGMLQuantizationType.F32 else quantize(values, kind)
    return encoded
