"""From a checkpoint of verl's actor to an ordinary transformers folder, through verl's own model merger."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from pathlib import Path

from lightningrl.errors import BackendError
from lightningrl_verl.policy import PolicyFacts

__all__ = ["export_checkpoint"]


def export_checkpoint(actor: Path, folder: Path, *, policy: PolicyFacts, megatron: bool) -> None:
    """Merge the shards of all ranks (and LoRA adapters) into `folder`; complete when it returns."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".new", dir=folder.parent))
    _merge_shards(actor, scratch, megatron=megatron)
    adapters = scratch / "lora_adapter"
    if adapters.is_dir():
        _merge_adapters(policy.model, adapters)
    policy.tokenizer.save_pretrained(scratch)
    if not any(path.suffix == ".safetensors" for path in scratch.iterdir()):
        raise BackendError(f"verl's merger wrote no weights for {str(actor)!r}; is the checkpoint complete?")
    scratch.rename(folder)


def _merge_shards(actor: Path, folder: Path, *, megatron: bool) -> None:
    from verl.model_merger.base_model_merger import ModelMergerConfig

    config = ModelMergerConfig(
        operation="merge",
        backend="megatron" if megatron else "fsdp",
        target_dir=str(folder),
        local_dir=str(actor),
        hf_model_config_path=str(actor / "huggingface"),
        use_cpu_initialization=True,
    )
    if megatron:
        from verl.model_merger.megatron_model_merger import MegatronModelMerger as Merger
    else:
        from verl.model_merger.fsdp_model_merger import FSDPModelMerger as Merger
    with contextlib.redirect_stdout(io.StringIO()):
        merger = Merger(config)
        merger.merge_and_save()
        merger.cleanup()


def _merge_adapters(model: str, adapters: Path) -> None:
    """Add the adapters to the starting weights, in the adapters' parent folder."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model)
    merged = PeftModel.from_pretrained(base, str(adapters)).merge_and_unload()
    for old in adapters.parent.glob("*.safetensors"):
        old.unlink()
    merged.save_pretrained(adapters.parent)
    shutil.rmtree(adapters)
