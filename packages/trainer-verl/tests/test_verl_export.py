"""A checkpoint as verl's FSDP writes it, exported: the trained weights, in the policy's dtype, whatever has
adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightningrl.errors import BackendError
from lightningrl_torch.testing import save_policy
from lightningrl_verl.export import _load_shard, export_checkpoint
from lightningrl_verl.policy import PolicyFacts

IDS = torch.tensor([[1, 2, 3, 4]])


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """Of one rank."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    torch.distributed.destroy_process_group()


def train(folder: Path, targets: list[str] | None) -> Any:
    """A policy whose weights, or adapters, have moved; in float32, as verl trains."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if targets is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if targets is None or "lora_" in name:
                weight.add_(0.01 * torch.randn_like(weight))
    return model.eval()


def save(model: Any, policy: Path, actor: Path, mesh: DeviceMesh, *, is_lora: bool) -> None:
    for part in (AutoConfig, AutoTokenizer):
        part.from_pretrained(policy).save_pretrained(actor / "huggingface")
    shards = {name: distribute_tensor(weight.clone(), mesh, [Shard(0)]) for name, weight in model.state_dict().items()}
    torch.save(shards, actor / "model_world_size_1_rank_0.pt")
    (actor / "fsdp_config.json").write_text(json.dumps({"world_size": 1, "FSDP_version": 2}))
    if is_lora:
        (actor / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}))


def test_a_foreign_checkpoint_runs_no_code(tmp_path: Path, mesh: DeviceMesh) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.mkdir, (tmp_path / "ran",)

    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"w": distribute_tensor(weight, mesh, [Shard(0)])}, tmp_path / "own.pt")
    torch.save({"w": Evil()}, tmp_path / "foreign.pt")
    assert torch.equal(_load_shard(tmp_path / "own.pt")["w"].to_local(), weight)
    with pytest.raises(BackendError, match="holds more than weights, so it is not read"):
        _load_shard(tmp_path / "foreign.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("targets", [None, ["q_proj"], ["q_proj", "lm_head"]], ids=["full", "lora", "head"])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_checkpoint_is_exported_as_it_was_trained(
    tmp_path: Path, mesh: DeviceMesh, own: torch.dtype, targets: list[str] | None
) -> None:
    policy = Path(save_policy(tmp_path / "policy"))
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps({**config, "dtype": str(own).removeprefix("torch.")}))
    model = train(policy, targets)
    save(model, policy, tmp_path / "actor", mesh, is_lora=targets is not None)
    facts = PolicyFacts(
        model=str(policy),
        context_length=128,
        eos_ids=(256,),
        dtype=own,
        tokenizer=AutoTokenizer.from_pretrained(policy),
        text_of=str,
    )
    with torch.no_grad():
        trained = model(IDS).logits
        for asked, expected, near in (
            (None, own, 1e-4 if own is torch.float32 else 0.1),
            ("float32", torch.float32, 1e-4),
        ):
            folder = tmp_path / f"exported-{asked}"
            export_checkpoint(tmp_path / "actor", folder, policy=facts, megatron=False, dtype=asked)
            exported = AutoModelForCausalLM.from_pretrained(folder)
            assert {weight.dtype for weight in exported.state_dict().values()} == {expected}
            torch.testing.assert_close(torch.nn.Module.float(exported)(IDS).logits, trained, atol=near, rtol=near)
    with pytest.raises(BackendError, match="weights cannot be written as 'int8'"):
        export_checkpoint(tmp_path / "actor", tmp_path / "other", policy=facts, megatron=False, dtype="int8")
    with pytest.raises(BackendError, match="writes megatron's weights in bfloat16, not in float32"):
        export_checkpoint(tmp_path / "actor", tmp_path / "other", policy=facts, megatron=True, dtype="float32")
