"""The README's recipe, with a program in the place of verifiers' interpreter: tasks, the agent in a worker, the score."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lightningrl.errors import ConfigError
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import Outcome
from lightningrl_client.recipe_file import load_recipe, with_settings
from lightningrl_client.runtime.task_sources import worker_agent
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_testing.whole_path import whole_path
from lightningrl_training.build import build_credit
from lightningrl_training.task_sources import build_source, draw_sets

HERE = Path(__file__).parent
README = (HERE.parent / "README.md").read_text(encoding="utf-8")


def write_recipe(folder: Path) -> Recipe:
    (block,) = re.findall(r"^```toml title=recipe.toml\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    program = folder / ".venv-verifiers" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "line_server.py"}" "{folder}"\n')
    program.chmod(0o755)
    (folder / "recipe.toml").write_text(block)
    return load_recipe(folder)


async def test_the_readmes_recipe_draws_its_tasks_plays_them_and_scores_each(tmp_path: Path) -> None:
    recipe = with_settings(write_recipe(tmp_path), {"tasks.train.count": 1000})
    source = build_source(recipe, load_plugins())
    assert source is not None
    sets = draw_sets(recipe, source)
    assert (len(sets.train), len(sets.validation)) == (1000, 50)
    assert {task.input for task in sets.train}.isdisjoint(task.input for task in sets.validation)
    evaluator, _ = build_credit(recipe, load_plugins())
    engine = ScriptedEngine(tiny_tokenizer())
    task = sets.train[0]
    engine.enqueue(str(task.answer))
    async with whole_path(tmp_path, worker_agent(recipe), base_dir=tmp_path, engine=engine) as path:
        (trajectory,) = await path.run_tasks({"r": task})
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    assert trajectory.output["messages"][-1] == {"role": "assistant", "content": str(task.answer)}
    assert (await evaluator.rewards.score(trajectory)).total == 1.0


def test_an_option_that_there_is_not_is_named_with_the_nearest(tmp_path: Path) -> None:
    recipe = with_settings(write_recipe(tmp_path), {"tasks.options.tasket": "any"})
    with pytest.raises(ConfigError, match="'verifiers' has no setting 'tasket'; did you mean 'taskset'"):
        build_source(recipe, load_plugins())
