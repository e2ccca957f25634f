"""Weights of a GGUF file under transformers' names, written shard by shard: one shard is in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from gguf.quants import dequantize, quant_shape_to_byte_shape
from numpy.typing import NDArray
from safetensors.torch import save_file

from lightningrl.errors import ConfigError
from lightningrl_torch.gguf.header import GgufHeader, StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["write_weights"]

SHARD_BYTES: Final = 4 * 2**30
_AT_ONCE: Final = 2**16
_UNUSED: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that became part of the configuration."""


def write_weights(header: GgufHeader, model: PreTrainedModel, folder: Path, progress: Callable[[float], None]) -> None:
    """Write all weights of `model`, which is empty, from the file. `progress` is told the share that is done. Raises
    ConfigError where the file has a tensor that the model has no place for, or lacks one."""
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
