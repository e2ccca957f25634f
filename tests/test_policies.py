"""Several policies in one run: each is trained on its own calls for its own rewards, and a frozen one stays as it was,
bit for bit."""

from __future__ import annotations

import asyncio
import functools
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from lightningrl.backends import Backend
from lightningrl.errors import ConfigError
from lightningrl.plugins import load_plugins
from lightningrl_client.recipe_file import load_recipe
from lightningrl_training.build import Parts
from lightningrl_training.progress import LineProgress
from lightningrl_training.run_folder import RunFolder
from lightningrl_training.session import train_run

AGENT = """
from openai import OpenAI

client = OpenAI()


def ask(model, text):
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}]).choices[0].message.content or ""


def answer(task):
    draft = ask("writer", task)
    return {"draft": draft, "verdict": ask("critic", "Judge: " + draft)}
"""
DATA = """
def tasks():
    return [{"id": f"t{number}", "input": f"task {number}"} for number in range(4)]


def long_draft(task, output, trajectory):
    return float(len(output["draft"]))


def short_verdict(task, output, trajectory):
    return -float(len(output["verdict"]))
"""
RECIPE = """
agent = "agent.py:answer"
[tasks]
train = "data.py:tasks"
[policy]
name = "writer"
model = "tiny"
[policies.critic]
model = "tiny"
[roles]
writer = {{ model = "writer" }}
critic = {{ model = "critic" }}
[rewards.long_draft]
use = "data.py:long_draft"
agents = ["writer"]
[rewards.short_verdict]
use = "data.py:short_verdict"
agents = ["critic"]
[loop]
steps = 2
tasks_per_step = 2
group_size = 4
checkpoint_every = 1
[sampling]
max_tokens = 8
[learner]
learning_rate = 1e-3
threads = 1
"""


@pytest.fixture
def recipe_file(tiny_policy: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_policy, tmp_path / "tiny")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "data.py").write_text(DATA)
    (tmp_path / "recipe.toml").write_text(RECIPE.format())
    return tmp_path / "recipe.toml"


class Run:
    """A whole run in this process, with its backends at hand."""

    def __init__(self, recipe_file: Path, run: Path) -> None:
        self.recipe_file = recipe_file
        self.run = run
        self.weights: dict[str, dict[str, torch.Tensor]] = {}
        self.said = io.StringIO()
        """What the run told whoever started it."""

    def train(self, **settings: Any) -> None:
        plugins = load_plugins()
        if (self.run / "run.json").is_file():
            folder, recipe = RunFolder.resume(self.run, settings)
        else:
            recipe = load_recipe(self.recipe_file, settings)
            folder = RunFolder.create(self.run, recipe, str(self.recipe_file), settings, models={})
        parts = Parts.build(recipe, plugins)
        for name, build in parts.backends.items():
            parts.backends[name] = functools.partial(self._build, name, build)  # type: ignore[index]
        with LineProgress(Console(file=self.said, width=400)) as progress:
            asyncio.run(train_run(recipe, parts, plugins, folder, progress, lambda address: None))
        folder.close()

    def _build(self, name: str, build: Callable[[], Backend]) -> Backend:
        """As the run builds it; what it serves at its end is kept."""
        built = build()
        backend: Any = built
        close = built.close

        def keep() -> None:
            self.weights[name] = {key: value.detach().clone() for key, value in backend.learner.parameters.items()}
            close()

        backend.close = keep
        return built

    def is_untouched(self, name: str) -> bool:
        start = load_file(self.recipe_file.parent / "tiny" / "model.safetensors")
        served = self.weights[name]
        assert served, "no weights to compare"
        return all(torch.equal(value, start[key]) for key, value in served.items() if key in start)


@pytest.mark.slow
def test_a_frozen_policy_stays_as_it_was_bit_for_bit_while_the_other_learns(recipe_file: Path, tmp_path: Path) -> None:
    for frozen, key in (("critic", "policies.critic.trainable"), ("writer", "policy.trainable")):
        run = Run(recipe_file, tmp_path / f"frozen-{frozen}")
        run.train(**{key: False})
        (trained,) = {"writer", "critic"} - {frozen}
        assert run.is_untouched(frozen)
        assert not run.is_untouched(trained)


@pytest.mark.slow
def test_both_policies_go_on_from_their_own_weights_after_a_stop(recipe_file: Path, tmp_path: Path) -> None:
    run = Run(recipe_file, tmp_path / "run")
    run.train(**{"loop.steps": 1})
    before = dict(run.weights)
    assert not run.is_untouched("writer") and not run.is_untouched("critic")
    run.train(**{"loop.steps": 1})
    for name in ("writer", "critic"):
        assert all(torch.equal(value, before[name][key]) for key, value in run.weights[name].items()), (
            "resumed from other weights"
        )
    run.train(**{"loop.steps": 2})
    for name in ("writer", "critic"):
        assert any(not torch.equal(value, before[name][key]) for key, value in run.weights[name].items()), (
            "learned nothing more"
        )


@pytest.mark.slow
def test_adapters_of_two_policies_on_one_base_go_on_from_their_own_weights(recipe_file: Path, tmp_path: Path) -> None:
    run = Run(recipe_file, tmp_path / "run")
    run.train(**{"loop.steps": 1, "learner.lora": True})
    assert "frozen weights shared with 'critic'" in run.said.getvalue()
    assert "frozen weights shared with 'writer'" in run.said.getvalue()
    before = dict(run.weights)
    assert all(before.values()) and any(
        not torch.equal(value, before["critic"][key]) for key, value in before["writer"].items()
    )
    run.train(**{"loop.steps": 1})
    for name in ("writer", "critic"):
        assert all(torch.equal(value, before[name][key]) for key, value in run.weights[name].items()), "resumed others"
    run.train(**{"loop.steps": 2})
    for name in ("writer", "critic"):
        assert any(not torch.equal(value, before[name][key]) for key, value in run.weights[name].items()), "stood still"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"policy.name": "critic"}, "two policies are named 'critic'"),
        (
            {"policies.other": {"model": "tiny", "agents": ["w"]}, "policies.critic.agents": ["w"]},
            "role 'w' is given to two policies",
        ),
        ({"policy.trainable": False, "policies.critic.trainable": False}, "there is nothing to train"),
        ({"policies.critic.model": "./nowhere"}, "policy 'critic': no folder './nowhere'"),
        ({"policies.critic.learner": {"learning_rat": 1}}, "no setting 'learning_rat'; did you mean 'learning_rate'"),
        ({"policies.critic.trainabel": False}, "unknown key 'policies.critic.trainabel'"),
        ({"policies.a/b": {"model": "tiny"}}, "policies"),
        ({"credit.compare": "role", "roles": {}}, "[roles.NAME]"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(recipe_file: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Parts.build(load_recipe(recipe_file, change), load_plugins())
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
