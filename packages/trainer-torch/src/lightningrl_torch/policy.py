"""Loading a policy: model, tokenizer and what the engine must know, from a hub name or a folder.

Frozen base models are shared by the policies of the process: adapters are each policy's own, weights below them stand
in memory once.

    folder, device, numbers ─► Base ─copy─► modules of policy a ─► its adapters
                                   └─copy─► modules of policy b ─► its adapters        the same tensors in both
"""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet, WeakValueDictionary

import torch

from lightningrl.errors import ConfigError
from lightningrl_torch.device import pick_device
from lightningrl_torch.exported import folder_weights, quiet_about_ties
from lightningrl_torch.learner_settings import LoraSettings
from lightningrl_torch.light import read_light, union_of_tokens
from lightningrl_torch.memory import choose_adapters, choose_rate
from lightningrl_torch.models import check_rotation, longest_row
from lightningrl_torch.quantized import QuantizedLinear, count_parameters, quantize_model, weight_bytes
from lightningrl_torch.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lightningrl_torch.forward import Forward

__all__ = ["LoadedPolicy", "frozen_parts", "load_weights", "quiet", "silence_dropout"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WholePolicy:
    """A policy as transformers has it, on its device."""

    settings: Settings
    """The recipe's settings, with adapters where the policy's size asks for them, and a learning rate."""
    model: PreTrainedModel
    """The model that engine and learner call; with LoRA, adapters sit inside it."""
    adapters: Any
    """The `peft.PeftModel` around `model`, or None."""
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    stop_token_ids: tuple[int, ...]
    dtype: torch.dtype
    """The folder's own word on the weights; where it has none, the weights' dtype."""
    use: BaseUse | None
    """Frozen weights below adapters, which other policies of the process may share; None = all weights learn."""


class LoadedPolicy:
    """A policy on its device: what the engine needs of it at once, the rest when it is asked for."""

    def __init__(self, settings: Settings) -> None:
        self.device = pick_device(settings.device)
        _check_folder(settings.policy)
        self._asked = settings
        self._lock = threading.Lock()
        self._whole: WholePolicy | None = None
        is_plain = (
            not settings.adapters
            and settings.critic is None
            and settings.kl_coef == 0.0
            and Path(settings.policy).is_dir()
        )
        self.light = read_light(Path(settings.policy), self.device) if is_plain else None
        """None where transformers reads it."""
        loaded = self.light or self.whole
        self.context_length = _context_length(loaded.context_length, settings)
        self.stop_token_ids = loaded.stop_token_ids
        self.dtype = loaded.dtype

    @property
    def whole(self) -> WholePolicy:
        """Loaded by transformers where it was not; the weights are the ones that the engine serves."""
        with self._lock:
            if self._whole is None:
                self._whole = _load_whole(self._asked, self.device)
                if self.light is not None:
                    for name, parameter in self._whole.model.named_parameters():
                        parameter.data = self.light.parameters[name].data
            return self._whole

    @property
    def settings(self) -> Settings:
        """The recipe's settings, with adapters where the policy's size asks for them, and a learning rate."""
        return choose_rate(self._asked, self.parameters) if self.light else self.whole.settings

    @cached_property
    def parameters(self) -> int:
        """Number of the policy's parameters; a critic's are not counted."""
        if self.light is None:
            return count_parameters(self.whole.model)
        return sum(one.numel() for one in self.light.parameters.values())

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights."""
        if self.light is None:
            return weight_bytes(self.whole.model)
        return sum(weight.numel() * weight.element_size() for weight in self.light.parameters.values())

    @property
    def model(self) -> PreTrainedModel:
        """The model that the learner calls."""
        return self.whole.model

    @property
    def adapters(self) -> Any:
        """The `peft.PeftModel` around `model`, or None."""
        return None if self.light else self.whole.adapters

    @property
    def shares_with(self) -> tuple[str, ...]:
        """Names of the policies of this process that adapt the same frozen weights."""
        use = None if self.light else self.whole.use
        return () if use is None else use.others

    @property
    def served(self) -> PreTrainedModel | Forward:
        """The model or quicker forward that the engine calls."""
        is_half = self._asked.dtype == "bfloat16"
        return self.light.forward(torch.bfloat16 if is_half else torch.float32) if self.light else self.whole.model

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights of now by the names of a transformers folder, one at a time; of a policy without adapters."""
        if self.light is not None:
            yield from ((name, weight.detach()) for name, weight in self.light.parameters.items())
            return
        yield from folder_weights(self.whole.model)

    def write_adapters(self, folder: Path) -> None:
        """The adapters alone, as `peft` reads them."""
        with quiet():
            # whether the base's vocabulary was changed is not asked of the hub at each step: it never is
            self.adapters.save_pretrained(folder, save_embedding_layers=False)

    def close(self) -> None:
        """Share weights no more; they go when nobody reads them."""
        if self._whole is not None and self._whole.use is not None:
            self._whole.use.end()

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Tokens as text."""
        if self.light is not None:
            return self.light.text.decode(list(token_ids), skip_special_tokens=False)
        return str(self.whole.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def tokenizer_text(self) -> str:
        """Text of the tokenizer's `tokenizer.json`. Raises AttributeError for one that is not of that library."""
        core: Any = self.light.text if self.light is not None else self.whole.tokenizer.backend_tokenizer
        return str(core.to_str())


class Base:
    """A model none of whose weights learn."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.dtype = dtype
        """The folder's own word on the weights; where it has none, the weights' dtype."""
        self.uses: WeakSet[BaseUse] = WeakSet()
        self.model = model.requires_grad_(requires_grad=False)

    def copy(self) -> PreTrainedModel:
        """Modules of their own on the same tensors."""
        return copy.deepcopy(self.model, frozen_parts(self.model))


class BaseUse:
    """A policy's part in a base: as long as there is one, the base stays."""

    def __init__(self, base: Base, name: str) -> None:
        self.base, self.name = base, name
        base.uses.add(self)

    @property
    def others(self) -> tuple[str, ...]:
        """Names of the other policies on it."""
        return tuple(sorted(use.name for use in self.base.uses if use is not self))

    def end(self) -> None:
        """The policy is closed; others no longer share with it."""
        self.base.uses.discard(self)


_BASES: Final[WeakValueDictionary[Hashable, Base]] = WeakValueDictionary()
"""Bases of the process, as its memory is; one is gone with the last policy on it."""
_LOADING: Final = threading.Lock()


def _use_base(key: Hashable, name: str, load: Callable[[], Base]) -> BaseUse:
    """The base of that key, loaded where no policy has it."""
    with _LOADING:
        base = _BASES.get(key)
        if base is None:
            base = _BASES[key] = load()
        return BaseUse(base, name)


def _base_key(settings: Settings, device: torch.device) -> Hashable:
    """Equal for policies whose frozen weights are the same numbers at the same place."""
    folder = Path(settings.policy)
    files: tuple[Any, ...] = ()
    if folder.is_dir():
        stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
        files = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
        folder = folder.resolve()
    return str(folder), files, str(device), settings.dtype, settings.quantize


def frozen_parts(model: torch.nn.Module) -> dict[int, Any]:
    """The parts of a model that never change, by `id`: as the memo of `copy.deepcopy` they stay shared."""
    tensors = [one for one in (*model.parameters(), *model.buffers()) if not one.requires_grad]
    states = [part.state for part in model.modules() if isinstance(part, QuantizedLinear)]
    return {id(one): one for one in (*tensors, *states)}


def _load_whole(settings: Settings, device: torch.device) -> WholePolicy:
    """Load what `settings` name. Raises ConfigError with what is missing where."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = load_weights("configuration", AutoConfig.from_pretrained, settings.policy)
    if settings.context_length is not None:
        check_rotation(config, settings.policy, settings.context_length)
    tokenizer = load_weights("tokenizer", AutoTokenizer.from_pretrained, settings.policy)
    settings = choose_adapters(settings, device, lambda: _count_parameters(config))
    lora = settings.adapters
    frozen = torch.bfloat16 if lora is not None and settings.dtype == "bfloat16" else torch.float32
    read = "auto" if config.dtype is None or settings.quantize else frozen  # "auto" = as they lie there

    def load() -> Base:
        model = load_weights("model", AutoModelForCausalLM.from_pretrained, settings.policy, config=config, dtype=read)
        own = config.dtype or model.dtype
        kind = settings.quantize
        return Base(quantize_model(model, kind, device, frozen) if kind else model.to(device, frozen), own)

    use = None
    if lora is None:
        base = load()
        model = base.model.requires_grad_(requires_grad=True)
    else:
        use = _use_base(_base_key(settings, device), settings.name or settings.policy, load)
        base, model = use.base, use.base.copy()
    settings = choose_rate(settings, count_parameters(model))
    adapters = _add_adapters(model, lora, settings) if lora is not None else None
    silence_dropout(model)
    if settings.gradient_checkpointing:
        # its name since transformers 5.20
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    model.eval()  # type: ignore[no-untyped-call]
    limits = [
        getattr(config.get_text_config(decoder=True), "max_position_embeddings", None),
        tokenizer.model_max_length,
        longest_row(config),
    ]
    return WholePolicy(
        settings=settings,
        model=model,
        adapters=adapters,
        tokenizer=tokenizer,
        context_length=min(int(limit) for limit in limits if limit is not None),
        stop_token_ids=_stop_token_ids(model, tokenizer),
        dtype=base.dtype,
        use=use,
    )


def _count_parameters(config: Any) -> int:
    """Count the parameters of a model that is not read yet."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config).num_parameters())  # type: ignore[no-untyped-call]


def _check_folder(policy: str) -> None:
    folder = Path(policy)
    if not folder.is_dir():
        if policy.startswith((".", "/", "~")) or policy.count("/") > 1:
            raise ConfigError(
                f"policy folder {policy!r} does not exist; give a transformers folder or a hub name such as "
                "'Qwen/Qwen2.5-0.5B-Instruct'"
            )
        return
    if not (folder / "config.json").is_file():
        raise ConfigError(f"policy folder {policy!r} has no config.json; give a folder that `save_pretrained` wrote")
    if not any(folder.glob("tokenizer*")):
        raise ConfigError(
            f"policy folder {policy!r} has no tokenizer; save one beside the model with `tokenizer.save_pretrained`"
        )


def load_weights(what: str, loader: Any, policy: str, **options: Any) -> Any:
    """Load by a loader of transformers. Raises ConfigError."""
    try:
        with quiet():
            return loader(policy, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"the {what} of policy {policy!r} cannot be loaded: {reason[0] if reason else type(error).__name__}"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bar for reading a file; the command line draws its own."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _add_adapters(model: PreTrainedModel, lora: LoraSettings, settings: Settings) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    scale: Any = lora.scale  # a float, which peft takes too
    config = LoraConfig(r=lora.rank, lora_alpha=scale, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng(), warnings.catch_warnings(), quiet_about_ties():
        torch.manual_seed(settings.seed)
        # peft asks transformers by a name that is about to go
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(
                f"lora cannot be added to policy {settings.policy!r}: {str(error).strip().splitlines()[0]}"
            ) from error


def silence_dropout(model: PreTrainedModel) -> None:
    """Rollout and training must compute the same function."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def _context_length(most: int, settings: Settings) -> int:
    if settings.context_length is None:
        return most
    if settings.context_length > most:
        raise ConfigError(
            f"context_length is {settings.context_length}, but policy {settings.policy!r} takes at most {most} tokens"
        )
    return settings.context_length


def _stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a completion, from the generation configuration, the model's and the tokenizer's."""
    of_generation = getattr(model.generation_config, "eos_token_id", None)
    return union_of_tokens(of_generation, model.config.eos_token_id, tokenizer.eos_token_id)
