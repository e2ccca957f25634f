"""The README's recipe: its tasks drawn, its agent played by workers, its reward; what is wrong in it, in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
StartServer = Callable[..., str]


def blocks() -> dict[str, str]:
    return dict(re.findall(r"^```\w+ title=(\S+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))


def write_recipe(folder: Path, url: str, use: str = "openenv") -> Recipe:
    for name, text in blocks().items():
        (folder / name).write_text(text.replace('use = "openenv"', f'use = "{use}"'))
    return with_settings(load_recipe(folder), {"tasks.options.url": url})


async def test_the_readmes_recipe_draws_its_tasks_plays_them_and_rewards_each(
    tmp_path: Path, start_server: StartServer
) -> None:
    recipe = write_recipe(tmp_path, start_server())
    source = build_source(recipe, load_plugins())
    assert source is not None
    sets = draw_sets(recipe, source)
    assert (len(sets.train), len(sets.validation)) == (200, 50)
    evaluator, _ = build_credit(recipe, load_plugins())
    engine = ScriptedEngine(tiny_tokenizer())
    engine.enqueue(f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'a': 1, 'b': 2}})}\n</tool_call>", "3")
    async with whole_path(tmp_path, worker_agent(recipe), base_dir=tmp_path, engine=engine) as path:
        (trajectory,) = await path.run_tasks({"r": sets.train[0]})
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    assert trajectory.reported == {"openenv": pytest.approx(0.1)}
    scored = await evaluator.rewards.score(trajectory)
    assert scored.total == pytest.approx(0.1)


async def test_an_agent_of_ones_own_opens_the_session_itself(tmp_path: Path, start_server: StartServer) -> None:
    recipe = write_recipe(tmp_path, start_server(), use="my_source.py:Adder")
    source = build_source(recipe, load_plugins())
    assert source is not None
    (task,) = source.tasks("train", seed=1, count=1)
    async with whole_path(tmp_path, worker_agent(recipe), base_dir=tmp_path) as path:
        (trajectory,) = await path.run_tasks({"r": task})
    assert trajectory.output == 3, trajectory.error
    assert trajectory.reported == {"openenv": pytest.approx(0.1)}


def test_an_option_that_there_is_not_is_named_with_the_nearest(tmp_path: Path) -> None:
    recipe = with_settings(write_recipe(tmp_path, "http://127.0.0.1:1"), {"tasks.options.promt": "question"})
    with pytest.raises(ConfigError, match="'openenv' has no setting 'promt'; did you mean 'prompt'"):
        build_source(recipe, load_plugins())
