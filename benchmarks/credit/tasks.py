"""The games as tasks of an ordinary agent: it calls a model at an OpenAI-compatible endpoint, and knows nothing of
training.

    agent = "tasks.py:play"
    tasks.train = "tasks.py:train_tasks", options.game = "guess"
    rewards.won.use = "tasks.py:won"

`true_values(backend, task)` counts out what each state of a task is worth under the backend's present weights,
`states(task, output)` says which states a rollout went through: the k-th is the one in which its k-th call was made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from games import GAMES, State, walk
from openai import OpenAI
from values import TrueValues, true_values

import lightningrl
from lightningrl.types import Task, Trajectory

__all__ = ["TrueValues", "held_out_tasks", "play", "states", "train_tasks", "true_values", "won"]

client = functools.cache(OpenAI)  # made when first called: tests and the trainer read tasks from this file, too


def play(task: Mapping[str, Any]) -> dict[str, Any]:
    """Play `task["case"]` of `task["game"]`. Returns the outcome and what was said, a token that is no word as None."""
    game, case = GAMES[task["game"]], task["case"]
    state: State | None = game.start(case)
    words: list[str | None] = []
    outcome = 0.0
    while state is not None:
        messages: Any = [{"role": "user", "content": game.observe(case, state)}]
        reply = client().chat.completions.create(model="player", messages=messages, max_tokens=1)
        word = reply.choices[0].message.content
        words.append(word if word in game.words else None)
        step = game.act(case, state, words[-1])
        if step.tool is not None:
            with lightningrl.tool(step.tool, word, call=reply.id) as seen:
                seen.status, seen.result = step.status, step.result
        state, outcome = step.state, step.outcome
    return {"outcome": outcome, "words": words}


def won(task: Task, output: Any, trajectory: Trajectory) -> float:
    """The reward: 1 = won."""
    return float(output["outcome"])


def states(task: Task, output: Mapping[str, Any]) -> list[State]:
    """The state before each call of a rollout, from what `play` returned."""
    return [state for state, _, _ in walk(GAMES[task.input["game"]], task.input["case"], output["words"])]


def train_tasks(game: str) -> Iterator[Task]:
    return (task for task in _tasks(game) if not GAMES[game].is_held_out(task.input["case"]))


def held_out_tasks(game: str) -> Iterator[Task]:
    return (task for task in _tasks(game) if GAMES[game].is_held_out(task.input["case"]))


def _tasks(game: str) -> Iterator[Task]:
    for number, case in enumerate(GAMES[game].cases()):
        answer = None if (secret := case.get("secret")) is None else str(secret)
        yield Task(id=f"{game}-{number}", input={"game": game, "case": dict(case)}, answer=answer)
