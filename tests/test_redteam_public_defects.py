"""The red team finds four defects of public tasks: three of reasoning-gym 0.1.25, and BFCL's tasks that pass by doing
nothing, in a small reconstruction of its check of final states."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lightningrl.recipe import Recipe
from lightningrl.types import Task, Trajectory
from lightningrl_training.redteam import RedTeamReport, Severity
from lightningrl_training.redteam.attack import attack_recipe

reasoning_gym = pytest.importorskip("reasoning_gym")


def attack(world: Sequence[Task], reward: Callable[..., Any], **options: Any) -> RedTeamReport:
    recipe = Recipe.model_validate(
        {
            "agent": len,
            "tasks": {"train": lambda: list(world)},
            "policy": {"model": "nobody"},
            "rewards": {"right": {"use": reward}},
        }
    )
    return asyncio.run(attack_recipe(recipe, **options))


def attack_generators(*names: str) -> RedTeamReport:
    """Attack the checks of the library itself, on the first entries of seed 5."""
    data = {name: reasoning_gym.create_dataset(name, seed=5, size=4) for name in names}
    tasks = [
        Task(id=f"{name} {number}", input=str(entry["question"]), answer=entry["answer"])
        for name in names
        for number, entry in enumerate(data[name])
    ]

    def score(task: Task, output: Any, trajectory: Trajectory) -> float:
        name, number = task.id.split()
        return float(data[name].score_answer(answer=output, entry=copy.deepcopy(data[name][int(number)])))

    return attack(tasks, score)


def test_nonsense_is_paid_by_the_game_of_life() -> None:
    report = attack_generators("game_of_life_halting")
    assert report.is_bad
    assert "nonsense words earns as much as gold" in {finding.sentence for finding in report.findings}


@pytest.mark.parametrize("name", ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"])
def test_a_generator_without_gold_answers_is_named(name: str) -> None:
    alone = attack_generators(name)
    assert "no task has an answer, so that only outputs without worth could be tried" in {
        finding.sentence for finding in alone.findings
    }
    beside = attack_generators("leg_counting", name)
    (finding,) = (finding for finding in beside.findings if finding.sentence.startswith("4 of 8 tasks have no answer"))
    assert finding.severity is Severity.MEDIUM


def test_a_check_that_raises_on_text_is_named() -> None:
    report = attack_generators("prime_factorization")
    assert report.is_bad
    (finding,) = (finding for finding in report.findings if finding.mutator == "failure")
    assert "the reward fails on nonsense words" in finding.sentence
    assert "ValueError" in finding.sentence


Call = dict[str, Any]


def replay(calls: Any, files: dict[str, str]) -> dict[str, str]:
    """The file system of a small world after some calls; what is no call does nothing."""
    state = dict(files)
    for call in calls if isinstance(calls, list) else ():
        match call:
            case {"tool": "write", "name": str(name), "text": str(text)}:
                state[name] = text
            case {"tool": "remove", "name": str(name)}:
                state.pop(name, None)
    return state


def final_state(task: Task, output: Any, trajectory: Trajectory) -> float:
    """BFCL's check, without its check of responses."""
    files = task.input["files"]
    return float(replay(output, files) == replay(task.answer, files))


def worlds() -> list[Task]:
    """200 tasks, 11 of which only ask for what is there."""
    lot, tasks = random.Random(7), []
    for number in range(200):
        read: list[Call] = [{"tool": "read", "name": "notes.txt"}]
        written: list[Call] = [{"tool": "write", "name": f"{lot.randrange(10**6)}.txt", "text": f"{number}"}]
        files = {"notes.txt": str(lot.random())}
        calls = read if number % 18 == 9 else [*read, *written]
        tasks.append(Task(id=f"world-{number}", input={"files": files, "ask": "…"}, answer=calls))
    return tasks


def test_tasks_that_pass_by_doing_nothing_are_counted() -> None:
    report = attack(worlds(), final_state, tasks=200, only=["nothing"])
    (finding,) = (finding for finding in report.findings if finding.output == "[]")
    assert finding.sentence == "an empty list earns as much as gold"
    assert (finding.tasks, finding.tried, finding.severity) == (11, 200, Severity.HIGH)
    assert "take out the tasks where doing nothing is right" in finding.advice
