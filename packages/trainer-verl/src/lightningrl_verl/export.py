"""From a checkpoint of verl's actor to an ordinary transformers folder, through verl's own model merger.

shards of all ranks ─► merger ─┬─► all weights, in a dtype ─────────────────────────┬─► folder
                               └─► adapters ─► added to the starting weights, dtype ┘
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from lightningrl.errors import BackendError
from lightningrl.files import whole_folder
from lightningrl_torch.exported import cast, find_dtype, merge_adapters, note_dtype, quiet_about_ties, write_model
from lightningrl_verl.policy import PolicyFacts

__all__ = ["export_checkpoint", "step_folder"]


def step_folder(folder: Path) -> Path:
    """The `global_step_N` of what a backend of verl has saved. Raises BackendError."""
    folders = sorted(folder.glob("global_step_*"))
    if not folders or re.fullmatch(r"global_step_\d+", folders[-1].name) is None:
        raise BackendError(f"{str(folder)!r} is no checkpoint of the verl backend: it has no global_step_N folder")
    return folders[-1].resolve()


def export_checkpoint(
    actor: Path, folder: Path, *, policy: PolicyFacts, megatron: bool, dtype: str | None = None
) -> None:
    """Merge all ranks' shards (and LoRA adapters) into `folder`, complete on return. `dtype`: None = the policy's."""
    wanted = find_dtype(dtype, torch.bfloat16 if megatron else policy.dtype)
    if megatron and wanted is not torch.bfloat16:
        raise BackendError(
            f"verl's merger writes megatron's weights in bfloat16, not in {dtype}; export them without a dtype"
        )
    with whole_folder(folder) as scratch:
        scratch.mkdir(parents=True)
        _merge_shards(actor, scratch, None if megatron else wanted)
        if not any(path.suffix == ".safetensors" for path in scratch.iterdir()):
            raise BackendError(f"verl's merger wrote no weights for {str(actor)!r}; is the checkpoint complete?")
        adapters = scratch / "lora_adapter"
        if adapters.is_dir():
            _merge_adapters(policy.model, adapters, wanted)
        note_dtype(scratch, wanted)
        policy.tokenizer.save_pretrained(scratch)


def _merge_shards(actor: Path, folder: Path, dtype: torch.dtype | None) -> None:
    """`dtype`: None = a checkpoint of megatron's, in the merger's own."""
    from verl.model_merger.base_model_merger import ModelMergerConfig

    config = ModelMergerConfig(
        operation="merge",
        backend="megatron" if dtype is None else "fsdp",
        target_dir=str(folder),
        local_dir=str(actor),
        hf_model_config_path=str(actor / "huggingface"),
        use_cpu_initialization=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        merger = _megatron_merger(config) if dtype is None else _exact_merger(config, dtype)
        merger.merge_and_save()
        merger.cleanup()


def _megatron_merger(config: Any) -> Any:
    from verl.model_merger.megatron_model_merger import MegatronModelMerger

    return MegatronModelMerger(config)


def _exact_merger(config: Any, dtype: torch.dtype) -> Any:
    from torch.distributed.tensor import DTensor
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger, merge_non_dtensor_shards

    class ExactMerger(FSDPModelMerger):  # type: ignore[misc]
        """verl's rounds everything to bfloat16; here weights are joined as trained, and adapters stay so."""

        def _load_and_merge_state_dicts(
            self, world_size: int, total_shards: int, *_: object
        ) -> dict[str, torch.Tensor]:
            names = [f"model_world_size_{world_size}_rank_{rank}.pt" for rank in range(total_shards)]
            shards = [_load_shard(Path(self.config.local_dir) / name) for name in names]
            merged: dict[str, torch.Tensor] = {}
            for key, first in shards[0].items():
                parts = [shard[key] for shard in shards]
                if isinstance(first, DTensor):
                    parts = [part.to_local().detach() for part in parts]
                    # of (replicated, sharded) the last says how a rank's part is joined to the others'
                    weight = self._merge_by_placement(parts, first.placements[-1])
                else:
                    weight = merge_non_dtensor_shards(key, parts)
                merged |= {key: weight} if "lora_" in key else cast({key: weight}, dtype)
            return merged

    return ExactMerger(config)


def _load_shard(path: Path) -> dict[str, Any]:
    """Weights of a rank. A checkpoint may be somebody else's: what its pickle says to call is not called."""
    import torch.distributed.tensor  # makes its shards known as plain data

    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except UnpicklingError as error:
        raise BackendError(f"{str(path)!r} holds more than weights, so it is not read; export your own run") from error


def _merge_adapters(model: str, adapters: Path, dtype: torch.dtype) -> None:
    """Add the adapters to the starting weights, in the adapters' parent folder."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with quiet_about_ties():
        merged = merge_adapters(PeftModel.from_pretrained(base, str(adapters)))
    for old in adapters.parent.glob("*.safetensors*"):
        old.unlink()
    write_model(merged, adapters.parent, dtype)
    shutil.rmtree(adapters)
