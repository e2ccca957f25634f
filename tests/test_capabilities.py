"""What a trainer backend declares is enforced: a recipe that asks for more is refused before anything heavy, and told
what there is."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightningrl.backends import Capabilities
from lightningrl.errors import ConfigError
from lightningrl.plugins import Plugin, PluginManager, hookimpl, load_plugins
from lightningrl.recipe import Recipe
from lightningrl_torch.losses import LOSSES
from lightningrl_torch.plugin import lightningrl_trainers
from lightningrl_training.build import Parts

VERL = Path(__file__).parents[1] / "packages" / "trainer-verl" / "src"
DATA = """
def tasks():
    return [{"id": "t", "input": 1}]

def right(task, output, trajectory):
    return float(output)

def answer(number):
    return number
"""


class Small:
    """A plugin with a backend that can do little and whose factory takes anything."""

    @hookimpl
    def lightningrl_trainers(self) -> Iterator[Plugin]:
        capabilities = Capabilities(
            losses=frozenset({"policy_gradient"}), devices=frozenset({"cpu"}), lora=False, reference_kl=False
        )
        yield Plugin(name="small", summary="", factory=lambda **options: options, capabilities=capabilities)


@pytest.fixture
def plugins() -> PluginManager:
    found = load_plugins()
    found.register(Small())
    return found


def make_recipe(folder: Path, **tables: Any) -> Recipe:
    (folder / "capable_tasks.py").write_text(DATA, encoding="utf-8")
    return Recipe.model_validate(
        {
            "agent": "capable_tasks.py:answer",
            "tasks": {"train": "capable_tasks.py:tasks"},
            "policy": {"model": "org/model", "name": "policy"},
            "rewards": {"right": {"use": "capable_tasks.py:right"}},
            "folder": folder,
            **tables,
        }
    )


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        ({"loss": "gspo"}, "learner.loss is 'gspo'"),
        ({"loss": "mine.py:loss"}, "learner.loss is '.*mine.py:loss'"),
        ({"device": "cuda"}, "learner.device is 'cuda'"),
        ({"lora": {"rank": 4}}, "learner.lora is {'rank': 4}"),
        ({"kl_coef": 0.1}, "learner.kl_coef is 0.1"),
        ({"critic": {}}, "learner.critic is {}"),
    ],
)
def test_what_a_backend_does_not_declare_is_refused(
    plugins: PluginManager, tmp_path: Path, learner: dict[str, Any], said: str
) -> None:
    (tmp_path / "mine.py").write_text("", encoding="utf-8")
    recipe = make_recipe(tmp_path, backend="small", learner=learner)
    with pytest.raises(
        ConfigError, match=f"{said}, which trainer backend 'small' does not have; it has: cpu, policy_gradient$"
    ):
        Parts.build(recipe, plugins)


def test_what_it_declares_is_taken(plugins: PluginManager, tmp_path: Path) -> None:
    learner = {"loss": "policy_gradient", "device": "cpu", "lora": None, "kl_coef": 0.0}
    parts = Parts.build(make_recipe(tmp_path, backend="small", learner=learner), plugins)
    options: Any = parts.backends["policy"]()
    assert options["loss"] == "policy_gradient"


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        (
            {"loss": "dpo"},
            "learner.loss is 'dpo', which trainer backend 'torch' .* it has: cpu, cuda, cispo, gspo, ppo_clip, reinforce, own losses, LoRA",
        ),
        ({"device": "tpu"}, "learner.device is 'tpu', which"),
        (
            {"critic": {"lam": 0.9}},
            "critic has no setting 'lam'; it takes: clip, coefficient, joint, learning_rate, model",
        ),
        ({"loss": "nowhere.py:loss"}, "no file '.*nowhere.py'; paths are relative to"),
        ({"loss": "capable_tasks.py:loss"}, "has no 'loss'; it has: answer, right, tasks"),
    ],
)
def test_torch_refuses_before_a_model_is_looked_for(
    plugins: PluginManager, tmp_path: Path, learner: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Parts.build(
            make_recipe(tmp_path, learner=learner, credit={"use": "turn_gae" if "critic" in learner else "grpo"}),
            plugins,
        )


def test_a_loss_beside_the_recipe_reaches_the_backend_by_its_whole_path(plugins: PluginManager, tmp_path: Path) -> None:
    (tmp_path / "capable_loss.py").write_text(
        "from lightningrl_torch.losses import ppo_clip as loss\n", encoding="utf-8"
    )
    recipe = make_recipe(tmp_path, learner={"loss": "capable_loss.py:loss"})
    factory: Any = Parts.build(recipe, plugins).backends["policy"]
    assert factory.keywords["loss"] == f"{tmp_path / 'capable_loss.py'}:loss"
    module = make_recipe(tmp_path, learner={"loss": "lightningrl_torch.losses:ppo_clip"})
    assert module.backend_options["loss"] == "lightningrl_torch.losses:ppo_clip"


def test_what_torch_declares_is_read_off_its_table_and_settings() -> None:
    (plugin,) = lightningrl_trainers()
    can = plugin.capabilities
    assert can is not None
    assert can.losses == set(LOSSES)
    assert can.devices == {"cpu", "cuda"}
    assert (can.lora, can.reference_kl, can.critic, can.own_losses, can.several_policies) == (
        True,
        True,
        True,
        True,
        True,
    )
    assert can.services == {"logprobs", "values"}


def test_verl_declares_the_same_losses_and_a_critic() -> None:
    is_installed = importlib.util.find_spec("lightningrl_verl") is not None
    if not is_installed:
        sys.path.insert(0, str(VERL))
    try:
        (plugin,) = importlib.import_module("lightningrl_verl.plugin").lightningrl_trainers()
    finally:
        if not is_installed:
            sys.path.remove(str(VERL))
            for name in [name for name in sys.modules if name.partition(".")[0] == "lightningrl_verl"]:
                del sys.modules[name]
    can = plugin.capabilities
    assert can.losses == set(LOSSES)
    assert (can.critic, can.several_policies) == (True, False)


def test_the_table_and_the_settings_import_no_torch() -> None:
    code = "import sys, lightningrl_torch.losses, lightningrl_torch.settings; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
