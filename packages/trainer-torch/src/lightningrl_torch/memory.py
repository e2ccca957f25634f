"""Size of a policy. Its memory, in parts: known from its configuration and the shapes in its weight files, before any
weight is read. And what follows from it where the recipe makes no choice: what learns, how many threads decode, how
many tokens at once. Imports no torch until threads are asked for.

config.json, headers of *.safetensors ─► plan_memory ─► weights + gradient + optimizer + copies      all the time
                                                        + activations + logits                       in a step
                                                        + packed weights + keys and values           in rollouts
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightningrl.backends import MemoryPlan
from lightningrl_torch.bits import MOMENT_BYTES
from lightningrl_torch.learner_settings import LoraSettings
from lightningrl_torch.rates import usual_rate
from lightningrl_torch.settings import Settings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["ADAPTED", "choose_adapters", "choose_rate", "engine_threads", "is_large", "plan_memory", "tokens_at_once"]

ADAPTED: Final = 250_000_000
"""Parameters that a laptop has no room to train: weights, gradient and Adam's two moments are 16 bytes each."""
LARGE: Final = 50_000_000
"""Parameters of a policy that its engine waits for, rather than for agents and server."""
KEPT_BYTES: Final = 2**31
"""For the gradient, at a time."""
MOST_TOKENS: Final = 4096
FLOAT, HALF = 4, 2
PACKED_FAMILIES: Final = frozenset({"llama", "qwen2", "qwen3"})
PACKED_FROM, MOST_PACKED = 2**18, 2**31
"""Numbers of a matrix that is kept in oneDNN's order too while several calls are decoded, and most bytes of all of them
(`llama`)."""
QUANTIZED_BYTES: Final = {"nf4": 4.13 / 8, "int8": 1 + 4 / 64}
"""Bytes of a quantised number with its share of the scales (`quantized`)."""


def activation_bytes(config: Mapping[str, Any], *, recomputed: bool = False) -> int:
    """Bytes that a token keeps for the gradient; `recomputed`: as with gradient checkpointing."""
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    inner = int(config.get("intermediate_size") or 4 * hidden)
    # of a layer, float32: its input twice normed, queries, keys, values, attention and what is added, and four of the
    # inner width
    layer = FLOAT * (12 * hidden + 4 * inner)
    return layer + FLOAT * layers * hidden if recomputed else layers * layer


