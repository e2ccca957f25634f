"""Which rows a learner is given, and which it leaves out: core builds them all, each learner knows its own loss."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightningrl.advantages import teaching_rows
from lightningrl.errors import ConfigError
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import Sample
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.testing import make_sample, save_policy
from lightningrl_training.build import Parts

VERL = Path(__file__).parents[1] / "packages" / "trainer-verl" / "src"
REWARDS = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
DATA = """
def tasks():
    return [{"id": "t", "input": 1}]

def right(task, output, trajectory):
    return float(output)

def answer(number):
    return number
"""
PPO: dict[str, Any] = {
    "backend": "verl",
    "backends": {"verl": {"critic": {"learning_rate": 1e-5, "lam": 0.95}}},
    "credit": {"use": "reinforce"},
    "samples": {"rows": "call"},
}
"""The recipe of docs/how-to/verl.md."""


@pytest.fixture
def verl() -> Iterator[Any]:
    """`lightningrl_verl`, installed or not: what is used of it here imports neither Ray nor verl."""
    is_installed = importlib.util.find_spec("lightningrl_verl") is not None
    if not is_installed:
        sys.path.insert(0, str(VERL))
    try:
        yield importlib.import_module
    finally:
        if not is_installed:
            sys.path.remove(str(VERL))
            for name in [name for name in sys.modules if name.partition(".")[0] == "lightningrl_verl"]:
                del sys.modules[name]


def make_recipe(folder: Path, **tables: Any) -> Recipe:
    (folder / "rows_tasks.py").write_text(DATA, encoding="utf-8")
    return Recipe.model_validate(
        {
            "agent": "rows_tasks.py:answer",
            "tasks": {"train": "rows_tasks.py:tasks"},
            "policy": {"model": "org/model", "name": "policy"},
            "rewards": {"right": {"use": "rows_tasks.py:right"}},
            "folder": folder,
            **tables,
        }
    )


async def build_rows(recipe: Recipe, *modules: Any) -> list[Sample]:
    """What core makes of eight rollouts of one call each, in two groups."""
    plugins = load_plugins()
    for module in modules:
        plugins.register(module)
    parts = Parts.build(recipe, plugins, will_run=False)
    trajectories = [
        make_trajectory(f"r{i}", [make_transition(f"r{i}/0")], reward=None, group_id=f"g{i // 4}", output=reward)
        for i, reward in enumerate(REWARDS)
    ]
    return list(parts.scorer.build(parts.scorer.credit(await parts.evaluator.reward(trajectories))).samples)


async def test_ppo_with_a_critic_learns_from_calls_of_reward_zero_too(verl: Any, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, **PPO)
    installed = [] if "verl" in load_plugins().trainers else [verl("lightningrl_verl.plugin")]
    samples = await build_rows(recipe, *installed)
    settings = verl("lightningrl_verl.settings").Settings(policy="org/model", **recipe.backend_options)
    rows = verl("lightningrl_verl.rows")
    chosen = rows.choose_samples(samples, settings)
    assert [float(sample.advantages.max()) for sample in chosen] == list(REWARDS)
    assert len(rows.build_rows(chosen, "p", 1, as_reward=True).keys) == 8


@pytest.mark.parametrize(
    ("options", "is_whole"),
    [
        ({}, False),
        ({"kl_coef": 0.001}, True),
        ({"verl": {"actor_rollout_ref": {"actor": {"entropy_coeff": 0.01}}}}, True),
        ({"verl": {"actor_rollout_ref.actor.use_kl_loss": True}}, True),
        ({"verl": {"algorithm.use_kl_in_reward": True}, "critic": {}}, True),
        ({"verl": {"actor_rollout_ref.actor.entropy_coeff": 0.0}}, False),
    ],
)
def test_verl_keeps_rows_without_advantage_where_its_loss_has_other_terms(
    verl: Any, options: dict[str, Any], is_whole: bool
) -> None:
    settings = verl("lightningrl_verl.settings").Settings(policy="org/model", **options)
    assert settings.learns_silent_rows is is_whole


def test_dynamic_sampling_would_leave_a_critics_zeros_out_so_it_is_refused(verl: Any, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, **PPO, loop={"dynamic_sampling": 2})
    with pytest.raises(
        ConfigError,
        match=r"learns from calls of reward 0, which loop\.dynamic_sampling = 2 would leave out; set it to 0",
    ):
        verl("lightningrl_verl.recipe_check").check_recipe(recipe)


async def test_rows_that_a_learner_leaves_out_change_no_weight_of_the_others(tmp_path: Path) -> None:
    samples = await build_rows(
        make_recipe(tmp_path, samples={"aggregation": "rollout_mean"}, credit={"use": "reinforce"})
    )
    assert len(samples) == 8
    chosen = teaching_rows(samples)
    assert [sample.rollout_id for sample in chosen] == ["r0", "r4"]
    for sample in chosen:
        np.testing.assert_allclose(sample.weights[sample.mask], 1 / 8 / 2)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_torch_learns_rows_without_advantage_only_with_a_kl(tmp_path: Path, kl_coef: float) -> None:
    backend = TorchBackend(policy=save_policy(tmp_path), device="cpu", threads=1, kl_coef=kl_coef)
    try:
        silent = replace(make_sample([1, 2, 3], [4, 5]), advantages=np.zeros(5, np.float32))
        report = backend.learn([silent])
        assert (report.policy_version, report.tokens) == ((1, 2) if kl_coef else (0, 0))
        assert backend.engine.info.version == report.policy_version
        taught = backend.learn([silent, make_sample([1, 2, 3], [4, 5])])
        assert taught.tokens == (4 if kl_coef else 2)
    finally:
        backend.close()
