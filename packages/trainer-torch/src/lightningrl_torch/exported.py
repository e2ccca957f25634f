"""A trained model as an ordinary transformers folder: adapters merged, tied weights apart where they differ, in a
dtype.

adapters ─► copy, float32 ─► untied where one of two tied weights has an adapter ─► merged ─┐
                                                              all weights ─────────────────┴► dtype ─► folder
"""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from lightningrl.errors import BackendError
from lightningrl_torch.quantized import restore_linears

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "DTYPES",
    "cast",
    "find_dtype",
    "folder_weights",
    "merge_adapters",
    "note_dtype",
    "quiet_about_ties",
    "write_model",
]

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def find_dtype(wanted: str | None, own: torch.dtype) -> torch.dtype:
    """The dtype of that name, or the policy's own. Raises BackendError."""
    if wanted is None:
        return own
    if wanted not in DTYPES:
        raise BackendError(
            f"weights cannot be written as {wanted!r}; choose {', '.join(DTYPES)}, or nothing for the policy's own"
        )
    return DTYPES[wanted]


def cast(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights on the CPU in a dtype; those that share their memory go on sharing it, and what is no float stays. Raises
    BackendError for a weight that the dtype has no room for."""
    made: dict[object, torch.Tensor] = {}
    converted: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        key = (weight.data_ptr(), weight.shape, weight.stride())
        if key not in made:
            made[key] = weight.detach().to("cpu", dtype if weight.is_floating_point() else None).contiguous()
            if dtype is torch.float16 and weight.isfinite().all() and not made[key].isfinite().all():
                raise BackendError(
                    f"weight {name!r} goes beyond what float16 can hold ({weight.abs().max():g}); export it as bfloat16"
                )
        converted[name] = made[key]
    return converted


def merge_adapters(adapters: Any) -> PreTrainedModel:
    """A copy of a `peft.PeftModel`'s model with its adapters added, computed in float32; quantised weights are what
    the policy learned on: their codes times their scales. Where an adapter sits on one of two weights that are tied,
    the copy has both: they are no longer the same."""
    merged = copy.deepcopy(adapters).float()
    restore_linears(merged)
    model = merged.get_base_model()
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    adapted = [part for part in (inputs, outputs) if hasattr(part, "base_layer")]
    if adapted and outputs is not None:
        ours, theirs = (getattr(part, "base_layer", part) for part in (inputs, outputs))
        if ours.weight is theirs.weight:
            theirs.weight = torch.nn.Parameter(theirs.weight.detach().clone(), requires_grad=False)
            for config in (model.config, model.config.get_text_config(decoder=True)):
                config.tie_word_embeddings = False
    with quiet_about_ties():
        plain: PreTrainedModel = merged.merge_and_unload()
    return plain


def folder_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights by the names of a transformers folder, one at a time."""
    named = ((name, weight.detach()) for name, weight in model.named_parameters())
    if getattr(model, "_weight_conversions", None):  # experts that lie in the folder one by one
        from transformers.core_model_loading import revert_weight_conversion

        yield from revert_weight_conversion(model, dict(named)).items()
    else:
        yield from named


def write_model(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """`save_pretrained` in a dtype; the model itself stays as it is."""
    model.save_pretrained(folder, state_dict=cast(model.state_dict(), dtype))
    note_dtype(folder, dtype)


def note_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Let a transformers folder's configuration say what its weights are."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def quiet_about_ties() -> Iterator[None]:
    """No page of peft's on tied weights: `merge_adapters` unties them."""
    with warnings.catch_warnings():
        for beginning in (
            "Model with `tie_word_embeddings=True`",
            "Model has `tie_word_embeddings=True`",
            "Input and output embeddings",
        ):
            warnings.filterwarnings("ignore", message=beginning, category=UserWarning)
        yield
