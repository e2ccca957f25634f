"""GEM's games: each has dice of its own, also while others are played; a rollout is scored by a replay."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from sizes import PATIENCE_S

from lightningrl.errors import ConfigError
from lightningrl.loading import load_callable
from lightningrl.plugins import load_plugins
from lightningrl_client.recipe_file import load_recipe
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_client.runtime.task_sources import worker_agent
from lightningrl_testing.scripted_server import ScriptedServer
from lightningrl_training.task_sources import build_source, draw_sets

pytest.importorskip("gem", reason="pip install --no-deps gem-llm==0.1.0")
EXAMPLE = Path(__file__).resolve().parents[1]
MINES = "game:Minesweeper-v0-easy"
FIRST = r"\boxed{reveal 2 2}"


def game_of(name: str, seed: int) -> Any:
    return load_callable("games.py:Game", EXAMPLE)(name, seed)


def mines_of(seed: int, between: int | None) -> str:
    """The board after the first move, with another game begun before it."""
    game = game_of(MINES, seed)
    if between is not None:
        game_of(MINES, between).move(FIRST)
    game.move(FIRST)
    return str(game.shown)


def test_a_game_begun_between_two_moves_does_not_change_this_one() -> None:
    """Mines are laid at the first move, by Python's global dice: a lock around the start alone is too little."""
    assert mines_of(7, None) == mines_of(7, 8) == mines_of(7, 9)
    assert mines_of(7, None) != mines_of(8, None)
    import gem

    boards = set()
    for between in (None, 1, 2):
        bare = gem.make(MINES)
        random.seed(7)
        bare.reset(seed=7)
        if between is not None:
            gem.make(MINES).reset(seed=between)
        boards.add(str(bare.step(FIRST)[4]))
    assert len(boards) > 1, "GEM has dice of each game's own now: the guard of games.py is not needed"


def test_the_dice_of_everybody_else_are_as_they_were() -> None:
    random.seed(3)
    before = random.getstate()
    game_of(MINES, 1).move(FIRST)
    assert random.getstate() == before


def test_in_eight_threads_each_game_is_the_one_of_its_seed() -> None:
    name = "game:Mastermind-v0-hard"
    alone = {seed: game_of(name, seed)._env.game_code for seed in range(40)}
    played: list[tuple[int, Any]] = []

    def play(first: int) -> None:
        for seed in [*range(first, 40), *range(first)]:
            played.append((seed, game_of(name, seed)._env.game_code))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=play, args=(first,)) for first in range(0, 40, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(played) == 320 and all(alone[seed] == code for seed, code in played)


async def test_eight_rollouts_at_concurrency_four_earn_what_their_replays_earn(tmp_path: Path) -> None:
    recipe = load_recipe(EXAMPLE / "recipe.toml")
    source: Any = build_source(recipe, load_plugins())
    sets = draw_sets(recipe, source)
    assert (len(sets.train), len(sets.validation)) == (200, 40)
    assert sets.train == draw_sets(recipe, source).train
    tasks = sets.train[:8]

    def guess(body: dict[str, Any]) -> dict[str, Any]:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        return {"content": rf"\boxed{{{2 * turn + 3}}}"}

    with ScriptedServer(guess, hold_until=4) as server:
        for task in tasks:
            server.add_rollout(task.id, task.input, timeout_s=PATIENCE_S)
        async with WorkerPool(
            server.url,
            server.run_key,
            worker_agent(recipe),
            workers=1,
            concurrency=4,
            base_dir=EXAMPLE,
            log_folder=tmp_path,
        ):
            await server.wait_finished(timeout_s=PATIENCE_S)
        results = [server.result(task.id) or {} for task in tasks]
    assert [result["outcome"] for result in results] == ["succeeded"] * 8, results
    rewards = [source.reward(task, result["output"]) for task, result in zip(tasks, results, strict=True)]
    assert len(set(rewards)) > 1 and max(rewards) == 1.0, rewards
    assert source.reward(tasks[0], []) == 0.0 and source.reward(tasks[0], None) == 0.0


def test_a_game_that_there_is_not_is_a_sentence() -> None:
    source = load_callable("games.py:GemGames", EXAMPLE)(name="game:Chess")
    with pytest.raises(ConfigError, match="GEM has no game 'game:Chess'"):
        next(source.tasks("train", seed=1, count=1))
