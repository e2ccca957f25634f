"""GGUF as a format of models: a file becomes a transformers folder, a transformers folder becomes a file.

The configuration is made from transformers' own table of names. What that table leaves out and what would change the
model's answers in silence is added here: scaled rotations, widths of heads, sliding windows, scales of embeddings and
logits. Weights are written under transformers' names, one shard in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from gguf.quants import dequantize, quant_shape_to_byte_shape
from numpy.typing import NDArray

from lightningrl.errors import ConfigError, LightningError
from lightningrl_torch.gguf.header import GgufHeader, StoredTensor, read_header
from lightningrl_torch.gguf.tokenizer import (
    ADDED,
    check_tokenizer,
    make_tokenizer,
    special_tokens,
    stop_token_ids,
    token_id,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["GgufFormat"]

OWN_TABLES: Final[dict[str, dict[str, str]]] = {
    "granite": {
        "context_length": "max_position_embeddings",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "embedding_length": "hidden_size",
        "rope.freq_base": "rope_theta",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
        "vocab_size": "vocab_size",
    },
}
"""Architectures that we read beside those of transformers."""
NO_DECODERS: Final = frozenset({"t5", "t5encoder", "umt5"})
_MODEL_TYPES: Final = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "minimax-m2": "minimax_m2",
    "gemma3": "gemma3_text",
    "command-r": "cohere",
}
"""transformers' name of a model's type where llama.cpp's architecture is called otherwise."""
PLAIN: Final = frozenset({"llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "granite", "starcoder2", "nemotron"})
"""Architectures whose configuration is their table and what is added here; that of others transformers puts together,
which takes it longer."""
_NUMBERS: Final = (
    "block_count",
    "embedding_length",
    "context_length",
    "vocab_size",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "attention.scale",
    "expert_count",
    "expert_used_count",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
)
_FRACTIONS: Final = ("attention.layer_norm", "attention.scale", "rope.freq", "rope.scaling.factor", "rope.scaling.attn")
_BY_LAYER: Final = (
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.sliding_window",
)
_NEVER_ZERO: Final = ("block_count", "embedding_length", "context_length", "vocab_size", "attention.key_length")
_HEAD_DIM: Final = frozenset({"llama", "qwen3", "gemma2", "gemma3", "mistral", "granite"})
_KNOWN_SCALINGS: Final = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (16.0, 1.0, 1.0, 8192), (4.0, 1.0, 4.0, 8192))
"""factor, low, high and original context of Llama 3.1, 3.2, 4 and their likes."""
SHARD_BYTES: Final = 4 * 2**30
_AT_ONCE: Final = 2**16
_UNUSED: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that became part of the configuration."""


class GgufFormat:
    """Files of llama.cpp: all its precisions in, float32, float16, bfloat16 and Q8_0 out."""

    version = 1
    """Raised when files are read otherwise than before."""

    def describe(self, file: Path) -> Mapping[str, Any]:
        """Look at a file's head alone, as `ModelFormat` says. Raises ConfigError where it cannot be read."""
        header = _read_checked(file)
        types = header.metadata.get("tokenizer.ggml.token_type") or ()
        tokens = zip(header.metadata["tokenizer.ggml.tokens"], types, strict=False)
        return {
            "architecture": header.architecture,
            "precision": header.precision,
            "parameters": header.parameters,
            "dtype": header.dtype,
            "has_template": bool(header.metadata.get("tokenizer.chat_template")),
            "special_tokens": [token for token, kind in tokens if kind in ADDED],
            "bytes": header.parameters * (2 if header.dtype == "bfloat16" else 4),
        }

    def read(self, file: Path, folder: Path, progress: Callable[[float], None]) -> None:
        """Write a transformers folder of a file into `folder`, which is there and empty. Raises ConfigError."""
        header = _read_checked(file)
        try:
            _write_tokenizer(header, folder)
            model = _empty_model(header)
            _write_weights(header, model, folder, progress)
            model.config.architectures = [type(model).__name__]
            model.config.dtype = header.dtype
            model.config.save_pretrained(folder)
            _write_generation(header, folder)
        except (LightningError, OSError, MemoryError):
            raise
        except Exception as error:  # of transformers, tokenizers, numpy: what the file says fits together nowhere
            raise ConfigError(
                f"model file {str(file)!r} describes no model that can be made "
                f"({' '.join(f'{type(error).__name__}: {error}'.split())[:200]}); take the model's transformers folder"
            ) from error

    def write(self, folder: Path, file: Path | None, precision: str) -> None:
        """Write a file of a transformers folder, which may lack weights where `file` is None: it is only checked that
        one can be written. Raises ConfigError."""
        from lightningrl_torch.gguf.writing import check_writable, write_gguf

        if file is None:
            check_writable(folder, precision)
        else:
            write_gguf(folder, file, precision)


def _read_checked(file: Path) -> GgufHeader:
    header = read_header(file)
    _check_architecture(header)
    check_tokenizer(header)
    return header


def _write_tokenizer(header: GgufHeader, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=make_tokenizer(header),
        model_max_length=int(header.get("context_length", 2048)),
        clean_up_tokenization_spaces=False,
        **special_tokens(header),
    )
    if header.metadata.get("tokenizer.chat_template"):
        tokenizer.chat_template = header.metadata["tokenizer.chat_template"]
    tokenizer.save_pretrained(folder)


def _empty_model(header: GgufHeader) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = _make_config(header)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def _write_generation(header: GgufHeader, folder: Path) -> None:
    stops = stop_token_ids(header)
    ids = {key: token_id(header, name) for key, name in (("bos_token_id", "bos"), ("pad_token_id", "padding"))}
    generation: dict[str, int | list[int]] = {key: value for key, value in ids.items() if value is not None}
    if stops:
        generation["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    path = folder / "generation_config.json"
    path.write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _model_type_of(architecture: str) -> str:
    """transformers' name of the model's type."""
    return _MODEL_TYPES.get(architecture, architecture)


def _table(architecture: str) -> dict[str, str | None] | None:
    if architecture in OWN_TABLES:
        return dict(OWN_TABLES[architecture])
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    tables: dict[str, Any] = dict(GGUF_CONFIG_MAPPING)
    name = {"gemma3_text": "gemma3"}.get(_model_type_of(architecture), _model_type_of(architecture))
    return None if name in ("general", "tokenizer", *NO_DECODERS) else tables.get(name)


def _check_architecture(header: GgufHeader) -> None:
    """Raise ConfigError for an architecture that cannot be read, or whose file has layers of another."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    architecture, file = header.architecture, str(header.file)
    if _table(architecture) is None:
        readable = sorted({*GGUF_CONFIG_MAPPING, *OWN_TABLES} - NO_DECODERS - {"general", "tokenizer"})
        raise ConfigError(
            f"model file {file!r} is of architecture {architecture!r}; these are read: {', '.join(readable)}. Take the "
            "model's transformers folder"
        )
    for needed in ("block_count", "embedding_length", "attention.head_count"):
        if header.get(needed) is None and architecture != "mamba":
            raise ConfigError(f"model file {file!r} lacks {architecture}.{needed}; convert the model again")
    _check_numbers(header)
    if architecture in ("llama", "granite") and header.get("expert_count"):
        raise ConfigError(
            f"model file {file!r} is a mixture of {header.get('expert_count')} experts named {architecture!r}, "
            "which is not read; take the model's transformers folder"
        )


def _check_numbers(header: GgufHeader) -> None:
    """Raise ConfigError for counts and widths that are none, or that the file's tensors do not bear out: as much as
    they say is built before a weight is read."""
    for key in _NUMBERS:
        value = header.get(key)
        by_layer = isinstance(value, list) and key in _BY_LAYER and value
        if value is not None and not all(_is_number(number, key) for number in (value if by_layer else [value])):
            _refuse(header, key, "is not a number that a model can have")
    if not header.get("attention.head_count", 1) and header.architecture != "mamba":
        _refuse(header, "attention.head_count", "is not a number that a model can have")
    layers = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if header.get("block_count", 0) > len(layers):
        _refuse(header, "block_count", f"is more than the {len(layers)} layers that it has tensors of")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[1:] != (header.get("embedding_length"),):
        _refuse(header, "embedding_length", f"does not fit its embeddings of shape {embedding.shape}")
    experts = [tensor.shape[0] for name, tensor in header.tensors.items() if "_exps." in name]
    if (header.get("expert_count") or 0) > max(experts, default=0):
        _refuse(header, "expert_count", "is more than its tensors have")


def _is_number(value: Any, key: str) -> bool:
    if key.startswith(_FRACTIONS):
        return type(value) in (int, float) and 0.0 <= value < 1e30
    return type(value) is int and (key in _NEVER_ZERO) <= value < 2**31


def _refuse(header: GgufHeader, key: str, why: str) -> NoReturn:
    raise ConfigError(
        f"model file {str(header.file)!r}: its {header.architecture}.{key}, {str(header.get(key))[:40]}, {why}; "
        "convert or fetch it again"
    )


def _make_config(header: GgufHeader) -> dict[str, Any]:
    """The model's configuration for `AutoConfig.for_model`. Raises ConfigError."""
    architecture = header.architecture
    table = _table(architecture)
    assert table is not None
    if architecture in PLAIN:
        config: dict[str, Any] = {
            name: value for key, name in table.items() if name is not None and (value := header.get(key)) is not None
        }
        config["model_type"] = _model_type_of(architecture)
        config["tie_word_embeddings"] = "output.weight" not in header.tensors
    else:
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        config = dict(load_gguf_checkpoint(str(header.file))["config"])  # type: ignore[no-untyped-call]
        config.pop("_model_name_or_path", None)
    tokens = header.metadata["tokenizer.ggml.tokens"]
    config["vocab_size"] = len(tokens)
    config.setdefault("max_position_embeddings", header.get("context_length", 2048))
    stops = stop_token_ids(header)
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        config[name] = token_id(header, key)
    config["eos_token_id"] = stops[0] if stops else None
    if architecture in _HEAD_DIM:
        width = header.get("attention.key_length") or header.get("rope.dimension_count")
        config["head_dim"] = width or header.get("embedding_length") // header.get("attention.head_count")
    _add_specials(config, header)
    _add_rotation(config, header)
    return config


def _add_specials(config: dict[str, Any], header: GgufHeader) -> None:
    """Add what the table leaves out for some architectures."""
    architecture = header.architecture
    if architecture in ("llama", "granite") and "blk.0.attn_q.bias" in header.tensors:
        config["attention_bias"] = True
    if architecture == "llama" and "blk.0.ffn_up.bias" in header.tensors:
        config["mlp_bias"] = True
    if architecture == "gemma2":
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if header.get(key) is not None:
                config[key] = header.get(key)
    if architecture in ("gemma2", "gemma3"):
        from lightningrl_torch.gguf.writing import usual_scalar

        config["query_pre_attn_scalar"] = int(usual_scalar(config))
    if architecture == "phi3" and header.get("attention.sliding_window"):
        config["sliding_window"] = header.get("attention.sliding_window")


def _add_rotation(config: dict[str, Any], header: GgufHeader) -> None:
    """Scaled rotary embeddings, which transformers' table knows nothing of."""
    kind, factor = header.get("rope.scaling.type"), header.get("rope.scaling.factor")
    base = config.pop("rope_theta", None)
    rotation: dict[str, Any] = {"rope_type": "default"}
    factors = _factors(header, "rope_freqs.weight")
    long, short = _factors(header, "rope_factors_long.weight"), _factors(header, "rope_factors_short.weight")
    original = header.get("rope.scaling.original_context_length")
    if factors is not None:
        rotation = _rotation_of(factors, base or 10000.0, int(config["max_position_embeddings"]))
    elif long is not None and short is not None:
        rotation = {"rope_type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist()}
        config["original_max_position_embeddings"] = original
        rotation["original_max_position_embeddings"] = original
        if header.get("rope.scaling.attn_factor"):
            rotation["attention_factor"] = header.get("rope.scaling.attn_factor")
    elif kind in ("linear", "yarn") and factor and factor != 1.0:
        rotation = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            rotation["original_max_position_embeddings"] = original
    elif kind not in (None, "none", "linear", "yarn", "longrope"):
        raise ConfigError(
            f"model file {str(header.file)!r} scales its rotary embeddings by {kind!r}, which is not read; take the "
            "model's transformers folder"
        )
    if base is not None:
        rotation["rope_theta"] = base
    if header.architecture in ("phi3", "nemotron") and (turned := header.get("rope.dimension_count")):
        width = header.get("embedding_length") // header.get("attention.head_count")
        rotation["partial_rotary_factor"] = turned / width
    if header.architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", 10000.0)}
        config["rope_parameters"] = {"full_attention": rotation, "sliding_attention": local}
    elif base is not None or rotation["rope_type"] != "default":
        config["rope_parameters"] = rotation


def _factors(header: GgufHeader, name: str) -> NDArray[np.float32] | None:
    """Values of a small float32 tensor; None where the file has none of that name."""
    stored = header.tensors.get(name)
    if stored is None:
        return None
    with header.file.open("rb") as opened:
        opened.seek(stored.start)
        return np.frombuffer(opened.read(stored.size), np.float32)


def _rotation_of(factors: NDArray[np.float32], base: float, context: int) -> dict[str, Any]:
    """The rotation whose frequencies are divided by these factors: Llama 3's by its own name, where it is one."""
    from lightningrl_torch.gguf.writing import llama3_factors

    width = 2 * len(factors)
    for factor, low, high, original in _KNOWN_SCALINGS:
        if low == high:
            continue
        if np.allclose(factors, llama3_factors(width, base, factor, low, high, original), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return {
        "rope_type": "longrope",
        "long_factor": factors.tolist(),
        "short_factor": factors.tolist(),
        "original_max_position_embeddings": context,
        "attention_factor": 1.0,
    }


def _write_weights(header: GgufHeader, model: PreTrainedModel, folder: Path, progress: Callable[[float], None]) -> None:
    """Write all weights of `model`, which is empty, from the file. `progress` is told the share that is done. Raises
    ConfigError where the file has a tensor that the model has no place for, or lacks one."""
    import torch
    from safetensors.torch import save_file

    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[header.dtype]
    wanted = _shapes(model)
    shards: list[dict[str, torch.Tensor]] = [{}]
    places: dict[str, int] = {}
    room = SHARD_BYTES
    written = 0
    for name, weight in _read_all(header, model):
        if name not in wanted or tuple(weight.shape) != wanted[name]:
            shape = f"of shape {wanted[name]} in {type(model).__name__}" if name in wanted else "unknown to it"
            raise ConfigError(
                f"model file {str(header.file)!r} has a weight {name!r} of shape {tuple(weight.shape)}, {shape}; take "
                "the model's transformers folder"
            )
        stored = weight.to(dtype).contiguous()
        if stored.nbytes > room and shards[-1]:
            save_file(shards[-1], folder / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
            shards[-1] = {}
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = stored
        places[name] = len(shards)
        room -= stored.nbytes
        written += stored.numel()
        progress(written / max(1, header.parameters))
    if missing := sorted(wanted.keys() - places.keys()):
        raise ConfigError(
            f"model file {str(header.file)!r} lacks {len(missing)} weights of {type(model).__name__}, {missing[0]!r} "
            "among them; fetch or convert it again"
        )
    save_file(shards[-1], folder / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
    _name_shards(folder, places, len(shards))


def _name_shards(folder: Path, places: dict[str, int], count: int) -> None:
    """Give the shards their usual names, with an index where there are several."""
    if count == 1:
        (folder / "shard-1.safetensors").rename(folder / "model.safetensors")
        return
    names = {number: f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)}
    for number, name in names.items():
        (folder / f"shard-{number}.safetensors").rename(folder / name)
    size = sum((folder / name).stat().st_size for name in names.values())
    index = {"metadata": {"total_size": size}, "weight_map": {name: names[place] for name, place in places.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that a folder of the model has: tied ones once, what is computed not at all."""
    state = model.state_dict()
    shapes = {name: tuple(weight.shape) for name, weight in state.items()}
    if model.config.get_text_config(decoder=True).tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes


def _read_all(header: GgufHeader, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight by transformers' name; those that several tensors of the file make up come last."""
    import torch
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    architecture = "llama" if header.architecture == "granite" else header.architecture
    config = model.config.get_text_config(decoder=True).to_dict()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config)  # type: ignore[no-untyped-call]
    names = _map_names(header, model, processor)
    gathered: dict[str, Any] = {"tensors": {}}
    data = np.memmap(header.file, np.uint8, "r")
    for stored in header.tensors.values():
        if stored.name in _UNUSED:
            continue
        result = processor.process(  # type: ignore[no-untyped-call]
            weights=_values(data, stored), name=stored.name, tensor_key_mapping=names, parsed_parameters=gathered
        )
        if result.name is None:
            continue
        if result.name not in names:
            raise ConfigError(
                f"model file {str(header.file)!r} has a tensor {stored.name!r} that {type(model).__name__} has no "
                "place for; take the model's transformers folder"
            )
        yield names[result.name], torch.from_numpy(np.array(result.weights, np.float32))
    yield from gathered["tensors"].items()


def _map_names(header: GgufHeader, model: PreTrainedModel, processor: Any) -> dict[str, str]:
    """transformers' names of weights, by the names that they have in the file. Those of some architectures are known
    without the prefix of the model's trunk alone."""
    architecture = next((key for key, name in MODEL_ARCH_NAMES.items() if name == header.architecture), None)
    assert architecture is not None, header.architecture
    map_of_names = get_tensor_name_map(architecture, int(header.get("block_count")))
    names: dict[str, str] = {}
    for prefix in ("", f"{model.base_model_prefix}."):
        for whole in model.state_dict():
            if not whole.startswith(prefix):
                continue
            name = processor.preprocess_name(whole.removeprefix(prefix))
            stem, dot, kind = name.rpartition(".")
            stem, suffix = (stem, dot + kind) if kind in ("weight", "bias") else (name, "")
            stored = map_of_names.get_name(stem)
            if stored is not None:
                names.setdefault(stored + suffix, whole)
            else:
                more: dict[str, str] = {}
                processor.perform_fallback_tensor_mapping(more, suffix, prefix, name)
                names = {**more, **names}
    return names


def _values(data: NDArray[np.uint8], stored: StoredTensor) -> NDArray[np.float32]:
    """A tensor's values, float32."""
    shape = quant_shape_to_byte_shape(stored.shape, stored.type)
    rows, width = int(np.prod(shape[:-1])), shape[-1]
    together = 1  # rows that are read at once: one by one takes numpy longer
    while rows % (2 * together) == 0 and 2 * together * stored.shape[-1] <= _AT_ONCE:
        together *= 2
    raw = data[stored.start : stored.start + stored.size].reshape(rows // together, width * together)
    values: NDArray[np.float32] = dequantize(raw, stored.type).astype(np.float32, copy=False)
    return values.reshape(stored.shape)
