"""verl's platform "cpu" is there when asked for, and nothing is changed otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from lightningrl_verl_cpu import environment, overrides
from lightningrl_verl_cpu.settings import CHECKPOINT_ENGINE, REPLICA

BUILT_IN = ["nvidia", "huawei", "amd"]


@pytest.mark.parametrize("loaded_by", ["VERL_USE_EXTERNAL_MODULES", "entry point"])
def test_importing_verl_registers_the_platform_and_the_replica(run_process: Callable[..., str], loaded_by: str) -> None:
    dropped = () if loaded_by == "VERL_USE_EXTERNAL_MODULES" else ("VERL_USE_EXTERNAL_MODULES",)
    facts = json.loads(run_process("process_platform.py", without=dropped).splitlines()[-1])
    assert facts["platforms"] == [*BUILT_IN, "cpu"]
    assert REPLICA in facts["replicas"]
    assert (facts["device"], facts["memory"], facts["engines"]) == ("cpu", 0, "cuda")
    assert (facts["sdpa"], facts["gloo"]) == ("lightningrl_verl_cpu.shims", "partial")


def test_without_verl_platform_the_package_changes_nothing(run_process: Callable[..., str]) -> None:
    facts = json.loads(run_process("process_platform.py", cpu=False).splitlines()[-1])
    assert facts["platforms"] == BUILT_IN
    assert REPLICA not in facts["replicas"]
    assert facts["engines"] is None
    assert (facts["sdpa"], facts["gloo"]) == ("verl.utils.model", "function")


def test_the_environment_is_text_and_passes_on_only_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    variables = environment()
    assert all(isinstance(value, str) for value in variables.values())
    assert variables["VERL_PLATFORM"] == "cpu"
    assert "HF_HUB_OFFLINE" not in variables
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert environment()["HF_HUB_OFFLINE"] == "1"


def has(tree: Any, key: str) -> bool:
    for name in key.split("."):
        if not isinstance(tree, dict) or name not in tree:
            return False
        tree = tree[name]
    return True


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_every_override_is_a_setting_that_verl_knows(engine: str) -> None:
    """A key that is new to verl's configuration is new on purpose."""
    import verl
    from omegaconf import OmegaConf

    folder = verl.__path__[0]
    known = OmegaConf.to_container(OmegaConf.load(f"{folder}/trainer/config/_generated_ppo_trainer.yaml"))
    values = overrides(engine, gpus=2, critic=True, reference=True, separate=True)  # type: ignore[arg-type]
    new = {key for key in values if not has(known, key)}
    attention = {f"{part}.model.override_config.attn_implementation" for part in ("actor_rollout_ref", "critic")}
    resources = {f"ray_kwargs.ray_init.{name}" for name in ("address", "num_gpus", "include_dashboard")}
    engines = {
        f"actor_rollout_ref.rollout.engine_kwargs.vllm.{name}" for name in ("block_size", "kv_cache_memory_bytes")
    }
    mixed = {
        f"{part}.mixed_precision"
        for part in ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
    }
    assert new <= attention | resources | engines | mixed | {"actor_rollout_ref.rollout.enable_sleep_mode"}


def test_separate_replicas_get_the_gloo_engine() -> None:
    key = "actor_rollout_ref.rollout.checkpoint_engine.backend"
    assert overrides("vllm", gpus=2, critic=False, reference=False, separate=True)[key] == CHECKPOINT_ENGINE
    assert key not in overrides("vllm", gpus=1, critic=False, reference=False)
