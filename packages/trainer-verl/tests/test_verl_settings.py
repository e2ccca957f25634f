"""What cannot run is refused in one sentence before anything heavy starts: settings, recipes, versions, machines,
clusters."""

from __future__ import annotations

import contextlib
import importlib.metadata
import socket
from pathlib import Path
from typing import Any

import pytest

from lightningrl.errors import BackendError, ConfigError
from lightningrl.recipe import Recipe
from lightningrl_verl.ray_connection import check_gcs
from lightningrl_verl.recipe_check import check_companions, check_recipe, check_versions
from lightningrl_verl.seams import check_seams
from lightningrl_verl.settings import Settings
from lightningrl_verl.verl_config import build_config


def recipe(**tables: Any) -> Recipe:
    base: dict[str, Any] = {
        "agent": "agent.py:answer",
        "tasks": {"train": "agent.py:tasks"},
        "policy": {"model": "tiny"},
        "rewards": {"r": {"use": "agent.py:r"}},
        "backend": "verl",
    }
    return Recipe.model_validate({**base, **tables})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"mode": "fast"}, r"mode is 'fast'; choose 'sync', 'colocate_async' or 'separate_async'"),
        ({"mode": "separate_async"}, "gives the replicas GPUs of their own; set rollout_nodes"),
        (
            {"rollout_nodes": 1, "rollout_gpus_per_node": 1},
            "are for mode 'separate_async', the mode is 'sync'; remove them",
        ),
        ({"gpus_per_node": 8, "tensor_parallel": 3}, "8 GPUs for the replicas do not divide into replicas of 3"),
        ({"schedule": "cosine"}, "needs to know where it ends; set total_steps"),
        ({"learning_rate": -1}, "learning_rate is -1; use a number of at least 0"),
        ({"lora": {"rang": 4}}, "lora has no setting 'rang'"),
        ({"critic": {"lambda": 1}}, "critic has no setting 'lambda'; it takes: gamma, lam, learning_rate, model"),
        ({"loss": "dpo"}, "loss is 'dpo'; choose"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "kl_estimator 'k1' puts the KL into the reward, .* set 'k2'"),
        ({"verl": {"algorithm": {"use_kl_in_reward": True}}}, "takes the KL off advantages that are weighed already"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Settings(policy="tiny", **settings)


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"sampling": {"top_p": 0.9}}, "train with top_p = 1 and top_k = 0"),
        ({"sampling": {"temperature": 0.0}}, "train with a temperature above 0"),
        ({"learner": {"kl_coef": 0.1}, "samples": {"aggregation": "rollout_mean"}}, "verl weighs the KL by token"),
        (
            {"learner": {"kl_coef": 0.1}, "loop": {"max_staleness": 1}, "samples": {"aggregation": "token_mean"}},
            "verl does not weigh a token's KL by its importance, .* set learner.importance_cap = 0",
        ),
        (
            {"learner": {"kl_coef": 0.1, "importance_cap": 2.0}, "samples": {"aggregation": "token_mean"}},
            "verl does not weigh a token's KL by its importance",
        ),
        ({"backends": {"verl": {"critic": {}}}}, "set samples.rows = 'call'"),
        ({"backends": {"verl": {"critic": {}}}, "samples": {"rows": "call"}}, "set credit.use = 'reinforce'"),
    ],
)
def test_recipes_that_verl_cannot_honour(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_recipe(recipe(**tables))


OWN = {
    "proportional": "-(batch.logprobs - batch.old_logprobs).exp() * batch.advantages",
    "of_signs": "-(batch.logprobs - batch.old_logprobs).exp() * batch.advantages.sign()",
}


@pytest.mark.parametrize("aggregation", ["rollout_mean", "token_mean"])
@pytest.mark.parametrize("loss", OWN)
def test_a_users_loss_that_is_not_proportional_needs_equal_weights(tmp_path: Path, loss: str, aggregation: str) -> None:
    lines = [f"def {name}(batch):\n    return TokenLosses(losses={formula})\n" for name, formula in OWN.items()]
    (tmp_path / "verl_losses_of_ours.py").write_text(
        "\n".join(["from lightningrl_torch.losses import TokenLosses\n", *lines])
    )
    asked = recipe(
        learner={"loss": f"verl_losses_of_ours.py:{loss}"}, samples={"aggregation": aggregation}, folder=tmp_path
    )
    is_wrong = loss == "of_signs" and aggregation == "rollout_mean"
    sentence = "is not proportional to the advantages, .* set samples.aggregation = 'token_mean', not 'rollout_mean'"
    with pytest.raises(ConfigError, match=sentence) if is_wrong else contextlib.nullcontext():
        check_recipe(asked)
    assert Settings(policy="tiny", **asked.backend_options).is_averaged is (loss == "of_signs")


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("actor_rollout_ref.rollout.gpu_memory_utilisation", "did you mean 'gpu_memory_utilization'"),
        ("actor_rollout_ref.rolout.n", "verl has no setting 'actor_rollout_ref.rolout.n'; did you mean 'rollout'"),
        ("trainer.nnodes", "made by LightningRL from the recipe; remove it"),
        ("data.train_files", "made by LightningRL from the recipe; remove it"),
    ],
)
def test_verl_settings_are_checked_against_verls_own_config(policy: str, key: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_config(Settings(policy=policy, verl={key: 1}), context_length=128, cpu=True)


def test_verl_settings_reach_verl_as_tables_or_dotted_names(policy: str) -> None:
    table = {
        "actor_rollout_ref": {"rollout": {"max_num_seqs": 7, "engine_kwargs": {"vllm": {"block_size": 32}}}},
        "trainer.balance_batch": False,
    }
    config = build_config(Settings(policy=policy, verl=table), context_length=128, cpu=True)
    assert config.actor_rollout_ref.rollout.max_num_seqs == 7
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.block_size == 32
    assert config.trainer.balance_batch is False


@pytest.mark.parametrize(("estimator", "name"), [("k2", "k2"), ("k3", "low_var_kl")])
def test_verl_has_a_name_of_its_own_for_each_kl_estimate(policy: str, estimator: Any, name: str) -> None:
    config = build_config(Settings(policy=policy, kl_coef=0.1, kl_estimator=estimator), context_length=128, cpu=True)
    assert config.actor_rollout_ref.actor.kl_loss_type == name


def test_verls_own_objection_is_passed_on(policy: str) -> None:
    with pytest.raises(ConfigError, match=r"verl refuses its settings: .*ppo_micro_batch_size"):
        build_config(
            Settings(policy=policy, verl={"actor_rollout_ref.actor.use_dynamic_bsz": False}),
            context_length=128,
            cpu=True,
        )


@pytest.mark.parametrize(
    ("versions", "sentence"),
    [
        ({"verl": "0.8.0", "TransferQueue": "0.1.11"}, r"was made for verl <0.10,>=0.9.1 and 0.8.0 is installed"),
        ({"verl": "0.9.1", "TransferQueue": "0.2.0"}, "was made for TransferQueue"),
        ({"TransferQueue": "0.1.11"}, "needs verl .*, which is not installed; pip install"),
        ({"verl": "0.9.1", "TransferQueue": "0.1.11"}, "engine 'vllm' needs vLLM, which is not installed"),
    ],
)
def test_versions_that_do_not_fit_are_named(versions: dict[str, str], sentence: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    with pytest.raises(BackendError, match=sentence):
        check_versions(Settings(policy="tiny"), version)


VERL_REQUIRES = [
    "transformers!=5.6.0,<5.11,>=5.5.3",
    'transformers; extra == "verl-core"',
    'vllm==0.24.0; extra == "vllm"',
    'transformers==5.9.0; extra == "vllm"',
]


@pytest.mark.parametrize(
    ("vllm", "transformers", "sentence"),
    [
        (
            "0.32.0",
            "5.9.0",
            r"verl 0.9.1 was made for vllm ==0.24.\* and 0.32.0 is installed; pip install 'verl\[vllm\]'",
        ),
        ("0.24.0", "5.19.0", r"verl 0.9.1 was made for transformers .*<5.11.* and 5.19.0 is installed"),
        ("0.24.1+cu129", "5.10.1", None),
    ],
)
def test_on_gpus_vllm_and_transformers_are_those_that_verl_names(
    vllm: str, transformers: str, sentence: str | None
) -> None:
    versions = {"verl": "0.9.1", "vllm": vllm, "transformers": transformers}
    with contextlib.nullcontext() if sentence is None else pytest.raises(BackendError, match=sentence):
        check_companions(Settings(policy="tiny"), versions.__getitem__, lambda name: VERL_REQUIRES)


@pytest.mark.parametrize("name", ["vllm", "transformers"])
def test_the_installed_verl_names_them(name: str) -> None:
    versions = {"verl": "0.9.1", "vllm": "0.24.0", "transformers": "5.9.0"}
    check_companions(Settings(policy="tiny"), versions.__getitem__)
    with pytest.raises(BackendError, match=f"was made for {name} .* and 0.1 is installed"):
        check_companions(Settings(policy="tiny"), {**versions, name: "0.1"}.__getitem__)


def test_without_a_gpu_and_without_the_support_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightningrl_verl.recipe_check.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("lightningrl_verl.recipe_check.has_gpu", lambda: False)
    with pytest.raises(BackendError, match=r"found no GPU; run where there is one, .* use backend 'torch'"):
        check_recipe(recipe())


def test_a_layout_of_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightningrl_verl.recipe_check.has_gpu", lambda: True)
    with pytest.raises(BackendError, match=r"asks for 64 GPUs and this machine has \d+; lower gpus_per_node"):
        check_recipe(recipe(backends={"verl": {"gpus_per_node": 64}}))
    with pytest.raises(BackendError, match="asks for 2 nodes, and no Ray cluster is named"):
        check_recipe(recipe(backends={"verl": {"nodes": 2}}))


def test_an_unreachable_cluster_is_told_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"no Ray cluster answers at '{address}'.*mend backends.verl.address"):
        check_gcs(address, setting="backends.verl.address")


def test_a_model_that_vllm_cannot_serve(tmp_path: Path, policy: str) -> None:
    import json
    import shutil

    from lightningrl_verl.policy import read_policy

    shutil.copytree(policy, tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps({**config, "architectures": ["OddForCausalLM"]}))
    with pytest.raises(BackendError, match=r"vLLM cannot serve policy .*odd'.*\(OddForCausalLM\)"):
        read_policy(Settings(policy=str(tmp_path / "odd")))
    with pytest.raises(BackendError, match="context_length is 100000 but policy"):
        read_policy(Settings(policy=policy, context_length=100_000))


def test_a_seam_that_verl_has_moved_is_named() -> None:
    check_seams()
    with pytest.raises(BackendError, match=r"has moved a seam: verl.trainer.ppo.v1.get_trainer_class is gone"):
        check_seams((("verl.trainer.ppo.v1", "get_trainer_class", ()),))
    with pytest.raises(BackendError, match="get_trainer_cls takes no 'kind' any more"):
        check_seams((("verl.trainer.ppo.v1", "get_trainer_cls", ("kind",)),))
