"""A recipe with vLLM as the engine is refused in a sentence before anything is loaded; vLLM need not be installed."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import lightningrl
from lightningrl.errors import BackendError, ConfigError
from lightningrl_torch import vllm_check
from lightningrl_torch.plugin import check_recipe
from lightningrl_torch.settings import Settings, VllmSettings


def make_recipe(**tables: Any) -> lightningrl.Recipe:
    return lightningrl.Recipe.model_validate(
        {
            "agent": "agent.py:answer",
            "tasks": {"train": "agent.py:tasks"},
            "policy": {"model": "policy"},
            "rewards": {"right": {"use": "exact_match"}},
            "learner": {"engine": "vllm"},
            **tables,
        }
    )


def test_a_vllm_that_is_missing_or_untried_is_named_with_the_one_that_fits() -> None:
    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    with pytest.raises(BackendError, match=r"needs vLLM, which is not installed; pip install 'vllm>=0\.32,<0\.33'"):
        vllm_check.installed_vllm(none)
    with pytest.raises(BackendError, match=r"was made for vLLM >=0\.32,<0\.33 and 0\.24\.0 is installed"):
        vllm_check.installed_vllm(lambda name: "0.24.0")
    assert vllm_check.installed_vllm(lambda name: "0.32.1+cu129") == "0.32.1+cu129"


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"sampling": {"top_p": 0.9}}, "sampling: top_p = 0.9 and top_k = 0, and vLLM tells logprobs of the truncated"),
        ({"validation": {"sampling": {"top_p": 0.5, "temperature": 1.0}}}, "validation.sampling: top_p = 0.5"),
        (
            {"policies": {"critic": {"model": "other", "agents": ["critic"]}}},
            "policies 'policy', 'critic' have engine 'vllm', and one process holds one vLLM, for several policies as "
            "adapters on one base: 'policy' has none; set its learner.lora = true, or give the others",
        ),
        (
            {
                "learner": {"engine": "vllm", "lora": {"rank": 12}},
                "policies": {"critic": {"model": "other", "agents": ["critic"], "learner": {"lora": {"rank": 20}}}},
            },
            "on one base: they differ in model, lora.rank; make them alike, or give the others",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        check_recipe(make_recipe(**tables))


def test_adapters_on_one_base_are_served_by_one_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_check, "installed_vllm", lambda: "0.32.0")
    critic = {"model": "policy", "agents": ["critic"], "learner": {"lora": {"rank": 9}, "learning_rate": 1e-4}}
    check_recipe(make_recipe(learner={"engine": "vllm", "lora": True}, policies={"critic": critic}))


def test_a_rank_that_vllm_has_no_room_for_is_refused() -> None:
    with pytest.raises(BackendError, match=r"learner\.lora\.rank is 600, and vLLM serves at most 512"):
        vllm_check.adapter_rank(600)
    assert [vllm_check.adapter_rank(rank) for rank in (1, 8, 9, 512)] == [8, 8, 16, 512]


def test_truncated_sampling_without_a_temperature_truncates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_check, "installed_vllm", lambda: "0.32.0")
    check_recipe(make_recipe(validation={"sampling": {"top_p": 0.5, "temperature": 0.0}}))


def test_settings_of_an_engine_that_does_not_run_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.vllm is for engine 'vllm', and the engine is 'torch'; remove one"):
        Settings(policy="policy", vllm=VllmSettings(sleep=False))
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization is 1\.5"):
        check_recipe(make_recipe(learner={"engine": "vllm", "vllm": {"gpu_memory_utilization": 1.5}}))


def test_the_settings_of_the_page_are_settings() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/how-to/vllm.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    settings = Settings(policy="policy", **tomllib.loads(block)["learner"])
    assert settings.vllm == VllmSettings() and settings.engine == "vllm"
    assert vllm_check.RANGE in page