def plan_memory(settings: Settings, *, on_gpu: bool = False) -> MemoryPlan | None:
    """The plan of a policy that learns by these settings; None = its weights are not on this machine yet, or lie in a
    form whose sizes are not known. `settings.policy`: a folder, or a name of the hub."""
    folder = _folder(settings.policy)
    config = {} if folder is None else _text_config(folder)
    shapes = {} if folder is None else _shapes(folder)
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if folder is None or not shapes or not heads or not hidden or not config.get("num_hidden_layers"):
        return None
    parameters = sum(map(math.prod, shapes.values()))
    lora = settings.adapters
    if settings.lora is None and not on_gpu and parameters >= ADAPTED:
        lora = LoraSettings()
    added = 0 if lora is None else _adapter_parameters(shapes, lora)
    trained = parameters if lora is None else added
    is_half = settings.dtype == "bfloat16"
    number = HALF if is_half and lora is not None else FLOAT
    few = _linear_parameters(shapes) if settings.quantize is not None else 0
    weights = (parameters - few) * number + int(few * QUANTIZED_BYTES[settings.quantize or "int8"]) + added * FLOAT
    copies = HALF * parameters if is_half and lora is None else 0
    copies += FLOAT * trained if settings.max_staleness else 0
    copies += FLOAT * parameters if settings.kl_coef and lora is None else 0
    copies += 3 * FLOAT * trained if settings.epochs * settings.minibatches > 1 else 0
    if settings.critic is not None and settings.critic.model != "trunk" and (own := _folder(settings.critic.model)):
        copies += 4 * FLOAT * sum(map(math.prod, _shapes(own).values()))
    token = activation_bytes(config, recomputed=settings.gradient_checkpointing)
    usual = MOST_TOKENS if on_gpu else max(1, min(MOST_TOKENS, KEPT_BYTES // activation_bytes(config)))
    has_engine = settings.engine == "torch"
    width = int(config.get("num_key_value_heads") or heads) * int(config.get("head_dim") or int(hidden) // int(heads))
    return MemoryPlan(
        parameters=parameters + added,
        trained=trained,
        weights=weights,
        gradient=FLOAT * trained,
        optimizer=int(MOMENT_BYTES[settings.optimizer] * trained),
        copies=copies,
        token=token,
        microbatch=settings.max_tokens_per_microbatch or usual,
        vocabulary=int(config.get("vocab_size") or 0),
        key_values=2 * int(config["num_hidden_layers"]) * width * (HALF if is_half else FLOAT) if has_engine else 0,
        remembered=settings.prefix_cache_tokens,
        max_batch=settings.max_batch,
        packed=_packed_bytes(shapes, config) if has_engine and not (is_half or settings.quantize or on_gpu) else 0,
        base=None if lora is None else f"{folder.resolve()} {settings.dtype} {settings.quantize}",
        shared=weights - added * FLOAT if lora is not None else 0,
        on_gpu=on_gpu,
    )


def is_large(parameters: int) -> bool:
    """True if a token of the policy takes long enough to be worth all threads, and a forecast."""
    return parameters >= LARGE


def choose_adapters(settings: Settings, device: torch.device, count: Callable[[], int]) -> Settings:
    """With adapters, where the recipe leaves them open and the policy is large; `count` counts its parameters."""
    if settings.lora is not None or device.type != "cpu" or count() < ADAPTED:
        return settings
    return settings.model_copy(update={"lora": LoraSettings()})


def choose_rate(settings: Settings, parameters: int) -> Settings:
    """With a learning rate, where the recipe has none. `parameters`: the policy's, without adapters."""
    if settings.learning_rate is not None:
        return settings
    rate = usual_rate(parameters, adapters=settings.adapters is not None, rollouts=settings.rollouts_per_step)
    return settings.model_copy(update={"learning_rate": rate})


def engine_threads(settings: Settings, parameters: int) -> int:
    """Where nobody said: one for a small policy; all for a large one, or half where it is learned from meanwhile."""
    if settings.engine_threads or not is_large(parameters):
        return settings.engine_threads or 1
    import torch

    most = settings.threads or torch.get_num_threads()
    return max(1, most // 2) if settings.max_staleness else most


def tokens_at_once(model: PreTrainedModel) -> int:
    """Number of tokens whose activations fit into `KEPT_BYTES`; a GPU is for policies that fit it."""
    if model.device.type == "cuda":
        return MOST_TOKENS
    config = model.config.get_text_config(decoder=True)
    return max(1, min(MOST_TOKENS, KEPT_BYTES // activation_bytes(config.to_dict())))


def _folder(policy: str) -> Path | None:
    """The folder with a policy's weights on this machine."""
    if Path(policy).is_dir():
        return Path(policy)
    if policy.count("/") != 1 or policy.startswith((".", "/", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(policy, "config.json")
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _text_config(folder: Path) -> Mapping[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config.get("text_config", config)  # type: ignore[no-any-return]


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes of the weights, by name, from the heads of a folder's safetensors files; empty where one cannot be
    read."""
    shapes: dict[str, list[int]] = {}
    for path in folder.glob("model*.safetensors"):
        try:
            with path.open("rb") as file:
                head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            shapes |= {name: value["shape"] for name, value in head.items() if name != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
            return {}
    return shapes


def _linear_parameters(shapes: Mapping[str, list[int]]) -> int:
    """Numbers in the layers' matrices: all but words and output."""
    words = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "wpe.weight")
    return sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and not name.endswith(words))


def _packed_bytes(shapes: Mapping[str, list[int]], config: Mapping[str, Any]) -> int:
    """Bytes of the large matrices that the engine's own forward multiplies by; maps of one input are one matrix."""
    if config.get("model_type") not in PACKED_FAMILIES:
        return 0
    sizes: dict[str, int] = defaultdict(int)
    for name, shape in shapes.items():
        if len(shape) != 2:
            continue
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            sizes["lm_head"] = math.prod(shape)
        else:
            sizes[re.sub(r"(?:q|k|v|gate|up)_proj", "joined", name)] += math.prod(shape)
    packed = FLOAT * sum(size for size in sizes.values() if size >= PACKED_FROM)
    return packed if packed <= MOST_PACKED else 0


def _adapter_parameters(shapes: Mapping[str, list[int]], lora: LoraSettings) -> int:
    """Number of parameters of adapters on the layers' matrices, or on those that `target_modules` names."""
    targets = lora.target_modules
    modules = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2}
    if tied := next((shape for module, shape in modules.items() if module.endswith("embed_tokens")), None):
        modules.setdefault("lm_head", tied)

    def is_adapted(module: str) -> bool:
        if targets == "all-linear" or isinstance(targets, str):
            return module.rpartition(".")[2] not in ("embed_tokens", "lm_head", "wte", "wpe")
        return any(module == target or module.endswith(f".{target}") for target in targets)

    return sum(lora.rank * sum(shape) for module, shape in modules.items() if is_adapted(module))
