"""The recipes of task sources: their data is right, their policies' demonstrations are what agents ask."""

from __future__ import annotations

import random
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lightningrl.plugins import load_plugins
from lightningrl_client.recipe_file import load_recipe, with_settings
from lightningrl_tasks_harbor import BoxSettings, open_box, read_task_folder, verify
from lightningrl_training.task_sources import build_source, draw_sets

EXAMPLE = Path(__file__).resolve().parents[1]
FOLDERS = runpy.run_path(str(EXAMPLE / "task_folders.py"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("worlds") / "folders"
    FOLDERS["write_folders"](place)
    return place


def test_a_folder_pays_for_its_own_command_alone(folders: Path) -> None:
    for kind in FOLDERS["COMMANDS"]:
        folder = read_task_folder(folders / "train" / f"{kind}-apple")
        earned = {}
        for other, command in FOLDERS["COMMANDS"].items():
            with open_box(folder, BoxSettings(box="unshare", trusted=True)) as opened:
                opened.box.run(
                    command.format("apple"), folder=opened.folder, environment=opened.environment, timeout_s=60
                )
                earned[other] = verify(folder, opened).rewards
        assert {other: list(each.values()) == [1.0] for other, each in earned.items()} == {
            other: other == kind for other in FOLDERS["COMMANDS"]
        }, earned


def test_the_recipes_draw_tasks_and_no_name_of_validation_is_trained(folders: Path) -> None:
    recipe = with_settings(load_recipe(EXAMPLE / "harbor.toml"), {"tasks.options.folder": str(folders)})
    source = build_source(recipe, load_plugins())
    assert source is not None
    sets = draw_sets(recipe, source)
    assert (len(sets.train), len(sets.validation)) == (60, 18)
    names = [{task.id.partition("-")[2] for task in each} for each in (sets.train, sets.validation)]
    assert not names[0] & names[1]


@pytest.mark.parametrize("name", ["openenv", "openenv_tools", "harbor", "reasoning_gym"])
def test_each_recipe_has_a_control_that_its_sweep_can_name(name: str) -> None:
    table: dict[str, Any] = tomllib.loads((EXAMPLE / f"{name}.toml").read_text(encoding="utf-8"))
    assert table["learner"]["learning_rate"] > 0 and table["validation"]["every"] <= table["loop"]["steps"]
    assert load_recipe(EXAMPLE / f"{name}.toml").agent == "tasks"


def test_demonstrators_are_mostly_wrong_and_sometimes_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    starters = runpy.run_path(str(EXAMPLE / "starters.py"))
    rng = random.Random(1)
    games = [starters["play"](rng) for _ in range(2000)]
    assert all(1 <= len(game) <= 2 and game[-1].messages[-1]["role"] == "assistant" for game in games)
    works = [starters["work"](rng, "apple", 0.7) for _ in range(200)]
    commands = {calls[0].messages[-1]["tool_calls"][0]["function"]["arguments"] for calls in works}
    assert len(commands) == 3
    guesses = [call.messages[-1]["content"] for game in games for call in game]
    assert 0.5 < guesses.count("3") / len(guesses) < 0.8, "mostly the habit"
    tool = {"type": "function", "function": starters["GUESS"]}
    called = [starters["play_by_tool"](random.Random(seed), tool) for seed in range(200)]
    assert [len(game) - 1 for game in called] == [len(starters["play"](random.Random(seed))) for seed in range(200)]
    assert all(game[-1].messages[-1]["content"] == "Done." for game in called)
